"""The interface of a store, which holds the logs and the inbox of a broker.

Owns: `Store` (for the process that owns the broker), `ReadStore` (for processes that only read), `Inbox` (for both) and
its part `Staging`, and what an inbox holds: `InboxEntry`, `WriteManifest`, `StagedPart`. A new kind of store implements
`Store` and `ReadStore` and gets a line in backends.py; tests/logs/test_stores.py tests every kind.

Through the inbox other processes hand something to the owner of the broker. It holds
- published writes: items to be adopted by a queue. Tasks stage the parts of a write; `publish` publishes all of them or
  none. A published write is identified by its queue, source and number, and is in the inbox at most once. The owner
  remembers which ones it has adopted (broker/inbox.py).
- blobs: bytes under a name, kept until they are removed, or swept, or their queue is deleted. The grants of consuming
  streams are blobs.
An entry of the inbox is complete or absent, and is durable when the call that wrote it returns.
Every method raises StorageFailed when the storage fails.
"""

import os
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Annotated, BinaryIO, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.logs.disk_threads import DiskThreads
from penstock.logs.files.lock import LockHolder
from penstock.logs.log import Draft, Durability, Frame, Log, ReadableLog
from penstock.rules.routing import digest
from penstock.words.errors import InvalidRequest, StorageFailed
from penstock.words.sources import MAX_SOURCE_LENGTH

CATALOG = 0
"""The incarnation, and the partition, of the catalog."""
BLOB_SWEEPS = 30
"""The number of sweeps (days) for which a blob is kept: a stream that starts again needs its grants."""
MANIFEST_VERSION = 1
MAX_NAME = 150
_IN_A_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")

T = TypeVar("T")


class LogPosition(msgspec.Struct, frozen=True):
    """Where a log of files ends at one instant, for a backup."""

    incarnation: int
    partition: int
    directory: str
    segment: str
    """The name of its newest segment; "" if it has none."""
    size: int
    """How many bytes of that segment belong to it."""
    synced: bytes
    """What its file `synced` must contain in the copy."""
    offset: int = 0
    sequence: int = 0
    """Its next offset and the sequence of its last frame; 0: unknown until it is opened."""


class Store(Protocol):
    """The logs of a broker, by incarnation and partition, and its inbox; for the owner."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def inbox(self) -> "Inbox": ...
    @property
    def disk(self) -> DiskThreads: ...
    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log: ...
    def create_logs(self, incarnation: int, *partitions: int) -> None:
        """Create the directories (or the like) of new logs."""
        ...

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """The summary of a closed log; b"" when it was never opened; None when only opening it gives one."""
        ...

    def reader(self, incarnation: int, partition: int) -> ReadableLog:
        """The published part of a log. The log may be open for writing at the same time."""
        ...

    def remove_logs(self, incarnation: int) -> None:
        """Remove every log of an incarnation; none may be open."""
        ...

    def free_bytes(self) -> dict[int, int]:
        """Number of a storage root → its free space; without those that cannot be asked, or have no limit."""
        ...

    def note_opened(self) -> None:
        """The opening of the broker has ended, and not by the end of its process."""
        ...

    def directories(self) -> list[str]:
        """The paths of the storage roots; none for a store without files."""
        ...

    def positions(self, incarnations: Container[int]) -> list[LogPosition]:
        """Where each log of these incarnations ends. QueueBusy while one is being opened. Only for stores of files."""
        ...

    def close(self) -> None: ...


class ReadStore(Protocol):
    """A store that is read without owning it. It takes no lock, and writes only to the inbox."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def inbox(self) -> "Inbox": ...
    def reader(self, incarnation: int, partition: int) -> ReadableLog:
        """The published part of a log; CorruptLog when the log does not exist."""
        ...

    def incarnations(self) -> Collection[int]:
        """The incarnations that have logs now."""
        ...

    def owner(self) -> LockHolder | None:
        """The process that owns the broker, as it described itself; None when no process does."""
        ...

    def close(self) -> None: ...


# -- the inbox ---------------------------------------------------------------------------------------


class StagedPart(msgspec.Struct, frozen=True):
    """The part of a write that one task has staged."""

    name: str
    frames: int
    items: int


class WriteManifest(msgspec.Struct, frozen=True):
    """The parts and the identity of a published write.

    Of one source each number is adopted at most once, and no number below one that was adopted.
    """

    parts: list[StagedPart]
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SOURCE_LENGTH)]
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    version: int = MANIFEST_VERSION
    began_at: int = msgspec.field(default=0, name="began")
    """The wall time at which the write began; 0 when not known. The owner adopts waiting writes in this order."""
    single_use: bool = msgspec.field(default=False, name="once")
    """The source is used for this write only."""
    checksum: int | None = None
    """See WriteContent; None: the owner does not remember what the write held."""

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)


class InboxEntry(NamedTuple):
    """A published write that waits for the owner."""

    incarnation: int
    name: str
    label: str
    """Its unique name for messages."""


class PartWriter(Protocol):
    """Writes one part of a write. The part is created with its first frame; a part without frames is not stored."""

    @property
    def name(self) -> str: ...
    def begin(self) -> None:
        """Create the part now, before its first frame."""
        ...

    def add(self, draft: Draft, partition: int = 0) -> int:
        """Append a DATA frame of base offset 0, and return its position (for `PartReader.at`).

        partition: the partition of all its items by the slot map at the time of writing, or 0.
        """
        ...

    def sidecar(self) -> BinaryIO:
        """A file beside the part for data of its writer, to be written and closed. `publish` removes it."""
        ...

    def finish(self) -> StagedPart:
        """Make the part durable."""
        ...

    def discard(self) -> None:
        """Remove the part and its sidecar."""
        ...


