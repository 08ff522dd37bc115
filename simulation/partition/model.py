"""The rules of one partition, implemented a second time as simply as possible.

Owns: `PartitionModel`: one plain object per item, lists and loops, O(n) everywhere. Read order.py (which item is next)
and model_state.py (the state) first.
It is written from the design and uses only the types of `penstock.rules` (states, commands, answers).
The model gets each command together with the partition's answer. Where only one answer is right, it requires that one;
where several are (which items a lease grants, how many items `due` processes), it checks that this one is allowed and
applies it.
A wrong answer raises AssertionError.
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
    """The model of one partition."""

    def check_answer(self, command: c.Command, now: Moment, answer: c.Answer | PenstockError) -> None:
        """Check an answer and apply it."""
        self.step += 1
        _CHECKS[type(command)](self, command, now, answer)

    def due(self, now: Moment, seen: Sequence[ItemState], overdue: Iterable[int], *, finished: bool) -> None:
        """Check which due items the partition processed, and apply that."""
        self.step += 1
        _come_due(self, now, seen, overdue, finished=finished)

    def check_drops(self, dropped: Iterable[int]) -> None:
        """Check which items retention dropped, and drop them."""
        self.step += 1
        self.drop(dropped)


# -- produce ---------------------------------------------------------------------------------------


def _produce(model: ModelState, command: c.Produce, now: Moment, answer: Any) -> None:
    known = model.known(command.calls, now)
    if known is not None:
        assert (list(answer.offsets), answer.repeated) == (known, True), f"the repeated request gave {answer}, not {known} again"
        return
    if command.source is not None and command.sequence <= model.sources.get(command.source, 0):
        assert (list(answer.offsets), answer.repeated) == ([], True), "a transfer was stored twice"
        return
    if command.source is None and model.paused_produce:
        assert isinstance(answer, QueueHeld), f"produce while paused gave {answer}"
        return
    expected = [_store(model, command, index, now) for index in range(len(command.batch))]
    assert list(answer.offsets) == expected, f"produce gave {answer}, not {expected}"
    model.remember(command.calls, now, expected)
    if command.source is not None:
        model.sources[command.source] = command.sequence


def _store(model: ModelState, command: c.Produce, index: int, now: Moment) -> int:
    """Store one item and return its offset: that of the first item when its dedup id was used within the window."""
    batch, offset = command.batch, len(model.items)
    name = batch.dedups[index] if batch.dedups else None
    if name is not None:
        until, first = model.dedups.get(name, (0, 0))
        if until > now.elapsed:
            return first
        window = (batch.dedup_windows[index] if batch.dedup_windows else 0) or model.policy.dedup_window
        model.dedups[name] = (now.elapsed + window, offset)
    priority = batch.priorities[index] if batch.priorities else DEFAULT_PRIORITY
    item = ModelItem(offset, batch.keys[index] if batch.keys else None, priority, priority)
    ttl = (batch.ttls[index] if batch.ttls else 0) or model.policy.ttl
    item.ttl_deadline = now.elapsed + ttl if ttl else 0
    model.items.append(item)
    at = batch.ats[index] if batch.ats else 0
    if at > now.wall + IMMEDIATE:
        item.state, item.at = ItemState.SCHEDULED, at
    else:
        model.to_tail(item, now, position=offset)
    return offset


# -- lease -----------------------------------------------------------------------------------------


def _lease(model: ModelState, command: c.AcquireLease, now: Moment, answer: Any) -> None:
    known = model.known(command.calls, now)
    taken = [offset for start, stop in zip(answer.runs[::2], answer.runs[1::2], strict=True) for offset in range(start, stop)]
    if known is not None:
        lease = model.leases[known]
        expected = (0, []) if lease.ended_at is not None else (known, sorted(lease.open))
        assert (answer.lease, sorted(taken)) == expected, f"the repeated request gave {answer}, not {expected}"
    elif model.paused_lease or not taken:
        assert (answer.lease, taken) == (0, []), f"{answer} while paused"
        assert model.paused_lease or not available(model.items), f"nothing was granted though {available(model.items)[0]} is available"
    else:
        _grant(model, command, now, answer, taken)


def _grant(model: ModelState, command: c.AcquireLease, now: Moment, answer: c.LeaseAnswer, taken: list[int]) -> None:
    timeout = command.timeout or model.policy.lease_timeout
    assert len(taken) <= command.want, f"{len(taken)} items for a want of {command.want}"
    assert answer.lease > max(model.leases, default=0), f"lease {answer.lease} is not a new number"
    assert answer.deadline == now.elapsed + timeout, f"the deadline of {answer} is not now plus the timeout"
    units: dict[bytes, int] = {}
    for offset in taken:
        _take(model, model.items[offset], command.per_key, units, now)
    attempts = {offset: model.items[offset].attempts + 1 for offset in taken if model.items[offset].attempts}
    assert answer.attempts == attempts, f"attempts {answer.attempts}, not {attempts}"
    model.leases[answer.lease] = ModelLease(answer.lease, answer.deadline, timeout, taken, [], len(taken), now.elapsed)
    model.remember(command.calls, now, answer.lease)


def _take(model: ModelState, item: ModelItem, per_key: int, units: dict[bytes, int], now: Moment) -> None:
    assert item.state is ItemState.READY, f"{item} was leased"
    if item.key in units:
        units[item.key] += 1
        assert units[item.key] <= per_key, f"{item} is one more of its key than the {per_key} asked for"
    else:
        if item.key is not None:
            holder = holder_of_key(model.items, item.key)
            assert holder is None, f"{item} was leased though {holder} holds its key"
            units[item.key] = 1
        ahead = someone_ahead(model.items, item, now.elapsed, model.policy.priority_aging)
        assert ahead is None, f"{item} was leased before {ahead}"
    if item.key is not None:
        earlier = earlier_of_key(model.items, item)
        assert earlier is None, f"{item} was leased before {earlier} of the same key"
    item.state, item.jumps = ItemState.LEASED, False


# -- complete, retry, bury and extend --------------------------------------------------------------
# Items of one key under one lease are a unit: they are settled in order, and when one is retried or buried the later
# ones return.


def _complete(model: ModelState, command: CompleteLeased, now: Moment, answer: Any) -> None:
    if _settled_before(model, command, now, answer):
        return
    lease = model.leases.get(command.lease)
    if lease is None or _over(lease, now):
        _complete_ended(model, lease, command, now, answer)
        return
    wanted = list(lease.open) if command.offsets is None else command.offsets
    good, early = _sort(model, lease, wanted)
    again = [offset for offset in wanted if offset in lease.done]
    refused = [offset for offset in wanted if offset not in {*early, *good, *again}]
    _expect(answer, len(good) + len(again), refused, early)
    for offset in good:
        model.resolve(model.items[offset])
    lease.done += good
    lease.close(good, now)
    if good:
        model.remember(command.calls, now, answer)


def _over(lease: ModelLease, now: Moment) -> bool:
    """Whether a lease has ended or is past its deadline, also if its items were not returned yet."""
    return lease.ended_at is not None or lease.deadline <= now.elapsed


def _complete_ended(model: ModelState, lease: ModelLease | None, command: CompleteLeased, now: Moment, answer: Any) -> None:
    """Complete under an ended lease: items completed under it are accepted again for a while; all others are
    refused."""
    lost = isinstance(answer, LeaseLost) or answer.refused == list(command.offsets or [])
    if lease is None:
        assert lost, f"a lease that never existed was accepted: {answer}"
    elif lease.ended_at is None:
        assert lost if command.offsets is None else set(command.offsets) - set(answer.refused) <= set(lease.done), (
            f"an overdue lease was accepted: {answer}"
        )
    elif now.elapsed >= min(lease.ended_at, lease.given_at + MAX_LEASE_TIMEOUT) + model.policy.result_memory:
        return  # it may be forgotten; a lease extended beyond the longest timeout may be forgotten as soon as it ends
    elif command.offsets is None:
        assert answer == Settled(0) if lease.finished else lost, f"an ended lease was accepted: {answer}"
    else:
        _check_repeated(model, lease, command.offsets, answer)


def _check_repeated(model: ModelState, lease: ModelLease, wanted: Sequence[int], answer: Any) -> None:
    done = [offset for offset in wanted if offset not in answer.refused]
    completed = [offset for offset in wanted if model.items[offset].state in (ItemState.COMPLETED, ItemState.CANCELLED)]
    # Of a finished lease only the number is remembered, so every completed item is accepted as one of its items.
    fine = [offset for offset in done if offset in lease.done or (lease.finished and offset in completed)]
    missed = [offset for offset in answer.refused if offset in lease.done and offset in completed]
    assert (answer.done, done) == (len(done), fine), f"an ended lease completed {done}"
    assert not missed, f"a repeated complete was refused for {missed}"


def _retry(model: ModelState, command: RetryLeased, now: Moment, answer: Any) -> None:
    found = _held(model, command, now, answer)
    if found is None:
        return
    lease, chosen = found
    first = [offset for offset in chosen if not any(offset in _behind(model, lease, other) for other in chosen)]
    back = {later for offset in first for later in _behind(model, lease, offset)}
    _give_back(model, back, now)
    for number, offset in enumerate(first):
        item = model.items[offset]
        if item.overdue or (command.counted and model.attempts_spent(item)):
            model.bury(item, EXPIRED if item.overdue else SPENT, counted=True)
        else:
            model.return_item(item, now, command.reason, command.delay, ("retried", 0, number), counted=command.counted)
    lease.close([*first, *back], now)


def _bury(model: ModelState, command: BuryLeased, now: Moment, answer: Any) -> None:
    found = _held(model, command, now, answer)
    if found is None:
        return
    lease, chosen = found
    back = {later for offset in chosen for later in _behind(model, lease, offset)} - set(chosen)
    for offset in chosen:
        model.bury(model.items[offset], command.reason, counted=True)
    _give_back(model, back, now)
    lease.close([*chosen, *back], now)


def _extend(model: ModelState, command: ExtendLease, now: Moment, answer: Any) -> None:
    if _settled_before(model, command, now, answer):
        return
    lease = model.leases.get(command.lease)
    if lease is None or _over(lease, now):
        assert isinstance(answer, LeaseLost), f"a stale lease was extended: {answer}"
        return
    _expect(answer, len(lease.open), [], [])
    lease.deadline = now.elapsed + (command.timeout or lease.timeout)
    model.remember(command.calls, now, answer)


def _held(model: ModelState, command: RetryLeased | BuryLeased, now: Moment, answer: Any) -> tuple[ModelLease, list[int]] | None:
    """The lease and its items that are settled; None when nothing is."""
    if _settled_before(model, command, now, answer):
        return None
    lease = model.leases.get(command.lease)
    if lease is None or _over(lease, now):
        assert isinstance(answer, LeaseLost), f"a stale lease was accepted: {answer}"
        return None
    wanted = list(lease.open) if command.offsets is None else command.offsets
    chosen, early = _sort(model, lease, wanted)
    _expect(answer, len(chosen), [offset for offset in wanted if offset not in lease.open], early)
    if chosen:
        model.remember(command.calls, now, answer)
    return lease, chosen


def _sort(model: ModelState, lease: ModelLease, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of the wanted items that a lease holds: those that may be settled, and those that must wait for an earlier item
    of their unit."""
    missing = [other for other in lease.open if other not in wanted]
    early = {later for other in missing for later in _behind(model, lease, other) if later in wanted}
    return [offset for offset in wanted if offset in lease.open and offset not in early], sorted(early)


