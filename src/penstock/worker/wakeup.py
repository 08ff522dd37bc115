"""A wake-up signal for one thread.

Owns: `WakeUp`. Unlike `threading.Event` it has no lock that an interrupted thread could be holding, so it may be set in
a signal handler and inside a turn. The waiting thread must look for work after `wait` returns, not before.
"""

from queue import Empty, SimpleQueue


class WakeUp:
    """Wakes the thread that waits for it. Setting it twice before that thread wakes is like setting it once."""

    __slots__ = ("_signals", "is_set")

    def __init__(self) -> None:
        self._signals: SimpleQueue[None] = SimpleQueue()
        self.is_set = False
        """Callers that set it often check this first, to save the call."""

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            self._signals.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set or the time is over, then clear it. Gives whether it was set."""
        try:
            self._signals.get(timeout=seconds)
            return True
        except Empty:
            return False
        finally:
            self.is_set = False
