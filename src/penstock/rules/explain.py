"""Why an item is not being handled: one sentence, and the facts behind it.

Owns: `explain`. It reads the state, and the item's block only if it needs the item's key.
"""

from itertools import takewhile

import msgspec

from penstock.rules.fences import Fence
from penstock.rules.item_states import ItemState
from penstock.rules.keys import KeyLine
from penstock.rules.outbox import moved_to, unpack_destination
from penstock.rules.restore import no_item_error
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet
from penstock.rules.state import BlockSource, State
from penstock.words.clock import SECOND, Moment
from penstock.words.ids import format_id
from penstock.words.quantities import format_seconds

LOST = "lost: damage took its bytes"


class Explanation(msgspec.Struct):
    """The state of an item and the reason for it."""

    state: ItemState
    why: str
    attempts: int = 0
    lease: int = 0
    consumer: str = ""
    until: int = 0
    """Until when the item waits or is leased: elapsed or (scheduled by `at`) wall microseconds."""
    held_by: int | None = None
    """Offset of the item of the same key that must be settled first."""
    reason: str = ""
    moved_to: tuple[int, int, int] | None = None
    """New incarnation, partition and offset of an item that was transferred."""
    waits_for: int | None = None
    """The partition that still holds earlier items of the key, after a resize."""


def explain(state: State, partition: int, offset: int, now: Moment, blocks: BlockSource) -> Explanation:
    """Explain an item of a partition.

    Raises InvalidRequest if it does not exist, MissingBlocks if its block must be fetched first.
    """
    found = state.state_of(offset)
    if found is None:
        raise no_item_error(state, partition, offset)
    if found is ItemState.LEASED:
        return _leased(state, offset, now)
    if found is ItemState.SCHEDULED:
        return _scheduled(state, offset, now)
    if found is ItemState.READY:
        return _ready(state, partition, offset, now, blocks)
    if found is ItemState.MOVING:
        return _moving(state, offset)
    if found is ItemState.BURIED:
        burial = state.burials[offset]
        return Explanation(found, f"buried because: {burial.reason}", burial.attempts, reason=burial.reason)
    if (there := moved_to(state, offset)) is not None:
        return Explanation(found, "moved to another partition", moved_to=there)
    if offset in state.lost:
        return Explanation(found, LOST)
    if found is ItemState.CANCELLED:
        return Explanation(found, "cancelled while it waited: it is never leased")
    return Explanation(found, "resolved, and deleted by retention" if offset in state.dropped else "completed")


def _moving(state: State, offset: int) -> Explanation:
    packed = next(packed for packed, entries in state.outbox.items() for entry in entries if offset in RunSet(entry.runs))
    burial = state.burials.get(offset)
    reason = burial.reason if burial else ""
    because = f", buried because: {reason}" if burial else ""
    return Explanation(
        ItemState.MOVING, f"on its way to partition {unpack_destination(packed)[1]} of its destination{because}", reason=reason
    )


def _leased(state: State, offset: int, now: Moment) -> Explanation:
    lease = next(lease for lease in state.leases.live.values() if offset in lease.open_items)
    left = _span(lease.deadline - now.elapsed)
    who = lease.consumer or "an unnamed consumer"
    why = f"leased by {who} for another {left}"
    if (progress := state.live_progress().get(offset)) is not None:
        why += f" ({progress[1]})"
    return Explanation(ItemState.LEASED, why, state.attempts(offset) + 1, lease.number, lease.consumer, lease.deadline)


def _scheduled(state: State, offset: int, now: Moment) -> Explanation:
    failure = state.failures.get(offset)
    for calendar, by_wall, clock in ((state.by_elapsed, False, now.elapsed), (state.by_wall, True, now.wall)):
        part = state.due_by(by_wall)
        for entry in calendar:
            if entry.start <= offset < entry.stop and offset in RunSet(part(entry)):
                left = _span(entry.when - clock)
                what = f"backing off after attempt {failure.attempts} ({failure.reason})" if failure else "scheduled"
                reason, why = failure.reason if failure else "", f"{what}, ready in {left}"
                return Explanation(ItemState.SCHEDULED, why, state.attempts(offset), until=entry.when, reason=reason)
    raise AssertionError(f"offset {offset} is scheduled but in no calendar")


