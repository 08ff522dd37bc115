"""Staged parts: what was added is read back, and nothing that is not whole is ever taken for it."""

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.api.arrow import read_columns
from penstock.logs.api import Draft, FrameType
from penstock.logs.columns import Columns
from penstock.logs.drafting import Sheet
from penstock.logs.files.inbox import StagedReader, StagedWriter, frames
from penstock.logs.files.system import Mode, SystemFiles
from penstock.logs.frame import Encoder
from penstock.logs.store import StagedPart
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog, InvalidRequest, StorageFailed

INCARNATION = 0xABCDEF


def draft(*payloads: bytes) -> Draft:
    return Sheet.of(read_columns(pa.table({"payload": pa.array(payloads)}))).draft(Moment(1, 2))


def staged(path: Path, *drafts: Draft, partition: int = 0) -> str:
    writer = StagedWriter(SystemFiles(), str(path), INCARNATION)
    for one in drafts:
        writer.add(one, partition)
    assert writer.finish() == StagedPart(path.name, len(drafts), sum(one.count for one in drafts))
    return str(path)


def read(path: str) -> list[list[bytes]]:
    return [Columns(frame).batch().payloads for frame in frames(SystemFiles(), path, INCARNATION)]  # type: ignore[misc]


def test_frames_are_read_back_in_order(tmp_path: Path) -> None:
    path = staged(tmp_path / "part", draft(b"a", b"bc"), draft(b"d" * 10_000), draft(b""))
    assert read(path) == [[b"a", b"bc"], [b"d" * 10_000], [b""]]
    assert [frame.sequence for frame in frames(SystemFiles(), path, INCARNATION)] == [1, 2, 3]


def test_a_frame_is_found_where_it_was_said_to_begin(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    places = [writer.add(draft(b"x" * size), partition) for partition, size in ((3, 1), (4, 5_000), (5, 2))]
    writer.finish()
    reader = StagedReader(SystemFiles(), writer.path, INCARNATION)
    found = [reader.with_header(place, sequence) for sequence, place in enumerate(places, 1)]
    reader.close()
    assert [(header.partition, len(Columns(frame).batch().payloads[0])) for header, frame in found] == [(3, 1), (4, 5_000), (5, 2)]


def test_nothing_added_is_no_file(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    assert writer.finish() == StagedPart("part", 0, 0)
    assert [*tmp_path.iterdir()] == []


def test_what_was_begun_can_be_discarded(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    writer.discard()
    writer.add(draft(b"a"))
    writer.add(draft(b"b"))
    assert len([*tmp_path.iterdir()]) == 1
    writer.discard()
    writer.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_part_cut_at_any_byte_is_not_whole(tmp_path: Path) -> None:
    whole = Path(staged(tmp_path / "part", draft(b"a", b"b"), draft(b"c"))).read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(CorruptLog, match="is not whole"):
            read(str(cut))


def test_a_part_with_any_bit_flipped_is_not_whole(tmp_path: Path) -> None:
    whole = Path(staged(tmp_path / "part", draft(b"a", b"b"), draft(b"c"))).read_bytes()
    flipped = tmp_path / "flipped"
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        with pytest.raises(CorruptLog):
            read(str(flipped))


def test_a_part_with_something_behind_it_is_not_whole(tmp_path: Path) -> None:
    path = Path(staged(tmp_path / "part", draft(b"a")))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CorruptLog, match="bytes follow its last frame"):
        read(str(path))


def test_a_part_of_another_queue_is_refused(tmp_path: Path) -> None:
    path = staged(tmp_path / "part", draft(b"a"))
    with pytest.raises(CorruptLog, match="is not the one that should be there"):
        list(frames(SystemFiles(), path, INCARNATION + 1))


def test_a_frame_of_another_type_is_refused(tmp_path: Path) -> None:
    vector: list[Any] = []
    Encoder(INCARNATION, 0).encode(draft(b"a")._replace(type=FrameType.STATE), 1, 0, vector)
    (tmp_path / "part").write_bytes(b"".join(vector))
    with pytest.raises(CorruptLog, match="is not the one that should be there"):
        read(str(tmp_path / "part"))


@pytest.mark.parametrize("wrong", [{"type": FrameType.STATE}, {"base": 5}])
def test_only_items_at_no_place_yet_are_taken(tmp_path: Path, wrong: dict[str, Any]) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    with pytest.raises(InvalidRequest, match="a part takes DATA frames of base 0"):
        writer.add(draft(b"a")._replace(**wrong))


def test_a_missing_part_and_a_missing_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"reading .*part failed"):
        read(str(tmp_path / "part"))
    writer = StagedWriter(SystemFiles(), str(tmp_path / "gone" / "part"), INCARNATION)
    writer.add(draft(b"a"))
    with pytest.raises(StorageFailed, match=r"writing .*part failed"):
        writer.finish()


class Syncs(SystemFiles):
    """Notes what is synced; the device of a file may be full."""

    def __init__(self, failing: bool = False) -> None:
        self.synced: list[str] = []
        self._failing = failing

    def sync(self, handle: int) -> None:
        self.synced.append("file")
        if self._failing:
            raise OSError(errno.ENOSPC, "full")
        super().sync(handle)

    def sync_directory(self, path: str) -> None:
        self.synced.append(path)
        super().sync_directory(path)


def test_a_finished_part_is_synced_and_so_is_its_name(tmp_path: Path) -> None:
    files = Syncs()
    writer = StagedWriter(files, str(tmp_path / "part"), INCARNATION)
    writer.add(draft(b"a"))
    writer.finish()
    assert files.synced == ["file", str(tmp_path)]


def test_a_sync_that_fails_is_no_finish(tmp_path: Path) -> None:
    writer = StagedWriter(Syncs(failing=True), str(tmp_path / "part"), INCARNATION)
    writer.add(draft(b"a"))
    with pytest.raises(StorageFailed, match="the disk is full"):
        writer.finish()
    writer.discard()
    assert [*tmp_path.iterdir()] == []


class Full(SystemFiles):
    """A disk that takes a few bytes of whatever is written."""

    def write(self, handle: int, parts: Any) -> int:
        os.write(handle, b"some")
        raise OSError(errno.ENOSPC, "full")


def test_a_part_that_failed_in_its_first_frame_is_discarded(tmp_path: Path) -> None:
    writer = StagedWriter(Full(), str(tmp_path / "part"), INCARNATION)
    writer.add(draft(b"a"))
    with pytest.raises(StorageFailed, match="the disk is full"):
        writer.finish()
    assert len([*tmp_path.iterdir()]) == 1
    writer.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_others_remove_is_made_again(tmp_path: Path) -> None:
    folder, made = tmp_path / "write", 0

    class Removing(SystemFiles):
        """Somebody else removes the folder whenever it is empty, but for the fourth time."""

        def open(self, path: str, mode: Mode) -> int:
            if folder.exists() and made < 4:
                folder.rmdir()
            return super().open(path, mode)

    def make() -> None:
        nonlocal made
        made += 1
        folder.mkdir()

    writer = StagedWriter(Removing(), str(folder / "part"), INCARNATION, make)
    writer.begin()
    assert made == 4 and (folder / "part").stat().st_size == 0
    writer.add(draft(b"a"))
    writer.finish()
    assert read(writer.path) == [[b"a"]]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "write" / "part"), INCARNATION, lambda: None)
    with pytest.raises(StorageFailed, match=r"writing .*part failed: No such file"):
        writer.begin()
