"""The live leases of a partition, and what ended leases completed.

Owns: `LiveLease` and `Leases`. A lease number is `epoch << 40 | counter`: no two owners ever give the same one, so the
number is the fencing token. A LiveLease keeps its items as the runs of its record; it makes a dict of them only when
they are settled one by one. Two things are remembered of ended leases, to tell a repeated `complete` from a late one:
the numbers of leases that completed all their items, as runs; and for a while the items that others completed.
"""

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import dropwhile, repeat

from penstock.rules.heaps import in_order
from penstock.rules.records import Leased, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, from_offsets, pairs
from penstock.words.limits import MAX_LEASE_TIMEOUT

EPOCH_SHIFT = 40


class LiveLease:
    __slots__ = (
        *("_given", "_items_per_key", "_open", "_record", "_settled_of_unit", "_units", "completed", "consumer", "count"),
        *("deadline", "leased_at", "number", "size", "timeout"),
    )

    def __init__(self, record: Leased) -> None:
        self.number = record.lease
        self.deadline = record.deadline
        self.timeout = record.timeout
        self.leased_at = record.deadline - record.timeout
        """When it was given, by elapsed time. Not stored: after a replay from a Base, when it was last extended."""
        self.consumer = record.consumer
        self._record = record
        self._given: list[tuple[int, int, int, bytes]] | None = None
        self.size = self.count = record.count
        self.completed: RunSet | None = None
        """The items completed so far; None until the first partial `complete`."""
        self._open: dict[int, tuple[int, int]] | None = None
        self._items_per_key: Counter[int] | None = None
        self._units: dict[int, list[int]] | None = None
        self._settled_of_unit: dict[int, int] = {}
        """Key → how many items at the front of its unit are settled: they are not read again."""

    @property
    def given(self) -> list[tuple[int, int, int, bytes]]:
        """(start, stop, lane, packed key ids or b"") of all leased items, in order. It is made at first use."""
        if self._given is None:
            self._given = _given(self._record)
        return self._given

    def restore(self, given: list[tuple[int, int, int, bytes]], size: int, completed: RunSet | None) -> None:
        """Set what a Base has stored of a lease: its open items, how many it had, and those that are completed."""
        self._given, self.size, self.completed = given, size, completed
        self.count = sum(stop - start for start, stop, _, _ in given)

    @property
    def has_one_item(self) -> bool:
        """Whether it had one item from the beginning, which is open."""
        return self.size == 1 == self.count

    @property
    def all_completed(self) -> bool:
        """Whether every settled item was completed."""
        return self.size - self.count == (self.completed.total if self.completed else 0)

    @property
    def open_items(self) -> dict[int, tuple[int, int]]:
        """offset → (lane, key id) of each open item, in the order leased."""
        if self._open is None:
            self._open = {}
            for start, stop, lane, packed in self.given:
                keys = unpack_keys(packed) if packed else repeat(NO_KEY)
                self._open.update(zip(range(start, stop), zip(repeat(lane), keys)))  # noqa: B905 (repeat has no end)
        return self._open

    def parts(self) -> list[tuple[int, int, int, bytes]]:
        """(start, stop, lane, packed key ids or b"") of the open items, in the order leased."""
        if self._open is None:
            return self.given
        return [(offset, offset + 1, lane, pack_keys([key]) if key else b"") for offset, (lane, key) in self._open.items()]

    def runs(self) -> list[int]:
        """Flat runs of the open items, in the order leased."""
        if self._open is not None:
            return from_offsets(self._open)
        if self._given is None:
            return self._record.runs
        return [edge for start, stop, _, _ in self.given for edge in (start, stop)]

    def keys(self) -> list[int]:
        """Key ids of the open items, without NO_KEY. A key of several items may occur once or several times."""
        if self._open is not None:
            return [key for _, key in self._open.values() if key]
        if self._given is None:
            keys: list[int] = []
            for take in self._record.takes:
                if take.keys:
                    keys += filter(None, unpack_keys(take.keys))
            for line_take in self._record.line_takes:
                keys.append(line_take.key)
            return keys
        return [key for key in unpack_keys(b"".join([packed for _, _, _, packed in self.given])) if key]

    @property
    def items_per_key(self) -> "Counter[int]":
        """How many open items each key has, if some key has several (a unit); otherwise empty."""
        if self._items_per_key is None:
            found = Counter(key for _, key in self.open_items.values() if key)
            self._items_per_key = found if len(found) < found.total() else Counter()
        return self._items_per_key

    def unit(self, key: int) -> Iterator[int]:
        """The open items of a key, in the order leased. Reading the first is O(1), if units are settled in order."""
        if self._units is None:
            self._units = {}
            for offset, (_, its_key) in self.open_items.items():
                self._units.setdefault(its_key, []).append(offset)
        items = self._units.get(key, ())
        for index in range(self._settled_of_unit.get(key, 0), len(items)):
            if items[index] in self.open_items:
                yield items[index]

    def later_of_key(self, offset: int) -> list[int]:
        """Open items of the same key that come after this one."""
        _, key = self.open_items[offset]
        if self.items_per_key[key] < 2:
            return []
        return list(dropwhile(lambda other: other != offset, self.unit(key)))[1:]

    def close(self, offset: int) -> tuple[int, int]:
        """Remove an open item; returns its lane and key id."""
        items_per_key = self.items_per_key  # counted before the item is removed
        lane, key = self.open_items.pop(offset)
        self.count -= 1
        if items_per_key:
            items_per_key[key] -= 1
        if self._units is not None:
            items, settled = self._units[key], self._settled_of_unit.get(key, 0)
            while settled < len(items) and items[settled] not in self.open_items:
                settled += 1
            self._settled_of_unit[key] = settled
        return lane, key

    def add_completed(self, runs: list[int]) -> None:
        if self.completed is None:
            self.completed = RunSet()
        self.completed.add_all(runs)

    def __repr__(self) -> str:
        return f"LiveLease({self.number:#x}, {self.count} open, until {self.deadline}, {self.consumer!r})"


