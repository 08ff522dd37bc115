"""Strays: what becomes ready where its slot no longer lives is named, to be sent on, and nothing else is lost by it."""

import pytest

from penstock.rules import base
from penstock.rules.item_states import Life
from tests.partition_under_test import Bench, given, slot


def mark(bench: Bench, *keys: str) -> dict[int, int]:
    """The slots of these keys leave now."""
    return {slot(key): bench.partition.state.next_offset for key in keys}


def test_a_due_item_of_a_departed_slot_is_astray_and_the_lease_goes_on_when_it_is_sent(bench: Bench) -> None:
    bench.produce("b0", "a0", keys=["b", "a"], at=bench.after(5))
    departed = mark(bench, "a")
    bench.produce("b1", "plain", "c1", keys=["b", None, "c"])
    bench.advance(5)
    assert bench.strays(departed) == [1]
    bench.send(1)
    assert bench.texts(bench.lease(departed=departed)) == ["b1", "plain", "c1"]
    assert (bench.counts, bench.life(1)) == ((1, 0, 3, 0, 0, 1), Life.MOVING)
    bench.clear(leased=True)
    assert bench.texts(bench.lease(departed=departed)) == ["b0"]


def test_to_name_strays_changes_nothing(bench: Bench) -> None:
    bench.produce("plain", "a0", keys=[None, "a"], at=bench.after(5))
    departed = mark(bench, "a")
    bench.produce("b1", "b2", key="b")
    bench.advance(5)
    before = base.dump(bench.partition.state)
    for _ in range(2):
        assert bench.strays(departed) == [1]
        assert base.dump(bench.partition.state) == before
    assert bench.take() == ["b1", "plain", "a0"]  # whoever knows of no departed slots is given everything


@pytest.mark.parametrize("want", [1, 100])
def test_what_was_ready_before_the_slot_left_is_leased_here(bench: Bench, want: int) -> None:
    bench.produce("a1", "a2", "b1", keys=["a", "a", "b"])
    held = bench.lease(1)
    departed = mark(bench, "a", "b")
    bench.retry(held.lease, reason="no")
    served = []
    while (granted := bench.lease(want, departed=departed)).lease:
        served += bench.texts(granted)
        bench.complete(granted.lease)
    assert sorted(served) == ["a1", "a2", "b1"]
    assert served.index("a1") < served.index("a2")


def test_a_back_off_ends_where_it_began(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a")
    bench.retry(bench.lease().lease, delay=5)
    departed = mark(bench, "a")
    bench.advance(5)
    assert given(bench.lease(departed=departed, per_key=2)) == [0, 1]


def test_redriven_items_are_astray_unless_they_have_their_old_place(bench: Bench) -> None:
    for key, on_bury in (("a", "release"), ("b", "park")):
        bench.configure(on_bury=on_bury)
        bench.produce(key, key=key)
        bench.bury(bench.lease().lease)
    departed = mark(bench, "a", "b")
    bench.redrive()
    assert bench.strays(departed) == [0]
    bench.send(0)
    assert bench.texts(bench.lease(departed=departed)) == ["b"]


def test_items_without_a_key_are_never_astray(bench: Bench) -> None:
    bench.produce("plain", at=bench.after(5))
    bench.advance(5)
    assert given(bench.lease(departed={0: 0})) == [0]


def test_a_stray_in_another_lane_is_named_when_its_lane_is_read(bench: Bench) -> None:
    """The lane of the stray comes last, but a key of a better one may have its earlier item there: it is read ahead."""
    bench.produce("a0", key="a", priority=9, at=bench.after(5))
    departed = mark(bench, "a")
    bench.advance(5)
    bench.produce("b1", key="b", priority=0)
    assert bench.strays(departed, want=1) == [0]
    bench.send(0)
    assert given(bench.lease(departed=departed)) == [1]


def test_strays_among_items_of_mixed_priorities(bench: Bench) -> None:
    bench.produce("a0", "b0", "p0", "a9", keys=["a", "b", None, "a"], priorities=[0, 0, 0, 9], at=bench.after(5))
    departed = mark(bench, "a")
    bench.produce("b1", "p9", keys=["b", None], priorities=[9, 9])
    bench.advance(5)
    found = []
    while strays := bench.strays(departed):
        found += strays
        bench.send(*strays)
    assert sorted(found) == [0, 3]
    bench.clear(leased=True)
    assert bench.counts == (bench.counts.ready, 0, 0, bench.counts.completed, 0, 2)


def test_strays_are_not_passed_into_the_line_of_a_held_key(bench: Bench) -> None:
    bench.produce("a1", key="a")
    bench.produce("a0", key="a", at=bench.after(5))
    held = bench.lease(departed={})
    departed = mark(bench, "a")
    bench.advance(5)
    assert bench.strays(departed) == [1]
    bench.send(1)
    bench.retry(held.lease)
    assert given(bench.lease(departed=departed)) == [0]


def test_a_paused_partition_names_no_strays(bench: Bench) -> None:
    bench.produce("a0", key="a", at=bench.after(5))
    departed = mark(bench, "a")
    bench.advance(5)
    bench.pause(lease=True)
    assert bench.lease(departed=departed).lease == 0
    bench.pause(lease=False)
    assert bench.strays(departed) == [0]


def test_a_lease_with_an_id_is_given_once_its_strays_are_gone(bench: Bench) -> None:
    bench.produce("a0", "b0", keys=["a", "b"], at=bench.after(5))
    departed = mark(bench, "a")
    bench.advance(5)
    assert bench.strays(departed) == [0]
    bench.send(0)
    first = bench.lease(request="r", departed=departed)
    bench.kill()
    assert given(first) == given(bench.lease(request="r", departed=departed)) == [1]


def test_sought_items_are_of_the_backlog_and_astray_when_that_is_drained(bench: Bench) -> None:
    bench.produce("a1", "b1", keys=["a", "b"])
    bench.drain()
    departed = mark(bench, "a")
    bench.seek(0)
    drained = bench.lease(departed=departed)
    assert given(drained) == [0, 1]
    bench.complete(drained.lease)
    bench.seek(0)
    assert bench.strays({slot("a"): 0}) == [0]


def test_a_seek_leaves_in_line_what_its_new_partition_waits_for(bench: Bench) -> None:
    """The backlog is drained but for a key that is held: what stands behind it is handled here, before what came after it elsewhere."""
    bench.produce("done", key="b")
    bench.drain()
    bench.produce("a1", "a2", key="a")
    held = bench.lease()
    assert bench.take() == []
    assert bench.seek(0) == 1
    assert bench.texts(bench.lease(departed={slot("a"): 0})) == ["done"]
    bench.complete(held.lease)
    assert bench.texts(bench.lease(departed={slot("a"): 0}, awaited=["a"])) == ["a2"]


def test_what_comes_back_into_its_line_when_nobody_waits_for_it_is_astray(bench: Bench) -> None:
    """Its key lives elsewhere, and has gone on there: it may not be handled here at the same time."""
    bench.configure(on_bury="park")
    bench.produce("a1", "a2", key="a")
    bench.bury(bench.lease(1).lease)
    assert bench.take() == []
    bench.redrive()
    assert bench.strays({slot("a"): 0}) == [0, 1]
