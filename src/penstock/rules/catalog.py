"""The catalog: which queues there are, with which options and partitions; a pure state machine of its own.

Owns: `Options` (a queue's, the one frozen type, validated once), `Entry` (a queue), `State`; the catalog's records and their `apply`;
`dump` and `load` for a Base. What may be asked of a catalog is decided in queues.py.
Records are like those of records.py, with tags of their own. Times are wall microseconds, durations microseconds.
Invariants
- a name is one queue's at a time; an incarnation is one queue's for ever; numbers of partitions are given in order, never twice;
- a dead queue exists and has none of its own, for as long as a queue names it;
- an entry is replaced, never changed: who holds one sees one moment.
`apply` takes any record in any state: a repaired log may lack some, and with them the second invariant.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.rules import slots
from penstock.rules.slots import SlotMap
from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.limits import Policy, within

VERSION = 1
MAX_QUEUE_NAME = 200
MOST = 1 << 60
MAX_SOURCES, MAX_ONCE = 10_000, 1_000
"""Sources of drops whose last number is remembered; and of those with one drop only, which need it until that is out of the inbox."""
ONCE = 1 << 61
"""Instead of a number: this source has but one drop."""
DURABILITIES = ("", "fsync", "interval", "os")
_ALPHANUMERIC = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_IN_A_NAME = _ALPHANUMERIC | frozenset("._-")


# -- what a queue is ----------------------------------------------------------------------------------


def check_name(name: object) -> str:
    """The name of a queue, or what is wrong with it."""
    if not (isinstance(name, str) and 1 <= len(name) <= MAX_QUEUE_NAME and name[0] in _ALPHANUMERIC and _IN_A_NAME.issuperset(name)):
        rule = f"1 to {MAX_QUEUE_NAME} letters A-Z a-z, digits, '.', '_' or '-', a letter or digit first"
        raise InvalidRequest(f"{name!r:.250} is no name for a queue; use {rule}")
    return name


class Options(msgspec.Struct, frozen=True, array_like=True):
    """What may be chosen for a queue besides its partitions. 0 and "" switch off."""

    policy: Policy = Policy()
    dead_queue: str = ""
    max_items: int = 0
    max_bytes: int = 0
    durability: Literal["", "fsync", "interval", "os"] = ""
    """"" is the broker's."""

    def validate(self) -> "Options":
        """Return self, or say which option is wrong."""
        self.policy.validate()
        if self.dead_queue != "":
            check_name(self.dead_queue)
        within("max_items", self.max_items, 0, MOST)
        within("max_bytes", self.max_bytes, 0, MOST)
        if self.durability not in DURABILITIES:
            raise InvalidRequest(f"durability is {self.durability!r}; use 'fsync', 'interval' or 'os', or leave it to the broker")
        return self


OPTION_NAMES = (*Policy.__struct_fields__, *(name for name in Options.__struct_fields__ if name != "policy"))
"""Options as callers name them, the policy's among the others."""


class OldMap(NamedTuple):
    """A map that was replaced, and when."""

    version: int
    owners: bytes
    replaced_at: int


class Entry(msgspec.Struct, frozen=True):
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
    maps: list[OldMap] = []
    """Earlier maps that may still matter, oldest first."""
    marks: dict[int, dict[int, int]] = {}
    """By version, this and those kept: the next offset of partitions when it took effect."""
    adoptions: int = 0
    """How many drops were begun: each has its number."""
    adopting: dict[str, int] = {}
    """Drops that are being adopted, by name, and their numbers."""
    adopted: dict[str, int] = {}
    """source → the last of its numbers that was adopted; the newest of them, oldest first."""
    holder: str = ""
    """Who has the consumer right, if anybody."""
    hold_timeout: int = 0
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


class State:
    """Every queue there is."""

    def __init__(self) -> None:
        self.names: dict[str, Entry] = {}
        self.entries: dict[int, Entry] = {}
        """The same by incarnation."""
        self.deleted: set[int] = set()
        """Incarnations that are no more and whose files may still be there."""

    def put(self, entry: Entry) -> None:
        self.names[entry.name] = self.entries[entry.incarnation] = entry

    def drop(self, incarnation: int) -> None:
        entry = self.entries.pop(incarnation, None)
        if entry is not None:
            del self.names[entry.name]

    def __repr__(self) -> str:
        return f"State({len(self.names)} queues, {len(self.deleted)} deleted)"


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


class Reshaped(msgspec.Struct, array_like=True, gc=False, tag=3):
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


