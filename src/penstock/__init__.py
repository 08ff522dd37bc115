"""Penstock: a durable, partitioned work queue.

    import penstock

    with penstock.open("data/") as broker:
        orders = broker.create_queue("orders", exist_ok=True)
        orders.produce({"order": 1}, key="customer-42")
        for lease in orders.lease(10, wait=5):
            with lease:
                print(lease.item.value)

`aopen` opens the same API for asyncio. Errors are in `penstock.errors`, a clock and a disk for tests in
`penstock.testing`, the Spark integration in `penstock.spark` (needs penstock[spark]).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.words.version import __version__

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
    from penstock.api.arguments import FoundPage, ListedItem
    from penstock.api.items import Item, NewItem
    from penstock.api.options import QueueInfo, QueueOptions
    from penstock.api.produced import ProducedId, ProducedIds, ProducedRows
    from penstock.api.redrive import Redriven, RedriveSample
    from penstock.broker.backup import BackupReport, RestoreReport, backup, restore
    from penstock.logs.backends import Root
    from penstock.worker.context import Context
    from penstock.worker.outcomes import Bury, Failed, Retry, RetryPolicy, Snooze
    from penstock.worker.settings import Hooks
    from penstock.worker.worker import Worker, worker

__all__ = [
    "AsyncBroker",
    "AsyncCursor",
    "AsyncLease",
    "AsyncLeaseBatch",
    "AsyncQueue",
    "BackupReport",
    "Broker",
    "Bury",
    "Context",
    "Cursor",
    "Failed",
    "FoundPage",
    "Hooks",
    "Item",
    "Lease",
    "LeaseBatch",
    "ListedItem",
    "NewItem",
    "ProducedId",
    "ProducedIds",
    "ProducedRows",
    "Queue",
    "QueueInfo",
    "QueueOptions",
    "RedriveSample",
    "Redriven",
    "RestoreReport",
    "Retry",
    "RetryPolicy",
    "Root",
    "Snooze",
    "Worker",
    "__version__",
    "aopen",
    "backup",
    "errors",
    "open",
    "restore",
    "spark",
    "testing",
    "worker",
]

_MODULES = ("errors", "spark", "testing")
_NAMES = {
    "api._async.broker": ("AsyncBroker", "aopen"),
    "api._async.cursor": ("AsyncCursor",),
    "api._async.lease": ("AsyncLease", "AsyncLeaseBatch"),
    "api._async.queue": ("AsyncQueue",),
    "api._sync.broker": ("Broker", "open"),
    "api._sync.cursor": ("Cursor",),
    "api._sync.lease": ("Lease", "LeaseBatch"),
    "api._sync.queue": ("Queue",),
    "api.arguments": ("FoundPage", "ListedItem"),
    "api.items": ("Item", "NewItem"),
    "api.options": ("QueueInfo", "QueueOptions"),
    "api.produced": ("ProducedId", "ProducedIds", "ProducedRows"),
    "api.redrive": ("RedriveSample", "Redriven"),
    "broker.backup": ("BackupReport", "RestoreReport", "backup", "restore"),
    "logs.backends": ("Root",),
    "worker.context": ("Context",),
    "worker.outcomes": ("Bury", "Failed", "Retry", "RetryPolicy", "Snooze"),
    "worker.settings": ("Hooks",),
    "worker.worker": ("Worker", "worker"),
}
"""The names that each module defines. A module is imported at the first use of one of its names: a Spark task, or a
command that only reads, needs few of them."""
_DEFINED_IN = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"penstock.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_DEFINED_IN[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
