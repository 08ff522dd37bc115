"""The segments of one partition, in order: which there are, and a bounded number of them open.

Owns: `SegmentFiles`. The newest segment stays open (its owner appends to it); of the older ones the few read last are kept open with their
indexes, so that a long log costs neither handles nor memory.
Invariants
- `names` is replaced, never changed in place: a pass over the log keeps the list it began with;
- a segment that a pass is reading stays open until the pass lets go of it, even when its file was replaced or removed meanwhile;
- segments go one at a time, oldest first, the folder synced after each: whatever a crash undoes, no hole is left.
"""

from collections import OrderedDict
from collections.abc import Iterator

from penstock.logs.files.filesystem import TEMPORARY, Files, Mode, read_file, write_file
from penstock.logs.files.segment import (
    INDEX,
    LOG,
    LogId,
    Piece,
    Segment,
    SegmentName,
    SparseIndex,
    header_at,
    parse_name,
    scan,
    unpack_index,
)
from penstock.logs.log import FrameType, SegmentFacts

MAX_OPEN = 4
"""Older segments held open."""


class SegmentFiles:
    """A partition's segment files."""

    def __init__(self, files: Files, directory: str, owner: LogId) -> None:
        self.directory = directory
        self.log_id = owner
        self.names: list[SegmentName] = []
        """Oldest first."""
        self._files = files
        self._newest: Segment | None = None
        self._older: OrderedDict[SegmentName, Segment] = OrderedDict()
        self._facts: dict[SegmentName, SegmentFacts] = {}  # of older segments, which change no more

    # -- which there are -----------------------------------------------------------------------------

    def load(self) -> list[str]:
        """Close what is open and learn anew which segments there are. Says which files of unfinished work lie about."""
        self.close()
        files = self._files.list(self.directory) if self._files.exists(self.directory) else []
        self.names = [name for name in map(parse_name, files) if name is not None]
        kept = {f"{name}{suffix}" for name in self.names for suffix in (LOG, INDEX)}
        return [file for file in files if file not in kept and (file.endswith(INDEX) or (LOG in file and file.endswith(TEMPORARY)))]

    def create(self, name: SegmentName) -> Segment:
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

    def drop_newest(self) -> None:
        """Take the last of `names` away, files and all.

        It is emptied first: a power cut may bring back a name whose removal was not synced, and must not bring back its frames, which
        were given up.
        """
        self.close()
        write_file(self._files, self.path(self.names[-1]) + LOG, b"")
        self.remove(self.names[-1])

    def remove(self, name: SegmentName) -> None:
        """Take a segment away, files and all. Whoever drops several older ones begins with the oldest of them."""
        self._forget(name)
        self.remove_index(name)
        self._files.remove(self.path(name) + LOG)
        self.names = [other for other in self.names if other != name]
        self._files.sync_directory(self.directory)

    def drop_oldest(self, count: int) -> int:
        """Take the oldest segments away; says how many bytes that freed."""
        freed = 0
        for name in self.names[:count]:
            freed += self.segment(name).size
            self.remove(name)
        return freed

    def forget_missing(self) -> None:
        """A file is gone that nobody here took away: from now on its segment is a gap. The newest is open, whatever became of its name."""
        there = set(self._files.list(self.directory))
        gone = [name for name in self.names[:-1] if f"{name}{LOG}" not in there]
        self.names = [name for name in self.names if name not in gone]
        for name in gone:
            self._forget(name)

    def replace(self, name: SegmentName, path: str) -> None:
        """Put another file, whole and synced, in the place of an older segment's."""
        self.remove_index(name)
        self._files.sync_directory(self.directory)  # no index may outlive the bytes that it speaks of
        self._files.rename(path, self.path(name) + LOG)
        self._forget(name)
        self._files.sync_directory(self.directory)

    # -- open segments -------------------------------------------------------------------------------

    def open_newest(self, mode: Mode = "append") -> Segment:
        """Open the last of `names`, to append to it or only to read; it stays open."""
        name = self.names[-1]
        for opened in (self._newest, self._older.pop(name, None)):
            if opened is not None:
                self._retire(opened)
        self._newest = None  # if opening fails nothing is held
        self._newest = self._open(name, mode)
        return self._newest

    def segment(self, name: SegmentName) -> Segment:
        """The open segment of that name."""
        if self._newest is not None and name == self._newest.name:
            return self._newest
        found = self._older.get(name)
        if found is None:
            found = self._open(name, "read")
        self._keep(found)
        return found

    def pieces(self, name: SegmentName, position: int) -> Iterator[Piece]:
        """A segment's frames and damage from a position on."""
        segment = self.segment(name)
        segment.users += 1
        try:
            yield from scan(segment, position, self.log_id)
        finally:
            segment.users -= 1
            if segment.retired and not segment.users:
                self._files.close(segment.handle)

    def first_piece(self, name: SegmentName) -> Piece | None:
        """What a segment begins with, or None when it is empty."""
        return next(self.pieces(name, 0), None)

    def begins_with_base(self, name: SegmentName) -> bool:
        """Whether replay may start at a segment: its Base is there and can be read."""
        piece = self.first_piece(name)
        frame = piece.frame if piece is not None else None
        return frame is not None and frame.type is FrameType.BASE and frame.sequence == name.first_sequence

    def rewritten(self, name: SegmentName) -> bool:
        """Whether a segment holds only what a rewrite kept. It begins and ends with a SKIP; where the first is lost, any other tells."""
        header = header_at(self.segment(name), 0, self.log_id)
        if header is not None and header.type != FrameType.GAP:
            return header.type == FrameType.SKIP
        return any(piece.frame is not None and piece.frame.type is FrameType.SKIP for piece in self.pieces(name, 0))

    def facts(self, name: SegmentName) -> SegmentFacts:
        """What segments() tells of one."""
        known = self._facts.get(name)
        if known is None:
            segment = self.segment(name)
            index = self.index(segment)
            header = header_at(segment, 0, self.log_id) if segment.size else None
            elapsed = header.elapsed if header is not None and header.type != FrameType.GAP else -1
            known = SegmentFacts(*name, segment.size, index.first_wall, index.last_wall, self.rewritten(name), elapsed)
            if name != self.names[-1]:
                self._facts[name] = known
        return known

    def file_size(self, segment: Segment) -> int:
        """A segment's bytes on disk, in use or not."""
        return self._files.size(segment.handle)

    def path(self, name: SegmentName) -> str:
        """Of a segment's files, without their suffix."""
        return f"{self.directory}/{name}"

    def close(self) -> None:
        """Close every segment."""
        opened = [*self._older.values(), *([self._newest] if self._newest else [])]
        self._older.clear()
        self._facts.clear()
        self._newest = None
        for segment in opened:
            self._retire(segment)

    # -- indexes -------------------------------------------------------------------------------------

    def index(self, segment: Segment) -> SparseIndex:
        """A segment's index as far as its frames go: as held, else from its file, else built."""
        if segment.index is None:
            segment.index = self._stored_index(segment) or SparseIndex()
        if segment.index.covered < segment.size:
            self.rebuild(segment, segment.index)
        return segment.index

    def rebuild(self, segment: Segment, index: SparseIndex) -> None:
        """Bring an index up to the segment's end, from what it covers on."""
        for piece in scan(segment, index.covered, self.log_id):
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

    def _stored_index(self, segment: Segment) -> SparseIndex | None:
        data = read_file(self._files, self.path(segment.name) + INDEX)
        index = unpack_index(data) if data is not None else None
        return index if index is not None and index.covered <= segment.size else None

    # -- steps ---------------------------------------------------------------------------------------

    def _open(self, name: SegmentName, mode: Mode) -> Segment:
        path = self.path(name) + LOG
        return Segment(self._files, path, name, self._files.open(path, mode))

    def _succeed(self, name: SegmentName) -> None:
        """Put a name at the end; the newest until now becomes an older one. A log's first segment, still empty, is begun again in place."""
        if self._newest is not None and self._newest.name == name:
            self._retire(self._newest)
        elif self._newest is not None:
            self._keep(self._newest)
        if name not in self.names[-1:]:
            self.names = [*self.names, name]

    def _keep(self, segment: Segment) -> None:
        self._older[segment.name] = segment
        self._older.move_to_end(segment.name)
        while len(self._older) > MAX_OPEN:
            _, oldest = self._older.popitem(last=False)
            self._retire(oldest)

    def _forget(self, name: SegmentName) -> None:
        """Know nothing of an older segment any more."""
        self._facts.pop(name, None)
        opened = self._older.pop(name, None)
        if opened is not None:
            self._retire(opened)

    def _retire(self, segment: Segment) -> None:
        """Close a segment, now or when the last pass over it ends: its handle's number must not become another file's under a reader."""
        segment.retired = True
        if not segment.users:
            self._files.close(segment.handle)
