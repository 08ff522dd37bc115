"""Walking through a lane without changing it.

Owns: `Walk` (where a plan stands in a lane) and `Candidate` (what it might take next).
"""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.rules.keys import Line
from penstock.rules.lanes import Extent


class Candidate(NamedTuple):
    """Something that could be given next: an extent of a lane, or the head of a key's line."""

    rank: tuple[int, int, bool, int, int]
    """What goes first has the lowest: priority lifted by age, position, whether it stands there because it is the item of that offset,
    since when it is ready (what came back stands at one position with others), lane."""
    lane: int
    since: int
    head: tuple[int, int, int] | None = None
    line: Line | None = None


class Walk:
    """Where a plan stands in a lane."""

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
        return self.start if self.extent.fresh else self.extent.position

    def position_of(self, offset: int) -> int:
        """The position at which an item of the extent stands."""
        assert self.extent is not None
        return offset if self.extent.fresh else self.extent.position

    def advance(self, stop: int) -> None:
        """On to `stop`, and to the next extent when this one ends there."""
        self.start = stop
        if self.extent is None or stop >= self.extent.stop:
            self.extent = next(self._rest, None)
            self.start = self.extent.start if self.extent is not None else 0
