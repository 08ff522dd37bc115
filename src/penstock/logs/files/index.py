"""The sparse index of a segment: where to begin reading for an item offset or a time.

Owns: `SparseIndex` and the layout of `.idx` files (docs/format.md). An entry stands at a DATA frame's start, about every 4 KiB of log.
It is a hint, never truth: whoever follows an entry checks that the frame is there and rebuilds the index when it is not;
a file that is missing, short or fails its checksum is as good as none.
"""

import struct
import sys
from array import array
from bisect import bisect_right

from google_crc32c import value

from penstock.logs.api import Frame, FrameType

MAGIC = b"PSIX"
VERSION = 1
EVERY_BYTES = 4096
_HEADER = struct.Struct("<4sHHIIQqq")  # magic, version, reserved, entries, checksum, covered, first wall, last wall
_CHECKED_FROM = 16


class SparseIndex:
    """Entries (offset, wall time, position) of one segment, packed, in order."""

    __slots__ = ("covered", "due", "first_wall", "last_wall", "offsets", "positions", "walls")

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.walls = array("q")
        self.positions = array("Q")
        self.covered = 0
        """The segment's bytes below this are indexed."""
        self.due = 0
        """The next entry belongs to the first DATA frame at or past this position."""
        self.first_wall = 0
        self.last_wall = 0
        """Wall times of the first and last frame covered."""

    def add(self, offset: int, wall: int, position: int) -> None:
        self.offsets.append(offset)
        self.walls.append(wall)
        self.positions.append(position)
        self.due = position + EVERY_BYTES

    def cover(self, frame: Frame, position: int, end: int) -> None:
        """Take up a frame read from the segment, unless it was before."""
        if end <= self.covered:
            return
        if frame.type is FrameType.DATA and position >= self.due:
            self.add(frame.base, frame.wall, position)
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
        return struct.pack("<4sHHII", MAGIC, VERSION, 0, len(self.offsets), value(checked)) + checked

    def __repr__(self) -> str:
        return f"SparseIndex({len(self.offsets)} entries, covered={self.covered})"


def unpack(data: bytes) -> SparseIndex | None:
    """The index in a file's bytes, or None when they are not a whole one of this version."""
    if len(data) < _HEADER.size:
        return None
    magic, version, _, entries, checksum, covered, first_wall, last_wall = _HEADER.unpack_from(data)
    whole = len(data) == _HEADER.size + 24 * entries
    if magic != MAGIC or version != VERSION or not whole or value(data[_CHECKED_FROM:]) != checksum:
        return None
    index = SparseIndex()
    column = 8 * entries
    for number, target in enumerate((index.offsets, index.walls, index.positions)):
        start = _HEADER.size + number * column
        target.frombytes(data[start : start + column])
        _little_endian(target)
    index.covered, index.first_wall, index.last_wall = covered, first_wall, last_wall
    index.due = index.positions[-1] + EVERY_BYTES if entries else 0
    return index


def _little_endian(column: "array[int]") -> "array[int]":
    """Turn a column between the machine's byte order and the file's."""
    if sys.byteorder == "big":
        column.byteswap()
    return column
