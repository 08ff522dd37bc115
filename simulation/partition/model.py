"""The rules of DESIGN §3 and §4 for one partition once more, written as simply as possible.

Owns: `PartitionModel`: one plain object per item, lists and loops, O(n) everywhere. Read order.py (which item is next), ledger.py (the
facts), then this file.
Written from the design, not from `penstock.rules`, of which it uses only the words (states, commands, answers).
A model is shown each command together with the answer it got. Where one answer is right the model demands it; where several are
(which items a lease gives, how much `due` does at a time) it judges whether this one is legal, and follows it.
A wrong answer is an AssertionError.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from penstock.rules import commands as c
from penstock.rules.commands import BuryLeased, CompleteLeased, ExtendLease, RetryLeased, Settled
from penstock.rules.item_states import ItemState
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueHeld
from penstock.words.limits import DEFAULT_PRIORITY, IMMEDIATE, MAX_LEASE_TIMEOUT
from simulation.partition.model_state import EXPIRED, LEASE_EXPIRED, SPENT, ModelLease, ModelState
from simulation.partition.order import ModelItem, available, earlier_of_key, holder_of_key, someone_ahead

Settle: TypeAlias = CompleteLeased | RetryLeased | BuryLeased | ExtendLease


class PartitionModel(ModelState):
    """What one partition should be doing."""

    def check_answer(self, command: c.Command, now: Moment, answer: c.Answer | PenstockError) -> None:
        """Check an answer and do what it says."""
        self.step += 1
        _JUDGES[type(command)](self, command, now, answer)

    def due(self, now: Moment, seen: Sequence[ItemState], overdue: Iterable[int], *, finished: bool) -> None:
        """Check what was done of what is due, and do it."""
        self.step += 1
        _come_due(self, now, seen, overdue, finished=finished)

    def check_drops(self, dropped: Iterable[int]) -> None:
        """Check what retention dropped, and drop it."""
        self.step += 1
        self.drop(dropped)


# -- produce -----------------------------------------------------------------------------------------


def _produce(ledger: ModelState, command: c.Produce, now: Moment, answer: Any) -> None:
    known = ledger.known(command.request, now)
    if known is not None:
        assert (list(answer.offsets), answer.repeated) == (known, True), f"the repeated request gave {answer}, not {known} again"
        return
    if command.source is not None and command.sequence <= ledger.sources.get(command.source, 0):
        assert (list(answer.offsets), answer.repeated) == ([], True), "a transfer was taken twice"
        return
    if command.source is None and ledger.paused_produce:
        assert isinstance(answer, QueueHeld), f"produce while paused gave {answer}"
        return
    expected = [_store(ledger, command, index, now) for index in range(len(command.batch))]
    assert list(answer.offsets) == expected, f"produce gave {answer}, not {expected}"
    ledger.remember(command.request, now, expected)
    if command.source is not None:
        ledger.sources[command.source] = command.sequence


def _store(ledger: ModelState, command: c.Produce, index: int, now: Moment) -> int:
    """The offset of an item: the first one's when its dedup id was seen inside the window, else a new one."""
    batch, offset = command.batch, len(ledger.items)
    name = batch.dedups[index] if batch.dedups else None
    if name is not None:
        until, first = ledger.dedups.get(name, (0, 0))
        if until > now.elapsed:
            return first
        ledger.dedups[name] = (now.elapsed + ledger.policy.dedup_window, offset)
    priority = batch.priorities[index] if batch.priorities else DEFAULT_PRIORITY
    item = ModelItem(offset, batch.keys[index] if batch.keys else None, priority, priority)
    ttl = (batch.ttls[index] if batch.ttls else 0) or ledger.policy.ttl
    item.ttl_deadline = now.elapsed + ttl if ttl else 0
    ledger.items.append(item)
    at = batch.ats[index] if batch.ats else 0
    if at > now.wall + IMMEDIATE:
        item.state, item.at = ItemState.SCHEDULED, at
    else:
        ledger.to_tail(item, now, position=offset)
    return offset


# -- lease -------------------------------------------------------------------------------------------


