"""A consumer outside, while the width changes and its owner is cut off: everything is handled in order, and once."""

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import MINUTE, SECOND
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.crashes import disk_after
from tests.broker.grants import fail_items, granted, ids_of_texts, produce_keyed, take_grant, take_grant_operation
from tests.broker.other_process import ask_owner, cut_at_each_call, numbers_by_key, other_process
from tests.broker.storages import SimulatedStorage

# -- the width changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
def test_a_resize_between_a_grant_and_its_commit(file_broker: BrokerUnderTest, width: int) -> None:
    queue = file_broker.create(partitions=2)
    produce_keyed(queue, *[f"k{n % 5}:{n}" for n in range(20)])
    take_grant(file_broker, queue, per_key=2)
    first = [*granted(file_broker, queue, 1).values()]
    queue.resize(width)
    file_broker.turn()
    produce_keyed(queue, *[f"k{n % 5}:{n}" for n in range(20, 30)])
    served, number, items = first, 1, 1
    while items:
        number, items = take_grant(file_broker, queue, number)
        served += granted(file_broker, queue, number).values() if items else ()
    assert numbers_by_key(served) == {f"k{k}": [*range(k, 30, 5)] for k in range(5)}
    assert queue.stats().depth == 0 and queue.stats().completed >= 30


# -- cut off anywhere --------------------------------------------------------------------------------------


@cache
def disk_with_a_grant() -> tuple[SimulatedFiles, MicrosecondClock]:
    """A queue with keys, a grant that is to be completed, one item of which failed."""

    def work(broker: BrokerUnderTest) -> None:
        queue = broker.create(partitions=2)
        produce_keyed(queue, *[f"k{n % 4}:{n}" for n in range(24)])
        assert take_grant(broker, queue, per_key=2) == (1, 8)
        fail_items(broker, queue, ids_of_texts(granted(broker, queue, 1), "k1:1"), delay=0)

    return disk_after(work)


def cut(step: int, away: int) -> Iterator[BrokerUnderTest]:
    """A broker opened again, after so many seconds, for every file call at which another was cut off that was asked for
    the next grant.
    """
    files, clock = disk_with_a_grant()
    clocks: list[MicrosecondClock] = []

    def ask_for_the_next(disk: SimulatedFiles) -> Callable[[], object]:
        broker = BrokerUnderTest(SimulatedStorage(disk), clock=copy.deepcopy(clock))
        broker.turn()
        operation = take_grant_operation(done=1, want=9, per_key=2, timeout=MINUTE)
        clocks.append(broker.clock)
        return partial(ask_owner, broker, broker.find(), operation)

    for disk, _ in cut_at_each_call(files, ask_for_the_next, (True, False, True), step):
        clocks[-1].advance(away * SECOND)
        again = BrokerUnderTest(SimulatedStorage(disk), clock=clocks[-1])
        again.advance(2 if away else 0)  # no lease ends before that
        yield again
        again.check()
        again.embedded.close()


def consumed_once(broker: BrokerUnderTest, away: int) -> None:
    """The stream asks again: all is handled in order, and once, but for what failed and what came back with it."""
    queue, other = broker.find(), other_process(broker)
    seen: list[str] = []
    number, items = take_grant(broker, queue, 1, want=9, per_key=2)
    assert number == 2 and items >= 8, "what was leased is granted"
    first = granted(broker, queue, 2)
    assert take_grant(broker, queue, 1, want=9, per_key=2) == (2, items) and granted(broker, queue, 2) == first
    while items:
        seen += granted(broker, queue, number).values()
        number, items = take_grant(broker, queue, number, per_key=3)
    whole = {f"k{k}": [*range(8 + k, 24, 4)] for k in range(4)}
    order = numbers_by_key(seen)
    back = [number for number in order["k1"] if number < 8]
    assert back == [1, 5] or (back == [1] and away), "under a lease that ended what stood behind the failed one is done by right"
    assert order == {**whole, "k1": [*back, *whole["k1"]]}
    assert queue.counts() == {"completed": 24}
    assert other.answer_files() == []


AWAY = {"at once": 0, "leases ended": 120, "requests are forgotten": 20 * 60}


@pytest.mark.parametrize("away", AWAY)
def test_asked_for_a_grant_and_cut_off(away: str) -> None:
    for broker in cut(2, AWAY[away]):
        consumed_once(broker, AWAY[away])


@pytest.mark.long
@pytest.mark.parametrize("away", AWAY)
def test_asked_for_a_grant_and_cut_off_at_every_file_call(away: str) -> None:
    for broker in cut(1, AWAY[away]):
        consumed_once(broker, AWAY[away])
