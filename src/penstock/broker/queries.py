"""Queries answered for one queue: counted exactly, at any depth, without touching an item that was not asked for.

Owns: `QUERY_HANDLERS`, the function that answers each kind of query, and `metrics`. Every function takes a queue that can be looked at (`QueueView`:
its `QueueEngine`, inside a turn, or one that is only read, snapshot.py) and the query. What it answers is plain data (reports.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.loop.item_cache import Items
from penstock.loop.loop import Loop
from penstock.loop.partition_reader import PartitionView, QueueView
from penstock.loop.retention import buried_to_drop, mean_bytes
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    ExplainItem,
    FindOffsets,
    ListCursors,
    ListHeldKeys,
    ListItems,
    Offsets,
    Operation,
    Page,
    ReadItems,
    ReadStats,
    TraceItem,
)
from penstock.reports import (
    FenceProgress,
    HeldKey,
    ItemExplanation,
    ItemTrace,
    Latency,
    ListedItemData,
    PartitionStats,
    QueueMetrics,
    QueueStats,
)
from penstock.rules.item_states import ItemState
from penstock.rules.keys import KeyLine
from penstock.rules.outbox import moved_runs, moved_to
from penstock.rules.runs import RunSet, first_of, pairs
from penstock.rules.state import State
from penstock.rules.summary import Summary, moved_or_lost
from penstock.words import origin
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, PenstockError, StorageFailed
from penstock.words.ids import format_id
from penstock.words.limits import MAX_BATCH_BYTES

WALL = 1_000_000_000_000_000
"""No elapsed time comes so far (31 years), and no date lies before it (2001)."""

# -- counts ------------------------------------------------------------------------------------------


def stats(turns: QueueView, query: ReadStats) -> QueueStats:
    """The counts of a queue. Who waits for what is known only where it is at work."""
    waiting_consumers, waiting_producers, holder = 0, 0, ""
    if isinstance(turns, QueueEngine):
        waiting_consumers = sum(not request.cancelled for request in turns.lease_step.waiting)
        waiting_producers, holder = len(turns.produce_step.waiting), turns.lease_step.active_holder
    partitions = [_partition(turns, member) for member in turns.handles.values()]
    totals = {
        name: sum(getattr(one, name) for one in partitions)
        for name in ("ready", "scheduled", "leased", "completed", "buried", "moving", "produced", "buried_dropped")
    }
    consumers = _consumers(turns)
    fences = ((member.number, fence) for member in turns.usable() for fence in member.state.keys.fences)
    return QueueStats(
        name=turns.name,
        partitions=partitions,
        waiting_consumers=waiting_consumers,
        waiting_producers=waiting_producers,
        consumers=consumers,
        resizing=[FenceProgress(number, fence.source, len(fence.slots or ()), len(fence.keys)) for number, fence in fences],
        transfers=sum(len(line) for member in turns.usable() for line in member.state.outbox.values()),
        warnings=list(_warnings(partitions, waiting_consumers or bool(holder), consumers)),
        holder=holder,
        **totals,
    )


def _partition(turns: QueueView, member: PartitionView) -> PartitionStats:
    partition = member.readable_partition
    if member.closed and member.summary is not None:
        return _closed(turns, member.number, member.summary)
    if partition is None:
        return PartitionStats(member.number, "slow" if member.slow else "failing", error=str(member.error))
    state = partition.state
    counts = state.counts
    status = "active" if member.error is None else "failing"
    if member.number not in turns.active and member.error is None:
        status = "drained" if counts.ready + counts.scheduled + counts.leased + counts.moving == 0 else "draining"
    now, segments = partition.now().elapsed, partition.log.segments()
    to_drop, drop_in = buried_to_drop(segments, state, now)
    return PartitionStats(
        member.number,
        status,
        *counts._replace(completed=counts.completed - moved_or_lost(state)),
        state.next_offset,
        len(state.keys.by_key),
        _oldest(state, now),
        sum(facts.size_bytes for facts in segments),
        state.paused_lease,
        state.paused_produce,
        lost=len(state.lost),
        buried_dropped=state.buried_dropped,
        buried_to_drop=to_drop,
        buried_drop_seconds=drop_in / SECOND,
        error=str(member.error or ""),
        notes=[*partition.log.findings, *(f"damage: {gap.why} ({gap.where})" for gap in partition.gaps)],
    )


def _closed(turns: QueueView, number: int, known: Summary) -> PartitionStats:
    """A partition that nobody needs open, as it was when it was closed."""
    counts = known.counts
    status = "active"
    if number not in turns.active:
        status = "drained" if counts.ready + counts.scheduled + counts.leased + counts.moving == 0 else "draining"
    return PartitionStats(
        number,
        status,
        *counts._replace(completed=counts.completed - known.gone),
        known.next_offset,
        known.busy_keys,
        size_bytes=known.size_bytes,
        paused_lease=known.paused_lease,
        paused_produce=known.paused_produce,
        lost=known.lost,
        buried_dropped=known.buried_dropped,
    )


def _oldest(state: State, now: int) -> float:
    """How long the item at the front of a lane or a line has been ready; what waits behind a held key does not count."""
    times = [lane[0].ready_at for lane in state.lanes.lanes if lane]
    for heads in state.keys.free_heads:
        if heads:
            line = state.keys.by_key.get(heads[0][2])
            if isinstance(line, KeyLine) and line.waiting:
                times.append(line.waiting.first.ready_at)
    return max(0, now - min(times)) / SECOND if times and state.ready else 0.0


def _consumers(turns: QueueView) -> dict[str, int]:
    found: dict[str, int] = {}
    for member in turns.usable():
        for grant in member.state.leases.live.values():
            found[grant.consumer] = found.get(grant.consumer, 0) + grant.count
    return dict(sorted(found.items()))


def _warnings(partitions: Sequence[PartitionStats], waiting: int, consumers: Mapping[str, int]) -> Iterator[str]:
    ready = sum(one.ready for one in partitions)
    if ready and not waiting and not consumers:
        yield f"{ready} items are ready and no consumer is there; start one"
    going = [one for one in partitions if one.buried_to_drop]
    if going:
        items, wait = sum(one.buried_to_drop for one in going), min(one.buried_drop_seconds for one in going)
        when = f"in {wait / 60:.0f} minutes" if wait >= 60 else "within a minute"
        yield f"retention is to drop {items} buried items, the first {when}; redrive or clear them, or keep items for longer"
    for one in partitions:
        if one.error:
            yield f"partition {one.partition} is failing: {one.error}"
        if one.lost:
            yield f"{one.lost} items of partition {one.partition} were lost to damage; run verify to see which"
        if one.paused_lease and one.ready:
            yield f"leasing from partition {one.partition} is paused while {one.ready} items are ready; resume it"
        for note in one.notes:
            if note.startswith("damage"):
                yield f"partition {one.partition}: {note}; run verify, then repair"


# -- why ---------------------------------------------------------------------------------------------


def _member(turns: QueueView, partition: int) -> PartitionView:
    member = turns.handles.get(partition)
    if member is None:
        raise InvalidRequest(f"queue {turns.name!r} has no partition {partition}; the id is of another queue")
    return member


def explain(turns: QueueView, query: ExplainItem) -> ItemExplanation:
    """Why an item is not running here."""
    partition, offset = query.partition, query.offset
    member = _member(turns, partition)
    name = format_id(partition, offset)
    if not member.is_usable:
        return ItemExplanation(name, turns.name, "unknown", f"its partition is failing: {member.error}")
    turns.touch(member)
    found = member.usable_partition.explain(offset)
    if found.moved_to is not None:
        return ItemExplanation(name, turns.name, "moved", "moved to another partition", moved_to=found.moved_to)
    now = member.usable_partition.now()
    ready_in = None
    if found.until:
        clock = now.wall if found.until > WALL else now.elapsed
        ready_in = max(0, found.until - clock) / SECOND
    why = found.why
    if found.waits_for is not None and not turns.handles[found.waits_for].is_usable:
        why += f", which is failing: {turns.handles[found.waits_for].error}"
    held_by = "" if found.held_by is None else format_id(partition, found.held_by)
    return ItemExplanation(name, turns.name, found.state.value, why, found.attempts, found.consumer, ready_in, held_by, found.reason)


def trace(turns: QueueView, query: TraceItem) -> ItemTrace:
    """Where an item was before and where it went from here."""
    offset, member = query.offset, _member(turns, query.partition)
    state = member.state
    if not 0 <= offset < state.next_offset:
        raise InvalidRequest(f"there is no item at offset {offset}; the next to be given is {state.next_offset}")
    came_from = None
    if offset not in state.dropped and offset not in state.lost:
        turns.touch(member)
        items = member.usable_partition.items([offset, offset + 1])
        packed = items[0].batch.origins[0] if items and items[0].batch.origins is not None else None
        if packed is not None:
            known = origin.decode(packed)
            came_from = (known.incarnation, *known.partition_and_offset)
    return ItemTrace(came_from, moved_to(state, offset))


def held_keys(turns: QueueView, query: ListHeldKeys) -> list[HeldKey]:
    """Keys that are not free, and what holds them."""
    found: list[HeldKey] = []
    for member in turns.usable():
        turns.touch(member)
        for key, line in list(member.state.keys.by_key.items()):
            if len(found) >= query.limit:
                return found
            if member.state.keys.by_key.get(key) is not line:  # damage that was met just now has freed it
                continue
            held = _held(member, key, line if isinstance(line, KeyLine) else KeyLine(line))
            if held is not None:
                found.append(held)
    return found


def _held(member: PartitionView, key: int, line: KeyLine) -> HeldKey | None:
    state = member.state
    waiting = sum(run.stop - run.start for run in line.waiting)
    if line.lease:
        grant = state.leases.live[line.lease]
        why, offset = "leased", next(other for other, (_, its) in grant.open_items.items() if its == key)
    elif line.backing_off is not None:
        why, offset = "backing off", line.backing_off[0]
    elif line.parked:
        why, offset = "parked", line.parked[0]
    else:
        head = line.waiting.first
        why, offset = ("fenced" if head.position >= state.keys.fences.waits_from(key) else "waiting"), head.start
    if offset in state.dropped or offset in state.lost:
        return None
    items = member.usable_partition.items([offset, offset + 1])
    if not items or items[0].batch.keys is None:
        return None
    return HeldKey(items[0].batch.keys[0] or b"", member.number, why, format_id(member.number, offset), waiting)


# -- lists -------------------------------------------------------------------------------------------


def items(turns: QueueView, query: ListItems) -> list[ListedItemData]:
    """Items in some states, by partition and offset."""
    after, limit = query.after, query.limit
    wanted = [ItemState(state) for state in query.states] if query.states else list(ItemState)
    found: list[ListedItemData] = []
    for member in sorted(turns.usable(), key=lambda one: one.number):
        start = 0
        if after is not None:
            if member.number < after[0]:
                continue
            start = after[1] + 1 if member.number == after[0] else 0
        turns.touch(member)
        before = len(found)
        while len(found) == before and (there := _in_states(member.state, wanted, start)):  # on, behind what turns out to be lost
            runs = first_of(there.runs, _bounded(member, limit - len(found)))
            for items in member.usable_partition.items(runs):
                found += _listed(member, items)
            start = runs[-1]
        if len(found) >= limit or (len(found) > before and _in_states(member.state, wanted, start)):
            break  # the next page goes on here, also where damage or the size of the items made this one short
    return found


def _bounded(member: PartitionView, items: int) -> int:
    """So many items, or as many as make a reply that can be held."""
    return max(1, min(items, MAX_BATCH_BYTES // max(1, mean_bytes(member.usable_partition.log.segments(), member.state))))


def _in_states(state: State, wanted: Sequence[ItemState], start: int) -> RunSet:
    found = RunSet()
    for life in wanted:
        found.add_all(state.runs_in(life, start))
    for absent in (state.dropped.runs, state.lost.runs, moved_runs(state)):
        found.remove_all(absent)
    return found


def _listed(member: PartitionView, items: Items) -> Iterator[ListedItemData]:
    state = member.state
    for index in range(len(items.batch)):
        offset = items.start + index
        life = state.state_of(offset)
        assert life is not None
        burial, failure = state.burials.get(offset), state.failures.get(offset)
        attempts = burial.attempts if burial else state.attempts(offset) + (life is ItemState.LEASED)
        reason = burial.reason if burial else failure.reason if failure else ""
        yield ListedItemData(member.number, offset, life.value, items.batch, index, items.produced_at, attempts, reason)


# -- history -----------------------------------------------------------------------------------------


def offsets(turns: QueueView, query: FindOffsets) -> Offsets:
    """Where each partition begins, ends, or was at a time."""
    if query.at == "oldest":
        return {member.number: member.state.dropped.first_missing(0) for member in turns.usable()}
    if query.at == "newest":
        return {member.number: member.state.next_offset for member in turns.usable()}
    return {member.number: member.usable_partition.offset_at(query.at) for member in turns.usable()}


def cursors(turns: QueueView, query: ListCursors) -> dict[str, Offsets]:
    """Where each cursor stands in the partitions that know it."""
    found: dict[str, Offsets] = {}
    for member in turns.usable():
        for name, offset in member.state.cursors.items():
            found.setdefault(name, {})[member.number] = offset
    return found


def read(turns: QueueView, query: ReadItems) -> Page:
    """Retained items from some offsets on, a share from each partition. What was forwarded was read before."""
    offsets, limit = query.start, query.limit
    found: list[tuple[int, Items]] = []
    failure: PenstockError | None = None
    after = dict(offsets)
    behind = [member for member in turns.usable() if member.state.next_offset > offsets.get(member.number, 0)]
    for place, member in enumerate(behind):
        share = _bounded(member, max(1, -(-limit // (len(behind) - place))))
        start = offsets.get(member.number, 0)
        turns.touch(member)
        try:
            items, after[member.number] = member.usable_partition.read_retained(start, share)
        except PenstockError as error:
            failure = failure or error
            continue
        for part in items:
            found += [(member.number, kept) for kept in _own(turns, part)]
            limit -= len(part.batch)
        if limit <= 0:
            break
    if not found and after == offsets:  # the end, unless it cannot be seen
        if failure is not None:
            raise failure
        for broken in turns.handles.values():
            if not broken.is_usable:
                raise StorageFailed(f"partition {broken.number} is failing and cannot be read; try again in a moment")
    return Page(found, after)


def _own(turns: QueueView, items: Items) -> list[Items]:
    """The items that are not copies of ones that came from another partition of this queue."""
    if items.batch.origins is None:
        return [items]
    kept = RunSet()
    for index, packed in enumerate(items.batch.origins):
        known = origin.decode(packed) if packed is not None else None
        if known is None or not (known.forwarded and known.incarnation == turns.incarnation):
            kept.add(index, index + 1)
    return [Items(items.start + a, items.batch.slice(a, b), items.produced_at) for a, b in pairs(kept.runs)]


QUERY_HANDLERS: dict[type[Operation[Any]], Callable[[Any, Any], Any]] = {
    ReadStats: stats,
    ExplainItem: explain,
    TraceItem: trace,
    ListHeldKeys: held_keys,
    ListItems: items,
    FindOffsets: offsets,
    ListCursors: cursors,
    ReadItems: read,
}
"""The function that answers each kind of query for one queue."""

# -- what was done ------------------------------------------------------------------------------------


def metrics(loop: Loop) -> QueueMetrics:
    """Counters and latencies since the queue was opened here."""
    meter = loop.meter
    latencies = {
        verb: Latency(
            found.total,
            found.quantile(0.5) / SECOND,
            found.quantile(0.95) / SECOND,
            found.quantile(0.99) / SECOND,
            found.worst / SECOND,
        )
        for verb, found in dict(meter.latencies).items()
    }
    items = dict(meter.items)
    if loop.engine.buried_dropped:
        items["buried_dropped"] = loop.engine.buried_dropped
    return QueueMetrics(loop.engine.name, meter.turns, dict(meter.requests), dict(meter.errors), items, latencies)
