"""Follow-ups: what a completion promises is on its way exactly when the completion is recorded, and exactly once."""

from collections.abc import Callable
from functools import partial

import pytest

from penstock.rules import base
from penstock.rules.commands import Complete, Letter
from penstock.rules.item_states import Life
from penstock.rules.outbox import MAX_OUTBOX_BYTES, destination
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueBusy
from tests.partition_under_test import ELSEWHERE, Bench, given

OTHER = destination(0xBEEF, 0)
ONE, TWO = Letter(ELSEWHERE, b"one"), Letter(ELSEWHERE, b"two")


def promised(bench: Bench, to: bytes = ELSEWHERE) -> list[bytes]:
    """Bodies on their way, in their order."""
    line = bench.partition.state.outbox.get(to, [])
    assert sorted({entry.sequence for entry in line}) == [entry.sequence for entry in line]
    return [entry.body for entry in line]


def refused(bench: Bench, error: type[PenstockError], wrong: Callable[[], object]) -> None:
    """It is an error and changes nothing."""
    before = base.dump(bench.partition.state)
    with pytest.raises(error, match="; "):
        wrong()
    assert base.dump(bench.partition.state) == before


def test_a_completion_and_its_letters_are_recorded_together(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease()
    settled = bench.complete(granted.lease, then=[ONE, Letter(OTHER, b"other"), TWO])
    assert settled.done == 2
    bench.kill()
    assert (promised(bench), promised(bench, OTHER)) == ([b"one", b"two"], [b"other"])
    assert bench.counts == (0, 0, 0, 2, 0, 0)


def test_letters_of_a_turn_that_was_never_written_are_not_there(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease()
    bench.partition.run(Complete(granted.lease, then=[ONE]))
    assert promised(bench) == [b"one"]
    bench.kill()
    assert (promised(bench), bench.life(0)) == ([], Life.LEASED)
    bench.complete(granted.lease, then=[ONE])
    assert promised(bench) == [b"one"]


def test_some_items_of_a_lease_may_have_letters_of_their_own(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease()
    assert bench.complete(granted.lease, [1], then=[TWO]).done == 1
    assert bench.complete(granted.lease, [0], then=[ONE]).done == 1
    assert promised(bench) == [b"two", b"one"]


def test_each_letter_arrives_in_its_turn_and_leaves_nothing_behind(bench: Bench) -> None:
    bench.produce("a")
    bench.complete(bench.lease().lease, then=[ONE, TWO])
    assert bench.deliver(70) == 1
    assert promised(bench) == [b"two"]
    assert bench.deliver(71) == 1
    assert (bench.partition.state.outbox, bench.partition.state.moved, bench.counts.completed) == ({}, {}, 1)


def test_items_and_letters_for_one_destination_are_in_one_order(bench: Bench) -> None:
    bench.produce("a", "b")
    bench.complete(bench.lease(1).lease, then=[ONE])
    bench.send(1)
    line = bench.partition.state.outbox[ELSEWHERE]
    assert [(entry.runs, entry.body) for entry in line] == [([], b"one"), ([1, 2], b"")]
    assert line[1].sequence == line[0].sequence + 1
    bench.kill()
    assert [bench.deliver(), bench.deliver(70)] == [1, 1]
    assert bench.partition.explain(1).moved_to == (0xDEAD, 3, 70)


@pytest.mark.parametrize("which", [None, [0]])
def test_a_repeated_completion_promises_nothing_more(bench: Bench, which: list[int] | None) -> None:
    bench.produce("a")
    granted = bench.lease()
    bench.complete(granted.lease, which, then=[ONE])
    bench.restart()
    assert bench.complete(granted.lease, which, then=[ONE]).refused == []
    assert promised(bench) == [b"one"]


def test_a_repeated_request_has_the_same_answer_and_one_promise(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease()
    first = bench.complete(granted.lease, [0], request="r", then=[ONE])
    assert bench.complete(granted.lease, [0], request="r", then=[ONE]) == first
    bench.kill()
    assert bench.complete(granted.lease, [0], request="r", then=[ONE]) == first
    assert promised(bench) == [b"one"]


def test_with_one_stale_item_nothing_is_completed_and_nothing_promised(bench: Bench) -> None:
    bench.produce("a", "b", "c")
    granted = bench.lease(2)
    bench.retry(granted.lease, [1])
    for which in ([0, 1], [0, 2], [0, 99]):
        refused(bench, LeaseLost, partial(bench.complete, granted.lease, which, then=[ONE]))
    assert bench.complete(granted.lease, [0], then=[ONE]).done == 1


def test_an_item_before_its_turn_is_refused_whole(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a")
    granted = bench.lease(per_key=2)
    refused(bench, InvalidRequest, lambda: bench.complete(granted.lease, [1], then=[ONE]))
    assert bench.complete(granted.lease, [1]).early == [1]  # without letters each item has its own result


@pytest.mark.parametrize("which", [None, [0]])
@pytest.mark.parametrize("noticed", [False, True])
def test_a_lease_that_ended_promises_nothing(bench: Bench, which: list[int] | None, noticed: bool) -> None:
    bench.produce("a")
    granted = bench.lease(timeout=5)
    if noticed:
        bench.advance(5)
    else:
        bench.clock.advance(5_000_000)
    refused(bench, LeaseLost, lambda: bench.complete(granted.lease, which, then=[ONE]))
    assert promised(bench) == []


def test_a_letter_without_a_destination_is_refused(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease()
    refused(bench, InvalidRequest, lambda: bench.complete(granted.lease, then=[ONE, Letter(b"nowhere", b"two")]))
    assert given(granted) == [0]
    assert bench.complete(granted.lease).done == 1


@pytest.mark.parametrize("which", [None, [0]])
def test_too_many_bytes_on_their_way_are_refused(bench: Bench, which: list[int] | None) -> None:
    bench.produce("a", "b")
    bench.complete(bench.lease(1).lease, then=[ONE])
    granted = bench.lease()
    most = Letter(OTHER, bytes(MAX_OUTBOX_BYTES - 5))
    refused(bench, QueueBusy, lambda: bench.complete(granted.lease, which and given(granted), then=[most, TWO]))
    bench.deliver()
    assert bench.complete(granted.lease, then=[TWO]).done == 1
