"""Leasing without keys: oldest first within a priority, one holder at a time; ended leases are refused."""

import pytest

from penstock.rules.commands import Produce
from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from penstock.words.errors import LeaseLost
from tests.partition_under_test import PartitionUnderTest, granted_offsets, items


def test_the_first_ten_of_many_then_the_next_ten(partition: PartitionUnderTest) -> None:
    partition.produce(*map(str, range(10_000)))
    assert granted_offsets(partition.lease(10)) == list(range(10))
    assert granted_offsets(partition.lease(10)) == list(range(10, 20))


def test_an_empty_partition_gives_nothing(partition: PartitionUnderTest) -> None:
    granted = partition.lease(10)
    assert (granted.lease, granted.count) == (0, 0)


def test_a_lease_of_more_than_is_ready_gives_what_is_ready(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    assert partition.lease_texts(20) == ["a", "b"]


def test_no_item_is_held_twice(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcdef")
    held = [offset for _ in range(4) for offset in granted_offsets(partition.lease(2))]
    assert held == [0, 1, 2, 3, 4, 5]


def test_an_expired_lease_returns_its_items_and_its_token_is_refused_for_everything(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    old = partition.lease(timeout=5)
    partition.advance(5)
    new = partition.lease()
    assert (granted_offsets(new), new.attempts) == ([0], {0: 2})
    for verb in (partition.complete, partition.retry, partition.bury, partition.extend):
        with pytest.raises(LeaseLost, match="; drop the work"):
            verb(old.lease)
    assert partition.complete(old.lease, [0]).refused == [0]
    assert partition.state_of(0) is ItemState.LEASED
    assert partition.complete(new.lease).done == 1


def test_a_lease_ends_at_its_deadline_and_not_before(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=5)
    partition.clock.advance(5 * SECOND - 1)
    partition.run_due()
    assert partition.state_of(0) is ItemState.LEASED
    assert granted.deadline == partition.wrapped.now().elapsed + 1
    partition.clock.advance(1)
    partition.run_due()
    assert partition.state_of(0) is ItemState.READY


def test_extending_moves_the_deadline(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=5)
    partition.advance(4)
    partition.extend(granted.lease)
    partition.advance(4)
    assert partition.state_of(0) is ItemState.LEASED
    partition.extend(granted.lease, 100)
    partition.advance(99)
    assert partition.state_of(0) is ItemState.LEASED
    partition.advance(1)
    assert partition.state_of(0) is ItemState.READY


def test_a_lease_may_also_be_shortened(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=500)
    partition.extend(granted.lease, 1)
    partition.advance(1)
    assert partition.state_of(0) is ItemState.READY


def test_a_lease_and_its_token_survive_kill_and_restart(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease(1, timeout=10)
    partition.kill()
    partition.restart()
    assert partition.lease_texts() == ["b"]
    assert partition.complete(granted.lease).done == 1


def test_a_lease_whose_deadline_passed_while_closed_expires_two_seconds_after_the_opening(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=10)
    partition.clock.advance(11 * SECOND)
    partition.kill()
    partition.advance(1.999)
    assert partition.lease_texts() == []
    partition.advance(0.001)
    assert partition.lease_texts() == ["a"]
    with pytest.raises(LeaseLost):
        partition.complete(granted.lease)


@pytest.mark.parametrize("again", [False, True])
def test_in_the_first_two_seconds_a_holder_can_settle_and_extend(partition: PartitionUnderTest, again: bool) -> None:
    partition.produce(*"abc")
    first, second, third = (partition.lease(1, timeout=10) for _ in range(3))
    partition.clock.advance(3_600 * SECOND)
    partition.kill()
    if again:  # each opening counts
        partition.advance(1.5)
        partition.kill()
    partition.advance(1.5)
    partition.complete(first.lease)
    partition.extend(second.lease, timeout=10)
    partition.advance(0.5)
    assert partition.lease_texts() == ["c"]
    with pytest.raises(LeaseLost):
        partition.extend(third.lease)
    partition.advance(9.4)
    partition.complete(second.lease)


def test_an_opening_shortens_no_lease(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=10)
    partition.kill()
    partition.advance(9.999)
    assert partition.lease_texts() == []
    partition.advance(0.001)
    assert partition.lease_texts() == ["a"]
    with pytest.raises(LeaseLost):
        partition.complete(granted.lease)


def test_no_two_owners_give_the_same_token(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    tokens = []
    for _ in range(3):
        tokens.append(partition.lease(1).lease)
        partition.kill()
    assert len(set(tokens)) == 3


def test_attempts_survive_a_kill_so_that_a_poison_item_cannot_reset_them(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=3)
    partition.produce("poison")
    for _ in range(3):
        assert partition.lease(timeout=1).count == 1
        partition.kill()
        partition.advance(2)
    assert partition.state_of(0) is ItemState.BURIED


def test_a_repeated_request_gets_the_same_lease(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    first = partition.lease(1, request="r")
    partition.kill()
    again = partition.lease(1, request="r")
    assert (again.lease, again.runs, again.deadline) == (first.lease, first.runs, first.deadline)
    assert partition.counts.leased == 1


def test_a_repeated_request_shows_only_what_is_still_open(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    first = partition.lease(2, request="r")
    partition.complete(first.lease, [0])
    assert granted_offsets(partition.lease(2, request="r")) == [1]
    partition.complete(first.lease, [1])
    assert partition.lease(2, request="r").lease == 0


def test_a_paused_partition_gives_nothing_until_resumed(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    held = partition.lease(1)
    partition.pause(lease=True)
    partition.restart()
    assert partition.lease_texts() == []
    assert partition.complete(held.lease).done == 1
    partition.pause(lease=False)
    assert partition.lease_texts() == ["b"]


def test_priority_goes_before_age_and_age_within_priority(partition: PartitionUnderTest) -> None:
    partition.produce("low", priority=9)
    partition.produce("usual 1", "usual 2")
    partition.produce("high", priority=0)
    assert partition.drain() == ["high", "usual 1", "usual 2", "low"]


def test_a_batch_of_mixed_priorities_is_served_by_priority_in_order(partition: PartitionUnderTest) -> None:
    partition.produce("5a", "0a", "9a", "0b", "5b", "9b", priorities=[5, 0, 9, 0, 5, 9])
    assert partition.drain(2) == ["0a", "0b", "5a", "5b", "9a", "9b"]


def test_each_aging_period_raises_a_waiting_item_by_one_priority(partition: PartitionUnderTest) -> None:
    partition.configure(priority_aging=10 * SECOND)
    partition.produce("old", priority=7)
    partition.clock.advance(20 * SECOND - 1)
    partition.produce("new")
    assert partition.lease_texts(1) == ["new"]
    partition.clock.advance(1)
    partition.produce("newer")
    assert partition.lease_texts(1) == ["old"]


def test_a_low_item_under_endless_high_traffic_is_served_in_bounded_time(partition: PartitionUnderTest) -> None:
    partition.configure(priority_aging=10 * SECOND)
    partition.produce("low", priority=9)
    served: list[str] = []
    for number in range(20):
        partition.produce(f"high {number}", priority=0)
        served += partition.lease_texts(1, timeout=10_000)
        partition.advance(10)
    assert served.index("low") == 9
    assert [name for name in served if name != "low"] == [f"high {number}" for number in range(19)]


def test_aging_survives_a_restart(partition: PartitionUnderTest) -> None:
    partition.configure(priority_aging=10 * SECOND)
    partition.produce("old", priority=6)
    partition.clock.advance(10 * SECOND)
    partition.restart()
    partition.produce("new")
    assert partition.lease_texts(1) == ["old"]


def test_without_aging_a_high_item_always_goes_first(partition: PartitionUnderTest) -> None:
    partition.configure(priority_aging=0)
    partition.produce("low", priority=6)
    partition.advance(100_000)
    partition.produce("usual")
    assert partition.drain() == ["usual", "low"]


def test_a_large_backlog_of_small_produces_is_leased_in_one_go(partition: PartitionUnderTest) -> None:
    for number in range(300):
        partition.wrapped.run(Produce(items([str(number)])))
        if number % 7 == 0:
            partition.wrapped.commit()
    partition.wrapped.commit()
    assert partition.lease_texts(300) == [str(number) for number in range(300)]
