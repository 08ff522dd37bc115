"""The slot map: which partition owns each slot of a queue, version by version.

Owns: `SlotMap`, how slots are assigned (`first_map`, `next_map`), and which slots a new version moves (`slot_moves`).
A map is never changed: another number of partitions is another version. Maps may share arrays, so never write to one.
Every map made here is even: each of its partitions has 16,384 / n slots, rounded down or up, except `fixed` ones.
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
from penstock.words.ids import LAST_PARTITION
from penstock.words.limits import MAX_PARTITIONS, check_range

MAX_NUMBER = LAST_PARTITION
"""Highest partition number that a map may contain: the highest that item ids have."""
_CACHED = 64  # most queues have one of few maps: those of new queues


class SlotMap(NamedTuple):
    """The owner of every slot."""

    version: int
    owners: "array[int]"
    """The partition number of each slot."""

    def partitions_of(self, batch: Batch, keyless: int) -> list[int]:
        """The partition of each item by its key; `keyless` for items without one."""
        owners, ids = self.owners, batch.key_ids
        if isinstance(ids, array):  # of a frame, whose numbers are little-endian: the first of four 16-bit parts has the slot
            low = memoryview(ids).cast("B").cast("H")[::4].tolist()
            found = [*map(_owners_by_low_bits(owners.tobytes()).__getitem__, low)]
            if 0 in low:
                for index in [index for index, key in enumerate(ids) if key == NO_KEY]:
                    found[index] = keyless
            return found
        return [owners[key & SLOT_MASK] if key != NO_KEY else keyless for key in ids or repeat(NO_KEY, len(batch))]

    @property
    def sole_owner(self) -> int | None:
        """The partition that owns every slot; None if there are several."""
        packed = self.owners.tobytes()
        width = self.owners.itemsize
        return self.owners[0] if packed == packed[:width] * SLOTS else None

    def pack(self) -> bytes:
        """The owners as bytes: the same owners, the same bytes. The version is stored beside them."""
        return _pack(self.owners.tobytes())

    @classmethod
    def unpack(cls, version: int, packed: bytes) -> "SlotMap":
        """The map of `pack`. Raises CorruptLog if the bytes are no map."""
        return cls(version, _owners(packed))

    def __repr__(self) -> str:
        return f"SlotMap(version={self.version}, partitions={sorted(set(self.owners))})"


class Move(NamedTuple):
    """Slots that a new map moves from one partition to another."""

    source: int
    destination: int
    slots: list[int]


@lru_cache(4)
def _owners_by_low_bits(owners: bytes) -> list[int]:
    """The owner of the slot of each 16-bit number, whose lower 14 bits it is."""
    return array("H", owners).tolist() * ((1 << 16) // SLOTS)


def first_map(partitions: Sequence[int]) -> SlotMap:
    """The map of a new queue: one block of slots after another. It is not stored, so it must never change."""
    numbers = _checked(partitions)
    edges = [SLOTS * index // len(numbers) for index in range(len(numbers) + 1)]
    return SlotMap.unpack(1, _packed((number, edges[index + 1] - edges[index]) for index, number in enumerate(numbers)))


def next_map(old: SlotMap, partitions: Sequence[int], fixed: Collection[int] = ()) -> SlotMap:
    """The next version: even, with as few slots moved as possible. `fixed` partitions keep exactly their slots."""
    return SlotMap(old.version + 1, _next_owners(old.owners.tobytes(), tuple(_checked(partitions)), frozenset(fixed)))


@lru_cache(_CACHED)
def _next_owners(old: bytes, partitions: tuple[int, ...], fixed: frozenset[int]) -> "array[int]":
    owners = array("H", old)
    shares = _shares(Counter(owners), partitions, fixed)
    free = []
    for slot, owner in enumerate(owners):  # a partition with too many slots keeps its first ones
        if shares.get(owner, 0):
            shares[owner] -= 1
        else:
            free.append(slot)
    new_owners = (number for number, lacking in shares.items() for _ in range(lacking))
    for slot, owner in zip(free, new_owners, strict=True):
        owners[slot] = owner
    return owners


def slot_moves(old: SlotMap, new: SlotMap) -> list[Move]:
    """The slots whose owner differs between two versions, by source and destination."""
    return list(_moves(old.owners.tobytes(), new.owners.tobytes()))


@lru_cache(_CACHED)
def _moves(old: bytes, new: bytes) -> tuple[Move, ...]:
    found: dict[tuple[int, int], list[int]] = {}
    for slot, pair in enumerate(zip(array("H", old), array("H", new), strict=True)):
        if pair[0] != pair[1]:
            found.setdefault(pair, []).append(slot)
    return tuple(Move(*pair, slots) for pair, slots in sorted(found.items()))


def _shares(held: Counter[int], numbers: Sequence[int], fixed: Collection[int]) -> dict[int, int]:
    """How many slots each partition gets. The remainder goes to those that have the most slots already."""
    kept = {number: held[number] for number in numbers if number in fixed}
    sharing = [number for number in numbers if number not in kept]
    each, rest = divmod(SLOTS - sum(kept.values()), max(1, len(sharing)))
    fullest = set(sorted(sharing, key=lambda number: (-held[number], number))[:rest])
    return {number: kept[number] if number in kept else each + (number in fullest) for number in numbers}


def _checked(partitions: Sequence[int]) -> list[int]:
    """The partition numbers, sorted. Raises InvalidRequest if they are invalid."""
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
    """Runs of slots as pairs of 16-bit numbers: the owner, and the number of consecutive slots."""
    return b"".join(struct.pack("<HH", owner, length) for owner, length in runs)


@lru_cache(_CACHED)
def _owners(packed: bytes) -> "array[int]":
    owners = array("H")
    if len(packed) % 4 == 0:
        for owner, length in struct.iter_unpack("<HH", packed):
            owners.extend(array("H", [owner]) * length)
    if len(owners) != SLOTS:
        raise CorruptLog(f"a slot map of {len(packed)} bytes has the owners of {len(owners)} slots, not {SLOTS}; run verify, then repair")
    return owners
