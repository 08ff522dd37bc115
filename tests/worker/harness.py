"""Helpers that run workers in tests.

Owns: `running_worker`, which runs a worker in a thread while a block runs, and `HandlerEvents`, to which handlers add
values that tests wait for. No test sleeps: it waits for an event, an item, or the end of a thread. WAIT limits only how
long a failing test takes.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from penstock import Broker, Queue
from penstock.words.clock import SystemClock
from penstock.worker.worker import Worker

WAIT = 20.0
T = TypeVar("T")


class HandlerEvents:
    """Values that handlers report to a test."""

    def __init__(self) -> None:
        self._words: SimpleQueue[Any] = SimpleQueue()

    def add(self, word: Any) -> None:
        self._words.put(word)

    def next(self) -> Any:
        """Wait for the next value; fails after WAIT seconds."""
        return self._words.get(timeout=WAIT)

    def take(self, count: int) -> list[Any]:
        return [self.next() for _ in range(count)]

    def rest(self) -> list[Any]:
        """All values so far, without waiting."""
        found = []
        try:
            while True:
                found.append(self._words.get_nowait())
        except Empty:
            return found


class WorkerThread:
    """Runs a worker in a thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="worker under test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._worker.run()
        except BaseException as error:
            self._errors.append(error)

    def ended(self) -> list[BaseException]:
        """Wait for the end of the thread; gives the errors that the worker raised."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the worker does not end"
        return self._errors


@contextmanager
def running_worker(worker: Worker) -> Iterator[WorkerThread]:
    """Run a worker while the block runs; then drain it."""
    running = WorkerThread(worker)
    try:
        yield running
    finally:
        while running._thread.is_alive() and not running._worker._run and not running._errors:
            pass  # stop has no effect before the run has begun
        worker.stop()
        errors = running.ended()
    assert errors == []


def wait_until(look: Callable[[], T], wanted: Callable[[T], bool] = bool) -> T:
    """Call a function until its result is as wanted, and give the result. Other threads run between the calls."""
    clock = SystemClock()
    end = clock.read().elapsed + int(WAIT * 1e6)
    between = threading.Event()
    while not wanted(found := look()):
        assert clock.read().elapsed < end, f"still {found!r}"
        between.wait(0.001)
    return found


def wait_elapsed(broker: Broker, seconds: float) -> None:
    """Wait until this much time has passed by the clock of the queue: until an item scheduled for then is ready."""
    clock = broker.create_queue("clock", exist_ok=True)
    clock.produce(b"", at=datetime.now(UTC) + timedelta(seconds=seconds))
    clock.lease(wait=seconds + WAIT).complete()


def wait_completed(queue: Queue, count: int) -> None:
    """Wait until at least this many items are completed."""
    wait_until(lambda: queue.stats().completed, lambda completed: completed >= count)
