"""Timers: schedules, ttls and lease deadlines."""

import pytest

from penstock.rules.item_states import ItemState
from penstock.words.clock import DAY, SECOND
from tests.partition_under_test import PartitionUnderTest, granted_offsets


def test_two_schedules_both_fire_each_at_its_time(partition: PartitionUnderTest) -> None:
    partition.produce("second", at=partition.after(20))
    partition.produce("first", at=partition.after(10))
    partition.restart()
    partition.advance(9)
    assert partition.lease_texts() == []
    partition.advance(1)
    assert partition.lease_texts() == ["first"]
    partition.advance(10)
    assert partition.lease_texts() == ["second"]


def test_equal_times_keep_produce_order(partition: PartitionUnderTest) -> None:
    when = partition.after(10)
    partition.produce("1", at=when)
    partition.produce("2", "3", at=when)
    partition.advance(10)
    assert partition.drain() == ["1", "2", "3"]


@pytest.mark.parametrize("ahead", [-3600.0, 0, 0.1])
def test_an_item_scheduled_within_a_tenth_of_a_second_is_ready_at_once(partition: PartitionUnderTest, ahead: float) -> None:
    partition.produce("a", at=partition.after(ahead))
    assert partition.lease_texts() == ["a"]


def test_more_than_a_tenth_of_a_second_is_scheduled(partition: PartitionUnderTest) -> None:
    partition.produce("a", at=partition.after(0.1) + 1)
    assert partition.state_of(0) is ItemState.SCHEDULED


def test_a_scheduled_item_joins_the_tail_when_it_is_due(partition: PartitionUnderTest) -> None:
    partition.produce("later", at=partition.after(1))
    partition.produce("a")
    partition.advance(1)
    partition.produce("b")
    assert partition.drain() == ["a", "later", "b"]


def test_a_scheduled_item_keeps_its_priority(partition: PartitionUnderTest) -> None:
    partition.produce("urgent", at=partition.after(1), priority=0)
    partition.produce("a")
    partition.advance(1)
    assert partition.drain() == ["urgent", "a"]


def test_the_next_due_time_is_known(partition: PartitionUnderTest) -> None:
    assert partition.wrapped.state.next_due() == (None, None)
    partition.produce("a", at=partition.after(50))
    partition.produce("b", ttl=40)
    now = partition.wrapped.now()
    assert partition.wrapped.state.next_due() == (now.elapsed + 40 * SECOND, now.wall + 50 * SECOND)
    granted = partition.lease(timeout=30)
    assert partition.wrapped.state.next_due()[0] == now.elapsed + 30 * SECOND
    partition.retry(granted.lease, delay=20)
    assert partition.wrapped.state.next_due()[0] == now.elapsed + 20 * SECOND


def test_nothing_is_done_before_its_time(partition: PartitionUnderTest) -> None:
    partition.produce("a", at=partition.after(50))
    partition.produce("b", ttl=40)
    partition.lease(timeout=30)
    assert partition.run_due() == 0


def test_ttl_buries_a_ready_item(partition: PartitionUnderTest) -> None:
    partition.produce("short", ttl=5)
    partition.produce("long", ttl=50)
    partition.advance(4.999_999)
    assert partition.state_of(0) is ItemState.READY
    partition.advance(0.000_001)
    assert partition.state_of(0) is ItemState.BURIED
    assert partition.wrapped.state.burials[0].reason == "expired"
    assert partition.lease_texts() == ["long"]


def test_ttl_buries_a_scheduled_item(partition: PartitionUnderTest) -> None:
    partition.produce("a", at=partition.after(100), ttl=5)
    partition.advance(5)
    assert partition.state_of(0) is ItemState.BURIED
    partition.advance(100)
    assert partition.lease_texts() == []


def test_ttl_buries_a_retried_item_waiting_out_its_delay(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=5)
    partition.retry(partition.lease().lease, delay=100)
    partition.advance(5)
    assert partition.state_of(0) is ItemState.BURIED


def test_ttl_never_touches_a_leased_item(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=5)
    granted = partition.lease(timeout=50)
    partition.advance(10)
    partition.restart()
    assert partition.state_of(0) is ItemState.LEASED
    assert partition.complete(granted.lease).done == 1


@pytest.mark.parametrize("way", ["retry", "delay", "expiry"])
def test_an_item_returned_after_its_ttl_ended_is_buried(partition: PartitionUnderTest, way: str) -> None:
    partition.produce("a", ttl=5)
    granted = partition.lease(timeout=50)
    partition.advance(10)
    if way == "expiry":
        partition.advance(40)
    else:
        partition.retry(granted.lease, delay=5 if way == "delay" else 0)
    assert partition.state_of(0) is ItemState.BURIED
    assert partition.wrapped.state.burials[0].reason == "expired"


def test_a_later_item_of_a_unit_returned_after_its_ttl_ended_is_buried(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", key="k", ttl=5)
    granted = partition.lease(2, per_key=2, timeout=50)
    partition.advance(10)
    partition.retry(granted.lease)
    partition.run_due()
    assert partition.counts.buried == 2


def test_the_policys_ttl_holds_for_items_without_their_own(partition: PartitionUnderTest) -> None:
    partition.configure(ttl=5 * SECOND)
    partition.produce("default")
    partition.produce("own", ttl=50)
    partition.advance(5)
    assert partition.lease_texts() == ["own"]


def test_a_new_ttl_holds_for_new_items_only(partition: PartitionUnderTest) -> None:
    partition.produce("before")
    partition.configure(ttl=5 * SECOND)
    partition.produce("after")
    partition.advance(5)
    assert partition.lease_texts() == ["before"]


def test_ttl_survives_a_restart(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=5)
    partition.kill()
    partition.restart()
    partition.advance(5)
    assert partition.state_of(0) is ItemState.BURIED


def test_many_due_items_are_decided_in_portions(partition: PartitionUnderTest) -> None:
    partition.configure(ttl=10 * SECOND)
    partition.produce(*"abcdefghij")
    partition.clock.advance(DAY)
    assert partition.run_due(limit=3) == 4
    assert partition.counts.buried == 10


def test_after_a_portion_of_resolved_items_the_rest_is_buried(partition: PartitionUnderTest) -> None:
    partition.configure(ttl=10 * SECOND)
    partition.produce(*"abcdefghij")
    partition.complete(partition.lease(5).lease)
    partition.clock.advance(1 * SECOND)
    partition.produce("k")
    partition.clock.advance(DAY)
    partition.run_due(limit=3)
    assert partition.counts == (0, 0, 0, 5, 6, 0, 0)


def test_many_leases_ending_at_once_end_in_portions(partition: PartitionUnderTest) -> None:
    partition.produce(*map(str, range(10)))
    for _ in range(5):
        partition.lease(2, timeout=5)
    partition.clock.advance(5 * SECOND)
    assert partition.run_due(limit=4) == 3
    assert granted_offsets(partition.lease()) == list(range(10))


def test_a_back_off_has_its_full_length_after_an_earlier_one_was_cut_short(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=5)
    partition.retry(partition.lease().lease, delay=100)
    partition.advance(5)
    partition.redrive()
    partition.retry(partition.lease().lease, delay=300)
    partition.advance(299)
    assert partition.state_of(0) is ItemState.SCHEDULED
    partition.advance(1)
    assert partition.state_of(0) is ItemState.READY
