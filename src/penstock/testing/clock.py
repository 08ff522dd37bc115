"""A clock that moves only when told to.

Owns: `ManualClock`. It starts at the same moment in every test, so that times in a failure can be read and compared.
"""

from penstock.words.clock import HOUR, MINUTE, Moment

START_ELAPSED = 1 * HOUR
START_WALL = 1_767_225_600_000_000
"""2026-01-01 00:00:00 UTC, in microseconds."""
BOOT_ELAPSED = 1 * MINUTE
"""What elapsed time shows when a machine has just booted."""


class ManualClock:
    """A `penstock.words.clock.Clock` under a test's control. All arguments are microseconds.

    >>> clock = ManualClock()
    >>> before = clock.read()
    >>> clock.advance(5_000_000)
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

    def advance(self, duration: int) -> None:
        """Let time pass: both clocks move on."""
        if duration < 0:
            raise ValueError("time does not run backwards; use step_wall to set the date back")
        self._elapsed += duration
        self._wall += duration

    def step_wall(self, step: int) -> None:
        """Set the date forward or back, as an operator does; no time passes."""
        self._wall += step

    def reboot(self, downtime: int = 1 * MINUTE) -> None:
        """Switch the machine off and on: the date moves on by `downtime`, elapsed time starts anew."""
        if downtime < 0:
            raise ValueError("time does not run backwards; use step_wall to set the date back")
        self._boots += 1
        self._elapsed = BOOT_ELAPSED
        self._wall += downtime

    def __repr__(self) -> str:
        return f"ManualClock({self.boot}, elapsed={self._elapsed}, wall={self._wall})"
