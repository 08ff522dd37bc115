"""One segment file: its name, its frames in order, what lies between them when bytes are damaged, and its index.

Owns: `SegmentName`, `Segment` (an open file), `LogId` (whose frames belong here), `walk`, `SparseIndex` and `ReadAhead`.
A segment is named by the item offset and by the frame sequence it starts at: two segments may start at one offset, never at one sequence,
and a segment whose first frame is lost still tells what it was.
The index (`.idx`, docs/format.md) tells where to begin reading for an item offset or a time. An entry stands at a DATA frame's start, about
every 4 KiB of log. It is a hint, never truth: whoever follows an entry checks that the frame is there and rebuilds the index when it is
not; a file that is missing, short or fails its checksum is as good as none.
A window reads ahead, so that many small frames cost one system call and a large one costs no copy. A file under it only grows: what was
read once stays true. Whoever cuts a file, or reads one whose end may still change, opens a new window.
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
    """What a segment is called; names sort as the segments follow each other."""

    base_offset: int
    """Item offset the segment starts at."""
    first_sequence: int

    def __str__(self) -> str:
        return f"{self.base_offset:0{DIGITS}d}-{self.first_sequence:0{DIGITS}d}"


FIRST = SegmentName(0, 1)


def parse_name(file_name: str) -> SegmentName | None:
    """The segment whose `.log` file is called so, or None when it is another file."""
    stem, dash, sequence = file_name.removesuffix(LOG).partition("-")
    digits = len(stem) == len(sequence) == DIGITS and stem.isdecimal() and sequence.isdecimal()
    return SegmentName(int(stem), int(sequence)) if dash and digits and file_name.endswith(LOG) else None


class LogId(NamedTuple):
    """Whose frames these are."""

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
        """Bytes in use: the owner of the newest segment moves it as it appends."""
        self.read_ahead = ReadAhead(files, handle)
        self.index: SparseIndex | None = None
        self.users = 0
        """Passes that read it now."""
        self.retired = False
        """It is to be closed when the last of them ends."""

    def __repr__(self) -> str:
        return f"Segment({self.name}, {self.size} bytes)"


class Piece(NamedTuple):
    """A stretch of a segment: a whole frame, or damage up to the next one."""

    position: int
    end: int
    flags: int
    frame: Frame | None
    why: str


class _Foreign(DamagedFrame):
    """A whole frame that belongs to another partition."""


def scan(segment: Segment, position: int, owner: LogId) -> Iterator[Piece]:
    """Everything from `position` to the segment's end, which must be a frame's start.

    After damage the next frame must carry a higher sequence than the last one seen: a payload may well hold copies of older frames.
    """
    lowest = segment.name.first_sequence
    while position < segment.size:
        try:
            flags, end, frame = _frame_at(segment, position, owner)
        except _Foreign as foreign:
            raise CorruptLog(f"{segment.path} holds {foreign}; put the file back where it belongs, nothing was changed") from None
        except DamagedFrame as damage:
            end = _next_frame(segment, position, owner, lowest)
            yield Piece(position, end, 0, None, str(damage))
        else:
            lowest = frame.sequence + 1
            yield Piece(position, end, flags, frame, "")
        position = end


def header_at(segment: Segment, position: int, owner: LogId) -> FrameHeader | None:
    """The sound header of ours at a position, or None."""
    try:
        header = parse_header(segment.read_ahead.read(position, min(HEADER_BYTES, segment.size - position)))
    except DamagedFrame:
        return None
    return header if (header.incarnation, header.partition) == owner else None


def _frame_at(segment: Segment, position: int, owner: LogId) -> tuple[int, int, Frame]:
    window = segment.read_ahead
    header = parse_header(window.read(position, min(HEADER_BYTES, segment.size - position)))
    if header.incarnation != owner.incarnation or header.partition != owner.partition:
        raise _Foreign(f"a frame of {LogId(header.incarnation, header.partition)}, not of {owner}")
    end = position + frame_bytes(header.stored_bytes)
    if end > segment.size:
        raise DamagedFrame("the file ends inside a frame")
    stored = window.read(position + HEADER_BYTES, header.stored_bytes + CHECKSUM_BYTES)
    return header.flags, end, unpack_body(header, stored)


def _next_frame(segment: Segment, position: int, owner: LogId, lowest: int) -> int:
    """Where the next whole frame of ours starts after damage at `position`, or the segment's end."""
    start = _trusted_end(segment, position, owner)
    places = segment.read_ahead.find_all(MAGIC, start, segment.size, ALIGNMENT)
    return next((place for place in places if _holds_frame(segment, place, owner, lowest)), segment.size)


def _trusted_end(segment: Segment, position: int, owner: LogId) -> int:
    """Where to look on: past the damaged frame when its header, and so its length, is sound; else just behind its start."""
    header = header_at(segment, position, owner)
    return position + (ALIGNMENT if header is None else frame_bytes(header.stored_bytes))


