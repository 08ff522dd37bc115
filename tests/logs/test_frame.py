"""The bytes of a frame are those that docs/format.md draws, and nothing but a whole frame is taken for one."""

import struct
from array import array

import pytest
from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st

from penstock.logs.api import Buffer, Draft, FrameType
from penstock.logs.frame import (
    AFTER_SYNC,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MORE,
    ZSTD,
    Damaged,
    Encoder,
    frame_bytes,
    parse_header,
    unpack_body,
)
from penstock.words.errors import CorruptLog, InvalidRequest

DRAFT = Draft(FrameType.DATA, base=5, count=2, columns=3, elapsed=-7, wall=1_767_225_600_000_000, parts=[b"abc", b"defg"])


def encoded(draft: Draft, flags: int = 0, compression: bool = True) -> bytes:
    vector: list[Buffer] = []
    size = Encoder(0x1122334455667788, 9, compression).encode(draft, 77, flags, vector)
    data = b"".join(vector)
    assert len(data) == size
    return data


def resealed(header: bytes) -> bytes:
    """A header with a checksum that holds."""
    checksum: int = value(header[:68])
    return header[:68] + checksum.to_bytes(4, "little")


def test_the_layout_is_the_documented_one() -> None:
    body = b"abcdefg"
    header = struct.pack("<4sBBHIIIIIQQQqq", b"PSTK", 1, 1, 1, 7, 7, 2, 9, 3, 0x1122334455667788, 77, 5, 1_767_225_600_000_000, -7)
    whole = resealed(header) + body + value(body).to_bytes(4, "little")
    assert encoded(DRAFT, MORE) == whole + bytes(-len(whole) % 8)
    assert HEADER_BYTES == 72


@given(st.lists(st.binary(max_size=300)), st.sampled_from([bytes, bytearray, memoryview]))
def test_what_is_read_is_what_was_written(parts: list[bytes], kind: type[Buffer]) -> None:
    data = encoded(DRAFT._replace(parts=[kind(part) for part in parts]), AFTER_SYNC)
    header = parse_header(data[:HEADER_BYTES])
    frame = unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])
    assert bytes(frame.body) == b"".join(parts)
    assert (frame.type, frame.sequence, *frame[2:-1]) == (FrameType.DATA, 77, 5, 2, 3, -7, 1_767_225_600_000_000)
    assert len(data) == frame_bytes(header.stored_bytes)
    assert len(data) % 8 == 0


@pytest.mark.parametrize("numbers", [10, 10_000])
def test_a_view_of_wider_units_is_written_by_its_bytes(numbers: int) -> None:
    view = memoryview(array("I", range(numbers)))
    data = encoded(DRAFT._replace(parts=[b"x", view]), compression=False)
    header = parse_header(data[:HEADER_BYTES])
    assert unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4]).body == b"x" + view.tobytes()


def test_every_flipped_bit_of_a_header_shows() -> None:
    header = encoded(DRAFT)[:HEADER_BYTES]
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            parse_header(bytes(flipped))


@pytest.mark.parametrize(("place", "number"), [(4, 2), (5, 9), (6, 0x80)], ids=["version", "type", "flag"])
def test_a_newer_format_is_not_taken_for_damage(place: int, number: int) -> None:
    header = bytearray(encoded(DRAFT)[:HEADER_BYTES])
    header[place] = number
    with pytest.raises(CorruptLog, match=r"newer format.*; upgrade"):
        parse_header(resealed(bytes(header)))


def test_a_body_is_compressed_when_that_saves_space() -> None:
    data = encoded(DRAFT._replace(parts=[b"0123456789" * 100]))
    header = parse_header(data[:HEADER_BYTES])
    assert header.flags == ZSTD
    assert (header.raw_bytes, header.stored_bytes < 100) == (1000, True)
    assert not parse_header(encoded(DRAFT._replace(parts=[b"0123456789" * 100]), compression=False)[:HEADER_BYTES]).flags


@pytest.mark.parametrize("claimed", [999, 1001, MAX_BODY_BYTES + 1, 0])
def test_a_compressed_body_of_another_size_than_claimed_is_damage(claimed: int) -> None:
    data = encoded(DRAFT._replace(parts=[b"0123456789" * 100]))
    header = parse_header(data[:HEADER_BYTES])._replace(raw_bytes=claimed)
    with pytest.raises(Damaged, match="expand"):
        unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])


@pytest.mark.parametrize(
    "wrong", [DRAFT._replace(base=-1), DRAFT._replace(count=1 << 32), DRAFT._replace(columns=-1), DRAFT._replace(wall=1 << 63)]
)
def test_a_number_that_does_not_fit_is_refused_and_nothing_added(wrong: Draft) -> None:
    vector: list[Buffer] = []
    with pytest.raises(InvalidRequest, match="; "):
        Encoder(1, 1).encode(wrong, 1, 0, vector)
    assert vector == []
