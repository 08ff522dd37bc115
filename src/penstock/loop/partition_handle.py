"""A queue's handle on one partition: usable, in I/O, slow, failing, or closed.

Owns: `PartitionHandle`, its back-off and its I/O. A partition is in I/O while its commit or another disk job runs in
some thread: until that is over no turn reads or changes it, and turns run on the other partitions. In I/O for
SLOW_AFTER it is slow, and counts as failing. A partition whose storage failed is reopened after a back-off that grows.
Meanwhile requests for it are refused with an error that may be repeated.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.logs.log import Log
from penstock.loop.partition import Partition
from penstock.loop.recovery import elapsed_shift
from penstock.loop.requests import Request
from penstock.loop.tally import Tally
from penstock.rules.calls import CallMemory
from penstock.rules.commands import Pause
from penstock.rules.options import StorageOptions
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import MILLISECOND, SECOND, Clock
from penstock.words.errors import BrokerClosed, CorruptLog, OutcomeUnknown, PenstockError, StorageFailed

FIRST_WAIT = 500 * MILLISECOND
LAST_WAIT = 5 * SECOND
GROWTH = 1.5
JITTER = 0.2
PUBLISH_AFTER = 200 * MILLISECOND
"""Time from a commit to its publishing for readers in other processes."""
SLOW_AFTER = 500 * MILLISECOND
"""A partition in I/O for longer is slow."""
OPENING_SLOW_AFTER = 5 * SECOND
"""A partition that is being opened for longer is slow: it replays its log, perhaps after those of others."""
GRACE_AFTER_SLOW = 2 * SECOND
"""No lease of a slow or failing partition ends for so long after it works again: its holder could not settle it."""
PROMPT = 100 * MILLISECOND
AVOID_FOR = 5 * SECOND
"""After a sync of more than PROMPT it is avoided for AVOID_FOR: by items without a key, and by callers' syncs."""
IDLE_AFTER, RETIRED_IDLE_AFTER = 60 * SECOND, SECOND
"""A partition without activity for so long is closed: an active one, and a retired one that takes no new items."""
CLOSED_WALL_CHECK, WALL_CHECK = 10 * SECOND, SECOND
"""Wall time may jump, so timers on it are checked this often: of closed and of open partitions."""
SLOW_TIMERS_EVERY = 200 * MILLISECOND
"""How often, at most, the times of closing and of retention are computed."""

OpenPartition: TypeAlias = Callable[[int, Callable[[], None]], Partition]
"""Opens the partition of a number; calls the function when the log is replayed."""


class PendingAnswer:
    """A request whose answer waits for partitions in I/O."""

    __slots__ = ("expires", "failed", "request", "rests_on", "result")

    def __init__(self, request: Request, result: Any, rests_on: "dict[int, PartitionHandle]", expires: int) -> None:
        self.request = request
        self.result = result
        self.rests_on = rests_on
        """The partitions that are still in I/O, by number."""
        self.failed: dict[int, PenstockError] = {}
        self.expires = expires
        """When it is answered although some are in I/O; 0 is never."""

    def waits_for_others(self, handle: "PartitionHandle") -> bool:
        """Whether it waits for the I/O of another partition, which is not over. Any thread may ask."""
        return any(not other.io_is_over for other in reversed([*self.rests_on.values()]) if other is not handle)


