"""The bytes of a frame are those that docs/format.md draws, and nothing but a whole frame is taken for one.

Compression pays where it can and keeps out of the way where it cannot.

SKIP and GAP frames: their bytes, and how logs read them.
"""

import random
import struct
from array import array

import msgspec
import pytest
from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st

from penstock.logs.frame import (
    AFTER_SYNC,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_SKIPPED,
    MORE_IN_GROUP,
    ZSTD,
    Compressor,
    DamagedFrame,
    FrameEncoder,
    decompress,
    frame_bytes,
    gap_draft,
    parse_header,
    skip_draft,
    unpack_body,
)
from penstock.logs.log import Buffer, Draft, Frame, FrameType, Gap
from penstock.testing import SimulatedFiles
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog, InvalidRequest
from tests.logs.backends import INCARNATION, PARTITION, base_draft, comparable, draft, expected
from tests.logs.scripted_owner import FOLDER, open_log

DRAFT = Draft(FrameType.DATA, base_offset=5, count=2, column_bits=3, elapsed=-7, wall=1_767_225_600_000_000, parts=[b"abc", b"defg"])


def encoded(draft: Draft, flags: int = 0, compression: bool = True) -> bytes:
    vector: list[Buffer] = []
    size = FrameEncoder(0x1122334455667788, 9, compression).encode(draft, 77, flags, vector)
    data = b"".join(vector)
    assert len(data) == size
    return data


def resealed(header: bytes) -> bytes:
    """A header with the right checksum."""
    checksum: int = value(header[:68])
    return header[:68] + checksum.to_bytes(4, "little")


def test_the_layout_is_the_documented_one() -> None:
    body = b"abcdefg"
    header = struct.pack("<4sBBHIIIIIQQQqq", b"PSTK", 1, 1, 1, 7, 7, 2, 9, 3, 0x1122334455667788, 77, 5, 1_767_225_600_000_000, -7)
    whole = resealed(header) + body + value(body).to_bytes(4, "little")
    assert encoded(DRAFT, MORE_IN_GROUP) == whole + bytes(-len(whole) % 8)
    assert HEADER_BYTES == 72


@given(st.lists(st.binary(max_size=300)), st.sampled_from([bytes, bytearray, memoryview]))
def test_a_decoded_frame_equals_the_draft(parts: list[bytes], kind: type[Buffer]) -> None:
    data = encoded(DRAFT._replace(parts=[kind(part) for part in parts]), AFTER_SYNC)
    header = parse_header(data[:HEADER_BYTES])
    frame = unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])
    assert bytes(frame.body) == b"".join(parts)
    assert (frame.type, frame.sequence, *frame[2:-1]) == (FrameType.DATA, 77, 5, 2, 3, -7, 1_767_225_600_000_000)
    assert len(data) == frame_bytes(header.stored_bytes)
    assert len(data) % 8 == 0


@pytest.mark.parametrize("numbers", [10, 10_000])
def test_a_memoryview_of_wider_units_is_written_as_bytes(numbers: int) -> None:
    view = memoryview(array("I", range(numbers)))
    data = encoded(DRAFT._replace(parts=[b"x", view]), compression=False)
    header = parse_header(data[:HEADER_BYTES])
    assert unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4]).body == b"x" + view.tobytes()


def test_every_flipped_bit_of_a_header_is_found() -> None:
    header = encoded(DRAFT)[:HEADER_BYTES]
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFrame):
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
    with pytest.raises(DamagedFrame, match="expand"):
        unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])


@pytest.mark.parametrize(
    "wrong", [DRAFT._replace(base_offset=-1), DRAFT._replace(count=1 << 32), DRAFT._replace(column_bits=-1), DRAFT._replace(wall=1 << 63)]
)
def test_a_number_that_does_not_fit_is_refused_and_adds_nothing(wrong: Draft) -> None:
    vector: list[Buffer] = []
    with pytest.raises(InvalidRequest, match="; "):
        FrameEncoder(1, 1).encode(wrong, 1, 0, vector)
    assert vector == []


TEXT = b'{"order": 1, "customer": "kakariki"}' * 400
NOISE = random.Random(1).randbytes(len(TEXT))


def attempts(compressor: Compressor, body: bytes, times: int) -> int:
    """How often a compressible body was stored compressed."""
    return sum(compressor.compress([body], len(body)) is not None for _ in range(times))


def test_a_compressed_body_decompresses_to_the_same_bytes() -> None:
    packed = Compressor().compress([TEXT[:100], TEXT[100:]], len(TEXT))
    assert packed is not None
    assert len(packed) < len(TEXT) // 10
    assert decompress(memoryview(packed), len(TEXT)) == TEXT


def test_compression_is_tried_less_often_after_bodies_that_do_not_compress() -> None:
    compressor = Compressor()
    assert attempts(compressor, NOISE, 5_000) == 0
    # It skips bodies now: text is stored uncompressed until the next try, and always compressed after it.
    results = [compressor.compress([TEXT], len(TEXT)) is not None for _ in range(MAX_SKIPPED + 1)]
    assert results.count(False) > MAX_SKIPPED // 4
    assert results == sorted(results)
    assert attempts(compressor, TEXT, 10) == 10


