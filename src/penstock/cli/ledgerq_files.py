"""Reads the files of LedgerQ.

Owns: the file format, as LedgerQ's code writes it. Little-endian; checksums are CRC-32C.

    segment   header of 64 bytes: magic, version u16, flags u16, base u64, created i64, first id u64, last id u64,
              zeros, CRC of bytes 0-59
    entry     length u32 (up to and including the CRC), type u8, flags u8, id u64, time i64, [priority u8] [expires i64]
              [headers] [compression u8] payload, CRC of all before it; then 4 unused bytes
    headers   count u16, then each: length u16, name, length u16, value
    metadata  24 bytes: version u32, next id u64, read id u64, reserved u32; messages below the read id were consumed
    .retry_state.json   {"version": 1, "entries": [{"msg_id", "retry_count", "last_failure", "failure_reason"}, …]}: the
              messages that were delivered, failed, and were neither acknowledged nor moved to the dead letters
    .dedup_state.json   {"version": 1, "entries": [{"dedup_id", "message_id", "expires_at"}, …]}: a dedup_id is the
              SHA-256 of the producer's id, in hex
    dead letters        a queue in a directory of its own, whose messages have the headers DEAD_HEADERS

Every whole entry is read, also between damaged bytes; damaged bytes are reported. Index files are not read, because a
crash leaves none.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from datetime import datetime
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

import google_crc32c
import msgspec

from penstock.words.limits import MAX_PAYLOAD_BYTES

MAGIC: Final = 0x4C445151
VERSION: Final = 1
HEADER_BYTES: Final = 64
PADDING: Final = 4
DATA: Final = 1
COMPRESSED, ENCRYPTED, TTL, HEADERS, PRIORITY = 1, 2, 4, 8, 16
GZIP: Final = 1
METADATA_BYTES: Final = 24
SEGMENT_NAME: Final = re.compile(r"[0-9]{20}\.log")
DAMAGED_HEADER: Final = "the header is damaged"
METADATA_NAME: Final = "metadata.dat"
RETRIES_NAME: Final = ".retry_state.json"
DEDUP_NAME: Final = ".dedup_state.json"
DEAD_ID, DEAD_COUNT, DEAD_REASON, DEAD_TIME = "dlq.original_msg_id", "dlq.retry_count", "dlq.failure_reason", "dlq.last_failure"
DEAD_HEADERS: Final = (DEAD_ID, DEAD_COUNT, DEAD_REASON, DEAD_TIME)

_SEGMENT = struct.Struct("<IHHQqQQ20xI")
_FIXED = struct.Struct("<IBBQq")
_METADATA = struct.Struct("<IQQI")
_CRC = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_LONG = struct.Struct("<q")
_SMALLEST = _FIXED.size + _CRC.size
_LIKELY = re.compile(rb"[\x01-\x03][\x00-\x1f]", re.DOTALL)
"""The type and the flags of an entry."""


class ByteData(Protocol):
    """Bytes, or a file mapped into memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> bytes: ...


class LedgerEntry(NamedTuple):
    """A message."""

    id: int
    time: int
    """Nanoseconds since 1970."""
    payload: bytes
    priority: int = 0
    """0 low, 1 medium, 2 high."""
    expires: int = 0
    """Nanoseconds since 1970; 0 is never."""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class SkippedBytes(NamedTuple):
    """Bytes of a segment that give no message."""

    where: int
    """The position of the first byte in the file."""
    size: int
    why: str
    torn: bool = False
    """The bytes are the end of the file, cut off during a write that was never acknowledged."""
    id: int = 0
    """The id of an entry that is whole but cannot be used."""


EntryOrSkipped: TypeAlias = LedgerEntry | SkippedBytes


class FailedMessage(NamedTuple):
    """The failed attempts of a message."""

    attempts: int
    reason: str
    last_failed_at: int
    """Wall microseconds; 0 if it is not known."""


class UnusableEntry(Exception):
    """A whole entry cannot be used. The text says why."""


def read_id(data: bytes) -> int:
    """The first id that was not consumed, from the metadata; ValueError if the metadata cannot be read."""
    if len(data) != METADATA_BYTES:
        raise ValueError(f"it has {len(data)} bytes instead of {METADATA_BYTES}")
    version, _, found, _ = _METADATA.unpack(data)
    if version != VERSION:
        raise ValueError(f"its version is {version}, and {VERSION} is known")
    return int(found)


class _Retry(msgspec.Struct):
    msg_id: int
    retry_count: int
    last_failure: str = ""
    failure_reason: str = ""


class _Dedup(msgspec.Struct):
    dedup_id: str
    message_id: int
    expires_at: int


class _RetryFile(msgspec.Struct):
    version: int
    entries: list[_Retry] | None = None


class _DedupFile(msgspec.Struct):
    version: int
    entries: list[_Dedup] | None = None


F = TypeVar("F", _RetryFile, _DedupFile)


def read_retries(data: bytes) -> dict[int, FailedMessage]:
    """Message id → its failed attempts; ValueError if the file cannot be read."""
    found = _side_file(data, _RetryFile).entries or ()
    return {one.msg_id: FailedMessage(one.retry_count, one.failure_reason, wall_time(one.last_failure)) for one in found}


def read_dedup_ids(data: bytes, now: int) -> dict[int, tuple[str, int]]:
    """Message id → its dedup id in hex and the rest of its window (nanoseconds), if any; ValueError as above."""
    return {
        one.message_id: (one.dedup_id, one.expires_at - now) for one in _side_file(data, _DedupFile).entries or () if one.expires_at > now
    }


def _side_file(data: bytes, shape: type[F]) -> F:
    found = msgspec.json.decode(data, type=shape)  # its errors are ValueErrors
    if found.version != VERSION:
        raise ValueError(f"its version is {found.version}, and {VERSION} is known")
    return found


