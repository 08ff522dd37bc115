"""The fetcher: it leases items shortly before handlers need them.

Owns: `Fetcher`, one thread per queue, `RateLimit` and `UnhandledItems`.
It leases one item for each free handler, and as many more as will be handled within HORIZON, so that no quick handler
waits for storage. Slow items are not leased ahead, so that other workers can lease them.
An item of a kind without a handler is returned at once, with a delay that doubles each time. No attempt is counted:
another worker may have the handler. An index by kind would spare these leases, but every queue would pay for it.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Protocol

from penstock.api.items import Item, ItemSource, items_of
from penstock.loop.requests import LeaseResult
from penstock.operations import LeaseItems
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import PenstockError
from penstock.words.limits import MIN_LEASE_TIMEOUT
from penstock.words.logs import log_fields
from penstock.worker.buffer import ItemBuffer, SourceQueue, WorkerLease
from penstock.worker.handlers import Handlers, random_fraction
from penstock.worker.outcomes import Outcome, RandomFraction
from penstock.worker.settings import Settings
from penstock.worker.settler import Settler
from penstock.worker.stats import WorkerCounters
from penstock.worker.wakeup import WakeUp

HORIZON, FAR = 50 * MILLISECOND, 400 * MILLISECOND
"""How far ahead items are leased. It grows to FAR while lease operations are slow or the buffer runs empty."""
LEASE_TIMES = 6
"""Items are leased at least so many times as far ahead as a lease operation takes."""
FAST = 1_000 / SECOND
"""Items per microsecond. Below this rate the horizon does not grow."""
MAX_BUFFERED = 8_000
"""The most items in the buffer."""
PORTION = 250
"""The most items of one lease, or a batch, or a quarter of the wanted buffer if that is more. A small lease is settled
sooner."""
MAX_UNSETTLED = 50_000
"""Nothing is leased while more handled items than this are unsettled."""
SPREAD = 2 * MILLISECOND
"""When items have waited this long while handlers are idle, more handlers are woken."""
SAMPLE = 5 * MILLISECOND
"""The shortest time over which the rate is measured."""
FIRST_PAUSE, LAST_PAUSE = 100 * MILLISECOND, 5 * SECOND
"""How long to wait after a failed lease operation; doubled after each failure."""
BURST = 0.1
"""The unused part of a rate limit is kept for this many seconds."""
FIRST_DELAY, LAST_DELAY = 1 * SECOND, 60 * SECOND
"""With which delay an item without a handler is returned; doubled each time."""
MAX_DOUBLINGS = 6
RETURNS_PER_SECOND = 1_000
"""The delay is so long that at most about this many items without a handler become ready again per second."""
MAX_REMEMBERED = 50_000
"""For how many items without a handler it is remembered how often they were returned."""
MAX_WARNED = 100
"""About how many kinds without a handler a line is logged."""
_log = logging.getLogger("penstock.worker")


class RateLimit:
    """Limits the items per second: a token bucket. Times are microseconds."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._most = max(1.0, per_second * BURST)
        self._available = self._most
        self._since = 0

    def take(self, want: int, now: int) -> tuple[int, int]:
        """How many of the wanted items may be leased now; if none, also how long to wait for one."""
        if self._since:
            self._available = min(self._most, self._available + (now - self._since) * self._rate / SECOND)
        self._since = now
        taken = min(want, int(self._available))
        self._available -= taken
        return taken, 0 if taken else int((1 - self._available) * SECOND / self._rate) + 1

    def put_back(self, count: int) -> None:
        """Undo `take` for items that were not leased."""
        self._available += count