def test_a_body_that_saves_less_than_five_percent_is_not_compressed() -> None:
    mostly_noise = NOISE[:980] + bytes(20)
    assert Compressor().compress([mostly_noise], 1000) is None
    assert Compressor().compress([NOISE[:900] + bytes(100)], 1000) is not None


def test_decompress_refuses_another_size() -> None:
    packed = Compressor().compress([bytes(1 << 20)], 1 << 20)
    assert packed is not None
    assert decompress(memoryview(packed), 1000) is None
    assert decompress(memoryview(packed), (1 << 20) + 1) is None
    assert decompress(memoryview(packed + b"more"), 1 << 20) is None
    assert decompress(memoryview(packed[:-1]), 1 << 20) is None
    assert decompress(memoryview(b"not zstd at all"), 10) is None


LOST = Gap(3, 5, 10, 17, "elsewhere", "a frame body does not match its checksum", repaired=True)


def packed(kind: int, flags: int, count: int, sequence: int, base: int, body: bytes) -> bytes:
    """A frame as docs/format.md shows it."""
    fields = (b"PSTK", 1, kind, flags, len(body), len(body), count, PARTITION, 0, INCARNATION, sequence, base, 1_000, 2_000)
    header = struct.pack("<4sBBHIIIIIQQQqq", *fields)
    frame = header + struct.pack("<I", value(header)) + body + struct.pack("<I", value(body))
    return frame + bytes(-len(frame) % 8)


SKIP = packed(4, 0, 0, 5, 17, b"")
GAP = packed(5, 8, 1, 5, 17, msgspec.msgpack.encode([3, 5, 10, 17, LOST.why]))


def framed(drafted: object, sequence: int, flags: int = 0) -> bytes:
    vector: list[bytes | bytearray | memoryview] = []
    FrameEncoder(INCARNATION, PARTITION).encode(drafted, sequence, flags, vector)  # type: ignore[arg-type]
    return b"".join(vector)


def test_the_bytes_of_skip_and_gap_frames() -> None:
    assert framed(skip_draft(17, Moment(2_000, 1_000)), 5) == SKIP
    assert framed(gap_draft(LOST, Moment(2_000, 1_000)), 5, 8) == GAP


def read_after(*pieces: bytes) -> list[Frame | Gap]:
    """The frames of a log whose first segment has frames 1 and 2 and then these bytes; the second begins with frame
    6."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    log.append([draft(0, 10, b"first"), draft(10, 0, b"second")])
    log.rotate(base_draft(17))
    log.close()
    path = f"{FOLDER}/{0:020}-{1:020}.log"
    files.put_file(path, files.content(path) + b"".join(pieces))
    newer = f"{FOLDER}/{17:020}-"
    (old,) = [path for path in files.contents() if path.startswith(newer) and path.endswith(".log")]
    files.put_file(f"{newer}{6:020}.log", packed(3, 8, 1, 6, 17, b"the whole state"))
    for gone in (old, old.removesuffix(".log") + ".idx", f"{FOLDER}/synced"):
        files.remove(gone)
    log = open_log(files)
    list(log.recover())
    return list(log.frames())


def test_missing_frames_without_skip_or_gap_are_damage() -> None:
    (gap,) = [found for found in read_after() if isinstance(found, Gap)]
    assert gap[:4] == (3, 5, 10, 17)
    assert not gap.repaired


def test_a_skip_explains_missing_frames_and_is_not_returned() -> None:
    found = comparable(read_after(SKIP))
    assert [(frame.type, frame.sequence) for frame in found] == [(FrameType.DATA, 1), (FrameType.DATA, 2), (FrameType.BASE, 6)]
    assert found[:2] == expected([draft(0, 10, b"first"), draft(10, 0, b"second")])


def test_a_skip_after_damage_does_not_hide_the_damage() -> None:
    (gap,) = [found for found in read_after(packed(1, 0, 1, 4, 10, b"x")[:-16] + bytes(16), SKIP) if isinstance(found, Gap)]
    assert gap[:4] == (3, 5, 10, 17)


def test_a_gap_frame_is_returned_as_a_gap() -> None:
    found = read_after(GAP)
    (gap,) = [one for one in found if isinstance(one, Gap)]
    assert gap == LOST._replace(where=gap.where)
    assert f"{0:020}-{1:020}.log bytes " in gap.where
    assert len(found) == 4


def test_new_damage_before_a_gap_frame_is_another_gap() -> None:
    later = packed(5, 8, 1, 5, 17, msgspec.msgpack.encode([5, 5, 15, 17, "why"]))
    gaps = [one for one in read_after(bytes(80), later) if isinstance(one, Gap)]
    assert [(*gap[:4], gap.repaired) for gap in gaps] == [(3, 4, 10, 15, False), (5, 5, 15, 17, True)]


def test_a_gap_frame_that_cannot_be_decoded_is_refused() -> None:
    with pytest.raises(CorruptLog, match="newer Penstock"):
        read_after(packed(5, 8, 1, 5, 17, b"\xc1"))
