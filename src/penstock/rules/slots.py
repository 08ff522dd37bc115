"""The slot map: which partition has each slot of a queue, version by version.

Owns: `SlotMap`, how slots are shared out (`first`, `spread`), and what a new version moves (`moves`).
A map is never changed: another number of partitions is another version. Arrays may be shared between maps, so nobody writes to one.
Every map made here is even: the partitions it lists hold 16,384 / n slots, rounded down or up.
Limits: MAX_PARTITIONS partitions at a time, whose numbers fit into 16 bits.
"""

import struct
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby, repeat
from typing import NamedTuple

from penstock.rules.routing import NO_KEY, SLOT_MASK, SLOTS
from penstock.words.batch import Batch
from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.limits import MAX_PARTITIONS, check_range

MAX_NUMBER = 65_535
"""Highest number of a partition that a map can name."""
_CACHED = 64  # most queues share one of few maps: those of a new queue


class SlotMap(NamedTuple):
    """The owner of every slot."""

    version: int
    owners: "array[int]"
    """The partition number of each slot."""

    def partitions_of(self, batch: Batch, keyless: int) -> list[int]:
        """The partition of each item by its key; `keyless` for those without one."""
        owners = self.owners
        return [owners[key & SLOT_MASK] if key != NO_KEY else keyless for key in batch.key_ids or repeat(NO_KEY, len(batch))]

    def pack(self) -> bytes:
        """The owners as bytes: the same owners, the same bytes. The version is stored beside them."""
        return _pack(self.owners.tobytes())

    @classmethod
    def unpack(cls, version: int, packed: bytes) -> "SlotMap":
        """The map that `pack` saw."""
        return cls(version, _owners(packed))

    def __repr__(self) -> str:
        return f"SlotMap(version={self.version}, partitions={sorted(set(self.owners))})"


class Move(NamedTuple):
    """Slots that go from one partition to another."""

    source: int
    destination: int
    slots: list[int]


def first_map(partitions: Sequence[int]) -> SlotMap:
    """The map of a new queue: one block of slots after another. What is stored of a new queue rests on it, so it stays as it is."""
    numbers = _checked(partitions)
    edges = [SLOTS * place // len(numbers) for place in range(len(numbers) + 1)]
    return SlotMap.unpack(1, _packed((number, edges[place + 1] - edges[place]) for place, number in enumerate(numbers)))


def next_map(old: SlotMap, partitions: Sequence[int], fixed: Collection[int] = ()) -> SlotMap:
    """The next version, even over `partitions`, with as few slots moved as possible. Those that are `fixed` keep just what they have."""
    return SlotMap(old.version + 1, _spread(old.owners.tobytes(), tuple(_checked(partitions)), frozenset(fixed)))


@lru_cache(_CACHED)
def _spread(old: bytes, partitions: tuple[int, ...], fixed: frozenset[int]) -> "array[int]":
    owners = array("H", old)
    shares = _shares(Counter(owners), partitions, fixed)
    free = []
    for slot, owner in enumerate(owners):  # whoever has too many keeps its first ones
        if shares.get(owner, 0):
            shares[owner] -= 1
        else:
            free.append(slot)
    takers = (number for number, lacking in shares.items() for _ in range(lacking))
    for slot, taker in zip(free, takers, strict=True):
        owners[slot] = taker
    return owners


def slot_moves(old: SlotMap, new: SlotMap) -> list[Move]:
    """What goes where between two versions, by source and destination."""
    return list(_moves(old.owners.tobytes(), new.owners.tobytes()))


@lru_cache(_CACHED)
def _moves(old: bytes, new: bytes) -> tuple[Move, ...]:
    found: dict[tuple[int, int], list[int]] = {}
    for slot, pair in enumerate(zip(array("H", old), array("H", new), strict=True)):
        if pair[0] != pair[1]:
            found.setdefault(pair, []).append(slot)
    return tuple(Move(*pair, slots) for pair, slots in sorted(found.items()))


def _shares(held: Counter[int], numbers: Sequence[int], fixed: Collection[int]) -> dict[int, int]:
    """How many slots each partition is to have, in their order. Those that hold most get what does not divide: they have it already."""
    kept = {number: held[number] for number in numbers if number in fixed}
    sharing = [number for number in numbers if number not in kept]
    each, rest = divmod(SLOTS - sum(kept.values()), max(1, len(sharing)))
    fullest = set(sorted(sharing, key=lambda number: (-held[number], number))[:rest])
    return {number: kept[number] if number in kept else each + (number in fullest) for number in numbers}


def _checked(partitions: Sequence[int]) -> list[int]:
    """The numbers in order, or what is wrong with them."""
    for number in partitions:
        check_range("the number of a partition", number, 0, MAX_NUMBER)
    if not 1 <= len(set(partitions)) == len(partitions) <= MAX_PARTITIONS:
        count = f"{len(partitions)} partitions, {len(set(partitions))} of them different"
        raise InvalidRequest(f"a slot map cannot be made for {count}; give 1 to {MAX_PARTITIONS} different numbers")
    return sorted(partitions)


@lru_cache(_CACHED)
def _pack(owners: bytes) -> bytes:
    return _packed((owner, len(list(slots))) for owner, slots in groupby(array("H", owners)))


def _packed(runs: Iterable[tuple[int, int]]) -> bytes:
    """Runs of slots as pairs of 16-bit numbers: the owner, and how many slots in a row."""
    return b"".join(struct.pack("<HH", owner, length) for owner, length in runs)


@lru_cache(_CACHED)
def _owners(packed: bytes) -> "array[int]":
    owners = array("H")
    if len(packed) % 4 == 0:
        for owner, length in struct.iter_unpack("<HH", packed):
            owners.extend(array("H", [owner]) * length)
    if len(owners) != SLOTS:
        raise CorruptLog(f"a slot map of {len(packed)} bytes tells the owners of {len(owners)} slots, not {SLOTS}; run verify, then repair")
    return owners
