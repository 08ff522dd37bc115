"""A partition among the others of its queue: in order, failing, or not to be opened.

Owns: `Member` and its back-off. A partition whose storage fails is left alone for a while, longer each time, and then tried again; the
others do not wait for it. What it was asked meanwhile is refused with an error that says so and may be repeated.
"""

from collections.abc import Callable

from penstock.loop.partition import Partition
from penstock.rules.commands import Pause
from penstock.rules.state import State
from penstock.words.clock import MILLISECOND, SECOND, Clock
from penstock.words.errors import BrokerClosed, CorruptLog, OutcomeUnknown, PenstockError, StorageFailed

FIRST_WAIT = 500 * MILLISECOND
LAST_WAIT = 5 * SECOND
GROWTH = 1.5
JITTER = 0.2
REST = 200 * MILLISECOND
"""What "interval" promises: so much may be lost with the machine."""
WALL_CHECK = 1 * SECOND
"""The date may be stepped: what waits for one is looked at this often."""


class Member:
    """One partition of a queue."""

    def __init__(self, number: int, open_it: Callable[[int], Partition], clock: Clock, chance: Callable[[], float]) -> None:
        self.number = number
        self.partition: Partition | None = None
        self.error: PenstockError | None = None
        self.fenced = True
        """Whether every slot that the map gives it may be used: not before its fences stand."""
        self.touched = False
        self.owed: list[int] = []
        """Leases that it gave and nobody got."""
        self.missed: Pause | None = None
        """What was said to the whole queue while this one was away."""
        self.next_run: int | None = None
        self.carrying: dict[bytes, int] = {}
        """destination → sequence of the transfer that is under way, or (negative) when to try again."""
        self._open_it = open_it
        self._clock = clock
        self._chance = chance
        self._failures = 0
        self._retry_at = 0
        self._rest_at: int | None = None
        self._seen = -1
        self.try_open()

    @property
    def healthy(self) -> bool:
        return self.partition is not None and self.error is None

    @property
    def open(self) -> Partition:
        """The partition, or why it cannot be used."""
        if self.partition is None or self.error is not None:
            raise self.refusal
        return self.partition

    @property
    def known(self) -> Partition | None:
        """The partition even while it is failing, if what is known of it is true."""
        return None if self.partition is None or self.partition.failed else self.partition

    @property
    def state(self) -> State:
        return self.open.state

    @property
    def refusal(self) -> PenstockError:
        """The error for whoever asks for this partition."""
        if isinstance(self.error, CorruptLog):
            return CorruptLog(f"partition {self.number} cannot be opened ({self.error}); the others work")
        return StorageFailed(f"partition {self.number} is failing ({self.error}); it is tried again by itself, so try again in a moment")

    def try_open(self) -> None:
        """Open it, or reopen it after a failure; whether or not that worked is in `error`."""
        try:
            if self.partition is None:
                self.partition = self._open_it(self.number)
            elif self.partition.failed:
                self.partition.reopen()
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

    def undo(self, error: PenstockError) -> None:
        """Go back to what is committed, because a turn was broken off before its commit."""
        if self.partition is not None and not self.partition.is_committed:
            self.partition.failed = True
            self.fail(error)
            self.try_open()

    def finish(self) -> PenstockError | None:
        """Bring a commit to its end that was broken off; the error tells what became of it."""
        assert self.partition is not None
        try:
            if self.partition.failed or not self.partition.is_committed:
                self.partition.finish()
        except StorageFailed as error:
            self.fail(error)
            return OutcomeUnknown(f"storage failed ({error}) and the turn was interrupted; repeat with the same request id")
        return None

    def recover(self, now: int) -> bool:
        """Try again when it is time; whether the partition is in order now."""
        if self.error is not None and now >= self._retry_at:
            self.try_open()
        return self.error is None

    def commit(self) -> PenstockError | None:
        """Make the turn's work durable; the error tells what became of it."""
        assert self.partition is not None
        try:
            self.partition.commit()
        except (StorageFailed, OutcomeUnknown) as error:
            self.fail(error)
            return error
        if self.partition.failed:  # the turn is stored, but the house-keeping after it went wrong
            self.fail(StorageFailed("keeping its files in order failed"))
            return None
        self._failures = 0
        if self._rest_at is None and (self.partition.log.durability != "fsync" or self.partition.log.unsynced):
            self._rest_at = self._clock.read().elapsed + REST
        return None

    def rest(self, now: int) -> None:
        """In the lesser durability modes: from time to time what was written is synced, and readers are told of it."""
        if self._rest_at is not None and now >= self._rest_at:
            self._rest_at = None
            try:
                self.open.rest()
            except PenstockError as error:
                self.fail(error)

    def changed(self) -> bool:
        """Whether anything happened here since this was last asked."""
        seen, self._seen = self._seen, -1 if self.partition is None else self.partition.changes
        return seen != self._seen

    def plan(self, now: int) -> None:
        """When it wants to be visited next, unless somebody comes before."""
        if self.error is not None:
            self.next_run = self._retry_at
            return
        partition = self.open
        elapsed, wall = partition.state.next_due()
        moment = partition.now()
        waits = []
        if elapsed is not None:
            waits.append(elapsed - moment.elapsed)
        if wall is not None:
            waits.append(min(WALL_CHECK, wall - moment.wall))
        if self._rest_at is not None:
            waits.append(self._rest_at - now)
        retries = [-when - now for when in self.carrying.values() if when < 0]
        found = min((*waits, *retries), default=None)
        self.next_run = None if found is None else now + max(0, found)

    def __repr__(self) -> str:
        return f"Member({self.number}, {self.error or self.partition})"
