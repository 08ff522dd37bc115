"""Which partitions a queue has, and how that changes.

Owns: `resized_layout` and `layout_with_read_only` (compute a new layout), `record_layout` (writes it to the catalog)
and `apply_layout` (makes the queue follow the catalog, after a change or at opening). Partition numbers are never
reused: growing adds new numbers, and a retired partition stays until it is drained.
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
from penstock.rules.commands import Call
from penstock.rules.slots import SlotMap
from penstock.words.errors import InvalidRequest, QueueBusy

KEPT_MAPS = 32
"""At least so many older slot maps are kept."""


class PartitionLayout(NamedTuple):
    """The partitions that take new items, and those that an operator set read-only."""

    active: Sequence[int]
    read_only: Sequence[int]


def resized_layout(entry: QueueEntry, partitions: int) -> PartitionLayout:
    """A layout of so many partitions: the first active ones are kept, and new ones are added if needed."""
    kept = entry.active[:partitions]
    new = range(entry.next_partition, entry.next_partition + partitions - len(kept))
    return PartitionLayout([*kept, *new], entry.read_only)


def layout_with_read_only(entry: QueueEntry, partition: int, read_only: bool) -> PartitionLayout:
    """The layout after a partition is set read-only (its slots go to the others) or takes items again."""
    if partition >= entry.next_partition:
        raise InvalidRequest(f"queue {entry.name!r} has no partition {partition}; those that take items are {entry.active}")
    if partition not in (*entry.active, *entry.read_only):
        raise InvalidRequest(f"partition {partition} takes no items; those that do are {entry.active}")
    if not read_only:
        return PartitionLayout(sorted({*entry.active, partition}), [number for number in entry.read_only if number != partition])
    if partition in entry.read_only:
        return PartitionLayout(entry.active, entry.read_only)
    others = [number for number in entry.active if number != partition]
    return PartitionLayout(others or [entry.next_partition], [*entry.read_only, partition])


def record_layout(
    catalog: Catalog, engine: QueueEngine, choose: Callable[[QueueEntry], PartitionLayout], wall: int, call: Call | None = None
) -> QueueEntry:
    """Inside a turn: write the layout that `choose` gives to the catalog.

    Nothing is changed when it fails: QueueBusy while an earlier resize is unfinished, StorageFailed when a failing
    partition would lose slots or take all of them; PartitionsNotOpen while new partitions are being opened.
    """
    entry = catalog.get(engine.incarnation)
    if catalog.changed_by(call) is not None:
        return entry
    active, read_only = choose(entry)
    failing = [engine.handles[number] for number in entry.active if engine.handles[number].error is not None]
    for handle in failing:
        if handle.number not in active:  # its slots would move, but the keys that it holds are unknown
            raise handle.refusal
    if failing and {*active} <= {handle.number for handle in failing} and {*active} != {*entry.active}:
        raise failing[0].refusal  # every partition that could take the slots is failing
    for number in entry.active:
        if not engine.handles[number].fences_ready and engine.handles[number] not in failing:
            raise QueueBusy(f"partition {number} is still being prepared by an earlier resize; try again in a moment")
    known = {*entry.active, *entry.retired}
    try:
        _open_new(engine, [number for number in active if number not in known])
        marks = {}
        for number in entry.active:
            if engine.handles[number] not in failing:
                marks[number] = _mark(engine, engine.handles[number])
        since = _keep_since(engine, entry, wall)
        fixed = [handle.number for handle in failing]
        return catalog.reshape(engine.incarnation, active, read_only=read_only, marks=marks, keep_since=since, fixed=fixed, call=call)
    except PartitionsNotOpen:
        raise
    except BaseException:
        discard_new_partitions(engine, entry)  # also after an interrupt, which may come at any point
        raise


def _open_new(engine: QueueEngine, numbers: Sequence[int]) -> None:
    """Open new partitions and give them the queue's settings; PartitionsNotOpen while their opening is in I/O."""
    new = [engine.add(number) for number in numbers]
    engine.partitions_to_add.update(numbers)
    for handle in new:
        engine.request_open(handle)
        if handle.error is not None and not handle.in_io:  # a slow one may still open
            raise handle.refusal
    if not all(handle.is_usable for handle in new):
        raise PartitionsNotOpen
    for handle in new:
        engine.apply_queue_settings(handle, new=True)


def _mark(engine: QueueEngine, handle: PartitionHandle) -> int:
    """The next offset of a partition.

    Everything before it is made durable, whatever the queue's durability: the catalog record that names it is synced.
    """
    engine.touch(handle)
    handle.usable_partition.make_durable()
    return handle.usable_partition.committed.next_offset


def _keep_since(engine: QueueEngine, entry: QueueEntry, wall: int) -> int:
    """The time (wall) before which a slot map must have been replaced to be deleted.

    Earlier maps say which slots a partition had before and lost (`ResizeStep._departure_marks`): the newest KEPT_MAPS
    are kept whatever their time, because the wall clock may be set. All are kept while a published write is unfinished,
    whose chunks were divided by one of them, or a partition may lack fences.
    """
    if entry.unfinished or any(engine.handles[number].error is not None for number in entry.active):
        return 0
    return min((one.replaced_at for one in entry.maps[-KEPT_MAPS:]), default=wall + 1)


def discard_new_partitions(engine: QueueEngine, entry: QueueEntry) -> None:
    """Remove the new partitions of a resize that failed."""
    for number in set(engine.handles) - {*entry.active, *entry.retired}:
        engine.remove(engine.handles[number])
    engine.partitions_to_add.clear()


def apply_layout(engine: QueueEngine, entry: QueueEntry) -> None:
    """Give the queue the partitions that the catalog names, and set the fences that are missing."""
    older = [SlotMap.unpack(old.version, old.owners) for old in entry.maps]
    engine.partitions_to_add.clear()
    numbers = [*entry.active, *entry.retired]
    for number in sorted(numbers):
        engine.add(number)
    known = {change.version: change for change in engine.resize_step.changes}
    maps = [*older, entry.map]
    changes = [known.get(new.version) or SlotMapChange(old, new, entry.marks.get(new.version, {})) for old, new in pairwise(maps)]
    engine.resize_step.set_changes(changes)
    engine.wants_turn = True
    engine.read_only = entry.read_only
    engine.set_partitions(
        entry.map, entry.active, numbers, older[::-1]
    )  # last: after an interrupt anywhere before it all of this is done again
