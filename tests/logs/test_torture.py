"""A file log cut at each byte and with bits flipped: no wrong frame is returned, lost frames are gaps."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.logs.frame import HEADER_BYTES
from penstock.logs.log import Frame, FrameType, Gap
from penstock.testing import SimulatedFiles
from tests.logs.backends import ComparableFrame, base_draft, comparable, draft, expected, noise, state_draft
from tests.logs.scripted_owner import FOLDER, ScriptedOwner, check_survivors, open_log, segments

GROUPS = [
    [draft(0, 3, b"first")],
    [draft(3, 1, b"compressible" * 100)],
    [draft(4, 2, noise(700)), state_draft(6), draft(6, 1, b"x")],
    [state_draft(7, b"")],
    [draft(7, 5, noise(1_000, 1))],
    [draft(12, 1, b"last")],
]


class WrittenSegment:
    """A disk with `GROUPS` in one segment, and the positions at which frames and groups end."""

    def __init__(self, synced: int) -> None:
        """The first `synced` groups are synced one by one, the others only appended."""
        self.files = SimulatedFiles()
        log = open_log(self.files)
        list(log.recover())
        self.group_ends = [log.segment_bytes]
        for number, group in enumerate(GROUPS, 1):
            log.append(group)
            if number <= synced:
                log.sync()
            self.group_ends.append(log.segment_bytes)
        self.path = newest_segment(self.files)
        self.files.kill()

    def cut(self, size: int) -> SimulatedFiles:
        files = self.files.copy()
        files.put_file(self.path, files.content(self.path)[:size])
        return files

    def whole_groups(self, size: int) -> int:
        """How many groups end at or before a size."""
        return sum(end <= size for end in self.group_ends) - 1


@cache
def written(synced: int = len(GROUPS)) -> WrittenSegment:
    return WrittenSegment(synced)


def newest_segment(files: SimulatedFiles) -> str:
    return segments(files)[-1]


def recovered(files: SimulatedFiles) -> tuple[FileLog, list[Frame | Gap]]:
    log = open_log(files)
    return log, list(log.recover())


def frames_in(found: Sequence[Frame | Gap]) -> list[ComparableFrame]:
    return comparable(frame for frame in found if isinstance(frame, Frame))


def gaps_in(found: Sequence[Frame | Gap]) -> list[Gap]:
    return [gap for gap in found if isinstance(gap, Gap)]


# -- cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", ["first two groups synced", "synced position deleted"])
def test_cut_at_every_unsynced_byte(published: str) -> None:
    """A torn tail: every whole group is kept, the rest is cut, and the findings say how much."""
    disk = written(synced=2)
    lowest = 0 if "deleted" in published else disk.group_ends[2]
    for size in range(lowest, disk.group_ends[-1] + 1):
        files = disk.cut(size)
        if "deleted" in published:
            files.remove(f"{FOLDER}/synced")
        whole = disk.whole_groups(size)
        log, found = recovered(files.copy())
        assert comparable(found) == expected(chain(*GROUPS[:whole]))
        torn_bytes = size - disk.group_ends[whole]
        assert any(str(torn_bytes) in note for note in log.findings) == (torn_bytes > 0), log.findings
        if size % 16 == 0:
            check_survivors(files, GROUPS[:whole], [])


def test_cut_at_every_synced_byte() -> None:
    """Damage: remaining frames are returned, the rest is a Gap with its sequences and offsets, and nothing is cut."""
    disk, offsets = written(), [0, 3, 4, 6, 6, 7, 7, 12, 13]
    for size in range(disk.group_ends[1], disk.group_ends[-1]):
        files = disk.cut(size)
        log, found = recovered(files)
        *frames, gap = found
        assert isinstance(gap, Gap), f"cut to {size}: silence"
        served = comparable(frames)
        assert served == expected(chain(*GROUPS))[: len(served)]
        assert len(served) >= len(list(chain(*GROUPS[: disk.whole_groups(size)])))
        assert (gap.first_sequence, gap.last_sequence) == (len(served) + 1, 8)
        assert (gap.start, gap.stop) == (offsets[len(served)], 13)
        assert log.wants_base
        assert files.content(disk.path) == disk.files.content(disk.path)[:size]


def test_after_the_loss_of_synced_bytes_the_log_continues_in_a_new_segment() -> None:
    disk = written()
    files = disk.cut(disk.group_ends[-2] + 10)
    log, found = recovered(files)
    log.rotate(base_draft(13))
    log.append([draft(13, 1, b"goes on")])
    log.sync()
    again, found = recovered(files)
    assert comparable(found) == expected([base_draft(13), draft(13, 1, b"goes on")], first_sequence=9)
    everything = list(again.frames())
    assert [(gap.first_sequence, gap.last_sequence, gap.start, gap.stop) for gap in gaps_in(everything)] == [(8, 8, 12, 13)]
    assert frames_in(everything) == expected(chain(*GROUPS))[:-1] + comparable(found)


def test_a_cut_torn_tail_does_not_come_back() -> None:
    """Not even when the log has grown past it."""
    disk = written(synced=2)
    files = disk.cut(disk.group_ends[-1] - 3)
    log, _ = recovered(files)
    log.append([draft(12, 1, b"another")])
    assert comparable(log.read(12, 13)) == expected([draft(12, 1, b"another")], first_sequence=8)
    log.sync()
    files.crash()
    again, found = recovered(files)
    assert comparable(found) == expected([*chain(*GROUPS[:-1]), draft(12, 1, b"another")])
    assert again.findings == []


# -- flip --------------------------------------------------------------------------------------------


def flipped(disk: WrittenSegment, bits: Iterator[int]) -> Iterator[tuple[int, SimulatedFiles]]:
    for bit in bits:
        files = disk.files.copy()
        files.flip_bit(disk.path, bit)
        yield bit, files


def bits_of_header(frame_start: int) -> Iterator[int]:
    return iter(range(frame_start * 8, (frame_start + HEADER_BYTES) * 8))


def bits_of_body(frame_start: int, size: int) -> Iterator[int]:
    """One bit of each byte of a body and its checksum."""
    rng = random.Random(frame_start)
    return (byte * 8 + rng.randrange(8) for byte in range(frame_start + HEADER_BYTES, frame_start + HEADER_BYTES + size + 4))


def check_one_lost(files: SimulatedFiles, lost: int) -> None:
    """Frame number `lost` (alone in its group) is a Gap, all others are returned, by every way of reading."""
    wanted = expected(chain(*GROUPS))
    missing = wanted.pop(lost - 1)
    log, found = recovered(files)
    for frames in (found, list(log.frames())):
        assert frames_in(frames) == wanted
        assert [(gap.first_sequence, gap.last_sequence, gap.start, gap.stop) for gap in gaps_in(frames)] == [
            (lost, lost, missing.base, missing.base + missing.count)
        ]
    around = log.read(missing.base, missing.base + missing.count)
    assert len(gaps_in(around)) == len(around) == 1
    data = [frame for frame in wanted if frame.columns]
    assert frames_in(log.read(0, 13)) == data
    assert [frames_in(log.read(frame.base, frame.base + 1)) for frame in data] == [[frame] for frame in data]


@pytest.mark.parametrize("group", [1, 4], ids=["compressed", "noise"])
def test_every_bit_of_a_header_flipped(group: int) -> None:
    disk = written()
    number = len(list(chain(*GROUPS[:group]))) + 1
    for _, files in flipped(disk, bits_of_header(disk.group_ends[group])):
        check_one_lost(files, number)


@pytest.mark.parametrize("group", [1, 4], ids=["compressed", "noise"])
def test_bits_of_a_body_flipped(group: int) -> None:
    disk = written()
    start, end = disk.group_ends[group : group + 2]
    stored = end - start - HEADER_BYTES - 4 - 7  # the padding is at most so long, and not part of the body
    number = len(list(chain(*GROUPS[:group]))) + 1
    for _, files in flipped(disk, bits_of_body(start, stored)):
        check_one_lost(files, number)


def test_any_bit_of_the_whole_log_flipped() -> None:
    """No wrong frame is returned, at most one group is affected, and a missing frame is always a Gap."""
    disk, wanted = written(), expected(chain(*GROUPS))
    rng = random.Random(1)
    for _, files in flipped(disk, (byte * 8 + rng.randrange(8) for byte in range(disk.group_ends[-1]))):
        _, found = recovered(files)
        served = frames_in(found)
        assert [frame for frame in wanted if frame in served] == served
        lost = {frame.sequence for frame in wanted} - {frame.sequence for frame in served}
        told_lost = {number for gap in gaps_in(found) for number in range(gap.first_sequence, gap.last_sequence + 1)}
        assert lost == told_lost
        assert lost <= {3, 4, 5} or len(lost) == 1


def test_with_a_damaged_base_replay_begins_at_the_one_before() -> None:
    """Replay loses nothing, because a Base only repeats earlier frames. A listing of the log has a Gap for it."""
    files, history = lived()
    files.flip_bit(newest_segment(files), HEADER_BYTES * 8)
    log, found = recovered(files)
    replayed = comparable(found)
    (gap,) = gaps_in(everything := list(log.frames()))
    assert gap.first_sequence == gap.last_sequence
    assert history[gap.first_sequence - 1].type is FrameType.BASE
    rest = [frame for frame in history if frame.sequence != gap.first_sequence]
    assert frames_in(everything) == rest
    assert replayed == rest[-len(replayed) :]
    assert replayed[0].type is FrameType.BASE
    assert replayed[0].sequence < gap.first_sequence
    assert any("Base" in note for note in log.findings)


def lived() -> tuple[SimulatedFiles, list[ComparableFrame]]:
    """A disk with several segments and no checkpoint, and all the frames on it."""
    owner = ScriptedOwner(SimulatedFiles())
    owner.run()
    owner.files.remove(f"{FOLDER}/checkpoint")
    return owner.files, expected(chain(*owner.synced, *owner.unsynced))


def test_with_every_base_damaged_replay_begins_at_the_start() -> None:
    files, history = lived()
    for path in segments(files)[1:]:
        files.flip_bit(path, HEADER_BYTES * 8)
    _, found = recovered(files)
    assert frames_in(found) == [frame for frame in history if frame.type is not FrameType.BASE]
