"""A store in memory: the contracts of api.py and store.py with nothing beneath them.

Owns: `MemoryStore`, `MemoryLog` and `MemoryInbox`. What a log keeps lives in a plain list that may be handed to a second log, which then
finds what the first one wrote: that is how tests and "memory://" brokers reopen one. It ends with the process, so every `append` is as
durable as it will ever be and `sync` only draws the line that `reset` goes back to.
A Base begins a segment, as in files; a segment that was rewritten begins with one SKIP, which stands for all that was removed.
The inbox may be used from several threads.
"""

import io
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from typing import BinaryIO, ClassVar, TypeAlias

from penstock.logs.columns import trim_frame
from penstock.logs.disk_threads import DiskThreads
from penstock.logs.frame import DROPPED, dropped_gap
from penstock.logs.log import ENDLESS, Draft, Durability, Frame, FrameType, Gap, Log, LogRange, ReadableLog, SegmentFacts
from penstock.logs.store import (
    InboxEntry,
    StagedPart,
    SweepCounter,
    WriteManifest,
    check_file_name,
    kept_sweeps,
    leading_number,
    publishable_manifest,
    published_write_name,
    refuse_missing,
)
from penstock.rules.runs import RunSet
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, StorageFailed

_BEGINS_A_SEGMENT = (FrameType.BASE, FrameType.SKIP)


class MemoryLog:
    """One partition's frames, in a list."""

    durability: Durability = "fsync"
    waits_for_disk = False
    where = "memory"

    def __init__(self, incarnation: int, partition: int, kept: list[Frame] | None = None) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.kept: list[Frame] = [] if kept is None else kept
        """Every frame retained, oldest first."""
        self.findings: list[str] = []
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
        return self._oldest().base_offset

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

    def force_sync(self) -> None:
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
        if start < min(stop, oldest.base_offset):
            found.append(dropped_gap(oldest.first_sequence, oldest.base_offset, "memory"))
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop) if start < stop else first
        frames = [self.kept[place] for place in self._places[first:last]]
        for frame in frames:
            if frame.base_offset + frame.count > start:
                found.append(frame)
                size_bytes -= len(frame.body)
                if size_bytes <= 0:
                    break
        return found

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        self._ready()
        oldest = self.segments()[0]
        if 0 < after < oldest.first_sequence - 1:
            yield Gap(after + 1, oldest.first_sequence - 1, oldest.base_offset, oldest.base_offset, "memory", DROPPED)
        yield from [frame for frame in self.kept if frame.type is not FrameType.SKIP and frame.sequence > after]

    def offset_at(self, wall: int) -> int:
        self._ready()
        frames = (self.kept[place] for place in self._places)
        return next((frame.base_offset for frame in frames if frame.wall >= wall), self._offset)

    # -- letting go of what is old -------------------------------------------------------------------

    def segments(self) -> list[SegmentFacts]:
        self._ready()
        return [*self._facts, self._newest_facts()]

    def readable_range(self) -> LogRange:
        facts = self.segments()
        whole_from = next((segment.first_sequence for segment in facts if not segment.rewritten), 1)
        return LogRange(facts[0].base_offset, self._offset, self._sequence, whole_from, [segment.first_sequence for segment in facts])

    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments())

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
        drafts = [(trim_frame(frame, wanted), frame.sequence) for frame in old if frame.type is FrameType.DATA]
        skip = Frame(
            FrameType.SKIP, facts[first].first_sequence, facts[first].base_offset, 0, 0, old[0].elapsed, old[0].wall, memoryview(b"")
        )
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
            self._starts.append(frame.base_offset)
            self._places.append(place)
            self._offset = frame.base_offset + frame.count
        elif frame.base_offset > self._offset:
            self._offset = frame.base_offset

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
        base = first.base_offset if first.sequence > 1 else 0
        return SegmentFacts(base, first.sequence, self._segment_bytes, first.wall, last.wall, first.type is FrameType.SKIP, first.elapsed)


# -- the store and its inbox -------------------------------------------------------------------------


