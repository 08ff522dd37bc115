"""Reading a chain of segments in sequence, and turning what cannot be read into gaps.

Owns: `Replay`, one pass over frames from a place on; opening, reading and listing a log are all such passes.
The sequence numbers decide: they have no holes, so wherever one is skipped a Gap stands, with the item offsets between its neighbours.
- Bytes that are promised (`Promise`) are finished groups: each whole frame counts, damage between them is a Gap.
- Bytes beyond it may be torn: a group counts whole or not at all, and the first thing that is wrong ends the log.
- Where it is not known what was promised, nothing ends the log while a whole group follows: what lies between is a Gap.
- A segment ends where the next one's name says it begins: frames from there on are left over from a write that failed, or from a rewrite
  of which not every step was done, and are passed over. So a Gap never reaches from one segment into the next.
- A SKIP accounts for what is not there, unless there is damage before it: then that may be what is missing. A GAP frame becomes a Gap.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs import marks
from penstock.logs.api import ENDLESS, Frame, FrameType, Gap
from penstock.logs.files.chain import Chain
from penstock.logs.files.segment import LOG, Piece, SegmentName
from penstock.logs.frame import JOINS, MORE

_DATA, _ORDINARY = FrameType.DATA, FrameType.BASE  # types up to this one stand for nothing but themselves


class Start(NamedTuple):
    """Where a pass begins, and what is known there."""

    number: int
    """Place of the segment in the chain."""
    position: int
    sequence: int
    """Of the frame before."""
    offset: int
    """The next item offset."""


def front(chain: Chain, number: int) -> Start:
    """The front of a segment."""
    name = chain.names[number]
    return Start(number, 0, name.first_sequence - 1, name.base)


class Promise(NamedTuple):
    """What must be there: whole up to `position` of the newest segment, at least up to a frame and an item offset."""

    position: int = ENDLESS
    sequence: int = 0
    offset: int = 0
    known: bool = True
    """Whether more than `position` says could not have been promised."""


class Replay:
    """One pass. Iterate over it once; afterwards it says where it ended."""

    def __init__(self, chain: Chain, start: Start, promise: Promise, stop: int | None = None) -> None:
        """Segments from number `stop` on are not read."""
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
        self._names = chain.names
        self._stop = len(chain.names) if stop is None else stop
        self._promise = promise
        self._pending: list[Piece] = []
        self._damage: list[str] = []
        self._why = ""

    @property
    def place(self) -> Start | None:
        """Where another pass can go on; None when what is missing there may yet come, or segments came or went meanwhile."""
        usable = self._names is self._chain.names and not self.short
        return Start(self.number, self.end, self.sequence, self.offset) if usable else None

    def __iter__(self) -> Iterator[Piece | Gap]:
        """Pieces with frames, and gaps."""
        names = self._names
        for number in range(self.number, self._stop):
            if number != self.number:
                self.number, self.last, self.end = number, 0, 0
            if number + 1 < len(names):
                yield from self._older(names[number], names[number + 1])
            else:
                yield from self._newest(names[number])

    def _older(self, name: SegmentName, following: SegmentName) -> Iterator[Piece | Gap]:
        for piece in self._chain.pieces(name, self.end):
            frame = piece.frame
            if frame is not None and frame.sequence >= following.first_sequence:
                if frame.type is FrameType.SKIP and not self._damage:
                    self.sequence, self.offset = following.first_sequence - 1, max(self.offset, following.base)
                break
            if frame is not None and frame.sequence == self.sequence + 1 and frame.type <= _ORDINARY:  # most are: no time is lost on them
                self._pass(piece, frame)
                yield piece
            else:
                yield from self._judge(name, piece, ENDLESS)
        if self.sequence + 1 < following.first_sequence:
            yield self._gap(following.first_sequence, following.base)
        self._damage.clear()

    def _newest(self, name: SegmentName) -> Iterator[Piece | Gap]:
        safe = self._promise.position
        for piece in self._chain.pieces(name, self.end):
            frame = piece.frame
            if frame is not None and piece.end <= safe and frame.sequence == self.sequence + 1 and frame.type <= _ORDINARY:
                self._pass(piece, frame)
                yield piece
                continue
            damage = len(self._damage)
            yield from self._judge(name, piece, safe)
            if len(self._damage) > damage and self._promise.known and piece.end > safe:
                break
        if self._pending:
            self._lose(name, self._pending[0], "a group of frames is not finished")
        if self._promise.sequence > self.sequence:
            self.short = True
            yield self._gap(self._promise.sequence + 1, self._promise.offset)

    def _judge(self, name: SegmentName, piece: Piece, safe: int) -> Iterator[Piece | Gap]:
        """What a piece stands for, when that is known already."""
        frame = piece.frame
        why = self._wrong(piece, piece.end <= safe)
        if why:
            self._lose(name, piece, why)
        elif frame is not None and piece.end <= safe:
            yield from self._count(piece, frame)
        elif frame is not None:
            yield from self._group(piece)

    def _wrong(self, piece: Piece, safe: bool) -> str:
        """Why a piece does not count, or nothing."""
        frame, held = piece.frame, self._pending[-1].frame if self._pending else None
        if frame is None:
            return piece.why
        if frame.sequence < self.sequence + (frame.type is not FrameType.SKIP):  # a SKIP may stand for nothing
            return "a frame repeats an earlier sequence"
        if safe:
            return ""
        before = held.sequence if held is not None else self.sequence
        if self._promise.known and self._accounts_from(frame, before) != before + 1:
            return "frames are missing"
        if bool(piece.flags & JOINS) != (held is not None) or (held is not None and frame.sequence != held.sequence + 1):
            return "a group of frames is not whole"
        return ""

    def _accounts_from(self, frame: Frame, before: int) -> int:
        """The first sequence that a frame accounts for, when the last one accounted for is `before`."""
        if frame.type is FrameType.SKIP:
            return frame.sequence + 1 if self._damage else before + 1
        return marks.lost(frame, "").first_sequence if frame.type is FrameType.GAP else frame.sequence

    def _group(self, piece: Piece) -> Iterator[Piece | Gap]:
        """Hold a frame back until its group is whole."""
        self._pending.append(piece)
        if not piece.flags & MORE:
            group, self._pending = self._pending, []
            for whole in group:
                if whole.frame is not None:
                    yield from self._count(whole, whole.frame)

    def _count(self, piece: Piece, frame: Frame) -> Iterator[Piece | Gap]:
        if frame.sequence != self.sequence + 1 or frame.type is FrameType.SKIP:
            yield from self._missing(frame)
        self._pass(piece, frame)
        yield marks.lost(frame, self._where(piece)) if frame.type is FrameType.GAP else piece

    def _pass(self, piece: Piece, frame: Frame) -> None:
        """Go on behind a frame that counts."""
        if self._damage:
            self._damage.clear()
        self.sequence, self.last, self.end = frame.sequence, piece.position, piece.end
        if frame.type is _DATA:
            self.offset = frame.base + frame.count
        elif frame.base > self.offset:
            self.offset = frame.base

    def _missing(self, frame: Frame) -> Iterator[Gap]:
        """The Gap before a frame that does not follow the one before, unless the frame itself accounts for it."""
        first = self._accounts_from(frame, self.sequence)
        if first > self.sequence + 1:
            yield self._gap(first, marks.lost(frame, "").start if frame.type is FrameType.GAP else frame.base)

    def _lose(self, name: SegmentName, piece: Piece, why: str) -> None:
        self._pending.clear()
        self._damage.append(f"{self._chain.path(name)}{LOG} bytes {piece.position} to {piece.end}")
        self._why = why

    def _where(self, piece: Piece) -> str:
        return f"{self._chain.path(self._names[self.number])}{LOG} bytes {piece.position} to {piece.end}"

    def _gap(self, next_sequence: int, next_offset: int) -> Gap:
        """Everything between what counted last and a frame of that sequence and offset."""
        where = ", ".join(self._damage) or f"the end of {self._chain.path(self._names[self.number])}"
        why = self._why if self._damage else "frames are missing"
        gap = Gap(self.sequence + 1, next_sequence - 1, self.offset, max(self.offset, next_offset), where, why)
        self.sequence, self.offset = gap.last_sequence, gap.stop
        return gap
