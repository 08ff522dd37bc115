"""Each file call of a drop or a rewrite fails once: the log opens to the same state and serves all kept items."""

import contextlib
import errno
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.logs.files.verify import verify
from penstock.logs.log import FrameType
from penstock.testing import Fault, Halt, SimulatedFiles
from penstock.words.errors import CorruptLog, InvalidRequest, StorageFailed
from tests.logs.backends import INCARNATION, PARTITION, ComparableFrame, base_draft, comparable
from tests.logs.file_calls import FileCalls, calls_of
from tests.logs.items import fill, items_draft, payload, recovered, runs, served_items
from tests.logs.scripted_owner import FOLDER, open_log, segments

STOP = 120
KEPT = [0, 14, 15, 30, 50, 70]


class RetentionStep(NamedTuple):
    """A drop or rewrite, and the items that must be readable even if it fails."""

    do: Callable[[FileLog], int]
    kept: set[int]
    segments: int
    """The number of segments after it."""


WORKS = {
    "drop": RetentionStep(lambda log: log.drop(2), set(range(48, STOP)), 3),
    "rewrite": RetentionStep(lambda log: log.rewrite(0, 2, runs(KEPT)), {*KEPT, *range(72, STOP)}, 3),
    "rewrite of one": RetentionStep(lambda log: log.rewrite(1, 1, runs(KEPT)), {*range(24), 30, *range(48, STOP)}, 5),
    "rewrite to nothing": RetentionStep(lambda log: log.rewrite(1, 2, []), {*range(24), *range(72, STOP)}, 4),
}


@cache
def filled(seed: int = 0) -> tuple[SimulatedFiles, tuple[ComparableFrame, ...]]:
    """A closed log of five segments, and the frames that recovery yields."""
    files = SimulatedFiles(random.Random(seed))
    log = open_log(files)
    list(log.recover())
    fill(log)
    log.close()
    files.kill()
    return files, tuple(recovered(open_log(files.copy())))


def opened(seed: int = 0) -> tuple[SimulatedFiles, FileLog]:
    files = filled(seed)[0].copy()
    log = open_log(files)
    list(log.recover())
    return files, log


@cache
def calls(work: str) -> FileCalls:
    files, log = opened()
    made = calls_of(files, lambda: WORKS[work].do(log))
    check(files.copy(), work)
    check_done(files, work)
    return made


def check(files: SimulatedFiles, work: str) -> None:
    """Open the log: same state, every kept item served, nothing else lost, and the step can be done again."""
    files.kill()
    report = verify(files, FOLDER, INCARNATION, PARTITION)
    assert report.sound
    assert not [entry for entry in report.side_files if "does not fit" in entry], "an index of replaced bytes is left"
    log = open_log(files)
    assert tuple(recovered(log)) == filled()[1]
    check_serves(log, work)
    if len(log.segments()) > WORKS[work].segments:
        complete(log, work)
    check_serves(log, work)
    log.append([items_draft(STOP, STOP + 1)])
    log.sync()
    log = open_log(files)
    list(log.recover())
    assert served_items(log.read(STOP, STOP + 1)).items == {STOP: payload(STOP)}
    leftovers = [path for path in files.contents() if path.startswith(FOLDER) and path.endswith(".tmp")]
    assert leftovers in ([], [f"{FOLDER}/checkpoint.tmp"])


def complete(log: FileLog, work: str) -> None:
    """Do the drop or rewrite again on the segments that are left."""
    over = len(log.segments()) - WORKS[work].segments
    if work == "drop":
        log.drop(over)
    else:
        first = 0 if work == "rewrite" else 1
        log.rewrite(first, first + over, runs(KEPT))


def check_serves(log: FileLog, work: str) -> None:
    """All ways of reading return the kept items."""
    found = served_items(log.read(0, STOP))
    assert WORKS[work].kept <= {offset for offset, content in found.items.items() if content}
    assert all("retention" in gap.why for gap in found.gaps)
    assert served_items(log.frames()).gaps == []
    assert served_items(log.frames()).items == found.items
    for offset in sorted(WORKS[work].kept)[::7]:
        assert served_items(log.read(offset, offset + 1)).items[offset] == payload(offset)
    assert all(not gap.start <= offset < gap.stop for gap in found.gaps for offset in WORKS[work].kept)


def check_done(files: SimulatedFiles, work: str) -> None:
    log = open_log(files)
    list(log.recover())
    assert len(log.segments()) == WORKS[work].segments
    assert len(segments(files)) == WORKS[work].segments
    indexes = [path for path in files.contents() if path.endswith(".idx")]
    assert {path.removesuffix(".idx") for path in indexes} <= {path.removesuffix(".log") for path in segments(files)}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC, "short", "torn"], ids=["EIO", "ENOSPC", "short", "torn"])
def test_any_call_may_fail(work: str, how: Fault) -> None:
    for number in calls(work).all if how == errno.EIO else calls(work).changing:
        files, log = opened()
        files.fail(files.calls + number, how)
        try:
            WORKS[work].do(log)
        except StorageFailed:
            check_append_works(log, work)
        files.clear_faults()
        crashed = files.copy()
        crashed.crash()
        check(files, work)
        check(crashed, work)


