"""Settling leases: complete, retry, bury, extend, report progress.

Owns: these decisions and their application, and `return_items`, which makes items of a lease ready again.
- A lease that has ended holds nothing: settling its items is refused, unless it repeats a
  `complete` that was done. Follow-ups make it another call: a `complete` of completed items is refused if it has some.
- Each item of a batch has its own result: some may be settled while others are refused.
- Several items of one key under one lease are a unit, settled in order. When one is returned or buried, the later ones
  are returned to their positions; for these no attempt is counted. With `keep_later_items` a burial leaves them leased.
- `decide_complete_unleased` completes items without a lease. A Spark stream that holds the consumer right may commit
  items after its leases ended. Such an item is completed if no consumer has leased it since, so that it is still ready.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import TypeAlias

from penstock.rules.calls import FORMER, CallName, RememberedAnswer, check_calls
from penstock.rules.commands import (
    AskAgain,
    BuryLeased,
    CompleteLeased,
    CompleteUnleased,
    ExtendLease,
    ItemCount,
    RememberCall,
    RetryLeased,
    SetProgress,
    Settled,
)
from penstock.rules.item_states import ItemState
from penstock.rules.lanes import KEYED, Extent
from penstock.rules.leases import LiveLease
from penstock.rules.outbox import follow_up_records
from penstock.rules.records import (
    Buried,
    CallAnswered,
    Completed,
    CompletedUnleased,
    Extended,
    Lost,
    ProgressSet,
    Record,
    RequestAnswered,
    Retried,
    unpack_keys_or_none,
)
from penstock.rules.removal import (
    ATTEMPTS_EXHAUSTED,
    LEASE_EXPIRED,
    TTL_EXPIRED,
    add_burial,
    attempts_exhausted,
    bury_held,
    end_if_empty,
    keys_in_line,
    parks_key,
    release_if_unused,
    remove_from_line,
    withdraw_items,
)
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.state import BlockSource, Failure, State
from penstock.words.batch import check_name
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, LeaseLost
from penstock.words.limits import MAX_DELAY, MAX_REASON_BYTES, check_lease_timeout, check_range

Settle: TypeAlias = CompleteLeased | RetryLeased | BuryLeased | ExtendLease
MAX_ENDED_PROGRESS = 2_000
"""When there are this many more progress texts than live leases, those of ended leases are deleted."""


def validate_retry(command: RetryLeased) -> str:
    """Check a retry; returns its reason, truncated. Raises InvalidRequest."""
    check_range("delay", command.delay, 0, MAX_DELAY)
    if type(command.counted) is not bool:
        raise InvalidRequest(f"counted is {type(command.counted).__name__}; give True or False")
    return truncate_reason(command.reason)


def validate_extend(command: ExtendLease) -> ExtendLease:
    check_calls(command.calls)
    if command.timeout:
        check_lease_timeout(command.timeout)
    return command


def truncate_reason(reason: str) -> str:
    """The reason, cut to MAX_REASON_BYTES. Reasons come from exceptions: a long one must not fail the call."""
    if not isinstance(reason, str):
        raise InvalidRequest(f"the reason is {type(reason).__name__}; give a text")
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")


def decide_complete(state: State, command: CompleteLeased, now: Moment, blocks: BlockSource) -> tuple[list[Record], Settled]:
    _validate(command)
    if (known := _remembered_answer(state, command, now)) is not None:
        return [], known
    lease = _live_lease(state, command.lease, now)
    if command.offsets is None:
        if lease is None:
            if command.lease in state.leases.fully_completed:
                _refuse_late_follow_ups(command)
                return [], Settled(0)
            raise _lost(command.lease)
        return _with_answer(command, [Completed(command.lease), *follow_up_records(state, command.follow_ups)], Settled(lease.count))
    if lease is None:
        known = _answer_under_ended_lease(state, command.lease, command.offsets)
        _refuse_partial(command, known.refused)
        _refuse_late_follow_ups(command)
        return [], known
    good, refused, early = _divide(lease, command.offsets)
    repeated = 0
    if refused and lease.completed is not None:
        asked, completed = len(refused), lease.completed
        refused = [offset for offset in refused if offset not in completed]
        repeated = asked - len(refused)
    _refuse_partial(command, refused)
    if repeated:
        _refuse_late_follow_ups(command)
    if command.follow_ups and early:
        raise InvalidRequest(
            "an earlier item of the same key is held by this lease and not settled; complete that item first, or in the same call"
        )
    records: list[Record] = [Completed(command.lease, from_offsets(good)), *follow_up_records(state, command.follow_ups)] if good else []
    return _with_answer(command, records, Settled(len(good) + repeated, refused, early))


def _refuse_partial(command: CompleteLeased, refused: list[int]) -> None:
    """Raise LeaseLost if items are refused and the command has follow-ups: these need all of its items."""
    if command.follow_ups and refused:
        raise LeaseLost(
            "some of the items are not held by this lease (any more), so nothing was completed and no follow-up made; drop the work"
        )


def _refuse_late_follow_ups(command: CompleteLeased) -> None:
    """Raise InvalidRequest if the command has follow-ups, for a command about items that were completed before.

    A call that is repeated after its answer was lost does not come here: its answer is remembered.
    """
    if command.follow_ups:
        raise InvalidRequest(
            "an item was completed before, so this call made no follow-ups; give them with the call that completes the item"
        )


def decide_retry(state: State, command: RetryLeased, now: Moment, blocks: BlockSource) -> tuple[list[Record], Settled]:
    _validate(command)
    reason = validate_retry(command)
    if (known := _remembered_answer(state, command, now)) is not None:
        return [], known
    lease, chosen, refused, early = _leased_items(state, now, command.lease, command.offsets)
    returned, expired, exhausted = [], [], []
    for offset in _first_of_units(lease, chosen):
        if offset in state.ttl_overdue:
            expired.append(offset)
        elif command.counted and attempts_exhausted(state.policy, state.attempts(offset) + 1):
            exhausted.append(offset)
        else:
            returned.append(offset)
    records: list[Record] = []
    exhausted_reason = f"{ATTEMPTS_EXHAUSTED}: {reason}" if reason else ATTEMPTS_EXHAUSTED
    for buried, why in ((expired, TTL_EXPIRED), (exhausted, exhausted_reason)):
        if buried:
            records.append(_bury(state, lease, buried, why))
    if returned:
        due = now.elapsed + command.delay if command.delay else 0
        records.append(Retried(command.lease, from_offsets(returned), due, reason, command.counted, _later_items(lease, returned)))
    return _with_answer(command, records, Settled(len(chosen), refused, early, sorted([*expired, *exhausted])))


def decide_bury(state: State, command: BuryLeased, now: Moment, blocks: BlockSource) -> tuple[list[Record], Settled]:
    _validate(command)
    if (known := _remembered_answer(state, command, now)) is not None:
        return [], known
    lease, chosen, refused, early = _leased_items(state, now, command.lease, command.offsets)
    keep_later = command.keep_later_items and not parks_key(state.policy)
    if keep_later and early:
        chosen, early = sorted([*chosen, *early]), []
    records: list[Record] = [_bury(state, lease, chosen, truncate_reason(command.reason), keep_later)] if chosen else []
    return _with_answer(command, records, Settled(len(chosen), refused, early))


def decide_extend(state: State, command: ExtendLease, now: Moment, blocks: BlockSource) -> tuple[list[Record], Settled]:
    validate_extend(command)
    if (known := _remembered_answer(state, command, now)) is not None:
        return [], known
    lease = state.leases.live.get(command.lease) if command.after_deadline else _live_lease(state, command.lease, now)
    if lease is None:
        raise _lost(command.lease)
    deadline = now.elapsed + (command.timeout or lease.timeout)
    return _with_answer(command, [Extended(command.lease, deadline)], Settled(lease.count))


def decide_set_progress(state: State, command: SetProgress, now: Moment, blocks: BlockSource) -> tuple[list[Record], Settled]:
    text = truncate_reason(command.text)
    _, chosen, _, _ = _leased_items(state, now, command.lease, [command.offset])
    if not chosen:
        raise _lost(command.lease)
    return [ProgressSet(command.lease, command.offset, text)], Settled(1)


def decide_remember_call(state: State, command: RememberCall, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    check_calls(command.calls)
    return [CallAnswered([*command.calls], [*command.answers])], ItemCount(0)


def decide_complete_unleased(
    state: State, command: CompleteUnleased, now: Moment, blocks: BlockSource
) -> tuple[list[Record], ItemCount | AskAgain]:
    check_name("consumer", command.consumer)
    chosen = [offset for offset in sorted(set(command.offsets)) if state.state_of(offset) is ItemState.READY]
    if command.only_lease_expired:  # not items that are ready for another reason, for example after a seek
        chosen = [offset for offset in chosen if (known := state.failures.get(offset)) is not None and known.reason == LEASE_EXPIRED]
    if not chosen:
        return [], ItemCount(0)
    keys = keys_in_line(state, chosen, blocks)
    if isinstance(keys, Lost):
        return [keys], AskAgain()
    return [CompletedUnleased(from_offsets(chosen), command.consumer, keys)], ItemCount(len(chosen))


def _with_answer(command: Settle, records: list[Record], answer: Settled) -> tuple[list[Record], Settled]:
    """Add the record of the answer if the call has a name, so that it may be repeated, and changed something."""
    if command.calls and records:
        remembered = RememberedAnswer(0, answer.done, None, command.lease, answer.refused, answer.early, None, command.part, answer.buried)
        records.append(CallAnswered([*command.calls], [remembered]))
    return records, answer


def _validate(command: CompleteLeased | RetryLeased | BuryLeased) -> None:
    if type(command.lease) is not int:
        raise InvalidRequest(f"the lease is {type(command.lease).__name__}; give the number that the lease answered")
    if command.offsets is not None and set(map(type, command.offsets)) - {int}:
        raise InvalidRequest("an offset is not a whole number; give those that the lease answered")
    check_calls(command.calls)


def _remembered_answer(state: State, command: Settle, now: Moment) -> Settled | None:
    """What the same part of the same call was answered before; None if it is new or forgotten."""
    if not command.calls:
        return None
    known = state.calls.answers(command.calls, now.elapsed) or ()
    return next((Settled(one.count, one.refused, one.early, one.buried) for one in known if one.part == command.part), None)


def _lost(number: int) -> LeaseLost | InvalidRequest:
    if not number:
        return InvalidRequest("lease 0 means that no items were leased; check the lease number before settling")
    return LeaseLost(f"lease {number:#x} has ended; drop the work, its items may be with someone else")


def _live_lease(state: State, number: int, now: Moment) -> LiveLease | None:
    """The lease, or None if it has ended. Past its deadline a lease has ended even before a record says so."""
    lease = state.leases.live.get(number)
    return None if lease is None or lease.deadline <= now.elapsed else lease


def _leased_items(
    state: State, now: Moment, number: int, wanted: Sequence[int] | None
) -> tuple[LiveLease, list[int], list[int], list[int]]:
    """The live lease, and the wanted offsets (None: all its open items) as `_divide` gives them. Raises LeaseLost."""
    lease = _live_lease(state, number, now)
    if lease is None:
        raise _lost(number)
    if wanted is None:
        return lease, list(lease.open_items), [], []
    return lease, *_divide(lease, wanted)


def _divide(lease: LiveLease, wanted: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Three lists: offsets that may be settled, each once; offsets that the lease does not hold; and offsets that are
    early, because an open item before them in their unit is not wanted."""
    if lease.has_one_item and len(wanted) == 1 and wanted[0] == lease.runs()[0]:  # without the dict of its items
        return [*wanted], [], []
    opened = lease.open_items
    unique = wanted if len(wanted) == 1 else list(dict.fromkeys(wanted))
    good = [offset for offset in unique if offset in opened]
    refused = [offset for offset in unique if offset not in opened] if len(good) < len(unique) else []
    if not lease.items_per_key:
        return good, refused, []
    early: set[int] = set()
    for key, chosen in _by_key(lease, good).items():
        settled = set(takewhile(chosen.__contains__, lease.unit(key)))
        early |= chosen - settled
    return [offset for offset in good if offset not in early] if early else good, refused, sorted(early)


