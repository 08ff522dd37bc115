"""The events of items that records stand for.

Owns: `EventReplay`, which applies records to a state (by machine.py) and gives the events of each; `EventRuns`, one
event of many items, as runs; `Event`, one event of one item.
A replay from a log's first record, or from a Base, gives every transition of the table in item_states.py. After records
were lost by damage, events may come in a state that the table does not allow, up to the next Base.
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
from penstock.words.values import timestamp

RETURNED = "returned with an earlier item of its key"
REBOOTED = "the machine was restarted: every lease has its full timeout again"
REOPENED = "the partition was opened: no lease ends at once"
DAMAGED = "damage took its bytes"
RESCHEDULED_TO_NOW = "rescheduled"
PLACE_BYTES = len(pack_destination(0, 0))


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of one item."""

    event: str
    """The value of a Transition."""
    offset: int
    at: int
    """Wall microseconds."""
    attempt: int = 0
    """The attempt in which it happened; of an item that is not leased, how many attempts failed before."""
    reason: str = ""
    consumer: str = ""
    lease: int = 0
    """The number of the lease under which it happened; 0: none."""
    destination: str = ""
    """The partition to which the item is sent (`format_place`)."""
    source: str = ""
    """The partition from which a transferred item came (`format_place`)."""


class EventRuns(NamedTuple):
    """The same event of many items, from one record. Fields without a docstring are as in `Event`."""

    event: Kind
    runs: list[int]
    """Flat runs of the items, in the record's order."""
    at: int
    attempt: int = 0
    attempts: dict[int, int] = {}  # noqa: RUF012 (never changed)
    """offset → attempt, where it differs from `attempt`."""
    reason: str = ""
    consumer: str = ""
    lease: int = 0
    destination: bytes = b""
    """As `pack_destination` gives it."""
    base: int = -1
    """The offset of the first item at the destination; -1: unknown, or not known yet."""
    source: bytes = b""

    def events(self) -> Iterator[Event]:
        """An Event for each item."""
        if self.destination:
            return (self._event(offset, index) for index, offset in enumerate(offsets(self.runs)))
        _, _, at, attempt, attempts, reason, consumer, lease, _, _, _ = self
        event, source = self.event.value, format_place(self.source) if self.source else ""
        found = ((offset, attempts.get(offset, attempt)) for offset in offsets(self.runs))
        return (Event(event, offset, at, number, reason, consumer, lease, "", source) for offset, number in found)

    def event_of(self, offset: int) -> Event | None:
        """The Event of one item, or None."""
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
    """A partition of any queue, or an item, as text: "<incarnation, 16 hex digits>/<partition>" or "…/<item id>"."""
    if len(packed) != PLACE_BYTES:  # the source of a chunk is no partition
        return packed.hex()
    incarnation, partition = unpack_destination(packed)
    return f"{incarnation:016x}/{partition if offset is None else format_id(partition, offset)}"


