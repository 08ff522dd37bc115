"""A store in memory, for "memory://" brokers and tests.

Owns: `MemoryStore`, `MemoryLog` and `MemoryInbox`, which implement log.py and store.py.
A log keeps its frames in a list. A second MemoryLog with the same list reads what the first one wrote; that is how a
log is reopened. Nothing outlives the process; `sync` only sets the position to which `reset` goes back.
A Base begins a segment, as in files. A rewritten segment begins with one SKIP frame, which stands for all removed
frames.
The inbox may be used from several threads.
"""

import io
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import BinaryIO, ClassVar, TypeAlias

from penstock.logs.columns import trim_frame
from penstock.logs.disk_threads import DiskThreads
from penstock.logs.frame import DROPPED, dropped_gap
from penstock.logs.log import ENDLESS, Draft, Durability, Frame, FrameType, Gap, Log, LogRange, ReadableLog, SegmentFacts
from penstock.logs.store import (
    BLOB_SWEEPS,
    InboxEntry,
    LogPosition,
    StagedPart,
    SweepCounter,
    WriteManifest,
    check_file_name,
    leading_number,
    publishable_manifest,
    published_write_name,
    refuse_missing,
)
from penstock.rules.runs import RunSet
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, StorageFailed

_BEGINS_A_SEGMENT = (FrameType.BASE, FrameType.SKIP)


