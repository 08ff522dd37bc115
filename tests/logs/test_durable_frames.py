"""Frames that were synced are damage if they are lost, never a torn tail: a rotation or a checkpoint proves the sync.

A checkpoint is used only with the frames that it was made of.
"""

import random

import pytest

from penstock.logs.files.verify import verify
from penstock.logs.log import Durability, Frame, Gap
from penstock.testing import SimulatedFiles
from tests.logs.backends import INCARNATION, PARTITION, base_draft, comparable, draft, expected
from tests.logs.scripted_owner import FOLDER, open_log, segments

DRAFTS = [draft(number, 1, b"item %d" % number) for number in range(6)]


def written(*, rotated: bool = False, checkpoint: bool = False) -> SimulatedFiles:
    """Six frames without a published position."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    for step in DRAFTS:
        log.append([step])
    if rotated:
        log.rotate(base_draft(6))
    if checkpoint:
        log.write_checkpoint(b"the state", 1, 2, 6)
    log.close()
    files.remove(f"{FOLDER}/synced")
    files.kill()
    return files


def lose(files: SimulatedFiles, number: int) -> None:
    path = segments(files)[0]
    files.flip_bit(path, 8 * files.content(path).index(b"item %d" % number))


def opened(files: SimulatedFiles) -> tuple[list[Frame], list[Gap], list[Frame | Gap]]:
    """The frames and gaps that recovery yields, and the whole log after it."""
    log = open_log(files)
    found = list(log.recover())
    return [one for one in found if isinstance(one, Frame)], [one for one in found if isinstance(one, Gap)], list(log.frames())


def test_without_a_rotation_or_checkpoint_the_last_frame_may_be_torn() -> None:
    files = written()
    lose(files, 5)
    frames, gaps, _ = opened(files)
    assert comparable(frames) == expected(DRAFTS[:5])
    assert gaps == []


@pytest.mark.parametrize("number", range(6))
def test_a_lost_rotation_proves_that_the_segment_before_it_was_synced(number: int) -> None:
    files = written(rotated=True)
    newest = segments(files)[-1]
    files.put_file(newest, bytes(len(files.content(newest))))
    lose(files, number)
    frames, gaps, _ = opened(files)
    assert [frame.sequence for frame in frames] == [sequence for sequence in range(1, 7) if sequence != number + 1]
    assert [gap[:4] for gap in gaps] == [(number + 1, number + 1, number, number + 1)]


def test_a_lost_rotation_proves_that_a_shorter_segment_before_it_is_damaged() -> None:
    files = written(rotated=True)
    oldest, newest = segments(files)
    files.put_file(newest, b"")
    files.put_file(oldest, files.content(oldest)[:200])
    frames, gaps, _ = opened(files)
    assert [frame.sequence for frame in frames] == [1, 2]
    assert [gap[:4] for gap in gaps] == [(3, 6, 2, 6)]


def test_a_removed_rotation_proves_nothing_about_frames_appended_later() -> None:
    """A power cut has undone the removal of a segment. The log has frames beyond its name, appended later."""
    files = written()
    log = open_log(files)
    list(log.recover())
    log.append([draft(6, 1, b"item 6"), draft(7, 1, b"item 7")])
    lose(files, 7)
    files.put_file(f"{FOLDER}/{5:020}-{6:020}.log", b"")
    files.remove(f"{FOLDER}/synced")
    frames, gaps, _ = opened(files)
    assert [frame.sequence for frame in frames] == [1, 2, 3, 4, 5, 6]
    assert gaps == []


def test_a_checkpoint_proves_that_frames_before_it_were_synced() -> None:
    files = written(checkpoint=True)
    lose(files, 5)
    size = len(files.content(segments(files)[0]))
    frames, gaps, everything = opened(files)
    assert [bytes(frame.body) for frame in frames] == [b"the state"]
    assert gaps == []
    assert len(files.content(segments(files)[0])) == size
    assert [gap[:4] for gap in everything if isinstance(gap, Gap)] == [(6, 6, 5, 6)]


def test_other_frames_of_a_damaged_group_before_a_checkpoint_are_kept() -> None:
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    log.append(DRAFTS[:3])
    log.write_checkpoint(b"the state", 1, 2, 3)
    log.close()
    files.remove(f"{FOLDER}/synced")
    lose(files, 1)
    assert [gap[:4] for gap in verify(files, FOLDER, INCARNATION, PARTITION).gaps] == [(2, 2, 1, 2)]


def test_a_checkpoint_is_not_used_for_another_log_at_the_same_position() -> None:
    """All segments are lost, and the new log has frames of the same sequences and sizes."""
    files = written(checkpoint=True)
    for path in segments(files):
        files.remove(path)
    log = open_log(files)
    assert list(log.recover()) == []
    assert log.findings == ["the checkpoint does not fit the log and was ignored"]
    others = [draft(number, 1, b"ITEM %d" % number) for number in range(6)]
    for step in others:
        log.append([step])
    log.sync()
    assert comparable(open_log(files).recover()) == expected(others)


@pytest.mark.parametrize("durability", ["interval", "os"])
@pytest.mark.parametrize("seed", range(10))
def test_a_checkpoint_syncs_its_frames_in_every_mode(durability: Durability, seed: int) -> None:
    """Otherwise its frames could be lost, and it could match other frames written there later."""
    files = SimulatedFiles(random.Random(seed))
    log = open_log(files, durability)
    list(log.recover())
    for step in DRAFTS:
        log.append([step])
    log.write_checkpoint(b"the state", 1, 2, 6)
    files.crash()
    assert [frame.body for frame in comparable(open_log(files, durability).recover())] == [b"the state"]
