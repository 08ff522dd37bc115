"""repair keeps every whole frame and records what is lost."""

import json

import msgspec
import pytest
from google_crc32c import value

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.repair import repair
from penstock.logs.files.sidefiles import unpack_synced
from penstock.logs.files.verify import verify
from penstock.logs.log import Frame, FrameType, Gap
from penstock.testing import Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import BrokerLocked, CorruptLog, InvalidRequest
from tests.logs.backends import INCARNATION, PARTITION, base_draft
from tests.logs.damaged_logs import (
    DAMAGES,
    STOP,
    check_append_works,
    check_second_repair,
    cut,
    damaged,
    flip_frames_with,
    listed,
    lost,
    opened,
    run_repair,
    undamaged,
    without_lock,
    zero,
)
from tests.logs.items import fill, items_draft, payload, runs, served_items
from tests.logs.scripted_owner import FOLDER, ROOT, open_log, segments


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_repaired(name: str) -> None:
    files = damaged(name)
    report = verify(files, FOLDER, INCARNATION, PARTITION)
    before, recovered_before = listed(files), opened(files.copy())
    done = run_repair(files)
    assert done.gaps == report.damage
    assert done.opens
    assert done.errors == []
    frames, gaps = listed(files)
    assert frames == before[0], "every whole frame is kept, and as it was"
    assert lost(gaps) == lost(report.damage)
    assert all(gap.repaired for gap in gaps)
    recovered, gaps = opened(files.copy())
    assert recovered == recovered_before[0]
    assert lost(gaps) == lost(recovered_before[1])
    after = verify(files, FOLDER, INCARNATION, PARTITION)
    assert after.sound
    assert after.items == report.items
    assert [entry for entry in after.side_files if "missing" not in entry] == []
    check_append_works(files.copy())
    check_second_repair(files)


@pytest.mark.parametrize("name", ["an item frame", "the end", "an old one's content"])
def test_the_damaged_original_is_kept(name: str) -> None:
    files = damaged(name)
    before = files.contents()
    done = run_repair(files)
    (copy,) = done.copies
    original = copy.removesuffix(".damaged")
    assert copy.endswith(".log.damaged")
    assert files.content(copy) == before[original]
    assert files.content(original) != before[original]


def test_discard_keeps_no_damaged_original() -> None:
    files = damaged("two segments")
    done = run_repair(files, discard=True)
    assert len(done.segments) == 2
    assert done.copies == []
    assert not any("damaged" in path for path in files.contents())


def test_a_second_damaged_original_is_kept_beside_the_first() -> None:
    files = damaged("an item frame")
    first = run_repair(files)
    flip_frames_with(files, payload(26))
    kept = files.content(segments(files)[1])
    second = run_repair(files)
    assert [path.rpartition(".log")[2] for path in first.copies + second.copies] == [".damaged", ".damaged-2"]
    assert files.content(second.copies[0]) == kept
    assert sorted(gap[:4] for gap in listed(files)[1]) == [(10, 10, 24, 30), (12, 12, 30, 36)]


def test_the_report_is_a_file() -> None:
    files = damaged("two segments")
    files.put_file(f"{FOLDER}/checkpoint", b"not one")
    done = run_repair(files)
    assert done.path == f"{FOLDER}/repair-1.json"
    told_there = json.loads(files.content(done.path))
    assert [gap["start"] for gap in told_there["gaps"]] == [30, 78]
    assert told_there["segments"] == done.segments
    assert told_there["copies"] == done.copies
    assert told_there["side_files"] == ["checkpoint: the checkpoint is damaged and was ignored"]
    assert told_there["at"] == MicrosecondClock().read().wall
    flip_frames_with(files, payload(0))
    assert run_repair(files).path == f"{FOLDER}/repair-2.json"


def test_a_sound_log_is_not_changed() -> None:
    files = undamaged()
    before = without_lock(files)
    done = run_repair(files)
    assert (done.changed, done.opens, done.gaps, done.segments) == (False, True, [], [])
    assert without_lock(files) == before


