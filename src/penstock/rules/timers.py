"""What comes due by itself: leases end, schedules arrive, ttls run out.

Owns: `decide_due` and the application of its records. Bounded: about `limit` items per call; whoever calls looks at
`State.next_due` and comes again. A lease is ended only when its deadline has really passed, whatever the item's attempts; a ttl
never buries an item that is leased, but one that comes back overdue.
"""

from penstock.rules.calendar import Calendar
from penstock.rules.lanes import KEYED, PRIORITY_MASK, Extent
from penstock.rules.leases import LiveLease
from penstock.rules.records import Due, LeaseExpired, Lost, Record, TtlChecked
from penstock.rules.removal import LEASE_EXPIRED, SPENT, TTL_EXPIRED, attempts_exhausted, bury_held, bury_waiting
from penstock.rules.runs import RunSet, pairs
from penstock.rules.settle import return_items
from penstock.rules.state import BlockSource, State
from penstock.words.clock import Moment


def decide_due(state: State, now: Moment, limit: int, peek: BlockSource) -> list[Record]:
    """Records of what came due, or none. May raise Missing."""
    elapsed, wall = state.next_due()
    records: list[Record] = []
    if wall is not None and wall <= now.wall:
        records.append(_due(state, state.by_wall, now.wall, limit, by_wall=True))
    if elapsed is not None and elapsed <= now.elapsed:
        if (when := state.by_elapsed.next()) is not None and when <= now.elapsed:
            records.append(_due(state, state.by_elapsed, now.elapsed, limit, by_wall=False))
        for grant in state.leases.past_deadline(now.elapsed, limit):
            records += _end_lease(state, grant)
        if not records:  # judged on a state in which leases and schedules have settled
            records += _age(state, now, limit, peek)
    return records


def _due(state: State, calendar: Calendar, now: int, limit: int, *, by_wall: bool) -> Due:
    entries = calendar.due(now, limit)
    runs: list[int] = []
    tags: list[int] = []
    for entry in entries:
        for start, stop in pairs(state.scheduled.within(entry.start, entry.stop)):
            runs += (start, stop)
            tags.append(entry.tag)
    return Due(by_wall, entries[-1].when, entries[-1].stop - 1, runs, tags)


def _end_lease(state: State, grant: LiveLease) -> list[Record]:
    """What is spent or overdue is buried, the rest goes back."""
    given_up: dict[str, list[int]] = {TTL_EXPIRED: [], f"{SPENT}: {LEASE_EXPIRED}": []}
    overdue, spent = given_up.values()
    if state.ttl_overdue or state.failures or attempts_exhausted(state.policy, 1):
        for offset in grant.open_items:
            if offset in state.ttl_overdue:
                overdue.append(offset)
            elif attempts_exhausted(state.policy, state.attempts(offset) + 1):
                spent.append(offset)
    records: list[Record] = [bury_held(state, grant, chosen, reason) for reason, chosen in given_up.items() if chosen]
    if len(overdue) + len(spent) < grant.count:
        records.append(LeaseExpired(grant.number))
    return records


def _age(state: State, now: Moment, limit: int, peek: BlockSource) -> list[Record]:
    """Bury what waits beyond its ttl."""
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
        records.append(bury_waiting(state, state.policy, waiting.runs, TTL_EXPIRED, peek))
        if type(records[0]) is Lost:  # first out of the way, then judge the others
            return records
    records.append(TtlChecked(entry.when, stop - 1, leased.runs))
    return records


def apply_due(state: State, record: Due, now: Moment) -> None:
    calendar = state.by_wall if record.by_wall else state.by_elapsed
    calendar.discard(record.until, record.last)
    for (start, stop), tag in zip(pairs(record.runs), record.tags, strict=True):
        lane = tag & PRIORITY_MASK
        if not state.backing_off or not tag & KEYED:
            _into_lane(state, start, stop, tag, now)
            continue
        for offset in range(start, stop):
            if offset in state.backing_off:
                _back_in_line(state, offset, lane, now)
            else:
                _into_lane(state, offset, offset + 1, tag, now)


def _into_lane(state: State, start: int, stop: int, tag: int, now: Moment) -> None:
    state.scheduled.remove(start, stop)
    state.outside_lanes.remove(start, stop)
    state.lanes.add(tag & PRIORITY_MASK, start, stop, tag & KEYED, state.next_offset, now.elapsed)


def _back_in_line(state: State, offset: int, lane: int, now: Moment) -> None:
    """The delay of a keyed item is over: it is first in its line."""
    key = state.backing_off.pop(offset)
    state.scheduled.remove(offset, offset + 1)
    state.passed_over.add(offset, offset + 1)
    line = state.keys.line(key)
    line.backing_off = None
    line.waiting.appendleft(Extent(offset, offset + 1, lane, line.position(offset), now.elapsed))
    state.keys.update_head(key, line)


def apply_expired(state: State, record: LeaseExpired, now: Moment) -> None:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        return_items(state, grant, list(grant.open_items), now, reason=LEASE_EXPIRED)


def apply_aged(state: State, record: TtlChecked, now: Moment) -> None:
    state.ttl.discard(record.until, record.last)
    state.ttl_overdue.add_all(record.overdue)