class Removed(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The files of a deleted queue are gone."""

    incarnation: int


class Adopting(msgspec.Struct, array_like=True, gc=False, tag=6):
    """The adoption of a drop begins: the next number is its own."""

    incarnation: int
    name: str


class Adopted(msgspec.Struct, array_like=True, gc=False, tag=7):
    """A drop was adopted, all of it."""

    incarnation: int
    name: str
    source: str
    number: int


class Held(msgspec.Struct, array_like=True, gc=False, tag=8):
    """A queue's consumer right is with this holder ("": with nobody)."""

    incarnation: int
    holder: str
    timeout: int = 0


Record: TypeAlias = Created | Updated | Reshaped | Deleted | Removed | Adopting | Adopted | Held


# -- applying -----------------------------------------------------------------------------------------


def apply(state: State, record: Record) -> None:
    """Make a record true."""
    _APPLY[type(record)](state, record)


def _created(state: State, record: Created) -> None:
    former = state.names.get(record.name)
    if former is not None:  # that it was deleted is among the records that a repaired log lacks
        _deleted(state, Deleted(former.incarnation))
    numbers = list(range(record.partitions))
    state.put(Entry(record.name, record.incarnation, record.options, record.at, slots.first(numbers), numbers, record.partitions))


def _updated(state: State, record: Updated) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None:
        state.put(msgspec.structs.replace(entry, options=record.options))


def _reshaped(state: State, record: Reshaped) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is None:
        return
    changes: dict[str, Any] = {"read_only": record.read_only}
    if record.version != entry.map.version:
        maps = [*entry.maps, OldMap(entry.map.version, entry.map.pack(), record.at)]
        marks = {**entry.marks, record.version: dict(record.marks)}
        changes |= {
            "map": SlotMap.unpack(record.version, record.owners),
            "active": record.active,
            "next_partition": record.next_partition,
            "maps": [old for old in maps if old.version >= record.kept_from],
            "marks": {version: each for version, each in marks.items() if version >= record.kept_from},
        }
    state.put(msgspec.structs.replace(entry, **changes))


def _deleted(state: State, record: Deleted) -> None:
    state.drop(record.incarnation)
    state.deleted.add(record.incarnation)


def _removed(state: State, record: Removed) -> None:
    state.drop(record.incarnation)
    state.deleted.discard(record.incarnation)


def _adopting(state: State, record: Adopting) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None and record.name not in entry.adopting:
        number = entry.adoptions + 1
        state.put(msgspec.structs.replace(entry, adoptions=number, adopting={**entry.adopting, record.name: number}))


def _adopted(state: State, record: Adopted) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is None:
        return
    adopting = {name: number for name, number in entry.adopting.items() if name != record.name}
    adopted = {source: number for source, number in entry.adopted.items() if source != record.source}
    adopted[record.source] = max(record.number, entry.adopted.get(record.source, 0))
    once = [source for source, number in adopted.items() if number == ONCE]
    for oldest in once[:-MAX_ONCE] + [source for source, number in adopted.items() if number != ONCE][:-MAX_SOURCES]:
        del adopted[oldest]
    state.put(msgspec.structs.replace(entry, adopting=adopting, adopted=adopted))


def _held(state: State, record: Held) -> None:
    entry = state.entries.get(record.incarnation)
    if entry is not None:
        state.put(msgspec.structs.replace(entry, holder=record.holder, hold_timeout=record.timeout))


_APPLY: dict[type, Callable[[State, Any], None]] = {
    Adopting: _adopting,
    Adopted: _adopted,
    Held: _held,
    Created: _created,
    Updated: _updated,
    Reshaped: _reshaped,
    Deleted: _deleted,
    Removed: _removed,
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
    maps: list[OldMap]
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


def dump(state: State) -> bytes:
    """The state as bytes, which depend on what it means, not on how it came about."""
    entries = [_image(entry) for _, entry in sorted(state.entries.items())]
    return _encoder.encode(_Image(VERSION, entries, sorted(state.deleted)))


def load(body: bytes | memoryview) -> State:
    """The state that `dump` saw."""
    try:
        image = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"a Base of the catalog cannot be read ({error}); run verify, then repair") from error
    if image.version > VERSION:
        raise CorruptLog(f"a Base of the catalog has version {image.version} and this Penstock knows {VERSION}; use a newer Penstock")
    state = State()
    for one in image.entries:
        state.put(_entry(one))
    state.deleted = set(image.deleted)
    return state


def _image(entry: Entry) -> _EntryImage:
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
        entry.holder,
        entry.hold_timeout,
    )


def _entry(image: _EntryImage) -> Entry:
    return Entry(
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
