"""A read-only view of a broker's directory, beside an owner or without one.

Owns: `Snapshot`, a home that answers queries and refuses every other operation. It takes no lock and writes nothing: it
replays the catalog and the partitions up to their published positions. The partitions of a queue are read at the first
query about it and do not change until `refresh`. Each partition has its own published position: an item that is being
transferred may be seen in both partitions, or in neither.
Records that the owner has not synced yet are missing, for example the newest leases. Sizes are those of the moment.
Single-threaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from penstock.broker import trace
from penstock.logs.backends import Files, LockHolder, Target, open_read_only
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
    DescribeOwner,
    ExplainItem,
    FindImports,
    FindPublished,
    FindQueue,
    FindWrite,
    LeaseDoubt,
    ListQueues,
    Operation,
    ReadGrant,
    ReadHistory,
    ReadSlotMap,
    submit_at_once,
)
from penstock.reports import ItemEvent, OwnerDescription, QueueDescription, describe_queue
from penstock.rules.catalog import CatalogState, QueueEntry, dead_queue_users, entry_by_incarnation, entry_by_name
from penstock.rules.events import Event
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, PenstockError, QueueNotFound, StorageFailed


class SnapshotPartition:
    """A partition that is only read, or the error that prevents it."""

    def __init__(self, number: int, open_reader: Callable[[int], PartitionReader]) -> None:
        self.number = number
        self.error: PenstockError | None = None
        self.slow = self.in_io = self.closed = False
        self.summary: Summary | None = None
        self._reader: PartitionReader | None = None
        self._open_reader = open_reader
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
        """Read on to the published position; a failure is kept in `error`."""
        try:
            if self._reader is None:
                self._reader = self._open_reader(self.number)
            else:
                self._reader.refresh()
            self.error = None
        except PenstockError as error:
            self.error = error

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def __repr__(self) -> str:
        return f"SnapshotPartition({self.number}, {self.error or self._reader})"


class SnapshotQueue:
    """A queue that is only read."""

    def __init__(self, entry: QueueEntry, open_reader: Callable[[int], PartitionReader], is_dead_queue: Callable[[str], bool]) -> None:
        self.name = entry.name
        self._is_dead_queue = is_dead_queue
        self.incarnation = entry.incarnation
        self.active: Sequence[int] = ()
        self.handles: dict[int, SnapshotPartition] = {}
        self._open_reader = open_reader
        self.set_partitions(entry)

    def set_partitions(self, entry: QueueEntry) -> None:
        """Open the partitions that the catalog names."""
        self.active = entry.active
        for number in sorted([*entry.active, *entry.retired]):
            if number not in self.handles:
                self.handles[number] = SnapshotPartition(number, self._open_reader)

    @property
    def is_dead_queue(self) -> bool:
        return self._is_dead_queue(self.name)

    def usable(self) -> Iterator[SnapshotPartition]:
        return (partition for partition in self.handles.values() if partition.is_usable)

    def touch(self, partition: Any, /) -> None:
        """Does nothing: a snapshot has no turns."""

    def close(self) -> None:
        for partition in self.handles.values():
            partition.close()


class Snapshot:
    """The queues of a directory, as they were published."""

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
        """Open a directory, or several storage roots of one broker."""
        return cls(open_read_only(target, files=files), clock or SystemClock())

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        self._check_open()
        kind = type(operation)
        own = _SNAPSHOT_HANDLERS.get(kind)
        if own is not None and not (isinstance(operation, ExplainItem) and not operation.follow):
            found: A = own(self, operation)
            return found
        from penstock.broker.queries import QUERY_HANDLERS

        if kind in QUERY_HANDLERS:
            answer: A = QUERY_HANDLERS[kind](self._queue(operation.queue), operation)
            return answer
        raise InvalidRequest(f"{self._store.name} is open read-only here, and {kind.__name__} is no query; open it without read_only")

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """`done` is called before this returns."""
        return submit_at_once(self.call, operation, done)

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float = 0, doubt: LeaseDoubt | None = None, /) -> None:
        raise InvalidRequest(f"{self._store.name} is open read-only here, and leases are not extended; open it without read_only")

    stop_extending = auto_extend

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        """The log of a partition up to its present published position, perhaps beyond that of this snapshot."""
        self._check_open()
        try:
            return self._store.reader(queue, partition)
        except CorruptLog:
            if queue in self._store.incarnations():
                raise
            raise _gone() from None

    def staging(self) -> Staging:
        return self._store.inbox

    def _find(self, operation: FindQueue) -> QueueDescription:
        found = entry_by_name(self._catalog, operation.name) if operation.name else entry_by_incarnation(self._catalog, operation.queue)
        return describe_queue(found, operation.marks)

    def _history(self, operation: ReadHistory) -> list[ItemEvent]:
        return trace.history(self, operation, self._name_of, lambda at: self._reader(at.queue, at.partition).sequence + 1)

    def _name_of(self, incarnation: int) -> str | None:
        entry = self._catalog.entries.get(incarnation)
        return entry.name if entry is not None else None

    def _await(self, operation: AwaitItems) -> bool:
        """Answers at once: a snapshot gets no new items."""
        partitions = self._queue(operation.queue).handles.values()
        return any(
            partition.is_usable and partition.state.next_offset > operation.start.get(partition.number, 0) for partition in partitions
        )

    def events(self, incarnation: int, partition: int, start_sequence: int = 0) -> Iterator[Event]:
        """The events of the items of a partition, as far back as its log is retained."""
        stop = self._reader(incarnation, partition).sequence + 1
        with closing(self.log(incarnation, partition)) as log:
            yield from events(log, start_sequence, stop)

    # -- refresh and close ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read on to the present published positions."""
        self._check_open()
        self._read_catalog()
        for incarnation, queue in [*self._queues.items()]:
            entry = self._catalog.entries.get(incarnation)
            if entry is None:
                self._queues.pop(incarnation).close()
                continue
            for partition in queue.handles.values():
                partition.refresh()
            queue.set_partitions(entry)

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

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("the snapshot is closed; open it again")

    def _queue(self, incarnation: int) -> SnapshotQueue:
        entry = self.entry(incarnation)
        if incarnation not in self._queues:
            self._queues[incarnation] = SnapshotQueue(
                entry,
                lambda number: PartitionReader(self._store.reader(incarnation, number), self.clock),
                lambda name: bool(dead_queue_users(self._catalog, name)),
            )
        return self._queues[incarnation]

    def entry(self, incarnation: int) -> QueueEntry:
        """The catalog's entry of a queue; QueueNotFound when it was deleted."""
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
        """Read the new records of the catalog; where they do not follow on, read it from its beginning."""
        sequence, self._sequence = self._sequence, 0
        found = [*self._log.frames(sequence)] if sequence else []
        if not sequence or any(isinstance(one, Gap) for one in found):
            self._catalog, found = CatalogState(), [*self._log.recover()]
        self._catalog, _, _ = catalog.apply_catalog_frames(self._catalog, found)
        self._sequence = last_sequence(found[-1]) if found else sequence


