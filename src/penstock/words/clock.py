"""Time as it is passed into everything else.

Owns: `Moment` (one reading of both clocks) and the system's clock.
Two clocks, because they answer two questions: *wall* time says what the date is and may be stepped by an
operator; *elapsed* time only ever grows by the seconds that really passed, but starts anew at a reboot.
`at` and timestamps follow the wall; leases, delays and ttl follow elapsed time.
Unit everywhere: whole microseconds.
"""

import sys
import time
import uuid
from pathlib import Path
from typing import Protocol

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
    """Where time comes from. `boot` names the span over which `elapsed` readings may be compared."""

    @property
    def boot(self) -> str: ...

    def read(self) -> Moment: ...


class SystemClock:
    """The machine's clocks. Elapsed time counts while the machine sleeps, where the system offers that."""

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
    # Without a boot id every start counts as a reboot: leases then get their full timeout again, which is safe.
    return uuid.uuid4().hex
