"""A log in memory: the contract of api.py with nothing beneath it.

Owns: `MemoryLog`. What it keeps lives in a plain list that may be handed to a second log, which then finds what the first one wrote:
that is how tests and "memory://" brokers reopen one. It ends with the process, so every `append` is as durable as it will ever be
and `sync` only draws the line that `reset` goes back to.
A Base begins a segment, as in files; a segment that was rewritten begins with one SKIP, which stands for all that was removed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from penstock.logs import marks
from penstock.logs.api import ENDLESS, Draft, Durability, Frame, FrameType, Gap, SegmentFacts
from penstock.logs.trim import trimmed
from penstock.rules.runs import RunSet
from penstock.words.errors import BrokerClosed, InvalidRequest

_BEGINS_A_SEGMENT = (FrameType.BASE, FrameType.SKIP)


class MemoryLog:
    """One partition's frames, in a list."""

    durability: Durability = "fsync"
    waits_for_disk = False
    directory = "memory"

    def __init__(self, incarnation: int, partition: int, kept: list[Frame] | None = None) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.kept: list[Frame] = [] if kept is None else kept
        """Every frame retained, oldest first."""
        self.notes: list[str] = []
        self._synced = len(self.kept)
        self._sequence = 0
        self._offset = 0
        self._cuts: list[int] = []  # where in `kept` each segment begins
        self._facts: list[SegmentFacts] = []  # of the segments but the newest
        self._segment_bytes = 0
        self._starts: list[int] = []  # of the DATA frames: first offset, and beside it the frame's place in `kept`
        self._places: list[int] = []
        self._recovered = False
        self._closed = False

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def first_offset(self) -> int:
        self._ready()
        return self._oldest().base

    @property
    def unsynced(self) -> bool:
        return len(self.kept) > self._synced

    @property
    def wants_base(self) -> bool:
        return False

    # -- writing -------------------------------------------------------------------------------------

    def append(self, drafts: Sequence[Draft]) -> int:
        self._ready()
        frames = [_framed(draft, self._sequence + number) for number, draft in enumerate(drafts, 1)]
        for frame in frames:
            self._note(frame, len(self.kept))
            self.kept.append(frame)
        return sum(len(frame.body) for frame in frames)

    def sync(self) -> None:
        self._ready()
        self._synced = len(self.kept)

    def flush(self) -> None:
        self.sync()

    def publish(self) -> None:
        """Nobody else reads it."""
        self._ready()

    def rotate(self, base: Draft) -> None:
        self.append([base])
        self.sync()

    def write_summary(self, body: bytes) -> None:
        """It is opened quickly, whatever it holds."""

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Nothing outlives this log that a checkpoint could speed up."""
        self._ready()

    # -- reading -------------------------------------------------------------------------------------

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        self._ready()
        found: list[Frame | Gap] = []
        oldest = self._oldest()
        if start < min(stop, oldest.base):
            found.append(marks.dropped(oldest.first_sequence, oldest.base, "memory"))
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop) if start < stop else first
        frames = [self.kept[place] for place in self._places[first:last]]
        for frame in frames:
            if frame.base + frame.count > start:
                found.append(frame)
                size_bytes -= len(frame.body)
                if size_bytes <= 0:
                    break
        return found

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        self._ready()
        oldest = self.segments()[0]
        if 0 < after < oldest.first_sequence - 1:
            yield Gap(after + 1, oldest.first_sequence - 1, oldest.base, oldest.base, "memory", marks.DROPPED)
        yield from [frame for frame in self.kept if frame.type is not FrameType.SKIP and frame.sequence > after]

    def offset_at(self, wall: int) -> int:
        self._ready()
        frames = (self.kept[place] for place in self._places)
        return next((frame.base for frame in frames if frame.wall >= wall), self._offset)

    # -- letting go of what is old -------------------------------------------------------------------

    def segments(self) -> list[SegmentFacts]:
        self._ready()
        return [*self._facts, self._newest_facts()]

    def newest(self) -> SegmentFacts:
        self._ready()
        return self._newest_facts()

    def drop(self, count: int) -> int:
        self.sync()
        facts = self.segments()
        if count:
            _refuse_unless(0 < count < len(facts), f"{count} of {len(facts)} segments cannot go")
            self._replace(0, count, [])
        return sum(segment.size_bytes for segment in facts[:count])

    def rewrite(self, first: int, last: int, keep: Sequence[int]) -> int:
        self.sync()
        facts = self.segments()
        _refuse_unless(0 <= first <= last < len(facts) - 2, f"segments {first} to {last} of {len(facts)} cannot be rewritten")
        wanted = RunSet(keep)
        old = self.kept[self._cuts[first] : self._cuts[last + 1]]
        drafts = [(trimmed(frame, wanted), frame.sequence) for frame in old if frame.type is FrameType.DATA]
        skip = Frame(FrameType.SKIP, facts[first].first_sequence, facts[first].base, 0, 0, old[0].elapsed, old[0].wall, memoryview(b""))
        new = [skip, *(_framed(draft, sequence) for draft, sequence in drafts if draft is not None)]
        self._replace(first, last + 1, new)
        return sum(segment.size_bytes for segment in facts[first : last + 1]) - sum(len(frame.body) for frame in new)

    # -- opening and closing -------------------------------------------------------------------------

    def recover(self) -> Iterator[Frame | Gap]:
        self._open()
        self._learn()
        yield from self.kept[self._latest_base() :]
        self._recovered = True

    def free_bytes(self) -> int:
        """Nobody can say; the process would be stopped long before."""
        return 1 << 62

    def reset(self) -> None:
        self._open()
        del self.kept[self._synced :]
        self._recovered = False

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"MemoryLog(partition={self.partition}, frames={len(self.kept)}, synced={self._synced})"

    def _open(self) -> None:
        if self._closed:
            raise BrokerClosed(f"the log of partition {self.partition} is closed; open it again")

    def _ready(self) -> None:
        self._open()
        if not self._recovered:
            raise InvalidRequest(f"the log of partition {self.partition} is not recovered; exhaust recover() first")

    def _latest_base(self) -> int:
        for place in range(len(self.kept) - 1, -1, -1):
            if self.kept[place].type is FrameType.BASE:
                return place
        return 0

    def _replace(self, first: int, stop: int, frames: Sequence[Frame]) -> None:
        """Put frames in the place of whole segments."""
        edges = self._cuts[first], self._cuts[stop]
        self.kept[slice(*edges)] = frames
        self._synced += len(frames) - (edges[1] - edges[0])
        self._learn()

    def _learn(self) -> None:
        """Take up everything anew."""
        for column in (self._cuts, self._facts, self._starts, self._places):
            column.clear()
        self._segment_bytes = self._sequence = self._offset = 0
        for place, frame in enumerate(self.kept):
            self._note(frame, place)

    def _note(self, frame: Frame, place: int) -> None:
        """Take up a frame that stands, or is about to stand, at a place."""
        kind = frame.type
        if not place or kind in _BEGINS_A_SEGMENT:
            self._begin(place)
        self._segment_bytes += len(frame.body)
        self._sequence = frame.sequence
        if kind is FrameType.DATA:
            self._starts.append(frame.base)
            self._places.append(place)
            self._offset = frame.base + frame.count
        elif frame.base > self._offset:
            self._offset = frame.base

    def _begin(self, place: int) -> None:
        """Begin a segment there."""
        if self._cuts:
            last = self.kept[place - 1]
            self._facts.append(self._newest_facts()._replace(last_wall=last.wall))
        self._cuts.append(place)
        self._segment_bytes = 0

    def _oldest(self) -> SegmentFacts:
        return self._facts[0] if self._facts else self._newest_facts()

    def _newest_facts(self) -> SegmentFacts:
        if not self._cuts:
            return SegmentFacts(0, 1, 0, 0, 0)
        first, last = self.kept[self._cuts[-1]], self.kept[-1]
        base = first.base if first.sequence > 1 else 0
        return SegmentFacts(base, first.sequence, self._segment_bytes, first.wall, last.wall, first.type is FrameType.SKIP, first.elapsed)


def _framed(draft: Draft, sequence: int) -> Frame:
    kind, base, count, columns, elapsed, wall, parts = draft
    return Frame(FrameType(kind), sequence, base, count, columns, elapsed, wall, memoryview(b"".join(parts)))


def _refuse_unless(fine: bool, wrong: str) -> None:
    if not fine:
        raise InvalidRequest(f"{wrong}, the newest must stay; give lower numbers")
