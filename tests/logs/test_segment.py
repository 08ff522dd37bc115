"""Scanning a segment: whole frames are returned, damage ends at the next whole frame.

The sparse index gives positions of frames, is read back as it was written, and is rebuilt when it is wrong.
"""

import struct

import pytest

from penstock.logs.files.segment import EVERY_BYTES, LogId, Piece, Segment, SegmentName, SparseIndex, scan, unpack_index
from penstock.logs.frame import FrameEncoder
from penstock.logs.log import Buffer, Draft, FrameType
from penstock.testing import SimulatedFiles
from penstock.words.errors import CorruptLog
from tests.logs.backends import base_draft, comparable, draft, expected, noise
from tests.logs.scripted_owner import FOLDER, open_log

LOG_ID = LogId(0xABC, 2)
PATH = "/segment.log"


def encoded(sequence: int, body: bytes, log_id: LogId = LOG_ID) -> bytes:
    vector: list[Buffer] = []
    FrameEncoder(*log_id).encode(Draft(FrameType.DATA, sequence, 1, 0, 1, 2, [body]), sequence, 0, vector)
    return b"".join(vector)


def scanned(data: bytes, first_sequence: int = 1) -> list[Piece]:
    files = SimulatedFiles()
    files.put_file(PATH, data)
    segment = Segment(files, PATH, SegmentName(0, first_sequence), files.open(PATH, "read"))
    return list(scan(segment, 0, LOG_ID))


def sequences(pieces: list[Piece]) -> list[int | None]:
    return [piece.frame.sequence if piece.frame else None for piece in pieces]


FRAMES = [encoded(1, b"one"), encoded(2, noise(700_000)), encoded(3, b""), encoded(4, noise(5_000)), encoded(5, b"five")]


def test_small_and_large_frames_are_returned_in_order() -> None:
    pieces = scanned(b"".join(FRAMES))
    assert sequences(pieces) == [1, 2, 3, 4, 5]
    assert [(piece.end - piece.position) for piece in pieces] == list(map(len, FRAMES))


@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("place", [0, 30, 70, 74])
def test_damage_ends_at_the_next_whole_frame(lost: int, place: int) -> None:
    frames = [bytearray(frame) for frame in FRAMES]
    frames[lost][place] ^= 0xFF
    pieces = scanned(b"".join(frames))
    assert sequences(pieces) == [None if number == lost else number + 1 for number in range(5)]
    assert pieces[lost].end - pieces[lost].position == len(frames[lost])
    assert "checksum" in pieces[lost].why


def test_a_payload_that_holds_old_frames_is_not_taken_for_the_log() -> None:
    """A payload may be a copy of the log itself: whole, aligned frames of this log with lower sequences."""
    old = encoded(1, b"an old frame")
    holder = bytearray(encoded(2, old + noise(100) + bytes(4)))
    holder[8] ^= 1  # its length can no longer be trusted, so the search goes through its body
    assert sequences(scanned(old + bytes(holder) + encoded(3, b"next"))) == [1, None, 3]


def test_a_payload_full_of_magic_is_searched_through_quickly() -> None:
    holder = bytearray(encoded(1, noise(64) + b"PSTK" * 50_000 + noise(60_000)))
    holder[8] ^= 1
    assert sequences(scanned(bytes(holder) + encoded(2, b"next"))) == [None, 2]


@pytest.mark.parametrize("other", [LogId(0xABC, 3), LogId(0xABD, 2)])
def test_a_whole_frame_of_another_partition_is_not_damage(other: LogId) -> None:
    with pytest.raises(CorruptLog, match="put the file back"):
        scanned(encoded(1, b"ours") + encoded(2, b"theirs", other))


IDX = f"{FOLDER}/{0:020}-{1:020}.idx"


def sample() -> SparseIndex:
    index = SparseIndex()
    for number in range(5):
        index.add(10 * number, 1_000 + number, 5_000 * number)
    index.extend(25_000, 1_004)
    return index


def test_floor_finds_the_last_entry_at_or_before() -> None:
    index = sample()
    assert [index.floor(offset) for offset in (0, 9, 10, 49, 1_000)] == [(0, 0), (0, 0), (10, 5_000), (40, 20_000), (40, 20_000)]
    assert SparseIndex().floor(7) == (-1, 0)


def test_an_index_is_unpacked_as_it_was_packed() -> None:
    index = sample()
    again = unpack_index(index.pack())
    assert again is not None
    assert [getattr(again, name) for name in SparseIndex.__slots__] == [getattr(index, name) for name in SparseIndex.__slots__]


def test_any_damage_to_an_index_file_is_noticed() -> None:
    data = sample().pack()
    for place in range(len(data)):
        if place not in (6, 7):  # reserved
            assert unpack_index(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) is None
        assert unpack_index(data[:place]) is None
    assert unpack_index(data + b"\0") is None


def filled() -> tuple[SimulatedFiles, list[int]]:
    """A closed log of frames, some of which get an index entry, and their offsets."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    for number in range(40):
        log.append([draft(number, 1, noise(1_000, number))])
    log.close()
    return files, list(range(40))


def check_reads(files: SimulatedFiles, offsets: list[int]) -> None:
    log = open_log(files)
    list(log.recover())
    for offset in reversed(offsets):
        assert comparable(log.read(offset, offset + 1)) == expected([draft(offset, 1, noise(1_000, offset))], offset + 1)
    log.close()


def test_an_index_has_an_entry_about_every_4_kib() -> None:
    files, _ = filled()
    index = unpack_index(files.content(IDX))
    assert index is not None
    steps = [later - earlier for earlier, later in zip(index.positions, index.positions[1:], strict=False)]
    assert len(steps) > 5
    assert all(EVERY_BYTES <= step < EVERY_BYTES + 1_100 for step in steps)


def test_a_wrong_index_is_rebuilt() -> None:
    files, offsets = filled()
    log = open_log(files)
    list(log.recover())
    log.rotate(base_draft(40))
    log.close()
    index = unpack_index(files.content(IDX))
    assert index is not None
    for number in range(len(index.positions)):
        index.positions[number] += 8
    files.put_file(IDX, index.pack())
    check_reads(files, offsets)


def test_the_index_has_the_documented_layout() -> None:
    data = sample().pack()
    assert struct.unpack_from("<4sHHI", data) == (b"PSIX", 1, 0, 5)
    assert struct.unpack_from("<Qqq", data, 16) == (25_000, 1_004, 1_004)
    assert struct.unpack_from("<5Q5q5Q", data, 40) == (*range(0, 50, 10), *range(1_000, 1_005), *range(0, 25_000, 5_000))
