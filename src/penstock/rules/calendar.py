"""A calendar: runs of offsets by the time at which they come due, packed.

Owns: `Calendar` and `NewTimes`. Entries are kept in packed buckets of about four seconds; a bucket is sorted when its
time comes. So an entry costs 24 bytes, adding one is O(1), and entries come out by (when, start).
Single entries are not removed when an item is resolved or gets another time: the reader of an entry checks the state
of its items, and `NewTimes`.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.rules.runs import RunSet, offsets, pairs

_BUCKET = 1 << 22  # microseconds
_TAG_BITS = 6
_TAG_MASK = (1 << _TAG_BITS) - 1


class CalendarEntry(NamedTuple):
    """Offsets [start, stop) that come due at `when`; `tag` is a number below 64 for the caller."""

    when: int
    start: int
    stop: int
    tag: int


class Calendar:
    __slots__ = ("_buckets", "_head", "_head_bucket", "_order", "_taken", "empty")

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._head: list[CalendarEntry] = []  # the earliest bucket, sorted; entries before _taken are removed
        self._taken = 0
        self._head_bucket = -1
        self.empty = True
        """Whether it is known to have no entries. False also when the last one was removed, until `next` finds out."""

    def __bool__(self) -> bool:
        return self._taken < len(self._head) or bool(self._buckets)

    def __iter__(self) -> Iterator[CalendarEntry]:
        """All entries in order."""
        yield from self._head[self._taken :]
        for bucket in sorted(self._buckets):
            yield from _sorted(self._buckets[bucket])

    def add(self, when: int, start: int, stop: int, tag: int = 0) -> None:
        self.empty = False
        bucket = when // _BUCKET
        if bucket <= self._head_bucket:
            insort(self._head, CalendarEntry(when, start, stop, tag), lo=self._taken)
            return
        entries = self._buckets.get(bucket)
        if entries is None:
            entries = self._buckets[bucket] = array("q")
            heappush(self._order, bucket)
        elif entries[-3] == when and entries[-1] & _TAG_MASK == tag and entries[-2] + (entries[-1] >> _TAG_BITS) == start:
            entries[-1] += (stop - start) << _TAG_BITS
            return
        entries.extend((when, start, (stop - start) << _TAG_BITS | tag))

    def next(self) -> int | None:
        """When the earliest entry comes due, or None."""
        if self._taken >= len(self._head):
            if not self._order:
                self.empty = True
                return None
            self._advance()
        return self._head[self._taken].when

    def due(self, now: int, limit: int) -> list[CalendarEntry]:
        """Up to `limit` entries with `when` <= now, in order. They stay until `discard`."""
        self._advance()
        while self._order and self._order[0] * _BUCKET <= now and len(self._head) - self._taken < limit:
            self._head_bucket = heappop(self._order)
            self._head += _sorted(self._buckets.pop(self._head_bucket))
        found = self._head[self._taken : self._taken + limit]
        return found[: bisect_right(found, now, key=lambda entry: entry.when)]

    def discard(self, when: int, last: int) -> None:
        """Remove all entries up to and including offset `last` at `when`. Of an entry that goes beyond `last` only that
        part is removed, so that the result does not depend on how entries are joined."""
        while True:
            self._advance()
            end = bisect_right(self._head, (when, last), lo=self._taken, key=lambda entry: (entry.when, entry.start))
            for entry in self._head[self._taken : end]:
                if entry.when == when and entry.stop > last + 1:
                    insort(self._head, entry._replace(start=last + 1), lo=end)
            self._taken = end
            if end > 1_000 and end * 2 > len(self._head):
                del self._head[:end]
                self._taken = 0
            if self._taken < len(self._head) or not self._buckets:
                return

    def keep(self, part: Callable[[CalendarEntry], list[int]]) -> None:
        """Keep only the runs that `part` gives for each entry; adjacent runs of one time and tag are joined."""
        kept = [CalendarEntry(entry.when, start, stop, entry.tag) for entry in self for start, stop in pairs(part(entry))]
        self.clear()
        for entry in kept:
            self.add(*entry)

    def clear(self) -> None:
        self._buckets, self._order, self._head, self._taken, self._head_bucket = {}, [], [], 0, -1
        self.empty = True

    def _advance(self) -> None:
        """If all entries of the head are removed, make the earliest bucket the head."""
        if self._taken < len(self._head) or not self._order:
            return
        self._head_bucket = heappop(self._order)
        self._head = _sorted(self._buckets.pop(self._head_bucket))
        self._taken = 0


class NewTimes:
    """The times of items that may also have entries in calendars for other times.

    To change a time costs nothing per entry of the calendar: the old entry stays until its time comes.
    """

    __slots__ = ("_changed", "_times", "changes")

    def __init__(self) -> None:
        self._times: dict[int, tuple[bool, int, int] | None] = {}
        """offset → (whether it is wall time, time, tag); None: the item is not scheduled now. The tag belongs to it: an
        old entry may be for the same time, with the lane that the item had before."""
        self._changed = RunSet()
        self.changes = 0
        """How many entries of calendars may be out of date."""

    def __bool__(self) -> bool:
        return bool(self._times)

    def change(self, offset: int, time: tuple[bool, int, int] | None) -> None:
        """Change the time of an item that is in a calendar."""
        self.changes += 1
        self._times[offset] = time
        self._changed.add(offset, offset + 1)

    def follow(self, offset: int, time: tuple[bool, int, int]) -> None:
        """Note the time of an item that was not scheduled, if it may have old entries."""
        if offset in self._times:
            self._times[offset] = time

    def changed_within(self, start: int, stop: int) -> list[int]:
        """The items of [start, stop) whose times were changed."""
        return offsets(self._changed.within(start, stop))

    def is_current(self, offset: int, by_wall: bool, when: int, tag: int) -> bool:
        return self._times.get(offset) == (by_wall, when, tag)

    def clear(self) -> None:
        """Forget everything: no calendar has old entries any more."""
        self._times.clear()
        self._changed.clear()
        self.changes = 0


def _sorted(entries: "array[int]") -> list[CalendarEntry]:
    each = iter(entries)
    triples = zip(each, each, each, strict=True)
    return sorted(CalendarEntry(when, start, start + (last >> _TAG_BITS), last & _TAG_MASK) for when, start, last in triples)
