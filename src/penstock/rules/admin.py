"""Administrative operations on a partition: configure, pause, clear, seek, redrive, release a parked key.

Owns: these decisions and their application, and the application of the records `Opened` and `Lost`.
"""

from penstock.rules.commands import AskAgain, Clear, Configure, ItemCount, Pause, Redrive, ReleaseParkedKey, Seek
from penstock.rules.item_states import ItemState, Transition, next_state, states_allowing
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import KEYED, PRIORITY_MASK, Extent
from penstock.rules.outbox import moved_runs
from penstock.rules.records import (
    Cleared,
    Configured,
    Lost,
    Opened,
    ParkedKeyReleased,
    Paused,
    Record,
    RedrivenInPlace,
    Sought,
    pack_keys,
    unpack_keys_or_none,
)
from penstock.rules.removal import (
    ATTEMPTS_EXHAUSTED,
    attempts_exhausted,
    bury_waiting,
    end_if_empty,
    release_if_unused,
    remove_from_line,
)
from penstock.rules.restore import check_not_in_hole
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, count, from_offsets, offsets, pairs
from penstock.rules.state import BlockSource, State, find_blocks, lost_runs
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from penstock.words.limits import DEFAULT_PRIORITY, Policy, check_range

# -- opening -----------------------------------------------------------------------------------------


def apply_opened(state: State, record: Opened, now: Moment) -> None:
    state.epoch, state.boot_id, state.clock_shift = record.epoch, record.boot_id, record.clock_shift
    state.leases_given = state.first_lease
    if record.rebooted:
        # Elapsed time does not tell how long the machine was off: every lease gets its full timeout again.
        state.leases.restart_timeouts(now.elapsed)
    if record.lease_grace:
        state.leases.extend_all(now.elapsed + record.lease_grace)


# -- configure, pause --------------------------------------------------------------------------------


def decide_configure(state: State, command: Configure, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount | AskAgain]:
    if not isinstance(command.policy, Policy):
        raise InvalidRequest(f"the policy is {type(command.policy).__name__}; give a Policy")
    policy = command.policy.validate()
    if policy == state.policy:
        return [], ItemCount(0)
    records: list[Record] = [Configured(policy)]
    without_lease = states_allowing(Transition.BURIED) - {ItemState.LEASED}
    exhausted = sorted(
        o for o, failure in state.failures.items() if attempts_exhausted(policy, failure.attempts) and state.state_of(o) in without_lease
    )
    if exhausted:
        buried = bury_waiting(state, policy, from_offsets(exhausted), ATTEMPTS_EXHAUSTED, blocks)
        if isinstance(buried, Lost):
            return [buried], AskAgain()
        records.append(buried)
    return records, ItemCount(len(exhausted))


def apply_configured(state: State, record: Configured, now: Moment) -> None:
    state.policy = record.policy


