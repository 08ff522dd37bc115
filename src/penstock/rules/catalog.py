"""The catalog: the queues of a broker, with their options and partitions. A state machine of its own, without I/O.

Owns: `QueueEntry` and `CatalogState`; the catalog's records; the decisions (`create`, `update`, `change_partitions`,
`delete`, …), each of which reads the state and returns records (none if nothing changes) or raises; `apply`; `dump` and
`load` for a Base. Records are like those of records.py, with their own tags. Times are wall microseconds,
durations microseconds.
Invariants
- a name belongs to one queue at a time, an incarnation to one queue for ever; a partition number is given once;
- as long as a queue names a dead queue, that queue exists and has no dead queue of its own;
- an entry is replaced, never changed, so a reference to an entry does not change under its reader.
`apply` takes any record in any state: a repaired log may lack records, and then the second invariant may not hold.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.rules import slots
from penstock.rules.calls import NEVER, CallMemory, CallName, RememberedAnswer, RememberedCall
from penstock.rules.options import Options, check_name, merged
from penstock.rules.slots import SlotMap
from penstock.words.errors import CorruptLog, InvalidRequest, QueueExists, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, MIN_RESULT_MEMORY, check_range
from penstock.words.sources import WriteContent, source_kind

MAX_INCARNATION = (1 << 64) - 1
VERSION = 1
MAX_SOURCES, MAX_ONCE = 10_000, 1_000
"""For how many sources of published writes the last number is remembered: for each kind (words/sources.py), and for
those with a single write, which need it only until the write is out of the inbox."""
MAX_CONTENT_SOURCES, MAX_CONTENTS = 1_000, 100
"""For how many sources what they wrote is remembered, and for how many of the last writes of each."""
MAX_CALLS = 1_000
"""For how many sessions the last call that changed the catalog is remembered, for MIN_RESULT_MEMORY."""
SINGLE_WRITE = 1 << 61
"""The number of a published write whose source has no other."""


# -- the state ----------------------------------------------------------------------------------------


class ReplacedMap(NamedTuple):
    """A replaced slot map."""

    version: int
    owners: bytes
    replaced_at: int


class RestorePoint(NamedTuple):
    """A restore of the queue from a backup."""

    at: int
    """When it was restored; it also names this restore."""
    first_lease: int
    ends: list[tuple[int, int, int]]
    """(partition, its next offset, its last log sequence) in the backup; 0 where that is not known."""


class QueueEntry(msgspec.Struct, frozen=True):
    """One queue. Lists of partitions are sorted."""

    name: str
    incarnation: int
    options: Options
    created_at: int
    map: SlotMap
    active: list[int]
    """The partitions that take items: those of the map."""
    next_partition: int
    read_only: list[int] = []
    """Partitions that are retired because an administrative operation made them read-only."""
    maps: list[ReplacedMap] = []
    """Earlier maps that may still be needed, oldest first."""
    marks: dict[int, dict[int, int]] = {}
    """version → partition → its next offset when that version took effect; for this version and those of `maps`. The
    oldest version also has the last marks of partitions that were retired before it."""
    adoptions: int = 0
    """How many adoptions of published writes were begun; each has the next number."""
    adopting: dict[str, int] = {}
    """name → adoption number, of published writes whose adoption is not finished."""
    adopted: dict[str, int] = {}
    """source → its highest adopted number, for the newest sources of each kind, oldest first."""
    consumer_right_holder: str = ""
    """Who has the consumer right; "": no one."""
    consumer_right_timeout: int = 0
    """How long the right lasts without a heartbeat from its holder."""
    consumer_right_runs: list[str] = []
    """The known runs (processes) of the holder, the newest last: only the newest may give the right up."""
    restores: list[RestorePoint] = []
    """The restores of this queue, the newest last."""
    contents: dict[str, list[WriteContent]] = {}
    """source → what its last adopted writes held, by number, for writes with a checksum; the newest sources last."""

    @property
    def unfinished(self) -> str:
        """The published write whose adoption was begun last, if it is not finished; else "".
        Only this adoption can be continued."""
        return next((name for name, number in self.adopting.items() if number == self.adoptions), "")

    @property
    def retired(self) -> list[int]:
        """Partitions that take no new items."""
        active = set(self.active)
        return [number for number in range(self.next_partition) if number not in active]


class CatalogState:
    """All queues."""

    def __init__(self) -> None:
        self.names: dict[str, QueueEntry] = {}
        self.entries: dict[int, QueueEntry] = {}
        """The same entries by incarnation."""
        self.deleted: set[int] = set()
        """Incarnations of deleted queues whose files may still exist."""
        self.calls = CallMemory(MAX_CALLS)
        """Calls that changed the catalog, by wall time; `base` of an answer is the queue's incarnation."""

    def put(self, entry: QueueEntry) -> None:
        self.names[entry.name] = self.entries[entry.incarnation] = entry

    def change(self, incarnation: int, **fields: Any) -> None:
        """Replace some fields of an entry, if it exists."""
        entry = self.entries.get(incarnation)
        if entry is not None:
            self.put(msgspec.structs.replace(entry, **fields))

    def drop(self, incarnation: int) -> None:
        entry = self.entries.pop(incarnation, None)
        if entry is not None:
            del self.names[entry.name]

    def __repr__(self) -> str:
        return f"CatalogState({len(self.names)} queues, {len(self.deleted)} deleted)"


