"""Leasing without keys: oldest first within priority, one holder at a time, the token as the fence."""

import pytest

from penstock.rules.commands import Produce
from penstock.rules.item_states import Life
from penstock.words.clock import SECOND
from penstock.words.errors import LeaseLost
from tests.partition_under_test import Bench, given, items


def test_the_first_ten_of_many_then_the_next_ten(bench: Bench) -> None:
    bench.produce(*map(str, range(10_000)))
    assert given(bench.lease(10)) == list(range(10))
    assert given(bench.lease(10)) == list(range(10, 20))


def test_an_empty_partition_gives_nothing(bench: Bench) -> None:
    granted = bench.lease(10)
    assert (granted.lease, granted.count) == (0, 0)


def test_a_partial_answer_rather_than_none(bench: Bench) -> None:
    bench.produce("a", "b")
    assert bench.take(20) == ["a", "b"]


def test_no_item_is_held_twice(bench: Bench) -> None:
    bench.produce(*"abcdef")
    held = [offset for _ in range(4) for offset in given(bench.lease(2))]
    assert held == [0, 1, 2, 3, 4, 5]


def test_an_expired_lease_returns_its_items_and_its_token_is_refused_for_everything(bench: Bench) -> None:
    bench.produce("a")
    old = bench.lease(timeout=5)
    bench.advance(5)
    new = bench.lease()
    assert (given(new), new.attempts) == ([0], {0: 2})
    for verb in (bench.complete, bench.retry, bench.bury, bench.extend):
        with pytest.raises(LeaseLost, match="; drop the work"):
            verb(old.lease)
    assert bench.complete(old.lease, [0]).refused == [0]
    assert bench.life(0) is Life.LEASED
    assert bench.complete(new.lease).done == 1


def test_a_lease_ends_at_its_deadline_and_not_before(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease(timeout=5)
    bench.clock.advance(5 * SECOND - 1)
    bench.settle()
    assert bench.life(0) is Life.LEASED
    assert granted.deadline == bench.partition.now().elapsed + 1
    bench.clock.advance(1)
    bench.settle()
    assert bench.life(0) is Life.READY


def test_extending_moves_the_deadline(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease(timeout=5)
    bench.advance(4)
    bench.extend(granted.lease)
    bench.advance(4)
    assert bench.life(0) is Life.LEASED
    bench.extend(granted.lease, 100)
    bench.advance(99)
    assert bench.life(0) is Life.LEASED
    bench.advance(1)
    assert bench.life(0) is Life.READY


def test_a_lease_may_also_be_shortened(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease(timeout=500)
    bench.extend(granted.lease, 1)
    bench.advance(1)
    assert bench.life(0) is Life.READY


def test_a_lease_and_its_token_survive_kill_and_restart(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease(1, timeout=10)
    bench.kill()
    bench.restart()
    assert bench.take() == ["b"]
    assert bench.complete(granted.lease).done == 1


def test_a_lease_that_ended_while_nobody_was_there_is_ended_at_once(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease(timeout=10)
    bench.clock.advance(11 * SECOND)
    bench.kill()
    bench.settle()
    assert bench.take() == ["a"]
    with pytest.raises(LeaseLost):
        bench.complete(granted.lease)


def test_no_two_owners_give_the_same_token(bench: Bench) -> None:
    bench.produce(*"abc")
    tokens = []
    for _ in range(3):
        tokens.append(bench.lease(1).lease)
        bench.kill()
    assert len(set(tokens)) == 3


def test_attempts_survive_a_kill_so_that_a_poison_item_cannot_reset_them(bench: Bench) -> None:
    bench.configure(max_attempts=3)
    bench.produce("poison")
    for _ in range(3):
        assert bench.lease(timeout=1).count == 1
        bench.kill()
        bench.advance(1)
    assert bench.life(0) is Life.BURIED


def test_a_repeated_request_gets_the_same_lease(bench: Bench) -> None:
    bench.produce("a", "b")
    first = bench.lease(1, request="r")
    bench.kill()
    again = bench.lease(1, request="r")
    assert (again.lease, again.runs, again.deadline) == (first.lease, first.runs, first.deadline)
    assert bench.counts.leased == 1


def test_a_repeated_request_shows_only_what_is_still_open(bench: Bench) -> None:
    bench.produce("a", "b")
    first = bench.lease(2, request="r")
    bench.complete(first.lease, [0])
    assert given(bench.lease(2, request="r")) == [1]
    bench.complete(first.lease, [1])
    assert bench.lease(2, request="r").lease == 0


def test_a_paused_partition_gives_nothing_until_resumed(bench: Bench) -> None:
    bench.produce("a", "b")
    held = bench.lease(1)
    bench.pause(lease=True)
    bench.restart()
    assert bench.take() == []
    assert bench.complete(held.lease).done == 1
    bench.pause(lease=False)
    assert bench.take() == ["b"]


def test_priority_goes_before_age_and_age_within_priority(bench: Bench) -> None:
    bench.produce("low", priority=9)
    bench.produce("usual 1", "usual 2")
    bench.produce("high", priority=0)
    assert bench.drain() == ["high", "usual 1", "usual 2", "low"]


def test_a_batch_of_mixed_priorities_is_served_by_priority_in_order(bench: Bench) -> None:
    bench.produce("5a", "0a", "9a", "0b", "5b", "9b", priorities=[5, 0, 9, 0, 5, 9])
    assert bench.drain(2) == ["0a", "0b", "5a", "5b", "9a", "9b"]


def test_waiting_lifts_an_item_one_step_for_each_span_of_aging(bench: Bench) -> None:
    bench.configure(priority_aging=10 * SECOND)
    bench.produce("old", priority=7)
    bench.clock.advance(20 * SECOND - 1)
    bench.produce("new")
    assert bench.take(1) == ["new"]
    bench.clock.advance(1)
    bench.produce("newer")
    assert bench.take(1) == ["old"]


def test_a_low_item_under_endless_high_traffic_is_served_in_bounded_time(bench: Bench) -> None:
    bench.configure(priority_aging=10 * SECOND)
    bench.produce("low", priority=9)
    served: list[str] = []
    for number in range(20):
        bench.produce(f"high {number}", priority=0)
        served += bench.take(1, timeout=10_000)
        bench.advance(10)
    assert served.index("low") == 9
    assert [name for name in served if name != "low"] == [f"high {number}" for number in range(19)]


def test_aging_survives_a_restart(bench: Bench) -> None:
    bench.configure(priority_aging=10 * SECOND)
    bench.produce("old", priority=6)
    bench.clock.advance(10 * SECOND)
    bench.restart()
    bench.produce("new")
    assert bench.take(1) == ["old"]


def test_without_aging_a_high_item_always_goes_first(bench: Bench) -> None:
    bench.configure(priority_aging=0)
    bench.produce("low", priority=6)
    bench.advance(100_000)
    bench.produce("usual")
    assert bench.drain() == ["usual", "low"]


def test_a_large_backlog_of_small_produces_is_leased_in_one_go(bench: Bench) -> None:
    for number in range(300):
        bench.partition.run(Produce(items([str(number)])))
        if number % 7 == 0:
            bench.partition.commit()
    bench.partition.commit()
    assert bench.take(300) == [str(number) for number in range(300)]
