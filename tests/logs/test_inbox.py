"""The inbox in files: every entry is whole, even after a crash.

Staged parts: frames are read back as they were added, and a damaged part is never accepted.
"""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.api.arrow import read_columns
from penstock.logs.arrow_batch import ArrowBatch
from penstock.logs.columns import FrameColumns
from penstock.logs.files.filesystem import Mode, SystemFiles
from penstock.logs.files.inbox import MANIFEST, FileInbox, StagedReader, StagedWriter, published_write_path, read_part
from penstock.logs.frame import FrameEncoder
from penstock.logs.log import Draft, FrameType
from penstock.logs.store import Inbox, InboxEntry, StagedPart, WriteManifest, write_name
from penstock.testing import SimulatedFiles
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog, InvalidRequest, OutcomeUnknown, StorageFailed
from tests.broker.broker_under_test import batch_of
from tests.broker.other_process import ROOT, OtherProcess, cut_at_each_call
from tests.broker.storages import FullDiskFiles

QUEUE, OTHER = 0x0A, 0x0B
KILLS_AND_POWER_CUTS = (False, True, True, True)


@pytest.fixture(params=["simulated", "real"])
def other_process(request: pytest.FixtureRequest, tmp_path: Path) -> OtherProcess:
    """A process that does not own the broker, on each kind of disk."""
    if request.param == "real":
        return OtherProcess(SystemFiles(), str(tmp_path / "data"))
    return OtherProcess(SimulatedFiles())


def texts(inbox: Inbox, entry: InboxEntry) -> list[str]:
    """The payloads of a published write, read as its owner reads them."""
    found = []
    for part in inbox.manifest(entry).parts:
        for frame in inbox.frames(entry, part):
            found += [payload.decode() for payload in FrameColumns(frame).batch().payloads]
    return found


def only(inbox: Inbox) -> InboxEntry:
    (found,) = inbox.waiting()
    return found


# -- publishing ----------------------------------------------------------------------------------------


def test_a_published_write_waits_for_the_owner(other_process: OtherProcess) -> None:
    assert not other_process.inbox.is_pending(QUEUE, "s", 1)
    assert other_process.publish(QUEUE, batch_of("a", "b"), batch_of("c"), parts=2)
    entry = only(other_process.inbox)
    assert entry.incarnation == QUEUE
    assert texts(other_process.inbox, entry) == ["a", "b", "c"]
    assert [part.items for part in other_process.inbox.manifest(entry).parts] == [2, 1]
    assert other_process.inbox.is_pending(QUEUE, "s", 1)
    assert not other_process.inbox.is_pending(QUEUE, "s", 2) and not other_process.inbox.is_pending(OTHER, "s", 1)
    other_process.inbox.remove(entry)
    assert not other_process.inbox.is_pending(QUEUE, "s", 1) and other_process.inbox_files() == []


def test_a_staged_write_is_not_waiting(other_process: OtherProcess) -> None:
    other_process.stage(QUEUE, [[batch_of("a")]])
    assert other_process.inbox.waiting() == []


def test_a_source_and_number_is_published_once(other_process: OtherProcess) -> None:
    assert other_process.publish(QUEUE, batch_of("first"))
    assert not other_process.publish(QUEUE, batch_of("second"))
    assert texts(other_process.inbox, only(other_process.inbox)) == ["first"]
    assert other_process.inbox_files() == [only(other_process.inbox).label]
    assert other_process.publish(QUEUE, batch_of("other number"), number=2)
    assert other_process.publish(QUEUE, batch_of("other source"), source="t")
    assert other_process.publish(OTHER, batch_of("other queue"))
    assert len(other_process.inbox.waiting()) == 4


def test_a_write_may_be_begun_twice_and_abandoned_twice(other_process: OtherProcess) -> None:
    write, _ = other_process.stage(QUEUE, [[batch_of("a")]])
    other_process.inbox.begin_write(write)
    other_process.inbox.begin_write(write)
    other_process.inbox.abandon(write)
    other_process.inbox.abandon(write)
    assert other_process.inbox_files() == []