class EventReplay:
    """A state to which records are applied one by one, with the events of each."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state if state is not None else State()

    def apply(self, record: records.Record, now: Moment) -> list[EventRuns]:
        """Apply a record and return its events. An item has at most one event per record."""
        kind, state = type(record), self.state
        before, after = BEFORE.get(kind), AFTER.get(kind)
        events = [*before(state, record, now.wall)] if before is not None else []
        machine.apply(state, record, now)
        if after is not None:
            events += after(state, record, now.wall)
        return [event for event in events if event.runs]


# -- the events of each record -------------------------------------------------------------------------


def _attempts(state: State, runs: list[int], attempt: int = 0) -> dict[int, int]:
    """offset → attempt, of items that failed before or are buried. `attempt` is 1 if one more attempt is running."""
    failures, burials = state.failures, state.burials
    found: dict[int, int] = {}
    if failures or burials:
        items = offsets(runs)
        found.update((offset, failures[offset].attempts + attempt) for offset in failures.keys() & items)
        found.update((offset, burials[offset].attempts) for offset in burials.keys() & items)
    return found


def _unleased_event(event: Kind, state: State, runs: list[int], at: int, reason: str = "") -> EventRuns:
    """The event of items that are not leased."""
    return EventRuns(event, runs, at, 0, _attempts(state, runs), reason)


def _leased_event(event: Kind, state: State, lease: LiveLease, runs: list[int], at: int, reason: str = "") -> EventRuns:
    """The event of items of a lease."""
    return EventRuns(event, runs, at, 1, _attempts(state, runs, 1), reason, lease.consumer, lease.number)


def _produced(state: State, record: records.Produced, at: int) -> Iterable[EventRuns]:
    start, stop = record.base, record.base + len(record.batch)
    later = state.scheduled.within(start, stop)
    source = record.source or b""
    yield EventRuns(Kind.PRODUCED, RunSet(later).missing(start, stop), at, source=source)
    yield EventRuns(Kind.SCHEDULED, later, at, source=source)


def _leased(state: State, record: records.Leased, at: int) -> Iterable[EventRuns]:
    lease = state.leases.live[record.lease]
    yield _leased_event(Kind.LEASED, state, lease, lease.runs(), at)


def _opened(state: State, record: records.Opened, at: int) -> Iterable[EventRuns]:
    extended_until = state.moment.elapsed + record.lease_grace if record.lease_grace else -1
    for lease in state.leases.live.values():
        if record.rebooted or lease.deadline == extended_until:
            yield _leased_event(Kind.EXTENDED, state, lease, lease.runs(), at, REBOOTED if record.rebooted else REOPENED)


def _extended(state: State, record: records.Extended, at: int) -> Iterable[EventRuns]:
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        yield _leased_event(Kind.EXTENDED, state, lease, lease.runs(), at)


def _completed(state: State, record: records.Completed, at: int) -> Iterable[EventRuns]:
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        yield _leased_event(Kind.COMPLETED, state, lease, lease.runs() if record.runs is None else record.runs, at)
    else:  # damage took the record of the lease
        yield EventRuns(Kind.COMPLETED, record.runs or [], at, 1, lease=record.lease)


def _retried(state: State, record: records.Retried, at: int) -> Iterable[EventRuns]:
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        yield _leased_event(Kind.DELAYED if record.due else Kind.RETRIED, state, lease, record.runs, at, record.reason)
        yield _leased_event(Kind.RETRIED, state, lease, record.returned, at, RETURNED)


def _expired(state: State, record: records.LeaseExpired, at: int) -> Iterable[EventRuns]:
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        yield _leased_event(Kind.LEASE_EXPIRED, state, lease, lease.runs(), at, LEASE_EXPIRED)


def _buried(state: State, record: records.Buried, at: int) -> Iterable[EventRuns]:
    if not record.lease:
        event = Kind.TTL_EXPIRED if record.reason == TTL_EXPIRED else Kind.BURIED
        yield _unleased_event(event, state, record.runs, at, record.reason)
        return
    lease = state.leases.live.get(record.lease)
    if lease is not None:
        yield _leased_event(Kind.BURIED, state, lease, record.runs, at, record.reason)
        yield _leased_event(Kind.RETRIED, state, lease, record.returned, at, RETURNED)


def _completed_unleased(state: State, record: records.CompletedUnleased, at: int) -> Iterable[EventRuns]:
    yield _unleased_event(Kind.COMPLETED, state, record.runs, at)._replace(consumer=record.consumer)


def _cleared(state: State, record: records.Cleared, at: int) -> Iterable[EventRuns]:
    for runs in (record.ready, record.scheduled, record.buried):
        yield _unleased_event(Kind.CLEARED, state, runs, at)
    yield EventRuns(Kind.CLEARED, record.leased, at, 1, _attempts(state, record.leased, 1))


def _rescheduled(state: State, record: records.Rescheduled, at: int) -> Iterable[EventRuns]:
    if record.at:
        yield _unleased_event(Kind.RESCHEDULED, state, record.runs, at, f"not before {timestamp(record.at).isoformat()}")
    else:
        yield _unleased_event(Kind.DUE, state, record.runs, at, RESCHEDULED_TO_NOW)


def _runs_as(event: Kind) -> "_EventRule":
    """The rule of a record with `runs` of items that are not leased, to all of which the same happens."""
    return lambda state, record, at: [_unleased_event(event, state, record.runs, at)]


def _lost(state: State, record: records.Lost, at: int) -> Iterable[EventRuns]:
    """Completed items have no event. An item whose earlier records are lost too has only this one."""
    lost, leased = RunSet(), RunSet()
    for start, stop in pairs(record.runs):
        lost.add_all(state.completed.missing(start, stop))
        leased.add_all(state.leased_within(start, stop).runs)
    lost.remove_all(leased.runs)
    yield _unleased_event(Kind.LOST, state, lost.runs, at, DAMAGED)
    yield EventRuns(Kind.LOST, leased.runs, at, 1, _attempts(state, leased.runs, 1), DAMAGED)


def _sent(state: State, record: records.Sent, at: int) -> Iterable[EventRuns]:
    yield _unleased_event(Kind.SENT, state, record.runs, at)._replace(destination=record.destination)


def _delivered(state: State, record: records.Delivered, at: int) -> Iterable[EventRuns]:
    for entry in state.outbox.get(record.destination, ()):
        if entry.sequence == record.sequence:
            yield _unleased_event(Kind.DELIVERED, state, entry.runs, at)._replace(destination=record.destination, base=record.base)


_EventRule = Callable[[State, Any, int], Iterable[EventRuns]]
BEFORE: dict[type, _EventRule] = {
    records.Extended: _extended,
    records.Completed: _completed,
    records.Retried: _retried,
    records.LeaseExpired: _expired,
    records.Buried: _buried,
    records.CompletedUnleased: _completed_unleased,
    records.Due: _runs_as(Kind.DUE),
    records.Cleared: _cleared,
    records.Sought: _runs_as(Kind.SOUGHT),
    records.RedrivenInPlace: _runs_as(Kind.REDRIVEN),
    records.Cancelled: _runs_as(Kind.CANCELLED),
    records.Skipped: _runs_as(Kind.CLEARED),
    records.Rescheduled: _rescheduled,
    records.Lost: _lost,
    records.Dropped: _runs_as(Kind.DROPPED),
    records.Sent: _sent,
    records.Delivered: _delivered,
}
"""Rules that read the state before the record is applied."""
AFTER: dict[type, _EventRule] = {records.Produced: _produced, records.Leased: _leased, records.Opened: _opened}
"""Rules that read the state after the record was applied."""
