"""A bell: one thread waits, any other rings.

Owns: `Bell`. Ringing it twice is as ringing it once. It may be rung from a signal handler or a turn: nothing in it can be held.
Whoever waits looks after waiting at what there is to do, never before.
"""

from contextlib import suppress
from queue import Empty, SimpleQueue


class Bell:
    """Wakes one thread."""

    __slots__ = ("_rings", "rung")

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()
        self.rung = False
        """Whether ringing would add anything; who rings often looks first."""

    def ring(self) -> None:
        if not self.rung:
            self.rung = True
            self._rings.put(None)

    def wait(self, seconds: float | None = None) -> None:
        """Until it rings, or the time is over."""
        with suppress(Empty):
            self._rings.get(timeout=seconds)
        self.rung = False
