"""Opening a log after a crash or damage, case by case (test_torture tests every byte)."""

import errno

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.logs.log import Draft, Frame, Gap
from penstock.testing import SimulatedFiles
from penstock.words.errors import StorageFailed
from tests.logs.backends import base_draft, comparable, draft, expected
from tests.logs.scripted_owner import FOLDER, open_log

FIRST = f"{FOLDER}/{0:020}-{1:020}.log"
SYNCED = f"{FOLDER}/synced"
FRAME_BYTES = 72 + 16 + 8
GROUPS = [draft(number, 1, b"sixteen bytes ok") for number in range(6)]


def opened(files: SimulatedFiles) -> FileLog:
    log = open_log(files)
    list(log.recover())
    return log


def written(synced_each: bool) -> SimulatedFiles:
    """Six groups, each synced before the next is written, or all by one sync at the end."""
    files = SimulatedFiles()
    log = opened(files)
    for group in GROUPS:
        log.append([group])
        if synced_each:
            log.sync()
    log.sync()
    return files


def summary(found: list[Frame | Gap]) -> list[int | tuple[int, int, int, int]]:
    """The sequences of frames, and the ranges of gaps."""
    return [item[:4] if isinstance(item, Gap) else item.sequence for item in found]


def damage(files: SimulatedFiles, frame: int) -> None:
    files.flip_bit(FIRST, 8 * (FRAME_BYTES * frame + 80))


def lag(files: SimulatedFiles) -> None:
    """Restore the published position from before the first append, as a power cut may."""
    early = SimulatedFiles()
    opened(early)
    files.put_file(SYNCED, early.content(SYNCED))


def test_damage_below_the_published_position_is_a_gap() -> None:
    files = written(synced_each=False)
    damage(files, 2)
    assert summary(list(open_log(files).recover())) == [1, 2, (3, 3, 2, 3), 4, 5, 6]


def test_a_later_frame_proves_that_earlier_ones_were_synced() -> None:
    files = written(synced_each=True)
    damage(files, 2)
    lag(files)
    log = open_log(files)
    assert summary(list(log.recover())) == [1, 2, (3, 3, 2, 3), 4, 5, 6]
    assert log.findings == []


def test_unsynced_frames_end_at_the_first_torn_one() -> None:
    files = written(synced_each=False)
    damage(files, 2)
    lag(files)
    log = open_log(files)
    assert summary(list(log.recover())) == [1, 2]
    assert f"{4 * FRAME_BYTES} bytes" in log.findings[0]
    assert len(files.content(FIRST)) == 2 * FRAME_BYTES


def test_without_a_published_position_nothing_is_cut_while_a_whole_group_follows() -> None:
    files = written(synced_each=False)
    damage(files, 2)
    files.remove(SYNCED)
    assert summary(list(open_log(files).recover())) == [1, 2, (3, 3, 2, 3), 4, 5, 6]


def test_damage_at_the_end_is_kept_and_the_log_continues_in_a_new_segment() -> None:
    files = written(synced_each=True)
    damage(files, 5)
    before = files.content(FIRST)
    log = open_log(files)
    assert summary(list(log.recover())) == [1, 2, 3, 4, 5, (6, 6, 5, 6)]
    assert log.wants_base
    log.rotate(base_draft(6))
    log.append([draft(6, 1, b"on we go")])
    log.close()
    assert files.content(FIRST) == before
    assert summary(list(opened(files).frames())) == [1, 2, 3, 4, 5, (6, 6, 5, 6), 7, 8]
    assert summary(opened(files).read(4, 7)) == [5, (6, 6, 5, 6), 8]


def test_a_file_shorter_than_the_published_position_is_damage() -> None:
    files = written(synced_each=True)
    files.put_file(FIRST, files.content(FIRST)[: 4 * FRAME_BYTES])
    log = open_log(files)
    assert summary(list(log.recover())) == [1, 2, 3, 4, (5, 6, 4, 6)]
    assert log.wants_base


def test_with_a_damaged_base_replay_begins_at_the_one_before() -> None:
    files = written(synced_each=True)
    log = opened(files)
    log.rotate(base_draft(6))
    log.append([draft(6, 1, b"after the base")])
    log.close()
    second = f"{FOLDER}/{6:020}-{7:020}.log"
    files.flip_bit(second, 8 * 80)
    log = open_log(files)
    assert summary(list(log.recover())) == [1, 2, 3, 4, 5, 6, 8]
    assert "Base" in log.findings[0]
    assert summary(list(log.frames())) == [1, 2, 3, 4, 5, 6, (7, 7, 6, 6), 8]


def test_a_rotation_that_was_cut_off_leaves_no_trace() -> None:
    files = written(synced_each=True)
    files.put_file(f"{FOLDER}/{6:020}-{7:020}.log", b"PSTK, and then the power went")
    log = open_log(files)
    assert comparable(log.recover()) == expected(GROUPS)
    assert "rotation" in log.findings[0]
    log.rotate(base_draft(6))
    assert comparable(log.frames()) == expected([*GROUPS, base_draft(6)])


def test_frames_of_a_failed_sync_of_an_earlier_process_are_written_again() -> None:
    """The frames can be read from the page cache and are not marked as changed, but they are not on the disk."""
    files = SimulatedFiles()
    log = opened(files)
    log.append([GROUPS[0]])
    files.fail(files.calls + 1, errno.EIO)
    with pytest.raises(StorageFailed):
        log.sync()
    handed_out = comparable(open_log(files).recover())
    assert handed_out == expected(GROUPS[:1])
    files.crash()
    assert comparable(open_log(files).recover()) == handed_out


def test_reading_on_costs_few_calls() -> None:
    files = SimulatedFiles()
    log = opened(files)
    drafts: list[Draft] = [draft(number, 1, b"small") for number in range(3_000)]
    for one in drafts:
        log.append([one])
    before = files.calls
    frames = [frame for start in range(0, 3_000, 10) for frame in log.read(start, start + 10)]
    assert comparable(frames) == expected(drafts)
    assert files.calls - before < 30
