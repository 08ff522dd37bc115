"""`explain`: every reason why an item is not being handled."""

import pytest

from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from tests.partition_under_test import PartitionUnderTest


def test_ready(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    assert partition.why(0) == "ready: the next lease that reaches it gets it"


def test_paused(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.pause(lease=True)
    assert partition.why(0) == "ready, but leasing is paused; resume it"


def test_leased(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease(1, "host-1", timeout=30)
    partition.lease(1)
    partition.advance(10)
    found = partition.wrapped.explain(0)
    assert found.why == "leased by host-1 for another 20s"
    assert (found.state, found.attempts, found.consumer) == (ItemState.LEASED, 1, "host-1")
    assert (found.lease, found.until) == (granted.lease, granted.deadline)
    assert partition.why(1) == "leased by an unnamed consumer for another 50s"


def test_scheduled(partition: PartitionUnderTest) -> None:
    when = partition.after(90)
    partition.produce("a", at=when)
    found = partition.wrapped.explain(0)
    assert (found.state, found.why, found.until) == (ItemState.SCHEDULED, "scheduled, ready in 1m 30s", when)


def test_backing_off(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease, delay=30, reason="busy")
    found = partition.wrapped.explain(0)
    assert found.why == "backing off after attempt 1 (busy), ready in 30s"
    assert (found.attempts, found.reason, found.until) == (1, "busy", partition.wrapped.now().elapsed + 30 * SECOND)


def test_a_key_held_by_a_lease(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", keys=["a", "b"])
    granted = partition.lease(2, "host-1")
    partition.produce("b2", key="b")
    for _ in range(2):  # before and after it was passed over
        found = partition.wrapped.explain(2)
        assert (found.why, found.held_by, found.until) == ("its key is held: item 7-1 is leased by host-1", 1, granted.deadline)
        partition.lease()


def test_a_key_held_by_a_back_off(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a")
    partition.retry(partition.lease().lease, delay=30)
    found = partition.wrapped.explain(1)
    assert (found.why, found.held_by) == ("its key is held: item 7-0 backs off", 0)
    assert found.until == partition.wrapped.now().elapsed + 30 * SECOND


def test_a_parked_key(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    partition.produce("a1", "a2", key="a")
    partition.bury(partition.lease().lease, reason="no")
    found = partition.wrapped.explain(1)
    assert (found.why, found.held_by) == ("its key is parked: item 7-0 was buried; redrive or clear it", 0)


def test_the_first_item_of_a_free_key_and_those_behind_it(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", key="a")
    partition.complete(partition.lease(2).lease)
    assert partition.why(1) == "ready: first of its key, the next lease that reaches it gets it"
    found = partition.wrapped.explain(2)
    assert (found.why, found.held_by) == ("ready, behind item 7-1 of the same key", 1)


def test_buried(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.bury(partition.lease().lease, reason="no such customer")
    found = partition.wrapped.explain(0)
    assert (found.state, found.why, found.attempts) == (ItemState.BURIED, "buried because: no such customer", 1)


def test_completed(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.drain()
    assert partition.why(0) == "completed"


@pytest.mark.parametrize("offset", [1, -1])
def test_an_item_that_was_never_produced(partition: PartitionUnderTest, offset: int) -> None:
    partition.produce("a")
    with pytest.raises(InvalidRequest, match=f"there is no item 7-{offset}; the next one of partition 7 will be 7-1"):
        partition.why(offset)
