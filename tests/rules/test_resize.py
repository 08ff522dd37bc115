"""Fences: after a resize, items of moved slots wait until the old partition is done; no other items wait."""

from collections.abc import Iterator

import pytest

from penstock.rules import base, routing
from penstock.rules.commands import AddFences
from penstock.rules.fences import pack_slots
from penstock.rules.item_states import ItemState
from penstock.rules.records import FenceSpec, pack_keys
from tests.partition_under_test import PartitionUnderTest, granted_offsets, key_id, slot


def neighbours(key: str) -> Iterator[str]:
    """Other keys of the same slot."""
    return (other for other in map(str, range(1_000_000)) if slot(other) == slot(key))


A2, A3 = (name for name, _ in zip(neighbours("a"), range(2), strict=False))
"""Two other keys of the slot of "a"."""


def image(partition: PartitionUnderTest) -> bytes:
    return base.dump(partition.wrapped.state)


# -- what waits ----------------------------------------------------------------------------------------


def test_fenced_items_are_passed_over_and_the_others_are_leased(partition: PartitionUnderTest) -> None:
    partition.fence("a", "b")
    partition.produce("plain", "a1", "c1", "b1", "a2", "more", keys=[None, "a", "c", "b", "a", None])
    assert partition.lease_texts() == ["plain", "c1", "more"]
    for _ in range(2):
        partition.restart()
        assert partition.lease_texts() == []
    assert partition.counts == (3, 0, 3, 0, 0, 0, 0)


