"""The model's judgement on complete, retry, bury and extend: who may settle what, and what becomes of it.

Owns: one function per command. Each checks the answer that was given and does to the ledger what it says.
Items of one key under one lease are a unit: settled in order, and when one goes back or is buried the later ones return to their places.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from penstock.rules.commands import Bury, Complete, Extend, Retry, Settled
from penstock.rules.life import Life
from penstock.words.clock import Moment
from penstock.words.errors import LeaseLost
from penstock.words.limits import MAX_LEASE_TIMEOUT
from simulation.partition.ledger import EXPIRED, SPENT, Holding, Ledger

Settle: TypeAlias = Complete | Retry | Bury | Extend


def complete(ledger: Ledger, command: Complete, now: Moment, answer: Any) -> None:
    if _settled_before(ledger, command, now, answer):
        return
    holding = ledger.holdings.get(command.lease)
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


def _over(holding: Holding, now: Moment) -> bool:
    """Ended, or past its deadline, whether or not its items were taken back yet."""
    return holding.ended_at is not None or holding.deadline <= now.elapsed


def _complete_ended(ledger: Ledger, holding: Holding | None, command: Complete, now: Moment, answer: Any) -> None:
    """What was completed under a lease may be completed again for a while; all else is refused."""
    lost = isinstance(answer, LeaseLost) or answer.refused == list(command.offsets or [])
    if holding is None:
        assert lost, f"a lease never given was taken: {answer}"
    elif holding.ended_at is None:
        assert lost if command.offsets is None else set(command.offsets) - set(answer.refused) <= set(holding.done), (
            f"an overdue lease was taken: {answer}"
        )
    elif now.elapsed >= min(holding.ended_at, holding.given_at + MAX_LEASE_TIMEOUT) + ledger.policy.remember:
        return  # forgotten, or not yet; a lease extended beyond the longest timeout may be forgotten as soon as it ends
    elif command.offsets is None:
        assert answer == Settled(0) if holding.finished else lost, f"an ended lease was taken: {answer}"
    else:
        _check_repeated(ledger, holding, command.offsets, answer)


def _check_repeated(ledger: Ledger, holding: Holding, wanted: Sequence[int], answer: Any) -> None:
    done = [offset for offset in wanted if offset not in answer.refused]
    completed = [offset for offset in wanted if ledger.items[offset].state is Life.COMPLETED]
    # Of a lease that finished only its number is kept, so any item that is completed passes for one of its own.
    fine = [offset for offset in done if offset in holding.done or (holding.finished and offset in completed)]
    missed = [offset for offset in answer.refused if offset in holding.done and offset in completed]
    assert (answer.done, done) == (len(done), fine), f"an ended lease completed {done}"
    assert not missed, f"a repeated complete was refused for {missed}"


def retry(ledger: Ledger, command: Retry, now: Moment, answer: Any) -> None:
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
            ledger.come_back(item, now, command.reason, command.delay, ("retried", 0, number), counted=command.counted)
    holding.close([*first, *back], now)


def bury(ledger: Ledger, command: Bury, now: Moment, answer: Any) -> None:
    found = _held(ledger, command, now, answer)
    if found is None:
        return
    holding, chosen = found
    back = {later for offset in chosen for later in _behind(ledger, holding, offset)} - set(chosen)
    for offset in chosen:
        ledger.bury(ledger.items[offset], command.reason, counted=True)
    _give_back(ledger, back, now)
    holding.close([*chosen, *back], now)


def extend(ledger: Ledger, command: Extend, now: Moment, answer: Any) -> None:
    if _settled_before(ledger, command, now, answer):
        return
    holding = ledger.holdings.get(command.lease)
    if holding is None or _over(holding, now):
        assert isinstance(answer, LeaseLost), f"a stale lease was extended: {answer}"
        return
    _expect(answer, len(holding.open), [], [])
    holding.deadline = now.elapsed + (command.timeout or holding.timeout)
    ledger.remember(command.request, now, answer)


def _held(ledger: Ledger, command: Retry | Bury, now: Moment, answer: Any) -> tuple[Holding, list[int]] | None:
    """The lease and what of it is to be settled; None when nothing is."""
    if _settled_before(ledger, command, now, answer):
        return None
    holding = ledger.holdings.get(command.lease)
    if holding is None or _over(holding, now):
        assert isinstance(answer, LeaseLost), f"a stale lease was taken: {answer}"
        return None
    wanted = list(holding.open) if command.offsets is None else command.offsets
    chosen, early = _sort(ledger, holding, wanted)
    _expect(answer, len(chosen), [offset for offset in wanted if offset not in holding.open], early)
    if chosen:
        ledger.remember(command.request, now, answer)
    return holding, chosen


def _sort(ledger: Ledger, holding: Holding, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of what a lease holds: what may be settled, and what must wait for an earlier item of its unit."""
    missing = [other for other in holding.open if other not in wanted]
    early = {later for other in missing for later in _behind(ledger, holding, other) if later in wanted}
    return [offset for offset in wanted if offset in holding.open and offset not in early], sorted(early)


def _behind(ledger: Ledger, holding: Holding, offset: int) -> list[int]:
    """Open items of the same key that were given after this one."""
    key = ledger.items[offset].key
    if key is None:
        return []
    return [other for other in holding.open[holding.open.index(offset) + 1 :] if ledger.items[other].key == key]


def _give_back(ledger: Ledger, offsets: Iterable[int], now: Moment) -> None:
    """Later items of a unit go back to their places, their attempt given back."""
    for item in map(ledger.items.__getitem__, offsets):
        ledger.to_place(item, now)
        item.spared = item.spared and not item.overdue
        item.overdue = False  # what has outlived its ttl is buried now that it waits


def _settled_before(ledger: Ledger, command: Settle, now: Moment, answer: Any) -> bool:
    known = ledger.known(command.request, now)
    assert known is None or answer == known, f"the repeated request gave {answer}, not {known}"
    return known is not None


def _expect(answer: Any, done: int, refused: list[int], early: list[int]) -> None:
    assert isinstance(answer, Settled), f"settling a live lease gave {answer!r}"
    expected = (done, sorted(refused), sorted(early))
    assert (answer.done, sorted(answer.refused), sorted(answer.early)) == expected, f"{answer}, not {expected}"
