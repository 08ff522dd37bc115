"""The bytes of one frame: header, body, checksum, padding (drawn in docs/format.md).

Owns: the layout, the flags, `Encoder` (drafts to bytes), `parse_header` / `unpack_body` (bytes to frames) and `ungrouped`.
Invariants
- the header's own checksum covers magic, version and lengths, so a length is trusted exactly when that checksum holds;
- magic and version stay where they are in every later version, and so does the header checksum: a newer format is thus told from damage;
- a frame starts at a multiple of 8 and its body too, so that Arrow buffers inside are aligned.
Limit: a body holds at most 1 GiB, compressed or not.
"""

import struct
from typing import NamedTuple

from google_crc32c import extend, value

from penstock.logs.api import Buffer, Draft, Frame, FrameType
from penstock.logs.compress import MIN_BODY_BYTES, Compressor, expand
from penstock.words.errors import CorruptLog, InvalidRequest

MAGIC = b"PSTK"
VERSION = 1
ALIGNMENT = 8
MAX_BODY_BYTES = 1 << 30
JOINED_BYTES = 4096
"""Smaller bodies are copied into one piece: cheaper than handling their parts."""

MORE = 1
"""Further frames of the same append follow."""
JOINS = 2
"""The frame before this one belongs to the same append."""
ZSTD = 4
"""The body is compressed."""

AFTER_SYNC = 8
"""Everything before this frame had been synced when it was written: if some of that cannot be read, it is damage, not a torn tail."""

HEADER = struct.Struct("<4sBBHIIIIIQQQqqI")
HEADER_BYTES = HEADER.size
CHECKSUM_BYTES = 4
_COVERED = struct.Struct("<4sBBHIIIIIQQQqq")
_TYPES = {int(kind): kind for kind in FrameType}
_KNOWN_FLAGS = MORE | JOINS | ZSTD | AFTER_SYNC
_RESIDUE = 0x48674BC7
"""CRC-32C of any bytes followed by their own CRC-32C: body and checksum are verified in one pass, without cutting them apart."""


class Damaged(Exception):
    """These bytes are not a whole frame. Never leaves this package: it becomes a Gap, or a torn tail."""


class Header(NamedTuple):
    """A frame's header, its checksum verified."""

    magic: bytes
    version: int
    type: int
    flags: int
    stored_bytes: int
    raw_bytes: int
    count: int  # type: ignore[assignment]  # a field, not tuple.count
    partition: int
    columns: int
    incarnation: int
    sequence: int
    base: int
    wall: int
    elapsed: int
    checksum: int


def frame_bytes(stored_bytes: int) -> int:
    """Size of a whole frame whose stored body has that size."""
    size = HEADER_BYTES + stored_bytes + CHECKSUM_BYTES
    return size + -size % ALIGNMENT


class Encoder:
    """Turns the drafts of one partition into bytes."""

    __slots__ = ("_compressor", "_incarnation", "_partition")

    def __init__(self, incarnation: int, partition: int, compression: bool = True) -> None:
        self._incarnation = incarnation
        self._partition = partition
        self._compressor = Compressor() if compression else None

    def encode(self, draft: Draft, sequence: int, flags: int, vector: list[Buffer]) -> int:
        """Add the frame's pieces to `vector` and give their total size. Nothing is added when the draft is refused."""
        kind, base, count, columns, elapsed, wall, parts = draft
        small = sum(map(len, parts)) < JOINED_BYTES
        body = [b"".join(parts)] if small else [part if type(part) is bytes else bytes(part) for part in parts]
        raw_bytes = stored_bytes = len(body[0]) if small else sum(map(len, body))  # of bytes now: a view's length counts its own units
        if raw_bytes > MAX_BODY_BYTES:
            raise InvalidRequest(f"a frame body of {raw_bytes} bytes is more than {MAX_BODY_BYTES}; cut it into several frames")
        if raw_bytes >= MIN_BODY_BYTES and self._compressor is not None:
            packed = self._compressor.shrink(body, raw_bytes)
            if packed is not None:
                body, stored_bytes, flags = [packed], len(packed), flags | ZSTD
        checksum = 0
        for part in body:
            checksum = extend(checksum, part)
        partition, incarnation = self._partition, self._incarnation
        try:
            covered = _COVERED.pack(
                MAGIC, VERSION, kind, flags, stored_bytes, raw_bytes, count, partition, columns, incarnation, sequence, base, wall, elapsed
            )
        except struct.error as error:
            raise InvalidRequest(f"a frame cannot hold {draft._replace(parts=())}: {error}; mend the number out of range") from error
        size = frame_bytes(stored_bytes)
        header = covered + value(covered).to_bytes(CHECKSUM_BYTES, "little")
        tail = checksum.to_bytes(size - HEADER_BYTES - stored_bytes, "little")  # the high bytes, all zero, are the padding
        if stored_bytes < JOINED_BYTES:
            vector.append(b"".join((header, *body, tail)))
        else:
            vector += (header, *body, tail)
        return size


def ungrouped(frame: bytes) -> bytes:
    """A whole frame's bytes, as those of a frame that was appended alone."""
    flags = int.from_bytes(frame[6:8], "little")
    if not flags & (MORE | JOINS):
        return frame
    covered = frame[:6] + (flags & ~(MORE | JOINS)).to_bytes(2, "little") + frame[8 : _COVERED.size]
    checksum: int = value(covered)
    return covered + checksum.to_bytes(CHECKSUM_BYTES, "little") + frame[HEADER_BYTES:]


def parse_header(raw: bytes) -> Header:
    """The header in these bytes, or Damaged; CorruptLog when it is whole but of a format that this version does not know."""
    if len(raw) < HEADER_BYTES:
        raise Damaged("the file ends inside a frame header")
    if value(raw) != _RESIDUE or not raw.startswith(MAGIC):
        raise Damaged("a frame header does not match its checksum")
    header = Header._make(HEADER.unpack(raw))
    if header.version != VERSION or header.type not in _TYPES or header.flags & ~_KNOWN_FLAGS:
        raise CorruptLog(
            f"a frame of newer format (version {header.version}, type {header.type}, flags {header.flags:#x}) was found; "
            "upgrade Penstock to read it, nothing was changed"
        )
    return header


def unpack_body(header: Header, stored: bytes) -> Frame:
    """The frame of a header and its stored body with checksum, or Damaged."""
    if len(stored) != header.stored_bytes + CHECKSUM_BYTES or value(stored) != _RESIDUE:
        raise Damaged("a frame body does not match its checksum")
    body = memoryview(stored)[:-CHECKSUM_BYTES]
    if header.flags & ZSTD:
        body = _expanded(body, header.raw_bytes)
    elif header.raw_bytes != header.stored_bytes:
        raise Damaged("a frame's lengths contradict each other")
    _, _, kind, _, _, _, count, _, columns, _, sequence, base, wall, elapsed, _ = header
    return Frame(_TYPES[kind], sequence, base, count, columns, elapsed, wall, body)


def _expanded(stored: memoryview, raw_bytes: int) -> memoryview:
    body = expand(stored, raw_bytes) if raw_bytes <= MAX_BODY_BYTES else None
    if body is None:
        raise Damaged(f"a compressed frame body does not expand to the {raw_bytes} bytes it should (at most {MAX_BODY_BYTES})")
    return memoryview(body)
