"""Missing segment files are noticed in every durability mode, by the owner, by lock-free readers and by verify."""

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.repair import repair
from penstock.logs.files.verify import verify
from penstock.logs.log import DURABILITIES, Durability, Frame, Gap, ReadableLog
from penstock.testing import Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from tests.logs.backends import INCARNATION, PARTITION, base_draft, draft
from tests.logs.scripted_owner import FOLDER, open_log, segments

ITEMS = 6


def written(durability: Durability, *, segment_count: int = 1) -> SimulatedFiles:
    """Segments of six items each, published; the owner was killed."""
    files = SimulatedFiles()
    log = open_log(files, durability)
    list(log.recover())
    for number in range(segment_count):
        if number:
            log.rotate(base_draft(ITEMS * number))
        for offset in range(ITEMS * number, ITEMS * (number + 1)):
            log.append([draft(offset, 1, b"item %d" % offset)])
    log.sync()
    log.publish()
    files.kill()
    return files


def gaps_of(log: FileLog | PublishedLog) -> list[tuple[int, int]]:
    return [(gap.start, gap.stop) for gap in log.recover() if isinstance(gap, Gap)]


def reader(files: SimulatedFiles) -> PublishedLog:
    return PublishedLog(files, FOLDER, INCARNATION, PARTITION)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_the_only_segment_is_missing(durability: Durability) -> None:
    files = written(durability)
    files.remove(segments(files)[0])
    report = verify(files, FOLDER, INCARNATION, PARTITION)
    assert [(gap.start, gap.stop) for gap in report.damage] == [(0, ITEMS)]
    assert gaps_of(reader(files)) == [(0, ITEMS)]
    assert [(gap.start, gap.stop) for gap in reader(files).read(2, 3) if isinstance(gap, Gap)] == [(0, ITEMS)]
    assert [(gap.start, gap.stop) for gap in reader(files).frames() if isinstance(gap, Gap)] == [(0, ITEMS)]
    log = open_log(files, durability)
    assert gaps_of(log) == [(0, ITEMS)]
    assert log.wants_base


@pytest.mark.parametrize("durability", DURABILITIES)
def test_the_newest_segment_is_missing(durability: Durability) -> None:
    files = written(durability, segment_count=3)
    files.remove(segments(files)[-1])
    assert not verify(files, FOLDER, INCARNATION, PARTITION).sound
    assert gaps_of(reader(files)) == [(2 * ITEMS, 3 * ITEMS)]
    assert gaps_of(open_log(files, durability)) == [(2 * ITEMS, 3 * ITEMS)]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_the_only_segment_is_missing_and_the_opening_is_cut_off(durability: Durability) -> None:
    whole = written(durability)
    whole.remove(segments(whole)[0])
    for call in range(1, 40):
        files = whole.copy()
        files.fail(files.calls + call, "halt")
        try:
            list(open_log(files, durability).recover())
            break
        except Halt:
            files.kill()
            assert gaps_of(open_log(files, durability)) == [(0, ITEMS)], f"cut off at call {call}"
    else:
        pytest.fail("the opening takes more calls than were tried")


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_missing_only_segment_is_repaired(durability: Durability) -> None:
    files = written(durability)
    files.remove(segments(files)[0])
    done = repair(files, FOLDER, INCARNATION, PARTITION, clock=MicrosecondClock())
    assert [(gap.start, gap.stop) for gap in done.gaps] == [(0, ITEMS)]
    files.kill()
    assert verify(files, FOLDER, INCARNATION, PARTITION).sound
    assert gaps_of(open_log(files, durability)) == [(0, ITEMS)]


@pytest.mark.parametrize("durability", ["interval", "os"])
def test_losing_unsynced_frames_in_a_power_cut_is_not_damage(durability: Durability) -> None:
    for seed in range(20):
        files = written(durability, segment_count=2)
        files._rng.seed(seed)
        files.crash()
        assert verify(files, FOLDER, INCARNATION, PARTITION).sound
        assert gaps_of(open_log(files, durability)) == []


def test_missing_oldest_segments_are_repaired_by_one_gap_segment() -> None:
    files = written("fsync", segment_count=3)
    files.remove(segments(files)[0])
    offsets: list[int] = []

    def lost_front(log: ReadableLog, first_offset: int) -> list[Gap]:
        offsets.append(first_offset)
        return [Gap(1, 0, 2, ITEMS, FOLDER, "missing")]  # the first two were dropped on purpose

    done = repair(files, FOLDER, INCARNATION, PARTITION, clock=MicrosecondClock(), lost_front=lost_front)
    assert offsets == [ITEMS]
    assert [(gap.start, gap.stop) for gap in done.gaps] == [(2, ITEMS)]
    files.kill()
    log = open_log(files)
    assert gaps_of(log) == []
    assert log.first_offset == 2
    assert [found if isinstance(found, Gap) else found.base_offset for found in log.read(3, 8)][1:] == [6, 7]
    assert [(gap.start, gap.stop, gap.repaired) for gap in log.read(3, 4) if isinstance(gap, Gap)] == [(2, ITEMS, True)]
    assert verify(files, FOLDER, INCARNATION, PARTITION).sound


def test_a_segment_deleted_while_the_log_is_open_is_a_gap() -> None:
    files = written("fsync", segment_count=4)
    log = open_log(files)
    list(log.recover())
    files.remove(segments(files)[1])
    found = log.read(0, 4 * ITEMS)
    assert [frame.base_offset for frame in found if isinstance(frame, Frame)] == [*range(ITEMS), *range(2 * ITEMS, 4 * ITEMS)]
    assert [(gap.start, gap.stop) for gap in found if isinstance(gap, Gap)] == [(ITEMS, 2 * ITEMS)]
    assert [(gap.start, gap.stop) for gap in log.frames() if isinstance(gap, Gap)] == [(ITEMS, 2 * ITEMS)]
    assert [facts.base_offset for facts in log.segments()] == [0, 2 * ITEMS, 3 * ITEMS]
    log.append([draft(4 * ITEMS, 1, b"more")])
    log.sync()