def test_a_write_without_items_is_published(other_process: OtherProcess) -> None:
    assert other_process.publish(QUEUE, parts=1)
    assert other_process.inbox.manifest(only(other_process.inbox)).parts == [StagedPart("part-0.frames", 0, 0)]


@pytest.mark.parametrize(
    "wrong", [WriteManifest([], "s", 0), WriteManifest([], "s", -1), WriteManifest([], "", 1), WriteManifest([], "s", 1 << 63)]
)
def test_an_invalid_manifest_is_not_published(other_process: OtherProcess, wrong: WriteManifest) -> None:
    with pytest.raises(InvalidRequest, match="a number from 1 on"):
        other_process.inbox.publish(write_name(1), QUEUE, wrong)
    assert other_process.inbox_files() == []


@pytest.mark.parametrize("name", ["", "a/b", "..\\x", "ü", "a" * 151, "a b"])
def test_an_invalid_file_name_is_refused(other_process: OtherProcess, name: str) -> None:
    if name:
        with pytest.raises(InvalidRequest, match="file name"):
            other_process.inbox.begin_write(name)
        with pytest.raises(InvalidRequest, match="file name"):
            other_process.inbox.put_blob(QUEUE, name, b"")
    assert other_process.inbox_files() == []


def test_the_manifest_says_when_the_write_began(other_process: OtherProcess) -> None:
    other_process.publish(QUEUE, batch_of("a"), write=write_name(1234))
    assert other_process.inbox.manifest(only(other_process.inbox)).began_at == 1234


# -- cut off -------------------------------------------------------------------------------------------


def test_publishing_is_all_or_nothing() -> None:
    files = SimulatedFiles()
    OtherProcess(files).publish(QUEUE, batch_of("before"), number=1)

    def publish(disk: SimulatedFiles) -> None:
        OtherProcess(disk).publish(QUEUE, batch_of("a", "b"), batch_of("c"), number=2, parts=2)

    met = set()
    for disk, done in cut_at_each_call(files, lambda disk: partial(publish, disk), KILLS_AND_POWER_CUTS):
        other_process = OtherProcess(disk)
        found = sorted(texts(other_process.inbox, entry) for entry in other_process.inbox.waiting())
        assert found in ([["a", "b", "c"], ["before"]], [["before"]])
        assert len(found) == 2 or not done, "what was answered is there"
        met.add((len(found), done))
        other_process.publish(QUEUE, batch_of("a", "b"), batch_of("c"), number=2, parts=2, write="again")
        assert sorted(texts(other_process.inbox, entry) for entry in other_process.inbox.waiting()) == [["a", "b", "c"], ["before"]]
        other_process.inbox.sweep(1 << 62, {QUEUE})
        assert len(other_process.inbox_files()) == 2
    assert met == {(1, False), (2, False), (2, True)}


def test_removing_a_published_write_is_all_or_nothing() -> None:
    files = SimulatedFiles()
    OtherProcess(files).publish(QUEUE, batch_of("a"), batch_of("b"), parts=2)

    def remove(disk: SimulatedFiles) -> None:
        inbox = FileInbox(disk, ROOT)
        inbox.remove(only(inbox))

    met = set()
    for disk, done in cut_at_each_call(files, lambda disk: partial(remove, disk), KILLS_AND_POWER_CUTS):
        other_process = OtherProcess(disk)
        found = [texts(other_process.inbox, entry) for entry in other_process.inbox.waiting()]
        assert found in ([], [["a", "b"]])
        assert not (found and done)
        met.add(len(found))
        other_process.inbox.sweep(0, {QUEUE})
        assert other_process.inbox_files() == [entry.label for entry in other_process.inbox.waiting()]
    assert met == {0, 1}