def check_append_works(log: FileLog, work: str) -> None:
    """The owner that met the failure can read all kept items, at once or after a reset."""
    check_serves(log, work)
    with contextlib.suppress(StorageFailed):
        log.append([items_draft(STOP, STOP + 1)])
    log.reset()
    assert comparable(log.recover()) == list(filled()[1])
    check_serves(log, work)


@pytest.mark.parametrize("work", WORKS)
def test_the_process_may_be_killed_at_any_call(work: str) -> None:
    for number in calls(work).changing:
        for seed in range(3):
            check(ended_at(work, number, seed), work)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("seed", range(8))
def test_the_power_may_be_cut_at_any_call(work: str, seed: int) -> None:
    for number in calls(work).changing:
        files = ended_at(work, number, seed)
        files.crash()
        check(files, work)


def ended_at(work: str, number: int, seed: int) -> SimulatedFiles:
    files, log = opened(seed)
    files.fail(files.calls + number, "halt")
    with pytest.raises(Halt):
        WORKS[work].do(log)
    return files


def test_a_rewrite_for_which_there_is_no_space_changes_nothing() -> None:
    files, log = opened()
    before = files.contents()
    files.set_free_bytes(100)
    with pytest.raises(StorageFailed, match="full"):
        log.rewrite(0, 2, runs(KEPT))
    files.set_free_bytes(None)
    assert files.contents() == before
    log.append([items_draft(STOP, STOP + 1)])
    assert log.rewrite(0, 2, runs(KEPT)) > 0


# -- what recovery must not do -----------------------------------------------------------------------


def lose_base(files: SimulatedFiles, path: str) -> None:
    files.flip_bit(path, 8 * 80)


def without_checkpoint(*works: str) -> SimulatedFiles:
    files, log = opened()
    for work in works:
        WORKS[work].do(log)
    files.kill()
    if files.exists(f"{FOLDER}/checkpoint"):
        files.remove(f"{FOLDER}/checkpoint")
    return files


def test_recovery_begins_at_an_older_base_after_the_rewritten_segment() -> None:
    files = without_checkpoint("rewrite")
    lose_base(files, segments(files)[-1])
    log = open_log(files)
    found = recovered(log)
    assert (found[0].type, found[0].sequence) == (FrameType.BASE, 27)
    assert found[-1].sequence == 44


def test_recovery_never_crosses_a_rewritten_segment() -> None:
    files = without_checkpoint("rewrite")
    for path in segments(files)[1:]:
        lose_base(files, path)
    before = files.contents()
    log = open_log(files)
    with pytest.raises(CorruptLog, match=r"no Base .*; run verify"):
        list(log.recover())
    assert {path: data for path, data in files.contents().items() if not path.endswith("LOCK")} == {
        path: data for path, data in before.items() if not path.endswith("LOCK")
    }


def test_recovery_never_crosses_a_rewritten_segment_whose_start_is_damaged() -> None:
    """Its first SKIP is lost; the others show that it was rewritten."""
    files = without_checkpoint("rewrite of one")
    for path in segments(files)[1:]:
        lose_base(files, path)
    files.flip_bit(segments(files)[1], 8 * 20)
    with pytest.raises(CorruptLog, match="no Base"):
        list(open_log(files).recover())


def test_recovery_begins_at_a_checkpoint_if_no_base_is_readable() -> None:
    files, log = opened()
    WORKS["rewrite"].do(log)
    log.write_checkpoint(b"the state", 1, 2, STOP)
    files.kill()
    for path in segments(files)[1:]:
        lose_base(files, path)
    assert [frame.body for frame in recovered(open_log(files))] == [b"the state"]


def test_a_log_without_a_readable_base_after_a_drop_does_not_open() -> None:
    files = without_checkpoint("drop")
    for path in segments(files):
        lose_base(files, path)
    with pytest.raises(CorruptLog, match="no Base"):
        list(open_log(files).recover())


@pytest.mark.parametrize("work", ["drop", "rewrite"])
def test_the_last_readable_base_is_not_removed(work: str) -> None:
    """The newest segments lost their Bases, so the Base from which the log was replayed is needed until the next."""
    files = without_checkpoint()
    for path in segments(files)[2:]:
        lose_base(files, path)
    log = open_log(files)
    list(log.recover())
    with pytest.raises(InvalidRequest, match="rotate"):
        WORKS[work].do(log)
    log.rotate(base_draft(STOP))
    assert WORKS[work].do(log) > 0
    assert [frame.sequence for frame in recovered(open_log(files))] == [45]


def test_a_checkpoint_in_a_rewritten_segment_is_not_used() -> None:
    files, log = opened()
    log.write_checkpoint(b"the state", 1, 2, STOP)
    for _ in range(3):
        log.rotate(base_draft(STOP))
    log.rewrite(4, 4, [])
    files.kill()
    for path in segments(files)[5:]:
        lose_base(files, path)
    with pytest.raises(CorruptLog, match="no Base"):
        list(open_log(files).recover())
