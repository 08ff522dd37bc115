"""The items that wait behind a busy key, packed.

Owns: `Waiting` (a run of them) and `Packed` (a line of runs). A run costs 40 bytes wherever it lies, and items in a row are one
run, so a hot key with a million items stays cheap. Runs come and go at the ends; anything in the middle is rare and rebuilds the
line.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from penstock.rules.lanes import JOIN_WITHIN

_FIELDS = 5
_STOP = -4  # of the last run, counted from the end


class Waiting:
    """A run of one key's passed-over items: ready, but not their turn."""

    __slots__ = ("lane", "position", "ready_at", "start", "stop")

    def __init__(self, start: int, stop: int, lane: int, position: int, ready_at: int) -> None:
        self.start = start
        self.stop = stop
        self.lane = lane
        self.position = position
        self.ready_at = ready_at

    @property
    def fresh(self) -> bool:
        """Each item stands at its own offset."""
        return self.position == self.start

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """By position; what stands there because it came later than its offset says came before the item of that offset."""
        return (self.position, self.fresh, self.ready_at, self.start)

    def cut(self, at: int) -> "tuple[Waiting, Waiting]":
        """A fresh run in two, the second beginning with offset `at`."""
        return Waiting(self.start, at, self.lane, self.start, self.ready_at), Waiting(at, self.stop, self.lane, at, self.ready_at)

    def without(self, offset: int) -> "list[Waiting]":
        """What is left of the run when one item goes."""
        parts = ((self.start, offset), (offset + 1, self.stop))
        return [Waiting(a, b, self.lane, a if self.fresh else self.position, self.ready_at) for a, b in parts if a < b]

    def joins(self, other: "Waiting") -> bool:
        """Whether `other` carries this run on."""
        if self.stop != other.start or self.lane != other.lane or not 0 <= other.ready_at - self.ready_at < JOIN_WITHIN:
            return False
        return other.fresh if self.fresh else self.position == other.position and not other.fresh

    def astuple(self) -> tuple[int, int, int, int, int]:
        return (self.start, self.stop, self.lane, self.position, self.ready_at)


class Packed:
    """Runs in their order. What it hands out are copies."""

    __slots__ = ("_at", "_data")

    def __init__(self, runs: Iterable[Waiting] = ()) -> None:
        self._data = array("q")
        self._at = 0  # runs before it are gone
        for run in runs:
            self.append(run)

    def __len__(self) -> int:
        return (len(self._data) - self._at) // _FIELDS

    def __iter__(self) -> Iterator[Waiting]:
        return (Waiting(*self._data[at : at + _FIELDS]) for at in range(self._at, len(self._data), _FIELDS))

    @property
    def first(self) -> Waiting:
        return Waiting(*self._data[self._at : self._at + _FIELDS])

    @property
    def last(self) -> Waiting:
        return Waiting(*self._data[-_FIELDS:])

    def append(self, run: Waiting) -> None:
        self._data.extend(run.astuple())

    def appendleft(self, run: Waiting) -> None:
        if self._at:
            self._at -= _FIELDS
            self._data[self._at : self._at + _FIELDS] = array("q", run.astuple())
        else:
            self._data[0:0] = array("q", run.astuple())

    def extend_last(self, stop: int) -> None:
        """The last run goes on to `stop`."""
        self._data[_STOP] = stop

    def drop(self, offset: int) -> bool:
        """Take one item out, wherever it stands."""
        data = self._data
        starts = data[self._at :: _FIELDS]
        index = bisect_right(starts, offset) - 1  # where it is as long as everything stands at its own offset
        if index < 0 or not starts[index] <= offset < data[self._at + index * _FIELDS + 1]:
            stops = data[self._at + 1 :: _FIELDS]
            index = next((at for at, (start, stop) in enumerate(zip(starts, stops, strict=True)) if start <= offset < stop), -1)
        if index < 0:
            return False
        at = self._at + index * _FIELDS
        left = Waiting(*data[at : at + _FIELDS]).without(offset)
        data[at : at + _FIELDS] = array("q", [number for run in left for number in run.astuple()])
        return True

    def insert(self, new: Waiting) -> bool:
        """Put a run in by position; False when it falls inside another or beside its equal, which is for the caller to sort out."""
        data = self._data
        positions = data[self._at + 3 :: _FIELDS]
        index = bisect_left(positions, new.position)
        start = self._at + (index - 1) * _FIELDS
        before = Waiting(*data[start : start + _FIELDS]) if index else None
        if (index < len(positions) and positions[index] == new.position) or (
            before is not None and before.fresh and new.position < before.stop
        ):
            return False
        at = self._at + index * _FIELDS
        data[at:at] = array("q", new.astuple())
        return True

    def step(self) -> None:
        """The first item leaves."""
        data, at = self._data, self._at
        start, stop, _, position, _ = data[at : at + _FIELDS]
        if start + 1 < stop:
            data[at] = start + 1
            data[at + 3] = start + 1 if position == start else position
            return
        self._at += _FIELDS
        if self._at * 2 > len(data):
            del data[: self._at]
            self._at = 0

    def clear(self) -> None:
        del self._data[:]
        self._at = 0
