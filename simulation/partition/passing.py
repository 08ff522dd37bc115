"""The model's judgement on what comes due by itself as time passes: leases end, schedules arrive, ttls run out.

Owns: `come_due`. How much is done at a time is the partition's choice; what is done must be due, and when it says that nothing is left,
nothing may be.
"""

from collections.abc import Iterable, Sequence

from penstock.rules.life import Life
from penstock.words.clock import Moment
from simulation.partition.ledger import EXPIRED, LEASE_EXPIRED, SPENT, Holding, Ledger
from simulation.partition.order import Item


def come_due(ledger: Ledger, now: Moment, seen: Sequence[Life], overdue: Iterable[int], *, finished: bool) -> None:
    """`seen` tells which items moved, `overdue` which were found to have outlived their ttl under a lease."""
    late = set(overdue)
    for item, state in zip(ledger.items, seen, strict=True):
        if state is not item.state:
            _came_due(ledger, item, state, now)
        elif item.state is Life.LEASED and _ttl_over(item, now):
            item.overdue = item.overdue or (finished and not item.spared) or item.offset in late
    for holding in ledger.live():
        gone = [offset for offset in holding.open if ledger.items[offset].state is not Life.LEASED]
        assert not gone or gone == holding.open, f"a lease ended in part: {holding}"
        holding.close(gone, now)
    if finished:
        left = [item for item in ledger.items if _is_due(ledger, item, now, certain=True)]
        assert not left, f"{left[0]} is due and was left"


def _came_due(ledger: Ledger, item: Item, state: Life, now: Moment) -> None:
    assert _is_due(ledger, item, now), f"{item} became {state} before its time"
    if item.state is Life.LEASED:
        _lease_ended(ledger, item, state, now)
    elif state is Life.BURIED:
        assert _ttl_over(item, now), f"{item} was buried before its ttl"
        ledger.bury(item, EXPIRED)
    else:
        assert state is Life.READY, f"{item} became {state}"
        _arrived(ledger, item, now)


def _lease_ended(ledger: Ledger, item: Item, state: Life, now: Moment) -> None:
    given_up = item.overdue or ledger.attempts_spent(item)
    assert (state is Life.BURIED) == given_up, f"{item} became {state} when its lease ended"
    if given_up:
        ledger.bury(item, EXPIRED if item.overdue else SPENT, counted=True)
    else:
        holding = ledger.holding(item)
        ledger.come_back(item, now, LEASE_EXPIRED, 0, ("expiry", holding.deadline, _rank(holding, item)))


def _rank(holding: Holding, item: Item) -> int:
    return holding.number * 1_000 + holding.open.index(item.offset)


def _arrived(ledger: Ledger, item: Item, now: Moment) -> None:
    if item.backs_off and item.key is not None:
        ledger.to_place(item, now)
    else:
        ledger.to_tail(item, now, cause=("wall" if item.at else "delay", item.at or item.due, item.offset))
    item.at = item.due = 0


def _is_due(ledger: Ledger, item: Item, now: Moment, *, certain: bool = False) -> bool:
    """Whether something may, or must, happen to an item by itself."""
    if item.state is Life.LEASED:
        return ledger.holding(item).deadline <= now.elapsed
    if item.waits and _ttl_over(item, now) and not (certain and item.spared):
        return True
    return item.state is Life.SCHEDULED and (item.at <= now.wall if item.at else item.due <= now.elapsed)


def _ttl_over(item: Item, now: Moment) -> bool:
    return 0 < item.ttl_deadline <= now.elapsed
