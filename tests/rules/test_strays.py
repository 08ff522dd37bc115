"""Strays: a lease answers with the ready items whose slot was moved, so that they are sent there."""

import pytest

from penstock.rules import base
from penstock.rules.item_states import ItemState
from tests.partition_under_test import PartitionUnderTest, granted_offsets, slot


def mark(partition: PartitionUnderTest, *keys: str) -> dict[int, int]:
    """The slots of these keys are moved to another partition now."""
    return {slot(key): partition.wrapped.state.next_offset for key in keys}


def test_a_due_item_of_a_moved_slot_is_a_stray_and_leases_continue_when_it_is_sent(partition: PartitionUnderTest) -> None:
    partition.produce("b0", "a0", keys=["b", "a"], at=partition.after(5))
    departed = mark(partition, "a")
    partition.produce("b1", "plain", "c1", keys=["b", None, "c"])
    partition.advance(5)
    assert partition.lease_strays(departed) == [1]
    partition.send(1)
    assert partition.texts(partition.lease(departed=departed)) == ["b1", "plain", "c1"]
    assert (partition.counts, partition.state_of(1)) == ((1, 0, 3, 0, 0, 1, 0), ItemState.MOVING)
    partition.clear(leased=True)
    assert partition.texts(partition.lease(departed=departed)) == ["b0"]


def test_finding_strays_changes_nothing(partition: PartitionUnderTest) -> None:
    partition.produce("plain", "a0", keys=[None, "a"], at=partition.after(5))
    departed = mark(partition, "a")
    partition.produce("b1", "b2", key="b")
    partition.advance(5)
    before = base.dump(partition.wrapped.state)
    for _ in range(2):
        assert partition.lease_strays(departed) == [1]
        assert base.dump(partition.wrapped.state) == before
    assert partition.lease_texts() == ["b1", "plain", "a0"]  # whoever knows of no departed slots is given everything


@pytest.mark.parametrize("want", [1, 100])
def test_what_was_ready_before_the_slot_left_is_leased_here(partition: PartitionUnderTest, want: int) -> None:
    partition.produce("a1", "a2", "b1", keys=["a", "a", "b"])
    held = partition.lease(1)
    departed = mark(partition, "a", "b")
    partition.retry(held.lease, reason="no")
    served = []
    while (granted := partition.lease(want, departed=departed)).lease:
        served += partition.texts(granted)
        partition.complete(granted.lease)
    assert sorted(served) == ["a1", "a2", "b1"]
    assert served.index("a1") < served.index("a2")