def _behind(model: ModelState, lease: ModelLease, offset: int) -> list[int]:
    """Unsettled items of the same key that were granted after this one."""
    key = model.items[offset].key
    if key is None:
        return []
    return [other for other in lease.open[lease.open.index(offset) + 1 :] if model.items[other].key == key]


def _give_back(model: ModelState, offsets: Iterable[int], now: Moment) -> None:
    """Return the later items of a unit to their positions; the attempt does not count."""
    for item in map(model.items.__getitem__, offsets):
        model.to_former_position(item, now)
        item.spared = item.spared and not item.overdue
        item.overdue = False  # it is no longer leased: if its ttl is over it is buried when that comes due


def _settled_before(model: ModelState, command: Settle, now: Moment, answer: Any) -> bool:
    known = model.known(command.calls, now)
    assert known is None or answer == known, f"the repeated request gave {answer}, not {known}"
    return known is not None


def _expect(answer: Any, done: int, refused: list[int], early: list[int]) -> None:
    assert isinstance(answer, Settled), f"settling a live lease gave {answer!r}"
    expected = (done, sorted(refused), sorted(early))
    assert (answer.done, sorted(answer.refused), sorted(answer.early)) == expected, f"{answer}, not {expected}"


# -- administrative commands -----------------------------------------------------------------------