def test_a_whole_slot_waits_until_the_fence_narrows_and_then_only_the_keys_it_names(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a")
    partition.produce("1", "2", "3", "4", keys=["a", A2, A3, A2])
    assert partition.lease_texts() == []
    assert partition.narrow(fence, "a", A3) == 2
    assert partition.drain() == ["2", "4"]
    partition.produce("5", "6", keys=["a", A2])
    assert partition.drain() == ["6"]
    assert partition.counts.ready == 3


def test_narrowing_also_applies_to_items_that_were_not_read_yet(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a")
    partition.produce("1", "2", keys=["a", A2])
    partition.narrow(fence, A2)
    assert partition.drain() == ["1"]


@pytest.mark.parametrize("looked_at", [False, True])
def test_keys_are_lifted_one_by_one(partition: PartitionUnderTest, looked_at: bool) -> None:
    fence = partition.fence("a", "b")
    partition.produce("a1", "b1", "a2", "b2", keys=["a", "b", "a", "b"])
    assert not looked_at or partition.lease_texts() == []
    partition.narrow(fence, "a", "b")
    assert (partition.lease_texts(), partition.lift(fence, "c")) == ([], 0)
    assert partition.lift(fence, "b", "c") == 1
    assert partition.drain() == ["b1", "b2"]
    partition.kill()
    assert partition.lift(fence, "a") == 1
    assert partition.drain() == ["a1", "a2"]


def test_a_fence_narrowed_to_no_keys_is_removed(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a")
    partition.produce("a1", "a2", key="a")
    assert partition.lease_texts() == []
    partition.narrow(fence)
    assert partition.drain() == ["a1", "a2"]


def test_a_removed_fence_leaves_the_state_as_without_it(partition: PartitionUnderTest) -> None:
    partition.produce("x")
    fence = partition.fence("a", "b")
    before = image(partition)
    again = partition.fence("a", "b")
    partition.narrow(again, "a", "b")
    partition.lift(again, "a")
    partition.lift(again, "b")
    state = partition.wrapped.state
    assert [one.number for one in state.keys.fences] == [fence]
    state.fence_version, state.fences_given = 1, fence  # but for how many there were
    assert image(partition) == before
    state.fence_version, state.fences_given = 2, again


def test_only_a_narrowed_fence_is_lifted_and_none_narrows_twice(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a")
    before = image(partition)
    assert (partition.lift(fence, "a"), partition.narrow(99, "a"), partition.lift(99, "a")) == (0, 0, 0)
    assert image(partition) == before
    partition.narrow(fence, "a")
    before = image(partition)
    assert partition.narrow(fence) == 0
    assert image(partition) == before


def test_a_fence_may_cover_only_keys_from_the_beginning(partition: PartitionUnderTest) -> None:
    spec = FenceSpec(0, 3, 10, 0, None, pack_keys([key_id("a")]))
    partition.wrapped.run(AddFences(1, [spec]))
    partition.produce("1", "2", keys=["a", A2])
    assert partition.lease_texts() == ["2"]
    partition.lift(1, "a")
    assert partition.lease_texts() == ["1"]


def test_items_without_a_key_are_not_fenced(partition: PartitionUnderTest) -> None:
    partition.wrapped.run(AddFences(1, [FenceSpec(0, 3, 10, 0, pack_slots([routing.NO_KEY & routing.SLOT_MASK]))]))
    partition.produce("plain", "a1", keys=[None, "a"])
    assert partition.why(0) == "ready: the next lease that reaches it gets it"
    assert partition.lease_texts() == ["plain", "a1"]


# -- since ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [False, True])
def test_items_before_the_fence_do_not_wait(partition: PartitionUnderTest, looked_at: bool) -> None:
    """The slot left and came back: the other partition waits for these items."""
    partition.produce("a1", "a2", key="a")
    held = partition.lease()
    fence = partition.fence("a")
    partition.produce("a3", "a4", key="a")
    assert not looked_at or partition.lease_texts() == []
    partition.complete(held.lease)
    assert partition.drain() == ["a2"]
    partition.narrow(fence)
    assert partition.drain() == ["a3", "a4"]


@pytest.mark.parametrize("passed_over", [False, True])
def test_a_unit_of_a_key_ends_at_the_fence(partition: PartitionUnderTest, passed_over: bool) -> None:
    partition.produce("a0", "a1", "a2", key="a")
    held = partition.lease()
    fence = partition.fence("a")
    partition.produce("a3", "a4", key="a")
    assert not passed_over or partition.lease_texts(per_key=10) == []
    partition.complete(held.lease)
    unit = partition.lease(per_key=10)
    assert partition.texts(unit) == ["a1", "a2"]
    partition.complete(unit.lease)
    assert partition.lease_texts(per_key=10) == []
    partition.narrow(fence)
    assert partition.lease_texts(per_key=10) == ["a3", "a4"]


@pytest.mark.parametrize(("since", "served"), [(0, ["a0", "a1"]), (1, ["a0"]), (-1, [])])
def test_a_fence_may_begin_at_the_position_where_its_slot_left(partition: PartitionUnderTest, since: int, served: list[str]) -> None:
    """Items that became ready here while the slot belonged to another partition are not older than the items there."""
    partition.produce("a0", "a1", key="a")
    held = partition.lease()
    assert partition.lease_texts() == []
    partition.wrapped.run(AddFences(1, [FenceSpec(0, 3, 10, since, pack_slots([slot("a")]))]))
    partition.retry(held.lease)
    partition.produce("a2", key="a")
    partition.kill()
    assert partition.drain() == served
    partition.narrow(1)
    assert partition.drain() == [payload for payload in ("a0", "a1", "a2") if payload not in served]


def test_of_two_fences_the_earlier_counts_and_both_must_be_lifted(partition: PartitionUnderTest) -> None:
    first = partition.fence("a", source=3)
    partition.produce("a1", key="a")
    second = partition.fence("a", source=4)
    partition.produce("a2", key="a")
    assert partition.lease_texts() == []
    partition.narrow(second)
    assert partition.lease_texts() == []
    third = partition.fence("a")
    partition.produce("a3", key="a")
    partition.narrow(first)
    assert partition.drain() == ["a1", "a2"]
    partition.narrow(third, "a")
    assert partition.lease_texts() == []
    partition.lift(third, "a")
    assert partition.drain() == ["a3"]


# -- everything else that happens inside a fence -------------------------------------------------------


def test_leased_items_return_to_their_position_before_the_fence(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", "c1", keys=["a", "b", "c"])
    held = partition.lease(timeout=20)
    fence = partition.fence("a", "b", "c")
    partition.produce("a2", "b2", "c2", keys=["a", "b", "c"])
    partition.retry(held.lease, [0], reason="no")
    partition.retry(held.lease, [1], delay=5)
    assert partition.drain() == ["a1"]
    partition.advance(5)
    assert partition.drain() == ["b1"]
    partition.advance(15)
    assert partition.drain() == ["c1"]
    partition.narrow(fence)
    assert sorted(partition.drain()) == ["a2", "b2", "c2"]


def test_an_item_that_becomes_due_behind_a_fence_waits(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", keys=["a", "b"], at=partition.after(5))
    fence = partition.fence("a")
    partition.produce("a2", key="a")
    partition.advance(5)
    assert partition.why(0).startswith("fenced by a resize: partition 3 ")
    assert partition.drain() == ["b1"]
    partition.narrow(fence)
    assert partition.drain() == ["a2", "a1"]  # a2 was there when it came


def test_a_back_off_that_began_before_the_fence_ends_before_it(partition: PartitionUnderTest) -> None:
    partition.produce("a1", key="a")
    partition.retry(partition.lease().lease, delay=5)
    fence = partition.fence("a")
    partition.produce("a2", key="a")
    partition.advance(5)
    assert partition.drain() == ["a1"]
    partition.narrow(fence)
    assert partition.drain() == ["a2"]


@pytest.mark.parametrize("on_bury", ["release", "park"])
def test_the_ttl_of_a_fenced_item_runs_out(partition: PartitionUnderTest, on_bury: str) -> None:
    partition.configure(on_bury=on_bury)
    fence = partition.fence("a")
    partition.produce("a1", key="a", ttl=5)
    partition.produce("a2", key="a")
    assert partition.lease_texts() == []
    partition.advance(5)
    assert partition.state_of(0) is ItemState.BURIED
    partition.narrow(fence)
    assert partition.drain() == (["a2"] if on_bury == "release" else [])
    assert (partition.redrive(), partition.drain()) == (1, ["a1"] if on_bury == "release" else ["a1", "a2"])


def test_a_parked_key_stays_parked_and_is_fenced_when_it_is_free(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    partition.produce("a1", "a2", key="a")
    partition.bury(partition.lease().lease, reason="no")
    fence = partition.fence("a")
    partition.produce("a3", key="a")
    assert partition.lease_texts() == []
    assert partition.release("a") == 1
    assert partition.drain() == ["a2"]
    partition.narrow(fence, "a")
    assert partition.lease_texts() == []
    partition.lift(fence, "a")
    assert partition.drain() == ["a3"]


def test_lifting_a_parked_key_does_not_free_it(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    fence = partition.fence("a")
    partition.produce("a1", key="a", ttl=1)
    partition.produce("a2", key="a")
    partition.advance(1)
    partition.narrow(fence)
    assert partition.lease_texts() == []
    assert partition.redrive() == 1
    assert partition.drain() == ["a1", "a2"]


def test_a_redriven_item_waits_behind_the_fence_unless_it_has_its_old_position(partition: PartitionUnderTest) -> None:
    for key, on_bury in (("a", "release"), ("b", "park")):
        partition.configure(on_bury=on_bury)
        partition.produce(key, key=key)
        partition.bury(partition.lease().lease)
    fence = partition.fence("a", "b")
    partition.redrive()
    assert partition.drain() == ["b"]
    partition.narrow(fence)
    assert partition.drain() == ["a"]


def test_sought_items_of_fenced_slots_wait_and_the_others_do_not(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "c1", "plain", keys=["a", "c", None])
    partition.drain(10)
    fence = partition.fence("a")
    partition.produce("a2", "c2", keys=["a", "c"])
    assert partition.lease_texts(1) == ["c2"]
    assert partition.seek(0) == 3
    partition.restart()
    assert sorted(partition.drain()) == ["plain"]
    partition.narrow(fence)
    assert partition.drain() == ["a2", "a1"]


def test_priorities_hold_beside_a_fence(partition: PartitionUnderTest) -> None:
    partition.configure(priority_aging=0)
    partition.produce("a5", key="a")
    held = partition.lease()
    fence = partition.fence("a")
    partition.produce("a0", "c9", "c0", "p9", "p0", "b5", keys=["a", "c", "c", None, None, "b"], priorities=[0, 9, 0, 9, 0, 5])
    assert partition.drain() == ["p0", "b5", "c9", "c0", "p9"]
    partition.retry(held.lease)
    assert partition.drain() == ["a5"]
    partition.narrow(fence)
    assert partition.drain() == ["a0"]


def test_clearing_ready_items_clears_fenced_items(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a")
    partition.produce("a1", "a2", key="a")
    assert partition.lease_texts() == []
    partition.produce("a3", key="a")
    assert partition.clear(ready=True) == 3
    partition.produce("a4", key="a")
    assert partition.lease_texts() == []
    partition.narrow(fence)
    assert partition.drain() == ["a4"]


def test_a_fenced_item_can_be_sent_on(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a")
    partition.produce("a1", "a2", "a3", key="a")
    assert partition.lease_texts() == []
    partition.produce("a4", key="a")
    partition.send(0, 3)
    partition.narrow(fence)
    assert partition.drain() == ["a2", "a3"]


def test_explain_names_the_fence(partition: PartitionUnderTest) -> None:
    partition.produce("a0", key="a")
    fence = partition.fence("a", source=12)
    partition.produce("a1", "a2", "c1", keys=["a", "a", "c"])
    for _ in range(2):  # before and after it was passed over
        found = partition.wrapped.explain(1)
        assert (found.state, found.waits_for) == (ItemState.READY, 12)
        assert found.why == "fenced by a resize: partition 12 still holds earlier items of its key or slot"
        assert partition.wrapped.explain(3).waits_for is None
        assert granted_offsets(partition.lease()) in ([0, 3], [])
        partition.clear(leased=True)
    partition.narrow(fence)
    assert partition.why(1) == "ready: first of its key, the next lease that reaches it gets it"


def test_a_fence_survives_a_kill_at_every_step(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a", "b")
    partition.kill()
    partition.produce("a1", "b1", "2", keys=["a", "b", A2])
    assert partition.lease_texts() == []
    partition.kill()
    assert partition.lease_texts() == []
    partition.narrow(fence, "a", "b")
    partition.kill()
    assert partition.drain() == ["2"]
    partition.lift(fence, "b")
    partition.kill()
    assert partition.drain() == ["b1"]
    partition.lift(fence, "a")
    partition.kill()
    assert (partition.drain(), list(partition.wrapped.state.keys.fences)) == (["a1"], [])
