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

from penstock.rules.commands import Again, Bury, Complete, Consume, Counted, Extend, Note, Retry, Settled
from penstock.rules.item_states import Life
from penstock.rules.lanes import KEYED, Extent
from penstock.rules.leases import Grant
from penstock.rules.outbox import promises
from penstock.rules.records import Answered, Buried, Completed, Consumed, Extended, Lost, Noted, Record, Retried, unpack_keys
from penstock.rules.removal import (
    EXPIRED,
    LEASE_EXPIRED,
    SPENT,
    bury_held,
    is_spent,
    keys_in_line,
    leave_line,
    leave_lines,
    note_burial,
    parks,
)
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.state import Failure, Peek, Remembered, State
from penstock.words.batch import check_name, check_request
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, LeaseLost
from penstock.words.limits import MAX_DELAY, MAX_REASON_BYTES, lease_timeout_within, within

Settle: TypeAlias = Complete | Retry | Bury | Extend
NOTES = 1_000
"""About so many notes of leases that have ended may lie about."""


def validate_retry(command: Retry) -> str:
    """Refuse a wrong retry; gives its reason, within its limit."""
    within("delay", command.delay, 0, MAX_DELAY)
    if type(command.counted) is not bool:
        raise InvalidRequest(f"counted is {type(command.counted).__name__}; give True or False")
    return cut_reason(command.reason)


def validate_extend(command: Extend) -> Extend:
    check_request(command.request)
    if command.timeout:
        lease_timeout_within(command.timeout)
    return command


def cut_reason(reason: str) -> str:
    """A reason within its limit; it comes from exceptions, and a long one must not fail the call."""
    if not isinstance(reason, str):
        raise InvalidRequest(f"the reason is {type(reason).__name__}; give a text")
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")


