"""What a store is: where a broker keeps its logs and its inbox. The contract every store keeps.

Owns: `Store` (for the one process that owns it), `ReadStore` (for those that only read it), `Inbox` (for both), and what an inbox holds:
`InboxEntry`, `WriteManifest`, `StagedPart`. A store joins by these two classes and a line in backends.py; whether it conforms is tested in
`tests/logs/test_stores.py`.

The inbox is how processes that do not own a broker hand something to the one that does.
- A drop: items to be adopted by a queue. Tasks stage parts of a write; `publish` makes a drop of them, all or nothing. A drop is known by
  its queue, source and number, and is in the inbox once. Which drop was adopted before is for the owner to know (broker/inbox.py).
- An errand: a request to the owner, as bytes under a name. A second one of the same name replaces the first while that one waits.
- A note: bytes under a name, kept for as long as their queue, until they are removed or swept. The answer to an errand is the note of its
  name; the grants of consuming streams are notes.
Everything in an inbox is whole or not there, and is durable when the call that made it returns.
Where the storage beneath fails, StorageFailed is raised.
"""

import os
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Annotated, BinaryIO, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.logs.log import Committer, Draft, Durability, Frame, Log, ReadableLog
from penstock.rules.routing import digest
from penstock.words.errors import InvalidRequest, StorageFailed

CATALOG = 0
"""The incarnation, and the partition, of the catalog."""
LASTING_NOTES = "grant."
"""Notes whose names begin so are kept for LASTING_SWEEPS; others for one sweep."""
LASTING_SWEEPS = 30
"""So many sweeps (days) a grant is kept that nothing has become of: its stream may come back."""
MANIFEST_VERSION = 1
MAX_NAME = 150
_IN_A_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")

T = TypeVar("T")


class Store(Committer, Protocol):
    """Logs by incarnation and partition, and an inbox, for their owner."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def inbox(self) -> "Inbox": ...
    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log: ...
    def create_logs(self, incarnation: int, *partitions: int) -> None:
        """Make the places of new logs."""
        ...

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """What was left of a log when it was closed; b"" when it was never opened; None when it must be opened to know anything of it."""
        ...

    def reader(self, incarnation: int, partition: int) -> ReadableLog:
        """A log as far as it is published, beside its owner."""
        ...

    def remove_logs(self, incarnation: int) -> None:
        """Remove every log of an incarnation; none may be open."""
        ...

    def close(self) -> None: ...


class ReadStore(Protocol):
    """A store that is read beside its owner, or without one. It locks nothing and writes nothing but to the inbox."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def inbox(self) -> "Inbox": ...
    def reader(self, incarnation: int, partition: int) -> ReadableLog:
        """A log as far as it is published; CorruptLog when there is none."""
        ...

    def incarnations(self) -> Collection[int]:
        """Those that have logs here now."""
        ...

    def close(self) -> None: ...


# -- the inbox ---------------------------------------------------------------------------------------


class StagedPart(msgspec.Struct, frozen=True):
    """What one task has staged: whole frames, of so many items."""

    name: str
    frames: int
    items: int


class WriteManifest(msgspec.Struct, frozen=True):
    """What a drop holds, and what it is known by: of one source each number is adopted once, and none below one adopted before."""

    parts: list[StagedPart]
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    version: int = MANIFEST_VERSION
    began_at: int = msgspec.field(default=0, name="began")
    """When the write began, by the calendar (0: not known): what was written earlier is adopted earlier, as far as can be told."""
    single_use: bool = msgspec.field(default=False, name="once")
    """The source is this very write: nothing comes of it again."""


class InboxEntry(NamedTuple):
    """A drop or an errand that waits for the owner."""

    incarnation: int
    name: str
    label: str
    """What it is called in messages; no other that waits has the same."""
    is_operation: bool


class PartWriter(Protocol):
    """One part of a write. It is in the inbox with its first frame; of one that has none nothing is kept."""

    @property
    def name(self) -> str: ...
    def begin(self) -> None:
        """Make its place now, before its first frame."""
        ...

    def add(self, draft: Draft, partition: int = 0) -> int:
        """Append a DATA frame of base 0, and say where it begins (for `PartReader.at`).

        partition: where all its items belong by the slot map of the time of writing, or 0.
        """
        ...

    def sidecar(self) -> BinaryIO:
        """A file beside the part for what its writer wants to note, to be written and closed. It goes when the write is published."""
        ...

    def finish(self) -> StagedPart:
        """Make it durable."""
        ...

    def discard(self) -> None:
        """Remove it, whatever is in it, and its sidecar."""
        ...


