"""Penstock: a durable, partitioned work queue.

    import penstock

    with penstock.open("data/") as broker:
        orders = broker.create_queue("orders", exist_ok=True)
        orders.produce({"order": 1}, key="customer-42")
        for lease in orders.lease(10, wait=5):
            with lease:
                print(lease.item.value)

`aopen` gives the same for asyncio, with `await`. Errors are in `penstock.errors`, stand-ins for tests in `penstock.testing`.
"""

from penstock import errors
from penstock.logs.directory import Root
from penstock.service._async.broker import AsyncBroker, aopen
from penstock.service._async.cursor import AsyncCursor
from penstock.service._async.lease import AsyncLease, AsyncLeaseBatch
from penstock.service._async.queue import AsyncQueue
from penstock.service._sync.broker import Broker, open
from penstock.service._sync.cursor import Cursor
from penstock.service._sync.lease import Lease, LeaseBatch
from penstock.service._sync.queue import Queue
from penstock.service.calls import ListedItem
from penstock.service.items import Item, NewItem
from penstock.service.options import QueueInfo, QueueOptions
from penstock.service.redriving import Redriven
from penstock.service.worker.context import Context
from penstock.service.worker.settings import Hooks
from penstock.service.worker.verdicts import Bury, Failed, Retry, RetryPolicy, Snooze
from penstock.service.worker.worker import Worker, worker

__version__ = "0.1.0.dev0"

__all__ = [
    "AsyncBroker",
    "AsyncCursor",
    "AsyncLease",
    "AsyncLeaseBatch",
    "AsyncQueue",
    "Broker",
    "Bury",
    "Context",
    "Cursor",
    "Failed",
    "Hooks",
    "Item",
    "Lease",
    "LeaseBatch",
    "ListedItem",
    "NewItem",
    "Queue",
    "QueueInfo",
    "QueueOptions",
    "Redriven",
    "Retry",
    "RetryPolicy",
    "Root",
    "Snooze",
    "Worker",
    "__version__",
    "aopen",
    "errors",
    "open",
    "worker",
]
