"""A change of width cut off at any file call: it is done, or not begun, and either way no key loses its order."""

from functools import cache

import pytest

from penstock.operations import ListItems
from penstock.testing import ManualClock, SimulatedFiles
from tests.broker.broker_under_test import Rig
from tests.broker.crashes import cut_off, prepared

KEYS = [f"key-{number}" for number in range(10)]


@cache
def busy(width: int) -> tuple[SimulatedFiles, ManualClock]:
    """A queue with a backlog, some of it leased, some backing off, some scheduled, a key parked, and dedup ids remembered."""

    def work(rig: Rig) -> None:
        desk = rig.create(partitions=width, on_bury="park", dedup_window=10**10)
        desk.produce(*[f"{key}:1" for key in KEYS], keys=KEYS, dedups=[f"d{key}" for key in KEYS])
        desk.produce(*[f"{key}:2" for key in KEYS], keys=KEYS)
        desk.produce(*[f"{key}:9" for key in KEYS[:3]], keys=KEYS[:3], at=rig.after(500))
        desk.lease(2).retry(delay=30)
        desk.lease(1).bury()
        desk.lease(3)

    return prepared(work)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1), (3, 4)])
def test_a_resize_cut_off_anywhere(old: int, new: int) -> None:
    def work(rig: Rig) -> None:
        desk = rig.find()
        desk.resize(new)
        desk.produce(*[f"{key}:3" for key in KEYS], keys=KEYS, request="third")
        desk.lease(2).complete(request=b"c")

    widths = set()
    for rig, done in cut_off(busy(old), work, step=4):
        desk = rig.find()
        widths.add(desk.info.partitions)
        assert desk.info.partitions == new or not done
        desk.resize(new)
        rig.turn()
        if not done:
            desk.produce(*[f"{key}:3" for key in KEYS], keys=KEYS, request="third")
        assert len(desk.produce(*["never"] * 10, keys=KEYS, dedups=[f"d{key}" for key in KEYS])) == 10
        completed = 1 if desk.call(ListItems(states=["completed"], limit=99)) else 0
        rig.pass_by(61)
        served = desk.drain(3)
        desk.redrive_buried()
        rig.turn()
        served += desk.drain(3)
        rig.pass_by(500)
        served += desk.drain(3)
        for key in KEYS:
            own = [int(text.partition(":")[2]) for text in served if text.startswith(f"{key}:")]
            assert own == sorted(own) and len(set(own)) == len(own), f"{key}: {own}"
        assert "never" not in served
        assert len(served) == 33 if not completed else 31 <= len(served) <= 33
        assert (desk.stats().resizing, desk.stats().depth) == ([], 0)
    assert widths == {old, new}
