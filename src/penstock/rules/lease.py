"""Lease: ready items are given out, oldest first within priority, one at a time per key.

Owns: `decide_lease`, `apply_leased`, `apply_passed`. What is taken is planned in plan.py.
"""

from itertools import groupby

from penstock.rules.commands import AcquireLease, Answer, AskAgain, LeaseAnswer, StraysFound
from penstock.rules.lanes import Extent, Rank, aged_priority
from penstock.rules.lease_plan import LeasePlan
from penstock.rules.leases import EPOCH_SHIFT, LiveLease
from penstock.rules.records import LaneTake, Leased, Lost, PassedOver, Record, RequestAnswered, unpack_keys
from penstock.rules.runs import offsets, pairs
from penstock.rules.state import BlockSource, State
from penstock.words.batch import check_name, check_request
from penstock.words.clock import Moment
from penstock.words.limits import MAX_BATCH_ITEMS, check_lease_timeout, check_range

NOTHING = LeaseAnswer(0)


def validate_lease(command: AcquireLease) -> AcquireLease:
    check_range("want", command.want, 1, MAX_BATCH_ITEMS)
    check_range("per_key", command.per_key, 1, MAX_BATCH_ITEMS)
    if command.timeout:
        check_lease_timeout(command.timeout)
    check_name("consumer", command.consumer)
    check_request(command.request)
    return command


def decide_lease(state: State, command: AcquireLease, now: Moment, peek: BlockSource) -> tuple[list[Record], Answer]:
    validate_lease(command)
    if command.request is not None and (known := state.requests.get(command.request, now.elapsed)) is not None:
        grant = state.leases.live.get(known.lease)
        return [], NOTHING if grant is None else lease_answer(state, grant.number, grant.deadline, grant.runs())
    if state.paused_lease:
        return [], NOTHING
    timeout = command.timeout or state.policy.lease_timeout
    lease, deadline = state.next_lease, now.elapsed + timeout
    if command.request is None and (take := _plain(state, command, now.elapsed)) is not None:
        return [Leased(lease, deadline, timeout, command.consumer, [take])], lease_answer(state, lease, deadline, [take.start, take.stop])
    plan = LeasePlan(state, command, now, peek)
    plan.fill()
    if plan.lost is not None:
        return [Lost(plan.lost)], AskAgain()
    if plan.strays:
        return [], StraysFound(plan.strays)
    if not plan.count:
        return ([PassedOver(plan.takes)] if plan.takes else []), (AskAgain() if plan.more else NOTHING)
    records: list[Record] = [Leased(lease, deadline, timeout, command.consumer, plan.takes, plan.heads)]
    if command.request is not None:
        records.append(RequestAnswered(command.request, lease=lease))
    return records, lease_answer(state, lease, deadline, plan.runs)


def _plain(state: State, command: AcquireLease, now: int) -> LaneTake | None:
    """The commonest case without a plan: one lane, nothing with a key, enough in the first extent."""
    filled = [lane for lane, extents in enumerate(state.lanes.lanes) if extents]
    if len(filled) != 1 or any(state.keys.free_heads):
        return None
    extent = state.lanes.lanes[filled[0]][0]
    stop = extent.start + command.want
    if extent.tag or stop > extent.stop or state.outside_lanes.overlaps(extent.start, stop):
        return None
    if command.worst_rank is not None:
        priority = aged_priority(filled[0], extent.ready_at, state.policy.priority_aging, now)
        if Rank(priority, extent.ready_at) > command.worst_rank:
            return None
    return LaneTake(filled[0], extent.start, stop)


def lease_answer(state: State, lease: int, deadline: int, runs: list[int]) -> LeaseAnswer:
    """The answer to a lease, with the attempt numbers that are above 1."""
    failures = state.failures
    attempts = {offset: failures[offset].attempts + 1 for offset in failures.keys() & set(offsets(runs))} if failures else {}
    return LeaseAnswer(lease, deadline, runs, attempts)


def apply_leased(state: State, record: Leased, now: Moment) -> None:
    grant = LiveLease(record)
    for take in record.takes:
        _apply_take(state, take, record.lease, now)
    for head in record.line_takes:
        state.keys.take(head.key, head.start, head.stop)
        state.keys.hold((head.key,), record.lease)
        state.passed_over.remove(head.start, head.stop)
    state.leases.add(grant)
    epoch, given = record.lease >> EPOCH_SHIFT, record.lease & ((1 << EPOCH_SHIFT) - 1)
    if epoch > state.epoch:  # damage took the record of that opening; its numbers must not be given again all the same
        state.epoch, state.leases_given = epoch, 0
    state.leases_given = max(state.leases_given, given)


def apply_passed(state: State, record: PassedOver, now: Moment) -> None:
    for take in record.takes:
        _apply_take(state, take, 0, now)


def _apply_take(state: State, take: LaneTake, lease: int, now: Moment) -> None:
    extent = state.lanes.trim(take.lane, take.start, take.stop, take.left)
    if take.taken is None:
        state.outside_lanes.add(take.start, take.stop)
    else:
        state.outside_lanes.add_all(take.taken)
    if take.keys:
        state.keys.hold([key for key in unpack_keys(take.keys) if key], lease)
    if not take.passed:
        return
    ready_at = now.elapsed if extent is None else extent.ready_at
    state.outside_lanes.add_all(take.passed)
    state.passed_over.add_all(take.passed)
    keys = unpack_keys(take.passed_keys)
    for start, stop in pairs(take.passed):
        for key, same in groupby(zip(keys, range(start, stop)), lambda pair: pair[0]):  # noqa: B905 (keys go on)
            items = [offset for _, offset in same]
            position = items[0] if extent is None or extent.at_own_offset else extent.position
            state.keys.pass_over(key, Extent(items[0], items[-1] + 1, take.lane, position, ready_at))
        del keys[: stop - start]
