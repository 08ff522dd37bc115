"""Sets of offsets as runs: a contiguous range costs one entry, however long it is.

Owns: `RunSet`, and the flat form of runs in records: `[start, stop, …]`, half open, ascending unless said otherwise.
Limits: adding at the end is O(1); adding elsewhere is O(log n) plus a memory move of the later runs. Scattered changes
that nobody asks about at once are collected and merged together (`add_later`, `remove_later`).
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import eq

FEW_CHANGES = 64
MOST_CHANGES = 1 << 18
"""RunSet: so many edges of runs are merged one by one; with more, they are merged although nobody asks."""


def pairs(runs: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The (start, stop) pairs of flat runs."""
    each = iter(runs)
    return zip(each, each, strict=True)


def count(runs: Sequence[int]) -> int:
    """How many offsets flat runs cover."""
    if len(runs) == 2:
        return runs[1] - runs[0]
    return sum(runs[1::2]) - sum(runs[::2])


def first_of(runs: Iterable[int], most: int) -> list[int]:
    """The first `most` offsets of flat runs, as runs."""
    found: list[int] = []
    for start, stop in pairs(runs):
        if most <= 0:
            break
        found += (start, min(stop, start + most))
        most -= stop - start
    return found


def offsets(runs: list[int]) -> list[int]:
    """Every offset of flat runs, in the order of the runs."""
    if len(runs) == 2:
        return list(range(runs[0], runs[1]))
    starts = runs[::2]
    if [start + 1 for start in starts] == runs[1::2]:
        return starts
    return [offset for start, stop in pairs(runs) for offset in range(start, stop)]


def from_offsets(values: Iterable[int]) -> list[int]:
    """Flat runs of offsets in the given order; consecutive offsets are joined."""
    values = values if isinstance(values, list) else list(values)
    stops = [value + 1 for value in values]
    if not any(map(eq, stops, islice(values, 1, None))):  # nothing to join
        runs = [0] * (2 * len(values))
        runs[::2], runs[1::2] = values, stops
        return runs
    runs, expected = [], -1
    for value, stop in zip(values, stops, strict=True):
        if value == expected:
            runs[-1] = stop
        else:
            runs += (value, stop)
        expected = stop
    return runs


def complement(runs: Iterable[int], start: int, stop: int) -> list[int]:
    """Flat runs of the offsets of [start, stop) that are not in `runs`, which are ascending and inside it."""
    found: list[int] = []
    for low, high in pairs(runs):
        if start < low:
            found += (start, low)
        start = high
    return [*found, start, stop] if start < stop else found


