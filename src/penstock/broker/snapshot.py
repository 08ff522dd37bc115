"""A broker's directory as it can be seen without owning it.

Owns: `Snapshot`, a home that answers queries. It takes no lock and writes nothing, whether or not an owner is at work meanwhile: the
catalog and the partitions are replayed from what is published. Any other operation is refused. A queue's partitions are read when the queue
is first asked about, and stand still then until `refresh`; each stands where it was published last, so that of items on their way from
one to another one may see both ends or none.
What an owner has not synced yet is not there: the newest leases, where nothing else happened since. Sizes are those of the moment.
Single-threaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from penstock.broker import trace
from penstock.broker.inbox import write_state
from penstock.broker.queries import QUERY_HANDLERS
from penstock.broker.streams import read_grant
from penstock.logs.backends import Files, Target, open_read_only
from penstock.logs.log import Gap, ReadableLog
from penstock.logs.store import CATALOG, ReadStore, Staging
from penstock.loop import catalog
from penstock.loop.item_events import events
from penstock.loop.partition_reader import PartitionReader, last_sequence
from penstock.operations import (
    A,
    AnswerCallback,
    AwaitItems,
    Cancel,
    ExplainItem,
    FindQueue,
    FindWrite,
    ListQueues,
    Operation,
    ReadGrant,
    ReadHistory,
    ReadSlotMap,
    WriteState,
)
from penstock.reports import ItemEvent, ItemExplanation, QueueDescription, StreamGrant, describe_queue
from penstock.rules.catalog import CatalogState, QueueEntry, entry_by_name
from penstock.rules.events import Event
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, PenstockError, QueueNotFound, StorageFailed


class SnapshotPartition:
    """A partition that is read, or what is wrong with it."""

    def __init__(self, number: int, open_it: Callable[[int], PartitionReader]) -> None:
        self.number = number
        self.error: PenstockError | None = None
        self.slow = self.closed = False
        self.summary: Summary | None = None
        self._reader: PartitionReader | None = None
        self._open_it = open_it
        self.refresh()

    @property
    def is_usable(self) -> bool:
        return self.error is None

    @property
    def usable_partition(self) -> PartitionReader:
        if self._reader is None or self.error is not None:
            kind = CorruptLog if isinstance(self.error, CorruptLog) else StorageFailed
            raise kind(f"partition {self.number} cannot be read ({self.error}); the others can")
        return self._reader

    @property
    def readable_partition(self) -> PartitionReader | None:
        return self._reader if self.error is None else None

    @property
    def state(self) -> State:
        return self.usable_partition.state

    def refresh(self) -> None:
        """Go on to what is published now; whether or not that worked is in `error`."""
        try:
            if self._reader is None:
                self._reader = self._open_it(self.number)
            else:
                self._reader.refresh()
            self.error = None
        except PenstockError as error:
            self.error = error

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def __repr__(self) -> str:
        return f"ReadMember({self.number}, {self.error or self._reader})"


class SnapshotQueue:
    """A queue that is read."""

    def __init__(self, entry: QueueEntry, open_it: Callable[[int], PartitionReader]) -> None:
        self.name = entry.name
        self.incarnation = entry.incarnation
        self.active: Sequence[int] = ()
        self.handles: dict[int, SnapshotPartition] = {}
        self._open_it = open_it
        self.shape(entry)

    def shape(self, entry: QueueEntry) -> None:
        """It has the partitions that the catalog says."""
        self.active = entry.active
        for number in sorted([*entry.active, *entry.retired]):
            if number not in self.handles:
                self.handles[number] = SnapshotPartition(number, self._open_it)

    def usable(self) -> Iterator[SnapshotPartition]:
        return (member for member in self.handles.values() if member.is_usable)

    def touch(self, member: Any, /) -> None:
        """There is no turn."""

    def close(self) -> None:
        for member in self.handles.values():
            member.close()


class Snapshot:
    """Queues of a directory, to be looked at."""

    def __init__(self, store: ReadStore, clock: Clock) -> None:
        self.clock = clock
        self._store = store
        self._queues: dict[int, SnapshotQueue] = {}
        self._catalog = CatalogState()
        self._log = store.reader(CATALOG, CATALOG)
        self._sequence = 0
        self._closed = False
        self._read_catalog()

    @classmethod
    def open(cls, target: Target, *, files: Files | None = None, clock: Clock | None = None) -> "Snapshot":
        """Look at a directory, or several storage roots of one broker."""
        return cls(open_read_only(target, files=files), clock or SystemClock())

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        self._usable()
        kind = type(operation)
        own = _OWN.get(kind)
        if own is not None and not (isinstance(operation, ExplainItem) and not operation.follow):
            found: A = own(self, operation)
            return found
        if kind in QUERY_HANDLERS:
            answer: A = QUERY_HANDLERS[kind](self._queue(operation.queue), operation)
            return answer
        raise InvalidRequest(f"read-only; {kind.__name__} is for the owner of {self._store.name}: ask its broker")

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """The answer is there before this returns."""
        try:
            found: Any = self.call(operation)
        except PenstockError as error:
            found = error
        if done is not None:
            done(found)
        return lambda: None

    def keep(self, queue: int, partition: int, lease: int, /) -> None:
        raise InvalidRequest(f"read-only; leases are kept by the owner of {self._store.name}: ask its broker")

    let_go = keep

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        """The log of a partition as far as it is published now, which may be further than what was read of it."""
        self._usable()
        try:
            return self._store.reader(queue, partition)
        except CorruptLog:
            if queue in self._store.incarnations():
                raise
            raise _gone() from None

    def staging(self) -> Staging:
        return self._store.inbox

    def _find(self, asked: FindQueue) -> QueueDescription:
        return describe_queue(entry_by_name(self._catalog, asked.name))

    def _list(self, asked: ListQueues) -> list[QueueDescription]:
        found = sorted(name for name in self._catalog.names if name.startswith(asked.prefix) and name > asked.after)
        return [describe_queue(self._catalog.names[name]) for name in found[: asked.limit]]

    def _slot_map(self, asked: ReadSlotMap) -> bytes:
        return self.entry(asked.queue).map.pack()

    def _explain(self, asked: ExplainItem) -> ItemExplanation:
        return trace.explain(self, asked)

    def _history(self, asked: ReadHistory) -> list[ItemEvent]:
        return trace.history(self, asked, self._name_of, lambda place: self._reader(place.queue, place.partition).sequence + 1)

    def _name_of(self, incarnation: int) -> str | None:
        entry = self._catalog.entries.get(incarnation)
        return entry.name if entry is not None else None

    def _find_write(self, asked: FindWrite) -> WriteState:
        return write_state(self._store.inbox, self.entry, asked)

    def _grant(self, asked: ReadGrant) -> StreamGrant:
        return read_grant(self._store.inbox, asked)

    def _await(self, asked: AwaitItems) -> bool:
        """Nothing comes to a snapshot: what is there is there at once."""
        members = self._queue(asked.queue).handles.values()
        return any(member.is_usable and member.state.next_offset > asked.start.get(member.number, 0) for member in members)

    def events(self, incarnation: int, partition: int, start_sequence: int = 0) -> Iterator[Event]:
        """Everything that happened to the items of a partition, as far back as its log is kept."""
        stop = self._reader(incarnation, partition).sequence + 1
        with closing(self.log(incarnation, partition)) as log:
            yield from events(log, start_sequence, stop)

    # -- going on, and the end -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Go on to what is published now."""
        self._usable()
        self._read_catalog()
        for incarnation, queue in [*self._queues.items()]:
            entry = self._catalog.entries.get(incarnation)
            if entry is None:
                self._queues.pop(incarnation).close()
                continue
            for member in queue.handles.values():
                member.refresh()
            queue.shape(entry)

    def close(self) -> None:
        self._closed = True
        for queue in self._queues.values():
            queue.close()
        self._log.close()
        self._store.close()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Snapshot({self._store.name!r}, {len(self._catalog.names)} queues{', closed' if self._closed else ''})"

    # -- steps ---------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._closed:
            raise BrokerClosed("the snapshot is closed; open it again")

    def _queue(self, incarnation: int) -> SnapshotQueue:
        entry = self.entry(incarnation)
        if incarnation not in self._queues:
            self._queues[incarnation] = SnapshotQueue(
                entry, lambda number: PartitionReader(self._store.reader(incarnation, number), self.clock)
            )
        return self._queues[incarnation]

    def entry(self, incarnation: int) -> QueueEntry:
        """What the catalog says of a queue."""
        entry = self._catalog.entries.get(incarnation)
        if entry is None:
            raise _gone()
        return entry

    def _reader(self, incarnation: int, partition: int) -> PartitionReader:
        queue = self._queue(incarnation)
        if partition not in queue.handles:
            raise InvalidRequest(f"queue {queue.name!r} has no partition {partition}; it has {sorted(queue.handles)}")
        return queue.handles[partition].usable_partition

    def _read_catalog(self) -> None:
        """Read the catalog on, or, where that is not possible, anew."""
        sequence, self._sequence = self._sequence, 0
        found = [*self._log.frames(sequence)] if sequence else []
        if not sequence or any(isinstance(one, Gap) for one in found):
            self._catalog, found = CatalogState(), [*self._log.recover()]
        self._catalog, _, _ = catalog.apply_catalog_frames(self._catalog, found)
        self._sequence = last_sequence(found[-1]) if found else sequence


def _gone() -> QueueNotFound:
    return QueueNotFound("the queue was deleted (perhaps created anew since); ask for it by name")


_OWN: dict[type[Operation[Any]], Callable[[Snapshot, Any], Any]] = {
    FindQueue: Snapshot._find,
    ListQueues: Snapshot._list,
    ReadSlotMap: Snapshot._slot_map,
    ExplainItem: Snapshot._explain,
    ReadHistory: Snapshot._history,
    FindWrite: Snapshot._find_write,
    ReadGrant: Snapshot._grant,
    AwaitItems: Snapshot._await,
}
