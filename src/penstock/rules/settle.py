"""Settling leases: complete, retry, bury, extend, note. The lease number is the fence.

Owns: the decisions and their application, and `come_back`, the way of items from a lease to their places. A lease that is not live holds
nothing: what it presents is refused, except a repeated `complete` of what was completed under it. In a batch each item has its own
result; good ones are done even when others are refused. Several items of one key under one lease are one unit: settled in order; when
one goes back or is buried, the later ones return to their places, their attempt given back. Whoever has handled them all may bury some
of them alone.
There is also completion by right, not by lease (`decide_consume`): a Spark stream that holds the consumer right may be away for longer
than its leases last; what it committed is done all the same, if nobody has taken it since: then it is ready, and still its own.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from penstock.rules.commands import (
    AskAgain,
    BuryLeased,
    CompleteLeased,
    CompleteUnleased,
    ExtendLease,
    ItemCount,
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
    Completed,
    CompletedUnleased,
    Extended,
    Lost,
    ProgressSet,
    Record,
    RequestAnswered,
    Retried,
    unpack_keys,
)
from penstock.rules.removal import (
    LEASE_EXPIRED,
    SPENT,
    TTL_EXPIRED,
    add_burial,
    attempts_exhausted,
    bury_held,
    keys_in_line,
    parks_key,
    remove_from_line,
    withdraw_items,
)
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.state import BlockSource, Failure, RememberedAnswer, State
from penstock.words.batch import check_name, check_request
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, LeaseLost
from penstock.words.limits import MAX_DELAY, MAX_REASON_BYTES, check_lease_timeout, check_range

Settle: TypeAlias = CompleteLeased | RetryLeased | BuryLeased | ExtendLease
NOTES = 1_000
"""About so many notes of leases that have ended may lie about."""


def validate_retry(command: RetryLeased) -> str:
    """Refuse a wrong retry; gives its reason, within its limit."""
    check_range("delay", command.delay, 0, MAX_DELAY)
    if type(command.counted) is not bool:
        raise InvalidRequest(f"counted is {type(command.counted).__name__}; give True or False")
    return truncate_reason(command.reason)


def validate_extend(command: ExtendLease) -> ExtendLease:
    check_request(command.request)
    if command.timeout:
        check_lease_timeout(command.timeout)
    return command


def truncate_reason(reason: str) -> str:
    """A reason within its limit; it comes from exceptions, and a long one must not fail the call."""
    if not isinstance(reason, str):
        raise InvalidRequest(f"the reason is {type(reason).__name__}; give a text")
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")


def decide_complete(state: State, command: CompleteLeased, now: Moment, peek: BlockSource) -> tuple[list[Record], Settled]:
    _validate(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant = _live(state, command.lease, now)
    if command.offsets is None:
        if grant is None:
            if command.lease in state.leases.fully_completed:
                return [], Settled(0)
            raise _lost(command.lease)
        return _with_answer(command, [Completed(command.lease), *follow_up_records(state, command.follow_ups)], Settled(grant.count))
    if grant is None:
        known = _repeated(state, command.lease, command.offsets)
        _check_whole(command, known.refused)
        return [], known
    good, refused, early = _sort(grant, command.offsets)
    again = [offset for offset in refused if grant.completed is not None and offset in grant.completed]
    refused = [offset for offset in refused if offset not in again] if again else refused
    _check_whole(command, refused)
    if command.follow_ups and early:
        raise InvalidRequest("an earlier item of the same key is held by this lease and not settled; complete that one first, or with it")
    records: list[Record] = [Completed(command.lease, from_offsets(good)), *follow_up_records(state, command.follow_ups)] if good else []
    return _with_answer(command, records, Settled(len(good) + len(again), refused, early))


def _check_whole(command: CompleteLeased, refused: list[int]) -> None:
    """With follow-ups it is all of the items or none."""
    if command.follow_ups and refused:
        raise LeaseLost(
            "some of the items are not held by this lease (any more), so nothing was completed and no follow-up made; drop the work"
        )


def decide_retry(state: State, command: RetryLeased, now: Moment, peek: BlockSource) -> tuple[list[Record], Settled]:
    _validate(command)
    reason = validate_retry(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant, chosen, refused, early = _held(state, now, command.lease, command.offsets)
    first = _firsts(grant, chosen)
    expired = [offset for offset in first if offset in state.ttl_overdue]
    spent = [o for o in first if command.counted and o not in state.ttl_overdue and attempts_exhausted(state.policy, state.attempts(o) + 1)]
    back = [offset for offset in first if offset not in expired and offset not in spent] if expired or spent else first
    records: list[Record] = []
    for given_up, why in ((expired, TTL_EXPIRED), (spent, _because(SPENT, reason))):
        if given_up:
            records.append(_bury(state, grant, given_up, why))
    if back:
        due = now.elapsed + command.delay if command.delay else 0
        records.append(Retried(command.lease, from_offsets(back), due, reason, command.counted, _behind(grant, back)))
    return _with_answer(command, records, Settled(len(chosen), refused, early))


def decide_bury(state: State, command: BuryLeased, now: Moment, peek: BlockSource) -> tuple[list[Record], Settled]:
    _validate(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant, chosen, refused, early = _held(state, now, command.lease, command.offsets)
    alone = command.keep_later_items and not parks_key(state.policy)
    if alone and early:
        chosen, early = sorted([*chosen, *early]), []
    records: list[Record] = [_bury(state, grant, chosen, truncate_reason(command.reason), alone)] if chosen else []
    return _with_answer(command, records, Settled(len(chosen), refused, early))


def decide_extend(state: State, command: ExtendLease, now: Moment, peek: BlockSource) -> tuple[list[Record], Settled]:
    validate_extend(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant = state.leases.live.get(command.lease) if command.after_deadline else _live(state, command.lease, now)
    if grant is None:
        raise _lost(command.lease)
    deadline = now.elapsed + (command.timeout or grant.timeout)
    return _with_answer(command, [Extended(command.lease, deadline)], Settled(grant.count))


def decide_note(state: State, command: SetProgress, now: Moment, peek: BlockSource) -> tuple[list[Record], Settled]:
    text = truncate_reason(command.text)
    _, chosen, _, _ = _held(state, now, command.lease, [command.offset])
    if not chosen:
        raise _lost(command.lease)
    return [ProgressSet(command.lease, command.offset, text)], Settled(1)


def decide_consume(state: State, command: CompleteUnleased, now: Moment, peek: BlockSource) -> tuple[list[Record], ItemCount | AskAgain]:
    check_name("consumer", command.consumer)
    chosen = [offset for offset in sorted(set(command.offsets)) if state.state_of(offset) is ItemState.READY]
    if command.only_lease_expired:  # one that was done by others and sought again since is to be handled again
        chosen = [offset for offset in chosen if (known := state.failures.get(offset)) is not None and known.reason == LEASE_EXPIRED]
    if not chosen:
        return [], ItemCount(0)
    keys = keys_in_line(state, chosen, peek)
    if isinstance(keys, Lost):
        return [keys], AskAgain()
    return [CompletedUnleased(from_offsets(chosen), command.consumer, keys)], ItemCount(len(chosen))


def _with_answer(command: Settle, records: list[Record], answer: Settled) -> tuple[list[Record], Settled]:
    """Remember the answer when the caller may ask again."""
    if command.request is not None and records:
        records.append(RequestAnswered(command.request, answer.done, command.lease, answer.refused, answer.early))
    return records, answer


def _validate(command: CompleteLeased | RetryLeased | BuryLeased) -> None:
    if type(command.lease) is not int:
        raise InvalidRequest(f"the lease is {type(command.lease).__name__}; give the number that the lease answered")
    if command.offsets is not None and set(map(type, command.offsets)) - {int}:
        raise InvalidRequest("an offset is not a whole number; give those that the lease answered")
    check_request(command.request)


def _answered(state: State, command: Settle, now: Moment) -> Settled | None:
    if command.request is None:
        return None
    known = state.requests.get(command.request, now.elapsed)
    return None if known is None else Settled(known.count, known.refused, known.early)


def _lost(lease: int) -> LeaseLost | InvalidRequest:
    if not lease:
        return InvalidRequest("lease 0 is none: there was nothing to give; look at `granted.lease` first")
    return LeaseLost(f"lease {lease:#x} has ended; drop the work, its items may be with someone else")


def _live(state: State, lease: int, now: Moment) -> LiveLease | None:
    """The lease, unless it has ended: by its deadline, too, whether or not somebody has come by to take its items back."""
    grant = state.leases.live.get(lease)
    return None if grant is None or grant.deadline <= now.elapsed else grant


def _held(state: State, now: Moment, lease: int, wanted: Sequence[int] | None) -> tuple[LiveLease, list[int], list[int], list[int]]:
    """The live lease, and its offsets (None: all) sorted out as by `_sort`."""
    grant = _live(state, lease, now)
    if grant is None:
        raise _lost(lease)
    if wanted is None:
        return grant, list(grant.open_items), [], []
    return grant, *_sort(grant, wanted)


def _sort(grant: LiveLease, wanted: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Offsets that may be settled (each once), that the lease does not hold, and that must wait for an earlier one of their key."""
    opened = grant.open_items
    unique = wanted if len(wanted) == 1 else list(dict.fromkeys(wanted))
    good = [offset for offset in unique if offset in opened]
    refused = [offset for offset in unique if offset not in opened] if len(good) < len(unique) else []
    if not grant.items_per_key:
        return good, refused, []
    chosen, blocked, early = set(good), set(), set()
    for offset, (_, key) in opened.items():
        if key != NO_KEY:
            if offset not in chosen:
                blocked.add(key)
            elif key in blocked:
                early.add(offset)
    return [offset for offset in good if offset not in early], refused, sorted(early)


