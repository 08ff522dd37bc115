"""Places that are threads: they take items as long as there are any, and sleep when there are none.

Owns: `Places`, what is common to handlers in threads and in child processes: starting, sleeping, waking and ending. A sleeping thread
leaves a lock in `_idle` and waits for it; whoever takes the lock out of there releases it. So each is woken exactly once, and the one
that fell asleep last wakes first.
How many to wake: as many as there are items, unless handlers are so quick that one thread has done them before another is awake. If that
turns out wrong, because a slow one is among them, the feeder sees items wait while places sleep, and has more of them look.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from penstock.worker.shelf import Waiting

QUICK = 60.0
"""Microseconds: of handlers that take less, one thread does many."""
STRIDE = 64
"""Items of a place between two looks at the clock, if they are quick or places many."""


class Places:
    """Threads that take items from the shelf."""

    stoppable = False
    """Whether `cancel` can end what handlers are at."""

    def __init__(self, most: int, shelf: Waiting, hungry: Callable[[], None], ended: Callable[[], None]) -> None:
        self.most = most
        self.shelf = shelf
        self.hungry = hungry
        """Called when a place finds little or nothing on the shelf."""
        self._ended = ended
        """Called when the last place has closed."""
        self.each = QUICK
        """Microseconds that an item takes, about, as one place sees it."""
        self.closing = False
        self._idle: deque[threading.Lock] = deque()
        self._changing = threading.Lock()
        self._started = 0
        self._over = False
        self._threads = 0
        self._unborn = 0
        self._step = 1

    # -- for feeders -----------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._idle) + self.most - self._started

    def wake(self, count: int) -> None:
        self._step = 1
        self._wake(1 if self.each < QUICK else count)

    def spread(self) -> None:
        self._step = min(2 * self._step, self.most)
        self._wake(min(self._step, len(self.shelf)))

    def _wake(self, count: int) -> None:
        for woken in range(count):
            try:
                self._idle.pop().release()
            except IndexError:
                self._start(count - woken)
                return

    def _start(self, count: int) -> None:
        """Start so many threads, if there are places for them. Each helps to start the others, so that nobody else waits for all."""
        with self._changing:
            count = 0 if self.closing else max(0, min(count, self.most - self._started))
            self._started += count
            self._unborn += count
        self._bear()

    def _bear(self) -> None:
        with self._changing:
            if not self._unborn:
                return
            self._unborn -= 1
            self._threads += 1
            number = self._threads
        threading.Thread(target=self._live, name=f"penstock handler {number}", daemon=True).start()

    def start(self) -> None:
        """Be ready before the first item comes, if that takes long."""

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """No place takes anything more. `ended` is called when the last has finished what it has."""
        with self._changing:
            self.closing = True
        self._wake(self.most)
        self._count(0)

    def cancel(self) -> None:
        """Stop what handlers are at, if it can be."""

    def _count(self, gone: int) -> None:
        """So many threads are not to be reckoned with any more."""
        with self._changing:
            self._started -= gone
            over = self.closing and not self._started and not self._over
            self._over = self._over or over
        if over:
            self._ended()

    # -- in each thread --------------------------------------------------------------------------------

    def _live(self) -> None:
        self._bear()
        self._bear()
        left_behind = False
        try:
            left_behind = self._work()
        finally:
            self._count(0 if left_behind else 1)

    @abstractmethod
    def _work(self) -> bool:
        """Take items until `_sleep` says that it is over. True: the thread was counted out before."""

    def _note(self, items: int, took: int) -> int:
        """So many items took so long in one place; gives after how many to look at the clock again. What is far out counts less."""
        sample = min(took / items, 8 * self.each + 100)
        self.each += (sample - self.each) / 8
        return STRIDE if self.each < QUICK / 4 else max(1, min(STRIDE, self.most // 8))

    def _sleep(self) -> bool:
        """Wait until there may be something; False when the worker drains."""
        gate = threading.Lock()
        gate.acquire()
        self._idle.append(gate)
        self.hungry()
        if (self.closing or self.shelf.ready) and self._unsleep(gate):
            return not self.closing
        gate.acquire()
        return not self.closing

    def _unsleep(self, gate: threading.Lock) -> bool:
        """Take the lock out again, unless somebody has, who will release it."""
        try:
            self._idle.remove(gate)
        except ValueError:
            return False
        return True