def _by_key(lease: LiveLease, chosen: Iterable[int]) -> dict[int, set[int]]:
    """Key → the chosen items that have it; without items that have no key."""
    found: dict[int, set[int]] = {}
    for offset in chosen:
        key = lease.open_items[offset][1]
        if key != NO_KEY:
            found.setdefault(key, set()).add(offset)
    return found


def _answer_under_ended_lease(state: State, number: int, wanted: Sequence[int]) -> Settled:
    """The answer to a `complete` under an ended lease: items that it completed count, others are refused."""
    past_deadline = state.leases.live.get(number)
    if past_deadline is not None:
        known = past_deadline.completed or RunSet()
    elif number in state.leases.fully_completed:
        known = state.completed
    else:
        known = RunSet(state.leases.partly_completed.get(number, (0, []))[1])
    unique = dict.fromkeys(wanted)
    refused = [offset for offset in unique if offset not in known]
    return Settled(len(unique) - len(refused), refused)


def _first_of_units(lease: LiveLease, chosen: list[int]) -> list[int]:
    """The chosen items, but of each unit only the first: the later ones are returned with it."""
    if not lease.items_per_key:
        return chosen
    later = set(offsets(_later_items(lease, chosen)))
    return [offset for offset in chosen if offset not in later]


def _later_items(lease: LiveLease, chosen: list[int]) -> list[int]:
    """Runs of the open items that come after a chosen item in its unit."""
    if not lease.items_per_key:
        return []
    firsts = [next(filter(some.__contains__, lease.unit(key))) for key, some in _by_key(lease, chosen).items()]
    return from_offsets(sorted(later for first in firsts for later in lease.later_of_key(first)))


