"""Settling: complete, retry and bury under a lease; ended leases are refused."""

import pytest

from penstock.errors import InvalidRequest
from penstock.rules.commands import Settled
from penstock.rules.item_states import ItemState
from penstock.words.clock import HOUR, MINUTE
from penstock.words.errors import LeaseLost
from tests.partition_under_test import PartitionUnderTest, granted_offsets


def test_completing_everything_empties_the_partition(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease()
    assert partition.complete(granted.lease).done == 2
    partition.restart()
    assert partition.counts == (0, 0, 0, 2, 0, 0, 0)


def test_a_repeated_complete_succeeds_also_after_a_restart(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease()
    partition.complete(granted.lease)
    partition.restart()
    assert partition.complete(granted.lease, [0, 1]) == partition.complete(granted.lease, [0, 1, 1])
    assert partition.complete(granted.lease, [0, 1]).done == 2
    assert partition.complete(granted.lease).refused == []


def test_a_repeated_complete_within_a_live_lease_succeeds(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease()
    assert partition.complete(granted.lease, [0]).done == 1
    again = partition.complete(granted.lease, [0])
    assert (again.done, again.refused) == (1, [])


def test_a_repeated_complete_of_a_returned_item_is_refused(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease()
    partition.complete(granted.lease)
    partition.seek(0)
    assert partition.complete(granted.lease, [0]).refused == [0]
    assert partition.state_of(0) is ItemState.READY


def test_each_item_of_a_batch_has_its_own_result(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c")
    mine, other = partition.lease(2), partition.lease(1)
    settled = partition.complete(mine.lease, [0, 2, 1, 99])
    assert (settled.done, settled.refused) == (2, [2, 99])
    assert [partition.state_of(offset) for offset in range(3)] == [ItemState.COMPLETED, ItemState.COMPLETED, ItemState.LEASED]
    assert partition.retry(other.lease, [2, 0]).refused == [0]


def test_an_ended_lease_can_only_repeat_what_it_completed(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease(timeout=5)
    partition.complete(granted.lease, [0])
    partition.advance(5)
    partition.restart()
    settled = partition.complete(granted.lease, [0, 1])
    assert (settled.done, settled.refused) == (1, [1])


def test_an_ended_lease_is_forgotten_in_time(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease(timeout=5)
    partition.complete(granted.lease, [0])
    partition.advance(5)
    partition.advance(16 * 60)
    partition.drain()
    assert partition.wrapped.state.leases.partly_completed == {}
    assert partition.complete(granted.lease, [0]).refused == [0]


def test_finished_leases_are_forgotten_after_the_longest_lease_could_have_ended(partition: PartitionUnderTest) -> None:
    for _ in range(3):
        partition.produce("a")
        partition.drain()
        partition.clock.advance(13 * HOUR)
    assert len(partition.wrapped.state.leases.fully_completed) <= 2


def test_an_invented_token_is_refused(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    for verb in (partition.complete, partition.retry, partition.bury, partition.extend):
        with pytest.raises(LeaseLost):
            verb(12_345)
    assert partition.counts.ready == 1


def test_a_retried_item_goes_to_the_tail(partition: PartitionUnderTest) -> None:
    partition.produce("A", "B", "C")
    partition.retry(partition.lease(1).lease)
    assert partition.drain() == ["B", "C", "A"]


def test_items_retried_together_keep_their_order(partition: PartitionUnderTest) -> None:
    partition.produce(*"ABCD")
    partition.retry(partition.lease(3).lease)
    assert partition.drain() == ["D", "A", "B", "C"]


def test_retried_items_go_to_the_tail_of_their_own_priority(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", priority=2)
    partition.produce("3")
    partition.retry(partition.lease(1).lease)
    assert partition.drain() == ["2", "1", "3"]


def test_a_delayed_retry_waits_its_delay(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease, delay=30, reason="busy")
    assert partition.state_of(0) is ItemState.SCHEDULED
    partition.restart()
    partition.advance(29.999_999)
    assert partition.lease_texts() == []
    partition.advance(0.000_001)
    assert partition.lease_texts() == ["a"]


@pytest.mark.parametrize("way", ["retry", "expiry"])
def test_max_attempts_allows_exactly_so_many_leases(partition: PartitionUnderTest, way: str) -> None:
    partition.configure(max_attempts=3)
    partition.produce("a")
    for _ in range(3):
        granted = partition.lease(timeout=1)
        assert granted_offsets(granted) == [0]
        if way == "retry":
            answer = partition.retry(granted.lease, reason="no")
            assert answer.buried == ([0] if partition.state_of(0) is ItemState.BURIED else [])
        else:
            partition.advance(1)
    assert partition.lease().lease == 0
    assert partition.state_of(0) is ItemState.BURIED
    assert partition.wrapped.state.burials[0].attempts == 3
    assert partition.wrapped.state.burials[0].reason == ("attempts spent: no" if way == "retry" else "attempts spent: lease expired")


def test_a_retry_says_which_items_it_buried_and_says_it_again(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=2)
    partition.produce("a")
    partition.retry(partition.lease().lease)
    partition.produce("b", "c", ttl=5)
    granted = partition.lease(3, timeout=60)
    partition.advance(6)
    for _ in range(2):
        assert partition.retry(granted.lease, [0, 1], request="r") == Settled(2, buried=[0, 1])
        partition.kill()
    assert partition.retry(granted.lease, [2], counted=False) == Settled(1, buried=[2]), "the ttl counts for uncounted ones, too"


def test_no_max_attempts_is_endless(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=0)
    partition.produce("a")
    for _ in range(100):
        partition.retry(partition.lease().lease)
    assert partition.lease().attempts == {0: 101}


def test_the_last_attempt_is_not_buried_before_its_lease_ends(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=1)
    partition.produce("a")
    granted = partition.lease(timeout=5)
    partition.advance(4)
    assert partition.state_of(0) is ItemState.LEASED
    assert partition.complete(granted.lease).done == 1


def test_an_uncounted_retry_counts_no_attempt(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=1)
    partition.produce("a")
    for _ in range(3):
        partition.retry(partition.lease().lease, counted=False)
    assert partition.lease().attempts == {}


def test_a_buried_item_says_why_when_and_after_how_many_attempts(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    first = partition.wall
    partition.retry(partition.lease().lease, reason="once")
    partition.advance(10)
    partition.bury(partition.lease().lease, reason="hopeless")
    partition.restart()
    assert partition.wrapped.state.burials[0] == ("hopeless", partition.wall, 2, first, partition.wall, partition.wrapped.now().elapsed)
    assert partition.lease_texts() == []


def test_a_long_reason_is_cut_and_not_refused(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.bury(partition.lease().lease, reason="é" * 2_000)
    assert partition.wrapped.state.burials[0].reason == "é" * 512


def test_a_completed_item_forgets_its_failures(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease, reason="once")
    partition.drain()
    partition.seek(0)
    assert partition.lease().attempts == {}


@pytest.mark.parametrize("verb", ["complete", "retry", "bury", "extend"])
def test_a_repeated_request_answers_the_same_and_does_nothing(partition: PartitionUnderTest, verb: str) -> None:
    partition.configure(max_attempts=0)
    partition.produce("a", "b", "c")
    granted = partition.lease(2)
    do = getattr(partition, verb)
    first = do(granted.lease, **({} if verb == "extend" else {"which": [0, 2]}), request="r")
    partition.kill()
    before = partition.counts
    assert do(granted.lease, **({} if verb == "extend" else {"which": [0, 2]}), request="r") == first
    assert partition.counts == before


def test_a_request_is_forgotten_after_two_lease_timeouts_when_those_are_longer(partition: PartitionUnderTest) -> None:
    partition.configure(lease_timeout=HOUR, max_attempts=0)
    partition.produce("a")
    granted = partition.lease()
    partition.retry(granted.lease, request="r")
    partition.clock.advance(2 * HOUR - 1 * MINUTE)
    assert partition.retry(granted.lease, request="r").done == 1
    partition.clock.advance(1 * MINUTE)
    with pytest.raises(LeaseLost):
        partition.retry(granted.lease, request="r")


def test_a_lease_whose_items_are_all_settled_is_over(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c")
    granted = partition.lease()
    partition.complete(granted.lease, [0])
    partition.retry(granted.lease, [1])
    partition.bury(granted.lease, [2])
    with pytest.raises(LeaseLost):
        partition.extend(granted.lease)
    assert granted_offsets(partition.lease()) == [1]


def test_with_keep_later_items_the_later_items_stay_leased(partition: PartitionUnderTest) -> None:
    partition.produce("0", "1", "2", "3", "4", key="k")
    lease = partition.lease(5, per_key=4).lease
    assert partition.bury(lease, [3, 1], alone=True) == Settled(2)
    assert partition.lease_texts() == [], "the key is still held"
    assert partition.complete(lease, [0, 1, 2]) == Settled(2, [1])
    partition.restart()
    assert partition.drain() == ["4"]
    assert not partition.wrapped.state.keys.by_key


def test_after_keep_later_items_an_expired_lease_returns_the_other_items(partition: PartitionUnderTest) -> None:
    partition.produce("0", "1", "2", key="k")
    partition.bury(partition.lease(3, per_key=3, timeout=5).lease, [1], alone=True)
    partition.advance(5)
    assert partition.drain() == ["0", "2"]


def test_keep_later_items_is_ignored_where_a_burial_parks_its_key(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    partition.produce("0", "1", "2", key="k")
    lease = partition.lease(3, per_key=3).lease
    assert partition.bury(lease, [1], alone=True) == Settled(0, [], [1])
    partition.complete(lease, [0])
    assert partition.bury(lease, [1], alone=True) == Settled(1)
    assert partition.lease_texts() == []
    partition.redrive()
    assert partition.lease_texts(per_key=3) == ["1", "2"]


def test_complete_unleased_completes_ready_items(partition: PartitionUnderTest) -> None:
    first, _, third = partition.produce("a", "b", "c")
    partition.lease(2, timeout=1)
    partition.advance(1)
    assert partition.consume(first, third) == 2
    assert partition.lease_texts() == ["b"]
    assert partition.wrapped.state.counts.completed == 2


def test_complete_unleased_leaves_items_that_are_not_ready(partition: PartitionUnderTest) -> None:
    leased, later, done, ready = [
        *partition.produce("leased"),
        *partition.produce("later", at=partition.after(9)),
        *partition.produce("done", "ready"),
    ]
    partition.complete(partition.lease(2).lease, [done])
    assert partition.consume(leased, later, done, ready, 99) == 1
    states = [partition.wrapped.state.state_of(offset) for offset in (leased, later, done, ready)]
    assert states == [ItemState.LEASED, ItemState.SCHEDULED, ItemState.COMPLETED, ItemState.COMPLETED]


def test_complete_unleased_takes_items_out_of_their_key_line(partition: PartitionUnderTest) -> None:
    first, second, _ = partition.produce("1", "2", "3", key="k")
    partition.retry(partition.lease(3, per_key=2).lease, [first])
    assert partition.consume(second) == 1
    assert partition.drain() == ["1", "3"]
    assert not partition.wrapped.state.keys.by_key


def test_complete_unleased_of_the_head_of_a_line_makes_the_next_item_the_head(partition: PartitionUnderTest) -> None:
    first, _ = partition.produce("1", "2", key="k")
    partition.retry(partition.lease(1).lease)
    assert partition.consume(first) == 1
    assert partition.lease_texts() == ["2"]


def test_complete_unleased_deletes_failures(partition: PartitionUnderTest) -> None:
    (first,) = partition.produce("a")
    partition.retry(partition.lease(1).lease, reason="no")
    partition.consume(first)
    assert not partition.wrapped.state.failures
    partition.seek(0)
    assert partition.lease(1).attempts == {}


def test_only_lease_expired_completes_only_items_whose_lease_expired(partition: PartitionUnderTest) -> None:
    lapsed, retried, sought, fresh = partition.produce("lapsed", "retried", "sought", "fresh")
    partition.retry(partition.lease(4).lease, [retried], reason="no")
    partition.complete(next(iter(partition.wrapped.state.leases.live)), [sought])
    partition.advance(60)
    partition.seek(0)
    assert partition.consume(fresh, retried, sought, 99, lapsed=True) == 1
    assert partition.consume(lapsed, lapsed=True) == 1


def test_complete_unleased_survives_a_restart(partition: PartitionUnderTest) -> None:
    first, _ = partition.produce("a", "b", key="k")
    partition.retry(partition.lease(1).lease)
    partition.consume(first)
    partition.restart()
    assert partition.lease_texts() == ["b"]


def test_a_consumer_that_cannot_be_stored_is_refused(partition: PartitionUnderTest) -> None:
    (first,) = partition.produce("a")
    with pytest.raises(InvalidRequest):
        partition.consume(first, consumer="\ud800")
    assert partition.lease_texts() == ["a"]