def _configure(model: ModelState, command: c.Configure, now: Moment, answer: Any) -> None:
    changed, model.policy = command.policy != model.policy, command.policy
    most = command.policy.max_attempts
    spent = [item for item in model.items if changed and most and item.waits and item.attempts >= most]
    assert answer == c.ItemCount(len(spent)), f"configure gave {answer}, not {len(spent)}"
    for item in spent:
        model.bury(item, SPENT)


def _pause(model: ModelState, command: c.Pause, now: Moment, answer: Any) -> None:
    model.paused_lease = model.paused_lease if command.lease is None else command.lease
    model.paused_produce = model.paused_produce if command.produce is None else command.produce


def _clear(model: ModelState, command: c.Clear, now: Moment, answer: Any) -> None:
    chosen = [item for item in model.items if getattr(command, item.state.value, False)]
    assert answer == c.ItemCount(len(chosen)), f"clear gave {answer}, not {len(chosen)}"
    for lease in model.live() if command.leased else []:
        lease.close(list(lease.open), now)
    for item in chosen:
        model.resolve(item)


def _seek(model: ModelState, command: c.Seek, now: Moment, answer: Any) -> None:
    """Completed items become ready again in the log's order, at the default priority and without a ttl."""
    chosen = [item for item in model.items[command.offset :] if item.state is ItemState.COMPLETED and not item.dropped]
    assert answer == c.ItemCount(len(chosen)), f"seek gave {answer}, not {len(chosen)}"
    for item in chosen:
        item.lane, item.ttl_deadline = DEFAULT_PRIORITY, 0
        model.to_tail(item, now, position=item.offset)


