"""SKIP and GAP frames: their bytes, and how logs read them."""

import struct

import msgspec
import pytest
from google_crc32c import value

from penstock.logs import marks
from penstock.logs.api import Frame, FrameType, Gap
from penstock.logs.frame import Encoder
from penstock.testing import SimulatedFiles
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from tests.logs.conformance import INCARNATION, PARTITION, base_draft, draft, expected, told
from tests.logs.histories import FOLDER, open_log

LOST = Gap(3, 5, 10, 17, "elsewhere", "a frame body does not match its checksum", mended=True)


def packed(kind: int, flags: int, count: int, sequence: int, base: int, body: bytes) -> bytes:
    """A frame as docs/format.md draws it."""
    fields = (b"PSTK", 1, kind, flags, len(body), len(body), count, PARTITION, 0, INCARNATION, sequence, base, 1_000, 2_000)
    header = struct.pack("<4sBBHIIIIIQQQqq", *fields)
    frame = header + struct.pack("<I", value(header)) + body + struct.pack("<I", value(body))
    return frame + bytes(-len(frame) % 8)


SKIP = packed(4, 0, 0, 5, 17, b"")
GAP = packed(5, 8, 1, 5, 17, msgspec.msgpack.encode([3, 5, 10, 17, LOST.why]))


def encoded(drafted: object, sequence: int, flags: int = 0) -> bytes:
    vector: list[bytes | bytearray | memoryview] = []
    Encoder(INCARNATION, PARTITION).encode(drafted, sequence, flags, vector)  # type: ignore[arg-type]
    return b"".join(vector)


def test_their_bytes() -> None:
    assert encoded(marks.skip(17, Moment(2_000, 1_000)), 5) == SKIP
    assert encoded(marks.gap(LOST, Moment(2_000, 1_000)), 5, 8) == GAP


def planted(*pieces: bytes) -> list[Frame | Gap]:
    """What a log says whose first segment is these bytes."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    log.append([draft(0, 10, b"first"), draft(10, 0, b"second")])
    log.rotate(base_draft(17))
    log.close()
    path = f"{FOLDER}/{0:020}-{1:020}.log"
    files.plant(path, files.content(path) + b"".join(pieces))
    newer = f"{FOLDER}/{17:020}-"
    (old,) = [path for path in files.contents() if path.startswith(newer) and path.endswith(".log")]
    files.plant(f"{newer}{6:020}.log", packed(3, 8, 1, 6, 17, b"the whole state"))
    for gone in (old, old.removesuffix(".log") + ".idx", f"{FOLDER}/synced"):
        files.remove(gone)
    log = open_log(files)
    list(log.recover())
    return list(log.frames())


def test_without_them_a_hole_is_damage() -> None:
    (gap,) = [found for found in planted() if isinstance(found, Gap)]
    assert gap[:4] == (3, 5, 10, 17)
    assert not gap.mended


def test_a_skip_accounts_for_a_hole_and_is_not_handed_out() -> None:
    found = told(planted(SKIP))
    assert [(frame.type, frame.sequence) for frame in found] == [(FrameType.DATA, 1), (FrameType.DATA, 2), (FrameType.BASE, 6)]
    assert found[:2] == expected([draft(0, 10, b"first"), draft(10, 0, b"second")])


def test_a_skip_behind_damage_does_not() -> None:
    (gap,) = [found for found in planted(packed(1, 0, 1, 4, 10, b"x")[:-16] + bytes(16), SKIP) if isinstance(found, Gap)]
    assert gap[:4] == (3, 5, 10, 17)


def test_a_gap_is_handed_out_as_one() -> None:
    found = planted(GAP)
    (gap,) = [one for one in found if isinstance(one, Gap)]
    assert gap == LOST._replace(where=gap.where)
    assert f"{0:020}-{1:020}.log bytes " in gap.where
    assert len(found) == 4


def test_new_damage_before_a_gap_is_told_besides() -> None:
    later = packed(5, 8, 1, 5, 17, msgspec.msgpack.encode([5, 5, 15, 17, "why"]))
    gaps = [one for one in planted(bytes(80), later) if isinstance(one, Gap)]
    assert [(*gap[:4], gap.mended) for gap in gaps] == [(3, 4, 10, 15, False), (5, 5, 15, 17, True)]


def test_a_gap_that_cannot_be_understood() -> None:
    with pytest.raises(CorruptLog, match="newer Penstock"):
        planted(packed(5, 8, 1, 5, 17, b"\xc1"))
