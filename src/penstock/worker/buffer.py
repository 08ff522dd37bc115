"""The buffer of leased items that wait for a handler.

Owns: `SourceQueue` (a queue of the worker), `WorkerLease` (a lease that the worker holds) and the buffers of leased
items. A worker reaches its broker only through `SourceQueue`.

Leases: after `WorkerLease.keep` the broker extends the lease until `stop_extending`. A handler cannot prevent that, not
even by holding the interpreter. If `keep` returned True, no other consumer gets the items before `stop_extending`,
unless the broker of another process cannot be reached for so long that the lease may have ended. Then its items that
still wait in the buffer are returned: no handler starts on an item that another consumer may have.

Buffers: `PlainBuffer` is for one queue; it is a deque and needs no lock. `SharedBuffer` is for several queues, or for a
limit per partition; it has a lock. It gives the next item from the queue that occupies the fewest handlers for its
weight; if several do, from the queue that was given the fewest items for its weight. So each queue has its share of the
handlers while all queues have items, and the share of an idle queue goes to the other queues.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from penstock.api.items import Item
from penstock.loop.requests import LeaseResult, SettlePart
from penstock.operations import AnswerCallback, Cancel, FindQueue, LeaseDoubt, LeaseItems, ReadStats, ReportProgress, SettleItems
from penstock.reports import QueueStats
from penstock.rules.commands import Settled
from penstock.words.clock import SECOND
from penstock.words.errors import PenstockError, Refused

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext


EXTENSIONS = 2
"""How often the extension of a lease is tried whose answer comes too late."""


class SourceQueue:
    """A queue that the worker leases from, and the home that answers its operations."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.name: str = queue.name
        self.incarnation: int = queue.incarnation
        self.home = queue.home

    def now(self) -> int:
        """The monotonic clock of the home, in microseconds."""
        elapsed: int = self.home.clock.read().elapsed
        return elapsed

    def stats(self) -> QueueStats:
        found: QueueStats = self.home.call(ReadStats(queue=self.incarnation))
        return found

    # -- leasing -------------------------------------------------------------------------------------

    def lease(self, operation: LeaseItems) -> list[LeaseResult]:
        """Lease items and wait for the answer in this thread."""
        results: list[LeaseResult] = self.home.call(operation)
        return results

    def submit(self, operation: LeaseItems | SettleItems, done: AnswerCallback) -> Cancel:
        """Start an operation; `done` is called with the answer or the error. Gives a function that cancels it."""
        cancel: Cancel = self.home.submit(operation, done)
        return cancel

    # -- settling ------------------------------------------------------------------------------------

    def settle(self, operation: SettleItems) -> list[Settled | Refused]:
        """Settle items. Gives one answer per part; an error of the whole operation becomes the answer of every part."""
        try:
            answer: list[Settled | Refused] = self.home.call(operation)
        except PenstockError as error:
            return [Refused.of(error)] * len(operation.parts)
        return answer

    def report_progress(self, partition: int, lease: int, offset: int, text: str) -> None:
        self.home.call(ReportProgress(queue=self.incarnation, partition=partition, lease=lease, offset=offset, text=text))

    def find_incarnation(self, name: str) -> int:
        """The incarnation of the queue of this name."""
        found: int = self.home.call(FindQueue(name=name)).incarnation
        return found

    def __repr__(self) -> str:
        return f"SourceQueue({self.name!r})"


class WorkerLease:
    """A lease that the worker holds: the items that one partition granted in one answer."""

    __slots__ = (
        "_safe_until",
        "_seconds",
        "first_completed_at",
        "handle_spans",
        "has_abandoned_items",
        "has_units",
        "keyed",
        "number",
        "partition",
        "settler",
        "source",
        "unsettled",
    )

    def __init__(self, source: SourceQueue, settler: Any, result: LeaseResult, asked_at: int) -> None:
        self.source = source
        self.settler = settler
        """The Settler of its items."""
        self.partition = result.partition
        self.number = result.granted.lease
        self._seconds = result.seconds
        self._safe_until = asked_at + round(result.seconds * SECOND)
        self.unsettled = result.granted.count
        """How many items are not settled yet. Only the settler changes it."""
        self.has_abandoned_items = False
        """Some items will never be settled. The others must be settled by their offsets, not as a whole lease."""
        self.handle_spans: dict[int, SpanContext] = {}
        """Offset → span of the handler's call, in a traced process."""
        self.first_completed_at = 0
        """When the first of its completed but unsettled items was completed."""
        self.keyed = any(part.batch.key_ids is not None for part in result.items)
        self.has_units = False
        """Whether it has several items of a key: a unit, which one call of the handler gets as a whole."""

    def keep(self) -> bool:
        """Make the broker extend the lease from now on.

        False if the lease had already ended, for example because this process was suspended.
        """
        source = self.source
        self._extend_from_now_on()
        if source.now() < self._safe_until:
            return True
        extend = SettleItems(queue=source.incarnation, action="extend", parts=[SettlePart(self.partition, self.number)])
        for _ in range(EXTENSIONS):
            asked_at = source.now()
            (answer,) = source.settle(extend)
            if not isinstance(answer, Settled):
                return False
            self._safe_until = asked_at + round(self._seconds * SECOND)
            if source.now() < self._safe_until:
                self._extend_from_now_on()
                return True  # else it may have ended again: the answer was under way longer than the extension lasts
        return False

    def _extend_from_now_on(self) -> None:
        doubt = LeaseDoubt(self._safe_until, lambda: self.settler.lease_lost(self))
        self.source.home.auto_extend(self.source.incarnation, self.partition, self.number, self._seconds, doubt)

    def stop_extending(self) -> None:
        """Let the broker stop extending the lease."""
        self.source.home.stop_extending(self.source.incarnation, self.partition, self.number)

    def __repr__(self) -> str:
        return f"WorkerLease({self.source.name!r}, lease {self.number:#x} of partition {self.partition}, {self.unsettled} unsettled)"


