"""Replay of a log after a crash or damage: where replay begins, which bytes are torn, which are damaged.

Owns: `Replay`, one pass over frames from a position on, by which a log is opened, read and listed; `find_replay_start`
and `load_checkpoint`, which find where a pass may begin; `LogOpening`, the pass of an opening, which decides what is
torn and what is damaged. It changes nothing: `FileLog` then cuts and writes.
Every pass. Sequences have no holes: where sequences are missing, the pass yields a Gap with the item offsets between
its neighbours.
- Durable bytes (`ExpectedEnd`) consist of finished groups: each whole frame is valid, damage between frames is a Gap.
- Bytes after them may be torn: a group is valid as a whole or not at all, and the first invalid bytes end the log.
- If it is not known which bytes are durable, invalid bytes followed by a whole group are a Gap; others end the log.
- A segment ends where the next one begins by its name: frames of that sequence or later are ignored, because they are
  left over from a failed write or an unfinished rewrite. So a Gap never extends into the next segment.
- A SKIP accounts for missing frames, unless there is damage before it: then they may be lost. A GAP frame becomes a
  Gap.
Opening a log.
- Replay begins at the newest readable Base: a segment's first frame, or the checkpoint if it is newer. The first
  segment of a log needs no Base. Replay never crosses a rewritten segment, which has no records.
- If the newest segment has no whole frame and no durable byte, a rotation was cut off: the segment is removed.
- Frames that the published position covers by fsync and that are missing are damage: a Gap, and nothing is cut.
- A frame's flag AFTER_SYNC says that all frames before it were synced. So damage is not taken for a torn tail when the
  published position lags behind. Bytes after the last whole group that are not durable are torn: the caller cuts them
  at `end`.
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

_DATA, _ORDINARY = FrameType.DATA, FrameType.BASE  # types up to _ORDINARY account for no other frame


class ReplayPosition(NamedTuple):
    """A position at which a pass can begin."""

    number: int
    """The index of the segment in the list of segments."""
    position: int
    sequence: int
    """The sequence of the frame before the position."""
    offset: int
    """The next item offset."""


def segment_start(segments: SegmentFiles, number: int) -> ReplayPosition:
    """The position of a segment's first frame."""
    name = segments.names[number]
    return ReplayPosition(number, 0, name.first_sequence - 1, name.base_offset)


class ExpectedEnd(NamedTuple):
    """How far a log must be readable."""

    position: int = ENDLESS
    """The bytes of the newest segment before this are durable."""
    sequence: int = 0
    """The log must have frames up to this one."""
    offset: int = 0
    """The log must have items up to this offset."""
    known: bool = True
    """Whether bytes after `position` are certainly not durable."""


