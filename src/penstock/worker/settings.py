"""How a worker works: what may be chosen, checked once.

Owns: `Settings` and `Hooks`. Durations are microseconds here, seconds where they are given.
"""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.api import arguments as calls
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
    """Functions that a worker calls as it goes. What they raise is logged and changes nothing; they should be quick.

    All but `late` and `drained` are called where the handler runs (with `processes`: in the parent).
    """

    started: Callable[[Item], object] | None = None
    """Its handler is about to be called."""
    finished: Callable[[Item, float, OutcomeName], object] | None = None
    """Its handler has ended, after so many seconds; what is to become of the item."""
    failed: Callable[[Item, BaseException], object] | None = None
    """Its handler raised this, ran too long, or died with its process."""
    late: Callable[[Item], object] | None = None
    """The lease had ended before the item was settled: what the handler did does not count, and someone else may have the item."""
    drained: Callable[[], object] | None = None
    """Everything is settled, and the worker is about to end."""

    @property
    def has_item_hooks(self) -> bool:
        return self.started is not None or self.finished is not None or self.failed is not None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was chosen for a worker."""

    name: str
    concurrency: int
    """Handlers at once: threads, tasks or processes."""
    per_partition: int
    """Of those, for one partition; 0 is no limit."""
    processes: int
    batch: int
    """Items of one call; 0 calls the handler with an item, not a list."""
    retry: RetryPolicy
    handler_timeout: int
    """0 is none."""
    lease_timeout: int
    """0 is the queue's."""
    hooks: Hooks

    @property
    def capacity(self) -> int:
        """Items that can be in handlers at once."""
        return self.concurrency * (self.batch or 1)


def checked_settings(
    *,
    concurrency: int | None,
    per_partition: int | None,
    processes: int,
    batch: int,
    retry: RetryPolicy | None,
    handler_timeout: Seconds | None,
    lease_timeout: Seconds | None,
    name: str | None,
    hooks: Hooks | None,
) -> Settings:
    """What was given, checked."""
    check_range("processes", processes, 0, MAX_PROCESSES)
    if processes and concurrency not in (None, processes):
        raise InvalidRequest(
            f"concurrency is {concurrency} and processes is {processes}; leave concurrency out, as each process is a place"
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
        retry=retry or RetryPolicy(),
        handler_timeout=0 if handler_timeout is None else calls.bounded_duration(handler_timeout, "handler_timeout", MILLISECOND),
        lease_timeout=calls.lease_duration(lease_timeout),
        hooks=hooks or Hooks(),
    )


def default_worker_name() -> str:
    """Who a worker is unless it is told: this machine and this process."""
    return f"{socket.gethostname()}-{os.getpid()}"


def queue_weights(queues: Any) -> dict[Any, int]:
    """The queues of a worker, with their weights."""
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
    """Items per second, for the queues that have a limit."""
    if rate is None:
        return {}
    found = dict(rate) if isinstance(rate, Mapping) else dict.fromkeys(queues, rate)
    for queue, limit in found.items():
        if queue not in queues:
            raise InvalidRequest(f"there is a rate for {queue!r}, which is not a queue of this worker; give rates for its own queues")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= MAX_RATE:
            raise InvalidRequest(f"the rate is {limit!r}; give items per second, more than 0")
    return found
