"""The ready items nobody has touched yet: FIFO lanes by priority, kept as extents of the log.

Owns: `Lanes`, `Extent`, and how heads of lanes compare (`Rank`, `lifted`, `best_rank`). An extent is a range of offsets that became ready
together; what its items are (keys, priorities) stays on disk until a lease reaches them, so a backlog costs extents, not items and not
frames.
- position: where the extent stands in the order of becoming ready. An item ready at once stands at its own offset; one that came
  later (due, retried, redriven) stands at the offset that was next when it came. Positions never fall along a lane.
- ready_at: since when it waits, for aging; extents within a second of each other are joined and keep the first time.
- KEYED: some item may have a key, so keys must be looked at. SPARSE: items of other lanes lie in between, so priorities must be looked at.
An extent only says where to look: `State.away` says which of its items are ready.
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
    """Where a ready item stands in the order of the whole queue: the lowest goes first. Items of different partitions compare by it."""

    priority: int
    since: int
    """Since when it waits in its place. Elapsed time is per partition: it only compares with others once it is put on one clock."""


def aged_priority(lane: int, since: int, aging: int, now: int) -> int:
    """The priority that an item of a lane competes with: every `aging` of waiting lifts it one step (0: never)."""
    return max(0, lane - (now - since) // aging) if aging else lane


def best_rank(heads: Iterable[Rank], aging: int, now: int) -> Rank | None:
    """The best of these heads of lanes when each is lifted by its age; None when there is none."""
    return min([Rank(aged_priority(lane, since, aging, now), since) for lane, since in heads], default=None)


class Extent:
    """Offsets [start, stop) that stand together in a lane, or in the line of a key (keys.py)."""

    __slots__ = ("position", "ready_at", "start", "stop", "tag")

    def __init__(self, start: int, stop: int, tag: int, position: int, ready_at: int) -> None:
        self.start = start
        self.stop = stop
        self.tag = tag
        """In a lane: KEYED and SPARSE, or 0. In a key's line: the lane of its items."""
        self.position = position
        self.ready_at = ready_at

    @property
    def at_own_offset(self) -> bool:
        """Ready since it was produced: each item stands at its own offset."""
        return self.position == self.start

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """By position; what stands there because it came later than its offset says came before the item of that offset."""
        return (self.position, self.at_own_offset, self.ready_at, self.start)

    def part(self, start: int, stop: int) -> "Extent":
        """Some of its items, where they stand."""
        return Extent(start, stop, self.tag, start if self.at_own_offset else self.position, self.ready_at)

    def parts(self, runs: Iterable[int]) -> "list[Extent]":
        """Its items in these runs (flat; empty ones do not count)."""
        return [self.part(start, stop) for start, stop in pairs(runs) if start < stop]

    def cut(self, positions: Iterable[int]) -> "list[Extent]":
        """The extent in parts: where something that came late stands between its items, one ends and the next begins."""
        if not self.at_own_offset:
            return [self]
        edges = [self.start, *(position for position in positions if self.start < position < self.stop), self.stop]
        return [self.part(start, stop) for start, stop in pairwise(edges)]

    def without(self, offset: int) -> "list[Extent]":
        """What is left when one item goes."""
        return self.parts((self.start, offset, offset + 1, self.stop))

    def can_be_joined_by(self, start: int, tag: int, position: int, ready_at: int) -> bool:
        """Whether an extent that begins so can be joined to the end of this one."""
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
        """Put [start, stop) at the tail of a lane, joined with what is there when it carries on."""
        extents = self.lanes[lane]
        tail = extents[-1] if extents else None
        if tail is not None and tail.can_be_joined_by(start, flags, position, ready_at):
            tail.stop = stop
        else:
            extents.append(Extent(start, stop, flags, position, ready_at))

    def trim(self, lane: int, start: int, stop: int, left: Iterable[int] = ()) -> Extent | None:
        """Take [start, stop) out of the first extent that holds some of it, and return what that was; `left` stays, without keys."""
        extents = self.lanes[lane]
        index, extent = next(((at, one) for at, one in enumerate(extents) if one.start < stop and start < one.stop), (0, None))
        if extent is None:
            return None
        kept = [extent.part(extent.start, start)] if extent.start < start else []
        for one in extent.parts(left) if left else ():
            one.tag = 0
            kept.append(one)
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
        """Whether keys must be looked at anywhere."""
        return any(self.first_keyed(lane) is not None for lane in range(len(self.lanes)))

    def first_keyed(self, lane: int) -> Extent | None:
        """The first extent of a lane in which keys must be looked at."""
        return next((extent for extent in self.lanes[lane] if extent.tag & KEYED), None)

    def merge(self, returning: list[tuple[int, Extent]]) -> None:
        """Put extents (with their lanes) back among the others, in order of position."""
        for lane, extents in enumerate(self.lanes):
            more = [extent for where, extent in returning if where == lane]
            if more:
                together = [*sorted(more, key=lambda extent: extent.order), *extents]
                late = sorted({extent.position for extent in together if not extent.at_own_offset})
                cut = [part for extent in together for part in extent.cut(late)]
                self.lanes[lane] = deque(sorted(cut, key=lambda extent: extent.order[:3]))  # equals stay as they came

    def drop(self, runs: Iterable[int]) -> None:
        """Take offsets out wherever an extent covers them, as it does when they were resolved where they stood."""
        gone = RunSet(runs)
        for lane, extents in enumerate(self.lanes):
            kept = (part for extent in extents for part in extent.parts(gone.missing(extent.start, extent.stop)))
            self.lanes[lane] = deque(kept)

    def clear(self) -> None:
        for lane in self.lanes:
            lane.clear()
