"""Fences: after a resize, what came here with its slot waits until the old partition has let go; nothing else does."""

from collections.abc import Iterator

import pytest

from penstock.rules import base, routing
from penstock.rules.commands import FenceOff
from penstock.rules.fences import pack_slots
from penstock.rules.item_states import Life
from penstock.rules.records import Barrier, pack_keys
from tests.partition_under_test import Bench, given, key_id, slot


def neighbours(key: str) -> Iterator[str]:
    """Other keys of the same slot."""
    return (other for other in map(str, range(1_000_000)) if slot(other) == slot(key))


A2, A3 = (name for name, _ in zip(neighbours("a"), range(2), strict=False))
"""Two keys beside "a" in its slot."""


def image(bench: Bench) -> bytes:
    return base.dump(bench.partition.state)


# -- what waits ----------------------------------------------------------------------------------------


def test_fenced_items_are_passed_over_and_the_others_go(bench: Bench) -> None:
    bench.fence("a", "b")
    bench.produce("plain", "a1", "c1", "b1", "a2", "more", keys=[None, "a", "c", "b", "a", None])
    assert bench.take() == ["plain", "c1", "more"]
    for _ in range(2):
        bench.restart()
        assert bench.take() == []
    assert bench.counts == (3, 0, 3, 0, 0, 0)


def test_a_whole_slot_waits_until_the_fence_narrows_and_then_only_the_keys_it_names(bench: Bench) -> None:
    fence = bench.fence("a")
    bench.produce("1", "2", "3", "4", keys=["a", A2, A3, A2])
    assert bench.take() == []
    assert bench.narrow(fence, "a", A3) == 2
    assert bench.drain() == ["2", "4"]
    bench.produce("5", "6", keys=["a", A2])
    assert bench.drain() == ["6"]
    assert bench.counts.ready == 3


def test_narrowing_speaks_for_what_was_not_looked_at_yet_too(bench: Bench) -> None:
    fence = bench.fence("a")
    bench.produce("1", "2", keys=["a", A2])
    bench.narrow(fence, A2)
    assert bench.drain() == ["1"]


@pytest.mark.parametrize("looked_at", [False, True])
def test_keys_are_lifted_one_by_one(bench: Bench, looked_at: bool) -> None:
    fence = bench.fence("a", "b")
    bench.produce("a1", "b1", "a2", "b2", keys=["a", "b", "a", "b"])
    assert not looked_at or bench.take() == []
    bench.narrow(fence, "a", "b")
    assert (bench.take(), bench.lift(fence, "c")) == ([], 0)
    assert bench.lift(fence, "b", "c") == 1
    assert bench.drain() == ["b1", "b2"]
    bench.kill()
    assert bench.lift(fence, "a") == 1
    assert bench.drain() == ["a1", "a2"]


def test_a_fence_that_narrows_to_nothing_is_gone(bench: Bench) -> None:
    fence = bench.fence("a")
    bench.produce("a1", "a2", key="a")
    assert bench.take() == []
    bench.narrow(fence)
    assert bench.drain() == ["a1", "a2"]


def test_a_fence_that_is_gone_leaves_no_trace(bench: Bench) -> None:
    bench.produce("x")
    fence = bench.fence("a", "b")
    before = image(bench)
    again = bench.fence("a", "b")
    bench.narrow(again, "a", "b")
    bench.lift(again, "a")
    bench.lift(again, "b")
    state = bench.partition.state
    assert [one.number for one in state.keys.fences] == [fence]
    state.fence_version, state.fences_given = 1, fence  # but for how many there were
    assert image(bench) == before
    state.fence_version, state.fences_given = 2, again


def test_only_a_narrowed_fence_is_lifted_and_none_narrows_twice(bench: Bench) -> None:
    fence = bench.fence("a")
    before = image(bench)
    assert (bench.lift(fence, "a"), bench.narrow(99, "a"), bench.lift(99, "a")) == (0, 0, 0)
    assert image(bench) == before
    bench.narrow(fence, "a")
    before = image(bench)
    assert bench.narrow(fence) == 0
    assert image(bench) == before


def test_a_fence_may_name_keys_from_the_first(bench: Bench) -> None:
    barrier = Barrier(0, 3, 10, 0, None, pack_keys([key_id("a")]))
    bench.partition.run(FenceOff(1, [barrier]))
    bench.produce("1", "2", keys=["a", A2])
    assert bench.take() == ["2"]
    bench.lift(1, "a")
    assert bench.take() == ["1"]


def test_items_without_a_key_are_of_no_slot(bench: Bench) -> None:
    bench.partition.run(FenceOff(1, [Barrier(0, 3, 10, 0, pack_slots([routing.NO_KEY & routing.SLOT_MASK]))]))
    bench.produce("plain", "a1", keys=[None, "a"])
    assert bench.why(0) == "ready: the next lease that reaches it gets it"
    assert bench.take() == ["plain", "a1"]


