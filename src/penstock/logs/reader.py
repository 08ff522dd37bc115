"""Reading items by offset: the index finds the place, one pass over frames does the rest.

Owns: `LogReading`, what a log's owner and a lock-free reader have in common.
It remembers where its last read was, so that reading on, or in the same frame again, needs no search.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs.api import Frame, FrameType, Gap
from penstock.logs.chain import Chain, SegmentFacts
from penstock.logs.failures import storage_failed
from penstock.logs.index import SparseIndex
from penstock.logs.replay import ENDLESS, Promise, Replay, Start
from penstock.logs.segment import Piece, header_at


class _Recent(NamedTuple):
    """The frame read last: the items in it, its place, and the place behind it."""

    start: int
    stop: int
    here: Start
    behind: Start


class LogReading:
    """Reads a chain of segments by item offset, or from one end to the other."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._recent: _Recent | None = None

    def forget(self) -> None:
        """Segments were cut, dropped or opened anew: places are no longer known."""
        self._recent = None

    def read(self, start: int, stop: int, sequence: int, offset: int) -> list[Frame | Gap]:
        """The DATA frames that overlap [start, stop) of a log that ends with that frame, before that item offset."""
        if offset:
            stop = min(stop, offset)  # no item follows, however many records do
        if start >= stop:
            return []
        try:
            return self._read(start, stop, Promise(ENDLESS, sequence, offset))
        except OSError as error:
            raise storage_failed(error, "reading", self._chain.directory) from error

    def frames(self, sequence: int, offset: int) -> Iterator[Frame | Gap]:
        """Everything, oldest first, of a log that ends with that frame, before that item offset."""
        first = self._chain.names[0]
        replay = Replay(self._chain, Start(0, 0, first.first_sequence - 1, first.base), Promise(ENDLESS, sequence, offset))
        try:
            for item in replay:
                found = item if isinstance(item, Gap) else item.frame
                if found is not None:
                    yield found
        except OSError as error:
            raise storage_failed(error, "reading", self._chain.directory) from error

    def segments(self) -> list[SegmentFacts]:
        try:
            return [self._chain.facts(number) for number in range(len(self._chain.names))]
        except OSError as error:
            raise storage_failed(error, "reading", self._chain.directory) from error

    def _read(self, start: int, stop: int, promise: Promise) -> list[Frame | Gap]:
        found: list[Frame | Gap] = []
        replay = Replay(self._chain, self._place(start), promise)
        for item in replay:
            if isinstance(item, Gap):
                if item.start < stop and start < item.stop:
                    found.append(item)
            elif item.frame is not None and self._take(item, item.frame, start, stop, replay, found):
                break
        return found

    def _take(self, piece: Piece, frame: Frame, start: int, stop: int, replay: Replay, found: list[Frame | Gap]) -> bool:
        """Keep a frame of the range; say whether the range ends here."""
        if frame.base >= stop:
            return True
        if frame.type is not FrameType.DATA:
            return False
        frame_stop = frame.base + frame.count
        if frame_stop > start:
            found.append(frame)
            here = Start(replay.number, piece.position, frame.sequence - 1, frame.base)
            self._recent = _Recent(frame.base, frame_stop, here, Start(replay.number, piece.end, frame.sequence, frame_stop))
        return frame_stop >= stop

    def _place(self, offset: int) -> Start:
        recent = self._recent
        if recent is not None and recent.start <= offset <= recent.stop:
            return recent.behind if offset == recent.stop else recent.here
        return self._search(offset)

    def _search(self, offset: int) -> Start:
        number = max(0, bisect_right(self._chain.names, (offset, ENDLESS)) - 1)
        segment = self._chain.segment(number)
        found = self._entry(number, offset)
        if found is None:
            self._chain.rebuild(segment, SparseIndex())
            found = self._entry(number, offset)
        return found or Start(number, 0, segment.name.first_sequence - 1, segment.name.base)

    def _entry(self, number: int, offset: int) -> Start | None:
        """The place that the index gives, or None when the index is wrong."""
        segment = self._chain.segment(number)
        base, position = self._chain.index(segment).floor(offset)
        if base < 0:
            return Start(number, 0, segment.name.first_sequence - 1, segment.name.base)
        header = header_at(segment, position, self._chain.owner)
        if header is None or header.type != FrameType.DATA or header.base != base:
            return None
        return Start(number, position, header.sequence - 1, base)
