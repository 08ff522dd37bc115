"""Workers under test.

Owns: `working`, which runs a worker in a thread for as long as a block lasts, and `Log`, where handlers write what they do and tests wait
for it. Nothing sleeps: a test waits for a word, an item, or the end of a thread, and WAIT is only as long as a broken test may take.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from penstock import Broker, Queue
from penstock.words.clock import SystemClock
from penstock.worker.worker import Worker

WAIT = 20.0
T = TypeVar("T")


class HandlerEvents:
    """Words from handlers."""

    def __init__(self) -> None:
        self._words: SimpleQueue[Any] = SimpleQueue()

    def add(self, word: Any) -> None:
        self._words.put(word)

    def next(self) -> Any:
        """The next word; a broken test has none."""
        return self._words.get(timeout=WAIT)

    def take(self, count: int) -> list[Any]:
        return [self.next() for _ in range(count)]

    def rest(self) -> list[Any]:
        """What there is, without waiting."""
        found = []
        try:
            while True:
                found.append(self._words.get_nowait())
        except Empty:
            return found


class WorkerThread:
    """A worker in a thread."""

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
        """Wait for its end; what it raised."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the worker does not end"
        return self._errors


@contextmanager
def running_worker(worker: Worker) -> Iterator[WorkerThread]:
    """The worker works while the block lasts; then it drains."""
    running = WorkerThread(worker)
    try:
        yield running
    finally:
        while running._thread.is_alive() and not running._worker._run and not running._errors:
            pass  # it has not begun yet, so it could not hear
        worker.stop()
        errors = running.ended()
    assert errors == []


def wait_until(look: Callable[[], T], wanted: Callable[[T], bool] = bool) -> T:
    """Look again and again, until what is seen is wanted: for what nobody tells of. In between others have the interpreter."""
    clock = SystemClock()
    end = clock.read().elapsed + int(WAIT * 1e6)
    between = threading.Event()
    while not wanted(found := look()):
        assert clock.read().elapsed < end, f"still {found!r}"
        between.wait(0.001)
    return found


def wait_elapsed(broker: Broker, seconds: float) -> None:
    """Wait until so much time has passed, as a queue counts it: an item that is due then has come."""
    clock = broker.create_queue("clock", exist_ok=True)
    clock.produce(b"", at=SystemClock().read().wall / 1e6 + seconds)
    clock.lease(wait=seconds + WAIT).complete()


def wait_completed(queue: Queue, count: int) -> None:
    """Wait until so many items are completed."""
    wait_until(lambda: queue.stats().completed, lambda completed: completed >= count)
