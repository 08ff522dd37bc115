"""Settling: complete, retry and bury under a lease, and what a stale token may still do (nothing)."""

import pytest

from penstock.errors import InvalidRequest
from penstock.rules.commands import Settled
from penstock.rules.item_states import Life
from penstock.words.clock import HOUR, MINUTE
from penstock.words.errors import LeaseLost
from tests.partition_under_test import Bench, given


def test_completing_everything_empties_the_partition(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease()
    assert bench.complete(granted.lease).done == 2
    bench.restart()
    assert bench.counts == (0, 0, 0, 2, 0, 0)


def test_a_repeated_complete_succeeds_also_after_a_restart(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease()
    bench.complete(granted.lease)
    bench.restart()
    assert bench.complete(granted.lease, [0, 1]) == bench.complete(granted.lease, [0, 1, 1])
    assert bench.complete(granted.lease, [0, 1]).done == 2
    assert bench.complete(granted.lease).refused == []


def test_a_repeated_complete_within_a_live_lease_succeeds(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease()
    assert bench.complete(granted.lease, [0]).done == 1
    again = bench.complete(granted.lease, [0])
    assert (again.done, again.refused) == (1, [])


def test_a_complete_is_not_repeated_for_an_item_that_came_back(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease()
    bench.complete(granted.lease)
    bench.seek(0)
    assert bench.complete(granted.lease, [0]).refused == [0]
    assert bench.life(0) is Life.READY


def test_each_item_of_a_batch_has_its_own_result(bench: Bench) -> None:
    bench.produce("a", "b", "c")
    mine, other = bench.lease(2), bench.lease(1)
    settled = bench.complete(mine.lease, [0, 2, 1, 99])
    assert (settled.done, settled.refused) == (2, [2, 99])
    assert [bench.life(offset) for offset in range(3)] == [Life.COMPLETED, Life.COMPLETED, Life.LEASED]
    assert bench.retry(other.lease, [2, 0]).refused == [0]


def test_of_an_ended_lease_only_what_was_completed_under_it_counts(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease(timeout=5)
    bench.complete(granted.lease, [0])
    bench.advance(5)
    bench.restart()
    settled = bench.complete(granted.lease, [0, 1])
    assert (settled.done, settled.refused) == (1, [1])


def test_an_ended_lease_is_forgotten_in_time(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease(timeout=5)
    bench.complete(granted.lease, [0])
    bench.advance(5)
    bench.advance(16 * 60)
    bench.drain()
    assert bench.partition.state.leases.past == {}
    assert bench.complete(granted.lease, [0]).refused == [0]


def test_finished_leases_are_forgotten_after_the_longest_lease_could_have_ended(bench: Bench) -> None:
    for _ in range(3):
        bench.produce("a")
        bench.drain()
        bench.clock.advance(13 * HOUR)
    assert len(bench.partition.state.leases.finished) <= 2


def test_an_invented_token_is_refused(bench: Bench) -> None:
    bench.produce("a")
    for verb in (bench.complete, bench.retry, bench.bury, bench.extend):
        with pytest.raises(LeaseLost):
            verb(12_345)
    assert bench.counts.ready == 1


def test_a_retried_item_goes_to_the_tail(bench: Bench) -> None:
    bench.produce("A", "B", "C")
    bench.retry(bench.lease(1).lease)
    assert bench.drain() == ["B", "C", "A"]


def test_items_retried_together_keep_their_order(bench: Bench) -> None:
    bench.produce(*"ABCD")
    bench.retry(bench.lease(3).lease)
    assert bench.drain() == ["D", "A", "B", "C"]


def test_retried_items_go_to_the_tail_of_their_own_priority(bench: Bench) -> None:
    bench.produce("1", "2", priority=2)
    bench.produce("3")
    bench.retry(bench.lease(1).lease)
    assert bench.drain() == ["2", "1", "3"]


def test_a_delayed_retry_waits_its_delay(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease, delay=30, reason="busy")
    assert bench.life(0) is Life.SCHEDULED
    bench.restart()
    bench.advance(29.999_999)
    assert bench.take() == []
    bench.advance(0.000_001)
    assert bench.take() == ["a"]


@pytest.mark.parametrize("way", ["retry", "expiry"])
def test_max_attempts_allows_exactly_so_many_leases(bench: Bench, way: str) -> None:
    bench.configure(max_attempts=3)
    bench.produce("a")
    for _ in range(3):
        granted = bench.lease(timeout=1)
        assert given(granted) == [0]
        if way == "retry":
            bench.retry(granted.lease, reason="no")
        else:
            bench.advance(1)
    assert bench.lease().lease == 0
    assert bench.life(0) is Life.BURIED
    assert bench.partition.state.buried[0].attempts == 3
    assert bench.partition.state.buried[0].reason == ("attempts spent: no" if way == "retry" else "attempts spent: lease expired")


def test_no_max_attempts_is_endless(bench: Bench) -> None:
    bench.configure(max_attempts=0)
    bench.produce("a")
    for _ in range(100):
        bench.retry(bench.lease().lease)
    assert bench.lease().attempts == {0: 101}


def test_the_last_attempt_is_left_alone_until_its_lease_really_ends(bench: Bench) -> None:
    bench.configure(max_attempts=1)
    bench.produce("a")
    granted = bench.lease(timeout=5)
    bench.advance(4)
    assert bench.life(0) is Life.LEASED
    assert bench.complete(granted.lease).done == 1


def test_an_uncounted_retry_gives_the_attempt_back(bench: Bench) -> None:
    bench.configure(max_attempts=1)
    bench.produce("a")
    for _ in range(3):
        bench.retry(bench.lease().lease, counted=False)
    assert bench.lease().attempts == {}


def test_a_buried_item_says_why_when_and_after_how_many_attempts(bench: Bench) -> None:
    bench.produce("a")
    first = bench.wall
    bench.retry(bench.lease().lease, reason="once")
    bench.advance(10)
    bench.bury(bench.lease().lease, reason="hopeless")
    bench.restart()
    assert bench.partition.state.buried[0] == ("hopeless", bench.wall, 2, first, bench.wall, bench.partition.now().elapsed)
    assert bench.take() == []


def test_a_long_reason_is_cut_and_not_refused(bench: Bench) -> None:
    bench.produce("a")
    bench.bury(bench.lease().lease, reason="é" * 2_000)
    assert bench.partition.state.buried[0].reason == "é" * 512


def test_a_completed_item_forgets_its_failures(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease, reason="once")
    bench.drain()
    bench.seek(0)
    assert bench.lease().attempts == {}


@pytest.mark.parametrize("verb", ["complete", "retry", "bury", "extend"])
def test_a_repeated_request_answers_the_same_and_does_nothing(bench: Bench, verb: str) -> None:
    bench.configure(max_attempts=0)
    bench.produce("a", "b", "c")
    granted = bench.lease(2)
    do = getattr(bench, verb)
    first = do(granted.lease, **({} if verb == "extend" else {"which": [0, 2]}), request="r")
    bench.kill()
    before = bench.counts
    assert do(granted.lease, **({} if verb == "extend" else {"which": [0, 2]}), request="r") == first
    assert bench.counts == before


def test_a_request_is_forgotten_after_two_lease_timeouts_when_those_are_longer(bench: Bench) -> None:
    bench.configure(lease_timeout=HOUR, max_attempts=0)
    bench.produce("a")
    granted = bench.lease()
    bench.retry(granted.lease, request="r")
    bench.clock.advance(2 * HOUR - 1 * MINUTE)
    assert bench.retry(granted.lease, request="r").done == 1
    bench.clock.advance(1 * MINUTE)
    with pytest.raises(LeaseLost):
        bench.retry(granted.lease, request="r")


def test_a_lease_whose_items_are_all_settled_is_over(bench: Bench) -> None:
    bench.produce("a", "b", "c")
    granted = bench.lease()
    bench.complete(granted.lease, [0])
    bench.retry(granted.lease, [1])
    bench.bury(granted.lease, [2])
    with pytest.raises(LeaseLost):
        bench.extend(granted.lease)
    assert given(bench.lease()) == [1]


def test_buried_alone_those_behind_stay_with_the_lease(bench: Bench) -> None:
    bench.produce("0", "1", "2", "3", "4", key="k")
    lease = bench.lease(5, per_key=4).lease
    assert bench.bury(lease, [3, 1], alone=True) == Settled(2)
    assert bench.take() == [], "the key is still held"
    assert bench.complete(lease, [0, 1, 2]) == Settled(2, [1])
    bench.restart()
    assert bench.drain() == ["4"]
    assert not bench.partition.state.keys.map


def test_a_lease_ends_behind_what_was_buried_alone(bench: Bench) -> None:
    bench.produce("0", "1", "2", key="k")
    bench.bury(bench.lease(3, per_key=3, timeout=5).lease, [1], alone=True)
    bench.advance(5)
    assert bench.drain() == ["0", "2"]


def test_where_a_burial_parks_its_key_nothing_is_buried_alone(bench: Bench) -> None:
    bench.configure(on_bury="park")
    bench.produce("0", "1", "2", key="k")
    lease = bench.lease(3, per_key=3).lease
    assert bench.bury(lease, [1], alone=True) == Settled(0, [], [1])
    bench.complete(lease, [0])
    assert bench.bury(lease, [1], alone=True) == Settled(1)
    assert bench.take() == []
    bench.redrive()
    assert bench.take(per_key=3) == ["1", "2"]


def test_what_is_ready_is_done_whatever_it_was_before(bench: Bench) -> None:
    first, _, third = bench.produce("a", "b", "c")
    bench.lease(2, timeout=1)
    bench.advance(1)
    assert bench.consume(first, third) == 2
    assert bench.take() == ["b"]
    assert bench.partition.state.counts.completed == 2


def test_what_is_not_ready_is_left_alone(bench: Bench) -> None:
    leased, later, done, ready = [*bench.produce("leased"), *bench.produce("later", at=bench.after(9)), *bench.produce("done", "ready")]
    bench.complete(bench.lease(2).lease, [done])
    assert bench.consume(leased, later, done, ready, 99) == 1
    states = [bench.partition.state.state_of(offset) for offset in (leased, later, done, ready)]
    assert states == [Life.LEASED, Life.SCHEDULED, Life.COMPLETED, Life.COMPLETED]


def test_items_leave_the_line_of_their_key(bench: Bench) -> None:
    first, second, _ = bench.produce("1", "2", "3", key="k")
    bench.retry(bench.lease(3, per_key=2).lease, [first])
    assert bench.consume(second) == 1
    assert bench.drain() == ["1", "3"]
    assert not bench.partition.state.keys.map


def test_the_head_of_a_line_makes_room_for_the_next(bench: Bench) -> None:
    first, _ = bench.produce("1", "2", key="k")
    bench.retry(bench.lease(1).lease)
    assert bench.consume(first) == 1
    assert bench.take() == ["2"]


def test_failures_are_forgotten(bench: Bench) -> None:
    (first,) = bench.produce("a")
    bench.retry(bench.lease(1).lease, reason="no")
    bench.consume(first)
    assert not bench.partition.state.failures
    bench.seek(0)
    assert bench.lease(1).attempts == {}


def test_of_those_that_a_lease_has_ended_on_no_other_is_done(bench: Bench) -> None:
    lapsed, retried, sought, fresh = bench.produce("lapsed", "retried", "sought", "fresh")
    bench.retry(bench.lease(4).lease, [retried], reason="no")
    bench.complete(next(iter(bench.partition.state.leases.live)), [sought])
    bench.advance(60)
    bench.seek(0)
    assert bench.consume(fresh, retried, sought, 99, lapsed=True) == 1
    assert bench.consume(lapsed, lapsed=True) == 1


def test_it_survives_a_restart(bench: Bench) -> None:
    first, _ = bench.produce("a", "b", key="k")
    bench.retry(bench.lease(1).lease)
    bench.consume(first)
    bench.restart()
    assert bench.take() == ["b"]


def test_a_consumer_that_cannot_be_stored_is_refused(bench: Bench) -> None:
    (first,) = bench.produce("a")
    with pytest.raises(InvalidRequest):
        bench.consume(first, consumer="\ud800")
    assert bench.take() == ["a"]
