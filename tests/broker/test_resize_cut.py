"""A change of width cut off at any file call: it is done, or not begun, and either way no key loses its order."""

from functools import cache

import pytest

from penstock.operations import ListItems
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.crashes import crash_at_each_call, disk_after

KEYS = [f"key-{number}" for number in range(10)]


@cache
def busy(width: int) -> tuple[SimulatedFiles, MicrosecondClock]:
    """A queue with a backlog, some of it leased, some backing off, some scheduled, a key parked, and dedup ids
    remembered.
    """

    def work(broker: BrokerUnderTest) -> None:
        queue = broker.create(partitions=width, on_bury="park", dedup_window=10**10)
        queue.produce(*[f"{key}:1" for key in KEYS], keys=KEYS, dedups=[f"d{key}" for key in KEYS])
        queue.produce(*[f"{key}:2" for key in KEYS], keys=KEYS)
        queue.produce(*[f"{key}:9" for key in KEYS[:3]], keys=KEYS[:3], at=broker.after(500))
        queue.lease(2).retry(delay=30)
        queue.lease(1).bury()
        queue.lease(3)

    return disk_after(work)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1), (3, 4)])
def test_a_resize_cut_off_anywhere(old: int, new: int) -> None:
    def work(broker: BrokerUnderTest) -> None:
        queue = broker.find()
        queue.resize(new)
        queue.produce(*[f"{key}:3" for key in KEYS], keys=KEYS, request="third")
        queue.lease(2).complete(request=b"c")

    widths = set()
    for broker, done in crash_at_each_call(busy(old), work, step=4):
        queue = broker.find()
        widths.add(queue.info.partitions)
        assert queue.info.partitions == new or not done
        queue.resize(new)
        broker.turn()
        if not done:
            queue.produce(*[f"{key}:3" for key in KEYS], keys=KEYS, request="third")
        assert len(queue.produce(*["never"] * 10, keys=KEYS, dedups=[f"d{key}" for key in KEYS])) == 10
        completed = 1 if queue.call(ListItems(states=["completed"], limit=99)) else 0
        broker.advance_in_steps(61)
        served = queue.drain(3)
        queue.redrive_buried()
        broker.turn()
        served += queue.drain(3)
        broker.advance_in_steps(500)
        served += queue.drain(3)
        for key in KEYS:
            own = [int(text.partition(":")[2]) for text in served if text.startswith(f"{key}:")]
            assert own == sorted(own) and len(set(own)) == len(own), f"{key}: {own}"
        assert "never" not in served
        assert len(served) == 33 if not completed else 31 <= len(served) <= 33
        assert (queue.stats().resizing, queue.stats().depth) == ([], 0)
    assert widths == {old, new}
