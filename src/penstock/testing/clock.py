"""A clock that moves only when a test moves it.

Owns: `ManualClock`. Unless told otherwise, it starts at the same moment in every test, so that the times of two
failures can be compared.
"""

import math
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import ClassVar

from penstock.words.clock import HOUR, MINUTE, SECOND, Moment
from penstock.words.values import instant, timestamp

START_ELAPSED = 1 * HOUR
START_WALL = 1_767_225_600_000_000
"""2026-01-01 00:00:00 UTC, in microseconds."""
BOOT_ELAPSED = 1 * MINUTE
"""The elapsed time right after a reboot."""


class ManualClock:
    """A clock that a test sets. Durations are seconds or a `timedelta`.

    >>> clock = ManualClock()
    >>> clock.now()
    datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)
    >>> clock.advance(5)
    >>> clock.now()
    datetime.datetime(2026, 1, 1, 0, 0, 5, tzinfo=datetime.timezone.utc)

    start: the date and time at which it begins, with a timezone.

    Any thread may move it. Calls of a broker that wait for a time are woken when the clock reaches it.
    """

    UNIT: ClassVar[int] = SECOND
    """What 1 means as a duration, in microseconds."""

    def __init__(self, start: datetime | None = None) -> None:
        self._boots = 1
        self._moment = Moment(START_ELAPSED, START_WALL if start is None else instant(start, "start"))
        self._moving = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    @property
    def boot(self) -> str:
        return f"boot-{self._boots}"

    def read(self) -> Moment:
        return self._moment

    def now(self) -> datetime:
        """The date and time of the clock, in UTC."""
        return timestamp(self._moment.wall)

    def advance(self, duration: float | timedelta) -> None:
        """Move elapsed time and wall time forward by the same duration, and wake the calls that wait for a time."""
        passed = self._duration(duration)
        with self._moving:
            self._moment = Moment(self._moment.elapsed + passed, self._moment.wall + passed)
        self._moved()

    def step_wall(self, step: float | timedelta) -> None:
        """Move wall time forward or back, as setting the machine's clock does. Elapsed time does not change."""
        found = self._microseconds(step)
        with self._moving:
            self._moment = Moment(self._moment.elapsed, self._moment.wall + found)
        self._moved()

    def reboot(self, downtime: float | timedelta = timedelta(minutes=1)) -> None:
        """Simulate a reboot: wall time moves forward by `downtime`, elapsed time starts again.

        Close the broker before and open it after: no process lives through a reboot.
        """
        off = self._duration(downtime)
        with self._moving:
            self._boots += 1
            self._moment = Moment(BOOT_ELAPSED, self._moment.wall + off)
        self._moved()

    def watch(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Have `moved` called after every move, in the thread that moves the clock. Returns a function that ends this.

        Brokers use it to wake waiting calls.
        """
        with self._moving:
            self._watchers.append(moved)

        def unwatch() -> None:
            with self._moving:
                if moved in self._watchers:
                    self._watchers.remove(moved)

        return unwatch

    def _moved(self) -> None:
        with self._moving:
            watchers = [*self._watchers]
        for moved in watchers:
            moved()

    def _microseconds(self, duration: float | timedelta) -> int:
        if isinstance(duration, timedelta):
            return duration // timedelta(microseconds=1)
        if isinstance(duration, bool) or not isinstance(duration, int | float) or not math.isfinite(duration):
            raise ValueError(f"the duration is {duration!r}; give seconds or a timedelta")
        return duration * self.UNIT if isinstance(duration, int) else round(duration * self.UNIT)

    def _duration(self, duration: float | timedelta) -> int:
        found = self._microseconds(duration)
        if found < 0:
            raise ValueError("the duration is negative; use step_wall to set the date back")
        return found

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("_moving", "_watchers")}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Nobody watches a copy."""
        ManualClock.__init__(self)
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.boot}, elapsed={self._moment.elapsed}, wall={self._moment.wall})"


class MicrosecondClock(ManualClock):
    """A ManualClock for tests of Penstock's own modules, where all durations are microseconds."""

    UNIT = 1
