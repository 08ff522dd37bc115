"""A broker's directory as it can be seen without owning it.

Owns: `Snapshot`. It takes no lock and writes nothing, whether or not an owner is at work meanwhile: the catalog and the partitions are
replayed from what is published. It offers the verbs that look, the same as a broker's; any other is refused. A queue's partitions are
read when the queue is first asked about, and stand still then until `refresh`; each stands where it was published last, so that of items
on their way from one to another one may see both ends or none.
What an owner has not synced yet is not there: the newest leases, where nothing else happened since. Sizes are those of the moment.
Single-threaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from penstock.broker import admin, looking, tracing
from penstock.broker.store import Target
from penstock.logs.api import Gap, Readable
from penstock.logs.failures import storage_failed
from penstock.logs.files.directory import Directory
from penstock.logs.files.system import Files
from penstock.loop import catalog
from penstock.loop.history import events
from penstock.loop.reading import Reader, last_of
from penstock.reports import ItemEvent, QueueInfo, info
from penstock.rules.catalog import CatalogState, Entry, named
from penstock.rules.events import Event
from penstock.rules.slots import SlotMap
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, PenstockError, QueueNotFound, StorageFailed

VERBS: dict[str, Callable[..., Any]] = {
    "stats": looking.counted,
    "explain": looking.explain,
    "trace": looking.trace,
    "keys": looking.keys,
    "listed": looking.listed,
    "redrivable": looking.redrivable,
    "cursor": looking.cursor,
    "cursors": looking.cursors,
    "read": looking.read,
    "ends": looking.ends,
    "starts": looking.starts,
    "offsets_at": looking.offsets_at,
}


class ReadMember:
    """A partition that is read, or what is wrong with it."""

    def __init__(self, number: int, open_it: Callable[[int], Reader]) -> None:
        self.number = number
        self.error: PenstockError | None = None
        self.slow = self.closed = False
        self.summary: Summary | None = None
        self._reader: Reader | None = None
        self._open_it = open_it
        self.refresh()

    @property
    def healthy(self) -> bool:
        return self.error is None

    @property
    def open(self) -> Reader:
        if self._reader is None or self.error is not None:
            kind = CorruptLog if isinstance(self.error, CorruptLog) else StorageFailed
            raise kind(f"partition {self.number} cannot be read ({self.error}); the others can")
        return self._reader

    @property
    def known(self) -> Reader | None:
        return self._reader if self.error is None else None

    @property
    def state(self) -> State:
        return self.open.state

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


class ReadQueue:
    """A queue that is read."""

    def __init__(self, entry: Entry, open_it: Callable[[int], Reader]) -> None:
        self.name = entry.name
        self.incarnation = entry.incarnation
        self.active: Sequence[int] = ()
        self.members: dict[int, ReadMember] = {}
        self._open_it = open_it
        self.shape(entry)

    def shape(self, entry: Entry) -> None:
        """It has the partitions that the catalog says."""
        self.active = entry.active
        for number in sorted([*entry.active, *entry.retired]):
            if number not in self.members:
                self.members[number] = ReadMember(number, self._open_it)

    def healthy(self) -> Iterator[ReadMember]:
        return (member for member in self.members.values() if member.healthy)

    def touch(self, member: Any, /) -> None:
        """There is no turn."""

    def close(self) -> None:
        for member in self.members.values():
            member.close()


class Snapshot:
    """Queues of a directory, to be looked at."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self.clock = clock
        self._directory = directory
        self._queues: dict[int, ReadQueue] = {}
        self._catalog = CatalogState()
        self._log = self._published(catalog.INCARNATION, catalog.PARTITION)
        self._sequence = 0
        self._closed = False
        self._read_catalog()

    @classmethod
    def open(cls, target: Target, *, files: Files | None = None, clock: Clock | None = None) -> "Snapshot":
        """Look at a directory, or several storage roots of one broker."""
        directory = Directory.open(target, files=files, read_only=True)
        if not directory.broker_id:
            raise InvalidRequest(f"{directory.roots[0].path} is no broker's directory; give one that a broker was opened in")
        return cls(directory, clock or SystemClock())

    # -- queues --------------------------------------------------------------------------------------

    def find(self, name: str) -> QueueInfo:
        self._usable()
        return info(named(self._catalog, name))

    def list(self, prefix: str = "", after: str = "", limit: int = 100) -> "list[QueueInfo]":
        """Queues by name, behind `after`."""
        self._usable()
        found = sorted(name for name in self._catalog.names if name.startswith(prefix) and name > after)
        return [info(self._catalog.names[name]) for name in found[:limit]]

    def map_of(self, name: str) -> SlotMap:
        """Which partition has each slot of a queue."""
        self._usable()
        return named(self._catalog, name).map

    def adopted(self, incarnation: int, source: str) -> int:
        """The last number of a source that a queue has adopted from the inbox; 0 when none, or none that is remembered."""
        self._usable()
        return self._entry(incarnation).adopted.get(source, 0)

    def ask(self, incarnation: int, verb: str, **args: Any) -> Any:
        """A verb that looks."""
        return tracing.ask(self, incarnation, verb, args)

    def look(self, incarnation: int, verb: str, **args: Any) -> Any:
        queue, found = self._queue(incarnation), VERBS.get(verb)
        if found is None and verb in admin.VERBS:
            raise InvalidRequest(f"read-only; {verb} is for the owner of {self._directory.roots[0].path}: ask its broker")
        if found is None:
            raise InvalidRequest(f"there is no verb {verb!r}; there are {', '.join(sorted(VERBS | tracing.VERBS))}")
        return found(queue, **args)

    def name_of(self, incarnation: int) -> str | None:
        entry = self._catalog.entries.get(incarnation)
        return entry.name if entry is not None else None

    # -- what happened -------------------------------------------------------------------------------

    def item_history(self, incarnation: int, partition: int, offset: int) -> Sequence[ItemEvent]:
        """Everything that is known to have happened to an item, in all queues it was in."""
        return tracing.history(self, incarnation, partition, offset)

    def events(self, incarnation: int, partition: int, start_sequence: int = 0) -> Iterator[Event]:
        """Everything that happened to the items of a partition, as far back as its log is kept."""
        stop = self._reader(incarnation, partition).sequence + 1
        with closing(self._published(incarnation, partition)) as log:
            yield from events(log, start_sequence, stop)

    def told_of(self, incarnation: int, partition: int, offset: int) -> Sequence[Event]:
        """What became of an item here."""
        stop = self._reader(incarnation, partition).sequence + 1
        return tracing.read(self._published(incarnation, partition), offset, stop)

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
            for member in queue.members.values():
                member.refresh()
            queue.shape(entry)

    def close(self) -> None:
        self._closed = True
        for queue in self._queues.values():
            queue.close()
        self._log.close()
        self._directory.close()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Snapshot({self._directory.roots[0].path!r}, {len(self._catalog.names)} queues{', closed' if self._closed else ''})"

    # -- steps ---------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._closed:
            raise BrokerClosed("the snapshot is closed; open it again")

    def _queue(self, incarnation: int) -> ReadQueue:
        self._usable()
        entry = self._entry(incarnation)
        if incarnation not in self._queues:
            self._queues[incarnation] = ReadQueue(entry, lambda number: Reader(self._published(incarnation, number), self.clock))
        return self._queues[incarnation]

    def _entry(self, incarnation: int) -> Entry:
        entry = self._catalog.entries.get(incarnation)
        if entry is None:
            raise QueueNotFound("the queue was deleted (perhaps created anew since); ask for it by name")
        return entry

    def _reader(self, incarnation: int, partition: int) -> Reader:
        queue = self._queue(incarnation)
        if partition not in queue.members:
            raise InvalidRequest(f"queue {queue.name!r} has no partition {partition}; it has {sorted(queue.members)}")
        return queue.members[partition].open

    def _published(self, incarnation: int, partition: int) -> Readable:
        try:
            return self._directory.reader(incarnation, partition)
        except OSError as error:
            raise storage_failed(error, "reading", self._directory.roots[0].path) from error

    def _read_catalog(self) -> None:
        """Read the catalog on, or, where that is not possible, anew."""
        sequence, self._sequence = self._sequence, 0
        found = [*self._log.frames(sequence)] if sequence else []
        if not sequence or any(isinstance(one, Gap) for one in found):
            self._catalog, found = CatalogState(), [*self._log.recover()]
        self._catalog, _, _ = catalog.carry_on(self._catalog, found)
        self._sequence = last_of(found[-1]) if found else sequence
