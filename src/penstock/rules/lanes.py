"""Lanes: the ready items of each priority, first in, first out, as extents of the log.

Owns: `Lanes`, `Extent`, and how heads of lanes compare (`Rank`, `aged_priority`, `best_rank`). An extent is a range of
offsets that became ready together. The keys and priorities of its items stay on disk until a lease reads them, so the
memory of a backlog grows with its extents, not with its items or frames.
- position: the place of the extent in the order of becoming ready. An item that was ready when it was produced has its
  own offset as position; one that became ready later (due, retried, redriven) has the offset that was then the
  next one. Positions never fall along a lane.
- ready_at: since when it waits, for aging. Extents of one second are joined and keep the first time.
- KEYED: items may have keys, so keys must be read. SPARSE: it covers items of other lanes, so priorities must be read.
An extent may cover items that are no longer ready: an item of it is ready if it is not in `State.outside_lanes`.
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from penstock.rules.runs import RunSet, pairs
from penstock.words.clock import SECOND
from penstock.words.limits import LAST_PRIORITY

KEYED = 16
"""In tags (priority | KEYED) and in extent flags."""
SPARSE = 32
PRIORITY_MASK = 15
JOIN_WITHIN = 1 * SECOND


class Rank(NamedTuple):
    """The order of ready items across the partitions of a queue: the lowest rank is leased first."""

    priority: int
    since: int
    """Since when the item waits. Elapsed time is per partition: convert it to one clock before comparing partitions."""


def aged_priority(lane: int, since: int, aging: int, now: int) -> int:
    """The priority of an item of a lane that waits since `since`: one step better per `aging` (0: never)."""
    return max(0, lane - (now - since) // aging) if aging else lane


def best_rank(heads: Iterable[Rank], aging: int, now: int) -> Rank | None:
    """The best of these heads of lanes, each with its aged priority; None if there are none."""
    return min([Rank(aged_priority(lane, since, aging, now), since) for lane, since in heads], default=None)


class Extent:
    """Offsets [start, stop) that are together in a lane, or in a key line (keys.py)."""

    __slots__ = ("position", "ready_at", "start", "stop", "tag")

    def __init__(self, start: int, stop: int, tag: int, position: int, ready_at: int) -> None:
        self.start = start
        self.stop = stop
        self.tag = tag
        """In a lane: KEYED and SPARSE, or 0. In a key line: the lane of the items."""
        self.position = position
        self.ready_at = ready_at

    @property
    def at_own_offset(self) -> bool:
        """Whether each item's position is its own offset: it is ready since it was produced."""
        return self.position == self.start

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Sort key: by position; an item that became ready later comes before the one with that offset."""
        return (self.position, self.at_own_offset, self.ready_at, self.start)

    def part(self, start: int, stop: int) -> "Extent":
        """An extent of some of its items, at their positions."""
        return Extent(start, stop, self.tag, start if self.at_own_offset else self.position, self.ready_at)

    def parts(self, runs: Iterable[int]) -> "list[Extent]":
        """Extents of its items in these flat runs; empty runs are ignored."""
        return [self.part(start, stop) for start, stop in pairs(runs) if start < stop]

    def cut(self, positions: Iterable[int]) -> "list[Extent]":
        """The extent, split at these positions, so that others can be put between its parts."""
        if not self.at_own_offset:
            return [self]
        edges = [self.start, *(position for position in positions if self.start < position < self.stop), self.stop]
        return [self.part(start, stop) for start, stop in pairwise(edges)]

    def without(self, offset: int) -> "list[Extent]":
        """The extents that are left when one item is removed."""
        return self.parts((self.start, offset, offset + 1, self.stop))

    def can_be_joined_by(self, start: int, tag: int, position: int, ready_at: int) -> bool:
        """Whether an extent with these values can be joined to the end of this one."""
        if self.stop != start or self.tag != tag or not 0 <= ready_at - self.ready_at < JOIN_WITHIN:
            return False
        mine = self.position
        return position == start if mine == self.start else mine == position != start

    def astuple(self) -> tuple[int, int, int, int, int]:
        return (self.start, self.stop, self.tag, self.position, self.ready_at)

    def __repr__(self) -> str:
        return f"Extent{self.astuple()}"


class Lanes:
    """One FIFO of extents per priority."""

    __slots__ = ("lanes",)

    def __init__(self) -> None:
        self.lanes: list[deque[Extent]] = [deque() for _ in range(LAST_PRIORITY + 1)]

    def add(self, lane: int, start: int, stop: int, flags: int, position: int, ready_at: int) -> None:
        """Add [start, stop) at the tail of a lane; it is joined with the last extent if possible."""
        extents = self.lanes[lane]
        tail = extents[-1] if extents else None
        if tail is not None and tail.can_be_joined_by(start, flags, position, ready_at):
            tail.stop = stop
        else:
            extents.append(Extent(start, stop, flags, position, ready_at))

    def trim(self, lane: int, start: int, stop: int, left: Iterable[int] = ()) -> Extent | None:
        """Remove [start, stop) from the first extent that overlaps it; returns that extent as it was, or None.

        The runs `left` stay; none of their items has a key.
        """
        extents = self.lanes[lane]
        first = extents[0] if extents else None
        if first is not None and first.start == start and stop < first.stop and not left:  # most leases take from the front
            extents[0] = first.part(stop, first.stop)
            return first
        index, extent = next(((at, each) for at, each in enumerate(extents) if each.start < stop and start < each.stop), (0, None))
        if extent is None:
            return None
        kept = [extent.part(extent.start, start)] if extent.start < start else []
        for part in extent.parts(left) if left else ():
            part.tag = 0
            kept.append(part)
        if stop < extent.stop:
            kept.append(extent.part(stop, extent.stop))
        if index == 0:
            extents.popleft()
            extents.extendleft(reversed(kept))
        else:
            self.lanes[lane] = deque([*list(extents)[:index], *kept, *list(extents)[index + 1 :]])
        return extent

    @property
    def keyed(self) -> bool:
        """Whether the keys of some extent must be read."""
        return any(self.first_keyed(lane) is not None for lane in range(len(self.lanes)))

    def first_keyed(self, lane: int) -> Extent | None:
        """The first extent of a lane whose keys must be read."""
        return next((extent for extent in self.lanes[lane] if extent.tag & KEYED), None)

    def merge(self, returning: list[tuple[int, Extent]]) -> None:
        """Insert (lane, extent) pairs into their lanes by position."""
        for lane, extents in enumerate(self.lanes):
            more = [extent for its_lane, extent in returning if its_lane == lane]
            if more:
                together = [*sorted(more, key=lambda extent: extent.order), *extents]
                late = sorted({extent.position for extent in together if not extent.at_own_offset})
                cut = [part for extent in together for part in extent.cut(late)]
                self.lanes[lane] = deque(sorted(cut, key=lambda extent: extent.order[:3]))  # equal ones keep their order

    def drop(self, runs: Iterable[int]) -> None:
        """Remove offsets from all extents that cover them: also items resolved without a lease are covered."""
        dropped = RunSet(runs)
        for lane, extents in enumerate(self.lanes):
            kept = (part for extent in extents for part in extent.parts(dropped.missing(extent.start, extent.stop)))
            self.lanes[lane] = deque(kept)

    def clear(self) -> None:
        for lane in self.lanes:
            lane.clear()
