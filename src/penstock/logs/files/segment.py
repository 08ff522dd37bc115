"""One segment file: its name, its frames, the damage between them, and its index.

Owns: `SegmentName`, `Segment` (an open file), `LogId` (the log that frames belong to), `scan`, `SparseIndex` and
`ReadAhead`.
A segment is named by the item offset and the frame sequence that it starts at. Two segments may start at the same
offset, never at the same sequence. The name also tells what a segment held whose first frame is lost.
The index (`.idx`, docs/format.md) gives the position from which to read for an item offset or a time. It has an entry
for a DATA frame about every 4 KiB of log. It is rebuildable: a reader that uses an entry checks that the frame is at
that position and rebuilds the index if not; a file that is missing, short or fails its checksum is ignored.
`ReadAhead` reads many small frames with one system call, and a large frame without a copy. A file under it may only
grow. After a cut, or for a file whose end may change, create a new one.
"""

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from google_crc32c import value

from penstock.logs.files.filesystem import Files
from penstock.logs.frame import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    HEADER_BYTES,
    MAGIC,
    DamagedFrame,
    FrameHeader,
    frame_bytes,
    parse_header,
    unpack_body,
)
from penstock.logs.log import Frame, FrameType
from penstock.words.errors import CorruptLog

LOG, INDEX = ".log", ".idx"
DIGITS = 20


class SegmentName(NamedTuple):
    """The name of a segment. Names sort in the order of the segments."""

    base_offset: int
    """The item offset that the segment starts at."""
    first_sequence: int

    def __str__(self) -> str:
        return f"{self.base_offset:0{DIGITS}d}-{self.first_sequence:0{DIGITS}d}"


FIRST = SegmentName(0, 1)


def parse_name(file_name: str) -> SegmentName | None:
    """The segment of a `.log` file; None if the file is not a segment."""
    stem, dash, sequence = file_name.removesuffix(LOG).partition("-")
    digits = len(stem) == len(sequence) == DIGITS and stem.isdecimal() and sequence.isdecimal()
    return SegmentName(int(stem), int(sequence)) if dash and digits and file_name.endswith(LOG) else None


class LogId(NamedTuple):
    """The log that a frame belongs to."""

    incarnation: int
    partition: int

    def __str__(self) -> str:
        return f"partition {self.partition} of incarnation {self.incarnation:016x}"


class Segment:
    """An open segment file."""

    __slots__ = ("handle", "index", "name", "path", "read_ahead", "retired", "size", "users")

    def __init__(self, files: Files, path: str, name: SegmentName, handle: int) -> None:
        self.path = path
        self.name = name
        self.handle = handle
        self.size = files.size(handle)
        """Bytes in use. The writer increases it as it appends to the newest segment."""
        self.read_ahead = ReadAhead(files, handle)
        self.index: SparseIndex | None = None
        self.users = 0
        """The number of passes that read it now."""
        self.retired = False
        """Whether to close it when the last of these passes ends."""

    def __repr__(self) -> str:
        return f"Segment({self.name}, {self.size} bytes)"


class Piece(NamedTuple):
    """A range of bytes of a segment: a whole frame, or damage up to the next one (`why` says what is wrong)."""

    position: int
    end: int
    flags: int
    frame: Frame | None
    why: str


class _Foreign(DamagedFrame):
    """A whole frame that belongs to another partition."""


def scan(segment: Segment, position: int, log_id: LogId) -> Iterator[Piece]:
    """Yield the frames and the damage from `position`, which must be a frame's start, to the end of the segment.

    After damage the next frame must have a higher sequence than the last one: a payload may contain old frames.
    """
    lowest = segment.name.first_sequence
    while position < segment.size:
        try:
            flags, end, frame = _frame_at(segment, position, log_id)
        except _Foreign as foreign:
            raise CorruptLog(f"{segment.path} holds {foreign}; put the file back where it belongs, nothing was changed") from None
        except DamagedFrame as damage:
            end = _next_frame(segment, position, log_id, lowest)
            yield Piece(position, end, 0, None, str(damage))
        else:
            lowest = frame.sequence + 1
            yield Piece(position, end, flags, frame, "")
        position = end