class MemoryStore:
    """Logs that end with the process, and not before: they may be opened again."""

    name = "memory"

    def __init__(self) -> None:
        self.inbox = MemoryInbox()
        self._kept: dict[tuple[int, int], list[Frame]] = defaultdict(list)
        syncs = DiskThreads(lambda incarnation, partition: self.name)
        self.commit, self.run_job, self.close = syncs.commit, syncs.run_job, syncs.close

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log:
        return MemoryLog(incarnation, partition, self._kept[incarnation, partition])

    def create_logs(self, incarnation: int, *partitions: int) -> None:
        """A list is made when it is asked for."""

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """A log in memory is opened as quickly as anything could be looked up."""
        return None if self._kept[incarnation, partition] else b""

    def reader(self, incarnation: int, partition: int) -> ReadableLog:
        """As it is now."""
        log = MemoryLog(incarnation, partition, list(self._kept[incarnation, partition]))
        deque(log.recover(), maxlen=0)
        return log

    def remove_logs(self, incarnation: int) -> None:
        for owner in [owner for owner in self._kept if owner[0] == incarnation]:
            del self._kept[owner]


Place: TypeAlias = tuple[int, str]
"""An incarnation and a name."""


class MemoryInbox:
    """The inbox of a broker in memory."""

    shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self.staged: dict[str, dict[str, bytes | list[Frame]]] = {}
        """Of each write under way its parts and, as bytes, their sidecars."""
        self._drops: dict[Place, tuple[WriteManifest, dict[str, bytes | list[Frame]]]] = {}
        self._errands: dict[Place, bytes] = {}
        self._notes: dict[Place, bytes] = {}
        self._sweeps: SweepCounter[Place] = SweepCounter()
        self._lock = threading.Lock()

    # -- for those who do not own it -----------------------------------------------------------------

    def begin_write(self, write: str) -> None:
        self.staged.setdefault(check_file_name(write), {})

    def part_writer(self, write: str, name: str, incarnation: int, make: bool = False) -> "MemoryPart":
        return MemoryPart(self, check_file_name(write), check_file_name(name), make)

    def part_reader(self, write: str, name: str, incarnation: int) -> "MemoryPart":
        return MemoryPart(self, check_file_name(write), check_file_name(name), make=False)

    def sidecar(self, write: str, name: str) -> BinaryIO:
        found = self.staged[write][_sidecar(name)]
        assert isinstance(found, bytes)
        return io.BytesIO(found)

    def publish(self, write: str, incarnation: int, manifest: WriteManifest) -> bool:
        manifest = publishable_manifest(write, manifest)
        place = incarnation, published_write_name(manifest.source, manifest.number)
        with self._lock:
            parts = self.staged.pop(check_file_name(write), {})
            if place in self._drops:
                return False
            refuse_missing(write, manifest, parts)
            named = {part.name for part in manifest.parts}
            self._drops[place] = manifest, {name: part for name, part in parts.items() if name in named}
        return True

    def abandon(self, write: str) -> None:
        self.staged.pop(check_file_name(write), None)

    def abandon_empty(self, write: str) -> None:
        with self._lock:
            if not self.staged.get(write, True):
                del self.staged[write]

    def is_pending(self, incarnation: int, source: str, number: int) -> bool:
        return (incarnation, published_write_name(source, number)) in self._drops

    def put_operation(self, incarnation: int, name: str, body: bytes) -> None:
        with self._lock:
            self._errands[incarnation, check_file_name(name)] = body

    def withdraw_operation(self, incarnation: int, name: str) -> None:
        self._errands.pop((incarnation, name), None)

    def has_owner(self) -> bool:
        """It ends with its owner."""
        return True

    # -- for the owner -------------------------------------------------------------------------------

    def waiting(self) -> list[InboxEntry]:
        with self._lock:
            errands = [InboxEntry(*place, f"{place[0]:016x}-{place[1]}.errand", True) for place in sorted(self._errands)]
            return errands + [InboxEntry(*place, f"{place[0]:016x}-{place[1]}.drop", False) for place in sorted(self._drops)]

    def manifest(self, drop: InboxEntry) -> WriteManifest:
        return self._drop(drop)[0]

    def frames(self, drop: InboxEntry, part: StagedPart) -> Iterator[Frame]:
        found = self._drop(drop)[1].get(check_file_name(part.name))
        if not isinstance(found, list):
            raise CorruptLog(f"the drop {drop.label} lacks its part {part.name}; write it again")
        return iter(found)

    def operation(self, errand: InboxEntry) -> bytes | None:
        return self._errands.get((errand.incarnation, errand.name))

    def remove(self, one: InboxEntry, body: bytes | None = None) -> None:
        place = one.incarnation, one.name
        with self._lock:
            if not one.is_operation:
                self._drops.pop(place, None)
            elif body is None or self._errands.get(place) == body:
                self._errands.pop(place, None)

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        with self._lock:
            for write in [write for write in self.staged if 0 < leading_number(write) < started_before]:
                del self.staged[write]
            for place in [place for place in self._notes if place[0] not in queues]:
                del self._notes[place]
            for place in self._sweeps.overdue({place: kept_sweeps(place[1]) for place in self._notes}):
                del self._notes[place]

    # -- notes ---------------------------------------------------------------------------------------

    def put_blob(self, incarnation: int, name: str, body: bytes) -> None:
        with self._lock:
            self._notes[incarnation, check_file_name(name)] = body

    def blob(self, incarnation: int, name: str) -> bytes | None:
        return self._notes.get((incarnation, name))

    def blob_names(self, incarnation: int, prefix: str) -> list[str]:
        with self._lock:
            return sorted(name for owner, name in self._notes if owner == incarnation and name.startswith(prefix))

    def remove_blob(self, incarnation: int, name: str) -> None:
        with self._lock:
            self._notes.pop((incarnation, name), None)

    def _drop(self, drop: InboxEntry) -> tuple[WriteManifest, dict[str, bytes | list[Frame]]]:
        found = self._drops.get((drop.incarnation, drop.name))
        if found is None:
            raise CorruptLog(f"the drop {drop.label} is not in the inbox; write it again")
        return found


