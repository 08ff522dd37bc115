"""How far a plan of a lease has read lanes and key lines, and what it could take next.

Owns: `Walk` (a lane), `HeadWalk` (the heads of a lane's free key lines), `Candidate`, and `Order`, the order of
becoming ready. Nothing here changes the state.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

from penstock.rules.keys import KeyLine
from penstock.rules.lanes import Extent

Order: TypeAlias = tuple[int, bool, int, int]
"""A place in the order of becoming ready: `Extent.order`."""


def before(position: int) -> Order:
    """Right before everything at a position."""
    return (position, False, -1, -1)


class Candidate(NamedTuple):
    """What a plan could take next: an extent of a lane, or the head of a key line."""

    rank: tuple[int, int, bool, int, int]
    """The lowest rank is taken first: aged priority, position, whether the position is the item's own offset,
    since when it is ready (several returned items may stand at one position), lane."""
    lane: int
    since: int
    is_head: bool = False


class Walk:
    """How far a plan has read a lane."""

    __slots__ = ("_rest", "extent", "lane", "start")

    def __init__(self, lane: int, extents: Iterable[Extent]) -> None:
        self.lane = lane
        self._rest = iter(extents)
        self.extent: Extent | None = None
        self.start = 0
        self.advance(0)

    @property
    def position(self) -> int:
        assert self.extent is not None
        return self.start if self.extent.at_own_offset else self.extent.position

    @property
    def order(self) -> Order:
        """As `Extent.order`, of the part that is not read."""
        assert self.extent is not None
        return (self.position, self.extent.at_own_offset, self.extent.ready_at, self.start)

    @property
    def earlier_than(self) -> Order:
        """Keyed items of other lanes that stand before this must be read first: one may have the key of an item here.

        An extent at its own offsets may cover items of other lanes that stand between its own.
        """
        assert self.extent is not None
        return before(self.start + 1) if self.extent.at_own_offset else self.order

    def position_of(self, offset: int) -> int:
        """The position of an item of the extent."""
        assert self.extent is not None
        return offset if self.extent.at_own_offset else self.extent.position

    def begins_by(self, offset: int) -> bool:
        """Whether the extent began at or before an offset that was read."""
        return self.extent is not None and self.extent.start <= offset

    def advance(self, stop: int) -> None:
        """Move to `stop`, or to the next extent if this one ends there."""
        self.start = stop
        if self.extent is None or stop >= self.extent.stop:
            self.extent = next(self._rest, None)
            self.start = self.extent.start if self.extent is not None else 0


Head: TypeAlias = tuple[tuple[int, int, int], KeyLine]
"""The head of a free line: its entry of `free_heads`, and the line."""


class HeadWalk:
    """How far a plan has read the heads of a lane's free lines."""

    __slots__ = ("_at", "_read", "_rest")

    def __init__(self, heads: Iterator[Head]) -> None:
        self._rest = heads
        self._read: list[Head] = []
        self._at = 0

    @property
    def first(self) -> Head | None:
        """The first head that is not taken."""
        return next(iter(self.ahead(1)), None)

    def ahead(self, most: int) -> list[Head]:
        """The next heads, at most so many; they are not taken yet."""
        missing = self._at + most - len(self._read)
        if missing > 0:
            del self._read[: self._at]
            self._at = 0
            self._read += islice(self._rest, missing)
        return self._read[self._at : self._at + most]

    def advance(self, taken: int) -> None:
        self._at += taken
