"""Produce: store items, each once.

Owns: `decide_produce`, `apply_produced`. Three things add nothing and get their first answer again: a call that was
stored before, a dedup id inside its window, and a transfer whose sequence is not new. An item that was buried here and
parked its key gets its old position back when a transfer returns it: before all later items of its key.
"""

from collections.abc import Container, Sequence

from penstock.rules.calls import RememberedAnswer, check_calls
from penstock.rules.commands import Produce, Stored
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import KEYED, SPARSE, Extent
from penstock.rules.records import CallAnswered, Produced, Record
from penstock.rules.routing import NO_KEY, with_key_ids
from penstock.rules.runs import from_offsets, pairs
from penstock.rules.state import BlockSource, Failure, State
from penstock.words import origin
from penstock.words.batch import Batch, validate
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog, InvalidRequest, QueueFull, QueueHeld
from penstock.words.limits import DEFAULT_PRIORITY, IMMEDIATE, MAX_DEDUP_IDS


def decide_produce(state: State, command: Produce, now: Moment, blocks: BlockSource) -> tuple[list[Record], Stored]:
    base = state.next_offset
    batch = command.batch if command.checked else with_key_ids(command.batch)
    if command.source is None and not command.checked:  # a transfer was checked at its source, and may be larger than a caller's batch
        validate(batch)
    check_calls(command.calls)
    if command.source is not None and (type(command.source) is not bytes or type(command.sequence) is not int):
        raise InvalidRequest("a transfer's source is not bytes or its sequence not a number; give both as the outbox says")
    if command.calls:
        for known in state.calls.answers(command.calls, now.elapsed) or ():
            if known.indexes == command.indexes:
                return [], Stored(known.base, known.count, known.ids, repeated=True)
        state.calls.check_room(command.calls, now.elapsed)
    if command.source is not None:
        # The source of a transfer depends on it: neither pause nor limits stop it.
        last = state.received_sequences.get(command.source, 0)
        if command.sequence <= last:
            return [], Stored(state.received_bases.get(command.source, -1) if command.sequence == last else -1, 0, repeated=True)
    elif state.paused_produce:
        raise QueueHeld("producing is paused; resume it or try again later")
    batch = batch.to_store()
    ids: list[int] | None = None
    if batch.dedups is not None and (command.source is None or command.dedup):  # the sequence of a transfer must be recorded in any case
        batch, ids = _without_duplicates(state, batch, now)
        if not len(batch):
            answer = RememberedAnswer(ids=ids, indexes=command.indexes)
            return ([CallAnswered([*command.calls], [answer])] if command.calls else []), Stored(base, 0, ids, repeated=True)
    remembered = ids if command.calls else None
    replaced = _find_replaced(state, command, batch, base) if command.source is not None else None
    record = Produced(base, batch, command.calls, remembered, command.source, command.sequence, replaced, command.indexes)
    return [record], Stored(base, len(batch), ids)


def _without_duplicates(state: State, batch: Batch, now: Moment) -> tuple[Batch, list[int] | None]:
    """The items that are new and, if some are not, the offset of every item. Raises QueueFull beyond MAX_DEDUP_IDS."""
    assert batch.dedups is not None
    seen: dict[bytes, int] = {}
    ids: list[int] = []
    new: list[int] = []
    for index, name in enumerate(batch.dedups):
        first = None if name is None else seen.get(name, state.duplicate_of(name, now.elapsed))
        if first is None:
            first = state.next_offset + len(new)
            new.append(index)
            if name is not None:
                seen[name] = first
        ids.append(first)
    if len(state.dedup) + len(seen) > MAX_DEDUP_IDS and state.dedup.count(now.elapsed) + len(seen) > MAX_DEDUP_IDS:
        raise QueueFull(f"the partition remembers {MAX_DEDUP_IDS} dedup ids; wait for the window to pass or shorten it")
    if len(new) == len(batch):
        return batch, None
    return batch.take(new).drop_empty_columns(), ids


def _find_replaced(state: State, command: Produce, batch: Batch, base: int) -> list[int] | None:
    """`Produced.replaced`: items of a transfer that were buried here and still park their key, or None."""
    if batch.origins is None or batch.key_ids is None:
        return None
    found: dict[int, int] = {}
    for index, (packed, key) in enumerate(zip(batch.origins, batch.key_ids, strict=True)):
        came_from = None if packed is None or key == NO_KEY else origin.decode(packed)
        parking = came_from.parking_in(command.incarnation) if came_from is not None else None
        if parking is not None and parking[0] == command.partition and _parked(state, key, parking[1]) is not None:
            found.setdefault(parking[1], base + index)
    return [offset for old, new in found.items() for offset in (new, old)] or None


def _parked(state: State, key: int, offset: int) -> KeyLine | None:
    """The line of the key if the buried item at that offset parks it; otherwise None."""
    line = state.keys.by_key.get(key)
    return line if isinstance(line, KeyLine) and offset in line.parked else None


