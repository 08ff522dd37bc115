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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Root": "penstock.logs.directory",
    "AsyncBroker": "penstock.service._async.broker",
    "aopen": "penstock.service._async.broker",
    "AsyncCursor": "penstock.service._async.cursor",
    "AsyncLease": "penstock.service._async.lease",
    "AsyncLeaseBatch": "penstock.service._async.lease",
    "AsyncQueue": "penstock.service._async.queue",
    "Broker": "penstock.service._sync.broker",
    "open": "penstock.service._sync.broker",
    "Cursor": "penstock.service._sync.cursor",
    "Lease": "penstock.service._sync.lease",
    "LeaseBatch": "penstock.service._sync.lease",
    "Queue": "penstock.service._sync.queue",
    "ListedItem": "penstock.service.calls",
    "Item": "penstock.service.items",
    "NewItem": "penstock.service.items",
    "QueueInfo": "penstock.service.options",
    "QueueOptions": "penstock.service.options",
    "Redriven": "penstock.service.redriving",
    "Context": "penstock.service.worker.context",
    "Hooks": "penstock.service.worker.settings",
    "Bury": "penstock.service.worker.verdicts",
    "Failed": "penstock.service.worker.verdicts",
    "Retry": "penstock.service.worker.verdicts",
    "RetryPolicy": "penstock.service.worker.verdicts",
    "Snooze": "penstock.service.worker.verdicts",
    "Worker": "penstock.service.worker.worker",
    "worker": "penstock.service.worker.worker",
}
"""Where each name lies. It is fetched when it is first used: a Spark task, or a command that only looks, needs a part of all this."""


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("penstock.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
