"""A queue worker in each web worker: gunicorn -w 4 -c gunicorn_worker_threads.py flask_app:app"""

from typing import Any

import penstock


def post_worker_init(web_worker: Any) -> None:
    """In each web worker, after the fork: a thread that was started before it would run in gunicorn's master only."""
    from flask_app import orders
    from handlers import handle

    web_worker.handling = penstock.Worker(orders, handle, concurrency=4).start()


def worker_exit(server: Any, web_worker: Any) -> None:
    if hasattr(web_worker, "handling"):
        web_worker.handling.stop()  # running handlers finish
        web_worker.handling.join()
