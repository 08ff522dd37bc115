"""The interface of a partition's log, and of the frame, its unit of reading and writing.

Owns: `Draft` (a frame to be written), `Frame` (a frame that was read), `Gap` (a part of the log that is lost),
`SegmentFacts`, `LogRange`, `ReadableLog` (what every process may do with a log) and `Log` (what its owner may do).
A log does not interpret frames: a frame has a type, a range of item offsets and a body of bytes.

Invariants of every log
- recovery gives all frames of one `append`, or none of them;
- frames are recovered after every crash once `sync` has returned (as far as the durability mode says);
- a read gives the bytes that were written (checked by checksums), or a `Gap`; damage is never skipped silently;
- after a failed `append` or `sync` the log refuses every write until `reset`, which goes back to the last synced frame;
- `drop` removes the oldest segments and `rewrite` removes items from old segments. Offsets do not change, and a Base
  from which recovery can start always remains, so recovery gives the same state. A read of dropped segments gives a Gap
  with that reason. Frames that a rewrite removed are not read any more; removed items between kept ones read as empty
  payloads.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from penstock.words.errors import StorageFailed

Buffer: TypeAlias = bytes | bytearray | memoryview
Durability: TypeAlias = Literal["fsync", "interval", "os"]
DURABILITIES: tuple[Durability, ...] = ("fsync", "interval", "os")
SEGMENT_BYTES = 64 * 1024 * 1024
"""The default size at which the owner begins another segment."""
ENDLESS: Final = 1 << 63


class FrameType(IntEnum):
    """The content of a frame."""

    DATA = 1
    """Items, as columns."""
    STATE = 2
    """Records of what happened to items."""
    BASE = 3
    """The partition's whole state except payloads; replay can start here. First frame of all segments but the first."""
    SKIP = 4
    """Missing frames up to its sequence and items below its base offset were removed on purpose. Reads skip it."""
    GAP = 5
    """Stands for frames that a repair found lost. Reads return it as a `Gap`."""