def _lease(ledger: ModelState, command: c.AcquireLease, now: Moment, answer: Any) -> None:
    known = ledger.known(command.request, now)
    taken = [offset for start, stop in zip(answer.runs[::2], answer.runs[1::2], strict=True) for offset in range(start, stop)]
    if known is not None:
        holding = ledger.leases[known]
        expected = (0, []) if holding.ended_at is not None else (known, sorted(holding.open))
        assert (answer.lease, sorted(taken)) == expected, f"the repeated request gave {answer}, not {expected}"
    elif ledger.paused_lease or not taken:
        assert (answer.lease, taken) == (0, []), f"{answer} while paused"
        assert ledger.paused_lease or not available(ledger.items), f"nothing was given though {available(ledger.items)[0]} may be"
    else:
        _grant(ledger, command, now, answer, taken)


def _grant(ledger: ModelState, command: c.AcquireLease, now: Moment, answer: c.LeaseAnswer, taken: list[int]) -> None:
    timeout = command.timeout or ledger.policy.lease_timeout
    assert len(taken) <= command.want, f"{len(taken)} items for a want of {command.want}"
    assert answer.lease > max(ledger.leases, default=0), f"lease {answer.lease} is not a new number"
    assert answer.deadline == now.elapsed + timeout, f"the deadline of {answer} is not now and the timeout"
    units: dict[bytes, int] = {}
    for offset in taken:
        _take(ledger, ledger.items[offset], command.per_key, units, now)
    attempts = {offset: ledger.items[offset].attempts + 1 for offset in taken if ledger.items[offset].attempts}
    assert answer.attempts == attempts, f"attempts {answer.attempts}, not {attempts}"
    ledger.leases[answer.lease] = ModelLease(answer.lease, answer.deadline, timeout, taken, [], len(taken), now.elapsed)
    ledger.remember(command.request, now, answer.lease)


def _take(ledger: ModelState, item: ModelItem, per_key: int, units: dict[bytes, int], now: Moment) -> None:
    assert item.state is ItemState.READY, f"{item} was leased"
    if item.key in units:
        units[item.key] += 1
        assert units[item.key] <= per_key, f"{item} is one more of its key than the {per_key} asked for"
    else:
        if item.key is not None:
            holder = holder_of_key(ledger.items, item.key)
            assert holder is None, f"{item} was leased though {holder} holds its key"
            units[item.key] = 1
        ahead = someone_ahead(ledger.items, item, now.elapsed, ledger.policy.priority_aging)
        assert ahead is None, f"{item} was leased before {ahead}"
    if item.key is not None:
        earlier = earlier_of_key(ledger.items, item)
        assert earlier is None, f"{item} was leased before {earlier} of the same key"
    item.state, item.jumps = ItemState.LEASED, False


# -- complete, retry, bury and extend ----------------------------------------------------------------
# Items of one key under one lease are a unit: settled in order, and when one goes back or is buried the later ones return to their places.


def _complete(ledger: ModelState, command: CompleteLeased, now: Moment, answer: Any) -> None:
    if _settled_before(ledger, command, now, answer):
        return
    holding = ledger.leases.get(command.lease)
    if holding is None or _over(holding, now):
        _complete_ended(ledger, holding, command, now, answer)
        return
    wanted = list(holding.open) if command.offsets is None else command.offsets
    good, early = _sort(ledger, holding, wanted)
    again = [offset for offset in wanted if offset in holding.done]
    refused = [offset for offset in wanted if offset not in {*early, *good, *again}]
    _expect(answer, len(good) + len(again), refused, early)
    for offset in good:
        ledger.resolve(ledger.items[offset])
    holding.done += good
    holding.close(good, now)
    if good:
        ledger.remember(command.request, now, answer)


def _over(holding: ModelLease, now: Moment) -> bool:
    """Ended, or past its deadline, whether or not its items were taken back yet."""
    return holding.ended_at is not None or holding.deadline <= now.elapsed


