"""Making sense of a state after damage took records: what is certain stays, what contradicts it goes.

Owns: `mend`, applied after a replay that met a gap. Without the lost records an item may seem to be in two states, a key to be
held by nobody, a ready item to stand in no lane. Certain in this order: lost, resolved, moving, buried, leased (the newest lease),
scheduled, waiting in a line, ready. What was being worked on may so be handled once more; nothing is given up, nothing is held
for ever. Ready items are lined up anew in log order, at the default priority. The same damage gives the same state, and mending
twice changes nothing more.
"""

from penstock.rules.keys import KeyLine, KeyLines
from penstock.rules.lanes import KEYED, Lanes
from penstock.rules.outbox import moved_to
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, offsets, pairs
from penstock.rules.state import Burial, State
from penstock.words.limits import DEFAULT_PRIORITY


def reconcile(state: State) -> None:
    """Bring all parts of a state into line."""
    end = state.next_offset
    for final in (state.completed, state.buried_set, state.scheduled, state.passed_over, state.ttl_overdue, state.moving):
        final.remove(end, 1 << 62)
    state.completed.add_all(state.lost.runs)
    _mend_outbox(state)
    _mend_buried(state)
    leased = _mend_leases(state)
    _mend_scheduled(state, leased)
    _mend_keys(state, leased)
    state.outside_lanes = RunSet()
    for taken in (state.completed, state.buried_set, state.moving, leased, state.scheduled, state.passed_over):
        state.outside_lanes.add_all(taken.runs)
    state.ttl_overdue = _common(state.ttl_overdue, leased)
    for offset in [offset for offset in state.failures if offset in state.completed or offset in state.buried_set]:
        del state.failures[offset]
    state.lanes = Lanes()
    for start, stop in pairs(state.outside_lanes.missing(0, end)):
        state.lanes.add(DEFAULT_PRIORITY, start, stop, KEYED, start, state.moment.elapsed)


def _common(one: RunSet, other: RunSet) -> RunSet:
    return RunSet(edge for start, stop in pairs(one.runs) for edge in other.within(start, stop))


def _mend_outbox(state: State) -> None:
    """On its way is what an outbox holds, whatever else is said of it: it may have arrived."""
    state.moving = RunSet()
    for line in state.outbox.values():
        for entry in line:
            runs = RunSet(entry.runs)
            for firmer in (state.completed, state.moving):
                runs.remove_all(firmer.runs)
            runs.remove(state.next_offset, 1 << 62)
            entry.runs = runs.runs
            state.moving.add_all(entry.runs)


def _mend_buried(state: State) -> None:
    """Buried is what is in both records of it and neither resolved nor on its way."""
    state.buried_set.remove_all(state.completed.runs)
    state.buried_set.remove_all(state.moving.runs)
    for offset in list(state.burials):
        if offset not in state.buried_set and offset not in state.moving:
            del state.burials[offset]
    for offset in offsets(state.buried_set.runs):
        state.burials.setdefault(offset, Burial("unknown: damage took the record", state.moment.wall, 0, 0, 0, state.moment.elapsed))


def _mend_leases(state: State) -> RunSet:
    """An item is held by the newest lease that has it, unless it is resolved or buried; gives what is held."""
    held = RunSet()
    for number in sorted(state.leases.live, reverse=True):
        grant = state.leases.live[number]
        for offset in list(grant.open_items):
            if any(offset in firmer for firmer in (state.completed, state.buried_set, state.moving, held)) or offset >= state.next_offset:
                grant.close(offset)
            else:
                held.add(offset, offset + 1)
        if not grant.count:
            state.leases.end(grant, state.moment.elapsed, state.policy.result_memory)
    return held


def _mend_scheduled(state: State, leased: RunSet) -> None:
    """Scheduled is what stands in a calendar and is in no firmer state."""
    due = RunSet()
    for calendar in (state.by_wall, state.by_elapsed):
        for entry in calendar:
            due.add_all(state.scheduled.within(entry.start, entry.stop))
    for firmer in (state.completed, state.buried_set, state.moving, leased):
        due.remove_all(firmer.runs)
    state.scheduled = due


def _mend_keys(state: State, leased: RunSet) -> None:
    """Lines are made anew: what is leased or backs off holds its key, what is buried may park it, the rest waits."""
    old, state.keys = state.keys, KeyLines(state.keys.fences)
    state.passed_over, state.backing_off = RunSet(), {}
    for grant in state.leases.live.values():
        state.keys.hold([key for _, key in grant.open_items.values() if key != NO_KEY], grant.number)
    for key, line in sorted(old.lines(), key=lambda pair: pair[0]):
        _mend_line(state, key, line, leased)


def _mend_line(state: State, key: int, line: KeyLine, leased: RunSet) -> None:
    found = state.keys.by_key.get(key)
    new = KeyLine(found if isinstance(found, int) else 0)
    if not new.lease and line.backing_off is not None and line.backing_off[0] in state.scheduled:
        new.backing_off, new.until = line.backing_off, line.until
        state.backing_off[line.backing_off[0]] = key
    new.parked = [
        offset for offset in line.parked if offset in state.buried_set or offset in state.moving or moved_to(state, offset) is not None
    ]
    new.kept_positions = line.kept_positions
    for run in line.waiting:
        ready = RunSet((run.start, run.stop))
        for firmer in (state.completed, state.buried_set, state.moving, leased, state.scheduled, state.passed_over):
            ready.remove_all(firmer.within(run.start, run.stop))
        for part in run.parts(ready.runs):
            new.push(part)
        state.passed_over.add_all(ready.runs)
    if new.busy or new.waiting:
        state.keys.by_key[key] = new
        state.keys.update_head(key, new)