def _bury(state: State, lease: LiveLease, chosen: list[int], reason: str, keep_later: bool = False) -> Buried:
    returned = RunSet(() if keep_later else _later_items(lease, chosen))
    for offset in chosen:
        returned.remove(offset, offset + 1)
    return bury_held(state, lease, chosen, reason, returned.runs)


# -- applying -----------------------------------------------------------------------------------------


def apply_completed(state: State, record: Completed, now: Moment) -> None:
    lease = state.leases.live.get(record.lease)
    if lease is None:  # damage took the record of the lease
        state.completed.add_all(record.runs or ())
        state.outside_lanes.add_all(record.runs or ())
        return
    runs = lease.runs() if record.runs is None else record.runs
    whole = record.runs is None or (lease.has_one_item and runs == lease.runs())
    if whole:
        keys = lease.keys()
        if keys:
            state.keys.release(keys, lease.number)
        if lease.count < lease.size:
            lease.add_completed(runs)
            lease.count = 0
    else:
        for offset in offsets(runs):
            _, key = lease.close(offset)
            release_if_unused(state, lease, key)
        lease.add_completed(runs)
    _resolve(state, runs)
    if whole or not lease.count:
        state.leases.end(lease, now.elapsed, state.policy.result_memory)


def apply_completed_unleased(state: State, record: CompletedUnleased, now: Moment) -> None:
    withdraw_items(state, record.runs, record.keys)
    state.completed.add_all(record.runs)


