"""Keys: one unit of a key at a time, in order; a held key holds up no other key."""

import pytest

from penstock.rules.item_states import ItemState
from tests.partition_under_test import PartitionUnderTest, granted_offsets


def keyed(partition: PartitionUnderTest, text: str) -> None:
    """Produce one item per word, each by its own command: `k1` has key k."""
    for word in text.split():
        partition.produce(word, key=word[0])


def test_a_key_is_given_to_one_holder_at_a_time_in_order(partition: PartitionUnderTest) -> None:
    partition.produce("k1", "k2", "k3", key="k")
    first = partition.lease()
    assert partition.texts(first) == ["k1"]
    assert partition.lease_texts() == []
    partition.complete(first.lease)
    assert partition.drain() == ["k2", "k3"]


def test_items_of_held_keys_are_passed_over_for_others(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2 b1 a3 c1 b2")
    first = partition.lease()
    assert partition.texts(first) == ["a1", "b1", "c1"]
    partition.produce("plain")
    assert partition.lease_texts() == ["plain"]
    partition.complete(first.lease)
    assert sorted(partition.lease_texts()) == ["a2", "b2"]


def test_a_retried_item_keeps_its_position(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2 b1")
    partition.retry(partition.lease(1).lease)
    assert partition.drain() == ["a1", "a2", "b1"]


def test_an_expired_lease_returns_a_keyed_item_to_its_position(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2")
    partition.lease(timeout=1)
    partition.advance(1)
    assert partition.drain() == ["a1", "a2"]


def test_a_back_off_holds_its_key_and_only_its_key(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2 b1 b2")
    partition.retry(partition.lease(1).lease, delay=30)
    assert partition.drain() == ["b1", "b2"]
    partition.restart()
    assert partition.lease_texts() == []
    partition.advance(30)
    assert partition.drain() == ["a1", "a2"]


def test_two_thousand_keys_are_served_beside_a_failing_one(partition: PartitionUnderTest) -> None:
    names = [f"{number}" for number in range(2_000)]
    partition.produce("poison", *names, keys=["poison", *names])
    partition.retry(partition.lease(1).lease, delay=30)
    partition.produce("behind", key="poison")
    assert partition.drain(500) == names


def test_an_old_holder_cannot_settle_what_the_new_one_holds(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2")
    old = partition.lease(timeout=1)
    partition.advance(1)
    new = partition.lease()
    assert partition.complete(old.lease, [0]).refused == [0]
    assert partition.lease_texts() == []
    partition.complete(new.lease)
    assert partition.lease_texts() == ["a2"]


def test_a_hot_key_of_many_items_costs_one_run(partition: PartitionUnderTest) -> None:
    partition.produce(*["hot"] * 10_000, key="hot")
    partition.produce("cold", key="cold")
    assert partition.lease_texts() == ["hot", "cold"]
    [(_, line)] = partition.wrapped.state.keys.lines()
    assert [(run.start, run.stop) for run in line.waiting] == [(1, 10_000)]


def test_passed_over_items_survive_a_restart(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2 a3 b1")
    first = partition.lease()
    partition.kill()
    partition.restart()
    assert partition.lease_texts() == []
    partition.complete(first.lease)
    assert partition.drain() == ["a2", "a3"]


def test_a_key_in_a_batch_may_be_absent(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "plain 1", "a2", "plain 2", keys=["a", None, "a", None])
    assert partition.lease_texts() == ["a1", "plain 1", "plain 2"]


def test_the_empty_key_is_a_key(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", key="")
    assert partition.lease_texts() == ["1"]


# -- schedules -----------------------------------------------------------------------------------------


def test_a_scheduled_item_holds_nothing_before_it_is_due(partition: PartitionUnderTest) -> None:
    partition.produce("a1", key="a", at=partition.after(30 * 24 * 3600))
    keyed(partition, "a2 a3")
    assert partition.drain() == ["a2", "a3"]


def test_a_scheduled_item_takes_its_place_when_due(partition: PartitionUnderTest) -> None:
    partition.produce("a-late", key="a", at=partition.after(5))
    keyed(partition, "a1")
    first = partition.lease()
    partition.advance(5)
    keyed(partition, "a2")
    assert partition.lease_texts() == []
    partition.complete(first.lease)
    assert partition.drain() == ["a-late", "a2"]


@pytest.mark.parametrize("held", [False, True])
def test_scheduled_items_of_a_key_go_by_their_times(partition: PartitionUnderTest, held: bool) -> None:
    partition.produce("late", key="a", at=partition.after(20))
    partition.produce("soon", key="a", at=partition.after(10))
    keyed(partition, "a1")
    first = partition.lease()
    partition.advance(10)
    partition.advance(10)
    if held:  # they are passed over into the key's line before they are served
        assert partition.lease_texts() == []
    partition.complete(first.lease)
    assert partition.drain() == ["soon", "late"]


# -- priorities within a key ---------------------------------------------------------------------------


def test_priority_does_not_break_the_order_of_a_key(partition: PartitionUnderTest) -> None:
    partition.produce("a1", key="a")
    partition.produce("a2", key="a", priority=0)
    partition.produce("b1", key="b", priority=3)
    assert partition.drain() == ["b1", "a1", "a2"]


def test_mixed_priorities_in_one_batch_do_not_break_the_order_of_a_key(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", "a2", "b2", keys=["a", "b", "a", "b"], priorities=[9, 5, 0, 7])
    assert partition.drain() == ["b1", "b2", "a1", "a2"]


def test_a_key_competes_with_its_heads_priority(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a", priorities=[0, 9])
    partition.produce("b1", key="b")
    assert partition.drain() == ["a1", "b1", "a2"]


def test_an_urgent_item_of_a_held_key_does_not_keep_others_waiting(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1")
    first = partition.lease()
    partition.produce("a2", key="a", priority=0)
    keyed(partition, "b1")
    assert partition.lease_texts() == ["b1"]
    partition.complete(first.lease)
    assert partition.drain() == ["a2"]


def test_items_of_a_key_that_become_due_at_once_keep_their_order(partition: PartitionUnderTest) -> None:
    partition.produce("a5", "a2", "a0", key="a", priorities=[5, 2, 0], at=partition.after(1))
    partition.advance(1)
    assert partition.drain() == ["a5", "a2", "a0"]


def test_an_item_that_became_due_is_before_the_one_produced_after_it(partition: PartitionUnderTest) -> None:
    partition.produce("a1", key="a")
    first = partition.lease()
    partition.produce("a-due", key="a", priority=9, at=partition.after(1))
    partition.advance(1)
    partition.produce("a2", key="a", priority=2)
    partition.produce("b", key="b", priority=3)
    assert partition.lease_texts(1) == ["b"]  # a2 is passed over; a-due is not read yet
    partition.complete(first.lease)
    assert partition.drain() == ["a-due", "a2"]


def test_an_item_due_in_another_lane_keeps_its_place_in_the_key(partition: PartitionUnderTest) -> None:
    partition.produce("a-due", key="a", priority=9, at=partition.after(0.5))
    partition.produce("b1", key="b")
    partition.advance(0.6)
    partition.produce("a2", key="a")
    assert partition.lease_texts() == ["b1"]
    assert partition.drain() == ["a-due", "a2"]


def test_a_lease_finds_the_one_free_item_among_lanes_of_passed_ones(partition: PartitionUnderTest) -> None:
    partition.produce("a-due", key="a", priority=9, at=partition.after(0.5))
    partition.advance(0.6)
    partition.produce("a2", key="a")
    assert partition.lease_texts() == ["a-due"]


# -- units: several items of a key for one holder ------------------------------------------------------


def test_a_unit_is_the_next_items_of_a_key_for_one_holder(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", "a2", "a3", "a4", keys=["a", "b", "a", "a", "a"])
    first = partition.lease(per_key=3)
    assert sorted(partition.texts(first)) == ["a1", "a2", "a3", "b1"]
    assert partition.lease_texts(per_key=3) == []
    partition.complete(first.lease)
    assert partition.lease_texts(per_key=3) == ["a4"]


def test_a_unit_is_also_taken_from_a_line(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", "a4", key="a")
    partition.complete(partition.lease().lease)
    assert partition.lease_texts(per_key=2) == ["a2", "a3"]


def test_a_unit_of_mixed_priorities_is_in_order(partition: PartitionUnderTest) -> None:
    partition.produce("a0", key="a")
    first = partition.lease()
    partition.produce("a1", "a2", "a3", key="a", priorities=[0, 5, 0])
    partition.lease_texts()
    partition.complete(first.lease)
    assert partition.lease_texts(2, per_key=2) == ["a1", "a2"]


def test_a_unit_is_settled_in_order(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", key="a")
    granted = partition.lease(per_key=3)
    for verb in (partition.complete, partition.retry, partition.bury):
        settled = verb(granted.lease, [1])
        assert (settled.done, settled.refused, settled.early) == (0, [], [1])
    assert partition.complete(granted.lease, [1, 0]).done == 2
    assert partition.complete(granted.lease, [2]).done == 1


@pytest.mark.parametrize("delay", [0, 30])
def test_retrying_one_of_a_unit_returns_it_and_the_later_ones(partition: PartitionUnderTest, delay: int) -> None:
    partition.produce("a1", "a2", "a3", "a4", key="a")
    granted = partition.lease(per_key=3)
    partition.complete(granted.lease, [0])
    assert partition.retry(granted.lease, [1], delay=delay).done == 1
    partition.restart()
    if delay:
        assert partition.lease_texts() == []
        partition.advance(delay)
    again = partition.lease(per_key=3)
    assert (partition.texts(again), again.attempts) == (["a2", "a3", "a4"], {1: 2})


def test_an_expired_unit_returns_its_open_items_to_their_positions(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", "a2", "plain 1", "a3", "plain 2", keys=["a", "b", "a", None, "a", None])
    granted = partition.lease(per_key=3, timeout=1)
    partition.complete(granted.lease, [0])
    partition.advance(1)
    served = partition.drain()
    assert [name for name in served if name[0] == "a"] == ["a2", "a3"]
    assert [name for name in served if name[0] == "p"] == ["plain 1", "plain 2"]
    assert len(served) == 5


def test_burying_one_of_a_unit_returns_the_later_ones(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", key="a")
    partition.bury(partition.lease(per_key=3).lease, [0])
    assert partition.drain() == ["a2", "a3"]


def test_exhausted_attempts_in_a_unit_bury_the_first_and_return_the_rest(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=1)
    partition.produce("a1", "a2", key="a")
    partition.retry(partition.lease(per_key=2).lease)
    assert partition.state_of(0) is ItemState.BURIED
    assert partition.lease_texts() == ["a2"]


# -- burying: release or park --------------------------------------------------------------------------


def test_burying_releases_the_key_by_default(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2")
    partition.bury(partition.lease().lease)
    assert partition.lease_texts() == ["a2"]


def give_up(partition: PartitionUnderTest, way: str, lease: int) -> None:
    if way == "bury":
        partition.bury(lease)
    elif way == "spent":
        partition.retry(lease)
    else:
        partition.advance(5)


@pytest.mark.parametrize("way", ["bury", "spent", "expiry", "ttl"])
def test_parking_holds_the_key_until_the_item_is_redriven_to_its_old_place(partition: PartitionUnderTest, way: str) -> None:
    partition.configure(on_bury="park", max_attempts=1)
    partition.produce("a1", key="a", ttl=60 if way == "ttl" else 0)
    keyed(partition, "a2 b1 a3")
    if way == "ttl":
        partition.advance(60)
    else:
        give_up(partition, way, partition.lease(1, timeout=5).lease)
    assert partition.state_of(0) is ItemState.BURIED
    partition.restart()
    assert partition.drain() == ["b1"]
    assert partition.redrive(0) == 1
    assert partition.drain() == ["a1", "a2", "a3"]


def test_clearing_the_buried_releases_parked_keys(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    keyed(partition, "a1 a2")
    partition.bury(partition.lease().lease)
    assert partition.clear(buried=True) == 1
    assert partition.drain() == ["a2"]


def test_a_key_parked_twice_waits_for_both(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    partition.produce("a1", "a2", "a3", key="a")
    partition.bury(partition.lease(per_key=2).lease)
    partition.redrive(1)
    assert partition.lease_texts() == []
    partition.redrive(0)
    assert partition.drain() == ["a1", "a2", "a3"]


def test_an_item_buried_in_the_middle_of_a_line_returns_to_the_middle(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    partition.produce("a1", key="a")
    partition.produce("a2", key="a", ttl=5)
    partition.produce("a3", key="a")
    first = partition.lease(1)
    assert partition.lease_texts() == []
    partition.advance(5)
    partition.retry(first.lease)
    partition.redrive()
    assert partition.drain() == ["a1", "a2", "a3"]


def test_an_item_whose_key_was_released_is_redriven_to_the_tail(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2 a3")
    partition.bury(partition.lease().lease)
    partition.redrive(0)
    assert partition.drain() == ["a2", "a3", "a1"]


def test_ttl_buries_in_a_line_and_a_back_off_without_holding_the_key(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a", ttl=5)
    keyed(partition, "a3")
    partition.retry(partition.lease().lease, delay=100)
    assert partition.lease_texts() == []
    partition.advance(5)
    assert partition.counts.buried == 2
    assert partition.lease_texts() == ["a3"]


def test_a_lowered_max_attempts_frees_the_key_of_what_it_buries(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 a2 b1")
    partition.retry(partition.lease(1).lease, delay=100)
    assert partition.configure(max_attempts=1) == 1
    assert partition.drain() == ["a2", "b1"]


def test_the_items_of_a_key_stay_in_order_though_the_first_fails_twice(partition: PartitionUnderTest) -> None:
    partition.produce("add to list", "mail the list", "remove from list", key="list-7")
    for _ in range(2):
        granted = partition.lease()
        assert partition.texts(granted) == ["add to list"]
        partition.retry(granted.lease, delay=10)
        assert partition.lease_texts() == []
        partition.advance(10)
    assert partition.drain() == ["add to list", "mail the list", "remove from list"]


def test_a_free_keys_lease_is_given_offsets_of_that_key(partition: PartitionUnderTest) -> None:
    keyed(partition, "a1 b1 a2 b2")
    first = partition.lease()
    assert granted_offsets(first) == [0, 1]
    partition.complete(first.lease, [1])
    assert granted_offsets(partition.lease()) == [3]


def test_items_of_a_key_that_became_due_one_after_the_other_keep_that_order_whatever_their_priorities(
    partition: PartitionUnderTest,
) -> None:
    partition.produce("first", key="k", at=partition.after(12), priority=5)
    partition.produce("second", key="k", at=partition.after(14), priority=2)
    partition.produce("other", key="j", at=partition.after(14), priority=2)
    partition.advance(12)
    partition.advance(2)
    assert partition.drain() == ["other", "first", "second"]


def test_a_rank_of_another_lane_at_the_same_position_waits_for_the_earlier_items_of_its_key(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", "3", key="k", at=partition.after(5), priority=7)
    partition.produce("4", key="k", at=partition.after(9), priority=0)
    partition.advance(5)
    partition.advance(4)
    partition.produce("5", key="k", priority=1)
    assert partition.drain() == ["1", "2", "3", "4", "5"]