class PartReader(Protocol):
    """A finished part that is read by who stages; CorruptLog for what is not as it was written. Close it."""

    def at(self, position: int, sequence: int) -> Frame:
        """The frame that begins there, which is that one in the row (1, 2, …)."""
        ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """The inbox of one broker."""

    shared: ClassVar[bool]
    """Whether other processes reach it."""

    # For those who do not own the broker.

    def begin_write(self, write: str) -> None:
        """Make the place of a write (see `write_name`), to be filled by its tasks. Fine when it is there."""
        ...

    def part_writer(self, write: str, name: str, incarnation: int, make: bool = False) -> PartWriter:
        """A part of a write, to be written. make: make the place of the write, where it is missing; else that is StorageFailed."""
        ...

    def part_reader(self, write: str, name: str, incarnation: int) -> PartReader:
        """A part of a write that is not published yet."""
        ...

    def sidecar(self, write: str, name: str) -> BinaryIO:
        """What was noted beside a part of a write that is not published yet, to be read and closed."""
        ...

    def publish(self, write: str, incarnation: int, manifest: WriteManifest) -> bool:
        """Hand a write over, all parts that the manifest names at once; what else was staged is removed.

        False when the same drop is in the inbox already: then this one is removed. OutcomeUnknown when it is there, perhaps not durably.
        """
        ...

    def abandon(self, write: str) -> None:
        """Remove a write that is not to be, with whatever was staged."""
        ...

    def abandon_empty(self, write: str) -> None:
        """Remove the place of a write if nothing is staged in it. Does not fail."""
        ...

    def is_pending(self, incarnation: int, source: str, number: int) -> bool:
        """Whether a drop was published and is not adopted yet."""
        ...

    def put_operation(self, incarnation: int, name: str, body: bytes) -> None:
        """Put an errand for the owner; one of the same name is replaced."""
        ...

    def withdraw_operation(self, incarnation: int, name: str) -> None:
        """Take an errand back, if the owner has not done it yet."""
        ...

    def has_owner(self) -> bool:
        """Whether some process has the broker open, as far as can be told."""
        ...

    # For the owner.

    def waiting(self) -> list[InboxEntry]:
        """Everything there is to do; errands before drops."""
        ...

    def manifest(self, drop: InboxEntry) -> WriteManifest:
        """What a drop says of itself; CorruptLog when that is not as it was published."""
        ...

    def frames(self, drop: InboxEntry, part: StagedPart) -> Iterator[Frame]:
        """The frames of a part of a drop, in order; CorruptLog as soon as it shows not to be what was staged."""
        ...

    def operation(self, errand: InboxEntry) -> bytes | None:
        """What an errand says; None when it was taken back."""
        ...

    def remove(self, one: InboxEntry, body: bytes | None = None) -> None:
        """Take a drop or an errand out, at one stroke. An errand only if this is what it says: another may have been put in its place,
        and waits on."""
        ...

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        """Remove what is left over: writes that began before a wall time and were not published; notes about queues that are no more; and
        notes that were there already at the sweep before (LASTING_NOTES: so many sweeps before)."""
        ...

    # Notes, for both.

    def put_blob(self, incarnation: int, name: str, body: bytes) -> None:
        """Keep a note; one of the same name is replaced."""
        ...

    def blob(self, incarnation: int, name: str) -> bytes | None: ...
    def blob_names(self, incarnation: int, prefix: str) -> list[str]:
        """The names of notes that begin so."""
        ...

    def remove_blob(self, incarnation: int, name: str) -> None:
        """Fine when there is none."""
        ...


# -- what the inboxes of all stores have in common -----------------------------------------------------


class SweepCounter(Generic[T]):
    """Counts for how many sweeps a thing has been there."""

    def __init__(self) -> None:
        self._counts: dict[T, int] = {}

    def overdue(self, present: Mapping[T, int]) -> list[T]:
        """One more sweep: which of the things present have been there for as many sweeps as they are kept."""
        self._counts = {thing: self._counts.get(thing, -1) + 1 for thing in present}
        found = [thing for thing, sweeps in self._counts.items() if sweeps >= present[thing]]
        for thing in found:
            del self._counts[thing]
        return found


def kept_sweeps(note: str) -> int:
    """For how many sweeps a note of that name is kept."""
    return LASTING_SWEEPS if note.startswith(LASTING_NOTES) else 1


def write_name(wall: int) -> str:
    """A name for a write: when it began, and something random."""
    return f"{wall:016x}-{os.urandom(8).hex()}"


def leading_number(name: str) -> int:
    """The number that a name begins with: of a write, when it began; 0 when it does not begin with one."""
    try:
        return int(name.partition("-")[0], 16)
    except ValueError:
        return 0


def published_write_name(source: str, number: int) -> str:
    """The name of a drop in its queue."""
    return digest(b"drop", source.encode(), str(number).encode()).hex()


def publishable_manifest(write: str, manifest: WriteManifest) -> WriteManifest:
    """A manifest as it is published with a write; InvalidRequest where it could not be adopted."""
    found = msgspec.structs.replace(manifest, began_at=leading_number(write), single_use=manifest.source == write)
    try:
        msgspec.convert(msgspec.to_builtins(found), WriteManifest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this cannot be published ({error}); give each write a source, and a number from 1 on") from error
    return found


def refuse_missing(write: str, manifest: WriteManifest, there: Container[str]) -> None:
    """A write is published whole or not at all: StorageFailed when a part of it is not there (any more). One without frames never is."""
    missing = [part.name for part in manifest.parts if part.frames and part.name not in there]
    if missing:
        raise StorageFailed(f"part {missing[0]} of the write {write} is gone: it was given up, or began too long ago; write it again")


def check_file_name(name: str) -> str:
    """A name that any store can keep something under."""
    if not _IN_A_NAME.issuperset(name) or len(name) > MAX_NAME:
        raise InvalidRequest(f"{name!r:.200} cannot be part of a file name; use up to {MAX_NAME} letters, digits, '.', '_' and '-'")
    return name