def test_torn_bytes_are_not_changed() -> None:
    files = undamaged()
    log = open_log(files)
    list(log.recover())
    log.append([items_draft(STOP + 4, STOP + 9)])
    cut(files, segments(files)[-1], len(files.content(segments(files)[-1])) - 20)
    before = without_lock(files)
    assert not run_repair(files).changed
    assert without_lock(files) == before


def test_a_wrong_synced_position_is_corrected() -> None:
    files = undamaged()
    path = f"{FOLDER}/synced"
    synced = unpack_synced(files.content(path))
    assert synced is not None
    files.put_file(path, msgspec.structs.replace(synced, position=synced.position + 16).pack())
    assert run_repair(files).side_files == ["synced: does not fit the log"]
    assert unpack_synced(files.content(path)) == synced
    check_second_repair(files)


@pytest.mark.parametrize("name", ["checkpoint", "synced", f"{0:020}-{1:020}.idx"])
def test_wrong_side_files_are_removed(name: str) -> None:
    files = undamaged()
    files.put_file(f"{FOLDER}/{name}", b"nonsense")
    done = run_repair(files)
    assert len(done.side_files) == 1
    assert not files.exists(f"{FOLDER}/{name}")
    assert done.opens
    check_second_repair(files)


def test_a_checkpoint_after_the_damage_is_still_used() -> None:
    """It has the state of the lost records: the repair moves frames, but must not make the checkpoint unusable."""
    files = undamaged()
    log = open_log(files)
    list(log.recover())
    log.write_checkpoint(b"the state", 1, 2, STOP + 4)
    log.append([items_draft(STOP + 4, STOP + 5)])
    log.close()
    DAMAGES["an item frame of the newest"](files)
    before = opened(files.copy())
    assert before[0][0].body == b"the state"
    run_repair(files)
    assert opened(files.copy()) == before
    assert verify(files, FOLDER, INCARNATION, PARTITION).side_files == []


def test_a_checkpoint_whose_last_frame_is_damaged() -> None:
    """The frame's header is valid, so the checkpoint is used before the repair, and after it with a GAP frame."""
    files = undamaged()
    log = open_log(files)
    list(log.recover())
    log.append([items_draft(STOP + 4, STOP + 5)])
    log.write_checkpoint(b"the state", 1, 2, STOP + 5)
    log.append([items_draft(STOP + 5, STOP + 6)])
    log.close()
    flip_frames_with(files, payload(STOP + 4))
    before = opened(files.copy())
    run_repair(files)
    assert opened(files)[0] == before[0]
    assert before[0][0].body == b"the state"


def test_an_unusable_checkpoint_is_not_usable_after_the_repair() -> None:
    """An owner that ignored it continued from another state."""
    files = undamaged()
    log = open_log(files)
    list(log.recover())
    log.append([items_draft(STOP + 4, STOP + 5)])
    end = log.segment_bytes
    log.write_checkpoint(b"the state", 1, 2, STOP + 5)
    log.append([items_draft(STOP + 5, STOP + 6)])
    log.close()
    content = files.content(segments(files)[-1])
    start = content.rindex(b"PSTK", 0, end)
    zero(files, segments(files)[-1], start, start + 16)
    before = opened(files.copy())
    assert before[0][0].body != b"the state"
    for number in range(1, 80):
        killed = files.copy()
        killed.fail(killed.calls + number, "halt")
        try:
            run_repair(killed)
        except Halt:
            killed.kill()
        assert opened(killed)[0] == before[0]


def test_a_repaired_rewritten_segment_is_still_recognised() -> None:
    files = undamaged()
    log = open_log(files)
    list(log.recover())
    log.rewrite(1, 2, runs([30, 50, 60]))
    log.close()
    files.flip_bit(segments(files)[1], 8 * 20)
    run_repair(files)
    for path in segments(files)[2:]:
        files.flip_bit(path, 8 * 75)
    with pytest.raises(CorruptLog, match="no Base"):
        opened(files)


GROUPED = {"first": payload(STOP), "middle": b"what happened", "last": payload(STOP + 3)}