class PartReader(Protocol):
    """Reads a finished part of a write that is not published yet; CorruptLog when it is damaged. Close it."""

    def at(self, position: int, sequence: int) -> Frame:
        """The frame at a position; `sequence` is its number in the part (1, 2, …), which is checked."""
        ...

    def close(self) -> None: ...


class Staging(Protocol):
    """The part of an inbox that stages bulk writes. It is sent to their tasks, so it keeps no file open."""

    def begin_write(self, write: str) -> None:
        """Create the directory (or the like) of a write, named by `write_name`. No error when it exists."""
        ...

    def part_writer(self, write: str, name: str, incarnation: int, make: bool = False) -> PartWriter:
        """A writer for a part. make: begin the write when it was not begun; otherwise that is StorageFailed."""
        ...

    def part_reader(self, write: str, name: str, incarnation: int) -> PartReader:
        """A reader for a part of a write that is not published yet."""
        ...

    def sidecar(self, write: str, name: str) -> BinaryIO:
        """The sidecar of a part of a write that is not published yet, to be read and closed."""
        ...

    def abandon(self, write: str) -> None:
        """Remove a write that will not be published, with all its parts."""
        ...

    def abandon_empty(self, write: str) -> None:
        """Remove a write if it has no parts. Does not fail."""
        ...


class Inbox(Staging, Protocol):
    """The inbox of one broker."""

    shared: ClassVar[bool]
    """Whether other processes can reach it."""

    # For processes that do not own the broker.

    def publish(self, write: str, incarnation: int, manifest: WriteManifest) -> bool:
        """Publish all parts that the manifest names, at once; other staged parts are removed.

        False when the same write is in the inbox already; this one is then removed. OutcomeUnknown when it was
        published but may not be durable.
        """
        ...

    def is_pending(self, incarnation: int, source: str, number: int) -> bool:
        """Whether a write was published and is not adopted yet."""
        ...

    def has_owner(self) -> bool:
        """Whether a process has the broker open; a guess when that cannot be found out."""
        ...

    # For the owner.

    def waiting(self) -> list[InboxEntry]:
        """All published writes."""
        ...

    def manifest(self, entry: InboxEntry) -> WriteManifest:
        """The manifest of a published write; CorruptLog when it is damaged or missing."""
        ...

    def frames(self, entry: InboxEntry, part: StagedPart) -> Iterator[Frame]:
        """The frames of a part of a published write; CorruptLog at the first frame that is not as it was staged."""
        ...

    def remove(self, entry: InboxEntry) -> None:
        """Remove an entry, all of it at once."""
        ...

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        """Remove writes that began before a wall time and are not published, blobs of queues not in `queues`, and
        blobs that were present at BLOB_SWEEPS sweeps before."""
        ...

    # Blobs, for all processes.

    def put_blob(self, incarnation: int, name: str, body: bytes) -> None:
        """Store a blob; it replaces one of the same name."""
        ...

    def blob(self, incarnation: int, name: str) -> bytes | None: ...
    def blob_names(self, incarnation: int, prefix: str) -> list[str]:
        """The names of the blobs whose names begin with `prefix`."""
        ...

    def remove_blob(self, incarnation: int, name: str) -> None:
        """No error when it does not exist."""
        ...


# -- shared by the inboxes of all stores -------------------------------------------------------------


class SweepCounter(Generic[T]):
    """Counts at how many sweeps each thing was present."""

    def __init__(self) -> None:
        self._counts: dict[T, int] = {}

    def overdue(self, present: Mapping[T, int]) -> list[T]:
        """Count a sweep. `present`: for how many sweeps each thing is kept. Returns the things to be removed."""
        self._counts = {thing: self._counts.get(thing, -1) + 1 for thing in present}
        found = [thing for thing, sweeps in self._counts.items() if sweeps >= present[thing]]
        for thing in found:
            del self._counts[thing]
        return found


def write_name(wall: int) -> str:
    """A new name for a write: the wall time at which it begins, and random digits."""
    return f"{wall:016x}-{os.urandom(8).hex()}"


def leading_number(name: str) -> int:
    """The hexadecimal number before the first "-" of a name (of a write: when it began); 0 when there is none."""
    try:
        return int(name.partition("-")[0], 16)
    except ValueError:
        return 0


def published_write_name(source: str, number: int) -> str:
    """The name of a published write in its queue."""
    return digest(b"drop", source.encode(), str(number).encode()).hex()


def publishable_manifest(write: str, manifest: WriteManifest) -> WriteManifest:
    """The manifest with the fields that `publish` adds; InvalidRequest when its source or number is not valid."""
    found = msgspec.structs.replace(manifest, began_at=leading_number(write), single_use=manifest.source == write)
    try:
        msgspec.convert(msgspec.to_builtins(found), WriteManifest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the write cannot be published ({error}); give it a source and a number from 1 on") from error
    return found


def refuse_missing(write: str, manifest: WriteManifest, staged: Container[str]) -> None:
    """StorageFailed when a part of the manifest is not `staged`. (Parts without frames never are.)"""
    missing = [part.name for part in manifest.parts if part.frames and part.name not in staged]
    if missing:
        raise StorageFailed(
            f"part {missing[0]} of the write {write} is missing: it was abandoned, or began too long ago and was swept; write it again"
        )


def check_file_name(name: str) -> str:
    """Return a name that every store can use as a file name; InvalidRequest for others."""
    if not _IN_A_NAME.issuperset(name) or len(name) > MAX_NAME:
        raise InvalidRequest(f"{name!r:.200} cannot be part of a file name; use up to {MAX_NAME} letters, digits, '.', '_' and '-'")
    return name