def _given(record: Leased) -> list[tuple[int, int, int, bytes]]:
    """(start, stop, lane, packed key ids or b"") of all leased items, in order."""
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
    for line_take in record.line_takes:
        start, stop = line_take.start, line_take.stop
        given.append((start, stop, line_take.lane, pack_keys([line_take.key]) * (stop - start)))
    return given


class Leases:
    """All live leases of a partition by number, and what is remembered of ended ones."""

    __slots__ = ("_deadlines", "forget_points", "fully_completed", "live", "partly_completed")

    def __init__(self) -> None:
        self.live: dict[int, LiveLease] = {}
        self._deadlines: list[tuple[int, int]] = []
        self.fully_completed = RunSet()
        """Numbers of leases that completed all their items."""
        self.partly_completed: dict[int, tuple[int, list[int]]] = {}
        """number → (when to forget it, completed runs) of ended leases that completed some of their items."""
        self.forget_points: list[tuple[int, int]] = []
        """(time, lease number): when that time is long enough ago, lower numbers are removed from `fully_completed`."""

    def add(self, lease: LiveLease) -> None:
        self.live[lease.number] = lease
        heappush(self._deadlines, (lease.deadline, lease.number))

    def extend(self, lease: LiveLease, deadline: int) -> None:
        lease.deadline = deadline
        heappush(self._deadlines, (deadline, lease.number))
        self._drop_stale_deadlines(lease.number)

    def _drop_stale_deadlines(self, changed: int) -> None:
        """Keep the first deadline valid after a lease was extended or ended: remove outdated ones from the top."""
        if self._deadlines and self._deadlines[0][1] == changed:
            while self._deadlines:
                deadline, number = self._deadlines[0]
                lease = self.live.get(number)
                if lease is not None and lease.deadline == deadline:
                    return
                heappop(self._deadlines)

    def next_deadline(self) -> int | None:
        """The earliest deadline, or None."""
        return self._deadlines[0][0] if self._deadlines else None

    def past_deadline(self, now: int, limit: int) -> list[LiveLease]:
        """Leases whose deadline has passed: as many as together hold `limit` items, at least one."""
        found: dict[int, LiveLease] = {}
        items = 0
        for deadline, number in in_order(self._deadlines):
            if items >= limit or deadline > now:
                break
            lease = self.live.get(number)
            if lease is not None and lease.deadline == deadline and number not in found:
                found[number] = lease
                items += lease.count
        return [*found.values()]

    def restart_timeouts(self, now: int) -> None:
        """Give every lease its full timeout from now on."""
        for lease in self.live.values():
            self.extend(lease, now + lease.timeout)

    def extend_all(self, until: int) -> None:
        """Give every lease that would end before `until` that deadline."""
        for lease in self.live.values():
            if lease.deadline < until:
                lease.deadline = until
        self._deadlines = [(lease.deadline, lease.number) for lease in self.live.values()]
        heapify(self._deadlines)

    def end(self, lease: LiveLease, now: int, remember: int) -> None:
        """End a lease, and remember for `remember` what it completed."""
        del self.live[lease.number]
        self._drop_stale_deadlines(lease.number)
        if lease.all_completed:
            self.fully_completed.add(lease.number, lease.number + 1)
        elif lease.completed:
            self.partly_completed[lease.number] = (now + remember, lease.completed.runs)
        self._forget(now, lease.number, remember)

    def _forget(self, now: int, number: int, remember: int) -> None:
        """Delete what was remembered long enough: at most every sixteenth of `remember`, to be cheap per lease."""
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
