"""The bytes of one frame: header, body, checksum, padding (docs/format.md shows them).

Owns: the layout and the flags; `FrameEncoder` (drafts to bytes), `parse_header` and `unpack_body` (bytes to frames);
`Compressor`; the frames that replace missing ones: SKIP for frames removed on purpose, GAP for frames that a repair
found lost; and `dropped_gap`.
Invariants
- the header has its own checksum over magic, version and lengths; a length is used only when that checksum is right;
- every later version keeps the positions of magic, version and header checksum, so that a newer format is not mistaken
  for damage;
- a frame and its body start at multiples of 8, so that Arrow buffers in the body are aligned.
Limit: a body has at most 1 GiB, compressed or not.
A body is stored compressed only when that saves at least 5 %. Trying costs time, so a large body is first tried on a
sample, and after each failure twice as many bodies as before are stored without a try.
"""

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from google_crc32c import extend, value

from penstock.logs.log import Buffer, Draft, Frame, FrameType, Gap
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog, InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAGIC = b"PSTK"
VERSION = 1
ALIGNMENT = 8
MAX_BODY_BYTES = 1 << 30
JOINED_BYTES = 4096
"""Smaller bodies are copied into one piece, which is faster than writing several pieces."""

MORE_IN_GROUP = 1
"""More frames of the same append follow."""
CONTINUES_GROUP = 2
"""The frame before this one belongs to the same append."""
ZSTD = 4
"""The body is compressed."""

AFTER_SYNC = 8
"""All earlier frames were synced when this one was written: one that cannot be read is damage, not a torn tail."""

HEADER = struct.Struct("<4sBBHIIIIIQQQqqI")
HEADER_BYTES = HEADER.size
CHECKSUM_BYTES = 4
_COVERED = struct.Struct("<4sBBHIIIIIQQQqq")
_pack_covered = _COVERED.pack
_TYPES = {int(kind): kind for kind in FrameType}
_KNOWN_FLAGS = MORE_IN_GROUP | CONTINUES_GROUP | ZSTD | AFTER_SYNC
_RESIDUE = 0x48674BC7
"""CRC-32C of any bytes followed by their own CRC-32C; so body and checksum are verified in one pass."""


class DamagedFrame(Exception):
    """The bytes are not a complete, undamaged frame. Code of this package turns it into a Gap or a torn tail."""


class FrameHeader(NamedTuple):
    """A frame's header; its checksum was right."""

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
    """The size of a frame with a stored body of that size."""
    size = HEADER_BYTES + stored_bytes + CHECKSUM_BYTES
    return size + -size % ALIGNMENT


class FrameEncoder:
    """Encodes the drafts of one partition."""

    __slots__ = ("_compressor", "_incarnation", "_partition")

    def __init__(self, incarnation: int, partition: int, compression: "Compression | bool" = True) -> None:
        self._incarnation = incarnation
        self._partition = partition
        self._compressor: Compressor | None = None
        self.set_compression(compression if isinstance(compression, Compression) else Compression(compression))

    def set_compression(self, compression: "Compression") -> None:
        """Compress the following frames so. Another thread may be encoding a frame: that one is as before."""
        self._compressor = Compressor(compression.level, compression.min_bytes) if compression.enabled else None

    def encode(self, draft: Draft, sequence: int, flags: int, vector: list[Buffer]) -> int:
        """Append the frame's pieces to `vector`, and return their size. A draft that is refused appends nothing."""
        kind, base, count, columns, elapsed, wall, parts = draft
        if sum(map(len, parts)) < JOINED_BYTES:
            body: Sequence[bytes] = (b"".join(parts),)
            raw_bytes = len(body[0])
        else:
            body = [part if type(part) is bytes else bytes(part) for part in parts]
            raw_bytes = sum(map(len, body))  # all are bytes now; a memoryview's length may count larger units
            if raw_bytes > MAX_BODY_BYTES:
                raise InvalidRequest(f"a frame body of {raw_bytes} bytes is more than {MAX_BODY_BYTES}; split it into several frames")
        stored_bytes, compressor = raw_bytes, self._compressor
        if compressor is not None and raw_bytes >= compressor.min_bytes:
            packed = compressor.compress(body, raw_bytes)
            if packed is not None:
                body, stored_bytes, flags = (packed,), len(packed), flags | ZSTD
        checksum = 0
        for part in body:
            checksum = extend(checksum, part)
        partition, incarnation = self._partition, self._incarnation
        try:
            covered = _pack_covered(
                MAGIC, VERSION, kind, flags, stored_bytes, raw_bytes, count, partition, columns, incarnation, sequence, base, wall, elapsed
            )
        except struct.error as error:
            raise InvalidRequest(f"a frame cannot hold {draft._replace(parts=())}: {error}; fix the number that is out of range") from error
        size = frame_bytes(stored_bytes)
        tail = checksum.to_bytes(size - HEADER_BYTES - stored_bytes, "little")  # its zero bytes are the padding
        pieces = (covered, value(covered).to_bytes(CHECKSUM_BYTES, "little"), *body, tail)
        if stored_bytes < JOINED_BYTES:
            vector.append(b"".join(pieces))
        else:
            vector += pieces
        return size