class Replay:
    """One pass over a log. Iterate over it once; afterwards its attributes say where it ended."""

    def __init__(self, segments: SegmentFiles, start: ReplayPosition, expected: ExpectedEnd, stop: int | None = None) -> None:
        """stop: the index of the first segment that is not read; None to read all."""
        self.number = start.number
        """The index of the segment read last."""
        self.last = start.position
        self.end = start.position
        """Where, in the segment read last, the last valid frame starts and ends."""
        self.sequence = start.sequence
        self.offset = start.offset
        self.ends_early = False
        """Whether durable frames are missing at the end."""
        self._segments = segments
        self._names = segments.names
        self._stop = len(segments.names) if stop is None else stop
        self._expected = expected
        self._pending: list[Piece] = []
        self._damage: list[str] = []
        self._why = ""

    @property
    def resume_position(self) -> ReplayPosition | None:
        """Where another pass can continue; None if frames are missing at the end, or the list of segments changed."""
        usable = self._names is self._segments.names and not self.ends_early
        return ReplayPosition(self.number, self.end, self.sequence, self.offset) if usable else None

    def __iter__(self) -> Iterator[Piece | Gap]:
        """Yield pieces that have a frame, and gaps."""
        names = self._names
        for number in range(self.number, self._stop):
            if number != self.number:
                self.number, self.last, self.end = number, 0, 0
            if number + 1 < len(names):
                yield from self._older(names[number], names[number + 1])
            else:
                yield from self._newest(names[number])

    def _older(self, name: SegmentName, following: SegmentName) -> Iterator[Piece | Gap]:
        for piece in self._segments.pieces(name, self.end):
            frame = piece.frame
            if frame is not None and frame.sequence >= following.first_sequence:
                if frame.type is FrameType.SKIP and not self._damage:
                    self.sequence, self.offset = following.first_sequence - 1, max(self.offset, following.base_offset)
                break
            if frame is not None and frame.sequence == self.sequence + 1 and frame.type <= _ORDINARY:  # fast path
                self._advance(piece, frame)
                yield piece
            else:
                yield from self._check_piece(name, piece, ENDLESS)
        if self.sequence + 1 < following.first_sequence:
            yield self._gap(following.first_sequence, following.base_offset)
        self._damage.clear()

    def _newest(self, name: SegmentName) -> Iterator[Piece | Gap]:
        safe = self._expected.position
        for piece in self._segments.pieces(name, self.end):
            frame = piece.frame
            if frame is not None and piece.end <= safe and frame.sequence == self.sequence + 1 and frame.type <= _ORDINARY:
                self._advance(piece, frame)
                yield piece
                continue
            damage = len(self._damage)
            yield from self._check_piece(name, piece, safe)
            if len(self._damage) > damage and self._expected.known and piece.end > safe:
                break
        if self._pending:
            self._add_damage(name, self._pending[0], "a group of frames is not finished")
        if self._expected.sequence > self.sequence:
            self.ends_early = True
            yield self._gap(self._expected.sequence + 1, self._expected.offset)

    def _check_piece(self, name: SegmentName, piece: Piece, safe: int) -> Iterator[Piece | Gap]:
        """Yield the frames and gaps that a piece completes, or remember that it is damaged."""
        frame = piece.frame
        why = self._why_invalid(piece, piece.end <= safe)
        if why:
            self._add_damage(name, piece, why)
        elif frame is not None and piece.end <= safe:
            yield from self._count(piece, frame)
        elif frame is not None:
            yield from self._group(piece)

    def _why_invalid(self, piece: Piece, safe: bool) -> str:
        """Why a piece is not valid; "" if it is."""
        frame, held = piece.frame, self._pending[-1].frame if self._pending else None
        if frame is None:
            return piece.why
        if frame.sequence < self.sequence + (frame.type is not FrameType.SKIP):  # a SKIP may account for no frame
            return "a frame repeats an earlier sequence"
        if safe:
            return ""
        before = held.sequence if held is not None else self.sequence
        if self._expected.known and self._accounts_from(frame, before) != before + 1:
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
        """Keep a frame until its group is whole, then yield the group."""
        self._pending.append(piece)
        if not piece.flags & MORE_IN_GROUP:
            group, self._pending = self._pending, []
            for whole in group:
                if whole.frame is not None:
                    yield from self._count(whole, whole.frame)

    def _count(self, piece: Piece, frame: Frame) -> Iterator[Piece | Gap]:
        if frame.sequence != self.sequence + 1 or frame.type is FrameType.SKIP:
            yield from self._missing(frame)
        self._advance(piece, frame)
        yield decode_gap(frame, self._location(piece)) if frame.type is FrameType.GAP else piece

    def _advance(self, piece: Piece, frame: Frame) -> None:
        """Move past a valid frame."""
        if self._damage:
            self._damage.clear()
        self.sequence, self.last, self.end = frame.sequence, piece.position, piece.end
        if frame.type is _DATA:
            self.offset = frame.base_offset + frame.count
        elif frame.base_offset > self.offset:
            self.offset = frame.base_offset

    def _missing(self, frame: Frame) -> Iterator[Gap]:
        """Yield the Gap before a frame whose sequence does not follow, unless the frame accounts for it."""
        first = self._accounts_from(frame, self.sequence)
        if first > self.sequence + 1:
            yield self._gap(first, decode_gap(frame, "").start if frame.type is FrameType.GAP else frame.base_offset)

    def _add_damage(self, name: SegmentName, piece: Piece, why: str) -> None:
        self._pending.clear()
        self._damage.append(f"{self._segments.path(name)}{LOG} bytes {piece.position} to {piece.end}")
        self._why = why

    def _location(self, piece: Piece) -> str:
        return f"{self._segments.path(self._names[self.number])}{LOG} bytes {piece.position} to {piece.end}"

    def _gap(self, next_sequence: int, next_offset: int) -> Gap:
        """The Gap between the last valid frame and the frame of that sequence and offset."""
        where = ", ".join(self._damage) or f"the end of {self._segments.path(self._names[self.number])}"
        why = self._why if self._damage else "frames are missing"
        gap = Gap(self.sequence + 1, next_sequence - 1, self.offset, max(self.offset, next_offset), where, why)
        self.sequence, self.offset = gap.last_sequence, gap.stop
        return gap


