"""Completion by right: what the consumer of a queue had handled when its leases ended."""

import pytest

from penstock.errors import InvalidRequest
from penstock.rules.life import Life
from tests.support import Bench


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
