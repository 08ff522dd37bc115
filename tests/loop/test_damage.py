"""A damaged partition on real files: exactly the damaged items are lost, however they are read."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.repair import repair
from penstock.logs.files.verify import verify
from penstock.logs.log import Log
from penstock.loop import item_cache
from penstock.loop.partition import Partition
from penstock.loop.partition_reader import PartitionReader, ReadablePartition
from penstock.loop.recovery import find_missing_front
from penstock.rules.explain import LOST
from penstock.rules.item_states import ItemState
from penstock.rules.runs import offsets
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import SystemClock
from penstock.words.limits import Retention
from tests.partition_under_test import INCARNATION, PARTITION, FilePartitionBackend, PartitionUnderTest

FRAMES, IN_A_FRAME = 20, 50
DAMAGED = set(range(5 * IN_A_FRAME, 6 * IN_A_FRAME))
WHOLE = [offset for offset in range(FRAMES * IN_A_FRAME) if offset not in DAMAGED]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a log, inside the root that repair needs."""
    path = tmp_path / "root" / "logs" / f"{INCARNATION:016x}" / f"{PARTITION:05d}"
    path.mkdir(parents=True)
    return path


class UncompressedFileBackend(FilePartitionBackend):
    """A log without compression in the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "fsync")
        self._path = folder

    def open(self) -> Log:
        return FileLog(SystemFiles(), str(self._path), INCARNATION, PARTITION, compression=False)  # so that items can be found in it


@pytest.fixture
def partition(folder: Path) -> Iterator[PartitionUnderTest]:
    """Twenty frames of fifty items, of which the sixth is damaged. Opened from a checkpoint, so the damage is not found
    yet.
    """
    partition = filled(folder, key=None)
    flip(folder, 5)
    partition.open()
    yield partition
    partition.backend.kill(partition.wrapped.log)


def filled(folder: Path, key: str | None) -> PartitionUnderTest:
    partition = PartitionUnderTest(UncompressedFileBackend(folder))
    for number in range(FRAMES):
        partition.produce(*(payload(IN_A_FRAME * number + index) for index in range(IN_A_FRAME)), **({} if key is None else {"key": key}))
    partition.wrapped.close()
    return partition


def payload(offset: int) -> bytes:
    return b"<%06d>" % offset + bytes(offset % 251 for _ in range(30))


def flip(folder: Path, frame: int) -> None:
    """Flip a bit in the first item of a frame."""
    (path,) = [path for path in folder.glob("*.log") if b"<%06d>" % (IN_A_FRAME * frame) in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(b"<%06d>" % (IN_A_FRAME * frame))] ^= 1
    path.write_bytes(data)


def everything(partition: ReadablePartition, limit: int) -> list[int]:
    """The offsets that a cursor reads, page by page; it passes over damaged items only."""
    at, found = 0, list[int]()
    while True:
        page, stop = partition.read_retained(at, limit)
        if not page:
            assert stop == FRAMES * IN_A_FRAME
            return found
        new = [offset for part in page for offset in range(part.start, part.start + len(part.batch))]
        assert set(range(at, stop)) <= {*new, *DAMAGED}
        assert all(part.batch.payloads[0] == payload(part.start) for part in page)
        at, found = stop, found + new


def lost(partition: ReadablePartition) -> set[int]:
    return set(offsets(partition.state.lost.runs))


@pytest.mark.parametrize("limit", [1, 7, 50, 64, 100, 1_000, 10_000])
def test_a_cursor_passes_the_damaged_items_and_no_others(partition: PartitionUnderTest, limit: int) -> None:
    assert everything(partition.wrapped, limit) == WHOLE
    assert lost(partition.wrapped) == DAMAGED


@pytest.mark.parametrize("limit", [1, 50, 1_000])
def test_a_reader_passes_the_damaged_items_and_no_others(partition: PartitionUnderTest, folder: Path, limit: int) -> None:
    reader = PartitionReader(PublishedLog(SystemFiles(), str(folder), INCARNATION, PARTITION), SystemClock())
    assert everything(reader, limit) == WHOLE
    assert reader.explain(min(DAMAGED)).why == LOST
    assert lost(reader) == set(), "the state is its owner's to change"
    reader.close()


@pytest.mark.parametrize("want", [1, 10, 60, 1_000])
@pytest.mark.parametrize("key", [None, "k"])
def test_leases_give_every_item_that_is_not_damaged(folder: Path, want: int, key: str | None) -> None:
    partition = filled(folder, key)
    flip(folder, 5)
    partition.open()
    found: list[int] = []
    while (granted := partition.lease(want, per_key=want)).lease:
        there = [part.start + index for part in partition.wrapped.items(granted.runs) for index in range(len(part.batch))]
        found += there
        if there:
            partition.complete(granted.lease)
    assert found == WHOLE
    assert lost(partition.wrapped) == DAMAGED
    partition.backend.kill(partition.wrapped.log)


def test_a_read_in_small_fetches_continues_after_gaps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fetches little at a time still reaches the end of its range."""
    partition = filled(folder, None)
    flip(folder, 5)
    flip(folder, 7)
    monkeypatch.setattr(item_cache, "FETCH_BYTES", 100)
    monkeypatch.setattr(item_cache, "READ_AHEAD_ITEMS", 3)
    partition.open()
    found = [part.start + index for part in partition.wrapped.items([200, 700]) for index in range(len(part.batch))]
    assert found == [*range(200, 250), *range(300, 350), *range(400, 700)]
    assert lost(partition.wrapped) == DAMAGED | set(range(350, 400))
    partition.backend.kill(partition.wrapped.log)


