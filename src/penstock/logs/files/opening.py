"""What happens to a log when it is opened: where replay begins, what is torn, what is damaged.

Owns: `Opening`, one pass over what a crash may have left. It decides and reports; `FileLog` then cuts and writes.
- Replay begins at the newest readable Base (starting.py).
- A newest segment without one whole frame that no sync promised is a rotation that was cut off: it is dropped.
- What the published position promised by fsync and is not there is damage: never cut, and a Gap.
- Frames say whether all before them was synced when they were written, so a position that lags behind (it is not synced itself)
  does not turn damage into a torn tail. What lies beyond the last whole group, unpromised, is torn: the caller cuts it at `end`.
"""

from collections.abc import Iterator

from penstock.logs.api import ENDLESS, Frame, FrameType, Gap
from penstock.logs.files import checkpoint
from penstock.logs.files.chain import Chain
from penstock.logs.files.checkpoint import Checkpoint
from penstock.logs.files.index import SparseIndex
from penstock.logs.files.replay import Promise, Replay, Start
from penstock.logs.files.segment import SegmentName
from penstock.logs.files.starting import beginning, stored_checkpoint
from penstock.logs.files.synced import Synced
from penstock.logs.files.system import Files
from penstock.logs.frame import AFTER_SYNC
from penstock.words.errors import CorruptLog


class Opening:
    """One opening of a chain that has at least one segment. Iterate over `frames` once, then look at the rest."""

    def __init__(self, files: Files, chain: Chain, synced: Synced | None, notes: list[str]) -> None:
        self._files = files
        self._chain = chain
        self._synced = synced
        self._notes = notes
        self._checkpoint: Checkpoint | None = None
        self._begun: SegmentName | None = None  # a rotation, cut off, that was to begin this segment
        self.replay = Replay(chain, Start(0, 0, 0, 0), Promise())

    @property
    def solid(self) -> int:
        """The newest segment's bytes below this were promised by an fsync."""
        synced, newest = self._synced, self._chain.names[-1]
        if synced is None or synced.durability != "fsync" or synced.segment < newest:
            return 0
        return synced.position if synced.segment == newest else ENDLESS

    @property
    def damaged(self) -> bool:
        """Whether the end of the log is damaged rather than torn: it must be kept as it is, and the log goes on in a new segment."""
        return self.replay.short or self.replay.end < self.solid

    def torn_rotation(self) -> bool:
        """Whether the newest segment never got its first frame. Then everything before it was synced, or it would not have been begun."""
        newest = self._chain.names[-1]
        if len(self._chain.names) == 1 or self.solid or any(piece.frame is not None for piece in self._chain.pieces(newest, 0)):
            return False
        self._begun = newest
        return True

    def frames(self) -> Iterator[Frame | Gap]:
        """Everything from the newest readable Base on."""
        stored = self._stored_checkpoint(self._notes)
        start, at_checkpoint = beginning(self._chain, stored, self._notes)
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

    def promise(self) -> Promise:
        """What must be there: what the published position says, and what was really synced before a checkpoint or a rotation."""
        synced, stored, begun, position = self._synced, self._stored_checkpoint([]), self._begun, self._vouched()
        promises = [(synced.sequence, synced.offset)] if synced is not None and synced.durability == "fsync" else [(0, 0)]
        if stored is not None:
            promises.append((stored.frame.sequence, stored.frame.base))
            if stored.segment == self._chain.names[-1]:
                position = max(position, stored.end)
        if begun is not None and self._ends_before(begun):
            promises.append((begun.first_sequence - 1, begun.base))
            position = ENDLESS
        return Promise(position, *max(promises), known=synced is not None)

    def _ends_before(self, begun: SegmentName) -> bool:
        """Whether nothing was appended after a rotation was cut off: its file may be one whose removal a power cut has undone."""
        pieces = self._chain.pieces(self._chain.names[-1], 0)
        return all(piece.frame is None or piece.frame.sequence < begun.first_sequence for piece in pieces)

    def unfit_checkpoint(self) -> bool:
        """Whether there is a checkpoint that does not count. It must go: the log may yet grow into something that it seems to fit."""
        return self._checkpoint is None and self._files.exists(f"{self._chain.directory}/{checkpoint.FILE_NAME}")

    def _stored_checkpoint(self, notes: list[str]) -> Checkpoint | None:
        if self._checkpoint is None:
            self._checkpoint = stored_checkpoint(self._files, self._chain, notes)
        return self._checkpoint

    def _vouched(self) -> int:
        """Where the newest segment's promised bytes end: the published position may lag behind, but later frames vouch for earlier ones."""
        newest = self._chain.names[-1]
        solid = self.solid
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
