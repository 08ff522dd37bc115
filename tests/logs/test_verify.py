"""verify reports the content of a log and what is wrong with it, and changes nothing."""

from functools import cache
from pathlib import Path

import msgspec
import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.sidefiles import unpack_synced
from penstock.logs.files.verify import VerifyReport, verify
from penstock.logs.log import Gap
from penstock.testing import SimulatedFiles
from tests.logs.backends import INCARNATION, PARTITION, comparable
from tests.logs.items import fill, items_draft, runs
from tests.logs.scripted_owner import FOLDER, ROOT, open_log, segments


@cache
def whole() -> SimulatedFiles:
    """A closed log of five segments: 20 frames of six items, 20 frames of records, four Bases."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    fill(log)
    log.close()
    files.kill()
    return files


def verified(files: SimulatedFiles) -> VerifyReport:
    """Verify the log on a disk that refuses every write, and check that nothing changed."""
    files.kill()
    files.set_read_only()
    before = files.contents()
    report = verify(files, FOLDER, INCARNATION, PARTITION)
    assert files.contents() == before
    assert " 0 open," in repr(files), "every handle is given back"
    files.set_read_only(False)
    return report


def test_a_sound_log() -> None:
    report = verified(whole().copy())
    assert report.sound
    assert report.opens
    assert (report.segments, report.rewritten, report.items, report.first_offset, report.next_offset) == (5, 0, 120, 0, 120)
    assert report.frames == {"DATA": 20, "STATE": 20, "BASE": 4}
    assert report.size_bytes == sum(len(whole().content(path)) for path in segments(whole()))
    assert report.begins == f"the Base of {segments(whole())[-1].removesuffix('.log').rpartition('/')[2]}"
    empty = (report.gaps, report.torn_bytes, report.bases_lost, report.side_files, report.errors, report.findings)
    assert empty == ([], 0, [], [], [], [])


def test_an_empty_log() -> None:
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    log.close()
    report = verified(files)
    assert report.sound
    assert (report.segments, report.items, report.frames) == (1, 0, {})


def test_a_log_that_was_dropped_and_rewritten() -> None:
    files = whole().copy()
    log = open_log(files)
    list(log.recover())
    log.drop(1)
    log.rewrite(0, 1, runs([30, 50]))
    log.close()
    report = verified(files)
    assert report.sound
    assert (report.segments, report.rewritten, report.first_offset) == (3, 1, 24)
    assert report.frames == {"DATA": 10, "STATE": 8, "BASE": 2, "SKIP": 3}
    assert (report.gaps, report.side_files) == ([], [])


def test_damage_is_reported_with_its_items_and_position() -> None:
    files = whole().copy()
    path = segments(files)[1]
    start = files.content(path).index(b"payload of 30")
    files.flip_bit(path, 8 * start)
    report = verified(files)
    (gap,) = report.gaps
    assert report.damage == [gap]
    assert gap[:4] == (12, 12, 30, 36)
    assert path in gap.where
    assert "checksum" in gap.why
    assert not gap.repaired
    assert report.opens
    assert not report.sound
    assert report.items == 114
    assert report.bases_lost == report.side_files == []


def test_a_lost_base_is_reported() -> None:
    files = whole().copy()
    for path in segments(files)[3:]:
        files.flip_bit(path, 8 * 75)
    report = verified(files)
    assert [(gap.first_sequence, gap.last_sequence, gap.start, gap.stop) for gap in report.gaps] == [(27, 27, 72, 72), (36, 36, 96, 96)]
    assert [f"{FOLDER}/{name}.log" for name in report.bases_lost] == segments(files)[3:]
    assert report.begins == f"the Base of {segments(files)[2].removesuffix('.log').rpartition('/')[2]}"
    assert report.opens


def test_a_log_without_a_base_is_described() -> None:
    files = whole().copy()
    files.remove(segments(files)[0])
    for path in segments(files):
        files.flip_bit(path, 8 * 75)
    report = verified(files)
    assert not report.opens
    assert "no Base" in report.errors[0]
    assert report.items == 96
    assert len(report.bases_lost) == 4


def test_a_missing_segment_is_a_gap() -> None:
    files = whole().copy()
    files.remove(segments(files)[2])
    report = verified(files)
    assert [gap[:4] for gap in report.gaps] == [(18, 26, 48, 72)]
    assert report.side_files == [f"{48:020}-{18:020}.idx: left over from an operation that was cut off"]


def test_every_segment_missing() -> None:
    files = whole().copy()
    for path in segments(files):
        files.remove(path)
    report = verified(files)
    assert [gap[:4] for gap in report.gaps] == [(1, 44, 0, 120)]
    assert [gap[:4] for gap in open_log(files).recover()] == [(1, 44, 0, 120)]
    assert report.opens


def test_a_torn_tail_is_not_damage() -> None:
    files = whole().copy()
    log = open_log(files)
    list(log.recover())
    log.append([items_draft(120, 130)])
    newest = segments(files)[-1]
    files.put_file(newest, files.content(newest)[:-40])
    report = verified(files)
    torn = len(files.content(newest)) - len(whole().content(newest))
    assert (report.torn_bytes, report.gaps, report.opens) == (torn, [], True)


@pytest.mark.parametrize("size", [1, 40, 100])
def test_zeros_at_the_end_of_an_older_segment_are_not_damage(size: int) -> None:
    """A power cut may undo a cut that was not synced: zeros are left where the bytes were, and the log went on in a new
    segment."""
    files = whole().copy()
    older = segments(files)[-2]
    files.put_file(older, files.content(older) + bytes(size))
    report = verified(files)
    assert (report.sound, report.items, report.gaps, report.torn_bytes) == (True, 120, [], 0)
    assert report.frames == {"DATA": 20, "STATE": 20, "BASE": 4}
    log = open_log(files)
    list(log.recover())
    assert len(comparable(log.frames())) == 44


def test_a_rotation_that_was_cut_off() -> None:
    files = whole().copy()
    files.put_file(f"{FOLDER}/{120:020}-{45:020}.log", b"PSTK torn")
    report = verified(files)
    assert (report.segments, report.torn_bytes, report.gaps, report.opens) == (5, 9, [], True)


@pytest.mark.parametrize("name", ["synced", f"{0:020}-{1:020}.idx", "checkpoint"])
def test_side_files_that_are_wrong(name: str) -> None:
    files = whole().copy()
    if name == "checkpoint":
        log = open_log(files)
        list(log.recover())
        log.write_checkpoint(b"the state", 1, 2, 120)
        log.close()
        assert verified(files).begins.startswith("the checkpoint in")
    data = files.content(f"{FOLDER}/{name}")
    files.put_file(f"{FOLDER}/{name}", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    report = verified(files)
    assert len(report.side_files) == 1
    assert report.side_files[0].startswith(f"{name}: ")
    assert "damaged" in report.side_files[0]
    assert report.sound


def test_side_files_that_are_missing() -> None:
    files = whole().copy()
    for path in list(files.contents()):
        if path.startswith(FOLDER) and path.endswith((".idx", "synced")):
            files.remove(path)
    report = verified(files)
    names = [path.removesuffix(".log").rpartition("/")[2] for path in segments(files)]
    assert report.side_files == ["synced: missing", *(f"{name}.idx: missing" for name in names[:-1])]
    assert report.sound


def test_an_index_of_another_segment() -> None:
    files = whole().copy()
    first, second = (path.removesuffix(".log") + ".idx" for path in segments(files)[:2])
    files.put_file(second, files.content(first))
    assert verified(files).side_files == [f"{second.rpartition('/')[2]}: does not fit its segment"]


@pytest.mark.parametrize("shift", [-16, 16])
def test_a_synced_position_that_is_not_at_a_frames_end(shift: int) -> None:
    files = whole().copy()
    move_position(files, shift)
    report = verified(files)
    assert report.side_files == ["synced: does not fit the log"]
    assert report.sound


def move_position(files: SimulatedFiles, shift: int) -> None:
    synced = unpack_synced(files.content(f"{FOLDER}/synced"))
    assert synced is not None
    files.put_file(f"{FOLDER}/synced", msgspec.structs.replace(synced, position=synced.position + shift).pack())


def test_frames_of_another_partition_are_reported() -> None:
    files = whole().copy()
    other = FileStore.open([ROOT], files=files).log(INCARNATION, PARTITION + 1)
    list(other.recover())
    fill(other)
    other.close()
    path = segments(files)[2]
    files.put_file(path, files.content(path.replace(f"{PARTITION:05}/", f"{PARTITION + 1:05}/")))
    report = verified(files)
    assert report.opens
    assert not report.damage
    assert "partition 8" in report.errors[0]


def test_a_disk_that_cannot_be_read() -> None:
    files = whole().copy()
    for number in range(1, 40):
        tried = files.copy()
        tried.fail(tried.calls + number, 5)
        report = verify(tried, FOLDER, INCARNATION, PARTITION)
        assert report.errors == [] or "Input/output" in report.errors[0]


def test_a_log_in_use_is_verified_without_its_lock(tmp_path: Path) -> None:
    root, files = str(tmp_path / "data"), SystemFiles()
    store = FileStore.open([root], files=files)
    log = store.log(INCARNATION, 3)
    list(log.recover())
    fill(log, segments=4)
    log.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    report = verify(files, store.path_of(INCARNATION, 3), INCARNATION, 3)
    store.close()
    assert report.sound and (report.incarnation, report.partition, report.segments) == (INCARNATION, 3, 4)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_report_becomes_a_dict() -> None:
    files = whole().copy()
    files.remove(segments(files)[2])
    plain = verified(files).to_dict()
    assert plain["gaps"][0]["first_sequence"] == 18
    assert plain["segments"] == 4
    assert Gap(**plain["gaps"][0]) == verified(files).gaps[0]
