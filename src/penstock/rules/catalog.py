"""The catalog: which queues there are, with which options and partitions; a pure state machine of its own.

Owns: `Entry` (a queue) and `CatalogState`; the catalog's records; what may be asked of it (`create`, `update`, `reshape`, `delete`, …: each
reads the state, changes nothing, and returns the records of what happens, none when nothing does, or raises); `apply`; `dump` and `load`
for a Base. Records are like those of records.py, with tags of their own. Times are wall microseconds, durations microseconds.
Invariants
- a name is one queue's at a time; an incarnation is one queue's for ever; numbers of partitions are given in order, never twice;
- a dead queue exists and has none of its own, for as long as a queue names it;
- an entry is replaced, never changed: who holds one sees one moment.
`apply` takes any record in any state: a repaired log may lack some, and with them the second invariant.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.rules import slots
from penstock.rules.options import Options, check_name, merged
from penstock.rules.slots import SlotMap
from penstock.words.errors import CorruptLog, InvalidRequest, QueueExists, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, check_range

MAX_INCARNATION = (1 << 64) - 1
VERSION = 1
MAX_SOURCES, MAX_ONCE = 10_000, 1_000
"""Sources of drops whose last number is remembered; and of those with one drop only, which need it until that is out of the inbox."""
SINGLE_WRITE = 1 << 61
"""Instead of a number: this source has but one drop."""


# -- what a catalog holds -----------------------------------------------------------------------------


class ReplacedMap(NamedTuple):
    """A map that was replaced, and when."""

    version: int
    owners: bytes
    replaced_at: int


class QueueEntry(msgspec.Struct, frozen=True):
    """One queue. Lists of partitions are in order."""

    name: str
    incarnation: int
    options: Options
    created_at: int
    map: SlotMap
    active: list[int]
    """Partitions that take items: those of the map."""
    next_partition: int
    read_only: list[int] = []
    """Those retired because an operator set them read-only."""
    maps: list[ReplacedMap] = []
    """Earlier maps that may still matter, oldest first."""
    marks: dict[int, dict[int, int]] = {}
    """By version, this and those kept: the next offset of partitions when it took effect."""
    adoptions: int = 0
    """How many drops were begun: each has its number."""
    adopting: dict[str, int] = {}
    """Drops that are being adopted, by name, and their numbers."""
    adopted: dict[str, int] = {}
    """source → the last of its numbers that was adopted; the newest of them, oldest first."""
    consumer_right_holder: str = ""
    """Who has the consumer right, if anybody."""
    consumer_right_timeout: int = 0
    """How long the right lasts without a word from its holder."""

    @property
    def unfinished(self) -> str:
        """The drop that was begun last, if it was not finished: it can be gone on with as long as no other is begun."""
        return next((name for name, number in self.adopting.items() if number == self.adoptions), "")

    @property
    def retired(self) -> list[int]:
        """Partitions that drain, or are drained."""
        active = set(self.active)
        return [number for number in range(self.next_partition) if number not in active]


class CatalogState:
    """Every queue there is."""

    def __init__(self) -> None:
        self.names: dict[str, QueueEntry] = {}
        self.entries: dict[int, QueueEntry] = {}
        """The same by incarnation."""
        self.deleted: set[int] = set()
        """Incarnations that are no more and whose files may still be there."""

    def put(self, entry: QueueEntry) -> None:
        self.names[entry.name] = self.entries[entry.incarnation] = entry

    def drop(self, incarnation: int) -> None:
        entry = self.entries.pop(incarnation, None)
        if entry is not None:
            del self.names[entry.name]

    def __repr__(self) -> str:
        return f"CatalogState({len(self.names)} queues, {len(self.deleted)} deleted)"


# -- records ------------------------------------------------------------------------------------------


class Created(msgspec.Struct, array_like=True, gc=False, tag=1):
    """There is a queue, with partitions 0, 1, … and the first map of them."""

    name: str
    incarnation: int
    options: Options
    partitions: int
    at: int


class Updated(msgspec.Struct, array_like=True, gc=False, tag=2):
    """A queue's options are now these."""

    incarnation: int
    options: Options


