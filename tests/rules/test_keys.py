"""Strict keys: one unit of a key at a time, in order, and a held key holds nothing else."""

import pytest

from penstock.rules.item_states import Life
from tests.partition_under_test import Bench, given


def keyed(bench: Bench, text: str) -> None:
    """Produce one item per word: `k1` has key k. Each in a produce of its own."""
    for word in text.split():
        bench.produce(word, key=word[0])


def test_a_key_is_given_to_one_holder_at_a_time_in_order(bench: Bench) -> None:
    bench.produce("k1", "k2", "k3", key="k")
    first = bench.lease()
    assert bench.texts(first) == ["k1"]
    assert bench.take() == []
    bench.complete(first.lease)
    assert bench.drain() == ["k2", "k3"]


def test_items_of_held_keys_are_passed_over_for_others(bench: Bench) -> None:
    keyed(bench, "a1 a2 b1 a3 c1 b2")
    first = bench.lease()
    assert bench.texts(first) == ["a1", "b1", "c1"]
    bench.produce("plain")
    assert bench.take() == ["plain"]
    bench.complete(first.lease)
    assert sorted(bench.take()) == ["a2", "b2"]


def test_a_retry_keeps_its_place(bench: Bench) -> None:
    keyed(bench, "a1 a2 b1")
    bench.retry(bench.lease(1).lease)
    assert bench.drain() == ["a1", "a2", "b1"]


def test_an_expired_lease_gives_a_keyed_item_its_place_back(bench: Bench) -> None:
    keyed(bench, "a1 a2")
    bench.lease(timeout=1)
    bench.advance(1)
    assert bench.drain() == ["a1", "a2"]


def test_a_back_off_holds_its_key_and_only_its_key(bench: Bench) -> None:
    keyed(bench, "a1 a2 b1 b2")
    bench.retry(bench.lease(1).lease, delay=30)
    assert bench.drain() == ["b1", "b2"]
    bench.restart()
    assert bench.take() == []
    bench.advance(30)
    assert bench.drain() == ["a1", "a2"]


def test_two_thousand_keys_go_on_beside_a_poisoned_one(bench: Bench) -> None:
    names = [f"{number}" for number in range(2_000)]
    bench.produce("poison", *names, keys=["poison", *names])
    bench.retry(bench.lease(1).lease, delay=30)
    bench.produce("behind", key="poison")
    assert bench.drain(500) == names


def test_an_old_holder_cannot_settle_what_the_new_one_holds(bench: Bench) -> None:
    keyed(bench, "a1 a2")
    old = bench.lease(timeout=1)
    bench.advance(1)
    new = bench.lease()
    assert bench.complete(old.lease, [0]).refused == [0]
    assert bench.take() == []
    bench.complete(new.lease)
    assert bench.take() == ["a2"]


def test_a_hot_key_of_many_items_costs_one_run(bench: Bench) -> None:
    bench.produce(*["hot"] * 10_000, key="hot")
    bench.produce("cold", key="cold")
    assert bench.take() == ["hot", "cold"]
    [(_, line)] = bench.partition.state.keys.lines()
    assert [(run.start, run.stop) for run in line.waiting] == [(1, 10_000)]


def test_passed_over_items_survive_a_restart(bench: Bench) -> None:
    keyed(bench, "a1 a2 a3 b1")
    first = bench.lease()
    bench.kill()
    bench.restart()
    assert bench.take() == []
    bench.complete(first.lease)
    assert bench.drain() == ["a2", "a3"]


def test_a_key_in_a_batch_may_be_absent(bench: Bench) -> None:
    bench.produce("a1", "plain 1", "a2", "plain 2", keys=["a", None, "a", None])
    assert bench.take() == ["a1", "plain 1", "plain 2"]


def test_the_empty_key_is_a_key(bench: Bench) -> None:
    bench.produce("1", "2", key="")
    assert bench.take() == ["1"]


# -- schedules -----------------------------------------------------------------------------------------


def test_a_scheduled_item_holds_nothing_before_it_is_due(bench: Bench) -> None:
    bench.produce("a1", key="a", at=bench.after(30 * 24 * 3600))
    keyed(bench, "a2 a3")
    assert bench.drain() == ["a2", "a3"]


def test_a_scheduled_item_takes_its_place_when_due(bench: Bench) -> None:
    bench.produce("a-late", key="a", at=bench.after(5))
    keyed(bench, "a1")
    first = bench.lease()
    bench.advance(5)
    keyed(bench, "a2")
    assert bench.take() == []
    bench.complete(first.lease)
    assert bench.drain() == ["a-late", "a2"]


