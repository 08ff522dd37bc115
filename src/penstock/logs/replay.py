"""Reading a chain of segments in sequence, and turning what cannot be read into gaps.

Owns: `Replay`, one pass over frames from a place on; opening, reading and listing a log are all such passes.
The sequence numbers decide: they have no holes, so wherever one is skipped a Gap stands, with the item offsets between its neighbours.
- Bytes that are promised (`Promise`) are finished groups: each whole frame counts, damage between them is a Gap.
- Bytes beyond it may be torn: a group counts whole or not at all, and the first thing that is wrong ends the log.
- Where it is not known what was promised, nothing ends the log while a whole group follows: what lies between is a Gap.
- A segment ends where the next one's name says it begins: frames from there on are left over from a failed write and are passed over.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs.api import Frame, FrameType, Gap
from penstock.logs.chain import Chain
from penstock.logs.frame import JOINS, MORE
from penstock.logs.segment import Piece, Segment

ENDLESS = 1 << 63


class Start(NamedTuple):
    """Where a pass begins, and what is known there."""

    number: int
    """Place of the segment in the chain."""
    position: int
    sequence: int | None
    """Of the frame before; None when the next frame may have any."""
    offset: int
    """The next item offset."""


class Promise(NamedTuple):
    """What must be there: whole up to `position` of the newest segment, at least up to a frame and an item offset."""

    position: int = ENDLESS
    sequence: int = 0
    offset: int = 0
    known: bool = True
    """Whether more than `position` says could not have been promised."""


class Replay:
    """One pass. Iterate over it once; afterwards it says where it ended."""

    def __init__(self, chain: Chain, start: Start, promise: Promise) -> None:
        self.number = start.number
        """Place of the segment that the last frame came from."""
        self.last = start.position
        self.end = start.position
        """Where, in the segment read last, the last frame that counts starts and ends."""
        self.sequence = start.sequence
        self.offset = start.offset
        self.short = False
        """Whether frames are missing at the end that were promised."""
        self._chain = chain
        self._promise = promise
        self._pending: list[Piece] = []
        self._damage: list[str] = []
        self._why = ""

    def __iter__(self) -> Iterator[Piece | Gap]:
        """Pieces with frames, and gaps."""
        names = self._chain.names
        for number in range(self.number, len(names)):
            if number != self.number:
                self.number, self.last, self.end = number, 0, 0
            if number + 1 < len(names):
                yield from self._segment(number, ENDLESS, names[number + 1].first_sequence)
            else:
                yield from self._segment(number, self._promise.position, ENDLESS)
        if self._promise.sequence > (self.sequence or 0):
            self.short = True
            yield self._gap(self._promise.sequence + 1, self._promise.offset)

    def _segment(self, number: int, safe: int, sequence_stop: int) -> Iterator[Piece | Gap]:
        segment = self._chain.segment(number)
        for piece in self._chain.pieces(number, self.end):
            frame = piece.frame
            if frame is not None and frame.sequence >= sequence_stop:
                break
            why = self._wrong(piece, piece.end <= safe)
            if why:
                self._lose(segment, piece, why)
                if self._promise.known and piece.end > safe:
                    break
            elif frame is not None and piece.end <= safe:
                yield from self._count(piece, frame)
            elif frame is not None:
                yield from self._group(piece)
        if self._pending:
            self._lose(segment, self._pending[0], "a group of frames is not finished")

    def _wrong(self, piece: Piece, safe: bool) -> str:
        """Why a piece does not count, or nothing."""
        frame, held = piece.frame, self._pending[-1].frame if self._pending else None
        if frame is None:
            return piece.why
        if self.sequence is not None and frame.sequence <= self.sequence:
            return "a frame repeats an earlier sequence"
        if safe:
            return ""
        before = held.sequence if held is not None else self.sequence
        if self._promise.known and before is not None and frame.sequence != before + 1:
            return "frames are missing"
        if bool(piece.flags & JOINS) != (held is not None) or (held is not None and frame.sequence != held.sequence + 1):
            return "a group of frames is not whole"
        return ""

    def _group(self, piece: Piece) -> Iterator[Piece | Gap]:
        """Hold a frame back until its group is whole."""
        self._pending.append(piece)
        if not piece.flags & MORE:
            group, self._pending = self._pending, []
            for whole in group:
                if whole.frame is not None:
                    yield from self._count(whole, whole.frame)

    def _count(self, piece: Piece, frame: Frame) -> Iterator[Piece | Gap]:
        if self.sequence is not None and frame.sequence != self.sequence + 1:
            yield self._gap(frame.sequence, frame.base)
        self._damage.clear()
        self.sequence, self.last, self.end = frame.sequence, piece.position, piece.end
        self.offset = frame.base + frame.count if frame.type is FrameType.DATA else max(self.offset, frame.base)
        yield piece

    def _lose(self, segment: Segment, piece: Piece, why: str) -> None:
        self._pending.clear()
        self._damage.append(f"{segment.path} bytes {piece.position} to {piece.end}")
        self._why = why

    def _gap(self, next_sequence: int, next_offset: int) -> Gap:
        """Everything between what counted last and a frame of that sequence and offset."""
        where = ", ".join(self._damage) or f"the end of {self._chain.directory}/{self._chain.names[self.number]}"
        why = self._why if self._damage else "frames are missing"
        gap = Gap((self.sequence or 0) + 1, next_sequence - 1, self.offset, max(self.offset, next_offset), where, why)
        self.sequence, self.offset = gap.last_sequence, gap.stop
        return gap
