"""The clocks.

Owns: `Moment` (one reading of both clocks), `Clock`, `WatchedClock` and `SystemClock`.
*Wall* time is the date; it jumps when the machine's clock is set. *Elapsed* time grows only by the time that
passed, and starts again at a reboot. `at` and timestamps use wall time; leases, delays and ttl use elapsed time.
All times are whole microseconds.
"""

import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

MILLISECOND = 1_000
SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


class Moment(msgspec.Struct, frozen=True, gc=False):
    """One reading of both clocks, in microseconds."""

    elapsed: int
    wall: int


class Clock(Protocol):
    """A source of time. Two `elapsed` readings can be compared only when `boot` was the same for both."""

    @property
    def boot(self) -> str: ...

    def read(self) -> Moment: ...


@runtime_checkable
class WatchedClock(Clock, Protocol):
    """A clock that moves only when somebody moves it, for tests. Who waits for a time must watch it."""

    def watch(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Have `moved` called after every move. Returns a function that ends this."""
        ...


def watch_clock(clock: Clock, moved: Callable[[], None]) -> Callable[[], None]:
    """Have `moved` called after every move of a `WatchedClock`. Returns a function that ends this."""
    return clock.watch(moved) if isinstance(clock, WatchedClock) else lambda: None


class SystemClock:
    """The machine's clocks. Elapsed time includes the time the machine was asleep, on systems with CLOCK_BOOTTIME."""

    def __init__(self) -> None:
        self.boot = _boot_id()
        self._clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def read(self) -> Moment:
        return Moment(time.clock_gettime_ns(self._clock) // 1_000, time.time_ns() // 1_000)

    def __repr__(self) -> str:
        return f"SystemClock(boot={self.boot!r})"


def _boot_id() -> str:
    if sys.platform.startswith("linux"):
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        except OSError:
            pass
    # Without a boot id every start counts as a reboot. Leases then get their full timeout again, which is safe.
    return uuid.uuid4().hex
