"""What became of the items of a partition, in numbers.

Owns: `Tally`. Outcomes are counted where they are decided, from the records of each command: so the last failed attempt
of an item counts as a burial, whatever the caller asked for. They count when their records are committed: a turn that
is undone counts nothing, and neither does a replay. A partition is closed and opened again; its tally stays.
One thread at a time changes it: the one that uses the partition. Any thread may read it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from penstock.loop.histogram import LEASE_BOUNDS, SYNC_BOUNDS, Histogram
from penstock.rules import commands, records
from penstock.rules.removal import TTL_EXPIRED
from penstock.rules.runs import count
from penstock.rules.state import State
from penstock.words.clock import Clock

COUNTERS = {
    "produced": "Items stored for producers, including those of published writes",
    "adopted": "Items stored from published writes (Spark)",
    "received": "Items stored from transfers: dead letters, follow-ups, redrives, items that a resize moved",
    "duplicates": "Items not stored because their dedup id was known",
    "leased": "Items leased",
    "completed": "Items completed",
    "retried": "Items returned after a failed attempt that was not the last one",
    "returned": "Items returned without counting an attempt",
    "lease_expired": "Items whose lease expired",
    "extended": "Items whose lease was extended",
    "buried_by_consumer": "Items buried because a consumer asked for it",
    "buried_by_attempts": "Items buried because their attempts were spent",
    "buried_by_ttl": "Items buried because their ttl ended",
    "redriven": "Buried items made ready again in their own queue",
    "sought": "Completed items made ready again by a seek",
    "sent": "Items sent to another queue or partition",
    "cleared": "Items cleared",
    "cancelled": "Waiting items cancelled",
    "rescheduled": "Waiting items given another time",
    "dropped": "Resolved items deleted by retention",
    "buried_dropped": "Buried items deleted by retention",
}
"""The counters of items, and what they count."""
BURIED = ("buried_by_consumer", "buried_by_attempts", "buried_by_ttl")
OUTCOMES = {
    "completed": ("completed",),
    "retried": ("retried",),
    "returned": ("returned",),
    "buried": BURIED,
    "expired": ("lease_expired",),
}
"""How a lease of an item may end → the counters of that."""
NO_LEASE = -1
"""Instead of a duration."""


class BuriedItems(NamedTuple):
    """Items that one record buried."""

    first: int
    last: int
    """Offsets of the first and the last."""
    items: int
    reason: str
    by_consumer: bool
    """Whether a consumer asked for it."""


class Tally:
    """The counters of one partition since its queue was opened."""

    __slots__ = (
        *("_pending", "_pending_burials", "_produced", "burials", "counts", "failures", "findings", "freed_bytes", "freed_segments"),
        *("lease_durations", "slow", "sync_durations", "written"),
    )

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(int)
        """Name of COUNTERS → items."""
        self.lease_durations: dict[str, Histogram] = {}
        """Counter → the time since their lease, of the items that it counted."""
        self.sync_durations = Histogram(SYNC_BOUNDS)
        self.failures = 0
        """How often its storage failed."""
        self.slow = 0
        """How often its storage became slow."""
        self.findings = 0
        """How many torn tails and damaged side files its openings found."""
        self.written = 0
        """Bytes appended to its log."""
        self.freed_bytes = 0
        self.freed_segments = 0
        """By retention."""
        self._produced = 0
        """Items of producers that are not committed yet."""
        self._pending: list[tuple[str, int, int]] = []
        """(counter, items, time since their lease or NO_LEASE), of what else is not committed yet."""
        self.burials: list[BuriedItems] = []
        """Burials that are committed and not taken yet: they are logged."""
        self._pending_burials: list[BuriedItems] = []

    def note(self, state: State, found: Sequence[records.Record], now: int, command: commands.Command) -> None:
        """Note the outcomes of a command, whose records are about to be applied."""
        for record in found:
            if type(record) is records.Produced and record.source is None:  # the most frequent one: it has no rule
                self._produced += len(record.batch.payloads)
            elif (rule := _RULES.get(type(record))) is not None:
                rule(self._pending, state, record, now, command)
            if type(record) is records.Buried:
                self._note_burial(record, type(command) is commands.BuryLeased)

    def note_timers(self, state: State, found: Sequence[records.Record], now: int) -> None:
        """Like `note`, for the records of timers. A lease that expires may bury some of its items and return others."""
        buried: dict[int, int] = defaultdict(int)
        for record in found:
            if type(record) is records.LeaseExpired:
                lease = state.leases.live[record.lease]
                self._pending.append(("lease_expired", lease.count - buried[record.lease], now - lease.leased_at))
            elif type(record) is records.Buried:
                _buried_by_timer(self._pending, state, record, now)
                self._note_burial(record, False)
                buried[record.lease] += count(record.runs)

    def _note_burial(self, record: records.Buried, by_consumer: bool) -> None:
        if record.runs:
            self._pending_burials.append(BuriedItems(record.runs[0], record.runs[-1] - 1, count(record.runs), record.reason, by_consumer))

    def take_burials(self) -> list[BuriedItems]:
        """The burials that were committed since the last call."""
        found, self.burials = self.burials, []
        return found

    def note_duplicates(self, items: int) -> None:
        self._pending.append(("duplicates", items, NO_LEASE))

    def commit(self) -> None:
        """Count what was noted: its records are committed."""
        if self._produced:
            self.counts["produced"] += self._produced
            self._produced = 0
        if self._pending:
            for name, items, duration in self._pending:
                self.counts[name] += items
                if duration >= 0:
                    found = self.lease_durations.get(name)
                    if found is None:
                        found = self.lease_durations[name] = Histogram(LEASE_BOUNDS)
                    found.add(duration, items)
            self._pending.clear()
        if self._pending_burials:
            self.burials += self._pending_burials
            self._pending_burials = []

    def undo(self) -> None:
        """Forget what was noted since the last commit."""
        self._produced = 0
        self._pending.clear()
        self._pending_burials.clear()

    def time_sync(self, clock: Clock, sync: Callable[[], None]) -> None:
        """Sync, and count how long it took."""
        began = clock.read().elapsed
        try:
            sync()
        finally:
            self.sync_durations.add(clock.read().elapsed - began)

    def note_retention(self, size_bytes: int, segments: int) -> None:
        self.freed_bytes += size_bytes
        self.freed_segments += segments

    def durations_of(self, outcome: str) -> list[Histogram]:
        """Of the leases that ended so, for each item the time from lease to end."""
        return [found for name in OUTCOMES[outcome] if (found := self.lease_durations.get(name)) is not None]


# -- what records mean --------------------------------------------------------------------------------

_Pending: TypeAlias = list[tuple[str, int, int]]


def _produced(pending: _Pending, state: State, record: records.Produced, now: int, command: commands.Command) -> None:
    """Items of a transfer or of a published write."""
    items = len(record.batch)
    if isinstance(command, commands.Produce) and command.dedup:  # a chunk of a published write
        pending += (("produced", items, NO_LEASE), ("adopted", items, NO_LEASE))
    else:
        pending.append(("received", items, NO_LEASE))


def _leased(pending: _Pending, state: State, record: records.Leased, now: int, command: commands.Command) -> None:
    pending.append(("leased", record.count, NO_LEASE))


def _completed(pending: _Pending, state: State, record: records.Completed, now: int, command: commands.Command) -> None:
    lease = state.leases.live[record.lease]
    pending.append(("completed", lease.count if record.runs is None else count(record.runs), now - lease.leased_at))


def _completed_unleased(pending: _Pending, state: State, record: records.CompletedUnleased, now: int, command: commands.Command) -> None:
    pending.append(("completed", count(record.runs), NO_LEASE))


def _retried(pending: _Pending, state: State, record: records.Retried, now: int, command: commands.Command) -> None:
    since = now - state.leases.live[record.lease].leased_at
    pending.append(("retried" if record.counted else "returned", count(record.runs), since))
    if record.returned:
        pending.append(("returned", count(record.returned), since))


def _extended(pending: _Pending, state: State, record: records.Extended, now: int, command: commands.Command) -> None:
    pending.append(("extended", state.leases.live[record.lease].count, NO_LEASE))


def _buried(pending: _Pending, state: State, record: records.Buried, now: int, command: commands.Command) -> None:
    if not record.lease:  # of waiting items: a new policy allows fewer attempts
        pending.append((_cause(record), count(record.runs), NO_LEASE))
        return
    since = now - state.leases.live[record.lease].leased_at
    cause = "buried_by_consumer" if type(command) is commands.BuryLeased else _cause(record)
    pending.append((cause, count(record.runs), since))
    if record.returned:
        pending.append(("returned", count(record.returned), since))


def _buried_by_timer(pending: _Pending, state: State, record: records.Buried, now: int) -> None:
    items = count(record.runs)
    pending.append((_cause(record), items, NO_LEASE))
    if record.lease:
        pending.append(("lease_expired", items, now - state.leases.live[record.lease].leased_at))


def _cause(record: records.Buried) -> str:
    """Why the rules buried items: for nothing else than a ttl do they give this reason."""
    return "buried_by_ttl" if record.reason == TTL_EXPIRED else "buried_by_attempts"


def _redriven(pending: _Pending, state: State, record: records.RedrivenInPlace, now: int, command: commands.Command) -> None:
    pending.append(("redriven", count(record.runs), NO_LEASE))


def _sought(pending: _Pending, state: State, record: records.Sought, now: int, command: commands.Command) -> None:
    pending.append(("sought", count(record.runs), NO_LEASE))


def _sent(pending: _Pending, state: State, record: records.Sent, now: int, command: commands.Command) -> None:
    pending.append(("sent", count(record.runs), NO_LEASE))


def _cleared(pending: _Pending, state: State, record: records.Cleared, now: int, command: commands.Command) -> None:
    runs = (record.ready, record.scheduled, record.leased, record.buried)
    pending.append(("cleared", sum(map(count, runs)), NO_LEASE))


def _cancelled(pending: _Pending, state: State, record: records.Cancelled, now: int, command: commands.Command) -> None:
    pending.append(("cancelled", count(record.runs), NO_LEASE))


def _skipped(pending: _Pending, state: State, record: records.Skipped, now: int, command: commands.Command) -> None:
    pending.append(("cleared", count(record.runs), NO_LEASE))


def _rescheduled(pending: _Pending, state: State, record: records.Rescheduled, now: int, command: commands.Command) -> None:
    pending.append(("rescheduled", count(record.runs), NO_LEASE))


def _dropped(pending: _Pending, state: State, record: records.Dropped, now: int, command: commands.Command) -> None:
    buried = sum(count(state.buried_set.within(*pair)) for pair in zip(record.runs[::2], record.runs[1::2], strict=True))
    pending.append(("dropped", count(record.runs), NO_LEASE))
    if buried:
        pending.append(("buried_dropped", buried, NO_LEASE))


_RULES: dict[type, Callable[[_Pending, State, Any, int, commands.Command], None]] = {
    records.Produced: _produced,
    records.Leased: _leased,
    records.Completed: _completed,
    records.CompletedUnleased: _completed_unleased,
    records.Retried: _retried,
    records.Extended: _extended,
    records.Buried: _buried,
    records.RedrivenInPlace: _redriven,
    records.Sought: _sought,
    records.Sent: _sent,
    records.Cleared: _cleared,
    records.Cancelled: _cancelled,
    records.Skipped: _skipped,
    records.Rescheduled: _rescheduled,
    records.Dropped: _dropped,
}