def _complete_ended(ledger: ModelState, holding: ModelLease | None, command: CompleteLeased, now: Moment, answer: Any) -> None:
    """What was completed under a lease may be completed again for a while; all else is refused."""
    lost = isinstance(answer, LeaseLost) or answer.refused == list(command.offsets or [])
    if holding is None:
        assert lost, f"a lease never given was taken: {answer}"
    elif holding.ended_at is None:
        assert lost if command.offsets is None else set(command.offsets) - set(answer.refused) <= set(holding.done), (
            f"an overdue lease was taken: {answer}"
        )
    elif now.elapsed >= min(holding.ended_at, holding.given_at + MAX_LEASE_TIMEOUT) + ledger.policy.result_memory:
        return  # forgotten, or not yet; a lease extended beyond the longest timeout may be forgotten as soon as it ends
    elif command.offsets is None:
        assert answer == Settled(0) if holding.finished else lost, f"an ended lease was taken: {answer}"
    else:
        _check_repeated(ledger, holding, command.offsets, answer)


def _check_repeated(ledger: ModelState, holding: ModelLease, wanted: Sequence[int], answer: Any) -> None:
    done = [offset for offset in wanted if offset not in answer.refused]
    completed = [offset for offset in wanted if ledger.items[offset].state is ItemState.COMPLETED]
    # Of a lease that finished only its number is kept, so any item that is completed passes for one of its own.
    fine = [offset for offset in done if offset in holding.done or (holding.finished and offset in completed)]
    missed = [offset for offset in answer.refused if offset in holding.done and offset in completed]
    assert (answer.done, done) == (len(done), fine), f"an ended lease completed {done}"
    assert not missed, f"a repeated complete was refused for {missed}"


def _retry(ledger: ModelState, command: RetryLeased, now: Moment, answer: Any) -> None:
    found = _held(ledger, command, now, answer)
    if found is None:
        return
    holding, chosen = found
    first = [offset for offset in chosen if not any(offset in _behind(ledger, holding, other) for other in chosen)]
    back = {later for offset in first for later in _behind(ledger, holding, offset)}
    _give_back(ledger, back, now)
    for number, offset in enumerate(first):
        item = ledger.items[offset]
        if item.overdue or (command.counted and ledger.attempts_spent(item)):
            ledger.bury(item, EXPIRED if item.overdue else SPENT, counted=True)
        else:
            ledger.return_item(item, now, command.reason, command.delay, ("retried", 0, number), counted=command.counted)
    holding.close([*first, *back], now)


def _bury(ledger: ModelState, command: BuryLeased, now: Moment, answer: Any) -> None:
    found = _held(ledger, command, now, answer)
    if found is None:
        return
    holding, chosen = found
    back = {later for offset in chosen for later in _behind(ledger, holding, offset)} - set(chosen)
    for offset in chosen:
        ledger.bury(ledger.items[offset], command.reason, counted=True)
    _give_back(ledger, back, now)
    holding.close([*chosen, *back], now)


def _extend(ledger: ModelState, command: ExtendLease, now: Moment, answer: Any) -> None:
    if _settled_before(ledger, command, now, answer):
        return
    holding = ledger.leases.get(command.lease)
    if holding is None or _over(holding, now):
        assert isinstance(answer, LeaseLost), f"a stale lease was extended: {answer}"
        return
    _expect(answer, len(holding.open), [], [])
    holding.deadline = now.elapsed + (command.timeout or holding.timeout)
    ledger.remember(command.request, now, answer)


def _held(ledger: ModelState, command: RetryLeased | BuryLeased, now: Moment, answer: Any) -> tuple[ModelLease, list[int]] | None:
    """The lease and what of it is to be settled; None when nothing is."""
    if _settled_before(ledger, command, now, answer):
        return None
    holding = ledger.leases.get(command.lease)
    if holding is None or _over(holding, now):
        assert isinstance(answer, LeaseLost), f"a stale lease was taken: {answer}"
        return None
    wanted = list(holding.open) if command.offsets is None else command.offsets
    chosen, early = _sort(ledger, holding, wanted)
    _expect(answer, len(chosen), [offset for offset in wanted if offset not in holding.open], early)
    if chosen:
        ledger.remember(command.request, now, answer)
    return holding, chosen