class RunSet:
    """A set of offsets kept as ascending, disjoint, non-touching runs."""

    __slots__ = ("_changes", "_changes_end", "_removes", "_starts", "_stops", "total")

    def __init__(self, runs: Iterable[int] = ()) -> None:
        self._changes = array("q")
        """Runs of `add_later` or, if `_removes`, of `remove_later`, that are not merged yet."""
        self._changes_end = 0
        """The highest offset in `_changes`."""
        self._removes = False
        self._starts = array("q")
        self._stops = array("q")
        self.total = 0
        for start, stop in pairs(runs):
            self.add(start, stop)

    def __len__(self) -> int:
        return self.total

    def __contains__(self, offset: int) -> bool:
        if self._changes:
            self._merge()
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._stops[at]

    def __repr__(self) -> str:
        if self._changes:
            self._merge()
        return f"RunSet({self.total} in {len(self._starts)} runs)"

    @property
    def runs(self) -> list[int]:
        """All runs, flat."""
        if self._changes:
            self._merge()
        return [edge for pair in zip(self._starts, self._stops, strict=True) for edge in pair]

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop); some of it may be in the set already."""
        if start >= stop:
            return
        if self._changes and start < self._changes_end:
            self._merge()
        starts, stops = self._starts, self._stops
        if not stops or start > stops[-1]:
            starts.append(start)
            stops.append(stop)
            self.total += stop - start
            return
        if start == stops[-1]:
            stops[-1] = stop
            self.total += stop - start
            return
        if self._changes:
            self._merge()
        low = bisect_left(stops, start)  # first run that ends at or after start: it touches or overlaps
        high = bisect_right(starts, stop, low)  # first run that begins after stop
        if low == high:
            starts.insert(low, start)
            stops.insert(low, stop)
            self.total += stop - start
        elif high - low == 1:
            first, last = starts[low], stops[low]
            if start < first:
                starts[low] = start
                self.total += first - start
            if stop > last:
                stops[low] = stop
                self.total += stop - last
        else:
            self._replace(low, high, (min(start, starts[low]),), (max(stop, stops[high - 1]),))

    def remove(self, start: int, stop: int) -> None:
        """Remove [start, stop); some of it may not be in the set."""
        if start >= stop:
            return
        if self._changes:
            self._merge()
        starts, stops = self._starts, self._stops
        low = bisect_right(stops, start)  # first run that ends after start
        high = bisect_left(starts, stop)  # first run that begins at or after stop
        if high - low == 1:
            self._remove_from(low, start, stop)
        elif low < high:
            kept = [(s, e) for s, e in ((starts[low], start), (stop, stops[high - 1])) if s < e]
            self._replace(low, high, [s for s, _ in kept], [e for _, e in kept])

    def _remove_from(self, at: int, start: int, stop: int) -> None:
        """Remove [start, stop) from the only run that it overlaps."""
        starts, stops = self._starts, self._stops
        first, last = starts[at], stops[at]
        if start > first:
            if stop < last:
                starts.insert(at + 1, stop)
                stops.insert(at, start)
                self.total -= stop - start
            else:
                stops[at] = start
                self.total -= last - start
        elif stop < last:
            starts[at] = stop
            self.total -= stop - first
        else:
            del starts[at], stops[at]
            self.total -= last - first

    def _replace(self, low: int, high: int, starts: Iterable[int], stops: Iterable[int]) -> None:
        new_starts, new_stops = array("q", starts), array("q", stops)
        self.total += sum(new_stops) - sum(new_starts) - sum(self._stops[low:high]) + sum(self._starts[low:high])
        self._starts[low:high] = new_starts
        self._stops[low:high] = new_stops

    def add_all(self, runs: Iterable[int]) -> None:
        for start, stop in pairs(runs):
            self.add(start, stop)

    def remove_all(self, runs: Iterable[int]) -> None:
        for start, stop in pairs(runs):
            self.remove(start, stop)

    def add_later(self, runs: list[int]) -> None:
        """Add runs that are not in the set, as far as the caller knows.

        Scattered ones are merged into it together, at the next question about the set: one by one, each would move all
        later runs.
        """
        self._change_later(runs, removes=False)
        self.total += count(runs)

    def remove_later(self, runs: list[int]) -> None:
        """Remove runs that are in the set, as far as the caller knows; like `add_later`."""
        self._change_later(runs, removes=True)
        self.total -= count(runs)

    def _change_later(self, runs: list[int], *, removes: bool) -> None:
        if not runs:
            return
        if self._changes and (removes != self._removes or len(self._changes) > MOST_CHANGES):
            self._merge()
        self._removes = removes
        end = runs[1] if len(runs) == 2 else max(runs)
        if end > self._changes_end or not self._changes:
            self._changes_end = end
        self._changes.extend(runs)

    def _merge(self) -> None:
        """Do the changes of `add_later` or `remove_later`."""
        changes, self._changes = self._changes, array("q")
        added = -count(changes) if self._removes else count(changes)
        if len(changes) < FEW_CHANGES or not self._merge_together(changes, added):
            self.total -= added  # the changes count again what they really add
            (self.remove_all if self._removes else self.add_all)(changes)

    def _merge_together(self, changes: Sequence[int], added: int) -> bool:
        """Do many changes in one pass over the set. False, and nothing is done, if some were done already."""
        low = bisect_left(self._stops, min(changes))
        starts, stops = self._starts[low:], self._stops[low:]
        edges = sorted(chain(starts, stops, changes))
        # An edge that occurs twice is where two runs meet, or where a removed run begins or ends: it is none any more.
        each = zip([-1, *edges[:-1]], edges, [*edges[1:], -1], strict=True)
        merged = array("q", [edge for before, edge, after in each if before != edge != after])
        if len(merged) % 2 or count(merged) != sum(stops) - sum(starts) + added:
            return False
        self._starts[low:], self._stops[low:] = merged[::2], merged[1::2]
        return True

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of [start, stop) is in the set."""
        if self._changes:
            self._merge()
        if not self._stops or start >= self._stops[-1]:
            return False
        return bisect_right(self._stops, start) < bisect_left(self._starts, stop)

    def subtract(self, runs: Iterable[int]) -> list[int]:
        """Remove `runs` from the set; returns what is left, as flat runs."""
        self.remove_all(runs)
        return self.runs

    def within(self, start: int, stop: int) -> list[int]:
        """The part of the set inside [start, stop), as flat runs."""
        if self._changes:
            self._merge()
        starts, stops = self._starts, self._stops
        found: list[int] = []
        for at in range(bisect_right(stops, start), bisect_left(starts, stop)):
            found += (max(start, starts[at]), min(stop, stops[at]))
        return found

    def missing(self, start: int, stop: int) -> list[int]:
        """The part of [start, stop) outside the set, as flat runs."""
        return complement(self.within(start, stop), start, stop)

    def first_missing(self, start: int) -> int:
        """The lowest offset at or above `start` that is not in the set."""
        if self._changes:
            self._merge()
        at = bisect_right(self._starts, start) - 1
        return self._stops[at] if at >= 0 and start < self._stops[at] else start

    def clear(self) -> None:
        del self._starts[:], self._stops[:], self._changes[:]
        self.total = 0
