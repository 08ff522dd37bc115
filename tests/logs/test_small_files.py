"""The synced position and the checkpoint: what is written is what is drawn in docs/format.md, and damage shows."""

import struct

from google_crc32c import value

from penstock.logs.api import Draft, FrameType
from penstock.logs.files import checkpoint, synced
from penstock.logs.files.segment import Owner, SegmentName, parse_name
from penstock.logs.files.synced import Synced

NAME = SegmentName(400, 17)
SYNCED = Synced(NAME, 4_096, 21, 450, "interval")
BASE = Draft(FrameType.BASE, 450, 1, 0, 5, 6, [b"state" * 200])
OWNER = Owner(0xFEED, 3)


def flips(data: bytes) -> list[bytes]:
    return [data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] for place in range(len(data))]


def test_names_tell_offset_and_sequence() -> None:
    assert str(NAME) == "00000000000000000400-00000000000000000017"
    assert parse_name(f"{NAME}.log") == NAME
    for other in (f"{NAME}.idx", "synced", "1-2.log", f"{NAME}.log.tmp", f"{400:020}.log", f"{400:020}+{17:020}.log"):
        assert parse_name(other) is None


def test_the_synced_position_comes_back_and_has_the_documented_layout() -> None:
    data = SYNCED.pack()
    body = struct.pack("<4sBBHQQQQQ", b"PSYN", 1, 2, 0, 400, 17, 4_096, 21, 450)
    assert data == body + value(body).to_bytes(8, "little")
    assert synced.unpack(data) == SYNCED


def test_a_damaged_synced_position_counts_as_none() -> None:
    data = SYNCED.pack()
    assert [synced.unpack(flipped) for flipped in flips(data)] == [None] * len(data)
    assert [synced.unpack(data[:size]) for size in range(len(data))] == [None] * len(data)


def test_a_checkpoint_comes_back_and_has_the_documented_layout() -> None:
    data = checkpoint.pack(NAME, 4_000, 4_096, 21, BASE, OWNER)
    place = struct.pack("<4sHHQQQQ", b"PSCP", 1, 0, 400, 17, 4_000, 4_096)
    assert data.startswith(place + value(place).to_bytes(8, "little") + b"PSTK")
    found = checkpoint.unpack(data, OWNER)
    assert found is not None
    assert found[:3] == (NAME, 4_000, 4_096)
    assert (found.frame.sequence, found.frame.base, bytes(found.frame.body)) == (21, 450, b"state" * 200)


def test_a_damaged_or_strange_checkpoint_counts_as_none() -> None:
    data = checkpoint.pack(NAME, 4_000, 4_096, 21, BASE._replace(parts=[b"state"]), OWNER)
    whole = len(data) - 7  # the rest is padding
    assert [checkpoint.unpack(flipped, OWNER) for flipped in flips(data)[:whole]] == [None] * whole
    assert [checkpoint.unpack(data[:size], OWNER) for size in range(whole)] == [None] * whole
    assert checkpoint.unpack(data, Owner(0xFEED, 4)) is None
    assert checkpoint.unpack(checkpoint.pack(NAME, 0, 8, 1, BASE._replace(type=FrameType.STATE), OWNER), OWNER) is None