class PartitionHandle:
    """One partition of a queue."""

    def __init__(
        self, number: int, open_partition: OpenPartition, clock: Clock, chance: Callable[[], float], summary: Summary | None
    ) -> None:
        self.number = number
        self.summary = summary
        """The summary of a closed partition. None: it must be opened to learn anything."""
        self.partition: Partition | None = None
        self.tally = Tally()
        self.error: PenstockError | None = None
        self.fences_ready = True
        """Whether its fences are put up, so that it may take items of every slot it owns."""
        self.touched = False
        self.in_io = False
        """Whether its commit or another disk job runs."""
        self.io_since = 0
        self._unclaimed: list[bool] = []
        self.idle_after = IDLE_AFTER
        """It is closed after so long without activity."""
        self._slow_timers_at = 0
        self._slow_timers_until = 0
        """When `_slow_timers_at` must be computed again."""
        self.io_began_at = 0
        """When a thread began its I/O; 0 while it waits for a thread. Set from any thread."""
        self.io_is_over = False
        """Whether its I/O is over and the next turn takes it back. Set from any thread."""
        self.io_ended_at = 0
        """When its sync was over; 0 before, and for a job. Set from any thread."""
        self.slow = False
        """Whether it has been in I/O for long, or was when its last I/O ended."""
        self.avoid_until = 0
        """Its last sync was not prompt: until this instant it is avoided."""
        self.job: Callable[[], None] | None = None
        """What its I/O is; None is the sync of its log."""
        self.waiting_thread = 0
        """The caller's thread that does its I/O; 0 when a disk thread does."""
        self.io_error: PenstockError | None = None
        """The error of its I/O."""
        self.read_error: PenstockError | None = None
        """Why leased items could not be read: it counts as failing after the commit of this turn."""
        self.wants_publish = False
        """Whether it is published, and perhaps fsynced, at the end of this turn."""
        self._wants_sync = False
        self.wants_close = False
        """Whether it is closed at the end of this turn, if the turn does not use it."""
        self.was_opened = False
        """Whether its last I/O opened it."""
        self.wanted = False
        """While it is being opened: whether a request waits for it."""
        self.on_replayed: Callable[[], None] = lambda: None
        """Called when its opening has replayed the log."""
        self.wants_retention = False
        """Whether retention runs at the end of this turn."""
        self.recovered = False
        """Whether its last I/O succeeded after it was failing or slow."""
        self.pending_answers: deque[PendingAnswer] = deque()
        """Answers that wait for its I/O."""
        self.unresolved = (0, 0) if summary is None else (summary.unresolved, summary.size_bytes)
        """Unresolved items and their bytes, when last counted."""
        self.undelivered_leases: list[int] = []
        """Leases that it granted and that no caller received."""
        self.leases_found_again: set[int] = set()
        """Leases that a repeated request found. Whichever sending cannot be answered, another one may be: they are not
        returned as undelivered."""
        self.missed_pause: Pause | None = None
        """A pause given while it was not usable; it is applied when it recovers."""
        self.next_run: int | None = None
        self.transfers_under_way: dict[bytes, int] = {}
        """Destination → sequence of the transfer under way, or (negative) when to try again."""
        self._calls_at_closing: CallMemory | None = None
        """Of a closed partition: the calls that it remembers; None: unknown."""
        self._open_partition = open_partition
        self._clock = clock
        self._chance = chance
        self._failures = 0
        self._retry_at = 0
        self._publish_at: int | None = None
        self._sync_at: int | None = None
        """In durability mode "interval": when to fsync."""
        self._published = self._fsynced = -1
        """The last sequences of the log when it was published and, in mode "interval", fsynced by those plans."""
        self._records_seen = -1
        self._idle_since = 0
        self._idle_records = -1

    @property
    def next_offset(self) -> int:
        """The offset of its next item, as far as known and committed."""
        if self.partition is not None:
            return self.partition.state.next_offset if self.is_usable else 0
        return self.summary.next_offset if self.summary is not None else 0

    @property
    def fence_version(self) -> int:
        """The version of the slot map for which its fences are put up; also of a closed partition."""
        if self.partition is not None:
            return self.partition.state.fence_version
        return self.summary.fence_version if self.summary is not None else 0

    @property
    def has_no_fences(self) -> bool:
        """Of a partition that is not open: whether it is known to have no fences."""
        return self.summary is not None and not self.summary.must_stay_open

    @property
    def has_ready_items(self) -> bool:
        """Of a partition that is closed, being opened or being closed: whether it may have ready items."""
        if self.in_io and self.job == self.close:
            return True
        return self.partition is None and self.summary is not None and self.summary.ready > 0

    @property
    def is_opening(self) -> bool:
        """Whether it is being opened, and not slow."""
        return self.partition is None and self.is_worth_waiting_for

    @property
    def closed(self) -> bool:
        """Whether it is closed because it was not used, not because it is failing."""
        return self.partition is None and self.error is None and not self.in_io

    @property
    def is_usable(self) -> bool:
        """Whether it is open, not in I/O and not failing."""
        return self.partition is not None and self.error is None and not self.in_io

    @property
    def is_worth_waiting_for(self) -> bool:
        """Whether it is in I/O and not slow."""
        return self.in_io and self.error is None

    @property
    def usable_partition(self) -> Partition:
        """The partition; raises `refusal` when it cannot be used now."""
        if self.partition is None or self.error is not None or self.in_io:
            raise self.refusal
        return self.partition

    @property
    def readable_partition(self) -> Partition | None:
        """The partition even while it is failing, if its state in memory is right."""
        return None if self.partition is None or self.partition.failed or self.in_io else self.partition

    @property
    def log(self) -> Log:
        """The log of an open partition, in I/O or not."""
        assert self.partition is not None
        return self.partition.log

    @property
    def state(self) -> State:
        return self.usable_partition.state

    def elapsed_at(self, now: int) -> int:
        """Its elapsed time at an instant of the queue's clock, also while it is in I/O or closed."""
        partition = self.partition
        if partition is not None:
            return max(now + partition.state.clock_shift, partition.state.moment.elapsed)
        return now + (0 if self.summary is None else elapsed_shift(self.summary, self._clock.read(), self._clock.boot)[0])

    def call_memory(self, now: int) -> CallMemory | None:
        """The calls that it remembers; None: they are not known before it is opened.

        In every state a call that is not in it is not stored: records are applied before they are written, and nobody
        applies others while the partition is in I/O or closed.
        """
        partition = self.partition
        if partition is not None:
            return partition.state.calls
        if self._calls_at_closing is None and self.summary is not None and self.summary.calls_until <= self.elapsed_at(now):
            self._calls_at_closing = CallMemory()
        return self._calls_at_closing

    def must_be_asked(self, now: int) -> bool:
        """Whether it must be opened, or is being opened, to learn which calls it remembers."""
        return self.error is None and self.call_memory(now) is None

    @property
    def refusal(self) -> PenstockError:
        """The error for requests that need this partition while it cannot be used."""
        if isinstance(self.error, CorruptLog):
            return CorruptLog(f"partition {self.number} cannot be opened ({self.error}); the others work")
        if self.error is None:
            return StorageFailed(f"partition {self.number} is being opened, closed or written; try again in a moment")
        if self.in_io and self.slow:
            return StorageFailed(f"partition {self.number} is slow ({self.error}); try again in a moment")
        return StorageFailed(f"partition {self.number} is failing ({self.error}); it will be reopened; try again in a moment")

    def fail(self, error: PenstockError) -> None:
        """Mark it as failing because of its storage, and set when to reopen it."""
        self.tally.failures += 1
        self._back_off(error)

    def _back_off(self, error: PenstockError) -> None:
        """Mark it as failing, and set when to reopen it: the back-off grows with each failure."""
        self.error = error
        wait = min(LAST_WAIT, FIRST_WAIT * GROWTH**self._failures)
        wait *= 1 + JITTER * (2 * self._chance() - 1)
        self._failures = min(self._failures + 1, 20)
        self._retry_at = self._clock.read().elapsed + int(wait)
        self.next_run = self._retry_at

    # -- I/O -----------------------------------------------------------------------------------------

    def start_io(self, job: Callable[[], None] | None = None) -> None:
        """Mark it as in I/O: with a job, or for the sync of its log."""
        self.job = job
        self.io_error = None
        self.slow = False
        self.io_began_at = self.io_ended_at = 0
        self.io_is_over = False
        self.wanted = False
        self.io_since = self._clock.read().elapsed
        self._unclaimed = [True]
        self.in_io = True

    def claim(self) -> bool:
        """Begin its I/O in this thread; False when another thread has begun it."""
        try:
            self._unclaimed.pop()  # atomic: one thread gets it
        except IndexError:
            return False
        self.io_began_at = self._clock.read().elapsed
        return True

    def slow_at(self, last_io_end: int) -> int:
        """When it counts as slow. While it waits for a thread, the time since other I/O ended counts."""
        return (self.io_began_at or max(self.io_since, last_io_end)) + self._slow_after

    @property
    def _slow_after(self) -> int:
        return OPENING_SLOW_AFTER if self.partition is None else SLOW_AFTER

    def mark_slow_if_due(self, now: int, last_io_end: int) -> None:
        """Mark it as slow, and so as failing, when it has been in I/O for SLOW_AFTER."""
        if self.is_worth_waiting_for and now >= self.slow_at(last_io_end):
            self.slow = True
            self.tally.slow += 1
            self.error = StorageFailed(
                f"its disk has not answered for {(now - self.slow_at(last_io_end) + self._slow_after) / SECOND:.1f} s"
            )

    def run_job(self) -> None:
        """Run its job, in any thread; an error is kept in `io_error`."""
        assert self.job is not None
        try:
            self.job()
        except PenstockError as error:
            self.io_error = error

    def after_sync(self, failure: StorageFailed | None) -> None:
        """End its commit after the sync of its log, in the thread that did it; an error is kept in `io_error`."""
        assert self.partition is not None
        if self.log.waits_for_disk:
            self.io_ended_at = self._clock.read().elapsed
            self.tally.sync_durations.add(self.io_ended_at - self.io_began_at)
        try:
            self.partition.end_commit(failure)
        except PenstockError as error:
            self.io_error = error

    @property
    def answers_wait_for_others(self) -> bool:
        """Whether answers wait for its I/O, and each of them also for that of another partition, which is not over.

        Any thread may ask: the interpreter makes each copy in one step.
        """
        answers = [*self.pending_answers]
        return bool(answers) and all(waiting.waits_for_others(self) for waiting in answers)

    def set_recovery_job(self) -> None:
        """Set the job that finishes its I/O after the thread that did it was interrupted."""
        self.job = self._finish_commit if self.partition is not None else self.reopen

    def finish_io(self, now: int) -> PenstockError | None:
        """End its I/O in a turn: update its state, and give the error of the I/O."""
        self.waiting_thread = 0
        self.in_io = False
        took = (self.io_ended_at or now) - (self.io_began_at or self.io_since)
        self.avoid_until = now + AVOID_FOR if self.job is None and took > PROMPT else 0
        self.slow = self.slow or took >= SLOW_AFTER
        self.recovered = self.slow or self.error is not None
        self.error = None
        if self.io_error is not None:
            self.recovered = False
            self.fail(self.io_error)
        elif self.partition is not None and self.partition.failed:  # the commit is stored; maintenance failed
            self.recovered = False
            self.fail(StorageFailed("maintenance of its files failed"))
        else:
            self.after_commit()
        return self.io_error

    def after_commit(self) -> None:
        """After a commit: reset the back-off and plan the next publishing; a read error makes it failing instead."""
        partition = self.partition
        if self.read_error is not None:
            error, self.read_error = self.read_error, None
            self.fail(error)
            return
        self._failures = 0
        if partition is None:
            return
        log = partition.log
        if self._publish_at is None and (log.unsynced or (log.durability != "fsync" and log.sequence != self._published)):
            self._publish_at = self._clock.read().elapsed + PUBLISH_AFTER
        if self._sync_at is None and log.durability == "interval" and log.sequence != self._fsynced:
            self._sync_at = self._clock.read().elapsed + partition.sync_interval

    def undo(self, error: PenstockError) -> None:
        """Reopen it from what is committed, because a turn was interrupted before its commit."""
        if self.partition is None or self.partition.is_committed:
            return
        self.partition.failed = True
        self._back_off(error)
        try:
            self.reopen()
            self.error = None
        except BrokerClosed:
            raise
        except PenstockError as failure:
            self.fail(failure)

    def _finish_commit(self) -> None:
        """Finish a commit that was interrupted."""
        assert self.partition is not None
        try:
            if not self.partition.is_committed:
                self.partition.finish_interrupted_commit()
        except StorageFailed as error:
            raise OutcomeUnknown(f"storage failed ({error}) and the turn was interrupted; repeat with the same request id") from error

    def reopen(self) -> None:
        """Open it, or reopen it after a failure."""
        if self.partition is None:
            partition = self._open_partition(self.number, self.on_replayed)
            partition.tally = self.tally
            self.partition = partition
            self.was_opened = True
        elif self.partition.failed:
            self.partition.reopen()

    def is_due_for_retry(self, now: int) -> bool:
        """Whether it is failing and its back-off is over."""
        return self.error is not None and not self.in_io and now >= self._retry_at

    def plan_due_publish(self, now: int) -> None:
        """Set `wants_publish` if it is time to publish, and remove the plan."""
        self._wants_sync = self._wants_sync or (self._sync_at is not None and now >= self._sync_at)
        if self._wants_sync or (self._publish_at is not None and now >= self._publish_at):
            self.wants_publish = True
            self._publish_at = None
            if self._wants_sync:
                self._sync_at = None

    def take_publish_job(self) -> Callable[[], None]:
        """The job that `wants_publish` stands for."""
        wants_sync, self.wants_publish, self._wants_sync = self._wants_sync, False, False
        return self._sync_and_publish if wants_sync else self._publish

    def _publish(self) -> None:
        partition = self.partition
        assert partition is not None
        partition.publish()
        self._published = partition.log.sequence

    def _sync_and_publish(self) -> None:
        partition = self.partition
        assert partition is not None
        partition.sync_and_publish()
        self._published = self._fsynced = partition.log.sequence

    def configure_storage(self, options: StorageOptions) -> None:
        """Write its log by these options from now on."""
        if self.partition is not None:
            self.partition.configure_storage(options)
            if self._sync_at is not None:
                self._sync_at = min(self._sync_at, self._clock.read().elapsed + self.partition.sync_interval)

    def is_due_for_retention(self) -> bool:
        """Whether it is time for retention to run."""
        partition = self.usable_partition
        when = partition.next_retention()
        return when is not None and when <= partition.now().elapsed

    def changed(self) -> bool:
        """Whether records were applied since the last call."""
        seen, self._records_seen = self._records_seen, -1 if self.partition is None else self.partition.records_applied
        return seen != self._records_seen

    def plan(self, now: int) -> None:
        """Set `next_run`, when a turn must visit it even without a request."""
        if self.in_io:
            self.next_run = None  # planned when its I/O is over
            return
        if self.error is not None:
            self.next_run = self._retry_at
            return
        if self.partition is None:
            closed_wait = self._closed_wait()
            self.next_run = None if closed_wait is None else now + max(0, closed_wait)
            return
        partition = self.partition
        state = partition.state
        if now >= self._slow_timers_until or now >= self._slow_timers_at:
            self._slow_timers_until = now + SLOW_TIMERS_EVERY
            self._slow_timers_at = self._slow_timers(now, partition)
            first = self._slow_timers_at
        else:  # the next visit computes them
            first = self._slow_timers_at if self._slow_timers_at < self._slow_timers_until else self._slow_timers_until
        elapsed, wall = state.next_due()
        if elapsed is not None and elapsed - state.clock_shift < first:
            first = elapsed - state.clock_shift
        if wall is not None:
            first = min(first, now + WALL_CHECK, now + wall - partition.now().wall)
        if self._publish_at is not None and self._publish_at < first:
            first = self._publish_at
        if self._sync_at is not None and self._sync_at < first:
            first = self._sync_at
        if self.transfers_under_way:
            first = min([first, *(-when for when in self.transfers_under_way.values() if when < 0)])
        self.next_run = first if first > now else now

    def _slow_timers(self, now: int, partition: Partition) -> int:
        """When it may be closed or retention must run: times that change little from one turn to the next."""
        wait = self._idle_wait(now, partition)
        retention = partition.next_retention()
        if retention is not None:
            wait = min(wait, retention - partition.now().elapsed)
        return now + wait

    # -- closed --------------------------------------------------------------------------------------

    def _closed_wait(self) -> int | None:
        """How long until a timer of a closed partition expires, at most the next check of wall time. None: never."""
        known = self.summary
        if known is None:
            return 0
        raw = self._clock.read()
        shift, rebooted = elapsed_shift(known, raw, self._clock.boot)
        waits = [] if known.due_elapsed is None else [0 if rebooted else known.due_elapsed - raw.elapsed - shift]
        if known.due_wall is not None:
            waits.append(min(CLOSED_WALL_CHECK, known.due_wall - raw.wall))
        return min(waits, default=None)

    @property
    def is_due(self) -> bool:
        """Whether a timer of a closed partition has expired."""
        wait = self._closed_wait()
        return wait is not None and wait <= 0

    def _idle_wait(self, now: int, partition: Partition) -> int:
        """How long until it may be closed, without activity."""
        if partition.records_applied != self._idle_records:
            self._idle_records, self._idle_since = partition.records_applied, now
            return self.idle_after
        return max(0, self._idle_since + self.idle_after - now) if self._is_quiet(partition) else self.idle_after

    def _is_quiet(self, partition: Partition) -> bool:
        """Whether nothing needs it open."""
        return partition.is_idle and not (
            self.transfers_under_way or self.undelivered_leases or self.pending_answers or self._publish_at is not None
        )

    def may_close(self, now: int) -> bool:
        """Whether it was idle for `idle_after` and nothing needs it open."""
        partition = self.usable_partition
        return partition.records_applied == self._idle_records and now >= self._idle_since + self.idle_after and self._is_quiet(partition)

    def stay_open(self, now: int) -> None:
        """Start its idle time again: it is needed although it is idle."""
        self._idle_since = now

    def close(self) -> None:
        """Close the partition, and keep its summary."""
        assert self.partition is not None
        self.summary = self.partition.summary()
        self._calls_at_closing = self.partition.state.calls
        self._idle_records = -1
        self._sync_at = None  # closing fsyncs
        partition, self.partition = self.partition, None
        partition.close()

    def __repr__(self) -> str:
        return f"PartitionHandle({self.number}, {self.error or self.partition})"
