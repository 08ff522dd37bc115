"""Leases: who holds which items until when, and what became of leases that ended.

Owns: `LiveLease` (one live lease) and `Leases`. A lease number is `epoch << 40 | counter`: no two owners ever give the same one, so
the number is the fencing token. A grant keeps its items as the runs of its record and opens them into a dict only when they are
settled one by one. What is remembered of ended leases: those whose items were all completed under them, as runs of numbers (next
to nothing), and, for a while, which items of the others were completed. So a repeated `complete` is told apart from a late one.
"""

from collections import Counter
from heapq import heappop, heappush
from itertools import repeat

from penstock.rules.heaps import in_order
from penstock.rules.records import Leased, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, from_offsets, pairs
from penstock.words.limits import MAX_LEASE_TIMEOUT

EPOCH_SHIFT = 40


class LiveLease:
    """A live lease."""

    __slots__ = ("_open", "_sharing", "completed", "consumer", "count", "deadline", "given", "number", "size", "timeout")

    def __init__(self, record: Leased) -> None:
        self.number = record.lease
        self.deadline = record.deadline
        self.timeout = record.timeout
        self.consumer = record.consumer
        self.given = _given(record)
        self.size = self.count = sum([stop - start for start, stop, _, _ in self.given])
        self.completed: RunSet | None = None
        """What was completed, once not everything is settled in one go."""
        self._open: dict[int, tuple[int, int]] | None = None
        self._sharing: Counter[int] | None = None

    @property
    def all_completed(self) -> bool:
        """Whatever was settled was completed."""
        return self.size - self.count == (self.completed.total if self.completed else 0)

    @property
    def open_items(self) -> dict[int, tuple[int, int]]:
        """(lane, key id) of each item still open, in the order given."""
        if self._open is None:
            self._open = {}
            for start, stop, lane, packed in self.given:
                keys = unpack_keys(packed) if packed else repeat(NO_KEY)
                self._open.update(zip(range(start, stop), zip(repeat(lane), keys)))  # noqa: B905 (repeat has no end)
        return self._open

    def parts(self) -> list[tuple[int, int, int, bytes]]:
        """(start, stop, lane, packed key ids or nothing) of what is still open, in the order given."""
        if self._open is None:
            return self.given
        return [(offset, offset + 1, lane, pack_keys([key]) if key else b"") for offset, (lane, key) in self._open.items()]

    def runs(self) -> list[int]:
        """Flat runs of what is still open, in the order given."""
        if self._open is not None:
            return from_offsets(self._open)
        return [edge for start, stop, _, _ in self.given for edge in (start, stop)]

    def keys(self) -> list[int]:
        """Key ids of what is still open, without NO_KEY."""
        if self._open is not None:
            return [key for _, key in self._open.values() if key]
        return [key for _, _, _, packed in self.given if packed for key in unpack_keys(packed) if key]

    @property
    def items_per_key(self) -> "Counter[int]":
        """How many open items each key has, if some key has several (a unit, settled in order); else empty."""
        if self._sharing is None:
            found = Counter(key for _, key in self.open_items.values() if key)
            self._sharing = found if len(found) < found.total() else Counter()
        return self._sharing

    def later_of_key(self, offset: int) -> list[int]:
        """Open items of the same key that come after this one."""
        _, key = self.open_items[offset]
        if self.items_per_key[key] < 2:
            return []
        line = [other for other, (_, its) in self.open_items.items() if its == key]
        return line[line.index(offset) + 1 :]

    def close(self, offset: int) -> tuple[int, int]:
        """Take one item out."""
        sharing = self.items_per_key  # counted before the item is out
        lane, key = self.open_items.pop(offset)
        self.count -= 1
        if sharing:
            sharing[key] -= 1
        return lane, key

    def add_completed(self, runs: list[int]) -> None:
        if self.completed is None:
            self.completed = RunSet()
        self.completed.add_all(runs)

    def __repr__(self) -> str:
        return f"Grant({self.number:#x}, {self.count} open, until {self.deadline}, {self.consumer!r})"


