"""What a log is: the contract every backend keeps, and the frame, its unit of I/O.

Owns: `Draft` (a frame to be written), `Frame` (one read back), `Gap` (what damage took), `SegmentFacts`, `LogRange`, `Log` (the contract),
`ReadableLog` (the part of it that needs no ownership) and `Committer` (how the logs that a turn has written to become durable).
Storage knows frames, never their meaning: a frame has a type, a range of item offsets and a body of bytes.

Invariants of every log
- the frames of one `append` are recovered all or none;
- after `sync` returned, they are recovered, whatever happens to the process or the machine (as the durability mode says);
- what is read is what was written (checksums), or it is a `Gap`: never other bytes, never silence;
- after a failed `append` or `sync` the log refuses every write until `reset`, which goes back to the last synced frame;
- old segments go from the front (`drop`) or are thinned out (`rewrite`): offsets stay what they were, and recovery finds the same state,
  because a Base that it can start from is always left. What retention dropped reads as a Gap that says so; what a rewrite removed reads as
  nothing, and blanked items between kept ones as empty payloads: who may still want an item says so in `keep`.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from penstock.words.errors import StorageFailed

Buffer: TypeAlias = bytes | bytearray | memoryview
Durability: TypeAlias = Literal["fsync", "interval", "os"]
DURABILITIES: tuple[Durability, ...] = ("fsync", "interval", "os")
SEGMENT_BYTES = 64 * 1024 * 1024
"""The size at which an owner rotates, unless it is told another."""
ENDLESS: Final = 1 << 63


class FrameType(IntEnum):
    """What a frame holds."""

    DATA = 1
    """Items, as columns."""
    STATE = 2
    """Records of what happened to items."""
    BASE = 3
    """The whole state of the partition but for payloads; replay may start here. First frame of every segment."""
    SKIP = 4
    """Every frame up to its sequence and every item below its base that is not there was removed on purpose. Not handed out."""
    GAP = 5
    """What a repair found lost. Handed out as a `Gap`."""


class Draft(NamedTuple):
    """A frame to be appended. The log adds sequence, identity, checksums and compression."""

    type: FrameType
    base_offset: int
    """DATA: offset of the first item. Others: the next offset to be given."""
    count: int  # type: ignore[assignment]  # tuple.count is not missed
    """DATA: number of items. STATE: number of records. BASE: 1."""
    column_bits: int
    """DATA: which columns the body holds (see columns.py). Others: 0."""
    elapsed: int
    wall: int
    parts: Sequence[Buffer]
    """The body, in pieces; written one after the other."""


class Frame(NamedTuple):
    """A whole frame as read back: checksums verified, body decompressed."""

    type: FrameType
    sequence: int
    base_offset: int
    count: int  # type: ignore[assignment]  # tuple.count is not missed
    column_bits: int
    elapsed: int
    wall: int
    body: memoryview


class Gap(NamedTuple):
    """A stretch of the log that could not be read. Ranges are half open; an empty one (start == stop) means none is missing."""

    first_sequence: int
    last_sequence: int
    """Frames from first to last (both included) are lost; first > last when that cannot be told."""
    start: int
    stop: int
    """Item offsets that may have been in it."""
    where: str
    """File and byte range, or the like, for a person."""
    why: str
    repaired: bool = False
    """Whether a repair has put a GAP frame in its place: known, and not to be found again as damage."""


class SegmentFacts(NamedTuple):
    """What there is to know of a segment without reading it through."""

    base_offset: int
    """Item offset it starts at."""
    first_sequence: int
    size_bytes: int
    first_wall: int
    """Wall times of its first and last frame; 0 when it is empty."""
    last_wall: int
    rewritten: bool = False
    """Whether it holds only what a `rewrite` kept."""
    first_elapsed: int = -1
    """Elapsed time of its first frame; -1 when it is empty or that frame cannot be read."""


class LogRange(NamedTuple):
    """What of a log can be read: by its owner what is written, by anybody else what is published."""

    start: int
    end: int
    """Item offsets [start, end); what retention took from the front is before them."""
    sequence: int
    """Of the last frame; 0 when there is none."""
    intact_from: int
    """The first sequence from which on retention has taken nothing: before it there may be items whose events are not told any more."""
    segments: Sequence[int]
    """The first sequence of each segment, oldest first."""

    @property
    def first_sequence(self) -> int:
        """Of the first frame; one behind the last when there is none."""
        return self.segments[0] if self.segments else 1


class ReadableLog(Protocol):
    """A log as anybody may read it: its owner, or one who takes no lock."""

    @property
    def incarnation(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def where(self) -> str:
        """Where it lies, for a person."""
        ...

    @property
    def first_offset(self) -> int:
        """The item offset at which the oldest segment begins. What came before was dropped, or its files are missing."""
        ...

    @property
    def findings(self) -> list[str]:
        """What opening found and did (a torn tail cut, a checkpoint ignored, …), one sentence each."""
        ...

    def recover(self) -> Iterator[Frame | Gap]:
        """Yield everything from the latest readable Base on. Must be exhausted before the first `append`; cuts a torn tail."""
        ...

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        """The DATA frames that overlap item offsets [start, stop), in order; a Gap where they should be and are not.

        size_bytes: no more than it takes until their bodies are so large; behind the last frame there may then be more of them.
        """
        ...

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        """Everything retained behind the frame of sequence `after`, oldest first. A Gap stands for what was dropped behind it, or is
        dropped while this runs. Who reads on where an earlier pass ended is spared the search."""
        ...

    def offset_at(self, wall: int) -> int:
        """Offset of the first item of the first DATA frame written at or after a wall time; the next offset when there is none.

        Where the clock stepped back, frames from before the step may be passed over: those of a segment, or of an index step in it, whose
        last frame is too early count as too early. What is found was written at or after that time in any case.
        """
        ...

    def segments(self) -> list[SegmentFacts]:
        """The segments retained, oldest first; there is always one. Cheap: only what changed since the last call is looked at."""
        ...

    def readable_range(self) -> LogRange:
        """How far it goes. Cheap: no segment is read."""
        ...

    def size_bytes(self) -> int:
        """Of all segments together."""
        ...

    def close(self) -> None:
        """Sync unless failed, and release what is held. Closing twice is fine."""
        ...


class Log(ReadableLog, Protocol):
    """One partition's append-only sequence of frames."""

    @property
    def durability(self) -> Durability: ...
    @property
    def waits_for_disk(self) -> bool:
        """Whether `sync` waits for a disk; else it returns at once."""
        ...

    @property
    def segment_bytes(self) -> int:
        """Size of the newest segment: what the owner looks at to decide on `rotate`."""
        ...

    def newest(self) -> SegmentFacts:
        """What `segments` tells of the newest segment, without looking at any other."""
        ...

    @property
    def sequence(self) -> int:
        """Of the last frame; 0 when there is none."""
        ...

    @property
    def unsynced(self) -> bool:
        """Whether frames were appended that no `sync` covers yet."""
        ...

    @property
    def wants_base(self) -> bool:
        """Whether the next thing written must be a Base (`rotate`): the newest segment is not to be added to."""
        ...

    def append(self, drafts: Sequence[Draft]) -> int:
        """Write frames, atomically as a group, and say how many bytes they took. Readable at once by this owner, durable after `sync`."""
        ...

    def sync(self) -> None:
        """Make everything appended durable, as the durability mode promises, and publish the synced position.

        In the modes that promise less than fsync the published position may lag by a few KiB: `publish` when nothing more is to do.
        """
        ...

    def publish(self) -> None:
        """Let lock-free readers see everything that is promised."""
        ...

    def force_sync(self) -> None:
        """Really sync, also in the modes in which `sync` does not."""
        ...

    def rotate(self, base: Draft) -> None:
        """Sync and close the newest segment and begin another with `base`, which is synced too."""
        ...

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Keep a disposable copy of a Base at the synced position, so that `recover` may start there."""
        ...

    def write_summary(self, body: bytes) -> None:
        """Leave a word for whoever wants to know something of this log without opening it. It counts until the log is written to again."""
        ...

    def drop(self, count: int) -> int:
        """Sync, then remove the oldest `count` segments, never the newest; says how many bytes that freed."""
        ...

    def rewrite(self, first: int, last: int, keep: Sequence[int]) -> int:
        """Sync, then replace the segments `first` to `last` (0 = oldest; never the newest two) by one; says how many bytes that freed.

        It serves the items of the flat runs `keep` at their old offsets, and no others. Their frames keep sequence and times; items between
        them are blanked. A rewrite that fails before it takes effect leaves the log as it was, open.
        """
        ...

    def free_bytes(self) -> int:
        """How much room is left where the log lies."""
        ...

    def reset(self) -> None:
        """After a failure: drop what is not synced. `recover` must follow."""
        ...


OnSyncStart: TypeAlias = Callable[[Log], bool]
OnSyncDone: TypeAlias = Callable[[Log, StorageFailed | None], None]
"""Told of a log that its commit is over: it is durable, or why it is not. Called from any thread; must not raise."""


class Committer(Protocol):
    """What waits for storage while the turn of a queue goes on."""

    def commit(self, logs: Sequence[Log], began: OnSyncStart, landed: OnSyncDone, here: Log | None = None) -> None:
        """Make everything that was appended to these logs durable, as their durability mode promises.

        `began` is called for each log when its sync is about to begin, which it does if that gives True, and `landed` when its outcome is
        known, both perhaps before this returns. The calling thread waits for the one that is `here`, if any, and for no other.
        """
        ...

    def run_job(self, incarnation: int, partition: int, job: Callable[[], None]) -> None:
        """Do something that may take long with one log, in another thread. A job must not raise."""
        ...