def test_damage_is_recorded_durably_and_logged_once(partition: PartitionUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    partition.wrapped.items([260, 261])
    partition.wrapped.items([250, 300])
    everything(partition.wrapped, 1_000)
    assert lost(partition.wrapped) == DAMAGED, "all that the gap took, not only what was asked for"
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"items {PARTITION}-250 to {PARTITION}-299 are lost" in told and "run verify, then repair" in told
    assert [(gap.start, gap.stop) for gap in partition.wrapped.gaps] == [(250, 300)]
    partition.restart()
    assert lost(partition.wrapped) == DAMAGED
    everything(partition.wrapped, 1_000)
    assert len(caplog.records) == 1


def test_damage_is_recorded_with_the_next_commit_and_not_before(partition: PartitionUnderTest) -> None:
    partition.wrapped.commit()
    partition.wrapped.items([260, 261])
    assert partition.wrapped.log.unsynced and partition.wrapped.owes_sync
    partition.wrapped.commit()
    assert not partition.wrapped.log.unsynced


def test_explaining_a_damaged_item_marks_it_as_lost(partition: PartitionUnderTest) -> None:
    assert partition.wrapped.explain(270).why == LOST
    assert lost(partition.wrapped) == DAMAGED
    assert partition.state_of(270) is ItemState.COMPLETED
    assert "ready" in partition.wrapped.explain(300).why


def test_redriving_chosen_items_leaves_out_lost_ones(folder: Path) -> None:
    partition = filled(folder, "k")
    partition.open()
    partition.bury(partition.lease(10_000, per_key=10_000).lease)
    partition.wrapped.close()
    flip(folder, 5)
    partition.open()
    assert partition.redrive(240, 260, 310) == 2
    assert (partition.state_of(240), partition.state_of(260), partition.state_of(310)) == (
        ItemState.READY,
        ItemState.COMPLETED,
        ItemState.READY,
    )
    assert lost(partition.wrapped) == DAMAGED
    partition.backend.kill(partition.wrapped.log)


# -- missing segments ----------------------------------------------------------------------------------


def in_segments(folder: Path) -> list[Path]:
    """Four segments of five frames, and a fifth."""
    partition = PartitionUnderTest(UncompressedFileBackend(folder))
    for number in range(FRAMES):
        partition.produce(*(payload(IN_A_FRAME * number + index) for index in range(IN_A_FRAME)))
        if number % 5 == 4:
            partition.wrapped._rotate()
    partition.complete(partition.lease(10).lease)
    partition.wrapped.close()
    return sorted(folder.glob("*.log"))


def opened(folder: Path) -> Partition:
    return Partition(FileLog(SystemFiles(), str(folder), INCARNATION, PARTITION), MicrosecondClock())


def served(partition: Partition) -> list[int]:
    found: list[int] = []
    at = 0
    while True:
        page, at = partition.read_retained(at, 170)
        if not page:
            return found
        found += [offset for part in page for offset in range(part.start, part.start + len(part.batch))]


PER_SEGMENT = 5 * IN_A_FRAME


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("mended", [False, True])
def test_a_missing_segment_loses_only_its_own_items(folder: Path, number: int, mended: bool) -> None:
    paths = in_segments(folder)
    gone = set(range(PER_SEGMENT * number, PER_SEGMENT * (number + 1)))
    where = (SystemFiles(), str(folder), INCARNATION, PARTITION)
    assert verify(*where, find_missing_front).sound
    paths[number].unlink()
    report = verify(*where, find_missing_front)
    assert [(gap.start, gap.stop) for gap in report.damage] == [(min(gone), max(gone) + 1)]
    if mended:
        done = repair(*where, lost_front=find_missing_front)
        assert done.changed and [(gap.start, gap.stop) for gap in done.gaps] == [(min(gone), max(gone) + 1)]
        assert verify(*where, find_missing_front).sound and not repair(*where, lost_front=find_missing_front).changed
    partition = opened(folder)
    assert served(partition) == [offset for offset in range(FRAMES * IN_A_FRAME) if offset not in gone]
    assert lost(partition) == gone
    partition.close()


def test_a_missing_oldest_segment_is_noticed_at_opening(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    in_segments(folder)[0].unlink()
    seen = PartitionReader(PublishedLog(SystemFiles(), str(folder), INCARNATION, PARTITION), SystemClock())
    assert lost(seen) == set(range(PER_SEGMENT))
    seen.close()
    partition = opened(folder)
    assert lost(partition) == set(range(PER_SEGMENT))
    assert [(gap.start, gap.stop, gap.why) for gap in partition.gaps] == [(0, PER_SEGMENT, "the segment that held it is missing")]
    partition.close()
    again = opened(folder)
    assert again.gaps == [] and lost(again) == set(range(PER_SEGMENT))
    again.close()
    assert len(caplog.records) == 1
    report = verify(SystemFiles(), str(folder), INCARNATION, PARTITION, find_missing_front)
    assert report.sound and [(gap.start, gap.stop, gap.repaired) for gap in report.gaps] == [(0, PER_SEGMENT, True)]


def test_segments_that_retention_deleted_are_not_reported_as_missing(folder: Path) -> None:
    partition = PartitionUnderTest(UncompressedFileBackend(folder))
    partition.configure(retention=Retention(max_age=0, max_bytes=1, max_segments=1))
    for number in range(8):
        partition.produce(*(payload(10 * number + index) for index in range(10)))
        partition.complete(partition.lease(10).lease)
        partition.wrapped.compact()
    assert partition.wrapped.log.first_offset > 0
    partition.wrapped.close()
    assert verify(SystemFiles(), str(folder), INCARNATION, PARTITION, find_missing_front).gaps == []
    partition.open()
    assert partition.wrapped.gaps == [] and lost(partition.wrapped) == set()
    partition.backend.kill(partition.wrapped.log)


@pytest.mark.parametrize("number", [0, 2])
def test_items_of_a_segment_deleted_while_open_are_lost(folder: Path, number: int) -> None:
    paths = in_segments(folder)
    partition = opened(folder)
    paths[number].unlink()
    gone = set(range(PER_SEGMENT * number, PER_SEGMENT * (number + 1)))
    assert served(partition) == [offset for offset in range(FRAMES * IN_A_FRAME) if offset not in gone]
    assert lost(partition) == gone
    partition.close()