def apply_produced(state: State, record: Produced, now: Moment) -> None:
    batch, base = record.batch, record.base
    stop = base + len(batch)
    if stop > state.next_offset:
        state.next_offset = stop
    placed = _put_at_old_positions(state, record, now) if record.replaced else ()
    if batch.ats is None and not placed:
        _make_ready(state, batch, base, base, stop, now)
    else:
        _add_items(state, batch, base, placed, now)
    if batch.ttls is not None or state.policy.ttl:
        _schedule_ttl(state, batch, base, now)
    if batch.origins is not None:
        _continue_attempts(state, batch.origins, base)
    if batch.dedups is not None:
        _free_cancelled(state, batch.dedups, now.elapsed)
        state.dedup.put_all(batch.dedups, base, now.elapsed, state.policy.dedup_window, batch.dedup_windows)
        state.dedup.limit(MAX_DEDUP_IDS, now.elapsed)
    if record.calls:
        answer = RememberedAnswer(base, len(batch), record.ids, indexes=record.indexes)
        state.calls.put(record.calls, [answer], now.elapsed, state.policy.result_memory)
    if record.source is not None:
        _record_transfer(state, record.source, record.sequence, base)


def _free_cancelled(state: State, dedup_ids: Sequence[bytes | None], now: int) -> None:
    """Remove those of these dedup ids whose first items were cancelled: the new items take them."""
    for name in dedup_ids if state.cancelled else ():
        first = state.dedup.get(name, now) if name is not None else None
        if name is not None and first is not None and first in state.cancelled:
            state.dedup.remove(name, first)


def _continue_attempts(state: State, origins: Sequence[bytes | None], base: int) -> None:
    """Count the failed attempts that items had in another system."""
    for offset, packed in enumerate(origins, base):
        try:
            known = None if packed is None else origin.decode(packed)
        except CorruptLog:  # a caller may have given any bytes
            continue
        if known is not None and known.continued and known.attempts > 0:
            state.failures[offset] = Failure(known.attempts, known.first_failed_at, known.last_failed_at, known.reason)


def _record_transfer(state: State, source: bytes, sequence: int, base: int) -> None:
    if sequence > state.received_sequences.get(source, 0):
        state.received_sequences[source] = sequence
        state.received_bases[source] = base


def _make_ready(state: State, batch: Batch, base: int, start: int, stop: int, now: Moment) -> None:
    """Add items [start, stop) of a batch that begins at `base` to their lanes."""
    flags = KEYED if batch.key_ids is not None else 0
    if batch.priorities is None:
        state.lanes.add(DEFAULT_PRIORITY, start, stop, flags, start, now.elapsed)
        return
    present = sorted(set(batch.priorities[start - base : stop - base]))
    flags |= SPARSE if len(present) > 1 else 0
    for lane in present:
        state.lanes.add(lane, start, stop, flags, start, now.elapsed)


def _put_at_old_positions(state: State, record: Produced, now: Moment) -> set[int]:
    """Put the items of `replaced` into their key lines at the old items' positions; returns their offsets.

    An item whose old one no longer parks the key is not among them: damage may have taken the record of the burial.
    """
    batch, base = record.batch, record.base
    placed: set[int] = set()
    changed: dict[int, KeyLine] = {}
    for new, old in pairs(record.replaced or ()):
        key = NO_KEY if batch.key_ids is None else batch.key_ids[new - base]
        line = _parked(state, key, old)
        if line is not None:
            line.parked.remove(old)
            line.kept_positions[new] = line.kept_positions.pop(old, old)
            line.push(Extent(new, new + 1, _lane(batch, new - base), line.position(new), now.elapsed))
            state.passed_over.add(new, new + 1)
            state.outside_lanes.add(new, new + 1)
            state.keys.update_head(key, line)
            placed.add(new)
            changed[key] = line
    for line in changed.values():
        kept = line.kept_positions.items()
        line.kept_positions = {offset: position for offset, position in kept if offset in line.parked or offset not in state.completed}
    return placed


def _lane(batch: Batch, index: int) -> int:
    return DEFAULT_PRIORITY if batch.priorities is None else batch.priorities[index]


def _add_items(state: State, batch: Batch, base: int, placed: Container[int], now: Moment) -> None:
    """Add the items that are not `placed` to their lanes, or to the calendar if they are scheduled."""
    soon = now.wall + IMMEDIATE
    ats = [0] * len(batch) if batch.ats is None else batch.ats
    for start, stop in pairs(from_offsets(o for o, at in enumerate(ats, base) if at <= soon and o not in placed)):
        _make_ready(state, batch, base, start, stop, now)
    for offset, at in enumerate(ats, base):
        if at > soon and offset not in placed:
            tag = _lane(batch, offset - base)
            if batch.key_ids is not None and batch.key_ids[offset - base] != NO_KEY:
                tag |= KEYED
            state.by_wall.add(at, offset, offset + 1, tag)
            state.scheduled.add(offset, offset + 1)
            state.outside_lanes.add(offset, offset + 1)


def _schedule_ttl(state: State, batch: Batch, base: int, now: Moment) -> None:
    if batch.ttls is None:
        state.ttl.add(now.elapsed + state.policy.ttl, base, base + len(batch))
        return
    for index, ttl in enumerate(batch.ttls):
        span = ttl or state.policy.ttl
        if span:
            state.ttl.add(now.elapsed + span, base + index, base + index + 1)
