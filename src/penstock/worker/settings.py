"""The settings of a worker, checked when the worker is made.

Owns: `Settings` and `Hooks`. Callers give durations in seconds; `Settings` holds them in microseconds.
"""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.api import arguments
from penstock.api.arguments import Seconds
from penstock.api.items import Item
from penstock.words.batch import check_name
from penstock.words.clock import MILLISECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_BATCH_ITEMS, check_range
from penstock.worker.outcomes import OutcomeName, RetryPolicy

MAX_CONCURRENCY = 10_000
MAX_PROCESSES = 1_024
MAX_WEIGHT = 1_000
MAX_RATE = 1_000_000_000
K = TypeVar("K")


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that a worker calls when something happens. They should be quick.

    An exception of a hook is logged and has no other effect. `started`, `finished` and `failed` are called in the
    thread or event loop of the handler; with `processes`, in the parent process.
    """

    started: Callable[[Item], object] | None = None
    """Called before the handler of an item."""
    finished: Callable[[Item, float, OutcomeName], object] | None = None
    """Called after the handler of an item: with the seconds it took, and the outcome of the item."""
    failed: Callable[[Item, BaseException], object] | None = None
    """Called when a handler raised this error, exceeded `handler_timeout`, or its child process exited."""
    late: Callable[[Item], object] | None = None
    """Called when the lease ended before the item was settled: the outcome is ignored, the item may be leased again."""
    draining: Callable[[int], object] | None = None
    """Called when the worker begins to drain: with the number of items that are being handled."""
    drained: Callable[[], object] | None = None
    """Called when all items are settled, before `run` returns."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise InvalidRequest(f"the hook {name} is {type(given).__name__}; give a function")

    @property
    def has_item_hooks(self) -> bool:
        return self.started is not None or self.finished is not None or self.failed is not None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The checked settings of a worker."""

    name: str
    concurrency: int
    """How many handlers may run at once: threads, tasks or processes."""
    per_partition: int
    """How many handlers may work on items of one partition at once; 0 is no limit."""
    processes: int
    batch: int
    """The most items of one call; 0 calls the handler with an item, not a list."""
    per_key: int
    """The most items of one key in one call; 0: the fetcher chooses it."""
    retry: RetryPolicy
    handler_timeout: int
    """0 is no timeout."""
    lease_timeout: int
    """0 uses the lease timeout of the queue."""
    hooks: Hooks
    drain_timeout: int | None = None
    """How long to wait for running handlers when the worker drains; None is no limit."""

    @property
    def capacity(self) -> int:
        """How many items can be in handlers at once."""
        return self.concurrency * (self.batch or 1)


def checked_settings(
    *,
    concurrency: int | None,
    per_partition: int | None,
    processes: int,
    batch: int,
    per_key: int | None,
    retry: RetryPolicy | None,
    handler_timeout: Seconds | None,
    lease_timeout: Seconds | None,
    name: str | None,
    hooks: Hooks | None,
    drain_timeout: Seconds | None,
) -> Settings:
    """Check the arguments of `Worker` and fill in defaults; raises InvalidRequest."""
    check_range("processes", processes, 0, MAX_PROCESSES)
    if processes and concurrency not in (None, processes):
        raise InvalidRequest(
            f"concurrency is {concurrency} and processes is {processes}; leave concurrency out: each process runs one handler"
        )
    for what, given, kind in (("retry", retry, RetryPolicy), ("hooks", hooks, Hooks)):
        if given is not None and not isinstance(given, kind):
            raise InvalidRequest(f"{what} is {type(given).__name__}; give {kind.__name__}(…)")
    chosen = default_worker_name() if name is None else name
    check_name("worker's name", chosen)
    return Settings(
        name=chosen,
        concurrency=processes or check_range("concurrency", 1 if concurrency is None else concurrency, 1, MAX_CONCURRENCY),
        per_partition=0 if per_partition is None else check_range("per_partition", per_partition, 1, MAX_CONCURRENCY),
        processes=processes,
        batch=check_range("batch", batch, 0, MAX_BATCH_ITEMS),
        per_key=_checked_per_key(per_key, batch, per_partition),
        retry=retry or RetryPolicy(),
        handler_timeout=0 if handler_timeout is None else arguments.bounded_duration(handler_timeout, "handler_timeout", MILLISECOND),
        lease_timeout=arguments.lease_duration(lease_timeout),
        hooks=hooks or Hooks(),
        drain_timeout=None if drain_timeout is None else arguments.bounded_duration(drain_timeout, "drain_timeout"),
    )


def _checked_per_key(per_key: int | None, batch: int, per_partition: int | None) -> int:
    """The setting `per_key`; 0 if the fetcher shall choose it."""
    if per_key is None:
        return 0 if batch and per_partition is None else 1
    check_range("per_key", per_key, 1, MAX_BATCH_ITEMS)
    if per_key > max(1, batch):
        raise InvalidRequest(
            f"per_key is {per_key} and batch is {batch}; give at most as many as batch: a call gets the items of a key together"
        )
    if per_key > 1 and per_partition is not None:
        raise InvalidRequest(f"per_key is {per_key} and per_partition {per_partition}; give only one of them")
    return per_key


class UntilEmpty(NamedTuple):
    """A run ends when its queues are empty."""

    idle_timeout: int | None
    """It also ends when no item was leased for so long; None: only when they are empty."""


def checked_until_empty(given: bool | Seconds) -> UntilEmpty | None:
    """The argument `until_empty` of a run, checked."""
    if isinstance(given, bool):
        return UntilEmpty(None) if given else None
    return UntilEmpty(arguments.bounded_duration(given, "until_empty", MILLISECOND))


def default_worker_name() -> str:
    """Host name and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def queue_weights(queues: Any) -> dict[Any, int]:
    """The queues of a worker with their weights, from a queue, a list of queues or a dict of weights."""
    if isinstance(queues, Mapping):
        found = {queue: check_range("a weight", weight, 1, MAX_WEIGHT) for queue, weight in queues.items()}
    elif isinstance(queues, list | tuple):
        found = dict.fromkeys(queues, 1)
    else:
        found = {queues: 1}
    if not found:
        raise InvalidRequest("the worker has no queue; give a Queue, a list of them, or a dict of them to weights")
    for queue in found:
        if not (hasattr(queue, "home") and hasattr(queue, "incarnation")):
            raise InvalidRequest(f"the worker's queue is {type(queue).__name__}; give a Queue, as broker.queue(name) returns it")
    return found


def queue_rates(rate: float | Mapping[K, float] | None, queues: Mapping[K, int]) -> dict[K, float]:
    """The most items per second of each queue that has such a limit."""
    if rate is None:
        return {}
    found = dict(rate) if isinstance(rate, Mapping) else dict.fromkeys(queues, rate)
    for queue, limit in found.items():
        if queue not in queues:
            raise InvalidRequest(f"there is a rate for {queue!r}, which is not a queue of this worker; give rates for its own queues")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= MAX_RATE:
            raise InvalidRequest(f"the rate is {limit!r}; give items per second, more than 0")
    return found