class MemoryPart:
    """A part of a write, to be written, then read."""

    def __init__(self, inbox: MemoryInbox, write: str, name: str, make: bool) -> None:
        self.name = name
        self._inbox = inbox
        self._write = write
        self._make = make
        self._frames: list[Frame] = []

    def begin(self) -> None:
        if self._make:
            self._inbox.begin_write(self._write)
        if self._write not in self._inbox.staged:
            raise StorageFailed(f"the write {self._write} is not begun, or was abandoned; begin it, then write again")
        self._inbox.staged[self._write].setdefault(self.name, self._frames)

    def add(self, draft: Draft, partition: int = 0) -> int:
        if draft.type is not FrameType.DATA or draft.base_offset:
            raise InvalidRequest(f"a part takes DATA frames of base 0, not {draft._replace(parts=())}; give one that Sheet.draft made")
        self.begin()
        self._frames.append(_framed(draft, len(self._frames) + 1))
        return len(self._frames) - 1

    def sidecar(self) -> BinaryIO:
        return _Sidecar(self._inbox.staged[self._write], _sidecar(self.name))

    def finish(self) -> StagedPart:
        return StagedPart(self.name, len(self._frames), sum(frame.count for frame in self._frames))

    def discard(self) -> None:
        for name in (self.name, _sidecar(self.name)):
            self._inbox.staged.get(self._write, {}).pop(name, None)

    def at(self, position: int, sequence: int) -> Frame:
        found = self._inbox.staged.get(self._write, {}).get(self.name)
        if not isinstance(found, list) or position != sequence - 1 or not 0 <= position < len(found):
            raise CorruptLog(f"the staged part {self.name} has no frame {sequence} there; write it again")
        return found[position]

    def close(self) -> None:
        """Nothing is held."""


class _Sidecar(io.BytesIO):
    """Bytes that are kept when they are closed."""

    def __init__(self, kept: dict[str, bytes | list[Frame]], name: str) -> None:
        super().__init__()
        self._place = kept, name

    def close(self) -> None:
        if not self.closed:
            kept, name = self._place
            kept[name] = self.getvalue()
        super().close()


def _sidecar(part: str) -> str:
    return f"{part}.order"


# -- steps -------------------------------------------------------------------------------------------


def _framed(draft: Draft, sequence: int) -> Frame:
    kind, base, count, columns, elapsed, wall, parts = draft
    return Frame(FrameType(kind), sequence, base, count, columns, elapsed, wall, memoryview(b"".join(parts)))


def _refuse_unless(fine: bool, wrong: str) -> None:
    if not fine:
        raise InvalidRequest(f"{wrong}, the newest must stay; give lower numbers")