def _skip(model: ModelState, command: c.SkipWaiting, now: Moment, answer: Any) -> None:
    chosen = [item for item in model.items[: command.offset] if item.waits]
    assert answer == c.ItemCount(len(chosen)), f"skip gave {answer}, not {len(chosen)}"
    for item in chosen:
        model.resolve(item)


def _redrive(model: ModelState, command: c.Redrive, now: Moment, answer: Any) -> None:
    """Buried items become ready: at the tail, or at their old position if they parked their key."""
    buried = [item.offset for item in model.items if item.state is ItemState.BURIED]
    chosen = buried if command.offsets is None else sorted(set(command.offsets))
    if not set(chosen) <= set(buried):
        assert isinstance(answer, InvalidRequest), f"an item that is not buried was redriven: {answer}"
        return
    assert answer == c.ItemCount(len(chosen)), f"redrive gave {answer}, not {len(chosen)}"
    for item in map(model.items.__getitem__, chosen):
        item.spared = 0 < item.ttl_deadline <= now.elapsed
        item.lane, item.attempts, item.reason = item.priority, 0, ""
        model.to_tail(item, now, position=item.offset if item.parked else None, cause=("redriven", 0, item.offset))
        item.parked = False


OUTCOMES = {
    ItemState.READY: c.ItemOutcome.DONE,
    ItemState.SCHEDULED: c.ItemOutcome.DONE,
    ItemState.LEASED: c.ItemOutcome.LEASED,
    ItemState.COMPLETED: c.ItemOutcome.COMPLETED,
    ItemState.CANCELLED: c.ItemOutcome.CANCELLED,
    ItemState.BURIED: c.ItemOutcome.BURIED,
}


def _waiting(model: ModelState, command: c.CancelWaiting | c.RescheduleWaiting, answer: Any) -> list[ModelItem]:
    """The items of the command that wait, by offset. Each item must have the outcome that its state gives."""
    known = dict(enumerate(model.items))
    expected = [OUTCOMES[known[offset].state] if offset in known else c.ItemOutcome.UNKNOWN for offset in command.offsets]
    assert answer == c.ItemOutcomes(expected), f"{command} gave {answer}, not {expected}"
    return [known[offset] for offset in sorted(set(command.offsets)) if offset in known and known[offset].waits]


def _cancel(model: ModelState, command: c.CancelWaiting, now: Moment, answer: Any) -> None:
    for item in _waiting(model, command, answer):
        model.cancel(item)


def _reschedule(model: ModelState, command: c.RescheduleWaiting, now: Moment, answer: Any) -> None:
    """Later: the item gives up its position and holds nothing. Now: a back-off ends, other items go to the tail."""
    later = command.delay > IMMEDIATE or command.at > now.wall + IMMEDIATE
    for item in _waiting(model, command, answer):
        if later:
            item.state, item.rescheduled, item.lane = ItemState.SCHEDULED, True, item.priority
            item.at, item.due = (0, now.elapsed + command.delay) if command.delay else (command.at, 0)
        elif item.backs_off and item.key is not None:
            model.to_former_position(item, now)
            item.due = 0
        elif item.state is ItemState.SCHEDULED:
            item.lane, item.at, item.due = item.priority, 0, 0
            model.to_tail(item, now, cause=("rescheduled", 0, item.offset))