def describe_holder(holder: LockHolder | None) -> OwnerDescription:
    """The owner as its lock file describes it; pid 0 when nobody owns the directory. Its clients are not known."""
    return OwnerDescription(0, "", 0) if holder is None else OwnerDescription(holder.pid, holder.host, holder.since)


def _gone() -> QueueNotFound:
    return QueueNotFound("the queue was deleted (and perhaps created again since); find it by name")


# The modules imported below import the engine that changes queues; a process that only reads logs starts sooner without


def _list_queues(snapshot: Snapshot, operation: ListQueues) -> list[QueueDescription]:
    from penstock.broker.queries import list_queues

    return list_queues(snapshot._catalog, operation)


def _ask_inbox(snapshot: Snapshot, operation: FindWrite | FindPublished | FindImports) -> Any:
    from penstock.broker import inbox

    handlers: dict[type[Any], Callable[..., Any]] = {
        FindWrite: inbox.write_state,
        FindPublished: inbox.find_published,
        FindImports: inbox.find_imports,
    }
    return handlers[type(operation)](snapshot._store.inbox, snapshot.entry, operation)


def _read_grant(snapshot: Snapshot, operation: ReadGrant) -> Any:
    from penstock.broker.streams import read_grant

    return read_grant(snapshot._store.inbox, operation)


_SNAPSHOT_HANDLERS: dict[type[Operation[Any]], Callable[[Snapshot, Any], Any]] = {
    DescribeOwner: lambda snapshot, operation: describe_holder(snapshot._store.owner()),
    FindQueue: Snapshot._find,
    ListQueues: _list_queues,
    ReadSlotMap: lambda snapshot, operation: snapshot.entry(operation.queue).map.pack(),
    ExplainItem: trace.explain,
    ReadHistory: Snapshot._history,
    FindWrite: _ask_inbox,
    FindPublished: _ask_inbox,
    FindImports: _ask_inbox,
    ReadGrant: _read_grant,
    AwaitItems: Snapshot._await,
}