def test_putting_a_blob_is_all_or_nothing() -> None:
    files = SimulatedFiles()
    FileInbox(files, ROOT).put_blob(QUEUE, "e", b"old word")
    for disk, done in cut_at_each_call(
        files, lambda disk: lambda: FileInbox(disk, ROOT).put_blob(QUEUE, "e", b"new word"), KILLS_AND_POWER_CUTS
    ):
        body = FileInbox(disk, ROOT).blob(QUEUE, "e")
        assert body == b"new word" or (body == b"old word" and not done)


def test_a_failed_sync_of_the_inbox_is_an_unknown_outcome() -> None:
    """The rename was done, so the write did not fail; but it may be lost in a power cut."""

    class Forgetful(SimulatedFiles):
        def sync_directory(self, path: str) -> None:
            if path.endswith("/inbox") and any(name.endswith(".drop") for name in self.list(path)):
                raise OSError(errno.EIO, "Input/output error", path)
            super().sync_directory(path)

    other_process = OtherProcess(Forgetful())
    with pytest.raises(OutcomeUnknown, match="check whether its items arrive"):
        other_process.publish(QUEUE, batch_of("a"))
    assert texts(other_process.inbox, only(other_process.inbox)) == ["a"]


# -- removing ------------------------------------------------------------------------------------------


def test_a_write_is_published_again_after_its_removal_was_cut_off(other_process: OtherProcess) -> None:
    other_process.publish(QUEUE, batch_of("a"))
    entry = only(other_process.inbox)
    other_process.files.rename(f"{other_process.root}/inbox/{entry.label}", f"{other_process.root}/inbox/{entry.label}.gone")
    other_process.publish(QUEUE, batch_of("a"))
    other_process.inbox.remove(entry)
    assert other_process.inbox_files() == []


def test_a_sweep_removes_old_writes_and_blobs_of_deleted_queues(other_process: OtherProcess) -> None:
    other_process.stage(QUEUE, [[batch_of("a")]], write_name(999))
    young, _ = other_process.stage(QUEUE, [[batch_of("b")]], write_name(1000))
    unnamed, _ = other_process.stage(QUEUE, [[batch_of("c")]], "by-hand")
    other_process.publish(QUEUE, batch_of("d"))
    other_process.inbox.put_blob(QUEUE, "known", b"")
    other_process.inbox.put_blob(OTHER, "of a queue that is no more".replace(" ", "-"), b"")
    other_process.inbox.sweep(1000, {QUEUE})
    assert other_process.inbox_files() == sorted(
        [f"{young}.staged", f"{unnamed}.staged", *(each.label for each in other_process.inbox.waiting())]
    )
    assert len(other_process.inbox.waiting()) == 1
    assert other_process.answer_files() == [f"{QUEUE:016x}-known"]
    other_process.inbox.sweep(1000, {QUEUE})


def test_a_missing_inbox_is_empty(other_process: OtherProcess) -> None:
    assert other_process.inbox.waiting() == []
    assert other_process.inbox.blob_names(QUEUE, "") == []
    assert other_process.inbox.blob(QUEUE, "x") is None
    other_process.inbox.remove_blob(QUEUE, "x")
    other_process.inbox.sweep(1 << 62, ())


# -- blobs and other files ---------------------------------------------------------------------------------


class RacingFiles(SystemFiles):
    """Files that another process removes just before each call that uses them."""

    racing = False

    def open(self, path: str, mode: Mode) -> int:
        self._race(path)
        return super().open(path, mode)

    def remove(self, path: str) -> None:  # type: ignore[override]
        self._race(path)
        os.unlink(path)

    def rename(self, source: str, target: str) -> None:  # type: ignore[override]
        self._race(source)
        os.replace(source, target)

    def _race(self, path: str) -> None:
        if self.racing and path.endswith("-grant.s.1"):
            Path(path).unlink(missing_ok=True)