def _resolve(state: State, runs: list[int]) -> None:
    state.completed.add_later(runs)
    if state.ttl_overdue.total:
        state.ttl_overdue.remove_all(runs)
    if state.failures:
        for offset in offsets(runs):
            state.failures.pop(offset, None)


def apply_retried(state: State, record: Retried, now: Moment) -> None:
    lease = state.leases.live.get(record.lease)
    if lease is None:
        return
    positions = _late_positions(state, lease, {*offsets(record.runs), *offsets(record.returned)})
    _return_later_items(state, lease, record.returned, now, positions)
    return_items(state, lease, offsets(record.runs), now, reason=record.reason, due=record.due, counted=record.counted, positions=positions)


def _late_positions(state: State, lease: LiveLease, chosen: set[int]) -> dict[int, int]:
    """The positions at which items of units return, where these are not their own: an item that became ready late may
    have a lower offset than those before it in its unit, and comes right after them."""
    found: dict[int, int] = {}
    if max(lease.items_per_key.values(), default=0) < 2:
        return found
    last: dict[int, int] = {}
    for offset, (_, key) in lease.open_items.items():
        if key != NO_KEY and offset in chosen:
            position = state.keys.line(key).position(offset)
            if position <= last.get(key, -1):
                position = found[offset] = last[key] + 1
            last[key] = position
    return found


def _return_later_items(state: State, lease: LiveLease, returned: list[int], now: Moment, positions: dict[int, int]) -> None:
    """Return later items of units to their lines, the last first. An item whose ttl has passed gets a
    timer that buries it at once."""
    chosen = set(offsets(returned))
    for offset in [offset for offset in lease.open_items if offset in chosen][::-1] if chosen else ():
        lane, key = lease.close(offset)
        _return_to_line(state, offset, lane, key, now, position=positions.get(offset))
        if offset in state.ttl_overdue:
            state.ttl_overdue.remove(offset, offset + 1)
            state.ttl.add(now.elapsed, offset, offset + 1)