def without_group_flags(frame: bytes) -> bytes:
    """The bytes of a frame without the flags that join it to other frames of its append."""
    flags = int.from_bytes(frame[6:8], "little")
    if not flags & (MORE_IN_GROUP | CONTINUES_GROUP):
        return frame
    covered = frame[:6] + (flags & ~(MORE_IN_GROUP | CONTINUES_GROUP)).to_bytes(2, "little") + frame[8 : _COVERED.size]
    checksum: int = value(covered)
    return covered + checksum.to_bytes(CHECKSUM_BYTES, "little") + frame[HEADER_BYTES:]


def parse_header(raw: bytes) -> FrameHeader:
    """Decode a header. DamagedFrame when it is incomplete or damaged; CorruptLog when its format is newer."""
    if len(raw) < HEADER_BYTES:
        raise DamagedFrame("the file ends inside a frame header")
    if value(raw) != _RESIDUE or not raw.startswith(MAGIC):
        raise DamagedFrame("a frame header does not match its checksum")
    header = FrameHeader._make(HEADER.unpack(raw))
    if header.version != VERSION or header.type not in _TYPES or header.flags & ~_KNOWN_FLAGS:
        raise CorruptLog(
            f"a frame of newer format (version {header.version}, type {header.type}, flags {header.flags:#x}) was found; "
            "upgrade Penstock to read it, nothing was changed"
        )
    return header


def unpack_body(header: FrameHeader, stored: bytes) -> Frame:
    """The frame of a header and its stored body with checksum; DamagedFrame when they do not match."""
    if len(stored) != header.stored_bytes + CHECKSUM_BYTES or value(stored) != _RESIDUE:
        raise DamagedFrame("a frame body does not match its checksum")
    body = memoryview(stored)[:-CHECKSUM_BYTES]
    if header.flags & ZSTD:
        raw = decompress(body, header.raw_bytes) if header.raw_bytes <= MAX_BODY_BYTES else None
        if raw is None:
            raise DamagedFrame(f"a compressed frame body does not expand to its {header.raw_bytes} bytes (at most {MAX_BODY_BYTES})")
        body = memoryview(raw)
    elif header.raw_bytes != header.stored_bytes:
        raise DamagedFrame("a frame's lengths contradict each other")
    _, _, kind, _, _, _, count, _, columns, _, sequence, base, wall, elapsed, _ = header
    return Frame(_TYPES[kind], sequence, base, count, columns, elapsed, wall, body)


# -- compression -------------------------------------------------------------------------------------


MIN_BODY_BYTES = 512
"""Smaller bodies are not compressed unless asked: little could be saved."""
SAMPLE_BYTES = 4096
LEVEL = 1
MAX_SKIPPED = 512
"""The most bodies stored without a try after repeated failures."""