def test_a_blob_may_be_removed_while_it_is_read_or_removed(tmp_path: Path) -> None:
    files = RacingFiles()
    inbox = FileInbox(files, str(tmp_path))
    for use in (inbox.blob, inbox.remove_blob):
        files.racing = False
        inbox.put_blob(QUEUE, "grant.s.1", b"2")
        files.racing = True
        assert use(QUEUE, "grant.s.1") is None


def test_blobs_are_read_by_name_and_removed(other_process: OtherProcess) -> None:
    other_process.inbox.put_blob(QUEUE, "grant.s.1", b"first")
    other_process.inbox.put_blob(QUEUE, "grant.s.1", b"again")
    other_process.inbox.put_blob(QUEUE, "grant.t.1", b"")
    other_process.inbox.put_blob(OTHER, "grant.s.1", b"")
    assert other_process.inbox.blob(QUEUE, "grant.s.1") == b"again"
    assert other_process.inbox.blob_names(QUEUE, "grant.s.") == ["grant.s.1"]
    other_process.inbox.remove_blob(QUEUE, "grant.s.1")
    assert other_process.inbox.blob(QUEUE, "grant.s.1") is None
    assert other_process.inbox.blob_names(QUEUE, "grant.") == ["grant.t.1"]


@pytest.mark.parametrize("name", ["nonsense", "x-y.drop", "0a.drop", "000000000000000a-x.errand.tmp", "LOCK"])
def test_other_files_in_the_inbox_are_ignored(other_process: OtherProcess, name: str) -> None:
    other_process.files.make_directory(f"{other_process.root}/inbox")
    other_process.files.close(other_process.files.open(f"{other_process.root}/inbox/{name}", "append"))
    assert other_process.inbox.waiting() == []
    other_process.inbox.sweep(1 << 62, ())
    assert other_process.inbox_files() == [name]


@pytest.mark.parametrize("ending", ["errand", "done"])
def test_an_operation_of_an_earlier_version_is_ignored_and_swept(other_process: OtherProcess, ending: str) -> None:
    other_process.files.make_directory(f"{other_process.root}/inbox")
    other_process.files.close(other_process.files.open(f"{other_process.root}/inbox/000000000000000a-x.{ending}", "append"))
    assert other_process.inbox.waiting() == []
    other_process.inbox.sweep(0, {QUEUE})
    assert other_process.inbox_files() == []


# -- wrong manifests ------------------------------------------------------------------------


def test_a_damaged_manifest_is_refused_or_names_the_same_write() -> None:
    files = SimulatedFiles()
    other_process = OtherProcess(files)
    other_process.publish(QUEUE, batch_of("a", "b"), batch_of("c"), parts=2)
    entry = only(other_process.inbox)
    path = f"{ROOT}/inbox/{entry.label}/{MANIFEST}"
    good, whole = files.content(path), other_process.inbox.manifest(entry)
    for size in range(len(good)):
        files.put_file(path, good[:size])
        with pytest.raises(CorruptLog, match="cannot be read"):
            other_process.inbox.manifest(entry)
    for bit in range(8 * len(good)):
        files.put_file(path, good)
        files.flip_bit(path, bit)
        try:
            found = other_process.inbox.manifest(entry)
        except CorruptLog:
            continue
        assert (found.source, found.number) == (whole.source, whole.number)  # the parts show other damage


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "another"},
        {"number": 2},
        {"number": 0},
        {"number": 1 << 63},
        {"source": ""},
        {"version": 2},
        {"parts": [["p", 1]]},
        {"parts": [{"name": "p", "frames": 1, "items": 1}] * 2},
        {"parts": None},
    ],
    ids=str,
)
def test_the_manifest_of_another_write_is_refused(changes: dict[str, object]) -> None:
    files = SimulatedFiles()
    other_process = OtherProcess(files)
    other_process.publish(QUEUE, batch_of("a"))
    entry = only(other_process.inbox)
    path = f"{ROOT}/inbox/{entry.label}/{MANIFEST}"
    files.put_file(path, msgspec.json.encode({**msgspec.json.decode(files.content(path)), **changes}))
    with pytest.raises(CorruptLog, match=r"write it again|newer Penstock"):
        other_process.inbox.manifest(entry)


