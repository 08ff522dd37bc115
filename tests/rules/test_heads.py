"""The best rank of a partition's heads, and leases that stop at `worst_rank`, where another partition has better
items."""

import pytest

from penstock.rules import base
from penstock.rules.commands import AcquireLease, AskAgain, LeaseAnswer
from penstock.rules.lanes import Rank, aged_priority, best_rank
from penstock.words.clock import SECOND
from tests.partition_under_test import PartitionUnderTest, granted_offsets


def now(partition: PartitionUnderTest) -> int:
    return partition.wrapped.now().elapsed


def best(partition: PartitionUnderTest) -> Rank | None:
    state = partition.wrapped.state
    return best_rank(state.lane_heads(), state.policy.priority_aging, now(partition))


def head(partition: PartitionUnderTest) -> tuple[int, float] | None:
    """Priority of the best head and how many seconds it has been waiting."""
    found = best(partition)
    return None if found is None else (found.priority, (now(partition) - found.since) / SECOND)


def until(partition: PartitionUnderTest, priority: int, seconds: float) -> Rank:
    """The rank of an item of this aged priority that has waited so many seconds."""
    return Rank(priority, now(partition) - round(seconds * SECOND))


# -- the best head --------------------------------------------------------------------------------------------


def test_an_empty_partition_has_no_head(partition: PartitionUnderTest) -> None:
    assert head(partition) is None
    partition.produce("a")
    partition.lease()
    assert head(partition) is None


def test_the_best_lane_comes_first_and_then_the_oldest(partition: PartitionUnderTest) -> None:
    partition.produce("a", priority=6)
    partition.advance(3)
    partition.produce("b", priority=4)
    partition.advance(2)
    assert head(partition) == (4, 2)
    partition.lease(1)
    assert head(partition) == (6, 5)


def test_aging_raises_the_priority_of_a_head(partition: PartitionUnderTest) -> None:
    partition.configure(priority_aging=10 * SECOND)
    partition.produce("a", priority=2)
    partition.produce("b", priority=9)
    heads = partition.wrapped.state.lane_heads()
    partition.advance(19)
    assert head(partition) == (1, 19)
    assert best_rank(heads, 10 * SECOND, now(partition)) == best(partition), "earlier heads give the same rank"
    partition.advance(10_000)
    assert head(partition) == (0, 10_019)
    partition.configure(priority_aging=0)
    assert head(partition) == (2, 10_019)


@pytest.mark.parametrize(("seconds", "expected"), [(0, 5), (59.999_999, 5), (60, 4), (300, 0), (1e6, 0)])
def test_each_aging_period_raises_the_priority_by_one(seconds: float, expected: int) -> None:
    assert aged_priority(5, 0, 60 * SECOND, round(seconds * SECOND)) == expected


def test_the_head_of_a_free_key_competes_and_that_of_a_held_one_does_not(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", key="k", priority=1)
    partition.produce("other")
    partition.advance(5)
    held = partition.lease(1)
    assert granted_offsets(partition.lease(1)) == [2], "the second of the key is passed over"
    assert head(partition) is None
    partition.complete(held.lease)
    assert head(partition) == (1, 5)


def test_a_keyed_item_that_came_back_does_not_make_older_ones_behind_it_look_young(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", keys=["k", "l"])
    held = partition.lease(1)
    partition.advance(8)
    partition.retry(held.lease)
    assert head(partition) == (5, 8)
    assert partition.lease_texts(1, until=until(partition, 5, 8)) == ["a"], "it keeps its place"
    assert partition.lease_texts(1, until=until(partition, 5, 8)) == ["b"]


def test_reading_the_heads_changes_nothing(partition: PartitionUnderTest) -> None:
    partition.produce(*"aabbcc", keys=list("aabbcc"), priorities=[3, 5, 3, 5, 3, 5])
    partition.complete(partition.lease(2).lease)
    before = base.dump(partition.wrapped.state)
    assert head(partition) == head(partition)
    assert base.dump(partition.wrapped.state) == before


# -- until ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_a_lease_stops_before_items_of_a_worse_rank(partition: PartitionUnderTest, keyed: bool) -> None:
    for number in range(5):
        partition.produce(f"{number}", key=f"key-{number}" if keyed else None)
        partition.advance(2)
    assert partition.lease_texts(100, until=until(partition, 5, 6)) == ["0", "1", "2"]
    assert partition.lease_texts(100, until=until(partition, 5, 6)) == []
    assert partition.lease_texts(1, until=until(partition, 4, 0)) == [], "a better lifted priority is better whatever the age"
    assert partition.lease_texts(1, until=until(partition, 5, 4)) == ["3"]
    assert partition.lease_texts(100, until=until(partition, 6, 100)) == ["4"], "and a worse one is worse"


def test_a_lease_stops_before_a_worse_lane(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c", priorities=[7, 3, 7])
    assert partition.lease_texts(until=until(partition, 5, 0)) == ["b"]
    assert partition.lease_texts(until=until(partition, 7, 0)) == ["a", "c"]


def test_a_lease_stops_before_a_worse_free_key(partition: PartitionUnderTest) -> None:
    partition.produce("a0", "b0", keys=["a", "b"])
    partition.produce("a1", key="a")
    partition.advance(4)
    partition.produce("b1", key="b")
    held = partition.lease(10)
    assert partition.lease_texts() == []
    partition.complete(held.lease)
    assert partition.lease_texts(until=until(partition, 5, 2)) == ["a1"]
    assert partition.lease_texts() == ["b1"]


def test_items_of_held_keys_on_the_way_are_passed_over_and_the_rest_shows_its_age(partition: PartitionUnderTest) -> None:
    partition.produce("a0", key="a")
    partition.lease()
    partition.produce("a1", "a2", key="a")
    partition.advance(5)
    partition.produce("b", key="b")
    assert head(partition) == (5, 5)
    assert partition.lease_texts(until=until(partition, 5, 3)) == []
    assert head(partition) == (5, 0), "what is behind them"
    assert partition.lease_texts(until=until(partition, 5, 0)) == ["b"]


# -- reading ahead --------------------------------------------------------------------------------------------


def test_an_urgent_item_with_a_key_is_found_at_once_behind_a_backlog_of_many_seconds(partition: PartitionUnderTest) -> None:
    """Every earlier item with a key must be read, in whichever lane it waits: its key might be the same."""
    for number in range(150):
        partition.produce(f"{number}", f"plain {number}", keys=[f"key-{number}", None], priority=8)
        partition.advance(1.5)
    partition.configure(priority_aging=0)
    partition.produce("urgent", key="other", priority=0)
    partition.produce("not yet", key="key-3", priority=0)
    answers = [partition.wrapped.run(AcquireLease(1), rounds=1) for _ in range(2)]
    assert isinstance(answers[0], AskAgain) and isinstance(answers[1], LeaseAnswer)
    partition.wrapped.commit()
    assert partition.texts(answers[1]) == ["urgent"]
    assert partition.drain(1)[:4] == ["0", "plain 0", "1", "plain 1"]