class Compression(NamedTuple):
    """Whether and how bodies are compressed."""

    enabled: bool = True
    level: int = LEVEL
    """Of zstd: higher is smaller and slower."""
    min_bytes: int = MIN_BODY_BYTES
    """Smaller bodies are stored as they are."""


class Compressor:
    """Compresses bodies; tries less often while bodies do not get smaller."""

    __slots__ = ("_failures", "_skip", "_zstd", "min_bytes")

    def __init__(self, level: int = LEVEL, min_bytes: int = MIN_BODY_BYTES) -> None:
        self.min_bytes = min_bytes
        self._zstd = zstd.ZstdCompressor(level=level)
        self._failures = 0
        self._skip = 0

    def compress(self, parts: Sequence[bytes], size: int) -> bytes | None:
        """A body of at least `min_bytes`, compressed; None when it should be stored uncompressed."""
        if self._skip:
            self._skip -= 1
            return None
        compressible = size <= 2 * SAMPLE_BYTES or self._pack(_sample(parts)) is not None
        packed = self._pack(b"".join(parts)) if compressible else None
        if packed is None:
            self._failures += 1
            self._skip = min(1 << self._failures, MAX_SKIPPED)
        else:
            self._failures = 0
        return packed

    def _pack(self, data: bytes) -> bytes | None:
        packed = self._zstd.compress(data, self._zstd.FLUSH_FRAME)
        return packed if len(packed) * 20 <= len(data) * 19 else None


def _sample(parts: Sequence[bytes]) -> bytes:
    """Bytes from the middle of the longest part: usually payloads. Columns of small numbers always compress well."""
    longest = max(parts, key=len)
    start = max(0, (len(longest) - SAMPLE_BYTES) // 2)
    return longest[start : start + SAMPLE_BYTES]


def decompress(stored: memoryview, size: int) -> bytes | None:
    """Decompress to `size` bytes; None when that fails or the size differs. Makes at most `size` + 1 bytes."""
    unpacker = zstd.ZstdDecompressor()
    try:
        body = unpacker.decompress(stored, max_length=size + 1)
    except zstd.ZstdError:
        return None
    return body if unpacker.eof and len(body) == size and not unpacker.unused_data else None


# -- frames that replace missing ones ----------------------------------------------------------------


DROPPED = "retention dropped it"


class _Lost(msgspec.Struct, array_like=True):
    """The body of a GAP frame: a Gap without `where`, which is the frame's own position."""

    first_sequence: int
    last_sequence: int
    start: int
    stop: int
    why: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Lost)


def skip_draft(base: int, then: Moment) -> Draft:
    """A SKIP frame: missing frames up to its sequence, and missing items below `base`, were removed on purpose."""
    return Draft(FrameType.SKIP, base, 0, 0, then.elapsed, then.wall, ())


def gap_draft(lost: Gap, then: Moment) -> Draft:
    """A GAP frame in place of lost frames; write it with the sequence of the last lost frame."""
    body = _encoder.encode(_Lost(lost.first_sequence, lost.last_sequence, lost.start, lost.stop, lost.why))
    return Draft(FrameType.GAP, lost.stop, 1, 0, then.elapsed, then.wall, [body])


def decode_gap(frame: Frame, where: str) -> Gap:
    """The Gap of a GAP frame; CorruptLog when the body cannot be decoded."""
    try:
        body = _decoder.decode(frame.body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"GAP frame {frame.sequence} is whole but cannot be understood ({error}); use a newer Penstock") from error
    return Gap(body.first_sequence, body.last_sequence, body.start, body.stop, where, body.why, repaired=True)


def dropped_gap(first_sequence: int, base: int, where: str) -> Gap:
    """The Gap for everything that retention deleted before the oldest segment."""
    return Gap(1, first_sequence - 1, 0, base, where, DROPPED)
