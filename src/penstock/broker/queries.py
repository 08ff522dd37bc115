"""Queries about one queue.

Owns: `QUERY_HANDLERS`, the function for each kind of query. A handler takes a `QueueView` (the queue's
`QueueEngine`, inside a turn, or a `SnapshotQueue`) and the query, and gives plain data (reports.py).
Counts are exact at any depth, and no item is read that the query does not ask for.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any

import msgspec

from penstock.loop.item_cache import Items
from penstock.loop.partition import Partition
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_reader import PartitionView, QueueView
from penstock.loop.retention import buried_to_drop, mean_bytes
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    ExplainItem,
    FindItems,
    FindLeases,
    FindOffsets,
    ListCursors,
    ListHeldKeys,
    ListItems,
    ListQueues,
    Offsets,
    Operation,
    Page,
    ReadItems,
    ReadStats,
    TraceItem,
)
from penstock.reports import (
    FenceProgress,
    FoundItems,
    HeldKey,
    ItemExplanation,
    ItemLease,
    ItemTrace,
    ListedItemData,
    PartitionStats,
    QueueDescription,
    QueueStats,
    describe_queue,
)
from penstock.rules.catalog import CatalogState
from penstock.rules.item_states import ItemState
from penstock.rules.keys import KeyLine
from penstock.rules.leases import LiveLease
from penstock.rules.outbox import moved_runs, moved_to
from penstock.rules.restore import check_not_in_hole, no_item_error
from penstock.rules.runs import RunSet, count, first_of, pairs
from penstock.rules.runs import offsets as offsets_in
from penstock.rules.state import Counts, State
from penstock.rules.summary import Summary, moved_or_lost
from penstock.words import origin
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, PenstockError, StorageFailed
from penstock.words.ids import format_id
from penstock.words.limits import MAX_BATCH_BYTES, MIB

WALL = 1_000_000_000_000_000
"""Tells elapsed time from wall time: elapsed times stay below it (31 years), dates are above it (2001)."""
HOT_KEY_ITEMS = 1_000
"""A key for which at least so many items wait is worth a warning."""
MAX_KEYS_READ = 100_000
"""How many keys of a partition are looked at for that warning."""
FIND_ITEMS, FIND_BYTES = 10_000, 8 * MIB
"""How much one step of a scan reads, about: other requests of the queue wait for it."""

# -- counts ------------------------------------------------------------------------------------------


def list_queues(catalog: CatalogState, query: ListQueues) -> list[QueueDescription]:
    """The queues whose names begin with the prefix (and with one of the prefixes) and come after `after`, by name."""
    found = [entry for name, entry in sorted(catalog.names.items()) if name.startswith(query.prefix) and name > query.after]
    if query.prefixes is not None:
        found = [entry for entry in found if entry.name.startswith(tuple(query.prefixes))]
    return [describe_queue(entry) for entry in found[: query.limit]]


def stats(queue: QueueView, query: ReadStats) -> QueueStats:
    """The counts of a queue. Waiting callers and the holder are known only in the owner, not in a snapshot."""
    waiting_consumers, waiting_producers, holder = 0, 0, ""
    if isinstance(queue, QueueEngine):
        waiting_consumers = sum(not request.cancelled for request in queue.lease_step.waiting)
        waiting_producers, holder = len(queue.produce_step.waiting), queue.lease_step.active_holder
    partitions = [_partition_stats(queue, handle) for handle in queue.handles.values()]
    totals = {
        name: sum(getattr(one, name) for one in partitions)
        for name in ("ready", "scheduled", "leased", "completed", "buried", "moving", "produced", "buried_dropped", "cancelled")
    }
    consumers = _leased_by_consumer(queue)
    fences = ((handle.number, fence) for handle in queue.usable() for fence in handle.state.keys.fences)
    return QueueStats(
        name=queue.name,
        partitions=partitions,
        waiting_consumers=waiting_consumers,
        waiting_producers=waiting_producers,
        consumers=consumers,
        resizing=[FenceProgress(number, fence.source, len(fence.slots or ()), len(fence.keys)) for number, fence in fences],
        transfers=sum(len(line) for handle in queue.usable() for line in handle.state.outbox.values()),
        warnings=[
            *_warnings(queue.is_dead_queue, partitions, waiting_consumers or bool(holder), consumers),
            *_space_warnings(queue),
            *_hot_key_warning(queue),
        ],
        holder=holder,
        **totals,
    )


def _partition_stats(queue: QueueView, handle: PartitionView) -> PartitionStats:
    partition = handle.readable_partition
    if handle.closed and handle.summary is not None:
        return _closed_stats(queue, handle, handle.summary)
    if partition is None:
        return PartitionStats(handle.number, "slow" if handle.slow and handle.in_io else "failing", error=str(handle.error))
    state = partition.state
    counts = state.counts
    now, segments = partition.now().elapsed, partition.log.segments()
    to_drop, drop_in = buried_to_drop(segments, state, now)
    return PartitionStats(
        handle.number,
        _status(queue, handle.number, counts) if handle.error is None else "failing",
        *counts._replace(completed=counts.completed - moved_or_lost(state)),
        state.produced,
        len(state.keys.by_key),
        _oldest_ready_seconds(state, now),
        sum(facts.size_bytes for facts in segments),
        state.paused_lease,
        state.paused_produce,
        lost=len(state.lost),
        buried_dropped=state.buried_dropped,
        buried_to_drop=to_drop,
        buried_drop_seconds=drop_in / SECOND,
        error=str(handle.error or ""),
        notes=[*partition.log.findings, *(f"damage: {gap.why} ({gap.where})" for gap in partition.gaps)],
    )


def _closed_stats(queue: QueueView, handle: PartitionView, known: Summary) -> PartitionStats:
    """The counts of a closed partition, from its summary. Its items grow older all the same."""
    oldest = 0
    if known.ready and isinstance(queue, QueueEngine) and isinstance(handle, PartitionHandle):  # a snapshot closes none
        now = handle.elapsed_at(queue.clock.read().elapsed)
        oldest = max((now - head.since for head in known.heads), default=0)
    return PartitionStats(
        handle.number,
        _status(queue, handle.number, known.counts),
        *known.counts._replace(completed=known.counts.completed - known.gone),
        known.next_offset if known.produced < 0 else known.produced,
        known.busy_keys,
        max(0, oldest) / SECOND,
        known.size_bytes,
        paused_lease=known.paused_lease,
        paused_produce=known.paused_produce,
        lost=known.lost,
        buried_dropped=known.buried_dropped,
    )


def _status(queue: QueueView, number: int, counts: Counts) -> str:
    if number in queue.active:
        return "active"
    return "draining" if counts.ready or counts.scheduled or counts.leased or counts.moving else "drained"


def _oldest_ready_seconds(state: State, now: int) -> float:
    """How long the oldest item at the front of a lane or of a free key line has been ready."""
    times = [lane[0].ready_at for lane in state.lanes.lanes if lane]
    for heads in state.keys.free_heads:
        if heads:
            line = state.keys.by_key.get(heads[0][2])
            if isinstance(line, KeyLine) and line.waiting:
                times.append(line.waiting.first.ready_at)
    return max(0, now - min(times)) / SECOND if times and state.ready else 0.0


def _leased_by_consumer(queue: QueueView) -> dict[str, int]:
    found: dict[str, int] = {}
    for handle in queue.usable():
        for lease in handle.state.leases.live.values():
            found[lease.consumer] = found.get(lease.consumer, 0) + lease.count
    return dict(sorted(found.items()))


def _hot_key_warning(queue: QueueView) -> list[str]:
    """A warning about the key with the most waiting items, if it has many. The key itself is data, and is not told."""
    most, first = 0, ""
    for handle in queue.handles.values():
        partition = handle.readable_partition
        if partition is None or partition.state.passed_over.total < HOT_KEY_ITEMS:
            continue
        for line in islice([*partition.state.keys.by_key.values()], MAX_KEYS_READ):
            if isinstance(line, KeyLine) and line.waiting.items > most:
                most, first = line.waiting.items, format_id(handle.number, line.waiting.first.start)
    if most < HOT_KEY_ITEMS:
        return []
    return [f"{most} items of one key wait for each other (the first is {first}): they are handled one at a time; see the held keys"]


def _space_warnings(queue: QueueView) -> Iterator[str]:
    """Warnings about partitions that have refused new items because their disk is almost full, and still would."""
    for handle in queue.handles.values():
        partition = handle.readable_partition
        if isinstance(partition, Partition) and partition.free_space.refusal and not partition.free_space.has_room():
            yield f"partition {handle.number} takes no new items: {partition.free_space.refusal}"


def _items(count: int) -> str:
    return "1 item is" if count == 1 else f"{count} items are"


def _warnings(is_dead_queue: bool, partitions: Sequence[PartitionStats], waiting: int, consumers: Mapping[str, int]) -> Iterator[str]:
    ready = sum(one.ready for one in partitions)
    if ready and is_dead_queue:
        yield f"{ready} dead {'letter waits' if ready == 1 else 'letters wait'} here; list them, then redrive or clear them"
    elif ready and not waiting and not consumers:
        yield f"{_items(ready)} ready and no consumer is there; start one"
    buried, dropping = sum(one.buried for one in partitions), [one for one in partitions if one.buried_to_drop]
    if buried and not dropping:
        yield f"{_items(buried)} buried here; list them, then redrive or clear them"
    if dropping:
        items, wait = sum(one.buried_to_drop for one in dropping), min(one.buried_drop_seconds for one in dropping)
        when = f"in {wait / 60:.0f} minutes" if wait >= 60 else "within a minute"
        yield f"retention will drop {items} buried items, the first {when}; redrive or clear them, or keep items for longer"
    for one in partitions:
        if one.error:
            yield f"partition {one.partition} is failing: {one.error}"
        if one.lost:
            yield f"{one.lost} items of partition {one.partition} were lost to damage; run verify to see which"
        if one.paused_lease and one.ready:
            yield f"leasing from partition {one.partition} is paused while {_items(one.ready)} ready; resume it"
        for note in one.notes:
            damaged = note.startswith("damage")
            yield (
                f"partition {one.partition}: {note}; run verify, then repair"
                if damaged
                else f"partition {one.partition}, when opened: {note}"
            )


# -- one item, held keys -----------------------------------------------------------------------------


def _handle_of(queue: QueueView, partition: int) -> PartitionView:
    handle = queue.handles.get(partition)
    if handle is None:
        raise InvalidRequest(f"queue {queue.name!r} has no partition {partition}; the id is of another queue")
    return handle


def explain(queue: QueueView, query: ExplainItem) -> ItemExplanation:
    """Why an item is not running in this queue."""
    partition, offset = query.partition, query.offset
    handle = _handle_of(queue, partition)
    name = format_id(partition, offset)
    if not handle.is_usable:
        return ItemExplanation(name, queue.name, "unknown", f"its partition is failing: {handle.error}")
    queue.touch(handle)
    found = handle.usable_partition.explain(offset)
    if found.moved_to is not None:
        return ItemExplanation(name, queue.name, "moved", "moved to another partition", moved_to=found.moved_to)
    now = handle.usable_partition.now()
    ready_in = None
    if found.until:
        clock = now.wall if found.until > WALL else now.elapsed
        ready_in = max(0, found.until - clock) / SECOND
    why = found.why
    if found.waits_for is not None and not queue.handles[found.waits_for].is_usable:
        why += f", which is failing: {queue.handles[found.waits_for].error}"
    held_by = "" if found.held_by is None else format_id(partition, found.held_by)
    return ItemExplanation(name, queue.name, found.state.value, why, found.attempts, found.consumer, ready_in, held_by, found.reason)


def trace(queue: QueueView, query: TraceItem) -> ItemTrace:
    """The position that an item came from, and the one that it was moved to."""
    offset, handle = query.offset, _handle_of(queue, query.partition)
    state = handle.state
    if state.state_of(offset) is None:
        raise no_item_error(state, query.partition, offset)
    came_from = None
    if offset not in state.dropped and offset not in state.lost:
        queue.touch(handle)
        items = handle.usable_partition.items([offset, offset + 1])
        packed = items[0].batch.origins[0] if items and items[0].batch.origins is not None else None
        if packed is not None:
            known = origin.decode(packed)
            came_from = (known.incarnation, *known.partition_and_offset)
    return ItemTrace(came_from, moved_to(state, offset))


def find_leases(queue: QueueView, query: FindLeases) -> list[ItemLease]:
    """The lease that holds each item now."""
    found: list[ItemLease] = []
    for partition, chosen in query.items.items():
        handle = queue.handles.get(partition)
        if handle is None or not handle.is_usable:
            found += [ItemLease(partition, offset, "unknown" if handle is None else "failing") for offset in chosen]
            continue
        state, leases = handle.state, _leases_of(handle.state, chosen)
        for offset in chosen:
            item_state, lease = state.state_of(offset), leases.get(offset)
            found.append(ItemLease(partition, offset, "unknown" if item_state is None else item_state.value, lease.number if lease else 0))
    return found


def _leases_of(state: State, offsets: Collection[int]) -> dict[int, LiveLease]:
    """The leases that hold these items, by offset; items that are not leased are left out."""
    wanted = sorted(offset for offset in set(offsets) if state.state_of(offset) is ItemState.LEASED)
    found: dict[int, LiveLease] = {}
    for lease in state.leases.live.values():
        if len(found) == len(wanted):
            break
        for start, stop in pairs(lease.runs()):
            found.update(dict.fromkeys(wanted[bisect_left(wanted, start) : bisect_left(wanted, stop)], lease))
    return found


def held_keys(queue: QueueView, query: ListHeldKeys) -> list[HeldKey]:
    """The keys that are not free, with the item that holds each or waits first. Those with most waiting items first."""
    found: list[HeldKey] = []
    for handle, key, line in _lines_by_waiting(queue, query.limit):
        if handle.state.keys.by_key.get(key) is not line:  # freed by damage that was found just now
            continue
        queue.touch(handle)
        held = _held_key(handle, key, line if isinstance(line, KeyLine) else KeyLine(line))
        if held is not None:
            found.append(held)
    return found


def _lines_by_waiting(queue: QueueView, limit: int) -> list[tuple[PartitionView, int, int | KeyLine]]:
    lines = ((handle, key, line) for handle in queue.usable() for key, line in handle.state.keys.by_key.items())
    return nlargest(limit, lines, key=lambda found: found[2].waiting.items if isinstance(found[2], KeyLine) else 0)


def _held_key(handle: PartitionView, key: int, line: KeyLine) -> HeldKey | None:
    """One held key; None when its item cannot be read any more."""
    state = handle.state
    waiting = line.waiting.items
    if line.lease:
        lease = state.leases.live[line.lease]
        why, offset = "leased", next(other for other, (_, its) in lease.open_items.items() if its == key)
    elif line.backing_off is not None:
        why, offset = "backing off", line.backing_off[0]
    elif line.parked:
        why, offset = "parked", line.parked[0]
    else:
        head = line.waiting.first
        why, offset = ("fenced" if head.position >= state.keys.fences.waits_from(key) else "waiting"), head.start
    if offset in state.dropped or offset in state.lost:
        return None
    items = handle.usable_partition.items([offset, offset + 1])
    if not items or items[0].batch.keys is None:
        return None
    return HeldKey(items[0].batch.keys[0] or b"", handle.number, why, format_id(handle.number, offset), waiting)


# -- lists -------------------------------------------------------------------------------------------


def items(queue: QueueView, query: ListItems) -> list[ListedItemData]:
    """The items in the given states, by partition and offset."""
    limit = query.limit
    wanted = _wanted_states(query.states)
    found: list[ListedItemData] = []
    for handle, start in _partitions_after(queue, query.after):
        before = len(found)
        while len(found) == before and (there := _in_states(handle.state, wanted, start)):  # again while all items read are lost
            runs = first_of(there.runs, _bounded(handle, limit - len(found)))
            leases = _leases_of(handle.state, offsets_in(runs)) if handle.state.leases.live else {}
            for items in handle.usable_partition.items(runs):
                found += _listed(handle, items, range(len(items.batch)), leases)
            start = runs[-1]
        if len(found) >= limit or (len(found) > before and _in_states(handle.state, wanted, start)):
            break  # the next page continues here, also when damage or large items made this page short
    return found


def find_items(queue: QueueView, query: FindItems) -> FoundItems:
    """One step of a scan for items by key and reference. StorageFailed at its end when a partition cannot be read."""
    if query.key is None and query.reference is None:
        raise InvalidRequest("neither a key nor a reference is given; give one of them, or list the items")
    left, wanted = FIND_ITEMS, _wanted_states(query.states)
    found: list[ListedItemData] = []
    for handle, start in _partitions_after(queue, query.after):
        while there := _in_states(handle.state, wanted, start):
            runs = first_of(there.runs, _bounded(handle, left, FIND_BYTES))
            found += _matching(handle, runs, query)
            left, start = left - count(runs), runs[-1]
            if len(found) >= query.limit:
                del found[query.limit :]
                return FoundItems(found, (found[-1].partition, found[-1].offset))
            if left <= 0 or count(runs) == _bounded(handle, FIND_ITEMS, FIND_BYTES):
                return FoundItems(found, (handle.number, start - 1))
    broken = next((handle for handle in queue.handles.values() if not handle.is_usable), None)
    if broken is not None:
        raise StorageFailed(f"partition {broken.number} is failing and cannot be searched; try again in a moment")
    return FoundItems(found)


def _matching(handle: PartitionView, runs: list[int], query: FindItems) -> Iterator[ListedItemData]:
    """Those of these items that have the key and the reference of the query."""
    for items in handle.usable_partition.items(runs):
        indexes: Sequence[int] = range(len(items.batch))
        for wanted, column in ((query.key, items.batch.keys), (query.reference, items.batch.references)):
            if wanted is not None:
                indexes = [index for index in indexes if column[index] == wanted] if column is not None else []
        offsets = [items.start + index for index in indexes]
        leases = _leases_of(handle.state, offsets) if offsets and handle.state.leases.live else {}
        for listed in _listed(handle, items, indexes, leases):
            yield msgspec.structs.replace(listed, batch=listed.batch.slice(listed.index, listed.index + 1), index=0)


def _wanted_states(names: Sequence[str]) -> list[ItemState]:
    """The states of these names; none is all."""
    return [ItemState(name) for name in names] if names else list(ItemState)


def _partitions_after(queue: QueueView, after: tuple[int, int] | None) -> Iterator[tuple[PartitionView, int]]:
    """The usable partitions in which a page goes on after an item, by number, each with the offset to begin at."""
    for handle in sorted(queue.usable(), key=lambda one: one.number):
        if after is None or handle.number >= after[0]:
            queue.touch(handle)
            yield handle, after[1] + 1 if after is not None and handle.number == after[0] else 0


def _bounded(handle: PartitionView, items: int, size_bytes: int = MAX_BATCH_BYTES) -> int:
    """So many items, or fewer if they would exceed a size, by default that of a batch."""
    return max(1, min(items, size_bytes // max(1, mean_bytes(handle.usable_partition.log.segments(), handle.state))))


def _in_states(state: State, wanted: Sequence[ItemState], start: int) -> RunSet:
    found = RunSet()
    for item_state in wanted:
        found.add_all(state.runs_in(item_state, start))
    for absent in (state.dropped.runs, state.lost.runs, moved_runs(state)):
        found.remove_all(absent)
    return found


def _listed(handle: PartitionView, items: Items, indexes: Iterable[int], leases: Mapping[int, LiveLease]) -> Iterator[ListedItemData]:
    state, now, ttls = handle.state, handle.usable_partition.now(), items.batch.ttls
    for index in indexes:
        offset = items.start + index
        item_state = state.state_of(offset)
        assert item_state is not None
        burial, failure = state.burials.get(offset), state.failures.get(offset)
        attempts = burial.attempts if burial else state.attempts(offset) + (item_state is ItemState.LEASED)
        reason = burial.reason if burial else failure.reason if failure else ""
        ttl, lease = (ttls[index] if ttls else 0) or state.policy.ttl, leases.get(offset)
        yield ListedItemData(
            handle.number,
            offset,
            item_state.value,
            items.batch,
            index,
            items.produced_at,
            attempts,
            reason,
            now.wall + lease.deadline - now.elapsed if lease else 0,
            items.produced_at + ttl if ttl else 0,
            burial.buried_at if burial else 0,
        )


# -- reading -----------------------------------------------------------------------------------------


def offsets(queue: QueueView, query: FindOffsets) -> Offsets:
    """For each usable partition the oldest retained offset, the next one, or the first at a time or later."""
    if query.at == "oldest":
        return {handle.number: handle.state.dropped.first_missing(0) for handle in queue.usable()}
    if query.at == "newest":
        return {handle.number: handle.state.next_offset for handle in queue.usable()}
    return {handle.number: handle.usable_partition.offset_at(query.at) for handle in queue.usable()}


def cursors(queue: QueueView, query: ListCursors) -> dict[str, Offsets]:
    """The offsets of each cursor, by partition."""
    found: dict[str, Offsets] = {}
    for handle in queue.usable():
        for name, offset in handle.state.cursors.items():
            found.setdefault(name, {})[handle.number] = offset
    return found


def read(queue: QueueView, query: ReadItems) -> Page:
    """Retained items from the given offsets on, a share from each partition.

    Items that another partition of the queue forwarded are left out: they are read in that partition.
    StorageFailed when nothing is found and a partition cannot be read.
    """
    offsets, limit = query.start, query.limit
    found: list[tuple[int, Items]] = []
    failure: PenstockError | None = None
    after = dict(offsets)
    unread = [handle for handle in queue.usable() if handle.state.next_offset > offsets.get(handle.number, 0)]
    for index, handle in enumerate(unread):
        share = _bounded(handle, max(1, -(-limit // (len(unread) - index))))
        start = offsets.get(handle.number, 0)
        check_not_in_hole(handle.state, start, handle.number)
        queue.touch(handle)
        try:
            items, after[handle.number] = handle.usable_partition.read_retained(start, share)
        except PenstockError as error:
            failure = failure or error
            continue
        for part in items:
            found += [(handle.number, kept) for kept in _not_forwarded(queue, part)]
            limit -= len(part.batch)
        if limit <= 0:
            break
    if not found and after == offsets:  # the end, unless a partition cannot be read
        if failure is not None:
            raise failure
        for broken in queue.handles.values():
            if not broken.is_usable:
                raise StorageFailed(f"partition {broken.number} is failing and cannot be read; try again in a moment")
    return Page(found, after)


def _not_forwarded(queue: QueueView, items: Items) -> list[Items]:
    """The items without those that another partition of this queue forwarded."""
    if items.batch.origins is None:
        return [items]
    kept = RunSet()
    for index, packed in enumerate(items.batch.origins):
        known = origin.decode(packed) if packed is not None else None
        if known is None or not (known.forwarded and known.incarnation == queue.incarnation):
            kept.add(index, index + 1)
    return [Items(items.start + a, items.batch.slice(a, b), items.produced_at) for a, b in pairs(kept.runs)]


QUERY_HANDLERS: dict[type[Operation[Any]], Callable[[Any, Any], Any]] = {
    ReadStats: stats,
    ExplainItem: explain,
    TraceItem: trace,
    ListHeldKeys: held_keys,
    ListItems: items,
    FindItems: find_items,
    FindLeases: find_leases,
    FindOffsets: offsets,
    ListCursors: cursors,
    ReadItems: read,
}
"""Kind of query → its handler."""
