"""The bytes of one frame: header, body, checksum, padding (drawn in docs/format.md).

Owns: the layout, the flags, `Encoder` (drafts to bytes), `parse_header` / `unpack_body` (bytes to frames) and `without_group_flags`; `Compressor`;
the frames that stand for others which are not there: SKIP for what was removed on purpose, GAP for what was lost and is known to be; and
the words for what retention dropped, of which no frame is left to speak.
Invariants
- the header's own checksum covers magic, version and lengths, so a length is trusted exactly when that checksum holds;
- magic and version stay where they are in every later version, and so does the header checksum: a newer format is thus told from damage;
- a frame starts at a multiple of 8 and its body too, so that Arrow buffers inside are aligned.
Limit: a body holds at most 1 GiB, compressed or not.
A body is stored compressed only when that saves at least 5 %. Most time is lost on bodies that do not compress, so a large body is
probed on a sample first, and after each failure a growing number of bodies is stored as it is without looking.
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
"""Smaller bodies are copied into one piece: cheaper than handling their parts."""

MORE_IN_GROUP = 1
"""Further frames of the same append follow."""
CONTINUES_GROUP = 2
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
_KNOWN_FLAGS = MORE_IN_GROUP | CONTINUES_GROUP | ZSTD | AFTER_SYNC
_RESIDUE = 0x48674BC7
"""CRC-32C of any bytes followed by their own CRC-32C: body and checksum are verified in one pass, without cutting them apart."""


class DamagedFrame(Exception):
    """These bytes are not a whole frame. Never leaves this package: it becomes a Gap, or a torn tail."""


class FrameHeader(NamedTuple):
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


class FrameEncoder:
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
            packed = self._compressor.compress(body, raw_bytes)
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


def without_group_flags(frame: bytes) -> bytes:
    """A whole frame's bytes, as those of a frame that was appended alone."""
    flags = int.from_bytes(frame[6:8], "little")
    if not flags & (MORE_IN_GROUP | CONTINUES_GROUP):
        return frame
    covered = frame[:6] + (flags & ~(MORE_IN_GROUP | CONTINUES_GROUP)).to_bytes(2, "little") + frame[8 : _COVERED.size]
    checksum: int = value(covered)
    return covered + checksum.to_bytes(CHECKSUM_BYTES, "little") + frame[HEADER_BYTES:]


def parse_header(raw: bytes) -> FrameHeader:
    """The header in these bytes, or Damaged; CorruptLog when it is whole but of a format that this version does not know."""
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
    """The frame of a header and its stored body with checksum, or Damaged."""
    if len(stored) != header.stored_bytes + CHECKSUM_BYTES or value(stored) != _RESIDUE:
        raise DamagedFrame("a frame body does not match its checksum")
    body = memoryview(stored)[:-CHECKSUM_BYTES]
    if header.flags & ZSTD:
        body = _expanded(body, header.raw_bytes)
    elif header.raw_bytes != header.stored_bytes:
        raise DamagedFrame("a frame's lengths contradict each other")
    _, _, kind, _, _, _, count, _, columns, _, sequence, base, wall, elapsed, _ = header
    return Frame(_TYPES[kind], sequence, base, count, columns, elapsed, wall, body)


def _expanded(stored: memoryview, raw_bytes: int) -> memoryview:
    body = decompress(stored, raw_bytes) if raw_bytes <= MAX_BODY_BYTES else None
    if body is None:
        raise DamagedFrame(f"a compressed frame body does not expand to the {raw_bytes} bytes it should (at most {MAX_BODY_BYTES})")
    return memoryview(body)


# -- compression -----------------------------------------------------------------------------------


MIN_BODY_BYTES = 512
"""Smaller bodies are never tried: the header outweighs what could be saved."""
SAMPLE_BYTES = 4096
LEVEL = 1
MAX_SKIPPED = 512
"""Bodies stored without a look after repeated failures: the price of a probe is then spread over so many."""


class Compressor:
    """Compresses bodies that shrink, and learns to leave the others alone."""

    __slots__ = ("_failures", "_skip", "_zstd")

    def __init__(self) -> None:
        self._zstd = zstd.ZstdCompressor(level=LEVEL)
        self._failures = 0
        self._skip = 0

    def compress(self, parts: Sequence[bytes], size: int) -> bytes | None:
        """A body of at least MIN_BODY_BYTES compressed, or None when it is to be stored as it is."""
        if self._skip:
            self._skip -= 1
            return None
        packed = self._attempt(parts, size)
        if packed is None:
            self._failures += 1
            self._skip = min(1 << self._failures, MAX_SKIPPED)
        else:
            self._failures = 0
        return packed

    def _attempt(self, parts: Sequence[bytes], size: int) -> bytes | None:
        if size > 2 * SAMPLE_BYTES and self._pack(_sample(parts)) is None:
            return None
        return self._pack(b"".join(parts))

    def _pack(self, data: bytes) -> bytes | None:
        packed = self._zstd.compress(data, self._zstd.FLUSH_FRAME)
        return packed if len(packed) * 20 <= len(data) * 19 else None


def _sample(parts: Sequence[bytes]) -> bytes:
    """From the middle of the longest part: the payloads, not the columns of small numbers, which always compress."""
    longest = max(parts, key=len)
    start = max(0, (len(longest) - SAMPLE_BYTES) // 2)
    return longest[start : start + SAMPLE_BYTES]


def decompress(stored: memoryview, size: int) -> bytes | None:
    """The `size` bytes that were compressed, or None when they are not exactly that many: never more than `size` + 1 are made."""
    unpacker = zstd.ZstdDecompressor()
    try:
        body = unpacker.decompress(stored, max_length=size + 1)
    except zstd.ZstdError:
        return None
    return body if unpacker.eof and len(body) == size and not unpacker.unused_data else None


# -- frames that stand for others ------------------------------------------------------------------


DROPPED = "retention dropped it"


class _Lost(msgspec.Struct, array_like=True):
    """The body of a GAP frame: the fields of a Gap without its place, which is the frame's own."""

    first_sequence: int
    last_sequence: int
    start: int
    stop: int
    why: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Lost)


def skip_draft(base: int, then: Moment) -> Draft:
    """Says that what is not there, up to the frame's sequence and to the item before `base`, was removed on purpose."""
    return Draft(FrameType.SKIP, base, 0, 0, then.elapsed, then.wall, ())


def gap_draft(lost: Gap, then: Moment) -> Draft:
    """Stands where frames were lost; to be written with the sequence of the last of them."""
    body = _encoder.encode(_Lost(lost.first_sequence, lost.last_sequence, lost.start, lost.stop, lost.why))
    return Draft(FrameType.GAP, lost.stop, 1, 0, then.elapsed, then.wall, [body])


def decode_gap(frame: Frame, where: str) -> Gap:
    """What a GAP frame tells."""
    try:
        body = _decoder.decode(frame.body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"GAP frame {frame.sequence} is whole but cannot be understood ({error}); use a newer Penstock") from error
    return Gap(body.first_sequence, body.last_sequence, body.start, body.stop, where, body.why, repaired=True)


def dropped_gap(first_sequence: int, base: int, where: str) -> Gap:
    """Everything before the oldest segment that is left."""
    return Gap(1, first_sequence - 1, 0, base, where, DROPPED)