class UnhandledItems:
    """How often items of kinds without a handler were returned, and with which delay to return them.

    Times are microseconds.
    """

    def __init__(self, random_fraction: RandomFraction) -> None:
        self._random_fraction = random_fraction
        self._returns: OrderedDict[tuple[int, int], int] = OrderedDict()
        """(partition, offset) → how often the item was returned; the oldest first."""
        self._least = FIRST_DELAY
        self._since = 0
        self._seen = 0

    def by_delay(self, items: Sequence[Item], now: int) -> list[tuple[int, list[Item]]]:
        """The items, grouped by the delay with which to return them.

        Delays are random, so that other workers get a chance to lease the items.
        """
        groups: dict[int, list[Item]] = {}
        for item in items:
            returns = self._returns.pop((item.partition, item.offset), 0)
            self._returns[item.partition, item.offset] = returns + 1
            groups.setdefault(min(returns, MAX_DOUBLINGS), []).append(item)
        while len(self._returns) > MAX_REMEMBERED:
            self._returns.popitem(last=False)
        least = self._least_delay(len(items), now)
        return [(self._vary(min(LAST_DELAY, max(least, FIRST_DELAY << returns))), group) for returns, group in groups.items()]

    def _least_delay(self, count: int, now: int) -> int:
        """The least delay, from the number of items that were returned during the last one."""
        if now - self._since > self._least:
            self._least = min(LAST_DELAY, max(FIRST_DELAY, self._seen * SECOND // RETURNS_PER_SECOND))
            self._since, self._seen = now, 0
        self._seen += count
        return self._least

    def _vary(self, delay: int) -> int:
        return round(delay * (0.25 + 0.75 * self._random_fraction()))


class HandlerPool(Protocol):
    """The methods of a pool of threads, tasks or child processes that a fetcher uses."""

    @property
    def free_handlers(self) -> int:
        """How many more handlers could run."""

    def wake(self, count: int) -> None:
        """Wake handlers for this many calls."""

    def wake_more(self) -> None:
        """Wake more handlers, because items have waited for a while."""


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
        """How many handlers are the share of this queue; 0 if there is no other queue."""
        self._settings = settings
        self._handlers = handlers
        self._buffer = buffer
        self._pool = pool
        self._settler = settler
        self._counters = counters
        self._fail = fail
        """Called with the error that ended this thread."""
        self._rate_limit = rate_limit
        self._unhandled = UnhandledItems(random_fraction)
        self._unhandled_kinds: set[str | None] = set()
        self._wakeup = WakeUp()
        self._closing = False
        self._dry = False
        """The last lease operation gave fewer items than were wanted."""
        self._pause = FIRST_PAUSE
        self._lease_timeout = MIN_LEASE_TIMEOUT
        """The timeout of the last lease."""
        self._asked_at = 0
        self._lease_took = 0
        """How long the slowest of the last lease operations took, without those that waited for items."""
        self._per_key = settings.per_key or 1
        """The most items of one key to lease at once."""
        self._leased = 0
        self._rate = 0.0
        """Items handled per microsecond, as a moving average."""
        self._sampled = (0, 0)
        """When the rate was last measured, and the items handled by then."""
        self._horizon = HORIZON
        self.refill_threshold = 0
        """The fetcher must be woken when the buffer has no more items than this."""
        self._thread = threading.Thread(target=self._run, name=f"penstock fetch {source.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Check again whether to lease more items."""
        self._wakeup.set()

    @property
    def is_dry(self) -> bool:
        """Whether the queue gave fewer items than were wanted when it was last asked."""
        return self._dry

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
        except Exception as error:  # the worker cannot continue without this thread, whatever the error is
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
            results = self._lease(room)
            self._pause = FIRST_PAUSE
        except PenstockError as error:
            if not error.retryable:
                raise
            _log.warning("leasing from queue %r failed and is repeated: %s", self.source.name, error, extra=self._log_fields())
            self._wait(self._pause)
            self._pause = min(2 * self._pause, LAST_PAUSE)
            results = []
        if self._rate_limit is not None:
            self._rate_limit.put_back(room - sum(result.granted.count for result in results))
        for result in results:
            self._buffer_items(result)

    def _wait(self, wait: int | None = None) -> None:
        """Wait for a wake-up, or for this many microseconds. Wake more handlers if items wait while some are idle."""
        stuck = self._buffer.has_next and self._pool.free_handlers > 0
        if stuck and (wait is None or wait > SPREAD):
            wait = SPREAD
        if not self._wakeup.wait(None if wait is None else wait / SECOND) and stuck:
            self._pool.wake_more()

    # -- how many items to lease -------------------------------------------------------------------------

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
        return min(room, max(PORTION, batch, ahead // 4)) if room > ahead // 2 else 0

    def _room_by_partition(self, free: int, waiting: int, ahead: int, batch: int) -> int:
        """As `_room`, with a limit per partition. Leases are small, so that they come from several partitions.

        Items over the limit of their partition wait in the buffer.
        """
        most = 2 * self._settings.capacity + ahead if free > 0 else ahead
        self.refill_threshold = most
        return min(self._settings.per_partition * batch, most - waiting)

    def _ahead(self, waiting: int) -> int:
        """How many items the buffer should have beyond one for each free handler."""
        now, (then, before) = self.source.now(), self._sampled
        if now - then >= SAMPLE:
            done = self._leased - waiting - self._in_handlers()
            self._rate = (self._rate + max(0, done - before) / (now - then)) / 2
            self._sampled = now, done
            if not waiting and not self._dry and self._rate > FAST:
                self._horizon = min(2 * self._horizon, FAR)
            else:
                self._horizon = max(HORIZON, min(FAR, LEASE_TIMES * self._lease_took), self._horizon * 31 // 32)
        return min(MAX_BUFFERED, int(self._rate * self._horizon))

    def _in_handlers(self) -> int:
        if self._buffer.counts_handlers:
            return self._buffer.in_handlers(self.source)
        return (self._settings.concurrency - self._pool.free_handlers) * (self._settings.batch or 1)

    # -- leasing -----------------------------------------------------------------------------------------

    def _lease(self, want: int) -> list[LeaseResult]:
        results: list[LeaseResult] = []
        self._asked_at = self.source.now()
        if not self._dry:
            results = self.source.lease(self._operation(want, 0))
            self._lease_took = max(self.source.now() - self._asked_at, self._lease_took * 15 // 16)
        if not results:
            self._dry = True
            # Wait at most half a lease timeout, so that a lease granted early in the wait has half its time left.
            results = self._wait_for(self._operation(want, self._lease_timeout // 2))
        self._dry = sum(result.granted.count for result in results) < want
        if results and not self._settings.per_key and self._handlers.default is not None:
            self._per_key = self._choose_per_key(want, results)
        return results

    def _choose_per_key(self, want: int, results: list[LeaseResult]) -> int:
        """How many items of a key to ask for, so that as many keys as now would give what is wanted.

        Items of one key cannot be handled side by side, so nobody else could handle them meanwhile.
        """
        keys = {key for result in results for part in result.items for key in part.batch.key_ids or ()}
        return min(self._settings.batch, -(-want // len(keys))) if keys else 1

    def _operation(self, want: int, wait: int) -> LeaseItems:
        settings = self._settings
        return LeaseItems(
            queue=self.source.incarnation,
            count=want,
            wait=wait,
            consumer=settings.name,
            timeout=settings.lease_timeout,
            per_key=self._per_key,
        )

    def _wait_for(self, operation: LeaseItems) -> list[LeaseResult]:
        """Wait for the answer to a lease operation. Cancels it and gives an empty list when the worker drains first."""
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

    def _buffer_items(self, result: LeaseResult) -> None:
        lease = WorkerLease(self.source, self._settler, result, self._asked_at)
        self._lease_timeout = max(MIN_LEASE_TIMEOUT, round(result.seconds * SECOND))
        self._leased += lease.unsettled
        self._counters.add("leased", lease.unsettled, self.source.now())
        self._settler.leases.add(lease)
        if not lease.keep():
            text = "a lease of queue %r ended before its items were handled; they will be leased again"
            _log.warning(text, self.source.name, extra=self._log_fields(partition=result.partition))
            self._settler.discard_lease(lease)
            return
        source = ItemSource(self.source.name, result.granted.max_attempts)
        partition, attempts = result.partition, result.granted.attempts
        items = [item for part in result.items for item in items_of(source, partition, part.offsets, *part[1:], attempts)]
        if self._handlers.default is None:
            items = self._with_handler(lease, items)
        if lease.keyed and self._settings.per_key != 1:
            items = self._by_key(lease, items)
        if items:
            self._buffer.put(self.source, list(zip(repeat(lease), items)))
            self._pool.wake(-(-len(items) // (self._settings.batch or 1)))

    def _by_key(self, lease: WorkerLease, items: list[Item]) -> list[Item]:
        """The items, those of one key one after the other."""
        groups: dict[object, list[Item]] = {}
        for index, item in enumerate(items):
            groups.setdefault(index if item.key_bytes is None else item.key_bytes, []).append(item)
        if len(groups) == len(items):
            return items
        lease.has_units = True
        return [item for group in groups.values() for item in group]

    def _log_fields(self, partition: int | None = None) -> dict[str, object]:
        return log_fields(queue=self.source.name, partition=partition, worker=self._settings.name)

    def _with_handler(self, lease: WorkerLease, items: Sequence[Item]) -> list[Item]:
        """The items that have a handler. The others are returned to the queue."""
        known = [item for item in items if self._handlers.find(item.kind) is not None]
        if len(known) < len(items):
            unhandled = [item for item in items if self._handlers.find(item.kind) is None]
            self._warn_unhandled({item.kind for item in unhandled})
            for delay, group in self._unhandled.by_delay(unhandled, self.source.now()):
                outcome = Outcome("returned", delay, "this worker has no handler for its kind")
                for item in group:
                    self._settler.settle((lease, item), outcome)
            self._leased -= len(unhandled)
        return known

    def _warn_unhandled(self, kinds: set[str | None]) -> None:
        """Log, once for each kind, that this worker has no handler for it."""
        for kind in kinds - self._unhandled_kinds:
            if len(self._unhandled_kinds) < MAX_WARNED:
                self._unhandled_kinds.add(kind)
                named = "without a kind" if kind is None else f"of kind {kind!r}"
                text = "queue %r has items %s and this worker has no handler for them; they are returned, and wait up to a minute each time"
                _log.warning(text, self.source.name, named, extra=self._log_fields())
