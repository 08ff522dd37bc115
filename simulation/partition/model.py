"""The rules of DESIGN §3 and §4 for one partition once more, as plainly as they can be said.

Owns: `Model`: one plain object per item, lists and loops, O(n) everywhere. Read order.py (whose turn is it), ledger.py (the facts),
this file, settling.py and passing.py: that is all of it.
Written from the design, not from `penstock.rules`, of which it uses only the words (states, commands, answers).
A model is shown each command together with the answer it got. Where one answer is right the model demands it; where several are
(which items a lease gives, how much `due` does at a time) it judges whether this one is legal, and follows it.
A wrong answer is an AssertionError.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.rules import commands as c
from penstock.rules.life import Life
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, PenstockError, QueueHeld
from penstock.words.limits import DEFAULT_PRIORITY, IMMEDIATE
from simulation.partition import settling
from simulation.partition.ledger import SPENT, Holding, Ledger
from simulation.partition.order import Item, available, earlier_of_key, holder_of_key, someone_ahead
from simulation.partition.passing import come_due


class Model(Ledger):
    """What one partition should be doing."""

    def judge(self, command: c.Command, now: Moment, answer: c.Answer | PenstockError) -> None:
        """Check an answer and do what it says."""
        self.step += 1
        _JUDGES[type(command)](self, command, now, answer)

    def due(self, now: Moment, seen: Sequence[Life], overdue: Iterable[int], *, finished: bool) -> None:
        """Check what was done of what is due, and do it."""
        self.step += 1
        come_due(self, now, seen, overdue, finished=finished)

    def retain(self, dropped: Iterable[int]) -> None:
        """Check what retention dropped, and drop it."""
        self.step += 1
        self.drop(dropped)


# -- produce -----------------------------------------------------------------------------------------


def _produce(ledger: Ledger, command: c.Produce, now: Moment, answer: Any) -> None:
    known = ledger.known(command.request, now)
    if known is not None:
        assert (list(answer.offsets), answer.again) == (known, True), f"the repeated request gave {answer}, not {known} again"
        return
    if command.source is not None and command.sequence <= ledger.sources.get(command.source, 0):
        assert (list(answer.offsets), answer.again) == ([], True), "a transfer was taken twice"
        return
    if command.source is None and ledger.paused_produce:
        assert isinstance(answer, QueueHeld), f"produce while paused gave {answer}"
        return
    expected = [_store(ledger, command, index, now) for index in range(len(command.batch))]
    assert list(answer.offsets) == expected, f"produce gave {answer}, not {expected}"
    ledger.remember(command.request, now, expected)
    if command.source is not None:
        ledger.sources[command.source] = command.sequence


def _store(ledger: Ledger, command: c.Produce, index: int, now: Moment) -> int:
    """The offset of an item: the first one's when its dedup id was seen inside the window, else a new one."""
    batch, offset = command.batch, len(ledger.items)
    name = batch.dedups[index] if batch.dedups else None
    if name is not None:
        until, first = ledger.dedups.get(name, (0, 0))
        if until > now.elapsed:
            return first
        ledger.dedups[name] = (now.elapsed + ledger.policy.dedup_window, offset)
    priority = batch.priorities[index] if batch.priorities else DEFAULT_PRIORITY
    item = Item(offset, batch.keys[index] if batch.keys else None, priority, priority)
    ttl = (batch.ttls[index] if batch.ttls else 0) or ledger.policy.ttl
    item.ttl_deadline = now.elapsed + ttl if ttl else 0
    ledger.items.append(item)
    at = batch.ats[index] if batch.ats else 0
    if at > now.wall + IMMEDIATE:
        item.state, item.at = Life.SCHEDULED, at
    else:
        ledger.to_tail(item, now, position=offset)
    return offset


# -- lease -------------------------------------------------------------------------------------------


def _lease(ledger: Ledger, command: c.Lease, now: Moment, answer: Any) -> None:
    known = ledger.known(command.request, now)
    taken = [offset for start, stop in zip(answer.runs[::2], answer.runs[1::2], strict=True) for offset in range(start, stop)]
    if known is not None:
        holding = ledger.holdings[known]
        expected = (0, []) if holding.ended_at is not None else (known, sorted(holding.open))
        assert (answer.lease, sorted(taken)) == expected, f"the repeated request gave {answer}, not {expected}"
    elif ledger.paused_lease or not taken:
        assert (answer.lease, taken) == (0, []), f"{answer} while paused"
        assert ledger.paused_lease or not available(ledger.items), f"nothing was given though {available(ledger.items)[0]} may be"
    else:
        _grant(ledger, command, now, answer, taken)


