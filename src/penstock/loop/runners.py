"""Threads that run turns which no caller's thread runs. All queues of a broker share them.

Owns: `Runners`: up to THREADS threads that run turns, and one that waits for the next planned turn. They start when
they are first needed. A turn never waits for a disk (loop.py), so a few threads serve many queues.
"""

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.words.clock import SECOND, Clock, watch_clock
from penstock.words.threads import InterruptSafeThread

THREADS = 4
IDLE_SECONDS = 60.0


class Runnable(Protocol):
    """What runners need of a queue's loop."""

    woken: bool
    """Whether it is in the list of loops that wait for a runner."""
    wakes_at: int | None
    """The elapsed time of its planned turn."""

    def run(self) -> None:
        """Run a turn. Must not raise."""
        ...


class Runners:
    """The threads that run turns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: SimpleQueue[Runnable | None] = SimpleQueue()
        self._changing = threading.Lock()
        self._threads: list[InterruptSafeThread] = []
        self._timer: InterruptSafeThread | None = None
        self._idle = 0
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._planned: list[tuple[int, int, Runnable]] = []
        self._numbers = count()
        self._closed = False
        self._unwatch = watch_clock(clock, lambda: self._alarm.put(None))

    def wake(self, loop: Runnable) -> None:
        """Have a turn run soon."""
        if loop.woken or self._closed:
            return
        loop.woken = True
        try:
            self._ready.put(loop)
        except BaseException:  # an interrupt
            loop.woken = False
            raise
        if not self._idle and len(self._threads) < THREADS:
            with self._changing:
                if not self._closed and len(self._threads) < THREADS:
                    self._begin(self._run)

    def plan(self, loop: Runnable, when: int) -> None:
        """Have a turn run at an elapsed time, unless one is planned before: that one plans the next."""
        with self._changing:
            if self._closed or (loop.wakes_at is not None and loop.wakes_at <= when):
                return
            heappush(self._planned, (when, next(self._numbers), loop))
            loop.wakes_at = when
            if self._timer is None:
                self._timer = self._begin(self._watch)
            first = self._planned[0][0] == when
        if first:
            self._alarm.put(None)

    def close(self) -> None:
        """Finish the running turns and end the threads."""
        with self._changing:
            self._closed = True
            threads = [*self._threads]
        self._unwatch()
        self._alarm.put(None)
        self._ready.put(None)
        for thread in threads:
            thread.join()

    def _begin(self, run: Callable[[], None]) -> InterruptSafeThread:
        thread = InterruptSafeThread(run)
        self._threads.append(thread)
        return thread

    def _run(self) -> None:
        while not self._closed:
            self._idle += 1
            loop = self._ready.get()
            self._idle -= 1
            if loop is None:
                self._ready.put(None)  # for the other threads, also for one that an interrupted `wake` did not note
                return
            loop.woken = False  # a wake-up from here on needs another turn
            loop.run()

    def _watch(self) -> None:
        while not self._closed:
            now = self._clock.read().elapsed
            due: list[Runnable] = []
            with self._changing:
                while self._planned and self._planned[0][0] <= now:
                    when, _, loop = heappop(self._planned)
                    if loop.wakes_at == when:
                        loop.wakes_at = None
                        due.append(loop)
                seconds = (self._planned[0][0] - now) / SECOND if self._planned else IDLE_SECONDS
            for loop in due:
                self.wake(loop)
            try:
                self._alarm.get(timeout=min(seconds, IDLE_SECONDS))
            except Empty:
                continue
