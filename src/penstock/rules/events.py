"""What records say happened to which items.

Owns: `EventReplay`, which tells of every record what it does to items and then applies it (machine.py: the rules are there, and only there);
`EventRuns`, one event of many items as one record tells it, in runs; `Event`, the same of one item.
A state that is carried on from a log's front, or from a Base, tells every transition of life.py's table. Where damage took records, what
follows may tell of items in a state that the table does not expect, up to the next Base.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from penstock.rules import machine, records
from penstock.rules.item_states import Transition as Kind
from penstock.rules.leases import LiveLease
from penstock.rules.outbox import pack_destination, unpack_destination
from penstock.rules.removal import LEASE_EXPIRED, TTL_EXPIRED
from penstock.rules.runs import RunSet, offsets, pairs
from penstock.rules.state import State
from penstock.words.clock import Moment
from penstock.words.ids import format_id

RETURNED = "returned with an earlier item of its key"
REBOOTED = "the machine was started anew: every lease has its full timeout again"
DAMAGED = "damage took its bytes"
PLACE_BYTES = len(pack_destination(0, 0))


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to an item."""

    event: str
    """The value of a life.Event."""
    offset: int
    at: int
    """Wall microseconds."""
    attempt: int = 0
    """Which attempt it happened in; of an item that is not leased, how many failed before."""
    reason: str = ""
    consumer: str = ""
    lease: int = 0
    """The number of the lease under which it happened; 0 for none."""
    destination: str = ""
    """Where it leaves for, as `format_place` writes it."""
    source: str = ""
    """Where it came from, if it was not produced here first."""


class EventRuns(NamedTuple):
    """The same event of many items, by one record. Its fields are those of `Event` but for:"""

    event: Kind
    runs: list[int]
    """Flat runs of the items, in the record's order."""
    at: int
    attempt: int = 0
    attempts: dict[int, int] = {}  # noqa: RUF012 (never changed)
    """offset → attempt, where it is not `attempt`."""
    reason: str = ""
    consumer: str = ""
    lease: int = 0
    destination: bytes = b""
    """As outbox.destination packs it."""
    base: int = -1
    """The offset there of the first item; -1 when it is not known (yet)."""
    source: bytes = b""

    def events(self) -> Iterator[Event]:
        """One by one."""
        if self.destination:
            return (self._event(offset, index) for index, offset in enumerate(offsets(self.runs)))
        _, _, at, attempt, attempts, reason, consumer, lease, _, _, _ = self
        event, source = self.event.value, format_place(self.source) if self.source else ""
        found = ((offset, attempts.get(offset, attempt)) for offset in offsets(self.runs))
        return (Event(event, offset, at, number, reason, consumer, lease, "", source) for offset, number in found)

    def event_of(self, offset: int) -> Event | None:
        """That of one item, if it is among them."""
        index = 0
        for start, stop in pairs(self.runs):
            if start <= offset < stop:
                return self._event(offset, index + offset - start)
            index += stop - start
        return None

    def _event(self, offset: int, index: int) -> Event:
        there = format_place(self.destination, self.base + index if self.base >= 0 else None) if self.destination else ""
        source = format_place(self.source) if self.source else ""
        attempt = self.attempts.get(offset, self.attempt)
        return Event(self.event.value, offset, self.at, attempt, self.reason, self.consumer, self.lease, there, source)


def format_place(packed: bytes, offset: int | None = None) -> str:
    """A partition of any queue, or an item of it: "<incarnation, 16 hex digits>/<partition>" or "…/<item id>"."""
    if len(packed) != PLACE_BYTES:  # a source may be named in any way
        return packed.hex()
    incarnation, partition = unpack_destination(packed)
    return f"{incarnation:016x}/{partition if offset is None else format_id(partition, offset)}"