def wall_time(text: str) -> int:
    """A time of LedgerQ's side files in wall microseconds; 0 if it is none."""
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp() * 1_000_000))
    except (ValueError, OverflowError):
        return 0


def segment_identity(data: ByteData) -> str:
    """A name of a segment that no other one has, also when its directory is moved or made anew.

    It is made of the header, or of the first whole entry if the header is damaged.
    """
    if not check_header(data):
        _, _, _, base, created, *_ = _SEGMENT.unpack(data[:HEADER_BYTES])
        return f"{created:x}-{base}"
    first = next((found for found in entries(data) if isinstance(found, LedgerEntry)), None)
    return "" if first is None else f"{first.time:x}-{first.id}-damaged"


def check_header(data: ByteData) -> str:
    """What is wrong with the header of a segment; "" if it is correct."""
    header = data[:HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return "the header is cut off"
    magic, version, *_, crc = _SEGMENT.unpack(header)
    if magic != MAGIC:
        return "it is not a segment of LedgerQ"
    if google_crc32c.value(header[: HEADER_BYTES - _CRC.size]) != crc:
        return DAMAGED_HEADER  # the entries may be whole
    return "" if version == VERSION else f"its version is {version}, and {VERSION} is known"


def entries(data: ByteData) -> Iterator[EntryOrSkipped]:
    """The entries of a segment, and the damaged bytes between them."""
    position, end = HEADER_BYTES, len(data)
    while position < end:
        size = _entry_length(data, position)
        if size:
            yield _read(data, position, size)
            position += size + PADDING
            continue
        after = _next_entry(data, position)
        if any(data[position:after]) or after < end:  # zeros at the end were never written
            yield _gap(data, position, after)
        position = after


def _gap(data: ByteData, position: int, after: int) -> SkippedBytes:
    """Bytes without a whole entry: torn if they end the file and their length field says that they should be longer."""
    start = data[position : position + _CRC.size]
    length = _CRC.unpack(start)[0] if len(start) == _CRC.size else _SMALLEST
    torn = after == len(data) and position + length > after
    return SkippedBytes(position, after - position, "cut off at the end" if torn else "damaged", torn)


def _entry_length(data: ByteData, position: int) -> int:
    """The length of the entry at a position; 0 if there is no whole entry."""
    fixed = data[position : position + _FIXED.size]
    if len(fixed) < _FIXED.size:
        return 0
    length, kind, flags, id, _ = _FIXED.unpack(fixed)
    if length < _SMALLEST or position + length > len(data) or not 1 <= kind <= 3 or flags > 31 or not id:
        return 0
    whole = data[position : position + length]
    crc: int = _CRC.unpack(whole[-_CRC.size :])[0]
    return int(length) if google_crc32c.value(whole[: -_CRC.size]) == crc else 0


def _next_entry(data: ByteData, position: int) -> int:
    """The position of the next whole entry; the end of the data if there is none."""
    at = position + 1
    while found := _LIKELY.search(data, at + _CRC.size):  # type: ignore[call-overload]
        at = int(found.start()) - _CRC.size
        if _entry_length(data, at):
            return at
        at += 1
    return len(data)


# -- one entry ---------------------------------------------------------------------------------------


def _read(data: ByteData, position: int, size: int) -> EntryOrSkipped:
    whole = data[position : position + size]
    _, kind, flags, id, time = _FIXED.unpack_from(whole)
    try:
        if kind != DATA:
            raise UnusableEntry(f"its type {kind} holds no message")
        if flags & ENCRYPTED:
            raise UnusableEntry("it is encrypted")
        return _message(whole[_FIXED.size : -_CRC.size], flags, id, time)
    except (UnusableEntry, struct.error, IndexError) as error:
        why = str(error) if isinstance(error, UnusableEntry) else "its fields do not fit into it"
        return SkippedBytes(position, size, f"message {id} is not imported: {why}", id=id)


def _message(body: bytes, flags: int, id: int, time: int) -> LedgerEntry:
    at, priority, expires = 0, 0, 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if flags & PRIORITY:
        priority, at = body[at], at + 1
    if flags & TTL:
        (expires,), at = _LONG.unpack_from(body, at), at + _LONG.size
    if flags & HEADERS:
        headers, at = _headers(body, at)
    payload = body[at:]
    if flags & COMPRESSED:
        payload = _decompressed(body[at:])
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise UnusableEntry(f"its payload has more than {MAX_PAYLOAD_BYTES:,} bytes")
    return LedgerEntry(id, time, payload, priority, expires, headers)


def _headers(body: bytes, at: int) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    (count,), at = _SHORT.unpack_from(body, at), at + _SHORT.size
    texts: list[bytes] = []
    for _ in range(2 * count):
        (length,), at = _SHORT.unpack_from(body, at), at + _SHORT.size
        if at + length > len(body):
            raise UnusableEntry("its headers do not fit into it")
        texts.append(body[at : at + length])
        at += length
    return tuple(zip(texts[::2], texts[1::2], strict=True)), at


def _decompressed(data: bytes) -> bytes:
    """The decompressed payload, after the byte that names its compression. Stops above the limit of an item."""
    if data[:1] != bytes([GZIP]):
        raise UnusableEntry(f"its compression {data[:1].hex() or 'missing'} is not known")
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = decompressor.decompress(data[1:], MAX_PAYLOAD_BYTES + 1)
    except zlib.error as error:
        raise UnusableEntry(f"it cannot be decompressed ({error})") from None
    if not decompressor.eof and len(found) <= MAX_PAYLOAD_BYTES:
        raise UnusableEntry("its compressed payload is cut off")
    return found
