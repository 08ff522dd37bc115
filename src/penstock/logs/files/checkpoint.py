"""A checkpoint: a disposable copy of the state inside a segment, so that opening need not replay the segment from its start.

Owns: `Checkpoint` and the layout of the `checkpoint` file (docs/format.md): where it stands in the log, then a BASE frame as the log's
codec writes it. It counts only when it is whole and the frame it names as its last is really there; otherwise the log is replayed from
the segment's own Base, to the same state.
"""

import struct
from typing import NamedTuple

from google_crc32c import value

from penstock.logs.api import Draft, Frame, FrameType
from penstock.logs.files.segment import Owner, SegmentName
from penstock.logs.frame import HEADER_BYTES, Damaged, Encoder, parse_header, unpack_body

FILE_NAME = "checkpoint"
MAGIC = b"PSCP"
VERSION = 1
_PLACE = struct.Struct("<4sHHQQQQ")
_CHECKSUM_BYTES = 8  # CRC-32C and padding
_PLACE_BYTES = _PLACE.size + _CHECKSUM_BYTES


class Checkpoint(NamedTuple):
    """State after a frame of the log."""

    segment: SegmentName
    last: int
    """Where the last frame that the state rests on starts."""
    end: int
    """Where it ends: replay goes on here."""
    frame: Frame
    """The state, as a BASE frame; its sequence is that of the last frame."""


def pack(segment: SegmentName, last: int, end: int, sequence: int, base: Draft, owner: Owner) -> bytes:
    """The bytes of a checkpoint file."""
    place = _PLACE.pack(MAGIC, VERSION, 0, *segment, last, end)
    vector: list[bytes | bytearray | memoryview] = [place, value(place).to_bytes(_CHECKSUM_BYTES, "little")]
    Encoder(*owner).encode(base, sequence, 0, vector)
    return b"".join(vector)


def unpack(data: bytes, owner: Owner) -> Checkpoint | None:
    """The checkpoint in a file's bytes, or None when they are not a whole one of this version and this log."""
    place, checksum = data[: _PLACE.size], data[_PLACE.size : _PLACE_BYTES]
    if len(data) < _PLACE_BYTES or value(place) != int.from_bytes(checksum, "little"):
        return None
    magic, version, _, base, first_sequence, last, end = _PLACE.unpack(place)
    frame = _frame(data[_PLACE_BYTES:], owner)
    if magic != MAGIC or version != VERSION or frame is None or frame.type is not FrameType.BASE:
        return None
    return Checkpoint(SegmentName(base, first_sequence), last, end, frame)


def _frame(data: bytes, owner: Owner) -> Frame | None:
    try:
        header = parse_header(data[:HEADER_BYTES])
        frame = unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])
    except Damaged:
        return None
    return frame if (header.incarnation, header.partition) == owner else None
