"""Time: what comes due by itself, and what does not."""

import pytest

from penstock.rules.item_states import Life
from penstock.words.clock import DAY, SECOND
from tests.partition_under_test import Bench, given


def test_two_schedules_both_fire_each_at_its_time(bench: Bench) -> None:
    bench.produce("second", at=bench.after(20))
    bench.produce("first", at=bench.after(10))
    bench.restart()
    bench.advance(9)
    assert bench.take() == []
    bench.advance(1)
    assert bench.take() == ["first"]
    bench.advance(10)
    assert bench.take() == ["second"]


def test_equal_times_keep_produce_order(bench: Bench) -> None:
    when = bench.after(10)
    bench.produce("1", at=when)
    bench.produce("2", "3", at=when)
    bench.advance(10)
    assert bench.drain() == ["1", "2", "3"]


@pytest.mark.parametrize("ahead", [-3600.0, 0, 0.1])
def test_the_past_and_the_next_tenth_of_a_second_are_now(bench: Bench, ahead: float) -> None:
    bench.produce("a", at=bench.after(ahead))
    assert bench.take() == ["a"]


def test_more_than_a_tenth_of_a_second_is_scheduled(bench: Bench) -> None:
    bench.produce("a", at=bench.after(0.1) + 1)
    assert bench.life(0) is Life.SCHEDULED


def test_a_scheduled_item_joins_the_tail_when_it_is_due(bench: Bench) -> None:
    bench.produce("later", at=bench.after(1))
    bench.produce("a")
    bench.advance(1)
    bench.produce("b")
    assert bench.drain() == ["a", "later", "b"]


def test_a_scheduled_item_keeps_its_priority(bench: Bench) -> None:
    bench.produce("urgent", at=bench.after(1), priority=0)
    bench.produce("a")
    bench.advance(1)
    assert bench.drain() == ["urgent", "a"]


def test_the_next_due_time_is_known(bench: Bench) -> None:
    assert bench.partition.state.next_due() == (None, None)
    bench.produce("a", at=bench.after(50))
    bench.produce("b", ttl=40)
    now = bench.partition.now()
    assert bench.partition.state.next_due() == (now.elapsed + 40 * SECOND, now.wall + 50 * SECOND)
    granted = bench.lease(timeout=30)
    assert bench.partition.state.next_due()[0] == now.elapsed + 30 * SECOND
    bench.retry(granted.lease, delay=20)
    assert bench.partition.state.next_due()[0] == now.elapsed + 20 * SECOND


def test_nothing_is_done_before_its_time(bench: Bench) -> None:
    bench.produce("a", at=bench.after(50))
    bench.produce("b", ttl=40)
    bench.lease(timeout=30)
    assert bench.settle() == 0


def test_ttl_buries_a_ready_item(bench: Bench) -> None:
    bench.produce("short", ttl=5)
    bench.produce("long", ttl=50)
    bench.advance(4.999_999)
    assert bench.life(0) is Life.READY
    bench.advance(0.000_001)
    assert bench.life(0) is Life.BURIED
    assert bench.partition.state.buried[0].reason == "expired"
    assert bench.take() == ["long"]


def test_ttl_buries_a_scheduled_item(bench: Bench) -> None:
    bench.produce("a", at=bench.after(100), ttl=5)
    bench.advance(5)
    assert bench.life(0) is Life.BURIED
    bench.advance(100)
    assert bench.take() == []


def test_ttl_buries_a_retried_item_waiting_out_its_delay(bench: Bench) -> None:
    bench.produce("a", ttl=5)
    bench.retry(bench.lease().lease, delay=100)
    bench.advance(5)
    assert bench.life(0) is Life.BURIED


def test_ttl_never_touches_a_leased_item(bench: Bench) -> None:
    bench.produce("a", ttl=5)
    granted = bench.lease(timeout=50)
    bench.advance(10)
    bench.restart()
    assert bench.life(0) is Life.LEASED
    assert bench.complete(granted.lease).done == 1


@pytest.mark.parametrize("way", ["retry", "delay", "expiry"])
def test_an_item_that_comes_back_overdue_is_buried(bench: Bench, way: str) -> None:
    bench.produce("a", ttl=5)
    granted = bench.lease(timeout=50)
    bench.advance(10)
    if way == "expiry":
        bench.advance(40)
    else:
        bench.retry(granted.lease, delay=5 if way == "delay" else 0)
    assert bench.life(0) is Life.BURIED
    assert bench.partition.state.buried[0].reason == "expired"


def test_an_overdue_item_later_in_a_unit_is_buried_once_it_waits(bench: Bench) -> None:
    bench.produce("a", "b", key="k", ttl=5)
    granted = bench.lease(2, per_key=2, timeout=50)
    bench.advance(10)
    bench.retry(granted.lease)
    bench.settle()
    assert bench.counts.buried == 2


def test_the_policys_ttl_holds_for_items_without_their_own(bench: Bench) -> None:
    bench.configure(ttl=5 * SECOND)
    bench.produce("default")
    bench.produce("own", ttl=50)
    bench.advance(5)
    assert bench.take() == ["own"]


def test_a_new_ttl_holds_for_new_items_only(bench: Bench) -> None:
    bench.produce("before")
    bench.configure(ttl=5 * SECOND)
    bench.produce("after")
    bench.advance(5)
    assert bench.take() == ["before"]


def test_ttl_survives_a_restart(bench: Bench) -> None:
    bench.produce("a", ttl=5)
    bench.kill()
    bench.restart()
    bench.advance(5)
    assert bench.life(0) is Life.BURIED


def test_a_million_things_due_are_done_in_portions(bench: Bench) -> None:
    bench.configure(ttl=10 * SECOND)
    bench.produce(*"abcdefghij")
    bench.clock.advance(DAY)
    assert bench.settle(limit=3) == 4
    assert bench.counts.buried == 10


def test_a_portion_full_of_resolved_items_does_not_save_the_rest(bench: Bench) -> None:
    bench.configure(ttl=10 * SECOND)
    bench.produce(*"abcdefghij")
    bench.complete(bench.lease(5).lease)
    bench.clock.advance(1 * SECOND)
    bench.produce("k")
    bench.clock.advance(DAY)
    bench.settle(limit=3)
    assert bench.counts == (0, 0, 0, 5, 6, 0)


def test_many_leases_ending_at_once_end_in_portions(bench: Bench) -> None:
    bench.produce(*map(str, range(10)))
    for _ in range(5):
        bench.lease(2, timeout=5)
    bench.clock.advance(5 * SECOND)
    assert bench.settle(limit=4) == 3
    assert given(bench.lease()) == list(range(10))


def test_a_delay_is_kept_whole_though_an_earlier_one_was_cut_short(bench: Bench) -> None:
    bench.produce("a", ttl=5)
    bench.retry(bench.lease().lease, delay=100)
    bench.advance(5)
    bench.redrive()
    bench.retry(bench.lease().lease, delay=300)
    bench.advance(299)
    assert bench.life(0) is Life.SCHEDULED
    bench.advance(1)
    assert bench.life(0) is Life.READY