def header_at(segment: Segment, position: int, log_id: LogId) -> FrameHeader | None:
    """The header of this log's frame at a position; None if there is no valid one."""
    try:
        header = parse_header(segment.read_ahead.read(position, min(HEADER_BYTES, segment.size - position)))
    except DamagedFrame:
        return None
    return header if (header.incarnation, header.partition) == log_id else None


def _frame_at(segment: Segment, position: int, log_id: LogId) -> tuple[int, int, Frame]:
    header = parse_header(segment.read_ahead.read(position, min(HEADER_BYTES, segment.size - position)))
    if header.incarnation != log_id.incarnation or header.partition != log_id.partition:
        raise _Foreign(f"a frame of {LogId(header.incarnation, header.partition)}, not of {log_id}")
    end = position + frame_bytes(header.stored_bytes)
    if end > segment.size:
        raise DamagedFrame("the file ends inside a frame")
    stored = segment.read_ahead.read(position + HEADER_BYTES, header.stored_bytes + CHECKSUM_BYTES)
    return header.flags, end, unpack_body(header, stored)


def _next_frame(segment: Segment, position: int, log_id: LogId, lowest: int) -> int:
    """The position of this log's next whole frame after damage at `position`, or the segment's end.

    The search begins after the damaged frame if its header, and so its length, is valid; else just after its start.
    """
    header = header_at(segment, position, log_id)
    start = position + (ALIGNMENT if header is None else frame_bytes(header.stored_bytes))
    found = segment.read_ahead.find_all(MAGIC, start, segment.size, ALIGNMENT)
    return next((start for start in found if _holds_frame(segment, start, log_id, lowest)), segment.size)


def _holds_frame(segment: Segment, position: int, log_id: LogId, lowest: int) -> bool:
    try:
        return _frame_at(segment, position, log_id)[2].sequence >= lowest
    except DamagedFrame:
        return False


# -- the index -------------------------------------------------------------------------------------


INDEX_MAGIC = b"PSIX"
INDEX_VERSION = 1
EVERY_BYTES = 4096
# magic, version, reserved, entries, checksum, covered, first wall, last wall
_INDEX_HEADER = struct.Struct("<4sHHIIQqq")
_CHECKED_FROM = 16


class SparseIndex:
    """The entries (offset, wall time, position) of one segment, sorted by position."""

    __slots__ = ("covered", "first_wall", "last_wall", "next_entry_at", "offsets", "positions", "walls")

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.walls = array("q")
        self.positions = array("Q")
        self.covered = 0
        """The segment's bytes before this position are indexed."""
        self.next_entry_at = 0
        """The next entry is made for the first DATA frame at or after this position."""
        self.first_wall = 0
        self.last_wall = 0
        """The wall times of the first and the last indexed frame."""

    def add(self, offset: int, wall: int, position: int) -> None:
        self.offsets.append(offset)
        self.walls.append(wall)
        self.positions.append(position)
        self.next_entry_at = position + EVERY_BYTES

    def cover(self, frame: Frame, position: int, end: int) -> None:
        """Add a frame of the segment, unless it is covered."""
        if end <= self.covered:
            return
        if frame.type is FrameType.DATA and position >= self.next_entry_at:
            self.add(frame.base_offset, frame.wall, position)
        self.extend(end, frame.wall)

    def extend(self, end: int, wall: int) -> None:
        """Set the covered bytes to `end`; `wall` is the wall time of the last frame."""
        if not self.covered:
            self.first_wall = wall
        self.covered = end
        self.last_wall = wall

    def floor(self, offset: int) -> tuple[int, int]:
        """The offset and position of the last entry at or before an item offset; (-1, 0) if there is none."""
        entry = bisect_right(self.offsets, offset) - 1
        return (self.offsets[entry], self.positions[entry]) if entry >= 0 else (-1, 0)

    def around(self, wall: int) -> list[int]:
        """The numbers of the first entry at or after a wall time and of the entry before it, as far as they exist."""
        first = next((entry for entry, at in enumerate(self.walls) if at >= wall), len(self.walls))
        return [entry for entry in (first - 1, first) if 0 <= entry < len(self.walls)]

    def pack(self) -> bytes:
        columns = [_little_endian(column[:]).tobytes() for column in (self.offsets, self.walls, self.positions)]
        checked = b"".join([struct.pack("<Qqq", self.covered, self.first_wall, self.last_wall), *columns])
        return struct.pack("<4sHHII", INDEX_MAGIC, INDEX_VERSION, 0, len(self.offsets), value(checked)) + checked

    def __repr__(self) -> str:
        return f"SparseIndex({len(self.offsets)} entries, covered={self.covered})"


