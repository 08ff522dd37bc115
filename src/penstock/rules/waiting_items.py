"""Waiting items: cancelling them, skipping them, and giving them another time.

Owns: these decisions and their application. An item waits while it is ready or scheduled, also if its key holds it
back; leased, moving and resolved items are refused, each with its own outcome.
- A cancelled item is resolved for good: a seek does not bring it back, its key goes on without it, and its dedup id is
  free again. No attempt is counted and no key is parked.
- Skipped items are completed without being handled: those before a point, as a seek forward asks for it. A seek back
  makes them ready again.
- A rescheduled item is a scheduled item like any other: it gives up its position, also if it was returned or backs off;
  it holds nothing, and takes a new position at the tail of its lane when its time comes. So later items of its key may
  overtake it.
- Rescheduled to now, a scheduled item takes that position at once. An item that backs off ends its back-off instead, at
  its own position, as if the back-off were over. A ready item does not change.
A ttl goes on counting. Attempts and reasons stay.
"""

from collections.abc import Sequence

from penstock.rules.commands import AskAgain, CancelWaiting, ItemCount, ItemOutcome, ItemOutcomes, RescheduleWaiting, SkipWaiting
from penstock.rules.item_states import ItemState
from penstock.rules.lanes import KEYED
from penstock.rules.outbox import moved_runs
from penstock.rules.records import Cancelled, Lost, Record, Rescheduled, Skipped
from penstock.rules.removal import keys_in_line, leave_lines, withdraw_items
from penstock.rules.restore import check_not_in_hole
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.state import BlockSource, State, find_blocks, lost_runs
from penstock.rules.timers import end_back_off, into_lane
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from penstock.words.limits import IMMEDIATE, MAX_DELAY, check_range

SPARE_CHANGES = 1_000
"""How many more changed times than scheduled items there may be before the calendars are tidied."""
LAST_TIME = 1 << 62
SKIP_ITEMS = 10_000
"""Most items of one record."""
_OUTCOMES = {
    None: ItemOutcome.UNKNOWN,
    ItemState.READY: ItemOutcome.DONE,
    ItemState.SCHEDULED: ItemOutcome.DONE,
    ItemState.LEASED: ItemOutcome.LEASED,
    ItemState.COMPLETED: ItemOutcome.COMPLETED,
    ItemState.CANCELLED: ItemOutcome.CANCELLED,
    ItemState.BURIED: ItemOutcome.BURIED,
    ItemState.MOVING: ItemOutcome.MOVING,
}


# -- deciding -----------------------------------------------------------------------------------------


def decide_cancel(state: State, command: CancelWaiting, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemOutcomes | AskAgain]:
    answer, chosen = _choose(state, command.offsets)
    if not chosen:
        return [], answer
    keys = keys_in_line(state, chosen, blocks)
    if isinstance(keys, Lost):
        return [keys], AskAgain()
    return [Cancelled(from_offsets(chosen), keys)], answer


def decide_skip(state: State, command: SkipWaiting, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount | AskAgain]:
    check_range("offset", command.offset, 0, 1 << 62)
    check_not_in_hole(state, command.offset)
    waiting = RunSet(state.runs_in(ItemState.READY))
    waiting.add_all(state.runs_in(ItemState.SCHEDULED))
    chosen: list[int] = []
    for start, stop in pairs(waiting.within(0, command.offset)):
        chosen += range(start, min(stop, start + SKIP_ITEMS - len(chosen)))
        if len(chosen) >= SKIP_ITEMS:
            break
    if not chosen:
        return [], ItemCount(0)
    keys = keys_in_line(state, chosen, blocks)
    if isinstance(keys, Lost):
        return [keys], AskAgain()
    return [Skipped(from_offsets(chosen), keys)], ItemCount(len(chosen))


