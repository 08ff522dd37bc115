"""How good the best item of a partition is, and a lease that stops where another partition has something better."""

import pytest

from penstock.rules import base
from penstock.rules.commands import Again, Granted, Lease
from penstock.rules.lanes import Rank, best_rank, lifted
from penstock.words.clock import SECOND
from tests.partition_under_test import Bench, given


def now(bench: Bench) -> int:
    return bench.partition.now().elapsed


def head(bench: Bench) -> tuple[int, float] | None:
    """Priority of the best head and how many seconds it has been waiting."""
    found = bench.partition.state.best_head(now(bench))
    return None if found is None else (found.priority, (now(bench) - found.since) / SECOND)


def until(bench: Bench, priority: int, seconds: float) -> Rank:
    """Nothing that waits for less than so many seconds, at this lifted priority."""
    return Rank(priority, now(bench) - round(seconds * SECOND))


# -- the best head --------------------------------------------------------------------------------------------


def test_an_empty_partition_has_no_head(bench: Bench) -> None:
    assert head(bench) is None
    bench.produce("a")
    bench.lease()
    assert head(bench) is None


def test_the_best_lane_comes_first_and_then_the_oldest(bench: Bench) -> None:
    bench.produce("a", priority=6)
    bench.advance(3)
    bench.produce("b", priority=4)
    bench.advance(2)
    assert head(bench) == (4, 2)
    bench.lease(1)
    assert head(bench) == (6, 5)


def test_waiting_lifts_a_head(bench: Bench) -> None:
    bench.configure(priority_aging=10 * SECOND)
    bench.produce("a", priority=2)
    bench.produce("b", priority=9)
    heads = bench.partition.state.heads()
    bench.advance(19)
    assert head(bench) == (1, 19)
    assert best_rank(heads, 10 * SECOND, now(bench)) == bench.partition.state.best_head(now(bench)), "what was noted before says the same"
    bench.advance(10_000)
    assert head(bench) == (0, 10_019)
    bench.configure(priority_aging=0)
    assert head(bench) == (2, 10_019)


@pytest.mark.parametrize(("seconds", "expected"), [(0, 5), (59.999_999, 5), (60, 4), (300, 0), (1e6, 0)])
def test_every_step_of_aging_lifts_by_one(seconds: float, expected: int) -> None:
    assert lifted(5, 0, 60 * SECOND, round(seconds * SECOND)) == expected


def test_the_head_of_a_free_key_competes_and_that_of_a_held_one_does_not(bench: Bench) -> None:
    bench.produce("a", "b", key="k", priority=1)
    bench.produce("other")
    bench.advance(5)
    held = bench.lease(1)
    assert given(bench.lease(1)) == [2], "the second of the key is passed over"
    assert head(bench) is None
    bench.complete(held.lease)
    assert head(bench) == (1, 5)


def test_a_keyed_item_that_came_back_does_not_make_older_ones_behind_it_look_young(bench: Bench) -> None:
    bench.produce("a", "b", keys=["k", "l"])
    held = bench.lease(1)
    bench.advance(8)
    bench.retry(held.lease)
    assert head(bench) == (5, 8)
    assert bench.take(1, until=until(bench, 5, 8)) == ["a"], "it keeps its place"
    assert bench.take(1, until=until(bench, 5, 8)) == ["b"]


def test_looking_changes_nothing(bench: Bench) -> None:
    bench.produce(*"aabbcc", keys=list("aabbcc"), priorities=[3, 5, 3, 5, 3, 5])
    bench.complete(bench.lease(2).lease)
    before = base.dump(bench.partition.state)
    assert head(bench) == head(bench)
    assert base.dump(bench.partition.state) == before


# -- until ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_a_lease_stops_before_what_is_worse(bench: Bench, keyed: bool) -> None:
    for number in range(5):
        bench.produce(f"{number}", key=f"key-{number}" if keyed else None)
        bench.advance(2)
    assert bench.take(100, until=until(bench, 5, 6)) == ["0", "1", "2"]
    assert bench.take(100, until=until(bench, 5, 6)) == []
    assert bench.take(1, until=until(bench, 4, 0)) == [], "a better lifted priority is better whatever the age"
    assert bench.take(1, until=until(bench, 5, 4)) == ["3"]
    assert bench.take(100, until=until(bench, 6, 100)) == ["4"], "and a worse one is worse"


def test_a_lease_stops_before_a_worse_lane(bench: Bench) -> None:
    bench.produce("a", "b", "c", priorities=[7, 3, 7])
    assert bench.take(until=until(bench, 5, 0)) == ["b"]
    assert bench.take(until=until(bench, 7, 0)) == ["a", "c"]


def test_lines_of_free_keys_stop_it_too(bench: Bench) -> None:
    bench.produce("a0", "b0", keys=["a", "b"])
    bench.produce("a1", key="a")
    bench.advance(4)
    bench.produce("b1", key="b")
    held = bench.lease(10)
    assert bench.take() == []
    bench.complete(held.lease)
    assert bench.take(until=until(bench, 5, 2)) == ["a1"]
    assert bench.take() == ["b1"]


def test_items_of_held_keys_on_the_way_are_passed_over_and_the_rest_shows_its_age(bench: Bench) -> None:
    bench.produce("a0", key="a")
    bench.lease()
    bench.produce("a1", "a2", key="a")
    bench.advance(5)
    bench.produce("b", key="b")
    assert head(bench) == (5, 5)
    assert bench.take(until=until(bench, 5, 3)) == []
    assert head(bench) == (5, 0), "what is behind them"
    assert bench.take(until=until(bench, 5, 0)) == ["b"]


# -- reading ahead --------------------------------------------------------------------------------------------


def test_an_urgent_item_with_a_key_is_found_at_once_behind_a_backlog_of_many_seconds(bench: Bench) -> None:
    """Every earlier item with a key must be read, in whichever lane it waits: its key might be the same."""
    for number in range(150):
        bench.produce(f"{number}", f"plain {number}", keys=[f"key-{number}", None], priority=8)
        bench.advance(1.5)
    bench.configure(priority_aging=0)
    bench.produce("urgent", key="other", priority=0)
    bench.produce("not yet", key="key-3", priority=0)
    answers = [bench.partition.run(Lease(1), rounds=1) for _ in range(2)]
    assert isinstance(answers[0], Again) and isinstance(answers[1], Granted)
    bench.partition.commit()
    assert bench.texts(answers[1]) == ["urgent"]
    assert bench.drain(1)[:4] == ["0", "plain 0", "1", "plain 1"]