def decide_pause(state: State, command: Pause, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    if {type(command.lease), type(command.produce)} - {bool, type(None)}:
        raise InvalidRequest("pause takes True, False or None for lease and produce")
    lease = state.paused_lease if command.lease is None else command.lease
    produce = state.paused_produce if command.produce is None else command.produce
    if (lease, produce) == (state.paused_lease, state.paused_produce):
        return [], ItemCount(0)
    return [Paused(lease, produce)], ItemCount(0)


def apply_paused(state: State, record: Paused, now: Moment) -> None:
    state.paused_lease, state.paused_produce = record.lease, record.produce


# -- clear -------------------------------------------------------------------------------------------


def decide_clear(state: State, command: Clear, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    chosen = {each.value: state.runs_in(each) for each in states_allowing(Transition.CLEARED) if getattr(command, each.value)}
    record, items = Cleared(**chosen), sum(map(count, chosen.values()))
    freed: list[Record] = []
    if command.buried:  # also release keys whose buried items were transferred to another partition
        freed += [ParkedKeyReleased(key) for key, line in state.keys.lines() if line.parked]
    return [*([record] if items else []), *freed], ItemCount(items)


def apply_cleared(state: State, record: Cleared, now: Moment) -> None:
    if record.ready:
        state.lanes.clear()
        for key, line in state.keys.lines():
            line.waiting.clear()
            state.keys.update_head(key, line)
        state.passed_over.clear()
    if record.scheduled:
        state.by_wall.clear()
        state.by_elapsed.clear()
        state.new_times.clear()
        state.scheduled.clear()
        for offset in list(state.backing_off):
            remove_from_line(state, offset, NO_KEY)
    if record.leased:
        for lease in list(state.leases.live.values()):
            state.keys.release(lease.keys(), lease.number)
            for offset in list(lease.open_items):
                lease.close(offset)
            end_if_empty(state, lease, now.elapsed)
        state.ttl_overdue.clear()
    if record.buried:
        for offset in offsets(record.buried):  # the burials of moving items stay
            state.burials.pop(offset, None)
        state.buried_set.remove_all(record.buried)
        for key, line in state.keys.lines():
            if line.parked:
                line.parked.clear()
                state.keys.update_head(key, line)
    for runs in (record.ready, record.scheduled, record.leased, record.buried):
        state.completed.add_all(runs)
        state.outside_lanes.add_all(runs)
    for offset in [offset for offset in state.failures if offset in state.completed]:
        del state.failures[offset]


# -- seek --------------------------------------------------------------------------------------------


def decide_seek(state: State, command: Seek, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    check_range("offset", command.offset, 0, 1 << 62)
    check_not_in_hole(state, command.offset)
    found = RunSet(state.completed.within(command.offset, state.next_offset))
    found.remove_all(state.lost.runs)
    found.remove_all(state.cancelled.runs)
    found.remove_all(state.dropped.runs)
    found.remove_all(moved_runs(state))
    return ([Sought(found.runs)] if found else []), ItemCount(len(found))


def apply_sought(state: State, record: Sought, now: Moment) -> None:
    """Make completed items ready again, in log order and without a ttl.

    Items that wait in a key line stay there: a lease that reads the lanes puts sought items into the line before them.
    """
    _remove_old_entries(state, record.runs)
    state.completed.remove_all(record.runs)
    state.outside_lanes.remove_all(record.runs)
    if state.keys.fences:  # at their old positions they would stand before the fences and overtake what these wait for
        for start, stop in pairs(record.runs):
            state.lanes.add(DEFAULT_PRIORITY, start, stop, KEYED, state.next_offset, now.elapsed)
    else:
        state.lanes.merge([(DEFAULT_PRIORITY, Extent(start, stop, KEYED, start, now.elapsed)) for start, stop in pairs(record.runs)])
    sought = RunSet(record.runs)
    state.ttl.keep(lambda entry: sought.missing(entry.start, entry.stop))


def _remove_old_entries(state: State, runs: list[int]) -> None:
    """Remove stale extents and calendar entries of items that become ready again, so that no item has two positions."""
    state.lanes.drop(runs)
    again = RunSet(runs)
    for calendar in (state.by_wall, state.by_elapsed):
        if calendar:
            calendar.keep(lambda entry: again.missing(entry.start, entry.stop))


# -- redrive -----------------------------------------------------------------------------------------


def decide_redrive(state: State, command: Redrive, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount | AskAgain]:
    chosen = offsets(state.buried_set.runs) if command.offsets is None else sorted(set(command.offsets))
    chosen = [offset for offset in chosen if offset not in state.lost]  # damage may have been found since the caller chose them
    for offset in chosen:
        next_state(state.state_of(offset), Transition.REDRIVEN)
    found = find_blocks(blocks, chosen)
    if lost := lost_runs(state, found):
        return [Lost(lost)], AskAgain()
    keys = [block.key_of(offset) for offset, block in zip(chosen, found, strict=True)]
    tags = [block.priority_of(o) | (KEYED if key else 0) for o, key, block in zip(chosen, keys, found, strict=True)]
    if not chosen:
        return [], ItemCount(0)
    return [RedrivenInPlace(from_offsets(chosen), bytes(tags), pack_keys(keys) if any(keys) else b"")], ItemCount(len(chosen))


def apply_redriven(state: State, record: RedrivenInPlace, now: Moment) -> None:
    _remove_old_entries(state, record.runs)
    chosen = offsets(record.runs)
    keys = unpack_keys_or_none(record.keys, len(chosen))
    for offset, tag, key in zip(chosen, record.tags, keys, strict=True):
        line = state.keys.line(key) if key in state.keys.by_key else None
        if line is not None and offset in line.parked:
            line.parked.remove(offset)
            line.push(Extent(offset, offset + 1, tag & PRIORITY_MASK, line.position(offset), now.elapsed))
            state.passed_over.add(offset, offset + 1)
            state.keys.update_head(key, line)
    for offset, tag in zip(chosen, record.tags, strict=True):
        if offset not in state.passed_over:
            state.outside_lanes.remove(offset, offset + 1)
            state.lanes.add(tag & PRIORITY_MASK, offset, offset + 1, tag & KEYED, state.next_offset, now.elapsed)
        state.burials.pop(offset, None)  # missing when damage took the record of the burial
    state.buried_set.remove_all(record.runs)


def decide_release_parked_key(state: State, command: ReleaseParkedKey, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    line = state.keys.by_key.get(command.key)
    parked = len(line.parked) if isinstance(line, KeyLine) else 0
    return ([ParkedKeyReleased(command.key)] if parked else []), ItemCount(parked)


def apply_parked_key_released(state: State, record: ParkedKeyReleased, now: Moment) -> None:
    line = state.keys.line(record.key)
    line.parked.clear()
    state.keys.update_head(record.key, line)


# -- damage ------------------------------------------------------------------------------------------


def apply_lost(state: State, record: Lost, now: Moment) -> None:
    """Resolve items whose bytes are lost, whatever their state was."""
    for start, stop in pairs(record.runs):
        if start >= stop:
            continue
        state.next_offset = max(state.next_offset, stop)
        for lease in list(state.leases.live.values()):
            for offset in [offset for offset in lease.open_items if start <= offset < stop]:
                _, key = lease.close(offset)
                release_if_unused(state, lease, key)
            end_if_empty(state, lease, now.elapsed)
        in_lines = RunSet(state.passed_over.within(start, stop))
        in_lines.add_all(offset for o in state.backing_off if start <= o < stop for offset in (o, o + 1))
        in_lines.add_all(state.buried_set.within(start, stop))
        in_lines.add_all(state.moving.within(start, stop))
        if in_lines:
            state.keys.remove_lost(in_lines)
        for offset in offsets(in_lines.runs):
            state.backing_off.pop(offset, None)
            state.burials.pop(offset, None)
        for entry in (entry for entries in state.outbox.values() for entry in entries):
            entry.runs = RunSet(entry.runs).subtract((start, stop))
        for items in (state.passed_over, state.scheduled, state.buried_set, state.ttl_overdue, state.moving):
            items.remove(start, stop)
        state.lanes.drop((start, stop))
        for offset in [offset for offset in state.failures if start <= offset < stop]:
            del state.failures[offset]
        state.lost.add(start, stop)
        state.completed.add(start, stop)
        state.outside_lanes.add(start, stop)
