"""The queues of the site, opened at their first use: a command like `migrate` opens nothing."""

from functools import cache

from django.conf import settings

import penstock


@cache
def orders() -> penstock.Queue:
    broker = penstock.open(settings.PENSTOCK_BROKER)
    return broker.create_queue("orders", partitions=4, exist_ok=True)