class MemoryLog:
    """A log whose frames are in a list."""

    durability: Durability = "fsync"
    waits_for_disk = False
    where = "memory"

    def __init__(self, incarnation: int, partition: int, kept: list[Frame] | None = None) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.kept: list[Frame] = [] if kept is None else kept
        """All frames, oldest first."""
        self.findings: list[str] = []
        self._synced = len(self.kept)
        self._sequence = 0
        self._offset = 0
        self._segment_starts: list[int] = []
        """The index in `kept` of the first frame of each segment."""
        self._facts: list[SegmentFacts] = []
        """The facts of all segments except the newest."""
        self._segment_bytes = 0
        self._data_offsets: list[int] = []
        """The first offset of each DATA frame."""
        self._data_indexes: list[int] = []
        """The index in `kept` of each DATA frame."""
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
        self._check_ready()
        return self._oldest().base_offset

    @property
    def unsynced(self) -> bool:
        return len(self.kept) > self._synced

    @property
    def wants_base(self) -> bool:
        return False

    # -- writing -------------------------------------------------------------------------------------

    def append(self, drafts: Sequence[Draft]) -> int:
        self._check_ready()
        frames = [_framed(draft, self._sequence + number) for number, draft in enumerate(drafts, 1)]
        for frame in frames:
            self._add_to_index(frame, len(self.kept))
            self.kept.append(frame)
        return sum(len(frame.body) for frame in frames)

    def sync(self) -> None:
        self._check_ready()
        self._synced = len(self.kept)

    def force_sync(self) -> None:
        self.sync()

    def set_compression(self, enabled: bool | None, level: int | None, min_bytes: int | None) -> None:
        """Frames in memory are not compressed."""

    def publish(self) -> None:
        """No other process reads it."""
        self._check_ready()

    def rotate(self, base: Draft) -> None:
        self.append([base])
        self.sync()

    def write_summary(self, body: bytes) -> None:
        """Not needed: opening a log in memory is fast."""

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Not needed: opening a log in memory is fast."""
        self._check_ready()

    # -- reading -------------------------------------------------------------------------------------

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        self._check_ready()
        found: list[Frame | Gap] = []
        oldest = self._oldest()
        if start < min(stop, oldest.base_offset):
            found.append(dropped_gap(oldest.first_sequence, oldest.base_offset, "memory"))
        first = max(0, bisect_right(self._data_offsets, start) - 1)
        last = bisect_left(self._data_offsets, stop) if start < stop else first
        frames = [self.kept[index] for index in self._data_indexes[first:last]]
        for frame in frames:
            if frame.base_offset + frame.count > start:
                found.append(frame)
                size_bytes -= len(frame.body)
                if size_bytes <= 0:
                    break
        return found

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        self._check_ready()
        oldest = self.segments()[0]
        if 0 < after < oldest.first_sequence - 1:
            yield Gap(after + 1, oldest.first_sequence - 1, oldest.base_offset, oldest.base_offset, "memory", DROPPED)
        yield from [frame for frame in self.kept if frame.type is not FrameType.SKIP and frame.sequence > after]

    def offset_at(self, wall: int) -> int:
        self._check_ready()
        frames = (self.kept[index] for index in self._data_indexes)
        return next((frame.base_offset for frame in frames if frame.wall >= wall), self._offset)

    # -- segments and retention ----------------------------------------------------------------------

    def segments(self) -> list[SegmentFacts]:
        self._check_ready()
        return [*self._facts, self._newest_facts()]

    def readable_range(self) -> LogRange:
        facts = self.segments()
        intact_from = next(segment.first_sequence for segment in facts if not segment.rewritten)  # the newest never is
        return LogRange(facts[0].base_offset, self._offset, self._sequence, intact_from, [segment.first_sequence for segment in facts])

    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments())

    def newest(self) -> SegmentFacts:
        self._check_ready()
        return self._newest_facts()

    def drop(self, count: int) -> int:
        self.sync()
        facts = self.segments()
        if count:
            _refuse_unless(0 < count < len(facts), f"{count} of {len(facts)} segments cannot be removed")
            self._replace(0, count, [])
        return sum(segment.size_bytes for segment in facts[:count])

    def rewrite(self, first: int, last: int, keep: Sequence[int]) -> int:
        self.sync()
        facts = self.segments()
        _refuse_unless(0 <= first <= last < len(facts) - 2, f"segments {first} to {last} of {len(facts)} cannot be rewritten")
        wanted = RunSet(keep)
        old = self.kept[self._segment_starts[first] : self._segment_starts[last + 1]]
        drafts = [(trim_frame(frame, wanted), frame.sequence) for frame in old if frame.type is FrameType.DATA]
        skip = Frame(
            FrameType.SKIP, facts[first].first_sequence, facts[first].base_offset, 0, 0, old[0].elapsed, old[0].wall, memoryview(b"")
        )
        new = [skip, *(_framed(draft, sequence) for draft, sequence in drafts if draft is not None)]
        self._replace(first, last + 1, new)
        return sum(segment.size_bytes for segment in facts[first : last + 1]) - sum(len(frame.body) for frame in new)

    # -- opening and closing -------------------------------------------------------------------------

    def recover(self) -> Iterator[Frame | Gap]:
        self._check_open()
        self._rebuild_index()
        yield from self.kept[self._latest_base() :]
        self._recovered = True

    def free_bytes(self) -> int:
        """Practically unlimited; the memory that is left is not known."""
        return 1 << 62

    def reset(self) -> None:
        self._check_open()
        del self.kept[self._synced :]
        self._recovered = False

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"MemoryLog(partition={self.partition}, frames={len(self.kept)}, synced={self._synced})"

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed(f"the log of partition {self.partition} is closed; open it again")

    def _check_ready(self) -> None:
        self._check_open()
        if not self._recovered:
            raise InvalidRequest(f"the log of partition {self.partition} is not recovered; exhaust recover() first")

    def _latest_base(self) -> int:
        """The index in `kept` of the latest Base; 0 when there is none."""
        for index in range(len(self.kept) - 1, -1, -1):
            if self.kept[index].type is FrameType.BASE:
                return index
        return 0

    def _replace(self, first: int, stop: int, frames: Sequence[Frame]) -> None:
        """Replace the segments [first, stop) by some frames."""
        start, end = self._segment_starts[first], self._segment_starts[stop]
        self.kept[start:end] = frames
        self._synced += len(frames) - (end - start)
        self._rebuild_index()

    def _rebuild_index(self) -> None:
        for column in (self._segment_starts, self._facts, self._data_offsets, self._data_indexes):
            column.clear()
        self._segment_bytes = self._sequence = self._offset = 0
        for index, frame in enumerate(self.kept):
            self._add_to_index(frame, index)

    def _add_to_index(self, frame: Frame, index: int) -> None:
        """Add a frame at an index of `kept` (or one that will be appended there) to the positions and facts."""
        kind = frame.type
        if not index or kind in _BEGINS_A_SEGMENT:
            self._begin_segment(index)
        self._segment_bytes += len(frame.body)
        self._sequence = frame.sequence
        if kind is FrameType.DATA:
            self._data_offsets.append(frame.base_offset)
            self._data_indexes.append(index)
            self._offset = frame.base_offset + frame.count
        elif frame.base_offset > self._offset:
            self._offset = frame.base_offset

    def _begin_segment(self, index: int) -> None:
        if self._segment_starts:
            last = self.kept[index - 1]
            self._facts.append(self._newest_facts()._replace(last_wall=last.wall))
        self._segment_starts.append(index)
        self._segment_bytes = 0

    def _oldest(self) -> SegmentFacts:
        return self._facts[0] if self._facts else self._newest_facts()

    def _newest_facts(self) -> SegmentFacts:
        if not self._segment_starts:
            return SegmentFacts(0, 1, 0, 0, 0)
        first, last = self.kept[self._segment_starts[-1]], self.kept[-1]
        base = first.base_offset if first.sequence > 1 else 0
        return SegmentFacts(base, first.sequence, self._segment_bytes, first.wall, last.wall, first.type is FrameType.SKIP, first.elapsed)


# -- the store and its inbox -------------------------------------------------------------------------


class MemoryStore:
    """Logs in memory. A log that was closed can be opened again until the process ends."""

    name = "memory"

    def __init__(self) -> None:
        self.inbox = MemoryInbox()
        self._kept: dict[tuple[int, int], list[Frame]] = {}
        self.disk = DiskThreads(lambda incarnation, partition: self.name)
        self.close = self.disk.close

    def free_bytes(self) -> dict[int, int]:
        return {}

    def directories(self) -> list[str]:
        return []

    def positions(self, incarnations: Container[int]) -> list[LogPosition]:
        raise InvalidRequest("a broker in memory has no files; only one in a directory can be backed up")

    def note_opened(self) -> None:
        """Nothing to note: a process that ends takes its memory with it."""

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log:
        return MemoryLog(incarnation, partition, self._kept.setdefault((incarnation, partition), []))

    def create_logs(self, incarnation: int, *partitions: int) -> None:
        """Not needed: `log` makes the list."""

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """There are no summaries: opening a log in memory is fast."""
        return None if self._kept.get((incarnation, partition)) else b""

    def reader(self, incarnation: int, partition: int) -> ReadableLog:
        """A copy of the log as it is now."""
        log = MemoryLog(incarnation, partition, list(self._kept.get((incarnation, partition), ())))
        deque(log.recover(), maxlen=0)
        return log

    def remove_logs(self, incarnation: int) -> None:
        for log_id in list(self._kept):  # a copy: other threads open logs meanwhile
            if log_id[0] == incarnation:
                del self._kept[log_id]


EntryId: TypeAlias = tuple[int, str]
"""An incarnation and a name."""
StagedFiles: TypeAlias = dict[str, "bytes | list[Frame]"]
"""The parts of a write (lists of frames) and their sidecars (bytes), by name."""


class MemoryInbox:
    """The inbox of a broker in memory."""

    shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self.staged: dict[str, StagedFiles] = {}
        """The writes that are not published yet, by name."""
        self._writes: dict[EntryId, tuple[WriteManifest, StagedFiles]] = {}
        """The published writes."""
        self._blobs: dict[EntryId, bytes] = {}
        self._sweeps: SweepCounter[EntryId] = SweepCounter()
        self._lock = threading.Lock()

    # -- for processes that do not own the broker ----------------------------------------------------

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
        entry = incarnation, published_write_name(manifest.source, manifest.number)
        with self._lock:
            parts = self.staged.pop(check_file_name(write), {})
            if entry in self._writes:
                return False
            refuse_missing(write, manifest, parts)
            named = {part.name for part in manifest.parts}
            self._writes[entry] = manifest, {name: part for name, part in parts.items() if name in named}
        return True

    def abandon(self, write: str) -> None:
        self.staged.pop(check_file_name(write), None)

    def abandon_empty(self, write: str) -> None:
        with self._lock:
            if not self.staged.get(write, True):
                del self.staged[write]

    def is_pending(self, incarnation: int, source: str, number: int) -> bool:
        return (incarnation, published_write_name(source, number)) in self._writes

    def has_owner(self) -> bool:
        """Always: the inbox is in the memory of the owner."""
        return True

    # -- for the owner -------------------------------------------------------------------------------

    def waiting(self) -> list[InboxEntry]:
        with self._lock:
            return [InboxEntry(*entry, f"{entry[0]:016x}-{entry[1]}.drop") for entry in sorted(self._writes)]

    def manifest(self, entry: InboxEntry) -> WriteManifest:
        return self._write(entry)[0]

    def frames(self, entry: InboxEntry, part: StagedPart) -> Iterator[Frame]:
        found = self._write(entry)[1].get(check_file_name(part.name))
        if not isinstance(found, list):
            raise CorruptLog(f"the published write {entry.label} lacks its part {part.name}; write it again")
        return iter(found)

    def remove(self, entry: InboxEntry) -> None:
        with self._lock:
            self._writes.pop((entry.incarnation, entry.name), None)

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        with self._lock:
            for write in [write for write in self.staged if 0 < leading_number(write) < started_before]:
                del self.staged[write]
            for entry in [entry for entry in self._blobs if entry[0] not in queues]:
                del self._blobs[entry]
            for entry in self._sweeps.overdue(dict.fromkeys(self._blobs, BLOB_SWEEPS)):
                del self._blobs[entry]

    # -- blobs ---------------------------------------------------------------------------------------

    def put_blob(self, incarnation: int, name: str, body: bytes) -> None:
        with self._lock:
            self._blobs[incarnation, check_file_name(name)] = body

    def blob(self, incarnation: int, name: str) -> bytes | None:
        return self._blobs.get((incarnation, name))

    def blob_names(self, incarnation: int, prefix: str) -> list[str]:
        with self._lock:
            return sorted(name for owner, name in self._blobs if owner == incarnation and name.startswith(prefix))

    def remove_blob(self, incarnation: int, name: str) -> None:
        with self._lock:
            self._blobs.pop((incarnation, name), None)

    def _write(self, entry: InboxEntry) -> tuple[WriteManifest, StagedFiles]:
        found = self._writes.get((entry.incarnation, entry.name))
        if found is None:
            raise CorruptLog(f"the published write {entry.label} is not in the inbox; write it again")
        return found


class MemoryPart:
    """The writer and reader of a part."""

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
            raise InvalidRequest(f"a part takes DATA frames of base 0, not {draft._replace(parts=())}; give one that ArrowBatch.draft made")
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
        """Nothing is open."""


class _Sidecar(io.BytesIO):
    """A file whose bytes are stored when it is closed."""

    def __init__(self, staged: StagedFiles, name: str) -> None:
        super().__init__()
        self._staged, self._name = staged, name

    def close(self) -> None:
        if not self.closed:
            self._staged[self._name] = self.getvalue()
        super().close()


def _sidecar(part: str) -> str:
    return f"{part}.order"


# -- helpers -----------------------------------------------------------------------------------------


def _framed(draft: Draft, sequence: int) -> Frame:
    kind, base, count, columns, elapsed, wall, parts = draft
    return Frame(FrameType(kind), sequence, base, count, columns, elapsed, wall, memoryview(b"".join(parts)))


def _refuse_unless(fine: bool, wrong: str) -> None:
    if not fine:
        raise InvalidRequest(f"{wrong}, the newest must remain; give lower numbers")