def _sort(ledger: ModelState, holding: ModelLease, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of what a lease holds: what may be settled, and what must wait for an earlier item of its unit."""
    missing = [other for other in holding.open if other not in wanted]
    early = {later for other in missing for later in _behind(ledger, holding, other) if later in wanted}
    return [offset for offset in wanted if offset in holding.open and offset not in early], sorted(early)


def _behind(ledger: ModelState, holding: ModelLease, offset: int) -> list[int]:
    """Open items of the same key that were given after this one."""
    key = ledger.items[offset].key
    if key is None:
        return []
    return [other for other in holding.open[holding.open.index(offset) + 1 :] if ledger.items[other].key == key]


def _give_back(ledger: ModelState, offsets: Iterable[int], now: Moment) -> None:
    """Later items of a unit go back to their places, their attempt given back."""
    for item in map(ledger.items.__getitem__, offsets):
        ledger.to_place(item, now)
        item.spared = item.spared and not item.overdue
        item.overdue = False  # what has outlived its ttl is buried now that it waits


def _settled_before(ledger: ModelState, command: Settle, now: Moment, answer: Any) -> bool:
    known = ledger.known(command.request, now)
    assert known is None or answer == known, f"the repeated request gave {answer}, not {known}"
    return known is not None


def _expect(answer: Any, done: int, refused: list[int], early: list[int]) -> None:
    assert isinstance(answer, Settled), f"settling a live lease gave {answer!r}"
    expected = (done, sorted(refused), sorted(early))
    assert (answer.done, sorted(answer.refused), sorted(answer.early)) == expected, f"{answer}, not {expected}"


# -- operators' commands -----------------------------------------------------------------------------


def _configure(ledger: ModelState, command: c.Configure, now: Moment, answer: Any) -> None:
    changed, ledger.policy = command.policy != ledger.policy, command.policy
    most = command.policy.max_attempts
    spent = [item for item in ledger.items if changed and most and item.waits and item.attempts >= most]
    assert answer == c.ItemCount(len(spent)), f"configure gave {answer}, not {len(spent)}"
    for item in spent:
        ledger.bury(item, SPENT)


def _pause(ledger: ModelState, command: c.Pause, now: Moment, answer: Any) -> None:
    ledger.paused_lease = ledger.paused_lease if command.lease is None else command.lease
    ledger.paused_produce = ledger.paused_produce if command.produce is None else command.produce


def _clear(ledger: ModelState, command: c.Clear, now: Moment, answer: Any) -> None:
    chosen = [item for item in ledger.items if getattr(command, item.state.value, False)]
    assert answer == c.ItemCount(len(chosen)), f"clear gave {answer}, not {len(chosen)}"
    for holding in ledger.live() if command.leased else []:
        holding.close(list(holding.open), now)
    for item in chosen:
        ledger.resolve(item)


def _seek(ledger: ModelState, command: c.Seek, now: Moment, answer: Any) -> None:
    """Items come again in the log's order, at the default priority and without a ttl."""
    chosen = [item for item in ledger.items[command.offset :] if item.state is ItemState.COMPLETED and not item.dropped]
    assert answer == c.ItemCount(len(chosen)), f"seek gave {answer}, not {len(chosen)}"
    for item in chosen:
        item.lane, item.ttl_deadline = DEFAULT_PRIORITY, 0
        ledger.to_tail(item, now, position=item.offset)


def _redrive(ledger: ModelState, command: c.Redrive, now: Moment, answer: Any) -> None:
    """To the tail, or, what parks its key, to its old place."""
    buried = [item.offset for item in ledger.items if item.state is ItemState.BURIED]
    chosen = buried if command.offsets is None else sorted(set(command.offsets))
    if not set(chosen) <= set(buried):
        assert isinstance(answer, InvalidRequest), f"an item that is not buried was redriven: {answer}"
        return
    assert answer == c.ItemCount(len(chosen)), f"redrive gave {answer}, not {len(chosen)}"
    for item in map(ledger.items.__getitem__, chosen):
        item.spared = 0 < item.ttl_deadline <= now.elapsed
        item.lane, item.attempts, item.reason = item.priority, 0, ""
        ledger.to_tail(item, now, position=item.offset if item.parked else None, cause=("redriven", 0, item.offset))
        item.parked = False


def _move_cursor(ledger: ModelState, command: c.PutCursor, now: Moment, answer: Any) -> None:
    if command.offset > len(ledger.items):
        assert isinstance(answer, InvalidRequest), f"a cursor was moved beyond the end: {answer}"
    else:
        ledger.cursors[command.name] = command.offset


def _release_cursor(ledger: ModelState, command: c.ForgetCursor, now: Moment, answer: Any) -> None:
    known = ledger.cursors.pop(command.name, None)
    assert (known is None) == isinstance(answer, InvalidRequest), f"releasing a cursor at {known} gave {answer}"


# -- what comes due as time passes -------------------------------------------------------------------
# How much is done at a time is the partition's choice; what is done must be due, and when it says that nothing is left, nothing may be.


def _come_due(ledger: ModelState, now: Moment, seen: Sequence[ItemState], overdue: Iterable[int], *, finished: bool) -> None:
    """`seen` tells which items moved, `overdue` which were found to have outlived their ttl under a lease."""
    late = set(overdue)
    for item, state in zip(ledger.items, seen, strict=True):
        if state is not item.state:
            _came_due(ledger, item, state, now)
        elif item.state is ItemState.LEASED and _ttl_over(item, now):
            item.overdue = item.overdue or (finished and not item.spared) or item.offset in late
    for holding in ledger.live():
        gone = [offset for offset in holding.open if ledger.items[offset].state is not ItemState.LEASED]
        assert not gone or gone == holding.open, f"a lease ended in part: {holding}"
        holding.close(gone, now)
    if finished:
        left = [item for item in ledger.items if _is_due(ledger, item, now, certain=True)]
        assert not left, f"{left[0]} is due and was left"


def _came_due(ledger: ModelState, item: ModelItem, state: ItemState, now: Moment) -> None:
    assert _is_due(ledger, item, now), f"{item} became {state} before its time"
    if item.state is ItemState.LEASED:
        _lease_ended(ledger, item, state, now)
    elif state is ItemState.BURIED:
        assert _ttl_over(item, now), f"{item} was buried before its ttl"
        ledger.bury(item, EXPIRED)
    else:
        assert state is ItemState.READY, f"{item} became {state}"
        _arrived(ledger, item, now)


def _lease_ended(ledger: ModelState, item: ModelItem, state: ItemState, now: Moment) -> None:
    given_up = item.overdue or ledger.attempts_spent(item)
    assert (state is ItemState.BURIED) == given_up, f"{item} became {state} when its lease ended"
    if given_up:
        ledger.bury(item, EXPIRED if item.overdue else SPENT, counted=True)
    else:
        holding = ledger.lease_of(item)
        ledger.return_item(item, now, LEASE_EXPIRED, 0, ("expiry", holding.deadline, _rank(holding, item)))


def _rank(holding: ModelLease, item: ModelItem) -> int:
    return holding.number * 1_000 + holding.open.index(item.offset)


def _arrived(ledger: ModelState, item: ModelItem, now: Moment) -> None:
    if item.backs_off and item.key is not None:
        ledger.to_place(item, now)
    else:
        ledger.to_tail(item, now, cause=("wall" if item.at else "delay", item.at or item.due, item.offset))
    item.at = item.due = 0


def _is_due(ledger: ModelState, item: ModelItem, now: Moment, *, certain: bool = False) -> bool:
    """Whether something may, or must, happen to an item by itself."""
    if item.state is ItemState.LEASED:
        return ledger.lease_of(item).deadline <= now.elapsed
    if item.waits and _ttl_over(item, now) and not (certain and item.spared):
        return True
    return item.state is ItemState.SCHEDULED and (item.at <= now.wall if item.at else item.due <= now.elapsed)


def _ttl_over(item: ModelItem, now: Moment) -> bool:
    return 0 < item.ttl_deadline <= now.elapsed


_JUDGES: dict[type, Callable[[ModelState, Any, Moment, Any], None]] = {
    c.Produce: _produce,
    c.AcquireLease: _lease,
    c.CompleteLeased: _complete,
    c.RetryLeased: _retry,
    c.BuryLeased: _bury,
    c.ExtendLease: _extend,
    c.Configure: _configure,
    c.Pause: _pause,
    c.Clear: _clear,
    c.Seek: _seek,
    c.Redrive: _redrive,
    c.PutCursor: _move_cursor,
    c.ForgetCursor: _release_cursor,
}
