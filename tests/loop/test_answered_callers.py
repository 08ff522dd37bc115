"""Callers that have their answers are woken one by one."""

import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.loop.requests import AnsweredCallers, Request

SECONDS = 20.0
"""Only a failing test waits so long."""


class Sleepers:
    """Threads that sleep until they are woken, each for a request of its own."""

    def __init__(self) -> None:
        self.answered = AnsweredCallers()
        self.woken: list[int] = []
        self._awake = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self.requests: list[Request] = []

    def add(self, count: int) -> None:
        for _ in range(count):
            request = Request()
            request.wait_in_thread(self.answered)
            self.requests.append(request)
            self._threads.append(threading.Thread(target=self._sleep, args=(len(self._threads), request)))
            self._threads[-1].start()
            while not request.asleep:
                pass

    def _sleep(self, number: int, request: Request) -> None:
        request.sleep(SECONDS)
        self.woken.append(number)
        self._awake.release()

    def await_woken(self, count: int) -> list[int]:
        """Wait until so many more threads are awake; gives all that are."""
        for _ in range(count):
            assert self._awake.acquire(timeout=SECONDS)
        return self.woken

    def end(self) -> None:
        for request in self.requests:
            request.wake()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    found = Sleepers()
    yield found
    found.end()


def test_one_caller_is_woken_at_a_time_in_the_order_of_the_answers(sleepers: Sleepers) -> None:
    sleepers.add(3)
    for number in (1, 0, 2):
        sleepers.requests[number].finish("answer")
    assert not sleepers.woken and len(sleepers.answered) == 3
    for expected in ([1], [1, 0], [1, 0, 2]):
        sleepers.answered.wake_next()
        assert sleepers.await_woken(1) == expected
    sleepers.answered.wake_next()  # nobody is left


def test_a_caller_that_left_does_not_keep_the_next_one_waiting(sleepers: Sleepers) -> None:
    sleepers.add(2)
    for request in sleepers.requests:
        request.finish("answer")
    sleepers.requests[0].wake()
    assert sleepers.await_woken(1) == [0]
    sleepers.answered.wake_next()
    assert sleepers.await_woken(1) == [0, 1]


def test_all_are_woken_after_an_interrupt(sleepers: Sleepers) -> None:
    sleepers.add(5)
    for request in sleepers.requests:
        request.finish("answer")
    sleepers.answered.wake_all()
    assert sorted(sleepers.await_woken(5)) == [0, 1, 2, 3, 4]
    assert not sleepers.answered


def test_the_main_thread_waits_for_no_other_caller_and_keeps_none_waiting() -> None:
    """It may be in a signal handler, for any time, before it could wake the next caller."""
    answered = AnsweredCallers()
    request = Request()
    request.wait_in_thread(answered)
    main = threading.get_ident()

    def finish() -> None:
        while sys._current_frames()[main].f_code is not Request.sleep.__code__:
            pass
        request.finish("answer")

    finisher = threading.Thread(target=finish)
    finisher.start()
    while not request.done:
        request.sleep(SECONDS)
    finisher.join()
    assert request.result() == "answer" and not answered
