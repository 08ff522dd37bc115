"""Threads that an interrupt in the thread which begins them does not harm.

Owns: `Thread` and `Pool`. `threading.Thread.start` and the executors of `concurrent.futures` hold locks of their own, written in Python:
a Ctrl-C that comes at the wrong moment leaves such a lock taken for ever. Here every step that another thread depends on is one call of C.
"""

import logging
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue


class InterruptSafeThread:
    """A thread that runs. It does not keep the process from ending."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._running = allocate_lock()
        self._running.acquire()
        self._ident = start_new_thread(self._work, ())

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._running.release()

    def join(self) -> None:
        """Wait for its end, unless it is this very thread."""
        if get_ident() != self._ident:
            with self._running:
                pass


class InterruptSafePool:
    """A few threads that do jobs, in the order in which they came. They are begun when they are first needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[InterruptSafeThread] = []
        self._idle = 0
        """About how many of the threads wait for a job."""
        self._ended = False

    def submit(self, job: Callable[[], None]) -> None:
        """Have something done; where the pool is closed, by this thread."""
        self._jobs.put(job)
        if self._ended:
            self._do_the_rest()
        elif self._jobs.qsize() > self._idle and len(self._threads) < self._most:
            self._threads.append(InterruptSafeThread(self._work))

    def close(self) -> None:
        """End the threads, once what they have to do is done."""
        threads = [*self._threads]
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        self._ended = True
        self._do_the_rest()  # what came behind their end

    def _do_the_rest(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                _do(job)

    def _work(self) -> None:
        while True:
            self._idle += 1
            job = self._jobs.get()
            self._idle -= 1
            if job is None:
                return
            _do(job)


def _do(job: Callable[[], None]) -> None:
    """A job that raises must not end the thread: others are waiting for it."""
    try:
        job()
    except Exception:
        logging.getLogger("penstock").exception("a job went wrong")
