"""A consumer outside, while the width changes and its owner is cut off: everything is handled in order, and once."""

import copy
import random
from collections.abc import Iterator
from functools import cache

import pytest

from penstock.testing import Halt, ManualClock, SimulatedFiles
from penstock.words.clock import MINUTE, SECOND
from tests.broker.broker_under_test import Rig
from tests.broker.crashes import prepared
from tests.broker.grants import granted, keyed, named, settle, take, taking
from tests.broker.other_process import Outsider, look, order_of, outsider
from tests.broker.storages import Simulated

# -- the width changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
def test_a_resize_between_a_grant_and_its_commit(rig: Rig, width: int) -> None:
    desk = rig.create(partitions=2)
    keyed(desk, *[f"k{n % 5}:{n}" for n in range(20)])
    take(rig, desk, per_key=2)
    first = [*granted(rig, desk, 1).values()]
    desk.resize(width)
    rig.turn()
    keyed(desk, *[f"k{n % 5}:{n}" for n in range(20, 30)])
    served, number, items = first, 1, 1
    while items:
        number, items = take(rig, desk, number)
        served += granted(rig, desk, number).values() if items else ()
    assert order_of(served) == {f"k{k}": [*range(k, 30, 5)] for k in range(5)}
    assert desk.stats().depth == 0 and desk.stats().completed >= 30


# -- cut off anywhere --------------------------------------------------------------------------------------


@cache
def stocked() -> tuple[SimulatedFiles, ManualClock]:
    """A queue with keys, a grant that is to be completed, one item of which failed."""

    def work(rig: Rig) -> None:
        desk = rig.create(partitions=2)
        keyed(desk, *[f"k{n % 4}:{n}" for n in range(24)])
        assert take(rig, desk, per_key=2) == (1, 8)
        settle(rig, desk, named(granted(rig, desk, 1), "k1:1"), delay=0)

    return prepared(work)


def cut(step: int, away: int) -> Iterator[tuple[Rig, str]]:
    """A broker opened again, after so many seconds, for every file call at which another was cut off that was asked for the next grant."""
    files, clock = stocked()
    for seed, power in ((0, True), (1, False), (2, True)):
        done, call = False, seed * step // 3
        while not done:
            call += step
            disk = files.copy()
            disk._rng = random.Random(1_000 * seed + call)
            rig = Rig(Simulated(disk), clock=copy.deepcopy(clock))
            rig.turn()
            other = Outsider(disk)
            name = other.put(rig.find().incarnation, taking(done=1, want=9, per_key=2, timeout=MINUTE))
            disk.fail(disk.calls + call, "halt")
            try:
                look(rig)
                done = True
            except Halt:
                pass
            disk.mend()
            if power:
                disk.crash()
            else:
                disk.kill()
            rig.clock.advance(away * SECOND)
            again = Rig(Simulated(disk), clock=rig.clock)
            yield again, name
            again.check()
            again.broker.close()


def consumed_once(rig: Rig, name: str, away: int) -> None:
    """The stream goes on where it was: all is handled in order, and once, but for what failed and what came back with it."""
    desk, other = rig.find(), outsider(rig)
    look(rig)
    found = other.inbox.note(desk.incarnation, name)
    assert found is not None, "an errand that was put is done at the next opening"
    seen: list[str] = []
    number, items = take(rig, desk, 1, want=9, per_key=2)
    assert number == 2 and items >= 8, "what was leased is granted"
    first = granted(rig, desk, 2)
    assert take(rig, desk, 1, want=9, per_key=2) == (2, items) and granted(rig, desk, 2) == first
    while items:
        seen += granted(rig, desk, number).values()
        number, items = take(rig, desk, number, per_key=3)
    whole = {f"k{k}": [*range(8 + k, 24, 4)] for k in range(4)}
    order = order_of(seen)
    back = [number for number in order["k1"] if number < 8]
    assert back == [1, 5] or (back == [1] and away), "under a lease that ended what stood behind the failed one is done by right"
    assert order == {**whole, "k1": [*back, *whole["k1"]]}
    assert desk.counts() == {"completed": 24}
    assert [file for file in other.answers() if "grant" in file] == [] and other.left() == []


AWAY = {"at once": 0, "leases ended": 120, "requests are forgotten": 20 * 60}


@pytest.mark.parametrize("away", AWAY)
def test_asked_for_a_grant_and_cut_off(away: str) -> None:
    for rig, name in cut(2, AWAY[away]):
        consumed_once(rig, name, AWAY[away])


@pytest.mark.long
@pytest.mark.parametrize("away", AWAY)
def test_asked_for_a_grant_and_cut_off_at_every_file_call(away: str) -> None:
    for rig, name in cut(1, AWAY[away]):
        consumed_once(rig, name, AWAY[away])
