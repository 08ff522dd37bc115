"""A clock that moves only when told to.

Owns: `ManualClock`. It starts at the same moment in every test, so that times in a failure can be read and compared.
"""

from datetime import timedelta

from penstock.words.clock import HOUR, MINUTE, Moment

START_ELAPSED = 1 * HOUR
START_WALL = 1_767_225_600_000_000
"""2026-01-01 00:00:00 UTC, in microseconds."""
BOOT_ELAPSED = 1 * MINUTE
"""What elapsed time shows when a machine has just booted."""


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
        """Let time pass: elapsed time and the date move on by as much."""
        passed = _duration(duration)
        self._elapsed += passed
        self._wall += passed

    def step_wall(self, step: int | timedelta) -> None:
        """Set the date forward or back, as an operator does; no time passes."""
        self._wall += _microseconds(step)

    def reboot(self, downtime: int | timedelta = 1 * MINUTE) -> None:
        """Switch the machine off and on: the date moves on by `downtime`, elapsed time starts anew."""
        away = _duration(downtime)
        self._boots += 1
        self._elapsed = BOOT_ELAPSED
        self._wall += away

    def __repr__(self) -> str:
        return f"ManualClock({self.boot}, elapsed={self._elapsed}, wall={self._wall})"


def _microseconds(duration: int | timedelta) -> int:
    return duration // timedelta(microseconds=1) if isinstance(duration, timedelta) else duration


def _duration(duration: int | timedelta) -> int:
    found = _microseconds(duration)
    if found < 0:
        raise ValueError("time does not run backwards; use step_wall to set the date back")
    return found