@pytest.mark.parametrize("held", [False, True])
def test_scheduled_items_of_a_key_go_by_their_times(bench: Bench, held: bool) -> None:
    bench.produce("late", key="a", at=bench.after(20))
    bench.produce("soon", key="a", at=bench.after(10))
    keyed(bench, "a1")
    first = bench.lease()
    bench.advance(10)
    bench.advance(10)
    if held:  # they are passed over into the key's line before they are served
        assert bench.take() == []
    bench.complete(first.lease)
    assert bench.drain() == ["soon", "late"]


# -- priorities within a key ---------------------------------------------------------------------------


def test_priority_does_not_break_the_order_of_a_key(bench: Bench) -> None:
    bench.produce("a1", key="a")
    bench.produce("a2", key="a", priority=0)
    bench.produce("b1", key="b", priority=3)
    assert bench.drain() == ["b1", "a1", "a2"]


def test_mixed_priorities_in_one_batch_do_not_break_the_order_of_a_key(bench: Bench) -> None:
    bench.produce("a1", "b1", "a2", "b2", keys=["a", "b", "a", "b"], priorities=[9, 5, 0, 7])
    assert bench.drain() == ["b1", "b2", "a1", "a2"]


def test_a_key_competes_with_its_heads_priority(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a", priorities=[0, 9])
    bench.produce("b1", key="b")
    assert bench.drain() == ["a1", "b1", "a2"]


def test_an_urgent_item_of_a_held_key_does_not_keep_others_waiting(bench: Bench) -> None:
    keyed(bench, "a1")
    first = bench.lease()
    bench.produce("a2", key="a", priority=0)
    keyed(bench, "b1")
    assert bench.take() == ["b1"]
    bench.complete(first.lease)
    assert bench.drain() == ["a2"]


def test_an_item_due_in_another_lane_keeps_its_place_in_the_key(bench: Bench) -> None:
    bench.produce("a-due", key="a", priority=9, at=bench.after(0.5))
    bench.produce("b1", key="b")
    bench.advance(0.6)
    bench.produce("a2", key="a")
    assert bench.take() == ["b1"]
    assert bench.drain() == ["a-due", "a2"]


def test_a_lease_finds_the_one_free_item_among_lanes_of_passed_ones(bench: Bench) -> None:
    bench.produce("a-due", key="a", priority=9, at=bench.after(0.5))
    bench.advance(0.6)
    bench.produce("a2", key="a")
    assert bench.take() == ["a-due"]


# -- units: several items of a key for one holder ------------------------------------------------------


def test_a_unit_is_the_next_items_of_a_key_for_one_holder(bench: Bench) -> None:
    bench.produce("a1", "b1", "a2", "a3", "a4", keys=["a", "b", "a", "a", "a"])
    first = bench.lease(per_key=3)
    assert sorted(bench.texts(first)) == ["a1", "a2", "a3", "b1"]
    assert bench.take(per_key=3) == []
    bench.complete(first.lease)
    assert bench.take(per_key=3) == ["a4"]


def test_a_unit_is_also_taken_from_a_line(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", "a4", key="a")
    bench.complete(bench.lease().lease)
    assert bench.take(per_key=2) == ["a2", "a3"]


def test_a_unit_of_mixed_priorities_is_in_order(bench: Bench) -> None:
    bench.produce("a0", key="a")
    first = bench.lease()
    bench.produce("a1", "a2", "a3", key="a", priorities=[0, 5, 0])
    bench.take()
    bench.complete(first.lease)
    assert bench.take(2, per_key=2) == ["a1", "a2"]


def test_a_unit_is_settled_in_order(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", key="a")
    granted = bench.lease(per_key=3)
    for verb in (bench.complete, bench.retry, bench.bury):
        settled = verb(granted.lease, [1])
        assert (settled.done, settled.refused, settled.early) == (0, [], [1])
    assert bench.complete(granted.lease, [1, 0]).done == 2
    assert bench.complete(granted.lease, [2]).done == 1


@pytest.mark.parametrize("delay", [0, 30])
def test_retrying_one_of_a_unit_returns_it_and_the_later_ones(bench: Bench, delay: int) -> None:
    bench.produce("a1", "a2", "a3", "a4", key="a")
    granted = bench.lease(per_key=3)
    bench.complete(granted.lease, [0])
    assert bench.retry(granted.lease, [1], delay=delay).done == 1
    bench.restart()
    if delay:
        assert bench.take() == []
        bench.advance(delay)
    again = bench.lease(per_key=3)
    assert (bench.texts(again), again.attempts) == (["a2", "a3", "a4"], {1: 2})


def test_losing_a_unit_returns_what_was_open_to_its_places(bench: Bench) -> None:
    bench.produce("a1", "b1", "a2", "plain 1", "a3", "plain 2", keys=["a", "b", "a", None, "a", None])
    granted = bench.lease(per_key=3, timeout=1)
    bench.complete(granted.lease, [0])
    bench.advance(1)
    served = bench.drain()
    assert [name for name in served if name[0] == "a"] == ["a2", "a3"]
    assert [name for name in served if name[0] == "p"] == ["plain 1", "plain 2"]
    assert len(served) == 5


def test_burying_one_of_a_unit_returns_the_later_ones(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", key="a")
    bench.bury(bench.lease(per_key=3).lease, [0])
    assert bench.drain() == ["a2", "a3"]


def test_spent_attempts_in_a_unit_bury_the_first_and_return_the_rest(bench: Bench) -> None:
    bench.configure(max_attempts=1)
    bench.produce("a1", "a2", key="a")
    bench.retry(bench.lease(per_key=2).lease)
    assert bench.life(0) is Life.BURIED
    assert bench.take() == ["a2"]


# -- burying: release or park --------------------------------------------------------------------------


def test_burying_releases_the_key_by_default(bench: Bench) -> None:
    keyed(bench, "a1 a2")
    bench.bury(bench.lease().lease)
    assert bench.take() == ["a2"]


def give_up(bench: Bench, way: str, lease: int) -> None:
    if way == "bury":
        bench.bury(lease)
    elif way == "spent":
        bench.retry(lease)
    else:
        bench.advance(5)


@pytest.mark.parametrize("way", ["bury", "spent", "expiry", "ttl"])
def test_parking_holds_the_key_until_the_item_is_redriven_to_its_old_place(bench: Bench, way: str) -> None:
    bench.configure(on_bury="park", max_attempts=1)
    bench.produce("a1", key="a", ttl=60 if way == "ttl" else 0)
    keyed(bench, "a2 b1 a3")
    if way == "ttl":
        bench.advance(60)
    else:
        give_up(bench, way, bench.lease(1, timeout=5).lease)
    assert bench.life(0) is Life.BURIED
    bench.restart()
    assert bench.drain() == ["b1"]
    assert bench.redrive(0) == 1
    assert bench.drain() == ["a1", "a2", "a3"]


def test_clearing_the_buried_releases_parked_keys(bench: Bench) -> None:
    bench.configure(on_bury="park")
    keyed(bench, "a1 a2")
    bench.bury(bench.lease().lease)
    assert bench.clear(buried=True) == 1
    assert bench.drain() == ["a2"]


def test_a_key_parked_twice_waits_for_both(bench: Bench) -> None:
    bench.configure(on_bury="park")
    bench.produce("a1", "a2", "a3", key="a")
    bench.bury(bench.lease(per_key=2).lease)
    bench.redrive(1)
    assert bench.take() == []
    bench.redrive(0)
    assert bench.drain() == ["a1", "a2", "a3"]


def test_an_item_buried_in_the_middle_of_a_line_returns_to_the_middle(bench: Bench) -> None:
    bench.configure(on_bury="park")
    bench.produce("a1", key="a")
    bench.produce("a2", key="a", ttl=5)
    bench.produce("a3", key="a")
    first = bench.lease(1)
    assert bench.take() == []
    bench.advance(5)
    bench.retry(first.lease)
    bench.redrive()
    assert bench.drain() == ["a1", "a2", "a3"]


def test_an_item_whose_key_was_released_is_redriven_to_the_tail(bench: Bench) -> None:
    keyed(bench, "a1 a2 a3")
    bench.bury(bench.lease().lease)
    bench.redrive(0)
    assert bench.drain() == ["a2", "a3", "a1"]


def test_ttl_buries_in_a_line_and_a_back_off_without_holding_the_key(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a", ttl=5)
    keyed(bench, "a3")
    bench.retry(bench.lease().lease, delay=100)
    assert bench.take() == []
    bench.advance(5)
    assert bench.counts.buried == 2
    assert bench.take() == ["a3"]


def test_a_lowered_max_attempts_frees_the_key_of_what_it_buries(bench: Bench) -> None:
    keyed(bench, "a1 a2 b1")
    bench.retry(bench.lease(1).lease, delay=100)
    assert bench.configure(max_attempts=1) == 1
    assert bench.drain() == ["a2", "b1"]


def test_the_chain_of_commands_holds_though_the_first_fails_twice(bench: Bench) -> None:
    bench.produce("add to list", "mail the list", "remove from list", key="list-7")
    for _ in range(2):
        granted = bench.lease()
        assert bench.texts(granted) == ["add to list"]
        bench.retry(granted.lease, delay=10)
        assert bench.take() == []
        bench.advance(10)
    assert bench.drain() == ["add to list", "mail the list", "remove from list"]


def test_a_free_keys_lease_is_given_offsets_of_that_key(bench: Bench) -> None:
    keyed(bench, "a1 b1 a2 b2")
    first = bench.lease()
    assert given(first) == [0, 1]
    bench.complete(first.lease, [1])
    assert given(bench.lease()) == [3]
