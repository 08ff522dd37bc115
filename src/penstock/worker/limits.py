"""How fast a worker may take items.

Owns: `Bucket` (a queue's rate limit) and `Strangers` (how long items that are for others are put off). Times are microseconds.
"""

from penstock.words.clock import SECOND
from penstock.worker.verdicts import Chance

BURST = 0.1
"""Seconds: what was not used of a rate is kept for so long."""
FIRST, LAST = 1 * SECOND, 60 * SECOND
PER_SECOND = 1_000
"""Items that are for others are put off long enough that no more than about so many come by in a second."""


class Bucket:
    """So many items a second."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._most = max(1.0, per_second * BURST)
        self._there = self._most
        self._since = 0

    def take(self, want: int, now: int) -> tuple[int, int]:
        """How many may be taken now, and, if none, how long to wait for one."""
        if self._since:
            self._there = min(self._most, self._there + (now - self._since) * self._rate / SECOND)
        self._since = now
        taken = min(want, int(self._there))
        self._there -= taken
        return taken, 0 if taken else int((1 - self._there) * SECOND / self._rate) + 1

    def put_back(self, count: int) -> None:
        """So many were not there after all."""
        self._there += count


class Strangers:
    """Items of kinds that are handled elsewhere."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._delay = FIRST
        self._since = 0
        self._seen = 0

    def delay(self, count: int, now: int) -> int:
        """How long to put so many more off. By chance more or less, or else the same workers might get the same items each time."""
        if now - self._since > self._delay:
            self._delay = min(LAST, max(FIRST, self._seen * SECOND // PER_SECOND))
            self._since, self._seen = now, 0
        self._seen += count
        return round(self._delay * (0.25 + 0.75 * self._chance()))
