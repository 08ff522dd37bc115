"""Penstock: a durable, partitioned work queue.

    import penstock

    with penstock.open("data/") as broker:
        orders = broker.create_queue("orders", exist_ok=True)
        orders.produce({"order": 1}, key="customer-42")
        for lease in orders.lease(10, wait=5):
            with lease:
                print(lease.item.value)

`aopen` gives the same for asyncio, with `await`. Errors are in `penstock.errors`, the clock and the disk for tests in
`penstock.testing`, everything for Spark in `penstock.spark` (needs penstock[spark]).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors, spark, testing
    from penstock.api._async.broker import AsyncBroker, aopen
    from penstock.api._async.cursor import AsyncCursor
    from penstock.api._async.lease import AsyncLease, AsyncLeaseBatch
    from penstock.api._async.queue import AsyncQueue
    from penstock.api._sync.broker import Broker, open
    from penstock.api._sync.cursor import Cursor
    from penstock.api._sync.lease import Lease, LeaseBatch
    from penstock.api._sync.queue import Queue
    from penstock.api.arguments import ListedItem
    from penstock.api.items import Item, NewItem
    from penstock.api.options import QueueInfo, QueueOptions
    from penstock.api.redrive import Redriven
    from penstock.logs.backends import Root
    from penstock.worker.context import Context
    from penstock.worker.outcomes import Bury, Failed, Retry, RetryPolicy, Snooze
    from penstock.worker.settings import Hooks
    from penstock.worker.worker import Worker, worker

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
    "spark",
    "testing",
    "worker",
]

_MODULES = ("errors", "spark", "testing")
_DEFINED_IN = {
    "Root": "penstock.logs.backends",
    "AsyncBroker": "penstock.api._async.broker",
    "aopen": "penstock.api._async.broker",
    "AsyncCursor": "penstock.api._async.cursor",
    "AsyncLease": "penstock.api._async.lease",
    "AsyncLeaseBatch": "penstock.api._async.lease",
    "AsyncQueue": "penstock.api._async.queue",
    "Broker": "penstock.api._sync.broker",
    "open": "penstock.api._sync.broker",
    "Cursor": "penstock.api._sync.cursor",
    "Lease": "penstock.api._sync.lease",
    "LeaseBatch": "penstock.api._sync.lease",
    "Queue": "penstock.api._sync.queue",
    "ListedItem": "penstock.api.arguments",
    "Item": "penstock.api.items",
    "NewItem": "penstock.api.items",
    "QueueInfo": "penstock.api.options",
    "QueueOptions": "penstock.api.options",
    "Redriven": "penstock.api.redrive",
    "Context": "penstock.worker.context",
    "Hooks": "penstock.worker.settings",
    "Bury": "penstock.worker.outcomes",
    "Failed": "penstock.worker.outcomes",
    "Retry": "penstock.worker.outcomes",
    "RetryPolicy": "penstock.worker.outcomes",
    "Snooze": "penstock.worker.outcomes",
    "Worker": "penstock.worker.worker",
    "worker": "penstock.worker.worker",
}
"""The module that defines each name. It is imported at the first use of the name, because a Spark task, or a command that only
reads, needs few of them."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"penstock.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_DEFINED_IN[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
