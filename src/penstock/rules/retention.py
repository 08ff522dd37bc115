"""Retention: which items' bytes may be deleted, and the cursors that limit it.

Owns: the decisions about dropping items and about cursors, their application, `offsets_to_keep` and `buried_since`.
Only items that are completed, or buried without parking their key, and that every cursor has read are deleted.
The record is written and synced before the files are changed. A crash in between leaves too many bytes, never too few.
"""

from penstock.rules.commands import Drop, ForgetCursor, ItemCount, PutCursor
from penstock.rules.outbox import forget_moved
from penstock.rules.records import CursorMoved, CursorReleased, Dropped, Record
from penstock.rules.restore import check_not_in_hole
from penstock.rules.runs import RunSet, count, offsets, pairs
from penstock.rules.state import BlockSource, State
from penstock.words.batch import check_name
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from penstock.words.limits import check_range


def offsets_to_keep(state: State, stop: int) -> RunSet:
    """Offsets before `stop` that must be kept: unresolved, parking their key, or not yet read by a cursor."""
    found = RunSet((0, stop))
    found.remove_all(state.completed.within(0, stop))
    found.remove_all(state.buried_set.within(0, stop))
    for _, line in state.keys.lines():
        for offset in line.parked:
            found.add(offset, offset + 1)
    found.add(min(state.cursors.values(), default=stop), stop)
    found.remove_all(state.lost.runs)
    found.remove_all(state.dropped.runs)
    found.remove(stop, state.next_offset)
    return found


def buried_since(state: State, start: int, stop: int, since: int) -> list[int]:
    """Offsets of [start, stop) that were buried after `since` (elapsed time)."""
    found = offsets(state.buried_set.within(start, stop))
    return [offset for offset in found if offset in state.burials and state.burials[offset].since > since]


def decide_drop(state: State, command: Drop, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    if len(command.runs) % 2 or any(type(edge) is not int or edge < 0 for edge in command.runs):
        raise InvalidRequest("the runs to drop are not pairs of offsets; give [start, stop, …]")
    new = RunSet(command.runs)
    new.remove_all(state.dropped.runs)
    kept = offsets_to_keep(state, state.next_offset)
    for start, stop in pairs(new.runs):
        held = kept.within(start, stop) or ([stop - 1] if stop > state.next_offset else [])
        if held:
            raise InvalidRequest(f"item {held[0]} is not resolved or a cursor has not passed it; it cannot be dropped")
    return ([Dropped(new.runs)] if new else []), ItemCount(len(new))


def apply_dropped(state: State, record: Dropped, now: Moment) -> None:
    state.dropped.add_all(record.runs)
    state.completed.add_all(record.runs)
    forget_moved(state, record.runs)
    _forget_cancelled(state, record.runs)
    for start, stop in pairs(record.runs):
        buried = state.buried_set.within(start, stop)
        state.buried_dropped += count(buried)
        state.buried_set.remove(start, stop)
        for offset in offsets(buried):
            state.burials.pop(offset, None)


def _forget_cancelled(state: State, runs: list[int]) -> None:
    """Forget that dropped items were cancelled, and their dedup ids, which were free because of that."""
    gone = RunSet(edge for start, stop in pairs(runs) for edge in state.cancelled.within(start, stop))
    if gone:
        state.cancelled.remove_all(gone.runs)
        state.dedup.remove_items(gone)


def decide_put_cursor(state: State, command: PutCursor, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    if not command.name:
        raise InvalidRequest("the cursor has no name; give it one")
    check_name("cursor", command.name)
    check_range("offset", command.offset, 0, state.next_offset)
    check_not_in_hole(state, command.offset)
    if state.cursors.get(command.name) == command.offset:
        return [], ItemCount(0)
    return [CursorMoved(command.name, command.offset)], ItemCount(0)


def apply_cursor_moved(state: State, record: CursorMoved, now: Moment) -> None:
    state.cursors[record.name] = record.offset


def decide_forget_cursor(state: State, command: ForgetCursor, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    if command.name not in state.cursors:
        raise InvalidRequest(f"there is no cursor {command.name!r}; there are {sorted(state.cursors) or 'none'}")
    return [CursorReleased(command.name)], ItemCount(0)


def apply_cursor_released(state: State, record: CursorReleased, now: Moment) -> None:
    state.cursors.pop(record.name, None)
