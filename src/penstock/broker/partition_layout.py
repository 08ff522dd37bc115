"""The width of a queue: which partitions it has, and how that changes.

Owns: `resized` and `drained` (which partitions there shall be), `change` (the record of it) and `apply` (the queue does as the catalog
says, now or at opening). Numbers are never reused: growing adds new ones, and a partition that is let go stays until it is drained.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.loop.catalog import Catalog
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.requests import PartitionsNotOpen
from penstock.loop.resize import SlotMapChange
from penstock.loop.turn import QueueEngine
from penstock.rules.catalog import QueueEntry
from penstock.rules.slots import SlotMap
from penstock.words.errors import InvalidRequest, QueueBusy

KEPT_MAPS = 32
"""Older slot maps that are kept at least: requests may be remembered under them."""


class PartitionLayout(NamedTuple):
    """The partitions that take items, and those an operator set read-only."""

    active: Sequence[int]
    read_only: Sequence[int]


def resized_layout(entry: QueueEntry, partitions: int) -> PartitionLayout:
    """So many partitions: the first of those there are, and new ones."""
    kept = entry.active[:partitions]
    new = range(entry.next_partition, entry.next_partition + partitions - len(kept))
    return PartitionLayout([*kept, *new], entry.read_only)


def layout_with_read_only(entry: QueueEntry, partition: int, read_only: bool) -> PartitionLayout:
    """Without a partition, whose slots go to the others; or with it again."""
    if partition not in (*entry.active, *entry.read_only):
        raise InvalidRequest(f"partition {partition} takes no items; those that do are {entry.active}")
    if not read_only:
        return PartitionLayout(sorted({*entry.active, partition}), [number for number in entry.read_only if number != partition])
    if partition in entry.read_only:
        return PartitionLayout(entry.active, entry.read_only)
    others = [number for number in entry.active if number != partition]
    return PartitionLayout(others or [entry.next_partition], [*entry.read_only, partition])


def record_layout(catalog: Catalog, turns: QueueEngine, choose: Callable[[QueueEntry], PartitionLayout], wall: int) -> QueueEntry:
    """Inside a turn: record the new shape. When anything stands in its way nothing is changed."""
    entry = catalog.get(turns.incarnation)
    active, read_only = choose(entry)
    failing = [turns.handles[number] for number in entry.active if turns.handles[number].error is not None]
    for member in failing:
        if member.number not in active:  # its slots would have to go, and nobody can say what it holds of them
            raise member.refusal
    if failing and {*active} <= {member.number for member in failing} and {*active} != {*entry.active}:
        raise failing[0].refusal  # slots would have to go to it, and it cannot take any
    for number in entry.active:
        if not turns.handles[number].fences_ready and turns.handles[number] not in failing:
            raise QueueBusy(f"partition {number} is still being prepared by an earlier resize; try again in a moment")
    known = {*entry.active, *entry.retired}
    try:
        _open_new(turns, [number for number in active if number not in known])
        marks = {}
        for number in entry.active:
            if turns.handles[number] not in failing:
                marks[number] = _mark(turns, turns.handles[number])
        since = _keep_since(turns, entry, wall)
        fixed = [member.number for member in failing]
        return catalog.reshape(turns.incarnation, active, read_only=read_only, marks=marks, keep_since=since, fixed=fixed)
    except PartitionsNotOpen:
        raise
    except BaseException:
        discard_new_partitions(turns, entry)  # an interrupt may come anywhere
        raise


def _open_new(turns: QueueEngine, numbers: Sequence[int]) -> None:
    """New partitions, open and doing as the others do; or NotYet, while they are being opened beside the turns."""
    new = [turns.add(number) for number in numbers]
    turns.partitions_to_add.update(numbers)
    for member in new:
        turns.request_open(member)
        if member.error is not None and not member.in_io:  # one that is slow is waited for
            raise member.refusal
    if not all(member.is_usable for member in new):
        raise PartitionsNotOpen
    for member in new:
        turns.apply_queue_settings(member, new=True)


def _mark(turns: QueueEngine, member: PartitionHandle) -> int:
    """Where a partition stands. It is made durable in every mode: the catalog, which is about to speak of it, is really synced."""
    turns.touch(member)
    member.usable_partition.make_durable()
    return member.usable_partition.committed.next_offset


def _keep_since(turns: QueueEngine, entry: QueueEntry, wall: int) -> int:
    """Older maps that were replaced before that time are not needed any more.

    Needed are those under which requests may be remembered: known to be so, or from before this opening and not too old. Some are kept
    whatever the date says, because it may be set. While a drop is unfinished, or a partition may lack fences, all are.
    """
    if entry.unfinished or any(turns.handles[number].error is not None for number in entry.active):
        return 0
    recent = wall - entry.options.policy.result_memory
    old = [one for one in entry.maps if one.version <= turns.opened_version]
    unknown = {one.version for one in old[-KEPT_MAPS:]} | {one.version for one in old if one.replaced_at >= recent}
    needed = [one.replaced_at for one in entry.maps if one.version in turns.produce_step.versions or one.version in unknown]
    return min(needed, default=wall + 1)


def discard_new_partitions(turns: QueueEngine, entry: QueueEntry) -> None:
    """New partitions of a reshape that is not to be after all."""
    for number in set(turns.handles) - {*entry.active, *entry.retired}:
        turns.remove(turns.handles[number])
    turns.partitions_to_add.clear()


def apply_layout(turns: QueueEngine, entry: QueueEntry) -> None:
    """The queue has the partitions that the catalog says; fences that are missing go up."""
    older = [SlotMap.unpack(old.version, old.owners) for old in entry.maps]
    turns.partitions_to_add.clear()
    turns.opened_version = turns.opened_version or entry.map.version
    numbers = [*entry.active, *entry.retired]
    for number in sorted(numbers):
        turns.add(number)
    known = {change.version: change for change in turns.resize_step.changes}
    maps = [*older, entry.map]
    changes = [known.get(new.version) or SlotMapChange(old, new, entry.marks.get(new.version, {})) for old, new in pairwise(maps)]
    turns.resize_step.set_changes(changes)
    turns.wants_turn = True
    turns.read_only = entry.read_only
    turns.set_partitions(
        entry.map, entry.active, numbers, older[::-1]
    )  # last: after an interrupt anywhere before it all of this is done again