# -- since ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [False, True])
def test_items_from_before_the_fence_go(bench: Bench, looked_at: bool) -> None:
    """The slot left and came back: the other partition waits for these in turn."""
    bench.produce("a1", "a2", key="a")
    held = bench.lease()
    fence = bench.fence("a")
    bench.produce("a3", "a4", key="a")
    assert not looked_at or bench.take() == []
    bench.complete(held.lease)
    assert bench.drain() == ["a2"]
    bench.narrow(fence)
    assert bench.drain() == ["a3", "a4"]


@pytest.mark.parametrize("passed_over", [False, True])
def test_a_unit_of_a_key_ends_at_the_fence(bench: Bench, passed_over: bool) -> None:
    bench.produce("a0", "a1", "a2", key="a")
    held = bench.lease()
    fence = bench.fence("a")
    bench.produce("a3", "a4", key="a")
    assert not passed_over or bench.take(per_key=10) == []
    bench.complete(held.lease)
    unit = bench.lease(per_key=10)
    assert bench.texts(unit) == ["a1", "a2"]
    bench.complete(unit.lease)
    assert bench.take(per_key=10) == []
    bench.narrow(fence)
    assert bench.take(per_key=10) == ["a3", "a4"]


@pytest.mark.parametrize(("since", "served"), [(0, ["a0", "a1"]), (1, ["a0"]), (-1, [])])
def test_a_fence_may_begin_where_its_slot_left(bench: Bench, since: int, served: list[str]) -> None:
    """What became ready here while the slot lived elsewhere is not older than what is there."""
    bench.produce("a0", "a1", key="a")
    held = bench.lease()
    assert bench.take() == []
    bench.partition.run(FenceOff(1, [Barrier(0, 3, 10, since, pack_slots([slot("a")]))]))
    bench.retry(held.lease)
    bench.produce("a2", key="a")
    bench.kill()
    assert bench.drain() == served
    bench.narrow(1)
    assert bench.drain() == [payload for payload in ("a0", "a1", "a2") if payload not in served]


def test_the_earlier_of_two_fences_counts_and_each_must_go(bench: Bench) -> None:
    first = bench.fence("a", source=3)
    bench.produce("a1", key="a")
    second = bench.fence("a", source=4)
    bench.produce("a2", key="a")
    assert bench.take() == []
    bench.narrow(second)
    assert bench.take() == []
    third = bench.fence("a")
    bench.produce("a3", key="a")
    bench.narrow(first)
    assert bench.drain() == ["a1", "a2"]
    bench.narrow(third, "a")
    assert bench.take() == []
    bench.lift(third, "a")
    assert bench.drain() == ["a3"]


# -- everything else that happens inside a fence -------------------------------------------------------


def test_leased_items_come_back_to_their_place_before_the_fence(bench: Bench) -> None:
    bench.produce("a1", "b1", "c1", keys=["a", "b", "c"])
    held = bench.lease(timeout=20)
    fence = bench.fence("a", "b", "c")
    bench.produce("a2", "b2", "c2", keys=["a", "b", "c"])
    bench.retry(held.lease, [0], reason="no")
    bench.retry(held.lease, [1], delay=5)
    assert bench.drain() == ["a1"]
    bench.advance(5)
    assert bench.drain() == ["b1"]
    bench.advance(15)
    assert bench.drain() == ["c1"]
    bench.narrow(fence)
    assert sorted(bench.drain()) == ["a2", "b2", "c2"]


def test_what_comes_due_inside_a_fence_waits(bench: Bench) -> None:
    bench.produce("a1", "b1", keys=["a", "b"], at=bench.after(5))
    fence = bench.fence("a")
    bench.produce("a2", key="a")
    bench.advance(5)
    assert bench.why(0).startswith("fenced by a resize: partition 3 ")
    assert bench.drain() == ["b1"]
    bench.narrow(fence)
    assert bench.drain() == ["a2", "a1"]  # a2 was there when it came


def test_a_back_off_that_began_before_the_fence_ends_before_it(bench: Bench) -> None:
    bench.produce("a1", key="a")
    bench.retry(bench.lease().lease, delay=5)
    fence = bench.fence("a")
    bench.produce("a2", key="a")
    bench.advance(5)
    assert bench.drain() == ["a1"]
    bench.narrow(fence)
    assert bench.drain() == ["a2"]


@pytest.mark.parametrize("on_bury", ["release", "park"])
def test_the_ttl_of_a_fenced_item_runs_out(bench: Bench, on_bury: str) -> None:
    bench.configure(on_bury=on_bury)
    fence = bench.fence("a")
    bench.produce("a1", key="a", ttl=5)
    bench.produce("a2", key="a")
    assert bench.take() == []
    bench.advance(5)
    assert bench.life(0) is Life.BURIED
    bench.narrow(fence)
    assert bench.drain() == (["a2"] if on_bury == "release" else [])
    assert (bench.redrive(), bench.drain()) == (1, ["a1"] if on_bury == "release" else ["a1", "a2"])


