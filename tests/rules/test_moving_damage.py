"""Damage and transfers, on real files: lost items never arrive and hold up nothing; all other items still arrive."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.logs import codec
from penstock.logs.log import Frame
from penstock.rules import base
from penstock.rules.item_states import ItemState
from penstock.rules.outbox import moved_to
from penstock.rules.reconciliation import reconcile
from penstock.rules.records import Delivered, FencesAdded, ParkedKeyReleased, Record, Sent
from penstock.words.errors import InvalidRequest
from tests.partition_under_test import ELSEWHERE, FilePartitionBackend, PartitionUnderTest
from tests.rules.test_damage import damage, three_frames


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[PartitionUnderTest]:
    partition = PartitionUnderTest(FilePartitionBackend(tmp_path, "fsync"))
    yield partition
    assert list(partition.counts) == partition.recount()
    _check_outbox(partition)
    before = base.dump(partition.wrapped.state)
    reconcile(partition.wrapped.state)
    reconciled = base.dump(partition.wrapped.state)
    reconcile(partition.wrapped.state)
    assert base.dump(partition.wrapped.state) == reconciled
    assert base.dump(base.load(before)) == before
    partition.backend.kill(partition.wrapped.log)


def _check_outbox(partition: PartitionUnderTest) -> None:
    """The moving items are exactly those of the outbox, each once."""
    state = partition.wrapped.state
    held = sorted(runs for line in state.outbox.values() for entry in line for runs in _pairs(entry.runs))
    moving = [offset for offset in range(state.next_offset) if partition.state_of(offset) is ItemState.MOVING]
    assert [offset for start, stop in held for offset in range(start, stop)] == moving


def _pairs(runs: list[int]) -> list[tuple[int, int]]:
    return list(zip(runs[::2], runs[1::2], strict=True))


def lose(partition: PartitionUnderTest, home: Path, kind: type[Record]) -> None:
    """Damage the only frame that has a record of a kind, and open again."""
    frames = [frame for frame in partition.wrapped.log.frames() if isinstance(frame, Frame)]
    [body] = [bytes(frame.body) for frame in frames if any(type(record) is kind for record in codec.decode_frame(frame))]
    damage(home, body)
    partition.kill()


def unconfirmed(partition: PartitionUnderTest) -> list[list[int]]:
    return [entry.runs for entry in partition.wrapped.state.outbox.get(ELSEWHERE, [])]


@pytest.mark.parametrize("key", [None, "k"])
def test_lost_items_are_taken_out_of_their_transfers(partition: PartitionUnderTest, tmp_path: Path, key: str | None) -> None:
    three_frames(partition, **({} if key is None else {"key": key}))
    partition.send(1, 2)
    partition.send(3)
    partition.send(4)
    damage(tmp_path, b"broken 2")
    partition.kill()
    assert unconfirmed(partition) == [[1, 2], [], [4, 5]]
    assert [partition.state_of(offset) for offset in range(6)] == [
        *(ItemState.READY, ItemState.MOVING, ItemState.COMPLETED, ItemState.COMPLETED, ItemState.MOVING, ItemState.READY)
    ]
    assert partition.why(2) == "lost: damage took its bytes"
    assert [partition.deliver(70), partition.deliver(), partition.deliver(71)] == [1, 1, 1]  # an empty transfer keeps its turn
    assert [moved_to(partition.wrapped.state, offset) for offset in (1, 2, 3, 4)] == [(0xDEAD, 3, 70), None, None, (0xDEAD, 3, 71)]
    assert partition.drain(10) == ["before 0", "after 5"]


def test_items_found_lost_when_they_are_read_are_taken_out_of_their_transfer(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    partition.send(1, 2, 4)
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()  # from a checkpoint: it does not read the frames before that
    assert unconfirmed(partition) == [[1, 3, 4, 5]]
    assert partition.wrapped.payloads([1, 3, 4, 5]) == [b"before 1", b"after 4"]
    assert (unconfirmed(partition), partition.counts.moving) == ([[1, 2, 4, 5]], 2)


@pytest.mark.parametrize("base", [None, 70, -1])
def test_a_lost_item_that_parked_its_key_and_was_sent_frees_the_key_unless_it_arrived(
    partition: PartitionUnderTest, tmp_path: Path, base: int | None
) -> None:
    """`base` is where the transfer arrived: nowhere, at offset 70, or at an unknown offset."""
    partition.configure(on_bury="park")
    partition.produce("broken", key="k")
    partition.produce("after", key="k")
    partition.bury(partition.lease().lease)
    partition.send(0)
    if base is not None:
        partition.deliver(base)
    damage(tmp_path, b"broken")
    partition.kill()
    assert partition.drain() == (["after"] if base is None else [])
    partition.release("k")
    assert partition.drain() == ([] if base is None else ["after"])


@pytest.mark.parametrize("buried", [False, True])
def test_sent_items_have_their_old_state_again_when_the_sent_record_is_lost(
    partition: PartitionUnderTest, tmp_path: Path, buried: bool
) -> None:
    partition.produce("a", "b")
    if buried:
        partition.bury(partition.lease(1).lease, reason="no")
    partition.send(0)
    [sent] = partition.wrapped.state.outbox[ELSEWHERE]
    lose(partition, tmp_path, Sent)
    assert (unconfirmed(partition), partition.state_of(0)) == ([], ItemState.BURIED if buried else ItemState.READY)
    assert partition.confirm(sent.sequence, 70) == 0
    partition.send(0)
    [again] = partition.wrapped.state.outbox[ELSEWHERE]
    assert again.sequence > sent.sequence  # the destination may have taken the first


def test_a_delivered_record_without_its_sent_record_changes_nothing(partition: PartitionUnderTest, tmp_path: Path) -> None:
    partition.produce("a", "b")
    partition.send(0)
    partition.deliver(70)
    lose(partition, tmp_path, Sent)
    assert (partition.state_of(0), moved_to(partition.wrapped.state, 0)) == (ItemState.READY, None)


def test_an_item_is_moving_again_when_its_delivered_record_is_lost(partition: PartitionUnderTest, tmp_path: Path) -> None:
    partition.produce("a", "b")
    partition.send(0)
    [sent] = partition.wrapped.state.outbox[ELSEWHERE]
    partition.deliver(70)
    lose(partition, tmp_path, Delivered)
    assert (partition.state_of(0), unconfirmed(partition)) == (ItemState.MOVING, [[0, 1]])
    assert partition.confirm(sent.sequence, 70) == 1  # it was sent again, and the destination had it already
    assert partition.drain() == ["b"]


def test_a_fence_whose_record_is_lost_can_be_added_again(partition: PartitionUnderTest, tmp_path: Path) -> None:
    partition.fence("a", version=2)
    partition.produce("a1", key="a")
    lose(partition, tmp_path, FencesAdded)
    assert partition.wrapped.state.fence_version == 0
    fence = partition.fence("a", version=2)
    partition.produce("a2", key="a")
    assert partition.drain() == ["a1"]
    partition.narrow(fence)
    assert partition.drain() == ["a2"]


def test_fences_survive_damage_to_items(partition: PartitionUnderTest, tmp_path: Path) -> None:
    fence = partition.fence("a", "b")
    partition.produce("broken", "broken too", keys=["a", "b"])
    partition.produce("a2", "c1", keys=["a", "c"])
    assert partition.lease_texts() == ["c1"]
    partition.clear(leased=True)
    damage(tmp_path, b"broken too")
    partition.kill()
    assert partition.lease_texts() == []
    partition.narrow(fence, "a")
    assert partition.lease_texts() == []
    partition.lift(fence, "a")
    assert partition.drain() == ["a2"]


@pytest.mark.parametrize("base", [70, -1], ids=["known", "unknown"])
def test_a_parked_key_is_parked_again_when_the_record_of_its_release_is_lost(
    partition: PartitionUnderTest, tmp_path: Path, base: int
) -> None:
    """Also if the offset at which the transferred item arrived is unknown."""
    partition.configure(on_bury="park")
    partition.produce("a1", "a2", key="a")
    partition.bury(partition.lease().lease)
    partition.send(0)
    partition.deliver(base)
    partition.release("a")
    lose(partition, tmp_path, ParkedKeyReleased)
    assert partition.lease_texts() == []
    partition.release("a")
    assert partition.drain() == ["a2"]


def test_sending_an_item_of_a_key_line_that_is_found_lost_is_refused(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition, key="k")
    held = partition.lease()
    assert partition.lease_texts() == []
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()
    with pytest.raises(InvalidRequest, match="completed cannot be sent"):
        partition.send(2, 4)
    partition.send(4)
    assert (partition.why(3), unconfirmed(partition)) == ("lost: damage took its bytes", [[4, 5]])
    partition.complete(held.lease)
    assert partition.drain() == ["before 1", "after 5"]
