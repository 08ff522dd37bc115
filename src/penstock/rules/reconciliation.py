"""Making a state consistent after damage took records.

Owns: `reconcile`, applied after a replay that met a gap. Without the lost records an item may seem to be in two states,
a key may be held by nothing, a ready item may be in no lane. Where facts contradict each other, the first of these
counts: lost, completed, moving, buried, leased (by the newest lease), scheduled, waiting in a key line, ready. An item
that was being handled may be handled once more; no item is buried for it, and no key stays held. Ready items are put
into the default lane in log order. The same damage gives the same state; reconciling again changes nothing.
"""

from penstock.rules.keys import KeyLine, KeyLines
from penstock.rules.lanes import KEYED, Lanes
from penstock.rules.outbox import moved_runs
from penstock.rules.removal import end_if_empty
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, offsets, pairs
from penstock.rules.state import Burial, State
from penstock.words.limits import DEFAULT_PRIORITY


def reconcile(state: State) -> None:
    """Make all parts of a state consistent."""
    end = state.next_offset
    for items in (state.completed, state.buried_set, state.scheduled, state.passed_over, state.ttl_overdue, state.moving):
        items.remove(end, 1 << 62)
    state.completed.add_all(state.lost.runs)
    _reconcile_outbox(state)
    _reconcile_buried(state)
    leased = _reconcile_leases(state)
    _reconcile_scheduled(state, leased)
    _reconcile_keys(state, leased)
    state.outside_lanes = RunSet()
    for taken in (state.completed, state.buried_set, state.moving, leased, state.scheduled, state.passed_over):
        state.outside_lanes.add_all(taken.runs)
    state.ttl_overdue = _common(state.ttl_overdue, leased)
    state.cancelled = _common(state.cancelled, state.completed)
    for offset in [offset for offset in state.failures if offset in state.completed or offset in state.buried_set]:
        del state.failures[offset]
    state.lanes = Lanes()
    for start, stop in pairs(state.outside_lanes.missing(0, end)):
        state.lanes.add(DEFAULT_PRIORITY, start, stop, KEYED, start, state.moment.elapsed)


def _common(one: RunSet, other: RunSet) -> RunSet:
    return RunSet(edge for start, stop in pairs(one.runs) for edge in other.within(start, stop))


def _reconcile_outbox(state: State) -> None:
    """The items of the outbox are moving, unless they are completed: their transfer may have arrived."""
    state.moving = RunSet()
    for entries in state.outbox.values():
        for entry in entries:
            runs = RunSet(entry.runs)
            for others in (state.completed, state.moving):
                runs.remove_all(others.runs)
            runs.remove(state.next_offset, 1 << 62)
            entry.runs = runs.runs
            state.moving.add_all(entry.runs)


def _reconcile_buried(state: State) -> None:
    """A buried item is neither completed nor moving, and has a burial; of other items only moving ones have one."""
    state.buried_set.remove_all(state.completed.runs)
    state.buried_set.remove_all(state.moving.runs)
    for offset in list(state.burials):
        if offset not in state.buried_set and offset not in state.moving:
            del state.burials[offset]
    for offset in offsets(state.buried_set.runs):
        state.burials.setdefault(offset, Burial("unknown: damage took the record", state.moment.wall, 0, 0, 0, state.moment.elapsed))


def _reconcile_leases(state: State) -> RunSet:
    """The newest lease of an item counts, unless it is completed, buried or moving. Returns the leased items."""
    leased = RunSet()
    for number in sorted(state.leases.live, reverse=True):
        lease = state.leases.live[number]
        for offset in list(lease.open_items):
            if any(offset in others for others in (state.completed, state.buried_set, state.moving, leased)) or offset >= state.next_offset:
                lease.close(offset)
            else:
                leased.add(offset, offset + 1)
        end_if_empty(state, lease, state.moment.elapsed)
    return leased


def _reconcile_scheduled(state: State, leased: RunSet) -> None:
    """A scheduled item is scheduled if it is in a calendar and not completed, buried, moving or leased."""
    scheduled = RunSet()
    for calendar in (state.by_wall, state.by_elapsed):
        for entry in calendar:
            scheduled.add_all(state.scheduled.within(entry.start, entry.stop))
    for others in (state.completed, state.buried_set, state.moving, leased):
        scheduled.remove_all(others.runs)
    state.scheduled = scheduled


def _reconcile_keys(state: State, leased: RunSet) -> None:
    """Rebuild the lines: leased items and back-offs hold their key, buried items may park it, others wait."""
    old, state.keys = state.keys, KeyLines(state.keys.fences)
    state.passed_over, state.backing_off = RunSet(), {}
    for lease in state.leases.live.values():
        state.keys.hold([key for _, key in lease.open_items.values() if key != NO_KEY], lease.number)
    moved = RunSet(moved_runs(state))
    for key, line in sorted(old.lines(), key=lambda pair: pair[0]):
        _reconcile_line(state, key, line, leased, moved)


def _reconcile_line(state: State, key: int, line: KeyLine, leased: RunSet, moved: RunSet) -> None:
    found = state.keys.by_key.get(key)
    new = KeyLine(found if isinstance(found, int) else 0)
    if not new.lease and line.backing_off is not None and line.backing_off[0] in state.scheduled:
        new.backing_off, new.until = line.backing_off, line.until
        state.backing_off[line.backing_off[0]] = key
    new.parked = [offset for offset in line.parked if any(offset in items for items in (state.buried_set, state.moving, moved))]
    new.kept_positions = line.kept_positions
    for extent in line.waiting:
        ready = RunSet((extent.start, extent.stop))
        for others in (state.completed, state.buried_set, state.moving, leased, state.scheduled, state.passed_over):
            ready.remove_all(others.within(extent.start, extent.stop))
        for part in extent.parts(ready.runs):
            new.push(part)
        state.passed_over.add_all(ready.runs)
    if new.busy or new.waiting:
        state.keys.by_key[key] = new
        state.keys.update_head(key, new)