# -- where replay begins ---------------------------------------------------------------------------


class ReplayStart(NamedTuple):
    """A position, and whether the state there comes from a checkpoint; otherwise from the frames there on."""

    start: ReplayPosition
    at_checkpoint: bool


def find_replay_start(segments: SegmentFiles, stored: Checkpoint | None, findings: list[str]) -> ReplayStart:
    """Where replay of a log with at least one segment begins; CorruptLog if no Base can be read.

    Adds to `findings` the Bases that cannot be read.
    """
    start, lowest = _newest_base(segments, findings)
    if stored is not None:
        number = segments.names.index(stored.segment)
        if number >= lowest and (start is None or stored.frame.sequence > start.sequence):
            return ReplayStart(ReplayPosition(number, stored.end, stored.frame.sequence, stored.frame.base_offset), at_checkpoint=True)
    if start is None:
        what = f"no Base from which {segments.directory} can be replayed is readable"
        raise CorruptLog(f"{what}; run verify to see what is left, then restore a copy")
    return ReplayStart(start, at_checkpoint=False)


def _newest_base(segments: SegmentFiles, findings: list[str]) -> tuple[ReplayPosition | None, int]:
    """The start of the newest segment at which replay can begin (None: there is none), and the index of the first
    segment in which a checkpoint can be used."""
    for number in range(len(segments.names) - 1, -1, -1):
        name = segments.names[number]
        if segments.begins_with_base(name):
            return segment_start(segments, number), number
        if segments.rewritten(name):
            return None, number + 1
        if name == FIRST:  # it needs no Base
            return segment_start(segments, number), number
        findings.append(f"the Base of segment {name} cannot be read; replay begins at an earlier one")
    return None, 0


def load_checkpoint(files: Files, segments: SegmentFiles, findings: list[str]) -> Checkpoint | None:
    """The checkpoint of a log; None if there is none or it cannot be used. Adds to `findings` why it cannot."""
    data = read_file(files, f"{segments.directory}/{CHECKPOINT}")
    if data is None:
        return None
    found = unpack_checkpoint(data, segments.log_id)
    if found is None:
        findings.append("the checkpoint is damaged and was ignored")
        return None
    located = _locate(segments, found)
    if located is None:
        findings.append("the checkpoint does not fit the log and was ignored")
    return located


def _locate(segments: SegmentFiles, found: Checkpoint) -> Checkpoint | None:
    """The checkpoint with the position of its last frame in the log; None if the log has no such frame."""
    if found.segment not in segments.names:
        return None
    segment = segments.segment(found.segment)
    header = header_at(segment, found.last, segments.log_id) if found.end <= segment.size else None
    fits = header is not None and header.sequence == found.frame.sequence and found.last + frame_bytes(header.stored_bytes) == found.end
    return found if fits else _locate_by_scan(segments, found)


def _locate_by_scan(segments: SegmentFiles, found: Checkpoint) -> Checkpoint | None:
    """Search the segment for the checkpoint's last frame: a repair may have moved it, or replaced it by a GAP frame."""
    sequence = found.frame.sequence
    for piece in segments.pieces(found.segment, 0):
        frame = piece.frame
        if frame is not None and frame.sequence == sequence:
            return found._replace(last=piece.position, end=piece.end)
        if frame is not None and frame.sequence > sequence:
            return found._replace(last=piece.position, end=piece.position) if frame.type is FrameType.GAP else None
    return None


# -- opening ---------------------------------------------------------------------------------------


