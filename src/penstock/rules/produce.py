"""Produce: items enter, once.

Owns: `decide_produce`, `apply_produced`. A request that was stored before, a dedup id seen inside its window, a transfer whose sequence is
not new: each answers what it answered then and adds nothing.
"""

from collections.abc import Sequence

import msgspec

from penstock.rules.commands import Produce, Stored
from penstock.rules.lanes import KEYED, SPARSE
from penstock.rules.records import Answered, Produced, Record
from penstock.rules.routing import NO_KEY, key_ids
from penstock.rules.runs import from_offsets, pairs
from penstock.rules.state import Peek, Remembered, State
from penstock.words.batch import Batch, check_request, validate
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, QueueFull, QueueHeld
from penstock.words.limits import DEFAULT_PRIORITY, IMMEDIATE, MAX_DEDUP_IDS


def decide_produce(state: State, command: Produce, now: Moment, peek: Peek) -> tuple[list[Record], Stored]:
    base = state.next_offset
    batch = command.batch
    if isinstance(batch, Batch) and batch.keys is not None and batch.key_ids is None:
        batch = command.batch = msgspec.structs.replace(batch, key_ids=_ids_of(batch.keys))
    validate(batch)
    check_request(command.request)
    if command.source is not None and (type(command.source) is not bytes or type(command.sequence) is not int):
        raise InvalidRequest("a transfer's source is not bytes or its sequence not a number; give both as the outbox says")
    if command.request is not None and (known := state.requests.get(command.request, now.elapsed)) is not None:
        return [], Stored(known.base, known.count, known.ids, again=True)
    if command.source is not None:
        # A transfer was promised by its source: neither pause nor limits hold it up.
        if command.sequence <= state.producers.get(command.source, 0):
            return [], Stored(base, 0, again=True)
    elif state.paused_produce:
        raise QueueHeld("producing is paused; resume it or try again later")
    batch = batch.own().compact()
    ids: list[int] | None = None
    if batch.dedups is not None and command.source is None:  # a transfer has its sequence, and must be noted even if it were a duplicate
        batch, ids = _without_duplicates(state, batch, now)
        if not len(batch):
            return ([Answered(command.request, ids=ids)] if command.request is not None else []), Stored(base, 0, ids, again=True)
    answer = Stored(base, len(batch), ids)
    remembered = ids if command.request is not None else None
    return [Produced(base, batch, command.request, remembered, command.source, command.sequence)], answer


def _ids_of(keys: Sequence[bytes | None]) -> list[int]:
    try:
        return key_ids(keys)
    except TypeError:
        raise InvalidRequest("a key is not bytes; give bytes, or None for no key") from None


def _without_duplicates(state: State, batch: Batch, now: Moment) -> tuple[Batch, list[int] | None]:
    """The items that are new, and, if some are not, every item's offset."""
    assert batch.dedups is not None
    seen: dict[bytes, int] = {}
    ids: list[int] = []
    fresh: list[int] = []
    for index, name in enumerate(batch.dedups):
        first = None if name is None else seen.get(name, state.dedup.get(name, now.elapsed))
        if first is None:
            first = state.next_offset + len(fresh)
            fresh.append(index)
            if name is not None:
                seen[name] = first
        ids.append(first)
    if len(state.dedup) + len(seen) > MAX_DEDUP_IDS and now.elapsed >= state.dedup.next_over:
        state.dedup.forget(now.elapsed)  # what is over does not count
    if len(state.dedup) + len(seen) > MAX_DEDUP_IDS:
        raise QueueFull(f"the partition remembers {MAX_DEDUP_IDS} dedup ids; wait for the window to pass or shorten it")
    if len(fresh) == len(batch):
        return batch, None
    return batch.pick(fresh).compact(), ids


def apply_produced(state: State, record: Produced, now: Moment) -> None:
    batch, base = record.batch, record.base
    stop = base + len(batch)
    if stop > state.next_offset:
        state.next_offset = stop
    if batch.ats is None:
        _make_ready(state, batch, base, base, stop, now)
    else:
        _schedule(state, batch, base, now)
    if batch.ttls is not None or state.policy.ttl:
        _arm_ttl(state, batch, base, now)
    if batch.dedups is not None:
        for index, name in enumerate(batch.dedups):
            if name is not None:
                state.dedup.put(name, base + index, now.elapsed, state.policy.dedup_window)
    if record.request is not None:
        state.requests.put(record.request, Remembered(base, len(batch), record.ids), now.elapsed, state.policy.remember)
    if record.source is not None:
        state.producers[record.source] = max(record.sequence, state.producers.get(record.source, 0))


def _make_ready(state: State, batch: Batch, base: int, start: int, stop: int, now: Moment) -> None:
    """Items [start, stop) of a batch that begins at `base` join their lanes."""
    flags = KEYED if batch.key_ids is not None else 0
    if batch.priorities is None:
        state.lanes.add(DEFAULT_PRIORITY, start, stop, flags, start, now.elapsed)
        return
    present = sorted(set(batch.priorities[start - base : stop - base]))
    flags |= SPARSE if len(present) > 1 else 0
    for lane in present:
        state.lanes.add(lane, start, stop, flags, start, now.elapsed)


def _schedule(state: State, batch: Batch, base: int, now: Moment) -> None:
    assert batch.ats is not None
    soon = now.wall + IMMEDIATE
    for start, stop in pairs(from_offsets(base + index for index, at in enumerate(batch.ats) if at <= soon)):
        _make_ready(state, batch, base, start, stop, now)
    for index, at in enumerate(batch.ats):
        if at > soon:
            offset = base + index
            tag = DEFAULT_PRIORITY if batch.priorities is None else batch.priorities[index]
            if batch.key_ids is not None and batch.key_ids[index] != NO_KEY:
                tag |= KEYED
            state.by_wall.add(at, offset, offset + 1, tag)
            state.scheduled.add(offset, offset + 1)
            state.away.add(offset, offset + 1)


def _arm_ttl(state: State, batch: Batch, base: int, now: Moment) -> None:
    if batch.ttls is None:
        state.ttl.add(now.elapsed + state.policy.ttl, base, base + len(batch))
        return
    for index, ttl in enumerate(batch.ttls):
        span = ttl or state.policy.ttl
        if span:
            state.ttl.add(now.elapsed + span, base + index, base + index + 1)
