"""A partition among the others of its queue: in order, out, slow, failing, or not to be opened.

Owns: `PartitionHandle`, its back-off, and what it does while it is out. A partition is out while its commit, or anything else that waits for its
disk, runs in some thread: until it has landed nobody looks at it or changes it, and the turns of the others go on. One that does not come
back for a while is slow, and counts as failing. A partition whose storage fails is left alone for a while, longer each time, and then
tried again. What it was asked meanwhile is refused with an error that says so and may be repeated.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.logs.log import Log
from penstock.loop.partition import Partition
from penstock.loop.recovery import elapsed_shift
from penstock.loop.requests import Request
from penstock.rules.commands import Pause
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import MILLISECOND, SECOND, Clock
from penstock.words.errors import BrokerClosed, CorruptLog, OutcomeUnknown, PenstockError, StorageFailed

FIRST_WAIT = 500 * MILLISECOND
LAST_WAIT = 5 * SECOND
GROWTH = 1.5
JITTER = 0.2
PUBLISH_AFTER = 200 * MILLISECOND
"""What "interval" promises: so much may be lost with the machine."""
SLOW_AFTER = 500 * MILLISECOND
"""A partition that is out for longer is slow."""
GRACE_AFTER_SLOW = 2 * SECOND
"""None of its leases ends for so long after a slow partition came back: its holders could not settle them."""
PROMPT = 100 * MILLISECOND
AVOID_FOR = 5 * SECOND
"""A partition whose disk took longer than the one is avoided for the other: by items without a key, and by callers that wait themselves."""
IDLE_AFTER, RETIRED_IDLE_AFTER = 60 * SECOND, SECOND
"""A partition in which nothing happens for so long is closed: one that takes items, and one that is only kept for what is in it."""
CLOSED_WALL_CHECK = 10 * SECOND
WALL_CHECK = 1 * SECOND
"""The date may be stepped: what waits for one is looked at this often."""


class PendingAnswer:
    """A request whose answer waits for partitions to land."""

    __slots__ = ("expires", "failed", "request", "rests_on", "result")

    def __init__(self, request: Request, result: Any, rests_on: set[int], expires: int) -> None:
        self.request = request
        self.result = result
        self.rests_on = rests_on
        """Numbers of the partitions that have not landed yet."""
        self.failed: dict[int, PenstockError] = {}
        self.expires = expires
        """When it is answered although some have not landed; 0 is never."""


class PartitionHandle:
    """One partition of a queue."""

    def __init__(
        self, number: int, open_partition: Callable[[int], Partition], clock: Clock, chance: Callable[[], float], summary: Summary | None
    ) -> None:
        self.number = number
        self.summary = summary
        """What is known of it while it is closed. None: it must be opened to know anything."""
        self.partition: Partition | None = None
        self.error: PenstockError | None = None
        self.fences_ready = True
        """Whether every slot that the map gives it may be used: not before its fences stand."""
        self.touched = False
        self.in_io = False
        """Whether its commit, or another job, is under way."""
        self.io_since = 0
        self._unclaimed: list[bool] = []
        self.idle_after = IDLE_AFTER
        """It is closed when nothing has happened in it for so long."""
        self.io_began_at = 0
        """When what it is out for was really begun; 0 while it waits for a thread. Set from any thread."""
        self.slow = False
        """Whether it is out for long, or was when it landed last."""
        self.avoid_until = 0
        """Its disk did not answer quickly when it was last asked: until then, those who have a choice avoid it."""
        self.job: Callable[[], None] | None = None
        """What is done while it is out, if that is anything but the sync of its log."""
        self.waiting_thread = 0
        """The thread that waits for its disk for a request of its own; 0 when it is another."""
        self.io_error: PenstockError | None = None
        """Of what was done while it was out."""
        self.read_error: PenstockError | None = None
        """Why items that were leased could not be read: it is left alone for a while once this turn is committed."""
        self.wants_publish = False
        """Whether it goes out at the end of this turn to sync what needed no sync."""
        self.wants_close = False
        """Whether it goes out at the end of this turn to be closed, if nothing happens in it."""
        self.was_opened = False
        """Whether it has landed open after it was closed."""
        self.wants_retention = False
        """Whether it goes out at the end of this turn to let go of what is old."""
        self.recovered = False
        """Whether it has landed in order after it was failing or slow."""
        self.pending_answers: deque[PendingAnswer] = deque()
        """Requests whose answers wait for it to land."""
        self.unresolved = (0, 0) if summary is None else (summary.unresolved, summary.size_bytes)
        """Items that were not resolved when last asked, and bytes."""
        self.undelivered_leases: list[int] = []
        """Leases that it gave and nobody got."""
        self.missed_pause: Pause | None = None
        """What was said to the whole queue while this one was away."""
        self.next_run: int | None = None
        self.transfers_under_way: dict[bytes, int] = {}
        """destination → sequence of the transfer that is under way, or (negative) when to try again."""
        self._open_partition = open_partition
        self._clock = clock
        self._chance = chance
        self._failures = 0
        self._retry_at = 0
        self._publish_at: int | None = None
        self._records_seen = -1
        self._idle_since = 0
        self._idle_records = -1

    @property
    def next_offset(self) -> int:
        """The next offset it will give, as far as is known and committed."""
        if self.partition is not None:
            return self.partition.state.next_offset if self.is_usable else 0
        return self.summary.next_offset if self.summary is not None else 0

    @property
    def fence_version(self) -> int:
        """The version of the slot map up to which its fences are put up, open or not."""
        if self.partition is not None:
            return self.partition.state.fence_version
        return self.summary.fence_version if self.summary is not None else 0

    @property
    def has_no_fences(self) -> bool:
        """Of one that is not open: whether it is known to have none."""
        return self.summary is not None and not self.summary.must_stay_open

    @property
    def has_ready_items(self) -> bool:
        """Of one that is closed, or being opened or closed: whether it may have something to lease."""
        if self.in_io and self.job == self.close:
            return True
        return self.partition is None and self.summary is not None and self.summary.ready > 0

    @property
    def is_opening(self) -> bool:
        """Whether it is out to be opened."""
        return self.partition is None and self.is_worth_waiting_for

    @property
    def closed(self) -> bool:
        """Whether it is not open, for no other reason than that nobody needs it."""
        return self.partition is None and self.error is None and not self.in_io

    @property
    def is_usable(self) -> bool:
        """Whether it can be used now."""
        return self.partition is not None and self.error is None and not self.in_io

    @property
    def is_worth_waiting_for(self) -> bool:
        """Whether it is out, and soon to land."""
        return self.in_io and self.error is None

    @property
    def usable_partition(self) -> Partition:
        """The partition, or why it cannot be used."""
        if self.partition is None or self.error is not None or self.in_io:
            raise self.refusal
        return self.partition

    @property
    def readable_partition(self) -> Partition | None:
        """The partition even while it is failing, if what is known of it is true."""
        return None if self.partition is None or self.partition.failed or self.in_io else self.partition

    @property
    def log(self) -> Log:
        """Its log, for whoever commits it while it is out."""
        assert self.partition is not None
        return self.partition.log

    @property
    def state(self) -> State:
        return self.usable_partition.state

    @property
    def refusal(self) -> PenstockError:
        """The error for whoever asks for this partition."""
        if isinstance(self.error, CorruptLog):
            return CorruptLog(f"partition {self.number} cannot be opened ({self.error}); the others work")
        if self.error is None:
            return StorageFailed(f"partition {self.number} is not at hand just now; try again in a moment")
        if self.in_io and self.slow:
            return StorageFailed(f"partition {self.number} is slow ({self.error}); try again in a moment")
        return StorageFailed(f"partition {self.number} is failing ({self.error}); it is tried again by itself, so try again in a moment")

    def try_open(self) -> None:
        """Open it, or reopen it after a failure; whether or not that worked is in `error`."""
        try:
            self.reopen()
            self.error = None
        except BrokerClosed:
            raise
        except PenstockError as error:
            self.fail(error)

    def fail(self, error: PenstockError) -> None:
        """Leave the partition alone for a while."""
        self.error = error
        wait = min(LAST_WAIT, FIRST_WAIT * GROWTH**self._failures)
        wait *= 1 + JITTER * (2 * self._chance() - 1)
        self._failures = min(self._failures + 1, 20)
        self._retry_at = self._clock.read().elapsed + int(wait)
        self.next_run = self._retry_at

    # -- out, and back -------------------------------------------------------------------------------

    def start_io(self, job: Callable[[], None] | None = None) -> None:
        """Go out: with a job, or for the sync of what was appended."""
        self.job = job
        self.io_error = None
        self.slow = False
        self.io_began_at = 0
        self.io_since = self._clock.read().elapsed
        self._unclaimed = [True]
        self.in_io = True

    def claim(self) -> bool:
        """Begin what it is out for, in whichever thread; False when another one has."""
        try:
            self._unclaimed.pop()  # only one thread gets it
        except IndexError:
            return False
        self.io_began_at = self._clock.read().elapsed
        return True

    def slow_at(self, last_io_end: int) -> int:
        """When it counts as slow. One that waits for a thread is no slower than those that land before it."""
        return (self.io_began_at or max(self.io_since, last_io_end)) + SLOW_AFTER

    def mark_slow_if_due(self, now: int, last_io_end: int) -> None:
        """It is out for long: from now on it counts as failing."""
        if self.is_worth_waiting_for and now >= self.slow_at(last_io_end):
            self.slow = True
            self.error = StorageFailed(f"its disk has not answered for {(now - self.slow_at(last_io_end) + SLOW_AFTER) / SECOND:.1f} s")

    def run_job(self) -> None:
        """Do the job it went out for, in whichever thread that is."""
        assert self.job is not None
        try:
            self.job()
        except PenstockError as error:
            self.io_error = error

    def after_sync(self, failure: StorageFailed | None) -> None:
        """Its log is synced, or could not be: what follows from that is done before it lands."""
        assert self.partition is not None
        try:
            self.partition.end_commit(failure)
        except PenstockError as error:
            self.io_error = error

    def set_recovery_job(self) -> None:
        """The thread that waited for its disk was interrupted: another one brings that to its end."""
        self.job = self._finish_commit if self.partition is not None else self.reopen

    def finish_io(self, now: int) -> PenstockError | None:
        """Come back into the turn; the error tells what became of what it went out for."""
        self.in_io = False
        took = now - (self.io_began_at or self.io_since)
        self.avoid_until = now + AVOID_FOR if self.job is None and took > PROMPT else 0
        self.slow = self.slow or took >= SLOW_AFTER
        self.recovered = self.slow or self.error is not None
        self.error = None
        if self.io_error is not None:
            self.recovered = False
            self.fail(self.io_error)
        elif self.partition is not None and self.partition.failed:  # what it went out for is stored; keeping its files in order failed
            self.recovered = False
            self.fail(StorageFailed("keeping its files in order failed"))
        else:
            self.after_commit()
        return self.io_error

    def after_commit(self) -> None:
        """It is in order: plan the sync of what needed none, and the word for readers, in a while."""
        partition = self.partition
        if self.read_error is not None:
            error, self.read_error = self.read_error, None
            self.fail(error)
            return
        self._failures = 0
        if self._publish_at is None and partition is not None and (partition.log.durability != "fsync" or partition.log.unsynced):
            self._publish_at = self._clock.read().elapsed + PUBLISH_AFTER

    def undo(self, error: PenstockError) -> None:
        """Go back to what is committed, because a turn was broken off before its commit."""
        if self.partition is not None and not self.partition.is_committed:
            self.partition.failed = True
            self.fail(error)
            self.try_open()

    def _finish_commit(self) -> None:
        """Bring a commit to its end that was broken off."""
        assert self.partition is not None
        try:
            if not self.partition.is_committed:
                self.partition.finish_interrupted_commit()
        except StorageFailed as error:
            raise OutcomeUnknown(f"storage failed ({error}) and the turn was interrupted; repeat with the same request id") from error

    def reopen(self) -> None:
        """Open it, or reopen it after a failure."""
        if self.partition is None:
            self.partition = self._open_partition(self.number)
            self.was_opened = True
        elif self.partition.failed:
            self.partition.reopen()

    def is_due_for_retry(self, now: int) -> bool:
        """Whether it is failing, and it is time to try it again."""
        return self.error is not None and not self.in_io and now >= self._retry_at

    def take_due_publish(self, now: int) -> bool:
        """Whether it is time to sync what needed no sync, and to tell readers how far the log goes."""
        if self._publish_at is None or now < self._publish_at:
            return False
        self._publish_at = None
        return True

    def is_due_for_retention(self) -> bool:
        """Whether it is time for retention to look at it."""
        partition = self.usable_partition
        when = partition.next_retention()
        return when is not None and when <= partition.now().elapsed

    def changed(self) -> bool:
        """Whether anything happened here since this was last asked."""
        seen, self._records_seen = self._records_seen, -1 if self.partition is None else self.partition.records_applied
        return seen != self._records_seen

    def plan(self, now: int) -> None:
        """When it wants to be visited next, unless somebody comes before."""
        if self.in_io:
            self.next_run = None  # it plans anew when it has landed
            return
        if self.error is not None:
            self.next_run = self._retry_at
            return
        if self.partition is None:
            self._plan_closed(now)
            return
        partition = self.partition
        elapsed, wall = partition.state.next_due()
        moment = partition.now()
        wait = self._idle_wait(now, partition)
        if elapsed is not None:
            wait = min(wait, elapsed - moment.elapsed)
        if wall is not None:
            wait = min(wait, WALL_CHECK, wall - moment.wall)
        retention = partition.next_retention()
        if retention is not None:
            wait = min(wait, retention - moment.elapsed)
        if self._publish_at is not None:
            wait = min(wait, self._publish_at - now)
        for when in self.transfers_under_way.values():
            if when < 0:
                wait = min(wait, -when - now)
        self.next_run = now + max(0, wait)

    # -- closed --------------------------------------------------------------------------------------

    def _plan_closed(self, now: int) -> None:
        """When something comes due in it although it is closed."""
        known = self.summary
        if known is None or (known.due_elapsed is None and known.due_wall is None):
            self.next_run = None if known is not None else now
            return
        raw = self._clock.read()
        shift, rebooted = elapsed_shift(known, raw, self._clock.boot)
        waits = [] if known.due_elapsed is None else [0 if rebooted else known.due_elapsed - raw.elapsed - shift]
        if known.due_wall is not None:
            waits.append(min(CLOSED_WALL_CHECK, known.due_wall - raw.wall))
        self.next_run = now + max(0, min(waits))

    @property
    def is_due(self) -> bool:
        """Whether something has come due in it while it was closed."""
        known = self.summary
        if known is None:
            return True
        raw = self._clock.read()
        shift, rebooted = elapsed_shift(known, raw, self._clock.boot)
        elapsed = known.due_elapsed is not None and (rebooted or known.due_elapsed <= raw.elapsed + shift)
        return elapsed or (known.due_wall is not None and known.due_wall <= raw.wall)

    def _idle_wait(self, now: int, partition: Partition) -> int:
        """How long until it may be closed if nothing happens in it."""
        if partition.records_applied != self._idle_records:
            self._idle_records, self._idle_since = partition.records_applied, now
            return self.idle_after
        return max(0, self._idle_since + self.idle_after - now) if self._is_quiet(partition) else self.idle_after

    def _is_quiet(self, partition: Partition) -> bool:
        """Whether nothing is under way that needs it open."""
        return partition.is_idle and not (
            self.transfers_under_way or self.undelivered_leases or self.pending_answers or self._publish_at is not None
        )

    def may_close(self, now: int) -> bool:
        """Whether nothing has happened in it for a while, and nothing is under way."""
        partition = self.usable_partition
        return partition.records_applied == self._idle_records and now >= self._idle_since + self.idle_after and self._is_quiet(partition)

    def stay_open(self, now: int) -> None:
        """Somebody needs it although nothing happens in it."""
        self._idle_since = now

    def close(self) -> None:
        """Close its partition, and keep in mind what is worth knowing of it."""
        assert self.partition is not None
        self.summary = self.partition.summary()
        self._idle_records = -1
        partition, self.partition = self.partition, None
        partition.close()

    def __repr__(self) -> str:
        return f"Member({self.number}, {self.error or self.partition})"
