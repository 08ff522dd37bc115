"""One segment file: its name, its frames in order, and what lies between them when bytes are damaged.

Owns: `SegmentName`, `Segment` (an open file), `Owner` (whose frames belong here) and `walk`.
A segment is named by the item offset and by the frame sequence it starts at: two segments may start at one offset, never at one sequence,
and a segment whose first frame is lost still tells what it was.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs.api import Frame
from penstock.logs.files.index import SparseIndex
from penstock.logs.files.system import Files
from penstock.logs.files.window import Window
from penstock.logs.frame import ALIGNMENT, CHECKSUM_BYTES, HEADER_BYTES, MAGIC, Damaged, Header, frame_bytes, parse_header, unpack_body
from penstock.words.errors import CorruptLog

LOG, INDEX = ".log", ".idx"
DIGITS = 20


class SegmentName(NamedTuple):
    """What a segment is called; names sort as the segments follow each other."""

    base: int
    """Item offset the segment starts at."""
    first_sequence: int

    def __str__(self) -> str:
        return f"{self.base:0{DIGITS}d}-{self.first_sequence:0{DIGITS}d}"


FIRST = SegmentName(0, 1)


def parse_name(file_name: str) -> SegmentName | None:
    """The segment whose `.log` file is called so, or None when it is another file."""
    stem, dash, sequence = file_name.removesuffix(LOG).partition("-")
    digits = len(stem) == len(sequence) == DIGITS and stem.isdecimal() and sequence.isdecimal()
    return SegmentName(int(stem), int(sequence)) if dash and digits and file_name.endswith(LOG) else None


class Owner(NamedTuple):
    """Whose frames these are."""

    incarnation: int
    partition: int

    def __str__(self) -> str:
        return f"partition {self.partition} of incarnation {self.incarnation:016x}"


class Segment:
    """An open segment file."""

    __slots__ = ("handle", "index", "name", "path", "retired", "size", "users", "window")

    def __init__(self, files: Files, path: str, name: SegmentName, handle: int) -> None:
        self.path = path
        self.name = name
        self.handle = handle
        self.size = files.size(handle)
        """Bytes in use: the owner of the newest segment moves it as it appends."""
        self.window = Window(files, handle)
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


class _Foreign(Damaged):
    """A whole frame that belongs to another partition."""


def walk(segment: Segment, position: int, owner: Owner) -> Iterator[Piece]:
    """Everything from `position` to the segment's end, which must be a frame's start.

    After damage the next frame must carry a higher sequence than the last one seen: a payload may well hold copies of older frames.
    """
    lowest = segment.name.first_sequence
    while position < segment.size:
        try:
            flags, end, frame = _frame_at(segment, position, owner)
        except _Foreign as foreign:
            raise CorruptLog(f"{segment.path} holds {foreign}; put the file back where it belongs, nothing was changed") from None
        except Damaged as damage:
            end = _next_frame(segment, position, owner, lowest)
            yield Piece(position, end, 0, None, str(damage))
        else:
            lowest = frame.sequence + 1
            yield Piece(position, end, flags, frame, "")
        position = end


def header_at(segment: Segment, position: int, owner: Owner) -> Header | None:
    """The sound header of ours at a position, or None."""
    try:
        header = parse_header(segment.window.read(position, min(HEADER_BYTES, segment.size - position)))
    except Damaged:
        return None
    return header if (header.incarnation, header.partition) == owner else None


def _frame_at(segment: Segment, position: int, owner: Owner) -> tuple[int, int, Frame]:
    window = segment.window
    header = parse_header(window.read(position, min(HEADER_BYTES, segment.size - position)))
    if header.incarnation != owner.incarnation or header.partition != owner.partition:
        raise _Foreign(f"a frame of {Owner(header.incarnation, header.partition)}, not of {owner}")
    end = position + frame_bytes(header.stored_bytes)
    if end > segment.size:
        raise Damaged("the file ends inside a frame")
    stored = window.read(position + HEADER_BYTES, header.stored_bytes + CHECKSUM_BYTES)
    return header.flags, end, unpack_body(header, stored)


def _next_frame(segment: Segment, position: int, owner: Owner, lowest: int) -> int:
    """Where the next whole frame of ours starts after damage at `position`, or the segment's end."""
    start = _trusted_end(segment, position, owner)
    places = segment.window.places(MAGIC, start, segment.size, ALIGNMENT)
    return next((place for place in places if _holds_frame(segment, place, owner, lowest)), segment.size)


def _trusted_end(segment: Segment, position: int, owner: Owner) -> int:
    """Where to look on: past the damaged frame when its header, and so its length, is sound; else just behind its start."""
    header = header_at(segment, position, owner)
    return position + (ALIGNMENT if header is None else frame_bytes(header.stored_bytes))


def _holds_frame(segment: Segment, position: int, owner: Owner, lowest: int) -> bool:
    try:
        return _frame_at(segment, position, owner)[2].sequence >= lowest
    except Damaged:
        return False