def _repeated(state: State, lease: int, wanted: Sequence[int]) -> Settled:
    """Of a lease that ended: what was completed under it is done; the rest is refused."""
    overdue = state.leases.live.get(lease)
    if overdue is not None:
        known = overdue.completed or RunSet()
    else:
        known = state.completed if lease in state.leases.fully_completed else RunSet(state.leases.partly_completed.get(lease, (0, []))[1])
    unique = dict.fromkeys(wanted)
    refused = [offset for offset in unique if offset not in known]
    return Settled(len(unique) - len(refused), refused)


def _firsts(grant: LiveLease, chosen: list[int]) -> list[int]:
    """Of each key's unit only the first chosen: the later ones return with it."""
    if not grant.items_per_key:
        return chosen
    later = set(offsets(_behind(grant, chosen)))
    return [offset for offset in chosen if offset not in later]


def _behind(grant: LiveLease, chosen: list[int]) -> list[int]:
    """Runs of the open items that stand behind a chosen one of the same key, and are not chosen themselves unless they do."""
    if not grant.items_per_key:
        return []
    return from_offsets(sorted({later for offset in chosen for later in grant.later_of_key(offset)}))


def _bury(state: State, grant: LiveLease, chosen: list[int], reason: str, alone: bool = False) -> Buried:
    returned = RunSet(() if alone else _behind(grant, chosen))
    for offset in chosen:
        returned.remove(offset, offset + 1)
    return bury_held(state, grant, chosen, reason, returned.runs)