def _holds_frame(segment: Segment, position: int, owner: LogId, lowest: int) -> bool:
    try:
        return _frame_at(segment, position, owner)[2].sequence >= lowest
    except DamagedFrame:
        return False


# -- the index -------------------------------------------------------------------------------------


INDEX_MAGIC = b"PSIX"
INDEX_VERSION = 1
EVERY_BYTES = 4096
_INDEX_HEADER = struct.Struct("<4sHHIIQqq")  # magic, version, reserved, entries, checksum, covered, first wall, last wall
_CHECKED_FROM = 16


class SparseIndex:
    """Entries (offset, wall time, position) of one segment, packed, in order."""

    __slots__ = ("covered", "first_wall", "last_wall", "next_entry_at", "offsets", "positions", "walls")

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.walls = array("q")
        self.positions = array("Q")
        self.covered = 0
        """The segment's bytes below this are indexed."""
        self.next_entry_at = 0
        """The next entry belongs to the first DATA frame at or past this position."""
        self.first_wall = 0
        self.last_wall = 0
        """Wall times of the first and last frame covered."""

    def add(self, offset: int, wall: int, position: int) -> None:
        self.offsets.append(offset)
        self.walls.append(wall)
        self.positions.append(position)
        self.next_entry_at = position + EVERY_BYTES

    def cover(self, frame: Frame, position: int, end: int) -> None:
        """Take up a frame read from the segment, unless it was before."""
        if end <= self.covered:
            return
        if frame.type is FrameType.DATA and position >= self.next_entry_at:
            self.add(frame.base_offset, frame.wall, position)
        self.extend(end, frame.wall)

    def extend(self, end: int, wall: int) -> None:
        """Say that everything below `end` is covered; the last frame has that wall time."""
        if not self.covered:
            self.first_wall = wall
        self.covered = end
        self.last_wall = wall

    def floor(self, offset: int) -> tuple[int, int]:
        """Offset and position of the last entry at or before an item offset; (-1, 0) when there is none: begin at the segment's start."""
        place = bisect_right(self.offsets, offset) - 1
        return (self.offsets[place], self.positions[place]) if place >= 0 else (-1, 0)

    def around(self, wall: int) -> list[int]:
        """The entries around the first frame at or after a wall time: the first such entry and the one before it, as far as there are."""
        last = next((place for place, at in enumerate(self.walls) if at >= wall), len(self.walls))
        return [place for place in (last - 1, last) if 0 <= place < len(self.walls)]

    def pack(self) -> bytes:
        columns = [_little_endian(column[:]).tobytes() for column in (self.offsets, self.walls, self.positions)]
        checked = b"".join([struct.pack("<Qqq", self.covered, self.first_wall, self.last_wall), *columns])
        return struct.pack("<4sHHII", INDEX_MAGIC, INDEX_VERSION, 0, len(self.offsets), value(checked)) + checked

    def __repr__(self) -> str:
        return f"SparseIndex({len(self.offsets)} entries, covered={self.covered})"


def unpack_index(data: bytes) -> SparseIndex | None:
    """The index in a file's bytes, or None when they are not a whole one of this version."""
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
    """Turn a column between the machine's byte order and the file's."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


# -- reading ahead ---------------------------------------------------------------------------------


MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 256 * 1024


class ReadAhead:
    """A stretch of a file held in memory. It widens while reads follow each other, and narrows when they jump or are large."""

    __slots__ = ("_chunk_bytes", "_files", "_handle", "_held", "_start")

    def __init__(self, files: Files, handle: int) -> None:
        self._files = files
        self._handle = handle
        self._held = b""
        self._start = 0
        self._chunk_bytes = MIN_CHUNK_BYTES

    def read(self, position: int, size: int) -> bytes:
        """That many bytes from there on, fewer only where the file ends."""
        start = position - self._start
        held = len(self._held)
        if start >= 0 and start + size <= held:
            return self._held[start : start + size]
        if size > MIN_CHUNK_BYTES and not 0 <= start <= held - size // 2:
            self._chunk_bytes = MIN_CHUNK_BYTES
            return self._files.pread(self._handle, size, position)
        return self._refill(position, size, follows=0 < start <= held)

    def find_all(self, what: bytes, position: int, stop: int, step: int) -> Iterator[int]:
        """Where `what`, no longer than `step`, lies inside [position, stop) at a multiple of `step`; `position` is one itself."""
        while position < stop:
            chunk = self._files.pread(self._handle, min(MAX_CHUNK_BYTES, stop - position), position)
            place = chunk.find(what)
            while place >= 0:
                if place % step == 0:
                    yield position + place
                place = chunk.find(what, place + 1)
            if not chunk:
                return
            position += len(chunk)

    def _refill(self, position: int, size: int, follows: bool) -> bytes:
        self._chunk_bytes = min(2 * self._chunk_bytes, MAX_CHUNK_BYTES) if follows else MIN_CHUNK_BYTES
        self._held = self._files.pread(self._handle, max(size, self._chunk_bytes), position)
        self._start = position
        return self._held[:size]