# -- records ------------------------------------------------------------------------------------------


class Created(msgspec.Struct, array_like=True, gc=False, tag=1):
    """A queue was created, with partitions 0, 1, … and their first map."""

    name: str
    incarnation: int
    options: Options
    partitions: int
    at: int


class Updated(msgspec.Struct, array_like=True, gc=False, tag=2):
    """A queue has new options."""

    incarnation: int
    options: Options


class PartitionsChanged(msgspec.Struct, array_like=True, gc=False, tag=3):
    """A queue has other partitions. If `version` is the one it had, only `read_only` is new."""

    incarnation: int
    version: int
    owners: bytes
    active: list[int]
    next_partition: int
    read_only: list[int]
    marks: list[tuple[int, int]]
    at: int
    kept_from: int = 0
    """Maps of lower versions are forgotten."""


class Deleted(msgspec.Struct, array_like=True, gc=False, tag=4):
    """A queue was deleted; its files may be removed."""

    incarnation: int


class FilesRemoved(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The files of a deleted queue were removed."""

    incarnation: int


class AdoptionBegun(msgspec.Struct, array_like=True, gc=False, tag=6):
    """The adoption of a published write began; it has the next number."""

    incarnation: int
    name: str


class AdoptionFinished(msgspec.Struct, array_like=True, gc=False, tag=7):
    """All of a published write was adopted."""

    incarnation: int
    name: str
    source: str
    number: int
    items: int = 0
    checksum: int | None = None
    """See WriteContent; None: it is not remembered what the write held."""


class ConsumerRightSet(msgspec.Struct, array_like=True, gc=False, tag=8):
    """A queue's consumer right has this holder ("": none)."""

    incarnation: int
    holder: str
    timeout: int = 0
    runs: list[str] = []


class CallRecorded(msgspec.Struct, array_like=True, gc=False, tag=9):
    """The change in the same frame was made by this call."""

    call: CallName
    incarnation: int
    at: int


class QueueRestored(msgspec.Struct, array_like=True, gc=False, tag=10):
    """A queue was restored from a backup. No stream has its consumer right."""

    incarnation: int
    point: RestorePoint


CatalogRecord: TypeAlias = (
    Created
    | Updated
    | PartitionsChanged
    | Deleted
    | FilesRemoved
    | AdoptionBegun
    | AdoptionFinished
    | ConsumerRightSet
    | CallRecorded
    | QueueRestored
)


# -- queries ------------------------------------------------------------------------------------------


def entry_by_name(state: CatalogState, name: str) -> QueueEntry:
    """The queue of that name. Raises QueueNotFound."""
    entry = state.names.get(check_name(name))
    if entry is None:
        raise QueueNotFound(f"there is no queue {name!r}; create it, or fix the name")
    return entry


def entry_by_incarnation(state: CatalogState, incarnation: int) -> QueueEntry:
    """The queue of that incarnation. Raises QueueNotFound."""
    entry = state.entries.get(check_range("incarnation", incarnation, 1, MAX_INCARNATION))
    if entry is None:
        raise QueueNotFound(f"there is no queue of incarnation {incarnation:016x} (any more); look for it by its name")
    return entry


def dead_queue_users(state: CatalogState, name: str) -> list[str]:
    """The names of the queues whose dead queue this is, sorted."""
    return sorted(entry.name for entry in [*state.names.values()] if entry.options.dead_queue == name)


# -- deciding -----------------------------------------------------------------------------------------


def create(
    state: CatalogState,
    name: str,
    options: Options,
    partitions: int,
    incarnation: int,
    at: int,
    exist_ok: bool = False,
    given: Mapping[str, object] | None = None,
) -> list[CatalogRecord]:
    """Create a queue. Raises QueueExists.

    With `exist_ok` a queue of that name may exist. Then nothing changes, but the options that the caller has `given`
    explicitly (by OPTION_NAMES) must be the same as there. The number of partitions need not be: a resized queue is
    still that queue.
    """
    check_name(name)
    check_range("partitions", partitions, 1, MAX_PARTITIONS)
    options.validate()
    existing = state.names.get(name)
    if existing is not None:
        if not exist_ok:
            raise QueueExists(f"there is a queue {name!r} already; use it, pass exist_ok=True, or choose another name")
        _refuse_other_options(existing, given or {})
        return []
    check_range("incarnation", incarnation, 1, MAX_INCARNATION)
    if incarnation in state.entries or incarnation in state.deleted:
        raise InvalidRequest(f"incarnation {incarnation:016x} is given already; draw another")
    _check_dead_queue(state, name, options.dead_queue)
    return [Created(name, incarnation, options, partitions, at)]


def update(state: CatalogState, incarnation: int, changes: Mapping[str, object]) -> list[CatalogRecord]:
    """Change options; those not named stay as they are."""
    entry = entry_by_incarnation(state, incarnation)
    options = merged(entry.options, changes)
    if options.durability != entry.options.durability:
        raise InvalidRequest(f"the durability of queue {entry.name!r} cannot be changed; create a new queue with the one you want")
    if options.dead_queue != entry.options.dead_queue:
        _check_dead_queue(state, entry.name, options.dead_queue)
    return [Updated(incarnation, options)] if options != entry.options else []


def change_partitions(
    state: CatalogState,
    incarnation: int,
    active: Collection[int],
    read_only: Collection[int],
    marks: Mapping[int, int],
    at: int,
    keep_since: int = 0,
    fixed: Collection[int] = (),
) -> list[CatalogRecord]:
    """Give a queue other partitions: any that it has or had, and new ones, numbered from `next_partition` on.

    `fixed` partitions keep their slots. If the active partitions do not change, the map does not either.
    Maps that were replaced before `keep_since` are forgotten, except the one that is replaced now.
    """
    entry = entry_by_incarnation(state, incarnation)
    numbers, new_read_only = _numbers("active", active), _numbers("read_only", read_only)
    check_range("the count of active partitions", len(numbers), 1, MAX_PARTITIONS)
    next_partition = max(entry.next_partition, numbers[-1] + 1)
    _check_partitions(entry, numbers, new_read_only, marks, next_partition)
    if (numbers, new_read_only) == (entry.active, entry.read_only):
        return []
    new, marked = entry.map, []
    if numbers != entry.active:
        new, marked = slots.next_map(entry.map, numbers, fixed), list(marks.items())
    kept_from = next((old.version for old in entry.maps if old.replaced_at >= keep_since), entry.map.version)
    return [PartitionsChanged(incarnation, new.version, new.pack(), numbers, next_partition, new_read_only, marked, at, kept_from)]


def delete(state: CatalogState, name: str) -> list[CatalogRecord]:
    """Delete a queue. Raises InvalidRequest if it is the dead queue of another."""
    entry = entry_by_name(state, name)
    using = dead_queue_users(state, name)
    if using:
        raise InvalidRequest(f"queue {name!r} is the dead queue of {_listed(using)}; give them another or none, then delete it")
    return [Deleted(entry.incarnation)]


def confirm_files_removed(state: CatalogState, incarnation: int) -> list[CatalogRecord]:
    """Record that the files of a deleted queue were removed; nothing if that is recorded already."""
    if incarnation in state.entries:
        raise InvalidRequest(f"queue {state.entries[incarnation].name!r} is not deleted; delete it before its files are removed")
    return [FilesRemoved(incarnation)] if incarnation in state.deleted else []


def begin_adoption(state: CatalogState, incarnation: int, name: str) -> list[CatalogRecord]:
    """Begin the adoption of a published write; nothing if it was begun before."""
    return [] if name in entry_by_incarnation(state, incarnation).adopting else [AdoptionBegun(incarnation, name)]


def finish_adoption(
    state: CatalogState, incarnation: int, name: str, source: str, number: int, items: int = 0, checksum: int | None = None
) -> list[CatalogRecord]:
    """Record that all of a published write was adopted."""
    entry_by_incarnation(state, incarnation)
    return [AdoptionFinished(incarnation, name, source, number, items, checksum)]


def set_consumer_right(state: CatalogState, incarnation: int, holder: str, timeout: int, runs: Sequence[str] = ()) -> list[CatalogRecord]:
    """Give the consumer right to a holder with these runs, or ("") take it away."""
    entry, new = entry_by_incarnation(state, incarnation), (holder, timeout, [*runs])
    if (entry.consumer_right_holder, entry.consumer_right_timeout, entry.consumer_right_runs) == new:
        return []
    return [ConsumerRightSet(incarnation, *new)]


def _refuse_other_options(existing: QueueEntry, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if name != "partitions" and merged(existing.options, {name: value}) != existing.options:
            advice = f"leave {name} out, choose another name, or change the queue: ensure_queue does that"
            raise QueueExists(f"there is a queue {existing.name!r} with another {name}; {advice}")


def _check_dead_queue(state: CatalogState, name: str, dead_queue: str) -> None:
    """Raise if `dead_queue` cannot be the dead queue of queue `name`."""
    if not dead_queue:
        return
    if dead_queue == name:
        raise InvalidRequest(f"queue {name!r} cannot be its own dead queue; give another one")
    target = state.names.get(dead_queue)
    if target is None:
        raise QueueNotFound(f"there is no queue {dead_queue!r} to be the dead queue of {name!r}; create it first")
    if target.options.dead_queue:
        raise InvalidRequest(f"queue {dead_queue!r} has a dead queue of its own, so it cannot be one; choose another")
    using = dead_queue_users(state, name)
    if using:
        raise InvalidRequest(f"queue {name!r} is the dead queue of {_listed(using)}, so it cannot have one; give them another first")


def _numbers(name: str, given: Collection[int]) -> list[int]:
    """The partition numbers, sorted. Raises InvalidRequest if one is invalid or given twice."""
    for number in given:
        check_range(f"a partition in {name}", number, 0, slots.MAX_NUMBER)
    if len(set(given)) < len(given):
        raise InvalidRequest(f"{name} names a partition twice; give each number once")
    return sorted(given)


def _check_partitions(entry: QueueEntry, active: list[int], read_only: list[int], marks: Mapping[int, int], next_partition: int) -> None:
    skipped = set(range(entry.next_partition, next_partition)) - set(active)
    if skipped:
        what = f"partition {min(skipped)} of queue {entry.name!r} is skipped"
        raise InvalidRequest(f"{what}; number new partitions on from {entry.next_partition}")
    retired = set(range(next_partition)) - set(active)
    wrong = [number for number in read_only if number not in retired]
    if wrong:
        raise InvalidRequest(f"partition {wrong[0]} of queue {entry.name!r} is active or not there; only a retired one can be read-only")
    for number, offset in marks.items():
        check_range("the number of a mark", number, 0, entry.next_partition - 1)
        check_range("the offset of a mark", offset, 0, (1 << 63) - 1)


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


# -- applying -----------------------------------------------------------------------------------------


def apply(state: CatalogState, record: CatalogRecord) -> None:
    """Apply a record to the state."""
    _APPLY[type(record)](state, record)


def _created(state: CatalogState, record: Created) -> None:
    former = state.names.get(record.name)
    if former is not None:  # a repaired log may lack the record that deleted it
        _deleted(state, Deleted(former.incarnation))
    numbers = list(range(record.partitions))
    state.put(QueueEntry(record.name, record.incarnation, record.options, record.at, slots.first_map(numbers), numbers, record.partitions))


def _updated(state: CatalogState, record: Updated) -> None:
    state.change(record.incarnation, options=record.options)


def _partitions_changed(state: CatalogState, record: PartitionsChanged) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is None:
        return
    changes: dict[str, Any] = {"read_only": record.read_only}
    if record.version != entry.map.version:
        maps = [*entry.maps, ReplacedMap(entry.map.version, entry.map.pack(), record.at)]
        marks = {**entry.marks, record.version: dict(record.marks)}
        changes |= {
            "map": SlotMap.unpack(record.version, record.owners),
            "active": record.active,
            "next_partition": record.next_partition,
            "maps": [old for old in maps if old.version >= record.kept_from],
            "marks": _kept_marks(marks, record.kept_from),
        }
    state.change(record.incarnation, **changes)


def _kept_marks(marks: Mapping[int, Mapping[int, int]], kept_from: int) -> dict[int, dict[int, int]]:
    """The marks from a version on. The first of them also has what earlier ones had of partitions that it lacks: where
    partitions end that were retired before."""
    first = min((version for version in marks if version >= kept_from), default=0)
    older = {number: offset for version in sorted(marks) if version < first for number, offset in marks[version].items()}
    return {version: {**(older if version == first else {}), **each} for version, each in marks.items() if version >= kept_from}


def _deleted(state: CatalogState, record: Deleted) -> None:
    state.drop(record.incarnation)
    state.deleted.add(record.incarnation)


def _files_removed(state: CatalogState, record: FilesRemoved) -> None:
    state.drop(record.incarnation)
    state.deleted.discard(record.incarnation)


def _adoption_begun(state: CatalogState, record: AdoptionBegun) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None and record.name not in entry.adopting:
        number = entry.adoptions + 1
        state.change(record.incarnation, adoptions=number, adopting={**entry.adopting, record.name: number})


def _adoption_finished(state: CatalogState, record: AdoptionFinished) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is None:
        return
    adopting = {name: number for name, number in entry.adopting.items() if name != record.name}
    adopted = {source: number for source, number in entry.adopted.items() if source != record.source}
    adopted[record.source] = max(record.number, entry.adopted.get(record.source, 0))
    if len(adopted) > min(MAX_ONCE, MAX_SOURCES):
        _forget_oldest(adopted, record.source)
    state.change(record.incarnation, adopting=adopting, adopted=adopted, contents=_contents(entry, record))


def _forget_oldest(adopted: dict[str, int], source: str) -> None:
    """Remove the oldest sources of the kind of `source`, if they are too many."""

    def kind(source: str) -> tuple[bool, str]:
        single = adopted[source] == SINGLE_WRITE
        return single, "" if single else source_kind(source)

    same = [other for other in adopted if kind(other) == kind(source)]
    for oldest in same[: -MAX_ONCE if kind(source)[0] else -MAX_SOURCES]:
        del adopted[oldest]


def _contents(entry: QueueEntry, record: AdoptionFinished) -> dict[str, list[WriteContent]]:
    """What is known of the writes of all sources after an adoption."""
    if record.checksum is None:
        return entry.contents
    contents = {source: writes for source, writes in entry.contents.items() if source != record.source}
    writes = [write for write in entry.contents.get(record.source, []) if write.number < record.number]
    contents[record.source] = [*writes, WriteContent(record.number, record.items, record.checksum)][-MAX_CONTENTS:]
    return dict([*contents.items()][-MAX_CONTENT_SOURCES:])


def _consumer_right_set(state: CatalogState, record: ConsumerRightSet) -> None:
    right = {"consumer_right_holder": record.holder, "consumer_right_timeout": record.timeout, "consumer_right_runs": record.runs}
    state.change(record.incarnation, **right)


def _queue_restored(state: CatalogState, record: QueueRestored) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None:
        _consumer_right_set(state, ConsumerRightSet(record.incarnation, ""))
        state.change(record.incarnation, restores=[*entry.restores, record.point])
    state.calls.watermark = max(state.calls.watermark, record.point.at)


def _call_recorded(state: CatalogState, record: CallRecorded) -> None:
    state.calls.put([record.call], [RememberedAnswer(record.incarnation)], record.at, MIN_RESULT_MEMORY)


_APPLY: dict[type, Callable[[CatalogState, Any], None]] = {
    CallRecorded: _call_recorded,
    QueueRestored: _queue_restored,
    AdoptionBegun: _adoption_begun,
    AdoptionFinished: _adoption_finished,
    ConsumerRightSet: _consumer_right_set,
    Created: _created,
    Updated: _updated,
    PartitionsChanged: _partitions_changed,
    Deleted: _deleted,
    FilesRemoved: _files_removed,
}


# -- a Base -------------------------------------------------------------------------------------------


class _EntryImage(msgspec.Struct, array_like=True):
    """A QueueEntry as it is stored. New fields go to the end, with a default."""

    name: str
    incarnation: int
    options: Options
    created_at: int
    version: int
    owners: bytes
    active: list[int]
    next_partition: int
    read_only: list[int]
    maps: list[ReplacedMap]
    marks: list[tuple[int, list[tuple[int, int]]]]
    adoptions: int = 0
    adopting: list[tuple[str, int]] = []
    adopted: list[tuple[str, int]] = []
    consumer_right_holder: str = ""
    consumer_right_timeout: int = 0
    consumer_right_runs: list[str] = []
    restores: list[RestorePoint] = []
    contents: list[tuple[str, list[WriteContent]]] = []


class _CatalogImage(msgspec.Struct, array_like=True):
    version: int
    entries: list[_EntryImage]
    deleted: list[int]
    calls: list[tuple[bytes, RememberedCall]] = []
    call_watermark: int = NEVER


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_CatalogImage)


def dump(state: CatalogState) -> bytes:
    """The state as bytes. They are canonical: the same queues give the same bytes."""
    entries = [_image(entry) for _, entry in sorted(state.entries.items())]
    calls, _ = state.calls.live(NEVER)
    return _encoder.encode(_CatalogImage(VERSION, entries, sorted(state.deleted), calls, state.calls.watermark))


def load(body: bytes | memoryview) -> CatalogState:
    """The state that `dump` was given. Raises CorruptLog if the bytes are no Base, or of a newer version."""
    try:
        image = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"a Base of the catalog cannot be read ({error}); run verify, then repair") from error
    if image.version > VERSION:
        raise CorruptLog(f"a Base of the catalog has version {image.version} and this Penstock knows {VERSION}; use a newer Penstock")
    state = CatalogState()
    for entry in image.entries:
        state.put(_entry(entry))
    state.deleted = set(image.deleted)
    state.calls.restore(image.calls, (), image.call_watermark)
    return state


def _image(entry: QueueEntry) -> _EntryImage:
    fields = msgspec.structs.asdict(entry)
    slot_map = fields.pop("map")
    fields["marks"] = [(version, sorted(marks.items())) for version, marks in entry.marks.items()]
    fields["adopting"], fields["adopted"] = sorted(entry.adopting.items()), list(entry.adopted.items())
    fields["contents"] = list(entry.contents.items())
    return _EntryImage(version=slot_map.version, owners=slot_map.pack(), **fields)


def _entry(image: _EntryImage) -> QueueEntry:
    fields = msgspec.structs.asdict(image)
    fields["map"] = SlotMap.unpack(fields.pop("version"), fields.pop("owners"))
    fields["marks"] = {version: dict(marks) for version, marks in image.marks}
    fields["adopting"], fields["adopted"] = dict(image.adopting), dict(image.adopted)
    fields["contents"] = dict(image.contents)
    return QueueEntry(**fields)
