"""Reads of items by offset or by time: the index gives a position, then a replay reads the frames from there.

Owns: `LogReader`, which a log's owner and a lock-free reader share.
It remembers the position of its last read, so that reading on, or reading the same frame again, needs no search.
A segment may be dropped or rewritten while it is read. The bytes of an open file do not change. If a segment's file is
gone when it is to be opened, the reader reloads the list of segments and continues where it was.
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
MAX_RELOADS = 20
"""How often the list of segments is reloaded before a read fails. Each time a segment was removed during the read."""


class _Recent(NamedTuple):
    """The frame read last: its item offsets [start, stop), its position, and the position after it."""

    start: int
    stop: int
    here: ReplayPosition
    after: ReplayPosition


class LogReader:
    """Reads segments by item offset, by time, or from a frame to the end."""

    def __init__(self, segments: SegmentFiles, reload: Callable[[], None]) -> None:
        """reload: updates the list of segments; called when the file of a listed segment does not exist."""
        self._segments = segments
        self._reload = reload
        self._recent: _Recent | None = None
        self._end: ReplayPosition | None = None

    def forget_positions(self) -> None:
        """Forget the remembered positions, because segments were cut, dropped or reloaded."""
        self._recent = self._end = None

    def remember_end(self, replay: Replay) -> None:
        """Remember where a replay ended, for the next `frames` from there."""
        self._end = replay.resume_position

    def read(self, start: int, stop: int, sequence: int, offset: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        """The DATA frames that overlap item offsets [start, stop), and the gaps among them.

        sequence, offset: the last frame of the log and its next item offset; a Gap if it ends before (0: unknown).
        """
        if offset:
            stop = min(stop, offset)  # only STATE frames can follow, which need not be read
        if start >= stop:
            return []
        return self._repeat(lambda: self._read(start, stop, ExpectedEnd(ENDLESS, sequence, offset), size_bytes))

    def frames(self, sequence: int, offset: int, after: int = 0) -> Iterator[Frame | Gap]:
        """Every frame and gap after frame `after`, oldest first. sequence, offset: as in `read`."""
        oldest = self._segments.names[0]
        done, reached, attempts = after or oldest.first_sequence - 1, oldest.base_offset, MAX_RELOADS
        while attempts:
            attempts -= 1
            oldest = self._segments.names[0]
            if oldest.first_sequence > done + 1:
                yield Gap(done + 1, oldest.first_sequence - 1, reached, oldest.base_offset, self._segments.directory, DROPPED)
                done, reached = oldest.first_sequence - 1, oldest.base_offset
            replay = Replay(self._segments, self._after(done), ExpectedEnd(ENDLESS, sequence, offset))
            try:
                for item in replay:
                    found = item if isinstance(item, Gap) else item.frame
                    if found is not None and replay.sequence > done:
                        done, reached, attempts = replay.sequence, replay.offset, MAX_RELOADS
                        if isinstance(found, Gap) or found.type is not FrameType.SKIP:
                            yield found
                self.remember_end(replay)
                return
            except FileNotFoundError:
                self.forget_positions()
                self._repeat(self._reload)
            except OSError as error:
                raise storage_failed(error, "reading", self._segments.directory) from error
        raise StorageFailed(f"segments of {self._segments.directory} are removed faster than they can be read; read again")

    def segments(self) -> list[SegmentFacts]:
        return self._repeat(lambda: [self._segments.facts(name) for name in self._segments.names])

    def newest(self) -> SegmentFacts:
        return self._repeat(lambda: self._segments.facts(self._segments.names[-1]))

    def readable_range(self, reached: Callable[[], tuple[int, int]]) -> LogRange:
        """The readable range. `reached` returns the next item offset and the sequence of the last frame."""
        return self._repeat(lambda: self._readable_range(*reached()))

    def size_bytes(self) -> int:
        return self._repeat(lambda: sum(self._segments.size_bytes(name) for name in self._segments.names))

    def offset_at(self, wall: int, offset: int) -> int:
        """The offset of the first item written at or after a time (see log.py); `offset` if there is none."""
        return self._repeat(lambda: self._offset_at(wall, offset))

    # -- steps ---------------------------------------------------------------------------------------

    def _readable_range(self, end: int, sequence: int) -> LogRange:
        names = self._segments.names
        if not names:
            return LogRange(0, end, sequence, 1, [])
        intact_from = next((name.first_sequence for name in names if not self._segments.rewritten(name)), sequence + 1)
        return LogRange(names[0].base_offset, end, sequence, intact_from, [name.first_sequence for name in names])

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`; reload the segments and call it again when the file of a segment is gone."""
        try:
            for _ in range(MAX_RELOADS):
                try:
                    return attempt()
                except FileNotFoundError:
                    self.forget_positions()
                    self._reload()
            return attempt()
        except OSError as error:
            raise storage_failed(error, "reading", self._segments.directory) from error

    def _read(self, start: int, stop: int, expected: ExpectedEnd, size_bytes: int) -> list[Frame | Gap]:
        found: list[Frame | Gap] = []
        oldest = self._segments.names[0]
        if start < oldest.base_offset:
            found.append(dropped_gap(oldest.first_sequence, oldest.base_offset, self._segments.directory))
            if stop <= oldest.base_offset:
                return found
        replay = Replay(self._segments, self._position_of(start), expected)
        for item in replay:
            if isinstance(item, Gap):
                if item.start < stop and start < item.stop:
                    found.append(item)
            elif item.frame is not None:
                before = len(found)
                if self._add_frame(item, item.frame, start, stop, replay, found):
                    break
                if len(found) > before:
                    size_bytes -= len(item.frame.body)
                    if size_bytes <= 0:
                        break
        return found

    def _add_frame(self, piece: Piece, frame: Frame, start: int, stop: int, replay: Replay, found: list[Frame | Gap]) -> bool:
        """Add a frame to `found` if it is in the range; returns whether the range ends with it."""
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

    def _position_of(self, offset: int) -> ReplayPosition:
        recent = self._recent
        if recent is not None and recent.start <= offset <= recent.stop:
            return recent.after if offset == recent.stop else recent.here
        return self._search(offset)

    def _search(self, offset: int) -> ReplayPosition:
        number = max(0, bisect_right(self._segments.names, (offset, ENDLESS)) - 1)
        name = self._segments.names[number]
        if name.base_offset == offset and self._segments.segment(name).index is None:
            # building the index would read the whole segment
            return segment_start(self._segments, number)
        found = self._entry(number, offset)
        if found is None:
            self._segments.rebuild(self._segments.segment(self._segments.names[number]), SparseIndex())
            found = self._entry(number, offset)
        return found or segment_start(self._segments, number)

    def _entry(self, number: int, offset: int) -> ReplayPosition | None:
        """The position that the index gives; None if the index is wrong."""
        segment = self._segments.segment(self._segments.names[number])
        base, position = self._segments.index(segment).floor(offset)
        recent = self._recent
        if recent is not None and recent.after.number == number and recent.stop <= offset and position < recent.after.position:
            return recent.after
        if base < 0:
            return segment_start(self._segments, number)
        header = header_at(segment, position, self._segments.log_id)
        if header is None or header.type != FrameType.DATA or header.base != base:
            return None
        return ReplayPosition(number, position, header.sequence - 1, base)

    def _after(self, sequence: int) -> ReplayPosition:
        """The position after a frame if it is remembered; else the start of the segment that holds the next frame."""
        if self._end is not None and self._end.sequence == sequence:
            return self._end
        numbers = range(len(self._segments.names) - 1, 0, -1)
        return segment_start(
            self._segments, next((number for number in numbers if self._segments.names[number].first_sequence <= sequence + 1), 0)
        )

    def _offset_at(self, wall: int, offset: int) -> int:
        for name in self._segments.names:
            if self._segments.facts(name).last_wall >= wall:
                found = self._first_since(name, wall)
                if found is not None:
                    return found
        return offset

    def _first_since(self, name: SegmentName, wall: int) -> int | None:
        """The offset of a segment's first item written at or after a time; None if there is none.

        The item is between the last index entry before that time and the first entry at or after it.
        """
        segment = self._segments.segment(name)
        index = self._segments.index(segment)
        if any(not self._entry_matches(name, index, entry) for entry in index.around(wall)):
            index = SparseIndex()
            self._segments.rebuild(segment, index)
        entries = index.around(wall)
        start = index.positions[entries[0]] if entries else segment.size
        for piece in self._segments.pieces(name, start):
            frame = piece.frame
            if frame is not None and frame.type is FrameType.DATA and frame.wall >= wall:
                return frame.base_offset
        return None

    def _entry_matches(self, name: SegmentName, index: SparseIndex, entry: int) -> bool:
        """Whether there is a frame as the index entry says."""
        header = header_at(self._segments.segment(name), index.positions[entry], self._segments.log_id)
        expected = (FrameType.DATA, index.offsets[entry], index.walls[entry])
        return header is not None and (header.type, header.base, header.wall) == expected
