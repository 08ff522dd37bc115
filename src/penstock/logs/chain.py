"""The segments of one partition, in order: which there are, and a bounded number of them open.

Owns: `Chain`. The newest segment stays open (its owner appends to it); of the older ones the few read last are kept open with their
indexes, so that a long log costs neither handles nor memory.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs.files import Files, Mode
from penstock.logs.index import SparseIndex, unpack
from penstock.logs.segment import INDEX, LOG, Owner, Piece, Segment, SegmentName, parse_name, walk
from penstock.logs.writing import read_file, write_file

MAX_OPEN = 4
"""Older segments held open."""


class SegmentFacts(NamedTuple):
    """What there is to know of a segment without reading it through."""

    base: int
    first_sequence: int
    size_bytes: int
    first_wall: int
    """Wall times of its first and last frame."""
    last_wall: int


class Chain:
    """A partition's segment files."""

    def __init__(self, files: Files, directory: str, owner: Owner) -> None:
        self.directory = directory
        self.owner = owner
        self.names: list[SegmentName] = []
        """Oldest first."""
        self._files = files
        self._newest: Segment | None = None
        self._older: OrderedDict[SegmentName, Segment] = OrderedDict()

    def load(self) -> None:
        """Close what is open and learn anew which segments there are."""
        self.close()
        names = self._files.list(self.directory) if self._files.exists(self.directory) else []
        self.names = [name for name in map(parse_name, names) if name is not None]

    def open_newest(self, mode: Mode = "append") -> Segment:
        """Open the last of `names`, to append to it or only to read; it stays open."""
        name = self.names[-1]
        for opened in (self._newest, self._older.pop(name, None)):
            if opened is not None:
                self._files.close(opened.handle)
        self._newest = self._open(name, mode)
        return self._newest

    def grow(self, name: SegmentName) -> Segment:
        """Make a new, empty segment, the newest from now on."""
        self.remove_index(name)
        segment = self._open(name, "append")
        if segment.size:  # left behind by a removal that a power cut undid; cut, not removed, so that its name needs no new sync
            self._files.truncate(segment.handle, 0)
            segment.size = 0
        segment.index = SparseIndex()
        self._succeed(name)
        self._newest = segment
        return segment

    def segment(self, number: int) -> Segment:
        """The open segment at a place in `names`."""
        name = self.names[number]
        if self._newest is not None and name == self._newest.name:
            return self._newest
        found = self._older.get(name)
        if found is None:
            found = self._open(name, "read")
        self._keep(found)
        return found

    def drop_newest(self) -> None:
        """Take the last of `names` away, files and all."""
        self.close()
        name = self.names[-1]
        self.remove_index(name)
        self._files.remove(self.path(name) + LOG)
        self._files.sync_directory(self.directory)
        self.names.pop()

    def index(self, segment: Segment) -> SparseIndex:
        """A segment's index as far as its frames go: as held, else from its file, else built."""
        if segment.index is None:
            segment.index = self._stored_index(segment) or SparseIndex()
        if segment.index.covered < segment.size:
            self.rebuild(segment, segment.index)
        return segment.index

    def rebuild(self, segment: Segment, index: SparseIndex) -> None:
        """Bring an index up to the segment's end, from what it covers on."""
        for piece in walk(segment, index.covered, self.owner):
            if piece.frame is not None:
                index.cover(piece.frame, piece.position, piece.end)
        index.covered = segment.size
        segment.index = index

    def store_index(self, segment: Segment) -> None:
        """Write a segment's index beside it. Cut short it fails its checksum, and is rebuilt when it is wanted."""
        write_file(self._files, self.path(segment.name) + INDEX, self.index(segment).pack())

    def remove_index(self, name: SegmentName) -> None:
        path = self.path(name) + INDEX
        if self._files.exists(path):
            self._files.remove(path)

    def file_size(self, segment: Segment) -> int:
        """A segment's bytes on disk, in use or not."""
        return self._files.size(segment.handle)

    def facts(self, number: int) -> SegmentFacts:
        segment = self.segment(number)
        index = self.index(segment)
        return SegmentFacts(*segment.name, segment.size, index.first_wall, index.last_wall)

    def first_piece(self, number: int) -> Piece | None:
        """What a segment begins with, or None when it is empty."""
        return next(self.pieces(number, 0), None)

    def pieces(self, number: int, position: int) -> Iterator[Piece]:
        return walk(self.segment(number), position, self.owner)

    def path(self, name: SegmentName) -> str:
        """Of a segment's files, without their suffix."""
        return f"{self.directory}/{name}"

    def close(self) -> None:
        """Close every segment."""
        opened = [*self._older.values(), *([self._newest] if self._newest else [])]
        self._older.clear()
        self._newest = None
        for segment in opened:
            self._files.close(segment.handle)

    def _open(self, name: SegmentName, mode: Mode) -> Segment:
        path = self.path(name) + LOG
        return Segment(self._files, path, name, self._files.open(path, mode))

    def _succeed(self, name: SegmentName) -> None:
        """Put a name at the end; the newest until now becomes an older one. A log's first segment, still empty, is begun again in place."""
        if self._newest is not None and self._newest.name == name:
            self._files.close(self._newest.handle)
        elif self._newest is not None:
            self._keep(self._newest)
        if name not in self.names[-1:]:
            self.names.append(name)

    def _keep(self, segment: Segment) -> None:
        self._older[segment.name] = segment
        self._older.move_to_end(segment.name)
        while len(self._older) > MAX_OPEN:
            _, oldest = self._older.popitem(last=False)
            self._files.close(oldest.handle)

    def _stored_index(self, segment: Segment) -> SparseIndex | None:
        data = read_file(self._files, self.path(segment.name) + INDEX)
        index = unpack(data) if data is not None else None
        return index if index is not None and index.covered <= segment.size else None
