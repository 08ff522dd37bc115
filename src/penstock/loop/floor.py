"""A floor of disk space: produce is refused before the disk is full, so that there is room to complete, bury and tidy up.

Owns: `Floor`. The system is asked only every LOOK_BYTES written, and at every check once the floor is near.
"""

from penstock.logs.api import Log
from penstock.words.errors import QueueFull
from penstock.words.limits import MIB

LOOK_BYTES = 64 * MIB


class Floor:
    """How many bytes must stay free; 0 is no floor."""

    __slots__ = ("_known", "_log", "_since", "bytes")

    def __init__(self, log: Log, least: int) -> None:
        self.bytes = least
        self._log = log
        self._known = 0
        self._since = LOOK_BYTES

    def used(self, size: int) -> None:
        self._since += size

    def check(self) -> None:
        """Raise QueueFull when less than the floor is free."""
        if self._since >= LOOK_BYTES or self._known - self._since < self.bytes + LOOK_BYTES:
            self._known, self._since = self._log.free_bytes(), 0
        if self._known - self._since < self.bytes:
            raise QueueFull(f"only {self._known:,} bytes are free and {self.bytes:,} must stay so; make room, or wait for retention")
