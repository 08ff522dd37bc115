"""What settling does to the state: items of a lease are resolved, come back or are buried, and their keys go on.

Owns: the application of Completed, Retried, Extended, Buried and Answered, and the steps that others share (`come_back`,
`leave_line`, `inter`).
"""

from penstock.rules.lanes import KEYED, Extent
from penstock.rules.leases import Grant
from penstock.rules.records import Answered, Buried, Completed, Extended, Noted, Retried, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import offsets
from penstock.rules.state import Burial, Failure, Remembered, State
from penstock.words.clock import Moment

NOTES = 1_000
"""About so many notes of leases that have ended may lie about."""


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
            state.away.remove(offset, offset + 1)
            state.lanes.add(lane, offset, offset + 1, 0, state.next_offset, now.elapsed)
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
        from_waiting(state, record, now)
        return
    grant = state.leases.live.get(record.lease)
    if grant is None:
        return
    for offset in offsets(record.runs):
        note_failure(state, offset, now, record.reason)
        _, key = grant.close(offset)
        inter(state, offset, record.reason, now)
        if record.park and key != NO_KEY:
            state.keys.line(key).parked.append(offset)
        _let_go(state, grant, key)
    _give_back(state, grant, record.returned, now)
    _end_if_empty(state, grant, now)


def from_waiting(state: State, record: Buried, now: Moment) -> None:
    """Bury items that nobody holds: out of their lane, their schedule or their key's line."""
    chosen = offsets(record.runs)
    keys = unpack_keys(record.keys) if record.keys else [NO_KEY] * len(chosen)
    for offset, key in zip(chosen, keys, strict=True):
        leave_line(state, offset, key, park=record.park)
        inter(state, offset, record.reason, now)
    state.scheduled.remove_all(record.runs)
    state.away.add_all(record.runs)


def leave_line(state: State, offset: int, key: int, *, park: bool = False) -> None:
    """An item that waited in (or held up) its key's line is gone from there."""
    key = state.backing_off.pop(offset, key)
    in_line = offset in state.passed
    state.passed.remove(offset, offset + 1)
    if key == NO_KEY:
        return
    line = state.keys.line(key)
    if line.backing_off is not None and line.backing_off[0] == offset:
        line.backing_off = None
    elif in_line:
        line.drop(offset)
    if park:
        line.parked.append(offset)
    state.keys.settle(key, line)


def inter(state: State, offset: int, reason: str, now: Moment) -> None:
    """The item itself is put to rest."""
    failure = state.failures.pop(offset, None) or Failure(0, 0, 0, "")
    state.overdue.remove(offset, offset + 1)
    state.buried[offset] = Burial(reason, now.wall, failure.attempts, failure.first_failed_at, failure.last_failed_at, now.elapsed)
    state.buried_set.add(offset, offset + 1)