def test_a_parked_key_stays_parked_and_is_fenced_when_it_is_free(bench: Bench) -> None:
    bench.configure(on_bury="park")
    bench.produce("a1", "a2", key="a")
    bench.bury(bench.lease().lease, reason="no")
    fence = bench.fence("a")
    bench.produce("a3", key="a")
    assert bench.take() == []
    assert bench.release("a") == 1
    assert bench.drain() == ["a2"]
    bench.narrow(fence, "a")
    assert bench.take() == []
    bench.lift(fence, "a")
    assert bench.drain() == ["a3"]


def test_lifting_a_parked_key_does_not_free_it(bench: Bench) -> None:
    bench.configure(on_bury="park")
    fence = bench.fence("a")
    bench.produce("a1", key="a", ttl=1)
    bench.produce("a2", key="a")
    bench.advance(1)
    bench.narrow(fence)
    assert bench.take() == []
    assert bench.redrive() == 1
    assert bench.drain() == ["a1", "a2"]


def test_a_redriven_item_goes_behind_the_fence_unless_it_has_its_old_place(bench: Bench) -> None:
    for key, on_bury in (("a", "release"), ("b", "park")):
        bench.configure(on_bury=on_bury)
        bench.produce(key, key=key)
        bench.bury(bench.lease().lease)
    fence = bench.fence("a", "b")
    bench.redrive()
    assert bench.drain() == ["b"]
    bench.narrow(fence)
    assert bench.drain() == ["a"]


def test_sought_items_of_fenced_slots_wait_and_the_others_come(bench: Bench) -> None:
    bench.produce("a1", "c1", "plain", keys=["a", "c", None])
    bench.drain(10)
    fence = bench.fence("a")
    bench.produce("a2", "c2", keys=["a", "c"])
    assert bench.take(1) == ["c2"]
    assert bench.seek(0) == 3
    bench.restart()
    assert sorted(bench.drain()) == ["plain"]
    bench.narrow(fence)
    assert bench.drain() == ["a2", "a1"]


def test_priorities_go_on_around_a_fence(bench: Bench) -> None:
    bench.configure(priority_aging=0)
    bench.produce("a5", key="a")
    held = bench.lease()
    fence = bench.fence("a")
    bench.produce("a0", "c9", "c0", "p9", "p0", "b5", keys=["a", "c", "c", None, None, "b"], priorities=[0, 9, 0, 9, 0, 5])
    assert bench.drain() == ["p0", "b5", "c9", "c0", "p9"]
    bench.retry(held.lease)
    assert bench.drain() == ["a5"]
    bench.narrow(fence)
    assert bench.drain() == ["a0"]


def test_clearing_what_is_ready_clears_what_is_fenced(bench: Bench) -> None:
    fence = bench.fence("a")
    bench.produce("a1", "a2", key="a")
    assert bench.take() == []
    bench.produce("a3", key="a")
    assert bench.clear(ready=True) == 3
    bench.produce("a4", key="a")
    assert bench.take() == []
    bench.narrow(fence)
    assert bench.drain() == ["a4"]


def test_a_fenced_item_can_be_sent_on(bench: Bench) -> None:
    fence = bench.fence("a")
    bench.produce("a1", "a2", "a3", key="a")
    assert bench.take() == []
    bench.produce("a4", key="a")
    bench.send(0, 3)
    bench.narrow(fence)
    assert bench.drain() == ["a2", "a3"]


def test_a_fence_is_told(bench: Bench) -> None:
    bench.produce("a0", key="a")
    fence = bench.fence("a", source=12)
    bench.produce("a1", "a2", "c1", keys=["a", "a", "c"])
    for _ in range(2):  # before and after it was passed over
        found = bench.partition.explain(1)
        assert (found.state, found.waits_for) == (Life.READY, 12)
        assert found.why == "fenced by a resize: partition 12 still holds earlier items of its key or slot"
        assert bench.partition.explain(3).waits_for is None
        assert given(bench.lease()) in ([0, 3], [])
        bench.clear(leased=True)
    bench.narrow(fence)
    assert bench.why(1) == "ready: first of its key, the next lease that reaches it gets it"


def test_a_fence_stands_at_every_step_of_its_life_after_a_kill(bench: Bench) -> None:
    fence = bench.fence("a", "b")
    bench.kill()
    bench.produce("a1", "b1", "2", keys=["a", "b", A2])
    assert bench.take() == []
    bench.kill()
    assert bench.take() == []
    bench.narrow(fence, "a", "b")
    bench.kill()
    assert bench.drain() == ["2"]
    bench.lift(fence, "b")
    bench.kill()
    assert bench.drain() == ["b1"]
    bench.lift(fence, "a")
    bench.kill()
    assert (bench.drain(), list(bench.partition.state.keys.fences)) == (["a1"], [])
