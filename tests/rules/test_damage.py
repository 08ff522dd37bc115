"""Damage, on real files: lost items are never served and hold up nothing; all other items are served."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.logs.log import Frame, FrameType
from penstock.rules.commands import LiftFence, NarrowFence
from penstock.rules.item_states import ItemState
from tests.full_history import write_every_record
from tests.partition_under_test import FilePartitionBackend, PartitionUnderTest, granted_offsets


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[PartitionUnderTest]:
    # With fsync: broken bytes that were never synced count as torn, not as damaged.
    partition = PartitionUnderTest(FilePartitionBackend(tmp_path, "fsync"))
    yield partition
    partition.backend.kill(partition.wrapped.log)


def damage(home: Path, content: bytes) -> None:
    """Flip one bit of this content on disk, so that its frame cannot be read."""
    [segment] = (home / "log").glob("*.log")
    data = bytearray(segment.read_bytes())
    assert data.count(content) == 1
    data[data.index(content)] ^= 1
    segment.write_bytes(data)


def three_frames(partition: PartitionUnderTest, **options: object) -> None:
    """Offsets 0 and 1, 2 and 3, 4 and 5: a frame each."""
    for pair in (("before 0", "before 1"), ("broken 2", "broken 3"), ("after 4", "after 5")):
        partition.produce(*pair, **options)


def test_a_lost_frame_found_at_opening_is_a_gap_and_the_rest_is_served(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    damage(tmp_path, b"broken 2")
    partition.kill()
    assert [(gap.start, gap.stop) for gap in partition.wrapped.gaps] == [(2, 4)]
    assert partition.drain(10) == ["before 0", "before 1", "after 4", "after 5"]
    assert [partition.state_of(2), partition.why(2)] == [ItemState.COMPLETED, "lost: damage took its bytes"]


def test_lost_offsets_are_not_given_again(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    damage(tmp_path, b"broken 2")
    partition.kill()
    assert partition.produce("new") == [6]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_lost_frame_found_at_a_lease_is_not_served_and_the_rest_is(
    partition: PartitionUnderTest, tmp_path: Path, key: str | None
) -> None:
    three_frames(partition, **({} if key is None else {"key": key}))
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()  # from a checkpoint: it does not read the frames before that
    assert partition.drain(10) == ["before 0", "before 1", "after 4", "after 5"]
    assert partition.counts == (0, 0, 0, 6, 0, 0, 0)


def test_a_lost_item_leaves_the_lease_that_holds_it(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()
    granted = partition.lease()
    assert partition.texts(granted) == ["before 0", "before 1", "after 4", "after 5"]
    settled = partition.complete(granted.lease, granted_offsets(granted))
    assert (settled.done, settled.refused) == (4, [2, 3])


def test_a_lost_item_frees_its_key(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition, key="k")
    partition.complete(partition.lease(2, per_key=2).lease)
    held = partition.lease(1)
    assert granted_offsets(held) == [2]
    assert partition.lease_texts() == []
    damage(tmp_path, b"broken 2")
    partition.kill()
    assert partition.drain() == ["after 4", "after 5"]


def test_lost_items_are_completed_whatever_their_state_was(partition: PartitionUnderTest, tmp_path: Path) -> None:
    partition.configure(on_bury="park")
    partition.produce("before", "before too", "before as well", keys=["p", "b", "l"])
    partition.produce("broken 0", "broken 1", "broken 2", "broken 3", keys=["p", "b", "l", "b"], ttl=1_000)
    partition.produce("after 0", "after 1", "after 2", keys=["p", "b", "l"])
    partition.complete(partition.lease(3).lease)
    held = partition.lease(3)
    assert granted_offsets(held) == [3, 4, 5]
    partition.bury(held.lease, [3])
    partition.retry(held.lease, [4], delay=100)
    assert partition.lease_texts() == []
    damage(tmp_path, b"broken 0")
    partition.kill()
    assert sorted(partition.drain()) == ["after 0", "after 1", "after 2"]
    partition.advance(10_000)
    assert partition.counts == (0, 0, 0, 10, 0, 0, 0)


def test_items_of_a_key_line_found_lost_when_their_ttl_ends_are_not_buried(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition, key="k", ttl=100)
    held = partition.lease(timeout=1_000)
    assert partition.lease_texts() == []
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()
    partition.advance(100)
    buried, lost = ItemState.BURIED, ItemState.COMPLETED
    assert [partition.state_of(offset) for offset in range(6)] == [ItemState.LEASED, buried, lost, lost, buried, buried]
    partition.complete(held.lease)
    assert not partition.wrapped.state.keys.by_key


def test_items_of_a_key_line_found_lost_when_their_attempts_are_exhausted_are_not_buried(
    partition: PartitionUnderTest, tmp_path: Path
) -> None:
    three_frames(partition, key="k")
    partition.complete(partition.lease(2, per_key=2).lease)
    partition.retry(partition.lease().lease)
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()
    assert partition.configure(max_attempts=1) == 0
    assert (partition.counts.buried, partition.drain()) == (0, ["after 4", "after 5"])


def test_lost_items_are_not_sought(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    partition.drain(10)
    damage(tmp_path, b"broken 2")
    partition.kill()
    assert partition.seek(0) == 4


def test_a_lost_item_cannot_be_sought_or_redriven(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    granted = partition.lease()
    partition.bury(granted.lease, [2])
    partition.complete(granted.lease)
    partition.wrapped.close()
    damage(tmp_path, b"broken 2")
    partition.open()
    assert partition.redrive() == 0
    partition.seek(0)
    assert partition.drain(10) == ["before 0", "before 1", "after 4", "after 5"]


def test_a_lost_item_stays_lost_over_restarts(partition: PartitionUnderTest, tmp_path: Path) -> None:
    three_frames(partition)
    damage(tmp_path, b"broken 2")
    partition.kill()
    partition.restart()
    partition.kill()
    assert partition.drain(10) == ["before 0", "before 1", "after 4", "after 5"]
    assert partition.why(3) == "lost: damage took its bytes"


def test_after_the_loss_of_any_frame_the_state_is_consistent(tmp_path: Path) -> None:
    whole = PartitionUnderTest(FilePartitionBackend(tmp_path, "fsync"))
    write_every_record(whole)
    frames = [frame for frame in whole.wrapped.log.frames() if isinstance(frame, Frame)]
    whole.backend.kill(whole.wrapped.log)
    for lost in frames[:-1]:
        copy = tmp_path / str(lost.sequence)
        shutil.copytree(tmp_path / "log", copy / "log")
        (copy / "log" / "checkpoint").unlink(missing_ok=True)
        damage(copy, bytes(lost.body))
        survivor = PartitionUnderTest(FilePartitionBackend(copy, "fsync"))
        (gap,) = survivor.wrapped.gaps
        assert (gap.start, gap.stop) == (lost.base_offset, lost.base_offset + (lost.count if lost.type is FrameType.DATA else 0))
        _work_off(survivor)
        survivor.backend.kill(survivor.wrapped.log)


def _work_off(partition: PartitionUnderTest) -> None:
    """Complete everything; the state must be consistent after every step."""
    assert list(partition.counts) == partition.recount()
    partition.pause(lease=False)
    partition.advance(20_000)
    partition.redrive()
    partition.clear(buried=True)  # nothing is buried: it frees the keys parked by what left
    _deliver_all(partition)
    _lower_all(partition)
    partition.drain(10)
    partition.advance(20_000)
    assert list(partition.counts) == partition.recount()
    assert (partition.counts[:3], partition.counts.moving) == ((0, 0, 0), 0)


def _deliver_all(partition: PartitionUnderTest) -> None:
    outbox = partition.wrapped.state.outbox
    for to in list(outbox):
        while to in outbox:
            assert partition.deliver(70, to=to) == 1


def _lower_all(partition: PartitionUnderTest) -> None:
    for fence in list(partition.wrapped.state.keys.fences):
        partition.wrapped.run(NarrowFence(fence.number, []) if fence.slots is not None else LiftFence(fence.number, sorted(fence.keys)))
    assert not partition.wrapped.state.keys.fences
