"""Thread pools that stay usable after an interrupt, and a thread that reads ahead."""

import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue

import pytest

from penstock.words.threads import InterruptSafePool, InterruptSafeThread, read_ahead

SECONDS = 20.0
"""Only a failing test waits so long."""


def assert_it_ends(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_jobs_are_run_also_while_and_after_the_pool_is_closed() -> None:
    done: SimpleQueue[int] = SimpleQueue()
    pool = InterruptSafePool(3)
    for number in range(50):
        pool.submit(lambda number=number: done.put(number))  # type: ignore[misc]
    assert_it_ends(pool.close)
    for number in range(50, 55):
        pool.submit(lambda number=number: done.put(number))  # type: ignore[misc]
    assert sorted(done.get(timeout=SECONDS) for _ in range(55)) == list(range(55))


def test_a_pool_can_be_closed_although_an_interrupt_came_when_it_had_just_started_a_thread() -> None:
    """The pool does not know that thread, which takes jobs and the sign to end like the others."""
    pool = InterruptSafePool(2)
    unknown = InterruptSafeThread(pool._work)
    ran = threading.Barrier(3)

    def wait() -> None:
        ran.wait(SECONDS)

    for _ in range(2):
        pool.submit(wait)
    pool._threads.append(InterruptSafeThread(pool._work))
    ran.wait(SECONDS)
    assert_it_ends(pool.close)
    assert_it_ends(unknown.join)


def test_the_next_value_is_read_by_another_thread_while_one_is_used() -> None:
    begun: SimpleQueue[int] = SimpleQueue()
    closed: list[bool] = []

    def numbers() -> Generator[int, None, None]:
        try:
            for number in range(10):
                begun.put(threading.get_ident())
                yield number
        finally:
            closed.append(True)

    reading = read_ahead(numbers())
    assert next(reading) == 0
    readers = {begun.get(timeout=SECONDS), begun.get(timeout=SECONDS)}  # of 0, and of 1, which nobody has asked for
    assert len(readers) == 1 and readers != {threading.get_ident()}
    assert begun.empty()  # no further
    reading.close()
    assert closed == [True]


def test_reading_ahead_gives_every_value_and_then_the_error() -> None:
    def numbers() -> Generator[int, None, None]:
        yield 1
        yield 2
        raise LookupError("no third")

    reading = read_ahead(numbers())
    assert [next(reading), next(reading)] == [1, 2]
    with pytest.raises(LookupError, match="no third"):
        next(reading)
    assert [*read_ahead(one for one in range(3))] == [0, 1, 2]