class Draft(NamedTuple):
    """A frame to be appended. The log adds sequence, identity, checksums and compression."""

    type: FrameType
    base_offset: int
    """DATA: offset of the first item. Others: the partition's next offset."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """DATA: number of items. STATE: number of records. BASE: 1."""
    column_bits: int
    """DATA: the columns in the body (see columns.py). Others: 0."""
    elapsed: int
    wall: int
    parts: Sequence[Buffer]
    """The body, in pieces that are written one after the other."""


class Frame(NamedTuple):
    """A frame that was read: checksums verified, body decompressed."""

    type: FrameType
    sequence: int
    base_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    column_bits: int
    elapsed: int
    wall: int
    body: memoryview


class Gap(NamedTuple):
    """A range of the log that cannot be read."""

    first_sequence: int
    last_sequence: int
    """The frames from first to last, both included, are lost; first > last when they are not known."""
    start: int
    stop: int
    """The item offsets [start, stop) that may be lost; start == stop when none is."""
    where: str
    """File and byte range, for messages."""
    why: str
    repaired: bool = False
    """Whether a repair has written a GAP frame for it. It is then not reported as new damage."""


class SegmentFacts(NamedTuple):
    """What is known of a segment without reading all of it."""

    base_offset: int
    """The item offset at which it starts."""
    first_sequence: int
    size_bytes: int
    first_wall: int
    """Wall times of its first and last frame; 0 when it is empty."""
    last_wall: int
    rewritten: bool = False
    """Whether `rewrite` made it."""
    first_elapsed: int = -1
    """Elapsed time of its first frame; -1 when it is empty or that frame cannot be read."""


class LogRange(NamedTuple):
    """The part of a log that can be read: for its owner what is written, for other processes what is published."""

    start: int
    end: int
    """Item offsets [start, end). Items before `start` were deleted by retention."""
    sequence: int
    """The sequence of the last frame; 0 when there is none."""
    intact_from: int
    """From this sequence on retention has removed no frames. Some events of earlier items may be removed."""
    segments: Sequence[int]
    """The first sequence of each segment, oldest first."""

    @property
    def first_sequence(self) -> int:
        """The sequence of the first frame; one after the last when there is none."""
        return self.segments[0] if self.segments else 1


class ReadableLog(Protocol):
    """What can be read from a log, by its owner or by a reader that takes no lock."""

    @property
    def incarnation(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def where(self) -> str:
        """Its directory or the like, for messages."""
        ...

    @property
    def first_offset(self) -> int:
        """The item offset at which the oldest segment begins; earlier items were dropped or are missing."""
        ...

    @property
    def findings(self) -> list[str]:
        """What opening the log found and did (cut a torn tail, ignored a checkpoint, …), one sentence each."""
        ...

    def recover(self) -> Iterator[Frame | Gap]:
        """Yield everything from the latest readable Base on; cut a torn tail. Exhaust it before the first `append`."""
        ...

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        """The DATA frames that overlap item offsets [start, stop), in order, with a Gap where frames are missing.

        size_bytes: end after the frame with which the bodies reach this size; more frames may follow it.
        """
        ...

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        """Every frame with a sequence above `after`, oldest first, with a Gap where frames are missing or dropped.

        Fast when `after` is the sequence at which an earlier call ended.
        """
        ...

    def offset_at(self, wall: int) -> int:
        """The first offset of the first DATA frame written at or after a wall time; the next offset if there is none.

        If the wall clock was set back, a later frame than the first one may be found: a segment, or a step of its
        index, is skipped when its last frame is too early. What is found was written at or after that time in any case.
        """
        ...

    def segments(self) -> list[SegmentFacts]:
        """All segments, oldest first, at least one. Cheap: reads only segments that changed since the last call."""
        ...

    def readable_range(self) -> LogRange:
        """The readable range. Cheap: no segment is read."""
        ...

    def size_bytes(self) -> int:
        """The total size of all segments."""
        ...

    def close(self) -> None:
        """Sync unless the log has failed, and close its files. May be called twice."""
        ...


class Log(ReadableLog, Protocol):
    """The append-only log of one partition, for its owner."""

    @property
    def durability(self) -> Durability: ...
    @property
    def waits_for_disk(self) -> bool:
        """Whether `sync` waits for a disk. Otherwise it returns at once."""
        ...

    @property
    def segment_bytes(self) -> int:
        """The size of the newest segment, by which the owner decides when to `rotate`."""
        ...

    def newest(self) -> SegmentFacts:
        """The facts of the newest segment."""
        ...

    @property
    def sequence(self) -> int:
        """The sequence of the last frame; 0 when there is none."""
        ...

    @property
    def unsynced(self) -> bool:
        """Whether frames were appended since the last `sync`."""
        ...

    @property
    def wants_base(self) -> bool:
        """Whether the next write must be a `rotate`: no frame may be appended to the newest segment."""
        ...

    def append(self, drafts: Sequence[Draft]) -> int:
        """Write frames as one group, readable at once by the owner, durable after `sync`. Returns their size."""
        ...

    def sync(self) -> None:
        """Make all appended frames durable as the durability mode says, and publish the synced position.

        In the modes other than fsync the published position may lag by a few KiB; call `publish` when there is no more
        to write.
        """
        ...

    def set_compression(self, enabled: bool | None, level: int | None, min_bytes: int | None) -> None:
        """Compress the following frames so; None: as its store does, and as is the default."""
        ...

    def publish(self) -> None:
        """Publish the synced position, so that readers in other processes see everything up to it."""
        ...

    def force_sync(self) -> None:
        """Call fsync in every durability mode."""
        ...

    def rotate(self, base: Draft) -> None:
        """Sync and close the newest segment, and begin another with the frame `base`, which is synced too."""
        ...

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Write a copy of a Base at the synced position, from which `recover` can start. It can be rebuilt."""
        ...

    def write_summary(self, body: bytes) -> None:
        """Store a summary for callers that do not open the log. It is valid until the next write to the log."""
        ...

    def drop(self, count: int) -> int:
        """Sync, then remove the oldest `count` segments, never the newest. Returns the bytes freed."""
        ...

    def rewrite(self, first: int, last: int, keep: Sequence[int]) -> int:
        """Sync, then replace the segments `first` to `last` (0 is the oldest) by one. Returns the bytes freed.

        The newest two cannot be replaced. The new segment has the items of the flat runs `keep`, at their old offsets.
        Their frames keep their sequences and times; items between them read as empty payloads. When it fails before the
        replacement, the log is unchanged and stays open.
        """
        ...

    def free_bytes(self) -> int:
        """Free space of the log's storage."""
        ...

    def reset(self) -> None:
        """Remove all frames after the last synced one, after a failure. Call `recover` next."""
        ...


OnSyncStart: TypeAlias = Callable[[Log], bool]
"""Called from any thread when the sync of a log is about to begin; returns whether it should."""
OnSyncDone: TypeAlias = Callable[[Log, StorageFailed | None], None]
"""Called from any thread with a log and None when its sync succeeded, or the error. Must not raise."""