def decide_reschedule(
    state: State, command: RescheduleWaiting, now: Moment, blocks: BlockSource
) -> tuple[list[Record], ItemOutcomes | AskAgain]:
    check_range("at", command.at, 0, LAST_TIME)
    check_range("delay", command.delay, 0, MAX_DELAY)
    if command.at and command.delay:
        raise InvalidRequest("both a time and a delay are given; give one of them")
    answer, chosen = _choose(state, command.offsets)
    at = now.wall + command.delay if command.delay else command.at
    if at <= now.wall + IMMEDIATE:
        at = 0
        chosen = [offset for offset in chosen if offset in state.scheduled]
    if not chosen:
        return [], answer
    found = find_blocks(blocks, chosen)
    if lost := lost_runs(state, found):
        return [Lost(lost)], AskAgain()
    tags = bytes(block.priority_of(offset) | (KEYED if block.key_of(offset) else 0) for offset, block in zip(chosen, found, strict=True))
    keys = keys_in_line(state, chosen, blocks)
    assert not isinstance(keys, Lost)
    due = now.elapsed + command.delay if at and command.delay else 0
    return [Rescheduled(from_offsets(chosen), tags, keys, at, due)], answer


def _choose(state: State, given: Sequence[int]) -> tuple[ItemOutcomes, list[int]]:
    """The outcome of each item, and the offsets of those that wait, each once."""
    if set(map(type, given)) - {int}:
        raise InvalidRequest("an offset is not a whole number; give those of items")
    moved = RunSet(moved_runs(state)) if state.moved else RunSet()
    outcomes = [ItemOutcome.MOVED if offset in moved else _OUTCOMES[state.state_of(offset)] for offset in given]
    return ItemOutcomes(outcomes), sorted({offset for offset, outcome in zip(given, outcomes, strict=True) if outcome is ItemOutcome.DONE})


# -- applying -----------------------------------------------------------------------------------------


def apply_cancelled(state: State, record: Cancelled, now: Moment) -> None:
    withdraw_items(state, record.runs, record.keys)
    state.completed.add_all(record.runs)
    state.cancelled.add_all(record.runs)


def apply_skipped(state: State, record: Skipped, now: Moment) -> None:
    withdraw_items(state, record.runs, record.keys)
    state.completed.add_all(record.runs)


def apply_rescheduled(state: State, record: Rescheduled, now: Moment) -> None:
    if not record.at:
        _make_ready(state, record, now)
        return
    in_lanes = RunSet(record.runs).subtract(state.outside_lanes.runs) if state.ready else []
    if in_lanes:  # their extents must not cover them when they become ready at another position
        state.lanes.drop(in_lanes)
    leave_lines(state, record.runs, record.keys)
    calendar = state.by_elapsed if record.due else state.by_wall
    when = record.due or record.at
    for offset, tag in zip(offsets(record.runs), record.tags, strict=True):
        time = (not record.due, when, tag)
        if offset in state.scheduled:
            state.new_times.change(offset, time)
        else:
            state.new_times.follow(offset, time)
        calendar.add(when, offset, offset + 1, tag)
    state.scheduled.add_all(record.runs)
    state.outside_lanes.add_all(record.runs)
    _tidy_calendars(state)


def _make_ready(state: State, record: Rescheduled, now: Moment) -> None:
    for offset, tag in zip(offsets(record.runs), record.tags, strict=True):
        state.new_times.change(offset, None)
        back_off = state.keys.line(state.backing_off[offset]).backing_off if offset in state.backing_off else None
        if back_off is not None:
            end_back_off(state, offset, back_off[1], now)
        else:
            into_lane(state, offset, offset + 1, tag, now)
    _tidy_calendars(state)


def _tidy_calendars(state: State) -> None:
    """Remove the entries of old times, if there are many: so seldom that the cost per change is small."""
    if state.new_times.changes > SPARE_CHANGES + len(state.scheduled):
        state.by_wall.keep(state.due_by(by_wall=True))
        state.by_elapsed.keep(state.due_by(by_wall=False))
        state.new_times.clear()
