"""The width of a queue: which partitions it has, and how that changes.

Owns: `resized` and `drained` (which partitions there shall be), `change` (the record of it) and `apply` (the queue does as the catalog
says, now or at opening). Numbers are never reused: growing adds new ones, and a partition that is let go stays until it is drained.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.loop.catalog import Catalog
from penstock.loop.resizing import Change
from penstock.loop.turn import Turns
from penstock.rules.catalog import Entry
from penstock.rules.slots import SlotMap
from penstock.words.errors import InvalidRequest, QueueBusy

KEPT_MAPS = 32
"""Older slot maps that are kept at least: requests may be remembered under them."""


class Shape(NamedTuple):
    """The partitions that take items, and those an operator set read-only."""

    active: Sequence[int]
    read_only: Sequence[int]


def resized(entry: Entry, partitions: int) -> Shape:
    """So many partitions: the first of those there are, and new ones."""
    kept = entry.active[:partitions]
    new = range(entry.next_partition, entry.next_partition + partitions - len(kept))
    return Shape([*kept, *new], entry.read_only)


def drained(entry: Entry, partition: int, read_only: bool) -> Shape:
    """Without a partition, whose slots go to the others; or with it again."""
    if partition not in (*entry.active, *entry.read_only):
        raise InvalidRequest(f"partition {partition} takes no items; those that do are {entry.active}")
    if not read_only:
        return Shape(sorted({*entry.active, partition}), [number for number in entry.read_only if number != partition])
    if partition in entry.read_only:
        return Shape(entry.active, entry.read_only)
    others = [number for number in entry.active if number != partition]
    return Shape(others or [entry.next_partition], [*entry.read_only, partition])


def change(catalog: Catalog, turns: Turns, choose: Callable[[Entry], Shape], wall: int) -> Entry:
    """Inside a turn: record the new shape. When anything stands in its way nothing is changed."""
    entry = catalog.get(turns.incarnation)
    active, read_only = choose(entry)
    for member in turns.members.values():
        if member.error is not None:  # all must be in order: their marks and fences are needed
            raise member.refusal
        if not member.fenced:
            raise QueueBusy(f"partition {member.number} is still being prepared by an earlier resize; try again in a moment")
    for member in turns.members.values():
        turns.touch(member)
        member.open.make_durable()  # in every mode: the catalog, which is about to speak of them, is really synced
    marks = {number: member.open.committed.next_offset for number, member in turns.members.items()}
    known = set(turns.members)
    try:
        for number in [number for number in active if number not in known]:
            member = turns.add(number)
            if member.error is not None:
                raise member.refusal
            turns.catch_up(member, new=True)
        since = wall - entry.options.policy.remember  # by the date, which may be set: some are kept whatever it says
        since = min(since, entry.maps[-KEPT_MAPS].replaced_at if len(entry.maps) >= KEPT_MAPS and not entry.unfinished else 0)
        return catalog.reshape(turns.incarnation, active, read_only=read_only, marks=marks, keep_since=since)
    except BaseException:
        for number in set(turns.members) - known:  # an interrupt may come anywhere
            turns.drop(turns.members[number])
        raise


def apply(turns: Turns, entry: Entry) -> None:
    """The queue has the partitions that the catalog says; fences that are missing go up."""
    older = [SlotMap.unpack(old.version, old.owners) for old in entry.maps]
    numbers = [*entry.active, *entry.retired]
    for number in sorted(numbers):
        turns.add(number)
    changes = [Change(old, new, entry.marks.get(new.version, {})) for old, new in pairwise([*older, entry.map])]
    turns.resizing.begin(changes)
    turns.again = True
    turns.read_only = entry.read_only
    turns.shape(entry.map, entry.active, numbers, older[::-1])  # last: after an interrupt anywhere before it all of this is done again