def unpack_index(data: bytes) -> SparseIndex | None:
    """The index in a file's bytes; None if they are damaged or of another version."""
    if len(data) < _INDEX_HEADER.size:
        return None
    magic, version, _, entries, checksum, covered, first_wall, last_wall = _INDEX_HEADER.unpack_from(data)
    whole = len(data) == _INDEX_HEADER.size + 24 * entries
    if magic != INDEX_MAGIC or version != INDEX_VERSION or not whole or value(data[_CHECKED_FROM:]) != checksum:
        return None
    index = SparseIndex()
    column = 8 * entries
    for number, target in enumerate((index.offsets, index.walls, index.positions)):
        start = _INDEX_HEADER.size + number * column
        target.frombytes(data[start : start + column])
        _little_endian(target)
    index.covered, index.first_wall, index.last_wall = covered, first_wall, last_wall
    index.next_entry_at = index.positions[-1] + EVERY_BYTES if entries else 0
    return index


def _little_endian(column: "array[int]") -> "array[int]":
    """Convert a column, in place, between the machine's byte order and little-endian."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


# -- reading ahead ---------------------------------------------------------------------------------


MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 256 * 1024


class ReadAhead:
    """Bytes of a file kept in memory: more while reads are sequential, fewer after a jump or a large read."""

    __slots__ = ("_chunk_bytes", "_files", "_handle", "_held", "_start")

    def __init__(self, files: Files, handle: int) -> None:
        self._files = files
        self._handle = handle
        self._held = b""
        self._start = 0
        self._chunk_bytes = MIN_CHUNK_BYTES

    def read(self, position: int, size: int) -> bytes:
        """`size` bytes from a position on; fewer only at the end of the file."""
        start = position - self._start
        held = len(self._held)
        if start >= 0 and start + size <= held:
            return self._held[start : start + size]
        if size > MIN_CHUNK_BYTES and not 0 <= start <= held - size // 2:
            self._chunk_bytes = MIN_CHUNK_BYTES
            return self._files.pread(self._handle, size, position)
        return self._refill(position, size, follows=0 < start <= held)

    def find_all(self, what: bytes, position: int, stop: int, step: int) -> Iterator[int]:
        """Yield every position in [position, stop) that is a multiple of `step` and at which `what` begins.

        `position` must be a multiple of `step`, and `what` no longer than `step`.
        """
        while position < stop:
            chunk = self._files.pread(self._handle, min(MAX_CHUNK_BYTES, stop - position), position)
            start = chunk.find(what)
            while start >= 0:
                if start % step == 0:
                    yield position + start
                start = chunk.find(what, start + 1)
            if not chunk:
                return
            position += len(chunk)

    def _refill(self, position: int, size: int, follows: bool) -> bytes:
        self._chunk_bytes = min(2 * self._chunk_bytes, MAX_CHUNK_BYTES) if follows else MIN_CHUNK_BYTES
        self._held = self._files.pread(self._handle, max(size, self._chunk_bytes), position)
        self._start = position
        return self._held[:size]