class EventReplay:
    """A state, carried on record by record."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state if state is not None else State()

    def apply(self, record: records.Record, now: Moment) -> list[EventRuns]:
        """What a record does to items; then it is done. An item is in at most one of them."""
        kind, state = type(record), self.state
        before, after = BEFORE.get(kind), AFTER.get(kind)
        told = [*before(state, record, now.wall)] if before is not None else []
        machine.apply(state, record, now)
        if after is not None:
            told += after(state, record, now.wall)
        return [one for one in told if one.runs]


# -- what each record tells ----------------------------------------------------------------------------


def _attempts(state: State, runs: list[int], attempt: int = 0) -> dict[int, int]:
    """The attempts of items that failed before, and how many more than those `attempt` says."""
    failures, buried = state.failures, state.burials
    found: dict[int, int] = {}
    if failures or buried:
        these = offsets(runs)
        found.update((offset, failures[offset].attempts + attempt) for offset in failures.keys() & these)
        found.update((offset, buried[offset].attempts) for offset in buried.keys() & these)
    return found


def _plain(event: Kind, state: State, runs: list[int], at: int, reason: str = "") -> EventRuns:
    """Of items that nobody holds."""
    return EventRuns(event, runs, at, 0, _attempts(state, runs), reason)


def _held(event: Kind, state: State, grant: LiveLease, runs: list[int], at: int, reason: str = "") -> EventRuns:
    """Of items of a lease."""
    return EventRuns(event, runs, at, 1, _attempts(state, runs, 1), reason, grant.consumer, grant.number)


def _produced(state: State, record: records.Produced, at: int) -> Iterable[EventRuns]:
    start, stop = record.base, record.base + len(record.batch)
    later = state.scheduled.within(start, stop)
    source = record.source or b""
    yield EventRuns(Kind.PRODUCED, RunSet(later).missing(start, stop), at, source=source)
    yield EventRuns(Kind.SCHEDULED, later, at, source=source)


def _leased(state: State, record: records.Leased, at: int) -> Iterable[EventRuns]:
    grant = state.leases.live[record.lease]
    yield _held(Kind.LEASED, state, grant, grant.runs(), at)


def _opened(state: State, record: records.Opened, at: int) -> Iterable[EventRuns]:
    for grant in state.leases.live.values() if record.rebooted else ():
        yield _held(Kind.EXTENDED, state, grant, grant.runs(), at, REBOOTED)


def _extended(state: State, record: records.Extended, at: int) -> Iterable[EventRuns]:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        yield _held(Kind.EXTENDED, state, grant, grant.runs(), at)


def _completed(state: State, record: records.Completed, at: int) -> Iterable[EventRuns]:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        yield _held(Kind.COMPLETED, state, grant, grant.runs() if record.runs is None else record.runs, at)
    else:  # damage took the record of the lease
        yield EventRuns(Kind.COMPLETED, record.runs or [], at, 1, lease=record.lease)


def _retried(state: State, record: records.Retried, at: int) -> Iterable[EventRuns]:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        yield _held(Kind.DELAYED if record.due else Kind.RETRIED, state, grant, record.runs, at, record.reason)
        yield _held(Kind.RETRIED, state, grant, record.returned, at, RETURNED)


def _expired(state: State, record: records.LeaseExpired, at: int) -> Iterable[EventRuns]:
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        yield _held(Kind.LEASE_EXPIRED, state, grant, grant.runs(), at, LEASE_EXPIRED)


def _buried(state: State, record: records.Buried, at: int) -> Iterable[EventRuns]:
    if not record.lease:
        event = Kind.TTL_EXPIRED if record.reason == TTL_EXPIRED else Kind.BURIED
        yield _plain(event, state, record.runs, at, record.reason)
        return
    grant = state.leases.live.get(record.lease)
    if grant is not None:
        yield _held(Kind.BURIED, state, grant, record.runs, at, record.reason)
        yield _held(Kind.RETRIED, state, grant, record.returned, at, RETURNED)


def _consumed(state: State, record: records.CompletedUnleased, at: int) -> Iterable[EventRuns]:
    yield _plain(Kind.COMPLETED, state, record.runs, at)._replace(consumer=record.consumer)


def _due(state: State, record: records.Due, at: int) -> Iterable[EventRuns]:
    yield _plain(Kind.DUE, state, record.runs, at)


def _cleared(state: State, record: records.Cleared, at: int) -> Iterable[EventRuns]:
    for runs in (record.ready, record.scheduled, record.buried):
        yield _plain(Kind.CLEARED, state, runs, at)
    yield EventRuns(Kind.CLEARED, record.leased, at, 1, _attempts(state, record.leased, 1))


def _sought(state: State, record: records.Sought, at: int) -> Iterable[EventRuns]:
    yield _plain(Kind.SOUGHT, state, record.runs, at)


def _redriven(state: State, record: records.RedrivenInPlace, at: int) -> Iterable[EventRuns]:
    yield _plain(Kind.REDRIVEN, state, record.runs, at)


def _lost(state: State, record: records.Lost, at: int) -> Iterable[EventRuns]:
    """What was resolved is so still, with or without its bytes. An item of which no record is left was never seen before this."""
    gone, held = RunSet(), RunSet()
    for start, stop in pairs(record.runs):
        gone.add_all(state.completed.missing(start, stop))
        held.add_all(state.leased_within(start, stop).runs)
    gone.remove_all(held.runs)
    yield _plain(Kind.LOST, state, gone.runs, at, DAMAGED)
    yield EventRuns(Kind.LOST, held.runs, at, 1, _attempts(state, held.runs, 1), DAMAGED)


def _dropped(state: State, record: records.Dropped, at: int) -> Iterable[EventRuns]:
    yield _plain(Kind.DROPPED, state, record.runs, at)


def _sent(state: State, record: records.Sent, at: int) -> Iterable[EventRuns]:
    yield _plain(Kind.SENT, state, record.runs, at)._replace(destination=record.destination)


def _delivered(state: State, record: records.Delivered, at: int) -> Iterable[EventRuns]:
    for entry in state.outbox.get(record.destination, ()):
        if entry.sequence == record.sequence:
            yield _plain(Kind.DELIVERED, state, entry.runs, at)._replace(destination=record.destination, base=record.base)


_Tell = Callable[[State, Any, int], Iterable[EventRuns]]
BEFORE: dict[type, _Tell] = {
    records.Extended: _extended,
    records.Completed: _completed,
    records.Retried: _retried,
    records.LeaseExpired: _expired,
    records.Buried: _buried,
    records.CompletedUnleased: _consumed,
    records.Due: _due,
    records.Cleared: _cleared,
    records.Sought: _sought,
    records.RedrivenInPlace: _redriven,
    records.Lost: _lost,
    records.Dropped: _dropped,
    records.Sent: _sent,
    records.Delivered: _delivered,
}
"""Told of the state in which a record finds the items."""
AFTER: dict[type, _Tell] = {records.Produced: _produced, records.Leased: _leased, records.Opened: _opened}
"""Told of the state that it leaves."""
SILENT: frozenset[type] = frozenset(
    {
        records.Configured,
        records.PassedOver,
        records.RequestAnswered,
        records.TtlChecked,
        records.Paused,
        records.CursorMoved,
        records.CursorReleased,
        records.ProgressSet,
        records.FencesAdded,
        records.FenceNarrowed,
        records.FenceLifted,
        records.FollowUpSent,
        records.ParkedKeyReleased,
    }
)
"""Nothing happens to an item of this partition."""
