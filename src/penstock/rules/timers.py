"""Timers: leases expire, scheduled items become ready, ttls end.

Owns: `decide_due` and the application of its records, `into_lane` and `end_back_off`. One call decides about `limit`
items; the caller checks `State.next_due` and calls again. A lease expires only after its deadline, whatever the
attempts of its items. A ttl never buries a leased item, but it buries an item that is returned after its ttl ended.
"""

from penstock.rules.calendar import Calendar
from penstock.rules.lanes import KEYED, PRIORITY_MASK, Extent
from penstock.rules.leases import LiveLease
from penstock.rules.records import Due, LeaseExpired, Lost, Record, TtlChecked
from penstock.rules.removal import ATTEMPTS_EXHAUSTED, LEASE_EXPIRED, TTL_EXPIRED, attempts_exhausted, bury_held, bury_waiting
from penstock.rules.runs import RunSet, pairs
from penstock.rules.settle import return_items
from penstock.rules.state import BlockSource, State
from penstock.words.clock import Moment


def decide_due(state: State, now: Moment, limit: int, blocks: BlockSource) -> list[Record]:
    """The records of what is due now; empty if nothing is. Raises MissingBlocks."""
    elapsed, wall = state.next_due()
    records: list[Record] = []
    if wall is not None and wall <= now.wall:
        records.append(_due(state, state.by_wall, now.wall, limit, by_wall=True))
    if elapsed is not None and elapsed <= now.elapsed:
        if (when := state.by_elapsed.next()) is not None and when <= now.elapsed:
            records.append(_due(state, state.by_elapsed, now.elapsed, limit, by_wall=False))
        for lease in state.leases.past_deadline(now.elapsed, limit):
            records += _end_lease(state, lease)
        if not records:  # ttls are decided when the records of leases and schedules have been applied
            records += _check_ttls(state, now, limit, blocks)
    return records


def _due(state: State, calendar: Calendar, now: int, limit: int, *, by_wall: bool) -> Due:
    entries = calendar.due(now, limit)
    part = state.due_by(by_wall)
    runs: list[int] = []
    tags: list[int] = []
    for entry in entries:
        for start, stop in pairs(part(entry)):
            runs += (start, stop)
            tags.append(entry.tag)
    return Due(by_wall, entries[-1].when, entries[-1].stop - 1, runs, tags)


def _end_lease(state: State, lease: LiveLease) -> list[Record]:
    """Bury the items whose ttl ended or whose attempts are exhausted, return the others."""
    buried: dict[str, list[int]] = {TTL_EXPIRED: [], f"{ATTEMPTS_EXHAUSTED}: {LEASE_EXPIRED}": []}
    overdue, exhausted = buried.values()
    if state.ttl_overdue or state.failures or attempts_exhausted(state.policy, 1):
        for offset in lease.open_items:
            if offset in state.ttl_overdue:
                overdue.append(offset)
            elif attempts_exhausted(state.policy, state.attempts(offset) + 1):
                exhausted.append(offset)
    records: list[Record] = [bury_held(state, lease, chosen, reason) for reason, chosen in buried.items() if chosen]
    if len(overdue) + len(exhausted) < lease.count:
        records.append(LeaseExpired(lease.number))
    return records


def _check_ttls(state: State, now: Moment, limit: int, blocks: BlockSource) -> list[Record]:
    """Bury the waiting items whose ttl has ended."""
    entries = state.ttl.due(now.elapsed, limit)
    if not entries:
        return []
    waiting, leased = RunSet(), RunSet()
    for entry in entries:
        stop = min(entry.stop, entry.start + limit)
        waiting.add_all(state.waiting_within(entry.start, stop).runs)
        leased.add_all(state.leased_within(entry.start, stop).runs)
        if stop < entry.stop or len(waiting) + len(leased) >= limit:
            break
    records: list[Record] = []
    if waiting:
        records.append(bury_waiting(state, state.policy, waiting.runs, TTL_EXPIRED, blocks))
        if type(records[0]) is Lost:  # it must be applied before the others are buried
            return records
    records.append(TtlChecked(entry.when, stop - 1, leased.runs))
    return records


def apply_due(state: State, record: Due, now: Moment) -> None:
    calendar = state.by_wall if record.by_wall else state.by_elapsed
    calendar.discard(record.until, record.last)
    for (start, stop), tag in zip(pairs(record.runs), record.tags, strict=True):
        lane = tag & PRIORITY_MASK
        if not state.backing_off or not tag & KEYED:
            into_lane(state, start, stop, tag, now)
            continue
        for offset in range(start, stop):
            if offset in state.backing_off:
                end_back_off(state, offset, lane, now)
            else:
                into_lane(state, offset, offset + 1, tag, now)


def into_lane(state: State, start: int, stop: int, tag: int, now: Moment) -> None:
    """Make scheduled items ready, at the tail of their lane."""
    state.scheduled.remove(start, stop)
    state.outside_lanes.remove(start, stop)
    state.lanes.add(tag & PRIORITY_MASK, start, stop, tag & KEYED, state.next_offset, now.elapsed)


def end_back_off(state: State, offset: int, lane: int, now: Moment) -> None:
    """Make a keyed item ready at the end of its back-off, as the first of its line."""
    key = state.backing_off.pop(offset)
    state.scheduled.remove(offset, offset + 1)
    state.passed_over.add(offset, offset + 1)
    line = state.keys.line(key)
    line.backing_off = None
    line.waiting.appendleft(Extent(offset, offset + 1, lane, line.position(offset), now.elapsed))
    state.keys.update_head(key, line)


def apply_lease_expired(state: State, record: LeaseExpired, now: Moment) -> None:
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        return_items(state, lease, list(lease.open_items), now, reason=LEASE_EXPIRED)


def apply_ttl_checked(state: State, record: TtlChecked, now: Moment) -> None:
    state.ttl.discard(record.until, record.last)
    state.ttl_overdue.add_all(record.overdue)