def return_items(
    state: State,
    lease: LiveLease,
    failed: list[int],
    now: Moment,
    *,
    reason: str,
    due: int = 0,
    counted: bool = True,
    positions: dict[int, int] | None = None,
) -> None:
    """Make items of a lease ready at `due` or at once: last of their lane or, with a key, first of its line."""
    shared: dict[Failure, Failure] = {}
    if positions is None:
        positions = _late_positions(state, lease, set(failed))
    to_lanes: list[tuple[int, int]] = []
    for offset in _return_order(lease, failed):
        lane, key = lease.close(offset)
        if counted:
            add_failure(state, offset, now, reason, shared)
        if key != NO_KEY:
            _return_to_line(state, offset, lane, key, now, due, positions.get(offset))
        elif due:
            state.by_elapsed.add(due, offset, offset + 1, lane)
            state.new_times.follow(offset, (False, due, lane))
            state.scheduled.add(offset, offset + 1)
        else:
            to_lanes.append((lane, offset))
    for lane, same_lane in groupby(to_lanes, key=itemgetter(0)):
        for start, stop in pairs(from_offsets(offset for _, offset in same_lane)):
            state.outside_lanes.remove(start, stop)
            state.lanes.add(lane, start, stop, 0, state.next_offset, now.elapsed)
    end_if_empty(state, lease, now.elapsed)


def _return_order(lease: LiveLease, failed: list[int]) -> list[int]:
    """The order of returning items: of one key the last first, because each goes to the front of the line."""
    if not lease.items_per_key:
        return failed
    keyless = [offset for offset in failed if lease.open_items[offset][1] == NO_KEY]
    return keyless + [offset for offset in reversed(failed) if lease.open_items[offset][1] != NO_KEY]


def _return_to_line(state: State, offset: int, lane: int, key: int, now: Moment, due: int = 0, position: int | None = None) -> None:
    """Put a leased item back to the front of its key line; with `due` it backs off, and the whole line waits."""
    line = state.keys.line(key)
    line.lease = 0
    if due:
        line.backing_off, line.until = (offset, lane), due
        state.backing_off[offset] = key
        state.scheduled.add(offset, offset + 1)
        state.by_elapsed.add(due, offset, offset + 1, lane | KEYED)
        state.new_times.follow(offset, (False, due, lane | KEYED))
    else:
        line.waiting.appendleft(Extent(offset, offset + 1, lane, line.position(offset) if position is None else position, now.elapsed))
        state.passed_over.add(offset, offset + 1)
    state.keys.update_head(key, line)


def add_failure(state: State, offset: int, now: Moment, reason: str, shared: dict[Failure, Failure] | None = None) -> None:
    """Count a failed attempt. Equal failures share one object of `shared`: a million items may fail together."""
    known = state.failures.get(offset)
    first = known.first_failed_at if known else now.wall
    failure = Failure((known.attempts if known else 0) + 1, first, now.wall, reason)
    state.failures[offset] = failure if shared is None else shared.setdefault(failure, failure)


def apply_extended(state: State, record: Extended, now: Moment) -> None:
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        state.leases.extend(lease, record.deadline)


def apply_progress_set(state: State, record: ProgressSet, now: Moment) -> None:
    if len(state.progress) > MAX_ENDED_PROGRESS + len(state.leases.live):
        state.progress = state.live_progress()
    state.progress[record.offset] = (record.lease, record.text)


def apply_request_answered(state: State, record: RequestAnswered, now: Moment) -> None:
    answer = RememberedAnswer(count=record.count, ids=record.ids, lease=record.lease, refused=record.refused, early=record.early)
    state.calls.put([CallName(record.request, 1, FORMER)], [answer], now.elapsed, state.policy.result_memory)


def apply_call_answered(state: State, record: CallAnswered, now: Moment) -> None:
    state.calls.put(record.calls, record.answers, now.elapsed, state.policy.result_memory)


def apply_buried(state: State, record: Buried, now: Moment) -> None:
    if not record.lease:
        _bury_waiting(state, record, now)
        return
    lease = state.leases.live.get(record.lease)
    if lease is None:
        return
    positions = _late_positions(state, lease, set(offsets(record.returned)))
    for offset in offsets(record.runs):
        add_failure(state, offset, now, record.reason)
        _, key = lease.close(offset)
        add_burial(state, offset, record.reason, now)
        if record.park and key != NO_KEY:
            state.keys.line(key).parked.append(offset)  # before the lease releases the key
        release_if_unused(state, lease, key)
    _return_later_items(state, lease, record.returned, now, positions)
    end_if_empty(state, lease, now.elapsed)


def _bury_waiting(state: State, record: Buried, now: Moment) -> None:
    """Bury items that are not leased: take them out of their lane, schedule or key line."""
    chosen = offsets(record.runs)
    for offset, key in zip(chosen, unpack_keys_or_none(record.keys, len(chosen)), strict=True):
        remove_from_line(state, offset, key, park=record.park)
        add_burial(state, offset, record.reason, now)
    state.scheduled.remove_all(record.runs)
    state.outside_lanes.add_all(record.runs)