LeasedItem: TypeAlias = tuple[WorkerLease, Item]
"""An item and the lease that holds it."""


def divided_unit(taken: Sequence[LeasedItem], following: LeasedItem) -> int:
    """How many of the last taken items are in one unit with the item that follows: they must not be taken without it.

    0 if they are all that was taken: then no call could get the whole unit.
    """
    lease, key = following[0], following[1].key_bytes
    size = 0
    while key is not None and size < len(taken) and taken[-1 - size][0] is lease and taken[-1 - size][1].key_bytes == key:
        size += 1
    return size if size < len(taken) else 0


# -- buffers -----------------------------------------------------------------------------------------


class ItemBuffer(Protocol):
    """A buffer of leased items: `PlainBuffer` or `SharedBuffer`."""

    counts_handlers: bool
    """Whether `handler_ended` must be called for every item that was taken."""

    def put(self, source: SourceQueue, pairs: Sequence[LeasedItem]) -> None: ...
    def take(self) -> LeasedItem:
        """Remove and give the next item; IndexError if no item may be handled now."""

    def take_many(self, most: int) -> list[LeasedItem]:
        """Remove and give 1 to `most` items of one queue, units undivided; IndexError if no item may be handled now."""

    def put_back(self, pairs: Sequence[LeasedItem]) -> None:
        """Put items that were taken but not handled at the front."""

    def handler_ended(self, pair: LeasedItem) -> None:
        """Count that the handler of an item has ended."""

    def remove(self, lease: WorkerLease) -> list[LeasedItem]:
        """Remove and give the items of a lease."""

    def clear(self) -> list[LeasedItem]:
        """Remove and give all items."""

    def count(self, source: SourceQueue) -> int:
        """How many items of a queue are in the buffer."""

    def in_handlers(self, source: SourceQueue) -> int:
        """How many items of a queue are in handlers; 0 if this buffer does not count them."""

    @property
    def has_next(self) -> bool:
        """Whether `take` would give an item now."""

    def __len__(self) -> int: ...