def decide_complete(state: State, command: Complete, now: Moment, peek: Peek) -> tuple[list[Record], Settled]:
    _validate(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant = _live(state, command.lease, now)
    if command.offsets is None:
        if grant is None:
            if command.lease in state.leases.finished:
                return [], Settled(0)
            raise _lost(command.lease)
        return _with_answer(command, [Completed(command.lease), *promises(state, command.then)], Settled(grant.count))
    if grant is None:
        known = _repeated(state, command.lease, command.offsets)
        _check_whole(command, known.refused)
        return [], known
    good, refused, early = _sort(grant, command.offsets)
    again = [offset for offset in refused if grant.done is not None and offset in grant.done]
    refused = [offset for offset in refused if offset not in again] if again else refused
    _check_whole(command, refused)
    if command.then and early:
        raise InvalidRequest("an earlier item of the same key is held by this lease and not settled; complete that one first, or with it")
    records: list[Record] = [Completed(command.lease, from_offsets(good)), *promises(state, command.then)] if good else []
    return _with_answer(command, records, Settled(len(good) + len(again), refused, early))


def _check_whole(command: Complete, refused: list[int]) -> None:
    """With follow-ups it is all of the items or none."""
    if command.then and refused:
        raise LeaseLost(
            "some of the items are not held by this lease (any more), so nothing was completed and no follow-up made; drop the work"
        )


def decide_retry(state: State, command: Retry, now: Moment, peek: Peek) -> tuple[list[Record], Settled]:
    _validate(command)
    reason = validate_retry(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant, chosen, refused, early = _held(state, now, command.lease, command.offsets)
    first = _firsts(grant, chosen)
    expired = [offset for offset in first if offset in state.overdue]
    spent = [o for o in first if command.counted and o not in state.overdue and is_spent(state.policy, state.attempts(o) + 1)]
    back = [offset for offset in first if offset not in expired and offset not in spent] if expired or spent else first
    records: list[Record] = []
    for given_up, why in ((expired, EXPIRED), (spent, _because(SPENT, reason))):
        if given_up:
            records.append(_bury(state, grant, given_up, why))
    if back:
        due = now.elapsed + command.delay if command.delay else 0
        records.append(Retried(command.lease, from_offsets(back), due, reason, command.counted, _behind(grant, back)))
    return _with_answer(command, records, Settled(len(chosen), refused, early))


def decide_bury(state: State, command: Bury, now: Moment, peek: Peek) -> tuple[list[Record], Settled]:
    _validate(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant, chosen, refused, early = _held(state, now, command.lease, command.offsets)
    alone = command.alone and not parks(state.policy)
    if alone and early:
        chosen, early = sorted([*chosen, *early]), []
    records: list[Record] = [_bury(state, grant, chosen, cut_reason(command.reason), alone)] if chosen else []
    return _with_answer(command, records, Settled(len(chosen), refused, early))


def decide_extend(state: State, command: Extend, now: Moment, peek: Peek) -> tuple[list[Record], Settled]:
    validate_extend(command)
    if (known := _answered(state, command, now)) is not None:
        return [], known
    grant = state.leases.live.get(command.lease) if command.late else _live(state, command.lease, now)
    if grant is None:
        raise _lost(command.lease)
    deadline = now.elapsed + (command.timeout or grant.timeout)
    return _with_answer(command, [Extended(command.lease, deadline)], Settled(grant.count))


def decide_note(state: State, command: Note, now: Moment, peek: Peek) -> tuple[list[Record], Settled]:
    text = cut_reason(command.text)
    _, chosen, _, _ = _held(state, now, command.lease, [command.offset])
    if not chosen:
        raise _lost(command.lease)
    return [Noted(command.lease, command.offset, text)], Settled(1)


def decide_consume(state: State, command: Consume, now: Moment, peek: Peek) -> tuple[list[Record], Counted | Again]:
    check_name("consumer", command.consumer)
    chosen = [offset for offset in sorted(set(command.offsets)) if state.state_of(offset) is Life.READY]
    if command.lapsed:  # one that was done by others and sought again since is to be handled again
        chosen = [offset for offset in chosen if (known := state.failures.get(offset)) is not None and known.reason == LEASE_EXPIRED]
    if not chosen:
        return [], Counted(0)
    keys = keys_in_line(state, chosen, peek)
    if isinstance(keys, Lost):
        return [keys], Again()
    return [Consumed(from_offsets(chosen), command.consumer, keys)], Counted(len(chosen))


def _with_answer(command: Settle, records: list[Record], answer: Settled) -> tuple[list[Record], Settled]:
    """Remember the answer when the caller may ask again."""
    if command.request is not None and records:
        records.append(Answered(command.request, answer.done, command.lease, answer.refused, answer.early))
    return records, answer


def _validate(command: Complete | Retry | Bury) -> None:
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


def _live(state: State, lease: int, now: Moment) -> Grant | None:
    """The lease, unless it has ended: by its deadline, too, whether or not somebody has come by to take its items back."""
    grant = state.leases.live.get(lease)
    return None if grant is None or grant.deadline <= now.elapsed else grant


def _held(state: State, now: Moment, lease: int, wanted: Sequence[int] | None) -> tuple[Grant, list[int], list[int], list[int]]:
    """The live lease, and its offsets (None: all) sorted out as by `_sort`."""
    grant = _live(state, lease, now)
    if grant is None:
        raise _lost(lease)
    if wanted is None:
        return grant, list(grant.open), [], []
    return grant, *_sort(grant, wanted)


def _sort(grant: Grant, wanted: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Offsets that may be settled (each once), that the lease does not hold, and that must wait for an earlier one of their key."""
    opened = grant.open
    unique = wanted if len(wanted) == 1 else list(dict.fromkeys(wanted))
    good = [offset for offset in unique if offset in opened]
    refused = [offset for offset in unique if offset not in opened] if len(good) < len(unique) else []
    if not grant.sharing:
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
        known = overdue.done or RunSet()
    else:
        known = state.resolved if lease in state.leases.finished else RunSet(state.leases.past.get(lease, (0, []))[1])
    unique = dict.fromkeys(wanted)
    refused = [offset for offset in unique if offset not in known]
    return Settled(len(unique) - len(refused), refused)


def _firsts(grant: Grant, chosen: list[int]) -> list[int]:
    """Of each key's unit only the first chosen: the later ones return with it."""
    if not grant.sharing:
        return chosen
    later = set(offsets(_behind(grant, chosen)))
    return [offset for offset in chosen if offset not in later]


def _behind(grant: Grant, chosen: list[int]) -> list[int]:
    """Runs of the open items that stand behind a chosen one of the same key, and are not chosen themselves unless they do."""
    if not grant.sharing:
        return []
    return from_offsets(sorted({later for offset in chosen for later in grant.behind(offset)}))


def _bury(state: State, grant: Grant, chosen: list[int], reason: str, alone: bool = False) -> Buried:
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
        state.resolved.add_all(record.runs or ())
        state.away.add_all(record.runs or ())
        return
    if record.runs is None:
        runs = grant.runs()
        state.keys.release(grant.keys(), grant.number)
        if grant.count < grant.size:
            grant.note_done(runs)
            grant.count = 0
    else:
        runs = record.runs
        for offset in offsets(runs):
            _, key = grant.close(offset)
            _let_go(state, grant, key)
        grant.note_done(runs)
    _resolve(state, runs)
    if record.runs is None or not grant.count:
        state.leases.end(grant, now.elapsed, state.policy.remember)


def apply_consumed(state: State, record: Consumed, now: Moment) -> None:
    leave_lines(state, record.runs, record.keys)
    state.resolved.add_all(record.runs)


def _resolve(state: State, runs: list[int]) -> None:
    state.resolved.add_all(runs)
    if state.overdue:
        state.overdue.remove_all(runs)
    if state.failures:
        for offset in offsets(runs):
            state.failures.pop(offset, None)


def _let_go(state: State, grant: Grant, key: int) -> None:
    """The lease holds a key no longer, unless another of its open items has it."""
    if key != NO_KEY and not grant.sharing[key]:
        state.keys.release((key,), grant.number)


def apply_retried(state: State, record: Retried, now: Moment) -> None:
    grant = state.leases.live.get(record.lease)
    if grant is None:
        return
    _give_back(state, grant, record.returned, now)
    come_back(state, grant, offsets(record.runs), now, reason=record.reason, due=record.due, counted=record.counted)


def _give_back(state: State, grant: Grant, returned: list[int], now: Moment) -> None:
    """The later items of a unit return to their places; one whose ttl ended meanwhile is judged anew, now that it waits."""
    chosen = set(offsets(returned))
    for offset in reversed([offset for offset in grant.open if offset in chosen] if chosen else []):  # as they were given, the last first
        lane, key = grant.close(offset)
        _to_front(state, offset, lane, key, now)
        if offset in state.overdue:
            state.overdue.remove(offset, offset + 1)
            state.ttl.add(now.elapsed, offset, offset + 1)


def come_back(state: State, grant: Grant, failed: list[int], now: Moment, *, reason: str, due: int = 0, counted: bool = True) -> None:
    """Items of a lease return: to the tail of their lane, or, with a key, to the front of its line."""
    alike: dict[Failure, Failure] = {}
    to_lanes: list[tuple[int, int]] = []
    for offset in _returning(grant, failed):
        lane, key = grant.close(offset)
        if counted:
            note_failure(state, offset, now, reason, alike)
        if key != NO_KEY:
            _to_front(state, offset, lane, key, now, due)
        elif due:
            state.by_elapsed.add(due, offset, offset + 1, lane)
            state.scheduled.add(offset, offset + 1)
        else:
            to_lanes.append((lane, offset))
    for lane, together in groupby(to_lanes, key=itemgetter(0)):
        for start, stop in pairs(from_offsets(offset for _, offset in together)):
            state.away.remove(start, stop)
            state.lanes.add(lane, start, stop, 0, state.next_offset, now.elapsed)
    _end_if_empty(state, grant, now)


def _returning(grant: Grant, failed: list[int]) -> list[int]:
    """The order in which items go back: those of one key last first, since each goes to the front of its line."""
    if not grant.sharing:
        return failed
    plain = [offset for offset in failed if grant.open[offset][1] == NO_KEY]
    return plain + [offset for offset in reversed(failed) if grant.open[offset][1] != NO_KEY]


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
        state.passed.add(offset, offset + 1)
    state.keys.settle(key, line)


def note_failure(state: State, offset: int, now: Moment, reason: str, alike: dict[Failure, Failure] | None = None) -> None:
    """One more attempt failed. Items that failed alike share one note: a million of them may."""
    known = state.failures.get(offset)
    first = known.first_failed_at if known else now.wall
    note = Failure((known.attempts if known else 0) + 1, first, now.wall, reason)
    state.failures[offset] = note if alike is None else alike.setdefault(note, note)


def _end_if_empty(state: State, grant: Grant, now: Moment) -> None:
    if not grant.count:
        state.leases.end(grant, now.elapsed, state.policy.remember)


def apply_extended(state: State, record: Extended, now: Moment) -> None:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        state.leases.extend(grant, record.deadline)


def apply_noted(state: State, record: Noted, now: Moment) -> None:
    if len(state.notes) > 2 * NOTES + len(state.leases.live):
        state.notes = state.live_notes()
    state.notes[record.offset] = (record.lease, record.text)


def apply_answered(state: State, record: Answered, now: Moment) -> None:
    answer = Remembered(count=record.count, ids=record.ids, lease=record.lease, refused=record.refused, early=record.early)
    state.requests.put(record.request, answer, now.elapsed, state.policy.remember)


def apply_buried(state: State, record: Buried, now: Moment) -> None:
    if not record.lease:
        _bury_waiting(state, record, now)
        return
    grant = state.leases.live.get(record.lease)
    if grant is None:
        return
    for offset in offsets(record.runs):
        note_failure(state, offset, now, record.reason)
        _, key = grant.close(offset)
        note_burial(state, offset, record.reason, now)
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
        leave_line(state, offset, key, park=record.park)
        note_burial(state, offset, record.reason, now)
    state.scheduled.remove_all(record.runs)
    state.away.add_all(record.runs)