def _given(record: Leased) -> list[tuple[int, int, int, bytes]]:
    """(start, stop, lane, packed key ids or nothing) of everything a lease gave, in order."""
    given: list[tuple[int, int, int, bytes]] = []
    for take in record.takes:
        if take.taken is None:
            given.append((take.start, take.stop, take.lane, take.keys))
            continue
        at = 0
        for start, stop in pairs(take.taken):
            size = 8 * (stop - start)
            given.append((start, stop, take.lane, take.keys[at : at + size]))
            at += size
    heads = record.line_takes
    return given + [(head.start, head.stop, head.lane, pack_keys([head.key]) * (head.stop - head.start)) for head in heads]


class Leases:
    """All live leases of a partition, by number, and what is remembered of others."""

    __slots__ = ("_deadlines", "forget_points", "fully_completed", "live", "partly_completed")

    def __init__(self) -> None:
        self.live: dict[int, LiveLease] = {}
        self._deadlines: list[tuple[int, int]] = []
        self.fully_completed = RunSet()
        """Leases all of whose items were completed under them."""
        self.partly_completed: dict[int, tuple[int, list[int]]] = {}
        """Other leases that ended: (until when to remember, runs completed under them)."""
        self.forget_points: list[tuple[int, int]] = []
        """(time, lease): landmarks by which `finished` is forgotten."""

    def add(self, grant: LiveLease) -> None:
        self.live[grant.number] = grant
        heappush(self._deadlines, (grant.deadline, grant.number))

    def extend(self, grant: LiveLease, deadline: int) -> None:
        grant.deadline = deadline
        heappush(self._deadlines, (deadline, grant.number))
        self._tidy(grant.number)

    def _tidy(self, changed: int) -> None:
        """A lease was extended or has ended: take deadlines that hold good no longer from the top, so that the first one always does."""
        if self._deadlines and self._deadlines[0][1] == changed:
            while self._deadlines:
                deadline, number = self._deadlines[0]
                grant = self.live.get(number)
                if grant is not None and grant.deadline == deadline:
                    return
                heappop(self._deadlines)

    def next_deadline(self) -> int | None:
        """When the first lease ends."""
        return self._deadlines[0][0] if self._deadlines else None

    def past_deadline(self, now: int, limit: int) -> list[LiveLease]:
        """Leases that have ended, up to `limit` items' worth (at least one lease)."""
        found: dict[int, LiveLease] = {}
        items = 0
        for deadline, number in in_order(self._deadlines):
            if items >= limit or deadline > now:
                break
            grant = self.live.get(number)
            if grant is not None and grant.deadline == deadline and number not in found:
                found[number] = grant
                items += grant.count
        return [*found.values()]

    def restart_timeouts(self, now: int) -> None:
        """Every lease gets its full timeout again."""
        for grant in self.live.values():
            self.extend(grant, now + grant.timeout)

    def end(self, grant: LiveLease, now: int, remember: int) -> None:
        """The lease is over; if it was never settled in part, everything under it was completed."""
        del self.live[grant.number]
        self._tidy(grant.number)
        if grant.all_completed:
            self.fully_completed.add(grant.number, grant.number + 1)
        elif grant.completed:
            self.partly_completed[grant.number] = (now + remember, grant.completed.runs)
        self._forget(now, grant.number, remember)

    def _forget(self, now: int, number: int, remember: int) -> None:
        """Drop what is past remembering: about once a minute, so that it costs nothing per lease."""
        step = remember // 16
        if self.forget_points and now < self.forget_points[-1][0] + step:
            return
        self.forget_points.append((now, number))
        oldest = 0
        while self.forget_points and self.forget_points[0][0] + remember + MAX_LEASE_TIMEOUT <= now:
            oldest = self.forget_points.pop(0)[1]
        self.fully_completed.remove(0, oldest)
        for ended in [ended for ended, (until, _) in self.partly_completed.items() if until <= now]:
            del self.partly_completed[ended]
