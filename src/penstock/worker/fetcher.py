"""The fetcher: it leases items shortly before handlers need them.

Owns: `Fetcher`, one thread per queue, and what limits it: `RateLimit` and `UnhandledKindDelay`.
It leases one item for each free handler, and as many more as will be handled within HORIZON, so that no quick handler waits for storage.
Slow items are not leased ahead: they are left for other workers.
An item of a kind that has no handler here is returned at once with a delay. It counts as no attempt: another worker may have the handler.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Protocol

from penstock.api.items import Item, items_of
from penstock.loop.requests import LeaseResult
from penstock.operations import LeaseItems
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import PenstockError
from penstock.words.limits import MIN_LEASE_TIMEOUT
from penstock.worker.buffer import ItemBuffer, SourceQueue, WorkerLease
from penstock.worker.handlers import Handlers, random_fraction
from penstock.worker.outcomes import Outcome, RandomFraction
from penstock.worker.settings import Settings
from penstock.worker.settler import Settler
from penstock.worker.stats import WorkerCounters
from penstock.worker.wakeup import WakeUp

HORIZON, FAR = 50 * MILLISECOND, 400 * MILLISECOND
"""How far ahead items are leased. It grows to FAR while the buffer runs empty because leases take long."""
FAST = 1_000 / SECOND
"""Items a microsecond. Below this rate the horizon does not grow."""
MAX_BUFFERED = 8_000
"""Most items that wait in the buffer."""
PORTION = 250
"""Most items of one lease, unless a quarter of the wanted buffer is more. A small lease can be settled as a whole sooner."""
MAX_UNSETTLED = 50_000
"""With more handled items than this not settled yet, nothing is leased."""
SPREAD = 2 * MILLISECOND
"""When items have waited this long while handlers are idle, more of them are woken."""
SAMPLE = 5 * MILLISECOND
"""The shortest time over which the rate is measured."""
FIRST_PAUSE, LAST_PAUSE = 100 * MILLISECOND, 5 * SECOND
"""How long to wait after a lease that failed; doubled each time."""
BURST = 0.1
"""Seconds for which the unused part of a rate limit is kept."""
FIRST_DELAY, LAST_DELAY = 1 * SECOND, 60 * SECOND
RETURNS_PER_SECOND = 1_000
"""Items without a handler are returned with such a delay that about this many come back in a second."""
_log = logging.getLogger("penstock.worker")


class RateLimit:
    """Limits the items a second: a token bucket. Times are microseconds."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._most = max(1.0, per_second * BURST)
        self._there = self._most
        self._since = 0

    def take(self, want: int, now: int) -> tuple[int, int]:
        """How many items may be taken now; if none, also how long to wait for one."""
        if self._since:
            self._there = min(self._most, self._there + (now - self._since) * self._rate / SECOND)
        self._since = now
        taken = min(want, int(self._there))
        self._there -= taken
        return taken, 0 if taken else int((1 - self._there) * SECOND / self._rate) + 1

    def put_back(self, count: int) -> None:
        """So many items were not taken after all."""
        self._there += count