def test_an_item_that_backs_off_over_a_move_is_no_stray(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a")
    partition.retry(partition.lease().lease, delay=5)
    departed = mark(partition, "a")
    partition.advance(5)
    assert granted_offsets(partition.lease(departed=departed, per_key=2)) == [0, 1]


def test_redriven_items_are_strays_unless_they_have_their_old_position(partition: PartitionUnderTest) -> None:
    for key, on_bury in (("a", "release"), ("b", "park")):
        partition.configure(on_bury=on_bury)
        partition.produce(key, key=key)
        partition.bury(partition.lease().lease)
    departed = mark(partition, "a", "b")
    partition.redrive()
    assert partition.lease_strays(departed) == [0]
    partition.send(0)
    assert partition.texts(partition.lease(departed=departed)) == ["b"]


def test_items_without_a_key_are_never_strays(partition: PartitionUnderTest) -> None:
    partition.produce("plain", at=partition.after(5))
    partition.advance(5)
    assert granted_offsets(partition.lease(departed={0: 0})) == [0]


def test_a_stray_in_another_lane_is_found_when_its_lane_is_read(partition: PartitionUnderTest) -> None:
    """The stray is in the last lane, but that lane is read ahead: it may have an earlier item of a key of a better
    lane."""
    partition.produce("a0", key="a", priority=9, at=partition.after(5))
    departed = mark(partition, "a")
    partition.advance(5)
    partition.produce("b1", key="b", priority=0)
    assert partition.lease_strays(departed, want=1) == [0]
    partition.send(0)
    assert granted_offsets(partition.lease(departed=departed)) == [1]


def test_strays_among_items_of_mixed_priorities(partition: PartitionUnderTest) -> None:
    partition.produce("a0", "b0", "p0", "a9", keys=["a", "b", None, "a"], priorities=[0, 0, 0, 9], at=partition.after(5))
    departed = mark(partition, "a")
    partition.produce("b1", "p9", keys=["b", None], priorities=[9, 9])
    partition.advance(5)
    found = []
    for _ in range(4):  # a lease ends where an earlier item of a key may be in another lane
        strays = partition.lease_strays(departed)
        found += strays
        if strays:
            partition.send(*strays)
    assert sorted(found) == [0, 3]
    partition.clear(leased=True)
    assert partition.counts == (partition.counts.ready, 0, 0, partition.counts.completed, 0, 2, 0)


def test_strays_are_not_passed_into_the_line_of_a_held_key(partition: PartitionUnderTest) -> None:
    partition.produce("a1", key="a")
    partition.produce("a0", key="a", at=partition.after(5))
    held = partition.lease(departed={})
    departed = mark(partition, "a")
    partition.advance(5)
    assert partition.lease_strays(departed) == [1]
    partition.send(1)
    partition.retry(held.lease)
    assert granted_offsets(partition.lease(departed=departed)) == [0]


def test_a_paused_partition_finds_no_strays(partition: PartitionUnderTest) -> None:
    partition.produce("a0", key="a", at=partition.after(5))
    departed = mark(partition, "a")
    partition.advance(5)
    partition.pause(lease=True)
    assert partition.lease(departed=departed).lease == 0
    partition.pause(lease=False)
    assert partition.lease_strays(departed) == [0]


def test_a_lease_with_a_request_id_is_given_when_its_strays_are_sent(partition: PartitionUnderTest) -> None:
    partition.produce("a0", "b0", keys=["a", "b"], at=partition.after(5))
    departed = mark(partition, "a")
    partition.advance(5)
    assert partition.lease_strays(departed) == [0]
    partition.send(0)
    first = partition.lease(request="r", departed=departed)
    partition.kill()
    assert granted_offsets(first) == granted_offsets(partition.lease(request="r", departed=departed)) == [1]


def test_sought_items_belong_to_the_backlog_and_are_strays_when_it_is_resolved(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", keys=["a", "b"])
    partition.drain()
    departed = mark(partition, "a")
    partition.seek(0)
    drained = partition.lease(departed=departed)
    assert granted_offsets(drained) == [0, 1]
    partition.complete(drained.lease)
    partition.seek(0)
    assert partition.lease_strays({slot("a"): 0}) == [0]


def test_a_seek_keeps_the_line_that_the_new_partition_waits_for(partition: PartitionUnderTest) -> None:
    """The backlog is resolved except for a held key: the rest of its line is handled here, before its later items in
    the new partition."""
    partition.produce("done", key="b")
    partition.drain()
    partition.produce("a1", "a2", key="a")
    held = partition.lease()
    assert partition.lease_texts() == []
    assert partition.seek(0) == 1
    assert partition.texts(partition.lease(departed={slot("a"): 0})) == ["done"]
    partition.complete(held.lease)
    assert partition.texts(partition.lease(departed={slot("a"): 0}, awaited=["a"])) == ["a2"]


def test_an_item_returned_to_its_line_is_a_stray_if_no_partition_waits_for_it(partition: PartitionUnderTest) -> None:
    """Its key belongs to another partition that no longer waits for it: it may not be handled in both at the same
    time."""
    partition.configure(on_bury="park")
    partition.produce("a1", "a2", key="a")
    partition.bury(partition.lease(1).lease)
    assert partition.lease_texts() == []
    partition.redrive()
    assert partition.lease_strays({slot("a"): 0}) == [0, 1]