@pytest.mark.parametrize("which", GROUPED)
def test_the_rest_of_a_damaged_group_is_kept_without_the_synced_position(which: str) -> None:
    files = undamaged()
    newest = segments(files)[-1]
    files.flip_bit(newest, 8 * files.content(newest).rindex(GROUPED[which]))
    before = listed(files)[0]
    assert {frame.sequence for frame in before} & {45, 46, 47} == {45, 46, 47} - {45 + list(GROUPED).index(which)}
    run_repair(files)
    files.remove(f"{FOLDER}/synced")
    assert listed(files)[0] == before
    assert opened(files)[0][-1].sequence == before[-1].sequence


def test_damage_before_a_gap_frame_is_never_a_torn_tail() -> None:
    """The published position may lag after a power cut, but a GAP frame proves that earlier frames were synced."""
    files = undamaged()
    log = open_log(files)
    list(log.recover())
    lagging = files.content(f"{FOLDER}/synced")
    for offset in (STOP + 4, STOP + 5, STOP + 6):
        log.append([items_draft(offset, offset + 1)])
    log.close()
    flip_frames_with(files, payload(STOP + 6))
    run_repair(files)
    flip_frames_with(files, payload(STOP + 4))
    files.put_file(f"{FOLDER}/synced", lagging)
    frames, gaps = opened(files)
    assert [(gap.first_sequence, gap.last_sequence, gap.repaired) for gap in gaps] == [(48, 48, False), (50, 50, True)]
    assert frames[-1].sequence == 49


# -- refusals ----------------------------------------------------------------------------------------


def refused(files: SimulatedFiles, error: type[Exception], match: str) -> None:
    before = without_lock(files)
    with pytest.raises(error, match=match):
        repair(files, FOLDER, INCARNATION, PARTITION)
    assert without_lock(files) == before


def test_a_directory_in_use() -> None:
    files = damaged("an item frame")
    FileStore.open([ROOT], files=files)
    refused(files, BrokerLocked, "in use by")


def test_a_directory_that_is_not_a_logs() -> None:
    with pytest.raises(InvalidRequest, match="; give"):
        repair(SimulatedFiles(), "/somewhere/else/entirely", INCARNATION, PARTITION)


def test_a_newer_format() -> None:
    files = damaged("two segments")
    path = segments(files)[4]
    header = files.content(path)[:5] + b"\x09"
    covered = header + files.content(path)[6:68]
    files.put_file(path, covered + value(covered).to_bytes(4, "little") + files.content(path)[72:])
    refused(files, CorruptLog, "newer format")


def test_another_partitions_file() -> None:
    files = damaged("an item frame")
    other = FileStore.open([ROOT], files=files).log(INCARNATION, PARTITION + 1)
    list(other.recover())
    fill(other)
    other.close()
    files.kill()
    files.put_file(segments(files)[2], files.content(segments(files)[2].replace(f"{PARTITION:05}/", f"{PARTITION + 1:05}/")))
    refused(files, CorruptLog, "partition 8")


def test_a_log_without_a_base_is_repaired_and_does_not_open() -> None:
    files = undamaged()
    files.remove(segments(files)[0])
    for path in segments(files):
        files.flip_bit(path, 8 * 75)
    done = run_repair(files)
    assert not done.opens
    assert "no Base" in done.errors[0]
    assert len(done.segments) == 4
    found = list(FileStore.open([ROOT], files=files, read_only=True).reader(INCARNATION, PARTITION).frames())
    assert [frame.type for frame in found if isinstance(frame, Frame)].count(FrameType.DATA) == 18
    assert all(gap.repaired for gap in found if isinstance(gap, Gap))
    check_second_repair(files)


def test_a_repaired_log_rotates_and_drops() -> None:
    files = damaged("the end")
    run_repair(files)
    log = open_log(files)
    list(log.recover())
    log.rotate(base_draft(STOP + 4))
    log.rewrite(0, 3, runs([30, 100, STOP + 3]))
    found = served_items(log.read(0, STOP + 4))
    assert 30 in found.items
    assert [gap.repaired for gap in found.gaps] == [True], "what is wanted and lost stays known as lost"
    log.drop(2)
    assert [segment.base_offset for segment in log.segments()] == [STOP + 4]