def _move_cursor(model: ModelState, command: c.PutCursor, now: Moment, answer: Any) -> None:
    if command.offset > len(model.items):
        assert isinstance(answer, InvalidRequest), f"a cursor was moved beyond the end: {answer}"
    else:
        model.cursors[command.name] = command.offset


def _release_cursor(model: ModelState, command: c.ForgetCursor, now: Moment, answer: Any) -> None:
    known = model.cursors.pop(command.name, None)
    assert (known is None) == isinstance(answer, InvalidRequest), f"releasing a cursor at {known} gave {answer}"


# -- due items -------------------------------------------------------------------------------------
# The partition chooses how many due items it processes at a time. Each must be due, and when it is finished none may be
# left.


def _come_due(model: ModelState, now: Moment, seen: Sequence[ItemState], overdue: Iterable[int], *, finished: bool) -> None:
    """Apply the changes of items from the model's states to `seen`. `overdue`: leased items whose ttl the partition
    found to be over."""
    late = set(overdue)
    for item, state in zip(model.items, seen, strict=True):
        if state is not item.state:
            _came_due(model, item, state, now)
        elif item.state is ItemState.LEASED and _ttl_over(item, now):
            item.overdue = item.overdue or (finished and not item.spared) or item.offset in late
    for lease in model.live():
        gone = [offset for offset in lease.open if model.items[offset].state is not ItemState.LEASED]
        assert not gone or gone == lease.open, f"a lease ended in part: {lease}"
        lease.close(gone, now)
    if finished:
        left = [item for item in model.items if _is_due(model, item, now, certain=True)]
        assert not left, f"{left[0]} is due and was not processed"


def _came_due(model: ModelState, item: ModelItem, state: ItemState, now: Moment) -> None:
    assert _is_due(model, item, now), f"{item} became {state} before its time"
    if item.state is ItemState.LEASED:
        _lease_ended(model, item, state, now)
    elif state is ItemState.BURIED:
        assert _ttl_over(item, now), f"{item} was buried before its ttl"
        model.bury(item, EXPIRED)
    else:
        assert state is ItemState.READY, f"{item} became {state}"
        _arrived(model, item, now)


def _lease_ended(model: ModelState, item: ModelItem, state: ItemState, now: Moment) -> None:
    buried = item.overdue or model.attempts_spent(item)
    assert (state is ItemState.BURIED) == buried, f"{item} became {state} when its lease ended"
    if buried:
        model.bury(item, EXPIRED if item.overdue else SPENT, counted=True)
    else:
        lease = model.lease_of(item)
        model.return_item(item, now, LEASE_EXPIRED, 0, ("expiry", lease.deadline, _rank(lease, item)))


def _rank(lease: ModelLease, item: ModelItem) -> int:
    return lease.number * 1_000 + lease.open.index(item.offset)


def _arrived(model: ModelState, item: ModelItem, now: Moment) -> None:
    if item.backs_off and item.key is not None:
        model.to_former_position(item, now)
    else:
        model.to_tail(item, now, cause=("wall" if item.at else "delay", item.at or item.due, item.offset))
    item.at = item.due = 0


def _is_due(model: ModelState, item: ModelItem, now: Moment, *, certain: bool = False) -> bool:
    """Whether an item may (`certain`: must) be changed because time has passed."""
    if item.state is ItemState.LEASED:
        return model.lease_of(item).deadline <= now.elapsed
    if item.waits and _ttl_over(item, now) and not (certain and item.spared):
        return True
    return item.state is ItemState.SCHEDULED and (item.at <= now.wall if item.at else item.due <= now.elapsed)


def _ttl_over(item: ModelItem, now: Moment) -> bool:
    return 0 < item.ttl_deadline <= now.elapsed


_CHECKS: dict[type, Callable[[ModelState, Any, Moment, Any], None]] = {
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
    c.CancelWaiting: _cancel,
    c.SkipWaiting: _skip,
    c.RescheduleWaiting: _reschedule,
    c.PutCursor: _move_cursor,
    c.ForgetCursor: _release_cursor,
}
