"""Reading a log back after whatever happened to it: where replay begins, what is torn, what is damaged.

Owns: `Replay`, one pass over frames from a place on (opening, reading and listing a log are all such passes); `find_replay_start` and
`load_checkpoint`, where a pass may begin; `LogOpening`, one pass over what a crash may have left, which decides and reports: `FileLog` then
cuts and writes.
The sequence numbers decide: they have no holes, so wherever one is skipped a Gap stands, with the item offsets between its neighbours.
- Bytes that are promised (`ExpectedEnd`) are finished groups: each whole frame counts, damage between them is a Gap.
- Bytes beyond it may be torn: a group counts whole or not at all, and the first thing that is wrong ends the log.
- Where it is not known what was promised, nothing ends the log while a whole group follows: what lies between is a Gap.
- A segment ends where the next one's name says it begins: frames from there on are left over from a write that failed, or from a rewrite
  of which not every step was done, and are passed over. So a Gap never reaches from one segment into the next.
- A SKIP accounts for what is not there, unless there is damage before it: then that may be what is missing. A GAP frame becomes a Gap.
When a log is opened
- Replay begins at the newest Base that can be read: a segment's first frame, or a checkpoint's that is newer still; a log's very first
  segment needs none. It never crosses a rewritten segment, whose records are gone.
- A newest segment without one whole frame that no sync promised is a rotation that was cut off: it is dropped.
- What the published position promised by fsync and is not there is damage: never cut, and a Gap.
- Frames say whether all before them was synced when they were written, so a position that lags behind (it is not synced itself)
  does not turn damage into a torn tail. What lies beyond the last whole group, unpromised, is torn: the caller cuts it at `end`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs.files.filesystem import Files, read_file
from penstock.logs.files.segment import FIRST, LOG, Piece, SegmentName, SparseIndex, header_at
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import CHECKPOINT, Checkpoint, SyncedPosition, unpack_checkpoint
from penstock.logs.frame import AFTER_SYNC, CONTINUES_GROUP, MORE_IN_GROUP, decode_gap, frame_bytes
from penstock.logs.log import ENDLESS, Frame, FrameType, Gap
from penstock.words.errors import CorruptLog

_DATA, _ORDINARY = FrameType.DATA, FrameType.BASE  # types up to this one stand for nothing but themselves


class ReplayPosition(NamedTuple):
    """Where a pass begins, and what is known there."""

    number: int
    """Place of the segment in the chain."""
    position: int
    sequence: int
    """Of the frame before."""
    offset: int
    """The next item offset."""


def segment_start(chain: SegmentFiles, number: int) -> ReplayPosition:
    """The front of a segment."""
    name = chain.names[number]
    return ReplayPosition(number, 0, name.first_sequence - 1, name.base_offset)


class ExpectedEnd(NamedTuple):
    """What must be there: whole up to `position` of the newest segment, at least up to a frame and an item offset."""

    position: int = ENDLESS
    sequence: int = 0
    offset: int = 0
    known: bool = True
    """Whether more than `position` says could not have been promised."""


class Replay:
    """One pass. Iterate over it once; afterwards it says where it ended."""

    def __init__(self, chain: SegmentFiles, start: ReplayPosition, promise: ExpectedEnd, stop: int | None = None) -> None:
        """Segments from number `stop` on are not read."""
        self.number = start.number
        """Place of the segment that the last frame came from."""
        self.last = start.position
        self.end = start.position
        """Where, in the segment read last, the last frame that counts starts and ends."""
        self.sequence = start.sequence
        self.offset = start.offset
        self.ends_early = False
        """Whether frames are missing at the end that were promised."""
        self._chain = chain
        self._names = chain.names
        self._stop = len(chain.names) if stop is None else stop
        self._promise = promise
        self._pending: list[Piece] = []
        self._damage: list[str] = []
        self._why = ""

    @property
    def place(self) -> ReplayPosition | None:
        """Where another pass can go on; None when what is missing there may yet come, or segments came or went meanwhile."""
        usable = self._names is self._chain.names and not self.ends_early
        return ReplayPosition(self.number, self.end, self.sequence, self.offset) if usable else None

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
                    self.sequence, self.offset = following.first_sequence - 1, max(self.offset, following.base_offset)
                break
            if frame is not None and frame.sequence == self.sequence + 1 and frame.type <= _ORDINARY:  # most are: no time is lost on them
                self._pass(piece, frame)
                yield piece
            else:
                yield from self._judge(name, piece, ENDLESS)
        if self.sequence + 1 < following.first_sequence:
            yield self._gap(following.first_sequence, following.base_offset)
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
            self.ends_early = True
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
        if bool(piece.flags & CONTINUES_GROUP) != (held is not None) or (held is not None and frame.sequence != held.sequence + 1):
            return "a group of frames is not whole"
        return ""

    def _accounts_from(self, frame: Frame, before: int) -> int:
        """The first sequence that a frame accounts for, when the last one accounted for is `before`."""
        if frame.type is FrameType.SKIP:
            return frame.sequence + 1 if self._damage else before + 1
        return decode_gap(frame, "").first_sequence if frame.type is FrameType.GAP else frame.sequence

    def _group(self, piece: Piece) -> Iterator[Piece | Gap]:
        """Hold a frame back until its group is whole."""
        self._pending.append(piece)
        if not piece.flags & MORE_IN_GROUP:
            group, self._pending = self._pending, []
            for whole in group:
                if whole.frame is not None:
                    yield from self._count(whole, whole.frame)

    def _count(self, piece: Piece, frame: Frame) -> Iterator[Piece | Gap]:
        if frame.sequence != self.sequence + 1 or frame.type is FrameType.SKIP:
            yield from self._missing(frame)
        self._pass(piece, frame)
        yield decode_gap(frame, self._where(piece)) if frame.type is FrameType.GAP else piece

    def _pass(self, piece: Piece, frame: Frame) -> None:
        """Go on behind a frame that counts."""
        if self._damage:
            self._damage.clear()
        self.sequence, self.last, self.end = frame.sequence, piece.position, piece.end
        if frame.type is _DATA:
            self.offset = frame.base_offset + frame.count
        elif frame.base_offset > self.offset:
            self.offset = frame.base_offset

    def _missing(self, frame: Frame) -> Iterator[Gap]:
        """The Gap before a frame that does not follow the one before, unless the frame itself accounts for it."""
        first = self._accounts_from(frame, self.sequence)
        if first > self.sequence + 1:
            yield self._gap(first, decode_gap(frame, "").start if frame.type is FrameType.GAP else frame.base_offset)

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


# -- where to begin --------------------------------------------------------------------------------


class ReplayStart(NamedTuple):
    """A place, and whether a checkpoint tells the state there; otherwise the frames from there on do."""

    start: ReplayPosition
    at_checkpoint: bool


def find_replay_start(chain: SegmentFiles, stored: Checkpoint | None, notes: list[str]) -> ReplayStart:
    """Where to begin a chain of at least one segment. Says in `notes` what cannot be used; CorruptLog when nothing can."""
    start, lowest = _newest_base(chain, notes)
    if stored is not None:
        number = chain.names.index(stored.segment)
        if number >= lowest and (start is None or stored.frame.sequence > start.sequence):
            return ReplayStart(ReplayPosition(number, stored.end, stored.frame.sequence, stored.frame.base_offset), at_checkpoint=True)
    if start is None:
        what = f"no Base from which {chain.directory} could be replayed can be read"
        raise CorruptLog(f"{what}; run verify to see what is left, then put a copy in its place")
    return ReplayStart(start, at_checkpoint=False)


def _newest_base(chain: SegmentFiles, notes: list[str]) -> tuple[ReplayPosition | None, int]:
    """The newest segment to begin at, if any, and the lowest number that a checkpoint may begin in."""
    for number in range(len(chain.names) - 1, -1, -1):
        name = chain.names[number]
        if chain.begins_with_base(name):
            return segment_start(chain, number), number
        if chain.rewritten(name):
            return None, number + 1
        if name == FIRST:  # it begins with whatever came first
            return segment_start(chain, number), number
        notes.append(f"the Base of segment {name} cannot be read; replay begins at an earlier one")
    return None, 0


def load_checkpoint(files: Files, chain: SegmentFiles, notes: list[str]) -> Checkpoint | None:
    """The checkpoint beside a log, if it can be used; says in `notes` why not."""
    data = read_file(files, f"{chain.directory}/{CHECKPOINT}")
    if data is None:
        return None
    found = unpack_checkpoint(data, chain.log_id)
    if found is None:
        notes.append("the checkpoint is damaged and was ignored")
        return None
    placed = _placed(chain, found)
    if placed is None:
        notes.append("the checkpoint does not fit the log and was ignored")
    return placed


def _placed(chain: SegmentFiles, found: Checkpoint) -> Checkpoint | None:
    """The checkpoint with the place of the frame that it names as its last; None when there is no such frame."""
    if found.segment not in chain.names:
        return None
    segment = chain.segment(found.segment)
    header = header_at(segment, found.last, chain.log_id) if found.end <= segment.size else None
    fits = header is not None and header.sequence == found.frame.sequence and found.last + frame_bytes(header.stored_bytes) == found.end
    return found if fits else _placed_anew(chain, found)


def _placed_anew(chain: SegmentFiles, found: Checkpoint) -> Checkpoint | None:
    """A repair moves frames: look through the segment. A GAP frame may have taken the place of the last one and of some behind it."""
    sequence = found.frame.sequence
    for piece in chain.pieces(found.segment, 0):
        frame = piece.frame
        if frame is not None and frame.sequence == sequence:
            return found._replace(last=piece.position, end=piece.end)
        if frame is not None and frame.sequence > sequence:
            return found._replace(last=piece.position, end=piece.position) if frame.type is FrameType.GAP else None
    return None


# -- opening ---------------------------------------------------------------------------------------


class LogOpening:
    """One opening of a chain that has at least one segment. Iterate over `frames` once, then look at the rest."""

    def __init__(self, files: Files, chain: SegmentFiles, synced: SyncedPosition | None, notes: list[str]) -> None:
        self._files = files
        self._chain = chain
        self._synced = synced
        self._notes = notes
        self._checkpoint: Checkpoint | None = None
        self._begun: SegmentName | None = None  # a rotation, cut off, that was to begin this segment
        self.replay = Replay(chain, ReplayPosition(0, 0, 0, 0), ExpectedEnd())

    @property
    def fsynced_bytes(self) -> int:
        """The newest segment's bytes below this were promised by an fsync."""
        synced, newest = self._synced, self._chain.names[-1]
        if synced is None or synced.durability != "fsync" or synced.segment < newest:
            return 0
        return synced.position if synced.segment == newest else ENDLESS

    @property
    def damaged(self) -> bool:
        """Whether the end of the log is damaged rather than torn: it must be kept as it is, and the log goes on in a new segment."""
        return self.replay.ends_early or self.replay.end < self.fsynced_bytes

    def torn_rotation(self) -> bool:
        """Whether the newest segment never got its first frame. Then everything before it was synced, or it would not have been begun."""
        newest = self._chain.names[-1]
        if len(self._chain.names) == 1 or self.fsynced_bytes or any(piece.frame is not None for piece in self._chain.pieces(newest, 0)):
            return False
        self._begun = newest
        return True

    def frames(self) -> Iterator[Frame | Gap]:
        """Everything from the newest readable Base on."""
        stored = self._stored_checkpoint(self._notes)
        start, at_checkpoint = find_replay_start(self._chain, stored, self._notes)
        self.replay = Replay(self._chain, start, self.promise())
        newest = self._chain.segment(self._chain.names[-1])
        begins_inside = at_checkpoint and start.number == len(self._chain.names) - 1
        newest.index = None if begins_inside else SparseIndex()  # what is passed over the index must learn in another way
        if stored is not None and at_checkpoint:
            self.replay.last = stored.last
            yield stored.frame
        for item in self.replay:
            if isinstance(item, Gap):
                if not self._only_a_base(item):
                    yield item
            elif item.frame is not None:
                self._cover(item.frame, item.position, item.end)
                yield self._replayable(item.frame)

    def promise(self) -> ExpectedEnd:
        """What must be there: what the published position says, and what was really synced before a checkpoint or a rotation."""
        synced, stored, begun, position = self._synced, self._stored_checkpoint([]), self._begun, self._vouched()
        promises = [(synced.sequence, synced.offset)] if synced is not None and synced.durability == "fsync" else [(0, 0)]
        if stored is not None:
            promises.append((stored.frame.sequence, stored.frame.base_offset))
            if stored.segment == self._chain.names[-1]:
                position = max(position, stored.end)
        if begun is not None and self._ends_before(begun):
            promises.append((begun.first_sequence - 1, begun.base_offset))
            position = ENDLESS
        return ExpectedEnd(position, *max(promises), known=synced is not None)

    def _ends_before(self, begun: SegmentName) -> bool:
        """Whether nothing was appended after a rotation was cut off: its file may be one whose removal a power cut has undone."""
        pieces = self._chain.pieces(self._chain.names[-1], 0)
        return all(piece.frame is None or piece.frame.sequence < begun.first_sequence for piece in pieces)

    def unfit_checkpoint(self) -> bool:
        """Whether there is a checkpoint that does not count. It must go: the log may yet grow into something that it seems to fit."""
        return self._checkpoint is None and self._files.exists(f"{self._chain.directory}/{CHECKPOINT}")

    def _stored_checkpoint(self, notes: list[str]) -> Checkpoint | None:
        if self._checkpoint is None:
            self._checkpoint = load_checkpoint(self._files, self._chain, notes)
        return self._checkpoint

    def _vouched(self) -> int:
        """Where the newest segment's promised bytes end: the published position may lag behind, but later frames vouch for earlier ones."""
        newest = self._chain.names[-1]
        solid = self.fsynced_bytes
        for piece in self._chain.pieces(newest, min(solid, self._chain.segment(newest).size)):
            if piece.flags & AFTER_SYNC:
                solid = max(solid, piece.position)
        return solid

    def _replayable(self, frame: Frame) -> Frame:
        """The frame. (A rewritten segment begins and ends with a SKIP and is known before this, unless both are damaged.)"""
        if frame.type is FrameType.SKIP:
            raise CorruptLog(f"{self._chain.directory} cannot be replayed across a rewritten segment; put a copy in its place")
        return frame

    def _only_a_base(self, gap: Gap) -> bool:
        """Whether nothing but a copy of the state is missing: a segment's first frame, with all before it replayed."""
        lost = gap.first_sequence == gap.last_sequence and gap.start == gap.stop
        first = self._chain.names[0].first_sequence
        return lost and gap.first_sequence != first and any(name.first_sequence == gap.first_sequence for name in self._chain.names)

    def _cover(self, frame: Frame, position: int, end: int) -> None:
        if self.replay.number == len(self._chain.names) - 1:
            newest = self._chain.segment(self._chain.names[-1])
            if newest.index is not None:
                newest.index.cover(frame, position, end)