class UnhandledKindDelay:
    """How long items of kinds without a handler are delayed when they are returned. Times are microseconds."""

    def __init__(self, chance: RandomFraction) -> None:
        self._chance = chance
        self._delay = FIRST_DELAY
        self._since = 0
        self._seen = 0

    def delay(self, count: int, now: int) -> int:
        """The delay for so many more items. It is randomised, or else the same worker could get the same items each time."""
        if now - self._since > self._delay:
            self._delay = min(LAST_DELAY, max(FIRST_DELAY, self._seen * SECOND // RETURNS_PER_SECOND))
            self._since, self._seen = now, 0
        self._seen += count
        return round(self._delay * (0.25 + 0.75 * self._chance()))


class HandlerPool(Protocol):
    """Where handlers run (threads, tasks or child processes), as a fetcher sees it."""

    @property
    def free_handlers(self) -> int:
        """How many more handlers could run."""

    def wake(self, count: int) -> None:
        """Wake handlers for so many new items."""

    def wake_more(self) -> None:
        """Items have waited for a while: wake more handlers."""


class Fetcher:
    """Leases items of one queue into the buffer."""

    def __init__(
        self,
        source: SourceQueue,
        share: int,
        settings: Settings,
        handlers: Handlers,
        buffer: ItemBuffer,
        pool: HandlerPool,
        settler: Settler,
        counters: WorkerCounters,
        fail: Callable[[Exception], None],
        rate_limit: RateLimit | None,
    ) -> None:
        self.source = source
        self._share = share
        """How many handlers are its share; 0 if there is no other queue."""
        self._settings = settings
        self._handlers = handlers
        self._buffer = buffer
        self._pool = pool
        self._settler = settler
        self._counters = counters
        self._fail = fail
        """Called when the queue cannot be reached any more."""
        self._rate_limit = rate_limit
        self._unhandled = UnhandledKindDelay(random_fraction)
        self._wakeup = WakeUp()
        self._closing = False
        self._dry = False
        """The last lease gave fewer items than were wanted."""
        self._pause = FIRST_PAUSE
        self._span = MIN_LEASE_TIMEOUT
        """The length of the last lease."""
        self._asked_at = 0
        self._leased = 0
        self._rate = 0.0
        """Items handled a microsecond, lately."""
        self._sampled = (0, 0)
        """When the rate was last measured, and the items handled by then."""
        self._horizon = HORIZON
        self.refill_threshold = 0
        """With no more items than this in the buffer, the fetcher must be woken."""
        self._thread = threading.Thread(target=self._run, name=f"penstock fetch {source.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Handlers need more items."""
        self._wakeup.set()

    def close(self) -> None:
        """Lease nothing more."""
        self._closing = True
        self._wakeup.set()

    def join(self) -> None:
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._round()
        except Exception as error:  # whatever it is, the worker must not go on without this thread
            self._fail(error)

    def _round(self) -> None:
        if len(self._settler) > MAX_UNSETTLED:
            self._wait(FIRST_PAUSE)
            return
        room = self._room()
        if room < 1:
            self._wait()
            return
        if self._rate_limit is not None:
            room, wait = self._rate_limit.take(room, self.source.now())
            if room < 1:
                self._wait(wait)
                return
        try:
            handed = self._lease(room)
            self._pause = FIRST_PAUSE
        except PenstockError as error:
            if not error.retryable:
                raise
            _log.warning("nothing can be leased from queue %r for now: %s", self.source.name, error)
            self._wait(self._pause)
            self._pause = min(2 * self._pause, LAST_PAUSE)
            handed = []
        given = sum(one.granted.count for one in handed)
        if self._rate_limit is not None:
            self._rate_limit.put_back(room - given)
        for one in handed:
            self._buffer_items(one)

    def _wait(self, wait: int | None = None) -> None:
        """Wait for a wake-up, or for so many microseconds. If items wait while handlers are idle, wake more handlers after SPREAD."""
        stuck = self._buffer.has_next and self._pool.free_handlers > 0
        if stuck and (wait is None or wait > SPREAD):
            wait = SPREAD
        if not self._wakeup.wait(None if wait is None else wait / SECOND) and stuck:
            self._pool.wake_more()

    # -- how many ----------------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many items to lease now."""
        buffer, source = self._buffer, self.source
        waiting = buffer.count(source)
        ahead = self._ahead(waiting)
        self.refill_threshold = ahead // 2
        batch = self._settings.batch or 1
        free = self._pool.free_handlers * batch - (len(buffer) - waiting)
        if self._settings.per_partition:
            return self._room_by_partition(free, waiting, ahead, batch)
        if self._share:
            free = max(free, self._share * batch - buffer.in_handlers(source))
        room = free + ahead - waiting
        return min(room, max(PORTION, ahead // 4)) if room > ahead // 2 else 0

    def _room_by_partition(self, free: int, waiting: int, ahead: int, batch: int) -> int:
        """Lease a few at a time, because each lease comes from another partition. Items over the limit wait in the buffer."""
        most = 2 * self._settings.capacity + ahead if free > 0 else ahead
        self.refill_threshold = most
        return min(self._settings.per_partition * batch, most - waiting)

    def _ahead(self, waiting: int) -> int:
        """How many items to have in the buffer, beyond one for each free handler."""
        now, (then, before) = self.source.now(), self._sampled
        if now - then >= SAMPLE:
            done = self._leased - waiting - self._in_handlers()
            self._rate = (self._rate + max(0, done - before) / (now - then)) / 2
            self._sampled = now, done
            if not waiting and not self._dry and self._rate > FAST:
                self._horizon = min(2 * self._horizon, FAR)
            else:
                self._horizon = max(HORIZON, self._horizon * 31 // 32)
        return min(MAX_BUFFERED, int(self._rate * self._horizon))

    def _in_handlers(self) -> int:
        if self._buffer.counts_handlers:
            return self._buffer.in_handlers(self.source)
        return (self._settings.concurrency - self._pool.free_handlers) * (self._settings.batch or 1)

    # -- leasing -----------------------------------------------------------------------------------------

    def _lease(self, want: int) -> list[LeaseResult]:
        handed: list[LeaseResult] = []
        self._asked_at = self.source.now()
        if not self._dry:
            handed = self.source.lease(self._operation(want, 0))
        if not handed:
            # Wait at most half a lease: a lease that was granted during the wait can still be kept after it.
            handed = self._wait_for(self._operation(want, self._span // 2))
        self._dry = sum(one.granted.count for one in handed) < want
        return handed

    def _operation(self, want: int, wait: int) -> LeaseItems:
        settings = self._settings
        return LeaseItems(queue=self.source.incarnation, count=want, wait=wait, consumer=settings.name, timeout=settings.lease_timeout)

    def _wait_for(self, operation: LeaseItems) -> list[LeaseResult]:
        """Wait for the answer to a lease; gives nothing when the worker drains first."""
        answers: list[list[LeaseResult] | PenstockError] = []

        def done(answer: list[LeaseResult] | PenstockError) -> None:
            answers.append(answer)
            self._wakeup.set()

        cancel = self.source.submit(operation, done)
        while not answers:
            self._wait()
            if self._closing and not answers:
                cancel()
                return []
        if isinstance(answers[0], PenstockError):
            raise answers[0]
        return answers[0]

    def _buffer_items(self, handed: LeaseResult) -> None:
        lease = WorkerLease(self.source, self._settler, handed, self._asked_at)
        self._span = max(MIN_LEASE_TIMEOUT, round(handed.seconds * SECOND))
        self._leased += lease.unsettled
        self._counters.add("leased", lease.unsettled, self.source.now())
        self._settler.leases.add(lease)
        if not lease.keep():
            _log.warning("a lease of queue %r ended before its items could be handled; they come again", self.source.name)
            self._settler.discard_lease(lease)
            return
        granted = handed.granted
        items = [item for part in handed.items for item in items_of(handed.partition, *part, granted.attempts)]
        if self._handlers.default is None:
            items = self._with_handler(lease, items)
        if items:
            self._buffer.put(self.source, list(zip(repeat(lease), items)))
            self._pool.wake(-(-len(items) // (self._settings.batch or 1)))

    def _with_handler(self, lease: WorkerLease, items: Sequence[Item]) -> list[Item]:
        """The items that have a handler here; the others are returned to the queue."""
        known = [item for item in items if self._handlers.find(item.kind) is not None]
        if len(known) < len(items):
            delay = self._unhandled.delay(len(items) - len(known), self.source.now())
            outcome = Outcome("returned", delay, "no handler for its kind here")
            for item in items:
                if self._handlers.find(item.kind) is None:
                    self._settler.settle((lease, item), outcome)
            self._leased -= len(items) - len(known)
        return known
