"""WaitingLeases: order, deadlines and cancelled requests; the work does not grow with the number that waits."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.loop.requests import LeaseRequest
from penstock.loop.waiting_leases import SPARE_DEADLINES, WaitingLeases


def waiting_until(*deadlines: int) -> tuple[WaitingLeases, list[LeaseRequest]]:
    waiting, added = WaitingLeases(), [LeaseRequest(1, deadline=deadline) for deadline in deadlines]
    for request in added:
        waiting.add(request)
    return waiting, added


def test_requests_are_given_in_the_order_of_their_arrival() -> None:
    waiting, added = waiting_until(30, 10, 20)
    assert waiting.first(2) == added[:2]
    assert [*waiting] == added
    waiting.remove(added[0])
    waiting.remove(added[0])
    assert (waiting.first(9), len(waiting), added[0] in waiting) == (added[1:], 2, False)


def test_requests_that_have_ended_are_not_given() -> None:
    waiting, (cancelled, done, alive) = waiting_until(30, 30, 30)
    cancelled.cancelled = True
    done.finish([])
    assert waiting.first(1) == [alive] == [*waiting]


def test_a_request_that_another_thread_cancelled_is_removed_when_asked() -> None:
    waiting, (one, other) = waiting_until(10, 20)
    waiting.note_cancelled(one)
    assert [*waiting] == [one, other]
    waiting.remove_cancelled()
    assert ([*waiting], waiting.earliest) == ([other], 20)


def test_deadlines_are_those_of_the_requests_that_still_wait() -> None:
    waiting, (late, early, middle) = waiting_until(30, 10, 20)
    assert (waiting.earliest, waiting.expired(9), waiting.expired(20)) == (10, [], [early, middle])
    waiting.remove(early)
    assert (waiting.earliest, waiting.expired(30)) == (20, [middle, late])
    waiting.add(early)  # a turn that was undone
    assert (waiting.earliest, waiting.expired(10)) == (10, [early])
    waiting.clear()
    assert (waiting.earliest, waiting.expired(99), len(waiting)) == (None, [], 0)


def test_deadlines_of_removed_requests_do_not_pile_up() -> None:
    waiting, _ = waiting_until(10**9)
    for deadline in range(10_000):
        request = LeaseRequest(1, deadline=10**10 + deadline)
        waiting.add(request)
        waiting.remove(request)
    assert len(waiting._deadlines) <= 2 + SPARE_DEADLINES + 2


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python the work runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_serving_one_costs_the_same_with_a_hundred_and_with_ten_thousand_waiting() -> None:
    def cost(number: int) -> int:
        waiting, _ = waiting_until(*range(1, number + 1))

        def serve() -> None:
            waiting.remove_cancelled()
            (request,) = waiting.first(1)
            waiting.remove(request)
            assert waiting.earliest == 2
            waiting.add(LeaseRequest(1, deadline=number + 1))

        return lines_run(serve)

    assert cost(10_000) == cost(100)
