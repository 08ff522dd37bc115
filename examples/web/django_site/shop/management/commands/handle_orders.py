"""python manage.py handle_orders"""

from typing import Any

from django.core.management.base import BaseCommand
from django.db import close_old_connections

import penstock
from shop import queues


class Command(BaseCommand):
    help = "Handle orders until SIGTERM or Ctrl-C."

    def handle(self, *args: Any, **options: Any) -> None:
        penstock.Worker(queues.orders(), handle_order, concurrency=4).run()


def handle_order(item: penstock.Item) -> None:
    close_old_connections()  # as Django does at the beginning of a request
    print("charge", item.value["customer"], item.value["amount"], "for item", item.id)
