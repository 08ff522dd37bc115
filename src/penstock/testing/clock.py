"""A clock that moves only when a test moves it.

Owns: `ManualClock`. It starts at the same moment in every test, so that the times of two failures can be compared.
"""

from datetime import timedelta

from penstock.words.clock import HOUR, MINUTE, Moment

START_ELAPSED = 1 * HOUR
START_WALL = 1_767_225_600_000_000
"""2026-01-01 00:00:00 UTC, in microseconds."""
BOOT_ELAPSED = 1 * MINUTE
"""The elapsed time right after a reboot."""


class ManualClock:
    """A clock that a test sets. Durations are microseconds, or a `timedelta`.

    >>> clock = ManualClock()
    >>> before = clock.read()
    >>> clock.advance(timedelta(seconds=5))
    >>> clock.read().elapsed - before.elapsed
    5000000
    """

    def __init__(self) -> None:
        self._boots = 1
        self._elapsed = START_ELAPSED
        self._wall = START_WALL

    @property
    def boot(self) -> str:
        return f"boot-{self._boots}"

    def read(self) -> Moment:
        return Moment(self._elapsed, self._wall)

    def advance(self, duration: int | timedelta) -> None:
        """Move elapsed time and wall time forward by the same duration."""
        passed = _duration(duration)
        self._elapsed += passed
        self._wall += passed

    def step_wall(self, step: int | timedelta) -> None:
        """Move wall time forward or back, as setting the machine's clock does. Elapsed time does not change."""
        self._wall += _microseconds(step)

    def reboot(self, downtime: int | timedelta = 1 * MINUTE) -> None:
        """Simulate a reboot: wall time moves forward by `downtime`, elapsed time starts again."""
        off = _duration(downtime)
        self._boots += 1
        self._elapsed = BOOT_ELAPSED
        self._wall += off

    def __repr__(self) -> str:
        return f"ManualClock({self.boot}, elapsed={self._elapsed}, wall={self._wall})"


def _microseconds(duration: int | timedelta) -> int:
    return duration // timedelta(microseconds=1) if isinstance(duration, timedelta) else duration


def _duration(duration: int | timedelta) -> int:
    found = _microseconds(duration)
    if found < 0:
        raise ValueError("the duration is negative; use step_wall to set the date back")
    return found
