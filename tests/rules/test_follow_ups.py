"""Follow-ups: they are in the outbox if and only if the completion is recorded, and exactly once."""

from collections.abc import Callable
from functools import partial

import pytest

from penstock.rules import base
from penstock.rules.commands import CompleteLeased, FollowUpBatch
from penstock.rules.item_states import ItemState
from penstock.rules.outbox import MAX_OUTBOX_BYTES, pack_destination
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueBusy
from tests.partition_under_test import ELSEWHERE, PartitionUnderTest, granted_offsets

OTHER = pack_destination(0xBEEF, 0)
ONE, TWO = FollowUpBatch(ELSEWHERE, b"one"), FollowUpBatch(ELSEWHERE, b"two")


def waiting_bodies(partition: PartitionUnderTest, to: bytes = ELSEWHERE) -> list[bytes]:
    """The bodies of the follow-ups in the outbox, in order."""
    line = partition.wrapped.state.outbox.get(to, [])
    assert sorted({entry.sequence for entry in line}) == [entry.sequence for entry in line]
    return [entry.body for entry in line]


def refused(partition: PartitionUnderTest, error: type[PenstockError], wrong: Callable[[], object], match: str = "; ") -> None:
    """Check that a call raises this error and changes nothing."""
    before = base.dump(partition.wrapped.state)
    with pytest.raises(error, match=match):
        wrong()
    assert base.dump(partition.wrapped.state) == before


def test_a_completion_and_its_follow_ups_are_recorded_together(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease()
    settled = partition.complete(granted.lease, then=[ONE, FollowUpBatch(OTHER, b"other"), TWO])
    assert settled.done == 2
    partition.kill()
    assert (waiting_bodies(partition), waiting_bodies(partition, OTHER)) == ([b"one", b"two"], [b"other"])
    assert partition.counts == (0, 0, 0, 2, 0, 0, 0)


def test_follow_ups_of_a_turn_that_was_never_written_do_not_exist(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease()
    partition.wrapped.run(CompleteLeased(granted.lease, follow_ups=[ONE]))
    assert waiting_bodies(partition) == [b"one"]
    partition.kill()
    assert (waiting_bodies(partition), partition.state_of(0)) == ([], ItemState.LEASED)
    partition.complete(granted.lease, then=[ONE])
    assert waiting_bodies(partition) == [b"one"]


def test_a_partial_completion_may_have_follow_ups(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease()
    assert partition.complete(granted.lease, [1], then=[TWO]).done == 1
    assert partition.complete(granted.lease, [0], then=[ONE]).done == 1
    assert waiting_bodies(partition) == [b"two", b"one"]


def test_follow_ups_are_confirmed_in_order_and_then_removed(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.complete(partition.lease().lease, then=[ONE, TWO])
    assert partition.deliver(70) == 1
    assert waiting_bodies(partition) == [b"two"]
    assert partition.deliver(71) == 1
    assert (partition.wrapped.state.outbox, partition.wrapped.state.moved, partition.counts.completed) == ({}, {}, 1)


def test_items_and_follow_ups_for_one_destination_have_one_order(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.complete(partition.lease(1).lease, then=[ONE])
    partition.send(1)
    line = partition.wrapped.state.outbox[ELSEWHERE]
    assert [(entry.runs, entry.body) for entry in line] == [([], b"one"), ([1, 2], b"")]
    assert line[1].sequence == line[0].sequence + 1
    partition.kill()
    assert [partition.deliver(), partition.deliver(70)] == [1, 1]
    assert partition.wrapped.explain(1).moved_to == (0xDEAD, 3, 70)


@pytest.mark.parametrize("which", [None, [0]])
def test_follow_ups_of_a_completed_item_are_refused(partition: PartitionUnderTest, which: list[int] | None) -> None:
    partition.produce("a")
    granted = partition.lease()
    partition.complete(granted.lease, which)
    partition.restart()
    assert partition.complete(granted.lease, which).refused == []
    late = partial(partition.complete, granted.lease, which, then=[ONE])
    refused(partition, InvalidRequest, late, match="this call made no follow-ups; give them with the call that completes the item")


def test_follow_ups_of_an_item_that_was_completed_with_others_are_refused(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c")
    granted = partition.lease(3)
    partition.complete(granted.lease, [0])
    for which in ([0], [0, 1]):
        refused(partition, InvalidRequest, partial(partition.complete, granted.lease, which, then=[ONE]))
    assert partition.complete(granted.lease, [1], then=[ONE]).done == 1
    partition.advance(3600)  # the lease has ended, and some of its items were completed
    refused(partition, InvalidRequest, partial(partition.complete, granted.lease, [0], then=[ONE]))
    refused(partition, LeaseLost, partial(partition.complete, granted.lease, [0, 2], then=[ONE]))
    assert waiting_bodies(partition) == [b"one"]


def test_a_repeated_request_has_the_same_answer_and_makes_no_more_follow_ups(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease()
    first = partition.complete(granted.lease, [0], request="r", then=[ONE])
    assert partition.complete(granted.lease, [0], request="r", then=[ONE]) == first
    partition.kill()
    assert partition.complete(granted.lease, [0], request="r", then=[ONE]) == first
    assert waiting_bodies(partition) == [b"one"]


def test_with_one_refused_item_nothing_is_completed_and_no_follow_up_made(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c")
    granted = partition.lease(2)
    partition.retry(granted.lease, [1])
    for which in ([0, 1], [0, 2], [0, 99]):
        refused(partition, LeaseLost, partial(partition.complete, granted.lease, which, then=[ONE]))
    assert partition.complete(granted.lease, [0], then=[ONE]).done == 1


def test_an_early_item_with_follow_ups_is_refused(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a")
    granted = partition.lease(per_key=2)
    refused(partition, InvalidRequest, lambda: partition.complete(granted.lease, [1], then=[ONE]))
    assert partition.complete(granted.lease, [1]).early == [1]  # without follow-ups each item has its own result


@pytest.mark.parametrize("which", [None, [0]])
@pytest.mark.parametrize("noticed", [False, True])
def test_an_ended_lease_makes_no_follow_ups(partition: PartitionUnderTest, which: list[int] | None, noticed: bool) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=5)
    if noticed:
        partition.advance(5)
    else:
        partition.clock.advance(5_000_000)
    refused(partition, LeaseLost, lambda: partition.complete(granted.lease, which, then=[ONE]))
    assert waiting_bodies(partition) == []


def test_a_follow_up_without_a_destination_is_refused(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease()
    refused(partition, InvalidRequest, lambda: partition.complete(granted.lease, then=[ONE, FollowUpBatch(b"nowhere", b"two")]))
    assert granted_offsets(granted) == [0]
    assert partition.complete(granted.lease).done == 1


@pytest.mark.parametrize("which", [None, [0]])
def test_too_many_bytes_of_follow_ups_are_refused(partition: PartitionUnderTest, which: list[int] | None) -> None:
    partition.produce("a", "b")
    partition.complete(partition.lease(1).lease, then=[ONE])
    granted = partition.lease()
    most = FollowUpBatch(OTHER, bytes(MAX_OUTBOX_BYTES - 5))
    refused(partition, QueueBusy, lambda: partition.complete(granted.lease, which and granted_offsets(granted), then=[most, TWO]))
    partition.deliver()
    assert partition.complete(granted.lease, then=[TWO]).done == 1