class LogOpening:
    """One opening of a log with at least one segment. `replay` and `damaged` are valid after `frames` is exhausted."""

    def __init__(self, files: Files, segments: SegmentFiles, synced: SyncedPosition | None, findings: list[str]) -> None:
        self._files = files
        self._segments = segments
        self._synced = synced
        self._findings = findings
        self._checkpoint: Checkpoint | None = None
        self._torn_segment: SegmentName | None = None  # the segment that a rotation was to begin when it was cut off
        self.replay = Replay(segments, ReplayPosition(0, 0, 0, 0), ExpectedEnd())

    @property
    def fsynced_bytes(self) -> int:
        """How many bytes of the newest segment the published position covers by fsync."""
        synced, newest = self._synced, self._segments.names[-1]
        if synced is None or synced.durability != "fsync" or synced.segment < newest:
            return 0
        return synced.position if synced.segment == newest else ENDLESS

    @property
    def damaged(self) -> bool:
        """Whether the end is damaged, not torn. Then it must not be cut, and the log continues in a new segment."""
        return self.replay.ends_early or self.replay.end < self.fsynced_bytes

    def torn_rotation(self) -> bool:
        """Whether the newest segment has no frame, because a rotation was cut off. Everything before it was synced."""
        newest, only = self._segments.names[-1], len(self._segments.names) == 1
        if only or self.fsynced_bytes or any(piece.frame is not None for piece in self._segments.pieces(newest, 0)):
            return False
        self._torn_segment = newest
        return True

    def frames(self) -> Iterator[Frame | Gap]:
        """Yield all frames and gaps from the newest readable Base on."""
        stored = self._stored_checkpoint(self._findings)
        start, at_checkpoint = find_replay_start(self._segments, stored, self._findings)
        self.replay = Replay(self._segments, start, self.expected_end())
        newest = self._segments.segment(self._segments.names[-1])
        begins_inside = at_checkpoint and start.number == len(self._segments.names) - 1
        newest.index = None if begins_inside else SparseIndex()  # None: the replay does not read all its frames
        if stored is not None and at_checkpoint:
            self.replay.last = stored.last
            yield stored.frame
        for item in self.replay:
            if isinstance(item, Gap):
                if not self._only_a_base(item):
                    yield item
            elif item.frame is not None:
                self._index_frame(item.frame, item.position, item.end)
                yield self._replayable(item.frame)

    def expected_end(self) -> ExpectedEnd:
        """How far the log must be readable.

        That is as far as the published position says, and as far as was synced before a checkpoint or a rotation.
        """
        synced, stored, torn, position = self._synced, self._stored_checkpoint([]), self._torn_segment, self._durable_bytes()
        ends = [(synced.sequence, synced.offset)] if synced is not None and synced.durability == "fsync" else [(0, 0)]
        if stored is not None:
            ends.append((stored.frame.sequence, stored.frame.base_offset))
            if stored.segment == self._segments.names[-1]:
                position = max(position, stored.end)
        if torn is not None and self._ends_before(torn):
            ends.append((torn.first_sequence - 1, torn.base_offset))
            position = ENDLESS
        return ExpectedEnd(position, *max(ends), known=synced is not None)

    def _ends_before(self, torn: SegmentName) -> bool:
        """Whether no frame was appended since the rotation was cut off.

        If one was, the empty segment was removed before, and a power cut has undone the removal.
        """
        pieces = self._segments.pieces(self._segments.names[-1], 0)
        return all(piece.frame is None or piece.frame.sequence < torn.first_sequence for piece in pieces)

    def unfit_checkpoint(self) -> bool:
        """Whether there is a checkpoint that cannot be used. It must be removed: later frames might match it."""
        return self._checkpoint is None and self._files.exists(f"{self._segments.directory}/{CHECKPOINT}")

    def _stored_checkpoint(self, findings: list[str]) -> Checkpoint | None:
        if self._checkpoint is None:
            self._checkpoint = load_checkpoint(self._files, self._segments, findings)
        return self._checkpoint

    def _durable_bytes(self) -> int:
        """How many bytes of the newest segment are durable, by the published position and by frames with AFTER_SYNC."""
        newest = self._segments.names[-1]
        durable = self.fsynced_bytes
        for piece in self._segments.pieces(newest, min(durable, self._segments.segment(newest).size)):
            if piece.flags & AFTER_SYNC:
                durable = max(durable, piece.position)
        return durable

    def _replayable(self, frame: Frame) -> Frame:
        """The frame; CorruptLog for a SKIP, which is met only if both ends of a rewritten segment are damaged."""
        if frame.type is FrameType.SKIP:
            raise CorruptLog(f"{self._segments.directory} cannot be replayed across a rewritten segment; restore a copy")
        return frame

    def _only_a_base(self, gap: Gap) -> bool:
        """Whether only a segment's Base is missing: all frames before it were replayed, so no state is lost."""
        lost = gap.first_sequence == gap.last_sequence and gap.start == gap.stop
        first = self._segments.names[0].first_sequence
        return lost and gap.first_sequence != first and any(name.first_sequence == gap.first_sequence for name in self._segments.names)

    def _index_frame(self, frame: Frame, position: int, end: int) -> None:
        if self.replay.number == len(self._segments.names) - 1:
            newest = self._segments.segment(self._segments.names[-1])
            if newest.index is not None:
                newest.index.cover(frame, position, end)