class PartitionsChanged(msgspec.Struct, array_like=True, gc=False, tag=3):
    """A queue's partitions are now these. With the version that it had, only `read_only` is new."""

    incarnation: int
    version: int
    owners: bytes
    active: list[int]
    next_partition: int
    read_only: list[int]
    marks: list[tuple[int, int]]
    at: int
    kept_from: int = 0
    """Versions below this one are forgotten."""


class Deleted(msgspec.Struct, array_like=True, gc=False, tag=4):
    """A queue is no more; its files may go."""

    incarnation: int


class FilesRemoved(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The files of a deleted queue are gone."""

    incarnation: int


class AdoptionBegun(msgspec.Struct, array_like=True, gc=False, tag=6):
    """The adoption of a drop begins: the next number is its own."""

    incarnation: int
    name: str


class AdoptionFinished(msgspec.Struct, array_like=True, gc=False, tag=7):
    """A drop was adopted, all of it."""

    incarnation: int
    name: str
    source: str
    number: int


class ConsumerRightSet(msgspec.Struct, array_like=True, gc=False, tag=8):
    """A queue's consumer right is with this holder ("": with nobody)."""

    incarnation: int
    holder: str
    timeout: int = 0


CatalogRecord: TypeAlias = (
    Created | Updated | PartitionsChanged | Deleted | FilesRemoved | AdoptionBegun | AdoptionFinished | ConsumerRightSet
)


# -- looking ------------------------------------------------------------------------------------------


def entry_by_name(state: CatalogState, name: str) -> QueueEntry:
    """The queue of that name."""
    entry = state.names.get(check_name(name))
    if entry is None:
        raise QueueNotFound(f"there is no queue {name!r}; create it, or mend the name")
    return entry


def entry_by_incarnation(state: CatalogState, incarnation: int) -> QueueEntry:
    """The queue of that incarnation."""
    entry = state.entries.get(check_range("incarnation", incarnation, 1, MAX_INCARNATION))
    if entry is None:
        raise QueueNotFound(f"there is no queue of incarnation {incarnation:016x} (any more); look for it by its name")
    return entry


def dead_queue_users(state: CatalogState, name: str) -> list[str]:
    """The queues whose dead queue that is, in order."""
    return sorted(entry.name for entry in state.names.values() if entry.options.dead_queue == name)


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
    """Make a queue.

    With `exist_ok` nothing happens when there is one of that name, whatever its options: only what was `given` (OPTION_NAMES, partitions),
    because a caller cares about it, must be the same.
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
    """Give a queue other partitions: any it has or had, and new ones, numbered on from its next. Those that are `fixed` keep their slots.

    Maps that were replaced before `keep_since` are forgotten, but for the one replaced now. Where the active ones stay, so does the map.
    """
    entry = entry_by_incarnation(state, incarnation)
    numbers, held_back = _numbers("active", active), _numbers("read_only", read_only)
    check_range("the count of active partitions", len(numbers), 1, MAX_PARTITIONS)
    next_partition = max(entry.next_partition, numbers[-1] + 1)
    _refuse_strangers(entry, numbers, held_back, marks, next_partition)
    if (numbers, held_back) == (entry.active, entry.read_only):
        return []
    new, marked = entry.map, []
    if numbers != entry.active:
        new, marked = slots.next_map(entry.map, numbers, fixed), list(marks.items())
    kept_from = next((old.version for old in entry.maps if old.replaced_at >= keep_since), entry.map.version)
    return [PartitionsChanged(incarnation, new.version, new.pack(), numbers, next_partition, held_back, marked, at, kept_from)]


def delete(state: CatalogState, name: str) -> list[CatalogRecord]:
    """End a queue."""
    entry = entry_by_name(state, name)
    using = dead_queue_users(state, name)
    if using:
        raise InvalidRequest(f"queue {name!r} is the dead queue of {_listed(using)}; give them another or none, then delete it")
    return [Deleted(entry.incarnation)]


def confirm_files_removed(state: CatalogState, incarnation: int) -> list[CatalogRecord]:
    """Say that the files of a deleted queue are gone; nothing when that was said before."""
    if incarnation in state.entries:
        raise InvalidRequest(f"queue {state.entries[incarnation].name!r} is not deleted; delete it before its files are removed")
    return [FilesRemoved(incarnation)] if incarnation in state.deleted else []


def begin_adoption(state: CatalogState, incarnation: int, name: str) -> list[CatalogRecord]:
    """Begin to adopt a drop; nothing when that was begun before."""
    return [] if name in entry_by_incarnation(state, incarnation).adopting else [AdoptionBegun(incarnation, name)]


def finish_adoption(state: CatalogState, incarnation: int, name: str, source: str, number: int) -> list[CatalogRecord]:
    """A drop is adopted."""
    entry_by_incarnation(state, incarnation)
    return [AdoptionFinished(incarnation, name, source, number)]


def set_consumer_right(state: CatalogState, incarnation: int, holder: str, timeout: int) -> list[CatalogRecord]:
    """Give the consumer right to a holder, or ("") to nobody."""
    entry = entry_by_incarnation(state, incarnation)
    return (
        []
        if (entry.consumer_right_holder, entry.consumer_right_timeout) == (holder, timeout)
        else [ConsumerRightSet(incarnation, holder, timeout)]
    )


def _refuse_other_options(existing: QueueEntry, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if not _has(existing, name, value):
            advice = f"leave {name} out, change it there, or choose another name"
            raise QueueExists(f"there is a queue {existing.name!r} with another {name}; {advice}")


def _has(entry: QueueEntry, name: str, value: object) -> bool:
    if name == "partitions":
        return value == len(entry.active)
    return merged(entry.options, {name: value}) == entry.options


def _check_dead_queue(state: CatalogState, name: str, dead_queue: str) -> None:
    """Refuse a dead queue that cannot be one for the queue of that name."""
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
    """Numbers of partitions in order, each once."""
    for number in given:
        check_range(f"a partition in {name}", number, 0, slots.MAX_NUMBER)
    if len(set(given)) < len(given):
        raise InvalidRequest(f"{name} names a partition twice; give each number once")
    return sorted(given)


def _refuse_strangers(entry: QueueEntry, active: list[int], read_only: list[int], marks: Mapping[int, int], next_partition: int) -> None:
    skipped = set(range(entry.next_partition, next_partition)) - set(active)
    if skipped:
        what = f"partition {min(skipped)} of queue {entry.name!r} is skipped"
        raise InvalidRequest(f"{what}; number new partitions on from {entry.next_partition}")
    retired = set(range(next_partition)) - set(active)
    stray = [number for number in read_only if number not in retired]
    if stray:
        raise InvalidRequest(f"partition {stray[0]} of queue {entry.name!r} is active or not there; only a retired one can be read-only")
    for number, offset in marks.items():
        check_range("the number of a mark", number, 0, entry.next_partition - 1)
        check_range("the offset of a mark", offset, 0, (1 << 63) - 1)


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


# -- applying -----------------------------------------------------------------------------------------


def apply(state: CatalogState, record: CatalogRecord) -> None:
    """Make a record true."""
    _APPLY[type(record)](state, record)


def _created(state: CatalogState, record: Created) -> None:
    former = state.names.get(record.name)
    if former is not None:  # that it was deleted is among the records that a repaired log lacks
        _deleted(state, Deleted(former.incarnation))
    numbers = list(range(record.partitions))
    state.put(QueueEntry(record.name, record.incarnation, record.options, record.at, slots.first_map(numbers), numbers, record.partitions))


def _updated(state: CatalogState, record: Updated) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None:
        state.put(msgspec.structs.replace(entry, options=record.options))


def _reshaped(state: CatalogState, record: PartitionsChanged) -> None:
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
            "marks": {version: each for version, each in marks.items() if version >= record.kept_from},
        }
    state.put(msgspec.structs.replace(entry, **changes))


def _deleted(state: CatalogState, record: Deleted) -> None:
    state.drop(record.incarnation)
    state.deleted.add(record.incarnation)


def _removed(state: CatalogState, record: FilesRemoved) -> None:
    state.drop(record.incarnation)
    state.deleted.discard(record.incarnation)


def _adopting(state: CatalogState, record: AdoptionBegun) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None and record.name not in entry.adopting:
        number = entry.adoptions + 1
        state.put(msgspec.structs.replace(entry, adoptions=number, adopting={**entry.adopting, record.name: number}))


def _adopted(state: CatalogState, record: AdoptionFinished) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is None:
        return
    adopting = {name: number for name, number in entry.adopting.items() if name != record.name}
    adopted = {source: number for source, number in entry.adopted.items() if source != record.source}
    adopted[record.source] = max(record.number, entry.adopted.get(record.source, 0))
    once = [source for source, number in adopted.items() if number == SINGLE_WRITE]
    for oldest in once[:-MAX_ONCE] + [source for source, number in adopted.items() if number != SINGLE_WRITE][:-MAX_SOURCES]:
        del adopted[oldest]
    state.put(msgspec.structs.replace(entry, adopting=adopting, adopted=adopted))


def _held(state: CatalogState, record: ConsumerRightSet) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None:
        state.put(msgspec.structs.replace(entry, consumer_right_holder=record.holder, consumer_right_timeout=record.timeout))


_APPLY: dict[type, Callable[[CatalogState, Any], None]] = {
    AdoptionBegun: _adopting,
    AdoptionFinished: _adopted,
    ConsumerRightSet: _held,
    Created: _created,
    Updated: _updated,
    PartitionsChanged: _reshaped,
    Deleted: _deleted,
    FilesRemoved: _removed,
}


# -- a Base -------------------------------------------------------------------------------------------


class _EntryImage(msgspec.Struct, array_like=True):
    """An entry. New fields go to the end, with a default."""

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
    holder: str = ""
    hold_timeout: int = 0


class _Image(msgspec.Struct, array_like=True):
    version: int
    entries: list[_EntryImage]
    deleted: list[int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Image)


def dump(state: CatalogState) -> bytes:
    """The state as bytes, which depend on what it means, not on how it came about."""
    entries = [_image(entry) for _, entry in sorted(state.entries.items())]
    return _encoder.encode(_Image(VERSION, entries, sorted(state.deleted)))


def load(body: bytes | memoryview) -> CatalogState:
    """The state that `dump` saw."""
    try:
        image = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"a Base of the catalog cannot be read ({error}); run verify, then repair") from error
    if image.version > VERSION:
        raise CorruptLog(f"a Base of the catalog has version {image.version} and this Penstock knows {VERSION}; use a newer Penstock")
    state = CatalogState()
    for one in image.entries:
        state.put(_entry(one))
    state.deleted = set(image.deleted)
    return state


def _image(entry: QueueEntry) -> _EntryImage:
    return _EntryImage(
        entry.name,
        entry.incarnation,
        entry.options,
        entry.created_at,
        entry.map.version,
        entry.map.pack(),
        entry.active,
        entry.next_partition,
        entry.read_only,
        entry.maps,
        [(version, sorted(marks.items())) for version, marks in entry.marks.items()],
        entry.adoptions,
        sorted(entry.adopting.items()),
        list(entry.adopted.items()),
        entry.consumer_right_holder,
        entry.consumer_right_timeout,
    )


def _entry(image: _EntryImage) -> QueueEntry:
    return QueueEntry(
        image.name,
        image.incarnation,
        image.options,
        image.created_at,
        SlotMap.unpack(image.version, image.owners),
        image.active,
        image.next_partition,
        image.read_only,
        image.maps,
        {version: dict(marks) for version, marks in image.marks},
        image.adoptions,
        dict(image.adopting),
        dict(image.adopted),
        image.holder,
        image.hold_timeout,
    )