def _grant(ledger: Ledger, command: c.Lease, now: Moment, answer: c.Granted, taken: list[int]) -> None:
    timeout = command.timeout or ledger.policy.lease_timeout
    assert len(taken) <= command.want, f"{len(taken)} items for a want of {command.want}"
    assert answer.lease > max(ledger.holdings, default=0), f"lease {answer.lease} is not a new number"
    assert answer.deadline == now.elapsed + timeout, f"the deadline of {answer} is not now and the timeout"
    units: dict[bytes, int] = {}
    for offset in taken:
        _take(ledger, ledger.items[offset], command.per_key, units, now)
    attempts = {offset: ledger.items[offset].attempts + 1 for offset in taken if ledger.items[offset].attempts}
    assert answer.attempts == attempts, f"attempts {answer.attempts}, not {attempts}"
    ledger.holdings[answer.lease] = Holding(answer.lease, answer.deadline, timeout, taken, [], len(taken), now.elapsed)
    ledger.remember(command.request, now, answer.lease)


def _take(ledger: Ledger, item: Item, per_key: int, units: dict[bytes, int], now: Moment) -> None:
    assert item.state is Life.READY, f"{item} was leased"
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
    item.state, item.jumps = Life.LEASED, False


# -- an operator's word ------------------------------------------------------------------------------


def _configure(ledger: Ledger, command: c.Configure, now: Moment, answer: Any) -> None:
    changed, ledger.policy = command.policy != ledger.policy, command.policy
    most = command.policy.max_attempts
    spent = [item for item in ledger.items if changed and most and item.waits and item.attempts >= most]
    assert answer == c.Counted(len(spent)), f"configure gave {answer}, not {len(spent)}"
    for item in spent:
        ledger.bury(item, SPENT)


def _pause(ledger: Ledger, command: c.Pause, now: Moment, answer: Any) -> None:
    ledger.paused_lease = ledger.paused_lease if command.lease is None else command.lease
    ledger.paused_produce = ledger.paused_produce if command.produce is None else command.produce


def _clear(ledger: Ledger, command: c.Clear, now: Moment, answer: Any) -> None:
    chosen = [item for item in ledger.items if getattr(command, item.state.value, False)]
    assert answer == c.Counted(len(chosen)), f"clear gave {answer}, not {len(chosen)}"
    for holding in ledger.live() if command.leased else []:
        holding.close(list(holding.open), now)
    for item in chosen:
        ledger.resolve(item)


def _seek(ledger: Ledger, command: c.Seek, now: Moment, answer: Any) -> None:
    """Items come again in the log's order, at the default priority and without a ttl."""
    chosen = [item for item in ledger.items[command.offset :] if item.state is Life.COMPLETED and not item.dropped]
    assert answer == c.Counted(len(chosen)), f"seek gave {answer}, not {len(chosen)}"
    for item in chosen:
        item.lane, item.ttl_deadline = DEFAULT_PRIORITY, 0
        ledger.to_tail(item, now, position=item.offset)


def _redrive(ledger: Ledger, command: c.Redrive, now: Moment, answer: Any) -> None:
    """To the tail, or, what parks its key, to its old place."""
    buried = [item.offset for item in ledger.items if item.state is Life.BURIED]
    chosen = buried if command.offsets is None else sorted(set(command.offsets))
    if not set(chosen) <= set(buried):
        assert isinstance(answer, InvalidRequest), f"an item that is not buried was redriven: {answer}"
        return
    assert answer == c.Counted(len(chosen)), f"redrive gave {answer}, not {len(chosen)}"
    for item in map(ledger.items.__getitem__, chosen):
        item.spared = 0 < item.ttl_deadline <= now.elapsed
        item.lane, item.attempts, item.reason = item.priority, 0, ""
        ledger.to_tail(item, now, position=item.offset if item.parked else None, cause=("redriven", 0, item.offset))
        item.parked = False


def _move_cursor(ledger: Ledger, command: c.MoveCursor, now: Moment, answer: Any) -> None:
    if command.offset > len(ledger.items):
        assert isinstance(answer, InvalidRequest), f"a cursor was moved beyond the end: {answer}"
    else:
        ledger.cursors[command.name] = command.offset


def _release_cursor(ledger: Ledger, command: c.ReleaseCursor, now: Moment, answer: Any) -> None:
    known = ledger.cursors.pop(command.name, None)
    assert (known is None) == isinstance(answer, InvalidRequest), f"releasing a cursor at {known} gave {answer}"


_JUDGES: dict[type, Callable[[Ledger, Any, Moment, Any], None]] = {
    c.Produce: _produce,
    c.Lease: _lease,
    c.Complete: settling.complete,
    c.Retry: settling.retry,
    c.Bury: settling.bury,
    c.Extend: settling.extend,
    c.Configure: _configure,
    c.Pause: _pause,
    c.Clear: _clear,
    c.Seek: _seek,
    c.Redrive: _redrive,
    c.MoveCursor: _move_cursor,
    c.ReleaseCursor: _release_cursor,
}
