"""Thread pools that stay usable after an interrupt."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from penstock.words.threads import InterruptSafePool, InterruptSafeThread

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
