"""Threads and a thread pool that stay usable after a Ctrl-C in the thread that starts them.

Owns: `InterruptSafeThread` and `InterruptSafePool`.
`threading.Thread.start` and the executors of `concurrent.futures` take locks in Python code: a KeyboardInterrupt at the
wrong moment leaves such a lock held for ever. Here every step that another thread waits for is one call of a C
function, which an interrupt cannot split.
"""

import logging
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


def is_held_here(lock: Any) -> bool:
    """Whether this thread holds an RLock."""
    held: bool = lock._is_owned()  # not in the type stubs
    return held


class InterruptSafeThread:
    """A daemon thread, started when it is constructed."""

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
        """Wait until the thread has ended. Returns at once when called from that thread."""
        if get_ident() != self._ident:
            with self._running:
                pass


class InterruptSafePool:
    """Up to `most` threads that run jobs, oldest job first. A thread is started when a job finds no idle one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[InterruptSafeThread] = []
        self._idle = 0
        """How many threads wait for a job; approximate, as it is counted without a lock."""
        self._ended = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job in a thread of the pool, or in the calling thread when the pool is closed."""
        self._jobs.put(job)
        if self._ended:
            self._run_remaining()
        elif self._jobs.qsize() > self._idle and len(self._threads) < self._most:
            self._threads.append(InterruptSafeThread(self._work))

    def close(self) -> None:
        """Wait until all jobs are done, and end the threads."""
        self._jobs.put(None)
        for thread in [*self._threads]:
            thread.join()
        self._ended = True
        self._run_remaining()  # jobs submitted after the threads were told to end

    def _run_remaining(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                self._jobs.put(None)
                return
            if job is not None:
                _do(job)

    def _work(self) -> None:
        while True:
            self._idle += 1
            job = self._jobs.get()
            self._idle -= 1
            if job is None:
                self._jobs.put(None)  # for the other threads, also for one that an interrupted `submit` did not note
                return
            _do(job)


def _do(job: Callable[[], None]) -> None:
    """Run a job. An exception is logged, so that the thread lives on for the next job."""
    try:
        job()
    except Exception:
        logging.getLogger("penstock").exception("a job of a thread pool failed")
