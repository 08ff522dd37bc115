"""The segment files of one partition: their names, and a bounded number of open ones.

Owns: `SegmentFiles`. The newest segment stays open, because the writer appends to it. Of the older ones, those read
last stay open with their indexes, so that the number of open files and the memory do not grow with the log.
Invariants
- `names` is replaced, never changed in place: a pass over the log keeps the list it began with;
- a segment that a pass reads stays open until the pass ends, even if its file was replaced or removed meanwhile;
- segments are removed one at a time, oldest first, and the directory is synced after each: a crash leaves no hole.
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
"""How many older segments stay open."""


class SegmentFiles:
    """A partition's segment files."""

    def __init__(self, files: Files, directory: str, log_id: LogId) -> None:
        self.directory = directory
        self.log_id = log_id
        self.names: list[SegmentName] = []
        """Oldest first."""
        self._files = files
        self._newest: Segment | None = None
        self._older: OrderedDict[SegmentName, Segment] = OrderedDict()
        self._facts: dict[SegmentName, SegmentFacts] = {}  # of older segments, which do not change

    # -- the list of segments ------------------------------------------------------------------------

    def load(self) -> list[str]:
        """Close all segments and read the list of segments from the directory; returns files left over by a crash."""
        self.close()
        files = self._files.list(self.directory) if self._files.exists(self.directory) else []
        self.names = [name for name in map(parse_name, files) if name is not None]
        kept = {f"{name}{suffix}" for name in self.names for suffix in (LOG, INDEX)}
        return [file for file in files if file not in kept and (file.endswith(INDEX) or (LOG in file and file.endswith(TEMPORARY)))]

    def create(self, name: SegmentName) -> Segment:
        """Create an empty segment as the newest one."""
        self.remove_index(name)
        segment = self._open(name, "append")
        if segment.size:  # a power cut undid its removal; truncating it needs no sync of the directory
            self._files.truncate(segment.handle, 0)
            segment.size = 0
        segment.index = SparseIndex()
        self._append_name(name)
        self._newest = segment
        return segment

    def remove_newest(self) -> None:
        """Remove the newest segment.

        Its file is emptied first: if a power cut undoes the removal, it must not bring back the frames.
        """
        self.close()
        write_file(self._files, self.path(self.names[-1]) + LOG, b"")
        self.remove(self.names[-1])

    def remove(self, name: SegmentName) -> None:
        """Remove a segment and its index, durably. To remove several, begin with the oldest."""
        self._forget(name)
        self.remove_index(name)
        self._files.remove(self.path(name) + LOG)
        self.names = [other for other in self.names if other != name]
        self._files.sync_directory(self.directory)

    def forget_missing(self) -> None:
        """Remove from `names` the older segments whose files are missing: they become gaps. The newest one is open."""
        present = set(self._files.list(self.directory))
        gone = [name for name in self.names[:-1] if f"{name}{LOG}" not in present]
        self.names = [name for name in self.names if name not in gone]
        for name in gone:
            self._forget(name)

    def replace(self, name: SegmentName, path: str) -> None:
        """Replace the file of an older segment by the file `path`, which is whole and synced."""
        self.remove_index(name)
        self._files.sync_directory(self.directory)  # the old index must not exist beside the new file
        self._files.rename(path, self.path(name) + LOG)
        self._forget(name)
        self._files.sync_directory(self.directory)

    # -- open segments -------------------------------------------------------------------------------

    def open_newest(self, mode: Mode = "append") -> Segment:
        """Open the newest segment, to append to it or only to read it; it stays open."""
        name = self.names[-1]
        for opened in (self._newest, self._older.pop(name, None)):
            if opened is not None:
                self._retire(opened)
        self._newest = None  # in case opening fails
        self._newest = self._open(name, mode)
        return self._newest

    def segment(self, name: SegmentName) -> Segment:
        """The segment of that name; opens it if needed."""
        if self._newest is not None and name == self._newest.name:
            return self._newest
        found = self._older.get(name)
        if found is None:
            found = self._open(name, "read")
        self._keep(found)
        return found

    def pieces(self, name: SegmentName, position: int) -> Iterator[Piece]:
        """Yield a segment's frames and damage from a position on."""
        segment = self.segment(name)
        segment.users += 1
        try:
            yield from scan(segment, position, self.log_id)
        finally:
            segment.users -= 1
            if segment.retired and not segment.users:
                self._files.close(segment.handle)

    def begins_with_base(self, name: SegmentName) -> bool:
        """Whether a segment's first frame is a readable Base, so that replay can begin there."""
        piece = next(self.pieces(name, 0), None)
        frame = piece.frame if piece is not None else None
        return frame is not None and frame.type is FrameType.BASE and frame.sequence == name.first_sequence

    def rewritten(self, name: SegmentName) -> bool:
        """Whether a segment was rewritten: its first frame is a SKIP, or, if that frame is lost, any frame is one."""
        header = header_at(self.segment(name), 0, self.log_id)
        if header is not None and header.type != FrameType.GAP:
            return header.type == FrameType.SKIP
        return any(piece.frame is not None and piece.frame.type is FrameType.SKIP for piece in self.pieces(name, 0))

    def facts(self, name: SegmentName) -> SegmentFacts:
        """The facts about a segment that `Log.segments` returns."""
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

    def size_bytes(self, name: SegmentName) -> int:
        """The size of a segment. One that is not open does not stay open."""
        known = self._newest if self._newest is not None and name == self._newest.name else self._older.get(name)
        if known is not None:
            return known.size
        handle = self._files.open(self.path(name) + LOG, "read")
        try:
            return self._files.size(handle)
        finally:
            self._files.close(handle)

    def path(self, name: SegmentName) -> str:
        """The path of a segment's files, without their suffix."""
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
        """A segment's complete index: from memory, else from its file, else built."""
        if segment.index is None:
            segment.index = self._stored_index(segment) or SparseIndex()
        if segment.index.covered < segment.size:
            self.rebuild(segment, segment.index)
        return segment.index

    def rebuild(self, segment: Segment, index: SparseIndex) -> None:
        """Extend an index from its covered bytes to the segment's end, and use it for the segment."""
        for piece in scan(segment, index.covered, self.log_id):
            if piece.frame is not None:
                index.cover(piece.frame, piece.position, piece.end)
        index.covered = segment.size
        segment.index = index

    def store_index(self, segment: Segment) -> None:
        """Write a segment's index to its file. If a crash cuts the file, its checksum fails and it is rebuilt."""
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

    def _append_name(self, name: SegmentName) -> None:
        """Append a name to `names`, unless it is the last one: a log's first segment, still empty, is created again.

        The newest segment until now becomes an older one.
        """
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
        """Forget the facts of an older segment, and close it."""
        self._facts.pop(name, None)
        opened = self._older.pop(name, None)
        if opened is not None:
            self._retire(opened)

    def _retire(self, segment: Segment) -> None:
        """Close a segment, now or when the last pass over it ends: until then its handle must not be reused."""
        segment.retired = True
        if not segment.users:
            self._files.close(segment.handle)
