"""Walking a segment: whole frames come, damage is bounded by the next whole frame, and nothing else is taken for one."""

import pytest

from penstock.logs.api import Buffer, Draft, FrameType
from penstock.logs.files.segment import Owner, Piece, Segment, SegmentName, walk
from penstock.logs.frame import Encoder
from penstock.testing import SimulatedFiles
from penstock.words.errors import CorruptLog
from tests.logs.conformance import noise

OWNER = Owner(0xABC, 2)
PATH = "/segment.log"


def encoded(sequence: int, body: bytes, owner: Owner = OWNER) -> bytes:
    vector: list[Buffer] = []
    Encoder(*owner).encode(Draft(FrameType.DATA, sequence, 1, 0, 1, 2, [body]), sequence, 0, vector)
    return b"".join(vector)


def walked(data: bytes, first_sequence: int = 1) -> list[Piece]:
    files = SimulatedFiles()
    files.plant(PATH, data)
    segment = Segment(files, PATH, SegmentName(0, first_sequence), files.open(PATH, "read"))
    return list(walk(segment, 0, OWNER))


def sequences(pieces: list[Piece]) -> list[int | None]:
    return [piece.frame.sequence if piece.frame else None for piece in pieces]


FRAMES = [encoded(1, b"one"), encoded(2, noise(700_000)), encoded(3, b""), encoded(4, noise(5_000)), encoded(5, b"five")]


def test_small_and_large_frames_come_in_order() -> None:
    pieces = walked(b"".join(FRAMES))
    assert sequences(pieces) == [1, 2, 3, 4, 5]
    assert [(piece.end - piece.position) for piece in pieces] == list(map(len, FRAMES))


@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("place", [0, 30, 70, 74])
def test_damage_ends_at_the_next_whole_frame(lost: int, place: int) -> None:
    frames = [bytearray(frame) for frame in FRAMES]
    frames[lost][place] ^= 0xFF
    pieces = walked(b"".join(frames))
    assert sequences(pieces) == [None if number == lost else number + 1 for number in range(5)]
    assert pieces[lost].end - pieces[lost].position == len(frames[lost])
    assert "checksum" in pieces[lost].why


def test_a_payload_that_holds_old_frames_is_not_taken_for_the_log() -> None:
    """Someone queues a copy of the log itself: aligned, whole, ours, and older than what holds it."""
    old = encoded(1, b"an old frame")
    holder = bytearray(encoded(2, old + noise(100) + bytes(4)))
    holder[8] ^= 1  # its length can no longer be trusted, so the search goes through its body
    assert sequences(walked(old + bytes(holder) + encoded(3, b"next"))) == [1, None, 3]


def test_a_payload_full_of_magic_is_searched_through_quickly() -> None:
    holder = bytearray(encoded(1, noise(64) + b"PSTK" * 50_000 + noise(60_000)))
    holder[8] ^= 1
    assert sequences(walked(bytes(holder) + encoded(2, b"next"))) == [None, 2]


@pytest.mark.parametrize("other", [Owner(0xABC, 3), Owner(0xABD, 2)])
def test_a_whole_frame_of_another_partition_is_not_damage(other: Owner) -> None:
    with pytest.raises(CorruptLog, match="put the file back"):
        walked(encoded(1, b"ours") + encoded(2, b"theirs", other))
