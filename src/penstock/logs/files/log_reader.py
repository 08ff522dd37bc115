"""Reading items by offset or from a time on: the index finds the place, one pass over frames does the rest.

Owns: `LogReader`, what a log's owner and a lock-free reader have in common.
It remembers where its last read was, so that reading on, or in the same frame again, needs no search.
A segment may be dropped or rewritten while it is read. Bytes of an open file stay what they were; one that is gone when it is wanted is no
error: the log is looked at anew, and read again from where it had come to.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from penstock.logs.files.filesystem import storage_failed
from penstock.logs.files.recovery import ExpectedEnd, Replay, ReplayPosition, segment_start
from penstock.logs.files.segment import Piece, SegmentName, SparseIndex, header_at
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.frame import DROPPED, dropped_gap
from penstock.logs.log import ENDLESS, Frame, FrameType, Gap, LogRange, SegmentFacts
from penstock.words.errors import StorageFailed

T = TypeVar("T")
LOOKS = 20
"""How often the log is looked at anew before something is read: each time because a whole segment went in between."""


class _Recent(NamedTuple):
    """The frame read last: the items in it, its place, and the place behind it."""

    start: int
    stop: int
    here: ReplayPosition
    behind: ReplayPosition


class LogReader:
    """Reads a chain of segments by item offset, or from one end to the other."""

    def __init__(self, chain: SegmentFiles, look: Callable[[], None]) -> None:
        """`look` learns anew which segments there are, when the file of one that should be there is not."""
        self._chain = chain
        self._look = look
        self._recent: _Recent | None = None
        self._end: ReplayPosition | None = None

    def forget_positions(self) -> None:
        """Segments were cut, dropped or opened anew: places are no longer known."""
        self._recent = self._end = None

    def remember_end(self, replay: Replay) -> None:
        """A pass has come to the end: who reads on begins there."""
        self._end = replay.place

    def read(self, start: int, stop: int, sequence: int, offset: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        """The DATA frames that overlap [start, stop) of a log that ends with that frame, before that item offset."""
        if offset:
            stop = min(stop, offset)  # no item follows, however many records do
        if start >= stop:
            return []
        return self._repeat(lambda: self._read(start, stop, ExpectedEnd(ENDLESS, sequence, offset), size_bytes))

    def frames(self, sequence: int, offset: int, after: int = 0) -> Iterator[Frame | Gap]:
        """Everything behind frame `after`, oldest first, of a log that ends with that frame, before that item offset."""
        oldest = self._chain.names[0]
        done, reached, looks = after or oldest.first_sequence - 1, oldest.base_offset, LOOKS
        while looks:
            looks -= 1
            oldest = self._chain.names[0]
            if oldest.first_sequence > done + 1:
                yield Gap(done + 1, oldest.first_sequence - 1, reached, oldest.base_offset, self._chain.directory, DROPPED)
                done, reached = oldest.first_sequence - 1, oldest.base_offset
            replay = Replay(self._chain, self._after(done), ExpectedEnd(ENDLESS, sequence, offset))
            try:
                for item in replay:
                    found = item if isinstance(item, Gap) else item.frame
                    if found is not None and replay.sequence > done:
                        done, reached, looks = replay.sequence, replay.offset, LOOKS
                        if isinstance(found, Gap) or found.type is not FrameType.SKIP:
                            yield found
                self.remember_end(replay)
                return
            except FileNotFoundError:
                self.forget_positions()
                self._repeat(self._look)
            except OSError as error:
                raise storage_failed(error, "reading", self._chain.directory) from error
        raise StorageFailed(f"segments of {self._chain.directory} go faster than they can be read; read again")

    def segments(self) -> list[SegmentFacts]:
        return self._repeat(lambda: [self._chain.facts(name) for name in self._chain.names])

    def newest(self) -> SegmentFacts:
        return self._repeat(lambda: self._chain.facts(self._chain.names[-1]))

    def published(self, reached: Callable[[], tuple[int, int]]) -> LogRange:
        """How far the log goes. `reached` tells its next item offset and the sequence of its last frame."""
        return self._repeat(lambda: self._published(*reached()))

    def size_bytes(self) -> int:
        return self._repeat(lambda: sum(self._chain.segment(name).size for name in self._chain.names))

    def offset_at(self, wall: int, offset: int) -> int:
        """The first item written at or after a time (see api.py), or `offset` when there is none."""
        return self._repeat(lambda: self._offset_at(wall, offset))

    # -- steps ---------------------------------------------------------------------------------------

    def _published(self, end: int, sequence: int) -> LogRange:
        names = self._chain.names
        whole_from = next((name.first_sequence for name in names if not self._chain.rewritten(name)), 1)
        return LogRange(names[0].base_offset if names else 0, end, sequence, whole_from, [name.first_sequence for name in names])

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Do something to the log, again when a segment went away meanwhile."""
        try:
            for _ in range(LOOKS):
                try:
                    return attempt()
                except FileNotFoundError:
                    self.forget_positions()
                    self._look()
            return attempt()
        except OSError as error:
            raise storage_failed(error, "reading", self._chain.directory) from error

    def _read(self, start: int, stop: int, promise: ExpectedEnd, size_bytes: int) -> list[Frame | Gap]:
        found: list[Frame | Gap] = []
        oldest = self._chain.names[0]
        if start < oldest.base_offset:
            found.append(dropped_gap(oldest.first_sequence, oldest.base_offset, self._chain.directory))
            if stop <= oldest.base_offset:
                return found
        replay = Replay(self._chain, self._place(start), promise)
        for item in replay:
            if isinstance(item, Gap):
                if item.start < stop and start < item.stop:
                    found.append(item)
            elif item.frame is not None:
                before = len(found)
                if self._take(item, item.frame, start, stop, replay, found):
                    break
                if len(found) > before:
                    size_bytes -= len(item.frame.body)
                    if size_bytes <= 0:
                        break
        return found

    def _take(self, piece: Piece, frame: Frame, start: int, stop: int, replay: Replay, found: list[Frame | Gap]) -> bool:
        """Keep a frame of the range; say whether the range ends here."""
        if frame.base_offset >= stop:
            return True
        if frame.type is not FrameType.DATA:
            return False
        frame_stop = frame.base_offset + frame.count
        if frame_stop > start:
            found.append(frame)
            here = ReplayPosition(replay.number, piece.position, frame.sequence - 1, frame.base_offset)
            self._recent = _Recent(
                frame.base_offset, frame_stop, here, ReplayPosition(replay.number, piece.end, frame.sequence, frame_stop)
            )
        return frame_stop >= stop

    def _place(self, offset: int) -> ReplayPosition:
        recent = self._recent
        if recent is not None and recent.start <= offset <= recent.stop:
            return recent.behind if offset == recent.stop else recent.here
        return self._search(offset)

    def _search(self, offset: int) -> ReplayPosition:
        number = max(0, bisect_right(self._chain.names, (offset, ENDLESS)) - 1)
        name = self._chain.names[number]
        if name.base_offset == offset and self._chain.segment(name).index is None:  # to learn what is in it would be to read it through
            return segment_start(self._chain, number)
        found = self._entry(number, offset)
        if found is None:
            self._chain.rebuild(self._chain.segment(self._chain.names[number]), SparseIndex())
            found = self._entry(number, offset)
        return found or segment_start(self._chain, number)

    def _entry(self, number: int, offset: int) -> ReplayPosition | None:
        """The place that the index gives, or None when the index is wrong."""
        segment = self._chain.segment(self._chain.names[number])
        base, position = self._chain.index(segment).floor(offset)
        recent = self._recent
        if recent is not None and recent.behind.number == number and recent.stop <= offset and position < recent.behind.position:
            return recent.behind
        if base < 0:
            return segment_start(self._chain, number)
        header = header_at(segment, position, self._chain.log_id)
        if header is None or header.type != FrameType.DATA or header.base != base:
            return None
        return ReplayPosition(number, position, header.sequence - 1, base)

    def _after(self, sequence: int) -> ReplayPosition:
        """The place behind that frame, if it is known; else the front of the segment in which the next one lies."""
        if self._end is not None and self._end.sequence == sequence:
            return self._end
        numbers = range(len(self._chain.names) - 1, 0, -1)
        return segment_start(
            self._chain, next((number for number in numbers if self._chain.names[number].first_sequence <= sequence + 1), 0)
        )

    def _offset_at(self, wall: int, offset: int) -> int:
        for name in self._chain.names:
            if self._chain.facts(name).last_wall >= wall:
                found = self._first_since(name, wall)
                if found is not None:
                    return found
        return offset

    def _first_since(self, name: SegmentName, wall: int) -> int | None:
        """The first item of a segment written at or after a time: in the index step before the first such entry, or that entry's."""
        segment = self._chain.segment(name)
        index = self._chain.index(segment)
        if any(not self._sound(name, index, entry) for entry in index.around(wall)):
            index = SparseIndex()
            self._chain.rebuild(segment, index)
        places = index.around(wall)
        start = index.positions[places[0]] if places else segment.size
        for piece in self._chain.pieces(name, start):
            frame = piece.frame
            if frame is not None and frame.type is FrameType.DATA and frame.wall >= wall:
                return frame.base_offset
        return None

    def _sound(self, name: SegmentName, index: SparseIndex, entry: int) -> bool:
        """Whether an index entry speaks of a frame that is there."""
        header = header_at(self._chain.segment(name), index.positions[entry], self._chain.log_id)
        told = (FrameType.DATA, index.offsets[entry], index.walls[entry])
        return header is not None and (header.type, header.base, header.wall) == told