def _span(microseconds: int) -> str:
    return format_seconds(round(max(0, microseconds) / SECOND, 2))


def _ready(state: State, partition: int, offset: int, now: Moment, blocks: BlockSource) -> Explanation:
    attempts = state.attempts(offset)
    if _is_overdue(state, offset, now):
        return Explanation(ItemState.READY, "ready, but its ttl is over: it is buried when the queue is next used", attempts)
    if state.paused_lease:
        return Explanation(ItemState.READY, "ready, but leasing is paused; resume it", attempts)
    block = blocks.find(offset)
    if block.lost:
        return Explanation(ItemState.READY, LOST, attempts)
    key = block.key_of(offset)
    holder = state.keys.by_key.get(key) if key != NO_KEY else None
    if holder is None:
        fence = _fence(state, key, _position(state, offset)) if key != NO_KEY and state.keys.fences else None
        if fence is not None:
            return _fenced(fence, attempts)
        return Explanation(ItemState.READY, "ready: the next lease that reaches it gets it", attempts)
    return _behind_key(state, partition, offset, key, holder, attempts)


def _is_overdue(state: State, offset: int, now: Moment) -> bool:
    """Whether the ttl of a waiting item is over. The owner buries it at once: this is seen only in files."""
    due = takewhile(lambda entry: entry.when <= now.elapsed, state.ttl)
    return any(entry.start <= offset < entry.stop for entry in due)


def _behind_key(state: State, partition: int, offset: int, key: int, holder: int | KeyLine, attempts: int) -> Explanation:
    line = KeyLine(holder) if isinstance(holder, int) else holder
    if line.lease:
        lease = state.leases.live[line.lease]
        first = next(other for other, (_, other_key) in lease.open_items.items() if other_key == key)
        why = f"its key is held: item {format_id(partition, first)} is leased by {lease.consumer or 'an unnamed consumer'}"
        return Explanation(ItemState.READY, why, attempts, held_by=first, until=lease.deadline)
    if line.backing_off is not None:
        why = f"its key is held: item {format_id(partition, line.backing_off[0])} backs off"
        return Explanation(ItemState.READY, why, attempts, held_by=line.backing_off[0], until=line.until)
    if line.parked:
        why = f"its key is parked: item {format_id(partition, line.parked[0])} was buried; redrive or clear it"
        return Explanation(ItemState.READY, why, attempts, held_by=line.parked[0])
    head = line.waiting.first
    first = head.start
    fence = _fence(state, key, head.position)
    if fence is not None:
        return _fenced(fence, attempts)
    if first == offset:
        return Explanation(ItemState.READY, "ready: first of its key, the next lease that reaches it gets it", attempts)
    return Explanation(ItemState.READY, f"ready, behind item {format_id(partition, first)} of the same key", attempts, held_by=first)


def _position(state: State, offset: int) -> int:
    """The position of a ready item that is in no key line."""
    extents = (extent for lane in state.lanes.lanes for extent in lane if extent.start <= offset < extent.stop)
    return next((offset if extent.at_own_offset else extent.position for extent in extents), offset)


def _fence(state: State, key: int, position: int) -> Fence | None:
    """The fence that an item of a key at this position waits for, or None."""
    return next((fence for fence in state.keys.fences if fence.covers(key) and position >= fence.since), None)


def _fenced(fence: Fence, attempts: int) -> Explanation:
    why = f"fenced by a resize: partition {fence.source} still holds earlier items of its key or slot"
    return Explanation(ItemState.READY, why, attempts, waits_for=fence.source)
