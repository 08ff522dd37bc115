"""Strict keys: which keys are busy, and who waits behind them.

Owns: `KeyLines`, `KeyLine` and `PackedExtents`. A key is in here only while something holds it or waits behind it: a lease, a back-off, a
parked burial, items passed over. A key that is merely leased costs one dict entry (key id → lease); one with more to say has a `KeyLine`.
Waiting extents are joined, so a hot key with a million items in a row stays cheap. A free line with waiting items stands in `ready`, a
heap per lane ordered by the position of its head: a key competes with its head's priority. Entries of `ready` are only hints and are
checked against the line when they come up; `drop_stale_heads` takes out those that hold good no longer.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from penstock.rules.fences import Fences
from penstock.rules.heaps import in_order
from penstock.rules.lanes import Extent
from penstock.rules.runs import RunSet, offsets
from penstock.words.limits import LAST_PRIORITY

_FIELDS = 5
_STOP = -4  # of the last extent, counted from the end


class PackedExtents:
    """The extents of a line, in order, 40 bytes each. What it hands out are copies.

    Extents come and go at the ends; anything in the middle is rare and rebuilds the whole.
    """

    __slots__ = ("_at", "_data")

    def __init__(self, runs: Iterable[Extent] = ()) -> None:
        self._data = array("q")
        self._at = 0  # runs before it are gone
        for run in runs:
            self.append(run)

    def __len__(self) -> int:
        return (len(self._data) - self._at) // _FIELDS

    def __iter__(self) -> Iterator[Extent]:
        return (Extent(*self._data[at : at + _FIELDS]) for at in range(self._at, len(self._data), _FIELDS))

    @property
    def first(self) -> Extent:
        return Extent(*self._data[self._at : self._at + _FIELDS])

    @property
    def last(self) -> Extent:
        return Extent(*self._data[-_FIELDS:])

    def append(self, run: Extent) -> None:
        self._data.extend(run.astuple())

    def appendleft(self, run: Extent) -> None:
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
        left = Extent(*data[at : at + _FIELDS]).without(offset)
        data[at : at + _FIELDS] = array("q", [number for run in left for number in run.astuple()])
        return True

    def insert(self, new: Extent) -> bool:
        """Put a run in by position; False when it falls inside another or beside its equal, which is for the caller to sort out."""
        data = self._data
        positions = data[self._at + 3 :: _FIELDS]
        index = bisect_left(positions, new.position)
        start = self._at + (index - 1) * _FIELDS
        before = Extent(*data[start : start + _FIELDS]) if index else None
        if (index < len(positions) and positions[index] == new.position) or (
            before is not None and before.at_own_offset and new.position < before.stop
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


class KeyLine:
    """One key: what holds it and what waits behind."""

    __slots__ = ("backing_off", "kept_positions", "lease", "parked", "until", "waiting")

    def __init__(self, lease: int = 0) -> None:
        self.lease = lease
        self.backing_off: tuple[int, int] | None = None
        """(offset, lane) of the item whose delay holds the key."""
        self.until = 0
        self.parked: list[int] = []
        self.kept_positions: dict[int, int] = {}
        """offset → position of items that came back by a transfer to where they stood before they were buried (produce.py)."""
        self.waiting = PackedExtents()

    @property
    def busy(self) -> bool:
        return bool(self.lease or self.backing_off or self.parked)

    @property
    def merely_leased(self) -> bool:
        """Says no more than its lease does."""
        return not (self.backing_off or self.parked or self.waiting or self.kept_positions)

    def position(self, offset: int) -> int:
        """Where an item of this key stands whenever it returns: at its own offset, or in the place it came back to."""
        return self.kept_positions.get(offset, offset)

    def push(self, new: Extent) -> None:
        """Queue up by position: nearly always at the back."""
        last = self.waiting.last if self.waiting else None
        if last is not None and last.can_be_joined_by(new.start, new.tag, new.position, new.ready_at):
            self.waiting.extend_last(new.stop)
        elif last is None or (last.order < new.order and not (last.at_own_offset and new.position < last.stop)):
            self.waiting.append(new)
        else:
            self._insert(new)

    def _insert(self, new: Extent) -> None:
        if self.waiting.insert(new):
            return
        runs = [new]
        for run in self.waiting:
            runs += run.cut([new.position])
        self.waiting = PackedExtents(sorted(runs, key=lambda run: run.order))

    def drop(self, offset: int) -> bool:
        """Take one item out of the line."""
        return self.waiting.drop(offset)


class KeyLines:
    """All keys that are not simply free."""

    __slots__ = ("by_key", "fences", "free_heads", "freed")

    def __init__(self, fences: Fences | None = None) -> None:
        self.fences = fences or Fences()
        self.freed: list[int] | None = None
        """Keys that nothing holds any more, since somebody asked for them; None when nobody does. Not state: a note for the queue."""
        self.by_key: dict[int, int | KeyLine] = {}
        self.free_heads: list[list[tuple[int, int, int]]] = [[] for _ in range(LAST_PRIORITY + 1)]
        """Per lane: (position, offset, key) of heads that may be leased."""

    def take_freed(self) -> list[int] | None:
        """The keys that were freed since this was last asked; None when nobody had asked before."""
        found, self.freed = self.freed, []
        return found

    def line(self, key: int) -> KeyLine:
        """The key's line, made when there is none."""
        found = self.by_key.get(key)
        if not isinstance(found, KeyLine):
            found = self.by_key[key] = KeyLine(found or 0)
        return found

    def lines(self) -> list[tuple[int, KeyLine]]:
        return [(key, found) for key, found in self.by_key.items() if isinstance(found, KeyLine)]

    def head(self, lane: int, position: int, offset: int, key: int) -> KeyLine | None:
        """The line that a `ready` entry speaks of, if it still holds good."""
        found = self.by_key.get(key)
        if not isinstance(found, KeyLine) or found.busy or not found.waiting:
            return None
        first = found.waiting.first
        if self.fences and first.position >= self.fences.waits_from(key):
            return None
        return found if (first.tag, first.position, first.start) == (lane, position, offset) else None

    def free_lines(self, lane: int) -> Iterator[tuple[tuple[int, int, int], KeyLine]]:
        """The entries of the free keys of a lane, best first, each with its line. A key may come twice."""
        for entry in in_order(self.free_heads[lane]):
            line = self.head(lane, *entry)
            if line is not None:
                yield entry, line

    def first_free(self, lane: int) -> KeyLine | None:
        """The line of the first free key of a lane."""
        return next((line for _, line in self.free_lines(lane)), None) if self.free_heads[lane] else None

    def drop_stale_heads(self) -> None:
        """Take entries that hold good no longer from the tops of `ready`, so that nobody looks at them twice."""
        for lane, ready in enumerate(self.free_heads):
            while ready and self.head(lane, *ready[0]) is None:
                heappop(ready)

    def hold(self, keys: Sequence[int], lease: int) -> None:
        """A lease holds these keys."""
        mapped = self.by_key
        if mapped.keys().isdisjoint(keys):
            mapped.update(dict.fromkeys(keys, lease))
            return
        for key in keys:
            found = mapped.get(key)
            if isinstance(found, KeyLine):
                found.lease = lease
            else:
                mapped[key] = lease

    def release(self, keys: Sequence[int], lease: int) -> None:
        """The lease holds these keys no longer."""
        mapped = self.by_key
        for key in keys:
            found = mapped.get(key)
            if found == lease:
                del mapped[key]
                if self.freed is not None:
                    self.freed.append(key)
            elif isinstance(found, KeyLine) and found.lease == lease:
                found.lease = 0
                self.update_head(key, found)

    def update_head(self, key: int, line: KeyLine) -> None:
        """After a change: a free line offers its head unless it is fenced, or goes when it has none."""
        if line.busy:
            return
        if self.freed is not None:
            self.freed.append(key)
        if line.waiting:
            first = line.waiting.first
            if self.fences and first.position >= self.fences.waits_from(key):
                return
            heappush(self.free_heads[first.tag], (first.position, first.start, key))
        else:
            del self.by_key[key]

    def pass_over(self, key: int, run: Extent) -> None:
        """Items join the line of their key, and are offered at once if nothing holds it."""
        line = self.line(key)
        before = line.waiting.first.start if line.waiting else None
        line.push(run)
        if line.waiting.first.start != before:
            self.update_head(key, line)

    def take(self, key: int, start: int, stop: int) -> None:
        """Items [start, stop) leave the front of the line."""
        found = self.by_key.get(key)
        if not isinstance(found, KeyLine):
            return
        for offset in range(start, stop):
            if found.waiting and found.waiting.first.start == offset:
                found.waiting.step()
            else:
                found.drop(offset)

    def remove_lost(self, gone: RunSet) -> None:
        """Damage took items whose keys can no longer be read: look through all lines, once."""
        for key, line in self.lines():
            lost = [offset for run in line.waiting for offset in offsets(gone.within(run.start, run.stop))]
            for offset in lost:
                line.drop(offset)
            parked = [offset for offset in line.parked if offset not in gone]
            backing_off = line.backing_off is not None and line.backing_off[0] in gone
            if lost or backing_off or len(parked) < len(line.parked):
                line.parked = parked
                line.backing_off = None if backing_off else line.backing_off
                self.update_head(key, line)