def test_a_part_name_cannot_leave_its_folder(other_process: OtherProcess) -> None:
    other_process.publish(QUEUE, batch_of("a"))
    entry = only(other_process.inbox)
    with pytest.raises(InvalidRequest, match="file name"):
        other_process.inbox.frames(entry, StagedPart("../../penstock.json", 1, 1))
    with pytest.raises(CorruptLog, match="lacks its part"):
        other_process.inbox.frames(entry, StagedPart("another.frames", 1, 1))


def test_a_target_that_appears_meanwhile_is_not_overwritten() -> None:
    """Another process may publish the same write between the check and the rename."""

    class Late(SimulatedFiles):
        def exists(self, path: str) -> bool:
            return super().exists(path) and not path.endswith(".drop")

    other_process = OtherProcess(Late())
    other_process.publish(QUEUE, batch_of("first"))
    assert not other_process.publish(QUEUE, batch_of("second"))
    assert other_process.inbox_files() == [published_write_path(QUEUE, "s", 1)]
    assert texts(other_process.inbox, only(other_process.inbox)) == ["first"]


def test_any_other_failure_of_the_rename_is_raised() -> None:
    files = SimulatedFiles()
    other_process = OtherProcess(files)
    write, said = other_process.stage(QUEUE, [[batch_of("a")]])
    twin = files.copy()
    OtherProcess(twin).inbox.publish(write, QUEUE, WriteManifest(said, "s", 1))
    rename = next(int(line.split()[0]) for line in twin.trace if " rename " in line)
    files.fail(rename, errno.EIO)
    with pytest.raises(StorageFailed, match="Input/output"):
        other_process.inbox.publish(write, QUEUE, WriteManifest(said, "s", 1))
    assert other_process.inbox.waiting() == []
    assert other_process.inbox.publish(write, QUEUE, WriteManifest(said, "s", 1))


INCARNATION = 0xABCDEF


def draft(*payloads: bytes) -> Draft:
    return ArrowBatch.from_columns(read_columns(pa.table({"payload": pa.array(payloads)}))).draft(Moment(1, 2))


def staged(path: Path, *drafts: Draft, partition: int = 0) -> str:
    writer = StagedWriter(SystemFiles(), str(path), INCARNATION)
    for one in drafts:
        writer.add(one, partition)
    assert writer.finish() == StagedPart(path.name, len(drafts), sum(one.count for one in drafts))
    return str(path)


def read(path: str) -> list[list[bytes]]:
    return [FrameColumns(frame).batch().payloads for frame in read_part(SystemFiles(), path, INCARNATION)]  # type: ignore[misc]


def test_frames_are_read_back_in_order(tmp_path: Path) -> None:
    path = staged(tmp_path / "part", draft(b"a", b"bc"), draft(b"d" * 10_000), draft(b""))
    assert read(path) == [[b"a", b"bc"], [b"d" * 10_000], [b""]]
    assert [frame.sequence for frame in read_part(SystemFiles(), path, INCARNATION)] == [1, 2, 3]