class PlainBuffer:
    """The items of one queue, first in, first out."""

    counts_handlers = False

    def __init__(self) -> None:
        self._pairs: deque[LeasedItem] = deque()
        self._lock = threading.Lock()  # not for `take`, which is atomic
        self.take = self._pairs.popleft

    def put(self, source: SourceQueue, pairs: Sequence[LeasedItem]) -> None:
        self._pairs.extend(pairs)

    def take_many(self, most: int) -> list[LeasedItem]:
        with self._lock:
            pairs = self._pairs
            found = [pairs.popleft()]
            try:
                while len(found) < most:
                    found.append(pairs.popleft())
            except IndexError:
                return found
            if found[-1][0].has_units and pairs:
                size = divided_unit(found, pairs[0])
                pairs.extendleft(reversed(found[len(found) - size :]))
                del found[len(found) - size :]
            return found

    def put_back(self, pairs: Sequence[LeasedItem]) -> None:
        with self._lock:
            self._pairs.extendleft(reversed(pairs))

    def handler_ended(self, pair: LeasedItem) -> None:
        return

    def remove(self, lease: WorkerLease) -> list[LeasedItem]:
        with self._lock:
            found = self._take_all()
            self._pairs.extendleft([pair for pair in reversed(found) if pair[0] is not lease])
        return [pair for pair in found if pair[0] is lease]

    def clear(self) -> list[LeasedItem]:
        with self._lock:
            return self._take_all()

    def _take_all(self) -> list[LeasedItem]:
        found: list[LeasedItem] = []
        try:
            while True:
                found.append(self.take())
        except IndexError:
            return found

    def count(self, source: SourceQueue) -> int:
        return len(self._pairs)

    def in_handlers(self, source: SourceQueue) -> int:
        return 0

    @property
    def has_next(self) -> bool:
        return bool(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


class _QueueBuffer:
    """The items of one queue in a SharedBuffer, by partition if there is a limit per partition."""

    def __init__(self, weight: int, per_partition: int) -> None:
        self.weight = weight
        self.limit = per_partition
        self.taken = 0
        """Items in handlers."""
        self.served = 0
        """All items given to handlers so far; raised after an idle time (`_catch_up`)."""
        self.count = 0
        self._parts: dict[int, deque[LeasedItem]] = {}
        self._busy: dict[int, int] = {}
        """Partition → its items in handlers."""
        self._open: dict[int, None] = {}
        """Partitions whose next item may be handled now, in the order in which they are served."""

    @property
    def open(self) -> bool:
        return bool(self._open)

    def put(self, pairs: Iterable[LeasedItem], first: bool = False) -> None:
        for pair in pairs:
            number = pair[0].partition if self.limit else 0
            part = self._parts.setdefault(number, deque())
            part.appendleft(pair) if first else part.append(pair)
            self.count += 1
            self._update_open(number)

    def take(self) -> LeasedItem:
        number = next(iter(self._open))
        del self._open[number]
        pair = self._parts[number].popleft()
        self.count -= 1
        self.taken += 1
        self.served += 1
        self._busy[number] = self._busy.get(number, 0) + 1
        self._update_open(number)
        return pair

    def first(self) -> LeasedItem | None:
        """The next item, if there is no limit per partition: with one, leases have no units."""
        return self._parts[0][0] if self._parts.get(0) else None

    def put_back(self, pair: LeasedItem) -> None:
        self.handler_ended(pair)
        self.served -= 1
        self.put([pair], first=True)

    def handler_ended(self, pair: LeasedItem) -> None:
        number = pair[0].partition if self.limit else 0
        self.taken -= 1
        self._busy[number] -= 1
        self._update_open(number)

    def clear(self) -> list[LeasedItem]:
        found = [pair for part in self._parts.values() for pair in part]
        self._parts.clear()
        self._open.clear()
        self.count = 0
        return found

    def _update_open(self, number: int) -> None:
        if self._parts.get(number) and (not self.limit or self._busy.get(number, 0) < self.limit):
            self._open.setdefault(number)


class SharedBuffer:
    """The items of several queues, or of one queue with a limit per partition."""

    counts_handlers = True

    def __init__(self, weights: Mapping[SourceQueue, int], per_partition: int) -> None:
        self._lock = threading.Lock()
        self._queues = {source: _QueueBuffer(weight, per_partition) for source, weight in weights.items()}

    def put(self, source: SourceQueue, pairs: Sequence[LeasedItem]) -> None:
        with self._lock:
            queue = self._queues[source]
            if not queue.count and not queue.taken:
                self._catch_up(queue)
            queue.put(pairs)

    def _catch_up(self, queue: _QueueBuffer) -> None:
        """Raise `served` of a queue that was idle, so that it gets no more than its share from now on."""
        others = [other.served / other.weight for other in self._queues.values() if other.count or other.taken]
        queue.served = max(queue.served, round(min(others, default=0) * queue.weight))

    def take(self) -> LeasedItem:
        with self._lock:
            return self._best().take()

    def take_many(self, most: int) -> list[LeasedItem]:
        with self._lock:
            queue = self._best()
            found = [queue.take()]
            while len(found) < most and queue.open:
                found.append(queue.take())
            if found[-1][0].has_units and (following := queue.first()) is not None:
                size = divided_unit(found, following)
                for pair in reversed(found[len(found) - size :]):
                    queue.put_back(pair)
                del found[len(found) - size :]
            return found

    def _best(self) -> _QueueBuffer:
        queues = [queue for queue in self._queues.values() if queue.open]
        if not queues:
            raise IndexError
        return queues[0] if len(queues) == 1 else min(queues, key=_score)

    def put_back(self, pairs: Sequence[LeasedItem]) -> None:
        with self._lock:
            for pair in reversed(pairs):
                self._queues[pair[0].source].put_back(pair)

    def handler_ended(self, pair: LeasedItem) -> None:
        with self._lock:
            self._queues[pair[0].source].handler_ended(pair)

    def remove(self, lease: WorkerLease) -> list[LeasedItem]:
        with self._lock:
            queue = self._queues[lease.source]
            found = queue.clear()
            queue.put(pair for pair in found if pair[0] is not lease)
            return [pair for pair in found if pair[0] is lease]

    def clear(self) -> list[LeasedItem]:
        with self._lock:
            return [pair for queue in self._queues.values() for pair in queue.clear()]

    def count(self, source: SourceQueue) -> int:
        return self._queues[source].count

    def in_handlers(self, source: SourceQueue) -> int:
        return self._queues[source].taken

    @property
    def has_next(self) -> bool:
        return any(queue.open for queue in self._queues.values())

    def __len__(self) -> int:
        return sum(queue.count for queue in self._queues.values())


def _score(queue: _QueueBuffer) -> tuple[float, float]:
    return queue.taken / queue.weight, queue.served / queue.weight