def _because(what: str, reason: str) -> str:
    return f"{what}: {reason}" if reason else what


# -- applying -----------------------------------------------------------------------------------------


def apply_completed(state: State, record: Completed, now: Moment) -> None:
    grant = state.leases.live.get(record.lease)
    if grant is None:  # damage took the record of the lease
        state.completed.add_all(record.runs or ())
        state.outside_lanes.add_all(record.runs or ())
        return
    if record.runs is None:
        runs = grant.runs()
        state.keys.release(grant.keys(), grant.number)
        if grant.count < grant.size:
            grant.add_completed(runs)
            grant.count = 0
    else:
        runs = record.runs
        for offset in offsets(runs):
            _, key = grant.close(offset)
            _let_go(state, grant, key)
        grant.add_completed(runs)
    _resolve(state, runs)
    if record.runs is None or not grant.count:
        state.leases.end(grant, now.elapsed, state.policy.result_memory)


def apply_consumed(state: State, record: CompletedUnleased, now: Moment) -> None:
    withdraw_items(state, record.runs, record.keys)
    state.completed.add_all(record.runs)


def _resolve(state: State, runs: list[int]) -> None:
    state.completed.add_all(runs)
    if state.ttl_overdue:
        state.ttl_overdue.remove_all(runs)
    if state.failures:
        for offset in offsets(runs):
            state.failures.pop(offset, None)


def _let_go(state: State, grant: LiveLease, key: int) -> None:
    """The lease holds a key no longer, unless another of its open items has it."""
    if key != NO_KEY and not grant.items_per_key[key]:
        state.keys.release((key,), grant.number)


def apply_retried(state: State, record: Retried, now: Moment) -> None:
    grant = state.leases.live.get(record.lease)
    if grant is None:
        return
    _give_back(state, grant, record.returned, now)
    return_items(state, grant, offsets(record.runs), now, reason=record.reason, due=record.due, counted=record.counted)


def _give_back(state: State, grant: LiveLease, returned: list[int], now: Moment) -> None:
    """The later items of a unit return to their places; one whose ttl ended meanwhile is judged anew, now that it waits."""
    chosen = set(offsets(returned))
    for offset in reversed(
        [offset for offset in grant.open_items if offset in chosen] if chosen else []
    ):  # as they were given, the last first
        lane, key = grant.close(offset)
        _to_front(state, offset, lane, key, now)
        if offset in state.ttl_overdue:
            state.ttl_overdue.remove(offset, offset + 1)
            state.ttl.add(now.elapsed, offset, offset + 1)