def test_a_frame_is_read_at_the_position_that_add_returned(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    places = [writer.add(draft(b"x" * size), partition) for partition, size in ((3, 1), (4, 5_000), (5, 2))]
    writer.finish()
    reader = StagedReader(SystemFiles(), writer.path, INCARNATION)
    found = [reader.with_header(place, sequence) for sequence, place in enumerate(places, 1)]
    reader.close()
    assert [(header.partition, len(FrameColumns(frame).batch().payloads[0])) for header, frame in found] == [(3, 1), (4, 5_000), (5, 2)]


def test_a_part_without_frames_has_no_file(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    assert writer.finish() == StagedPart("part", 0, 0)
    assert [*tmp_path.iterdir()] == []


def test_a_begun_part_can_be_discarded(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    writer.discard()
    writer.add(draft(b"a"))
    writer.add(draft(b"b"))
    assert len([*tmp_path.iterdir()]) == 1
    writer.discard()
    writer.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_part_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = Path(staged(tmp_path / "part", draft(b"a", b"b"), draft(b"c"))).read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(CorruptLog, match="is damaged"):
            read(str(cut))


def test_a_part_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    whole = Path(staged(tmp_path / "part", draft(b"a", b"b"), draft(b"c"))).read_bytes()
    flipped = tmp_path / "flipped"
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        with pytest.raises(CorruptLog):
            read(str(flipped))


def test_a_part_with_bytes_after_it_is_refused(tmp_path: Path) -> None:
    path = Path(staged(tmp_path / "part", draft(b"a")))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CorruptLog, match="bytes follow its last frame"):
        read(str(path))


def test_a_part_of_another_queue_is_refused(tmp_path: Path) -> None:
    path = staged(tmp_path / "part", draft(b"a"))
    with pytest.raises(CorruptLog, match="has the header of another frame"):
        list(read_part(SystemFiles(), path, INCARNATION + 1))


def test_a_frame_of_another_type_is_refused(tmp_path: Path) -> None:
    vector: list[Any] = []
    FrameEncoder(INCARNATION, 0).encode(draft(b"a")._replace(type=FrameType.STATE), 1, 0, vector)
    (tmp_path / "part").write_bytes(b"".join(vector))
    with pytest.raises(CorruptLog, match="has the header of another frame"):
        read(str(tmp_path / "part"))


@pytest.mark.parametrize("wrong", [{"type": FrameType.STATE}, {"base_offset": 5}])
def test_only_data_frames_of_base_0_are_added(tmp_path: Path, wrong: dict[str, Any]) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "part"), INCARNATION)
    with pytest.raises(InvalidRequest, match="a part takes DATA frames of base 0"):
        writer.add(draft(b"a")._replace(**wrong))


def test_a_missing_part_and_a_missing_folder_fail(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"reading .*part failed"):
        read(str(tmp_path / "part"))
    writer = StagedWriter(SystemFiles(), str(tmp_path / "gone" / "part"), INCARNATION)
    writer.add(draft(b"a"))
    with pytest.raises(StorageFailed, match=r"writing .*part failed"):
        writer.finish()


class SyncRecordingFiles(SystemFiles):
    """Records what is synced; syncs may fail."""

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


def test_a_finished_part_and_its_folder_are_synced(tmp_path: Path) -> None:
    files = SyncRecordingFiles()
    writer = StagedWriter(files, str(tmp_path / "part"), INCARNATION)
    writer.add(draft(b"a"))
    writer.finish()
    assert files.synced == ["file", str(tmp_path)]


def test_finish_fails_when_the_sync_fails(tmp_path: Path) -> None:
    writer = StagedWriter(SyncRecordingFiles(failing=True), str(tmp_path / "part"), INCARNATION)
    writer.add(draft(b"a"))
    with pytest.raises(StorageFailed, match="the disk is full"):
        writer.finish()
    writer.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_part_that_failed_in_its_first_frame_is_discarded(tmp_path: Path) -> None:
    writer = StagedWriter(FullDiskFiles(), str(tmp_path / "part"), INCARNATION)
    writer.add(draft(b"a"))
    with pytest.raises(StorageFailed, match="the disk is full"):
        writer.finish()
    assert len([*tmp_path.iterdir()]) == 1
    writer.discard()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_other_writers_remove_is_created_again(tmp_path: Path) -> None:
    folder, made = tmp_path / "write", 0

    class Removing(SystemFiles):
        """Another writer removes the empty folder three times."""

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


def test_a_folder_that_cannot_be_created_fails(tmp_path: Path) -> None:
    writer = StagedWriter(SystemFiles(), str(tmp_path / "write" / "part"), INCARNATION, lambda: None)
    with pytest.raises(StorageFailed, match=r"writing .*part failed: No such file"):
        writer.begin()