def return_items(
    state: State, grant: LiveLease, failed: list[int], now: Moment, *, reason: str, due: int = 0, counted: bool = True
) -> None:
    """Items of a lease return: to the tail of their lane, or, with a key, to the front of its line."""
    alike: dict[Failure, Failure] = {}
    to_lanes: list[tuple[int, int]] = []
    for offset in _returning(grant, failed):
        lane, key = grant.close(offset)
        if counted:
            add_failure(state, offset, now, reason, alike)
        if key != NO_KEY:
            _to_front(state, offset, lane, key, now, due)
        elif due:
            state.by_elapsed.add(due, offset, offset + 1, lane)
            state.scheduled.add(offset, offset + 1)
        else:
            to_lanes.append((lane, offset))
    for lane, together in groupby(to_lanes, key=itemgetter(0)):
        for start, stop in pairs(from_offsets(offset for _, offset in together)):
            state.outside_lanes.remove(start, stop)
            state.lanes.add(lane, start, stop, 0, state.next_offset, now.elapsed)
    _end_if_empty(state, grant, now)


def _returning(grant: LiveLease, failed: list[int]) -> list[int]:
    """The order in which items go back: those of one key last first, since each goes to the front of its line."""
    if not grant.items_per_key:
        return failed
    plain = [offset for offset in failed if grant.open_items[offset][1] == NO_KEY]
    return plain + [offset for offset in reversed(failed) if grant.open_items[offset][1] != NO_KEY]


def _to_front(state: State, offset: int, lane: int, key: int, now: Moment, due: int = 0) -> None:
    """A keyed item keeps its place: first in line, and with a delay the whole line waits."""
    line = state.keys.line(key)
    line.lease = 0
    if due:
        line.backing_off, line.until = (offset, lane), due
        state.backing_off[offset] = key
        state.scheduled.add(offset, offset + 1)
        state.by_elapsed.add(due, offset, offset + 1, lane | KEYED)
    else:
        line.waiting.appendleft(Extent(offset, offset + 1, lane, line.position(offset), now.elapsed))
        state.passed_over.add(offset, offset + 1)
    state.keys.update_head(key, line)


def add_failure(state: State, offset: int, now: Moment, reason: str, alike: dict[Failure, Failure] | None = None) -> None:
    """One more attempt failed. Items that failed alike share one note: a million of them may."""
    known = state.failures.get(offset)
    first = known.first_failed_at if known else now.wall
    note = Failure((known.attempts if known else 0) + 1, first, now.wall, reason)
    state.failures[offset] = note if alike is None else alike.setdefault(note, note)


def _end_if_empty(state: State, grant: LiveLease, now: Moment) -> None:
    if not grant.count:
        state.leases.end(grant, now.elapsed, state.policy.result_memory)


def apply_extended(state: State, record: Extended, now: Moment) -> None:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        state.leases.extend(grant, record.deadline)


def apply_noted(state: State, record: ProgressSet, now: Moment) -> None:
    if len(state.progress) > 2 * NOTES + len(state.leases.live):
        state.progress = state.live_progress()
    state.progress[record.offset] = (record.lease, record.text)


def apply_answered(state: State, record: RequestAnswered, now: Moment) -> None:
    answer = RememberedAnswer(count=record.count, ids=record.ids, lease=record.lease, refused=record.refused, early=record.early)
    state.requests.put(record.request, answer, now.elapsed, state.policy.result_memory)


def apply_buried(state: State, record: Buried, now: Moment) -> None:
    if not record.lease:
        _bury_waiting(state, record, now)
        return
    grant = state.leases.live.get(record.lease)
    if grant is None:
        return
    for offset in offsets(record.runs):
        add_failure(state, offset, now, record.reason)
        _, key = grant.close(offset)
        add_burial(state, offset, record.reason, now)
        if record.park and key != NO_KEY:
            state.keys.line(key).parked.append(offset)  # before the lease lets go of it
        _let_go(state, grant, key)
    _give_back(state, grant, record.returned, now)
    _end_if_empty(state, grant, now)


def _bury_waiting(state: State, record: Buried, now: Moment) -> None:
    """Bury items that nobody holds: out of their lane, their schedule or their key's line."""
    chosen = offsets(record.runs)
    keys = unpack_keys(record.keys) if record.keys else [NO_KEY] * len(chosen)
    for offset, key in zip(chosen, keys, strict=True):
        remove_from_line(state, offset, key, park=record.park)
        add_burial(state, offset, record.reason, now)
    state.scheduled.remove_all(record.runs)
    state.outside_lanes.add_all(record.runs)
