"""Keys: which keys are held, and which items wait in their lines.

Owns: `KeyLines`, `KeyLine` and `PackedExtents`. A key is in `KeyLines` only while a lease, a back-off or a parked
burial holds it, or items that were passed over wait in its line. A key that is only leased costs one dict entry
(key id → lease number); any other has a `KeyLine`. Waiting items are kept as extents, so a key with a million items in
a row is cheap. The head of a free line is in `free_heads`, a heap per lane ordered by position: a key competes with the
priority of its head. Entries of `free_heads` may be stale (`maybe_stale`) and are then checked against the line when
they are read.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, groupby
from operator import attrgetter, sub

from penstock.rules.fences import Fences
from penstock.rules.heaps import in_order
from penstock.rules.lanes import Extent
from penstock.rules.records import LineTake
from penstock.rules.runs import RunSet, from_offsets, offsets
from penstock.words.limits import LAST_PRIORITY

BULK = 4
"""When a change concerns more than one in so many entries of a heap, it is cheaper to rebuild the heap."""
GROUPED = 4
"""When there are so many items per key, they are put into their lines key by key."""
_FIELDS = 5
_KEY = attrgetter("key")
_STOP, _POSITION = -4, -2  # of the last extent, counted from the end


class PackedExtents:
    """The extents of a key line, in order, 40 bytes each. The extents it returns are copies.

    Changes at the ends are fast; a change in the middle is rare and moves the whole array.
    """

    __slots__ = ("at", "numbers")

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self.numbers = array("q")
        """start, stop, lane, position and ready_at of each extent, in order."""
        self.at = 0
        """The index in `numbers` of the first extent; those before it were removed."""
        for extent in extents:
            self.append(extent)

    def __len__(self) -> int:
        return (len(self.numbers) - self.at) // _FIELDS

    def __iter__(self) -> Iterator[Extent]:
        return (Extent(*self.numbers[at : at + _FIELDS]) for at in range(self.at, len(self.numbers), _FIELDS))

    @property
    def items(self) -> int:
        """How many items are in the extents."""
        return sum(self.numbers[self.at + 1 :: _FIELDS]) - sum(self.numbers[self.at :: _FIELDS])

    @property
    def first(self) -> Extent:
        return Extent(*self.numbers[self.at : self.at + _FIELDS])

    @property
    def last(self) -> Extent:
        return Extent(*self.numbers[-_FIELDS:])

    def each(self) -> Iterator[tuple[int, int, int, int, int]]:
        """start, stop, lane, position and ready_at of each extent."""
        numbers = iter(self.numbers[self.at :])
        return zip(numbers, numbers, numbers, numbers, numbers, strict=True)

    def first_items(self, most: int) -> list[int]:
        """Flat runs of the first `most` items, a run for each extent, if all of them stand at their own offsets;
        otherwise nothing."""
        data, at = self.numbers, self.at
        end = at + _FIELDS * most
        starts, stops = data[at:end:_FIELDS], data[at + 1 : end : _FIELDS]
        sums = [*accumulate(map(sub, stops, starts))]
        number = min(bisect_left(sums, most) + 1, len(sums))
        if data[at + 3 : at + _FIELDS * number : _FIELDS] != starts[:number]:
            return []
        found = [0] * (2 * number)
        found[::2], found[1::2] = starts[:number], stops[:number]
        found[-1] -= max(0, sums[number - 1] - most)
        return found

    def append(self, extent: Extent) -> None:
        self.numbers.extend(extent.astuple())

    def appendleft(self, extent: Extent) -> None:
        if self.at:
            self.at -= _FIELDS
            self.numbers[self.at : self.at + _FIELDS] = array("q", extent.astuple())
        else:
            self.numbers[0:0] = array("q", extent.astuple())

    def ends_before(self, offset: int) -> bool:
        """Whether the last extent ends, and has its position, before an offset that does not follow it at once."""
        return self.numbers[_STOP] < offset and self.numbers[_POSITION] < offset

    def append_items(self, runs: list[int], lane: int, ready_at: int) -> None:
        """Append items at their own offsets, as an extent for each run."""
        added = array("q", bytes(_FIELDS * 8 * (len(runs) // 2)))
        added[::_FIELDS] = added[3::_FIELDS] = array("q", runs[::2])
        added[1::_FIELDS] = array("q", runs[1::2])
        added[2::_FIELDS], added[4::_FIELDS] = (array("q", [number]) * (len(runs) // 2) for number in (lane, ready_at))
        self.numbers += added

    def extend_last(self, stop: int) -> None:
        """Let the last extent end at `stop`."""
        self.numbers[_STOP] = stop

    def drop(self, offset: int) -> bool:
        """Remove one item; whether it was in an extent."""
        data = self.numbers
        starts = data[self.at :: _FIELDS]
        index = bisect_right(starts, offset) - 1  # right if all extents are ordered by offset; otherwise search them all
        if index < 0 or not starts[index] <= offset < data[self.at + index * _FIELDS + 1]:
            stops = data[self.at + 1 :: _FIELDS]
            index = next((at for at, (start, stop) in enumerate(zip(starts, stops, strict=True)) if start <= offset < stop), -1)
        if index < 0:
            return False
        at = self.at + index * _FIELDS
        left = Extent(*data[at : at + _FIELDS]).without(offset)
        data[at : at + _FIELDS] = array("q", [number for extent in left for number in extent.astuple()])
        return True

    def insert(self, new: Extent) -> bool:
        """Insert an extent by its position. False, and no change, if the position is inside or equal to another's."""
        data = self.numbers
        positions = data[self.at + 3 :: _FIELDS]
        index = bisect_left(positions, new.position)
        start = self.at + (index - 1) * _FIELDS
        before = Extent(*data[start : start + _FIELDS]) if index else None
        if (index < len(positions) and positions[index] == new.position) or (
            before is not None and before.at_own_offset and new.position < before.stop
        ):
            return False
        at = self.at + index * _FIELDS
        data[at:at] = array("q", new.astuple())
        return True

    def take(self, start: int, stop: int) -> None:
        """Remove the items [start, stop), which are the first ones unless damage took a record."""
        while start < stop:
            data, at = self.numbers, self.at
            if at >= len(data) or data[at] != start:
                self.drop(start)
                start += 1
            elif data[at + 1] <= stop:
                start = data[at + 1]
                self.drop_first()
            else:
                data[at + 3] = stop if data[at + 3] == start else data[at + 3]
                data[at] = start = stop

    def take_all(self, takes: Sequence[LineTake]) -> None:
        """Remove what a lease took of this line, in order."""
        *whole, last = takes
        stop = self.at + _FIELDS * len(whole)
        edges = [array("q", [take.start for take in whole]), array("q", [take.stop for take in whole])]
        if [self.numbers[self.at : stop : _FIELDS], self.numbers[self.at + 1 : stop : _FIELDS]] == edges:
            self.drop_first(len(whole))
        else:
            for take in whole:
                self.take(take.start, take.stop)
        self.take(last.start, last.stop)  # perhaps a part of an extent

    def drop_first(self, extents: int = 1) -> None:
        """Remove the first extents. The array is shortened when more than half of it was removed."""
        self.at += _FIELDS * extents
        if self.at * 2 > len(self.numbers):
            del self.numbers[: self.at]
            self.at = 0

    def clear(self) -> None:
        del self.numbers[:]
        self.at = 0


class KeyLine:
    """The line of one key: what holds the key, and the items that wait."""

    __slots__ = ("backing_off", "kept_positions", "lease", "parked", "until", "waiting")

    def __init__(self, lease: int = 0) -> None:
        self.lease = lease
        self.backing_off: tuple[int, int] | None = None
        """(offset, lane) of the item whose back-off holds the key."""
        self.until = 0
        """When the back-off ends, by elapsed time."""
        self.parked: list[int] = []
        """Offsets of the buried items that hold the key."""
        self.kept_positions: dict[int, int] = {}
        """offset → position, of items that a transfer returned to the position of a buried item (produce.py)."""
        self.waiting = PackedExtents()

    @property
    def busy(self) -> bool:
        return bool(self.lease or self.backing_off or self.parked)

    @property
    def merely_leased(self) -> bool:
        """Whether the line has nothing but a lease."""
        return not (self.backing_off or self.parked or self.waiting or self.kept_positions)

    def position(self, offset: int) -> int:
        """The position of an item that returns to this line: its own offset, or the position it kept."""
        return self.kept_positions.get(offset, offset)

    def push(self, new: Extent) -> None:
        """Add an extent by its position: nearly always at the end."""
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
        extents = [new]
        for extent in self.waiting:
            extents += extent.cut([new.position])
        self.waiting = PackedExtents(sorted(extents, key=lambda extent: extent.order))

    def drop(self, offset: int) -> bool:
        """Remove a waiting item; whether it was there."""
        return self.waiting.drop(offset)


class KeyLines:
    """All keys that are held or have waiting items."""

    __slots__ = ("by_key", "fences", "free_heads", "freed", "maybe_stale", "parked")

    def __init__(self, fences: Fences | None = None) -> None:
        self.fences = fences or Fences()
        self.freed: list[int] | None = None
        """For resizes: keys that became free since the last `take_freed`; None before the first. Not stored."""
        self.by_key: dict[int, int | KeyLine] = {}
        """key → the number of the lease that holds it, or its line."""
        self.free_heads: list[list[tuple[int, int, int]]] = [[] for _ in range(LAST_PRIORITY + 1)]
        """Per lane: a heap of (position, offset, key) of heads that may be leased."""
        self.maybe_stale = False
        """Whether an entry of `free_heads` may be stale, or may be there twice. While none is, leases check none."""
        self.parked: set[int] = set()
        """The keys that buried items hold. Not stored."""

    def take_freed(self) -> list[int] | None:
        """The keys that became free since the last call; None at the first call."""
        found, self.freed = self.freed, []
        return found

    def line(self, key: int) -> KeyLine:
        """The key's line; it is created if there is none."""
        found = self.by_key.get(key)
        if not isinstance(found, KeyLine):
            found = self.by_key[key] = KeyLine(found or 0)
        return found

    def lines(self) -> list[tuple[int, KeyLine]]:
        return [(key, found) for key, found in self.by_key.items() if isinstance(found, KeyLine)]

    def head(self, lane: int, position: int, offset: int, key: int) -> KeyLine | None:
        """The line of an entry of `free_heads`; None if the entry is stale."""
        found = self.by_key.get(key)
        if type(found) is not KeyLine or found.lease or found.backing_off or found.parked:
            return None
        at, numbers = found.waiting.at, found.waiting.numbers
        if at >= len(numbers) or numbers[at] != offset or numbers[at + 3] != position or numbers[at + 2] != lane:
            return None
        if self.fences and position >= self.fences.waits_from(key):
            return None
        return found

    def free_lines(self, lane: int, want: int = 1) -> Iterator[tuple[tuple[int, int, int], KeyLine]]:
        """The valid entries of a lane's `free_heads`, best first, each with its line. A key occurs once.

        `want` is about how many will be read: if that is a good part of them, it is cheaper to sort them all.
        """
        heads, mapped = self.free_heads[lane], self.by_key
        ordered = sorted(heads) if len(heads) <= want * BULK else in_order(heads)
        if self.maybe_stale or self.fences:
            return self._valid(lane, ordered)
        if isinstance(ordered, list):
            return zip(ordered, [mapped[entry[2]] for entry in ordered], strict=True)  # type: ignore[misc]
        return ((entry, mapped[entry[2]]) for entry in ordered)  # type: ignore[misc]

    def _valid(self, lane: int, ordered: Iterable[tuple[int, int, int]]) -> Iterator[tuple[tuple[int, int, int], KeyLine]]:
        """The valid ones of these entries of `free_heads`, each once, with their lines."""
        mapped, fenced = self.by_key, bool(self.fences)
        previous = None
        for entry in ordered:
            position, start, key = entry
            line = mapped.get(key)  # as in `head`: this is the innermost loop of leases with many keys
            if type(line) is KeyLine and not line.lease and not line.backing_off and not line.parked and entry != previous:
                at, numbers = line.waiting.at, line.waiting.numbers
                if at >= len(numbers) or numbers[at] != start or numbers[at + 3] != position or numbers[at + 2] != lane:
                    continue
                if not fenced or position < self.fences.waits_from(key):
                    previous = entry  # an equal entry, added when the line was free before, comes right after it
                    yield entry, line

    def first_free(self, lane: int) -> KeyLine | None:
        """The line of the first free key of a lane."""
        return next((line for _, line in self.free_lines(lane)), None) if self.free_heads[lane] else None

    def drop_stale_heads(self) -> None:
        """Remove stale entries from the tops of `free_heads`, so that they are not read again."""
        for lane, heads in enumerate(self.free_heads):
            while heads and self.head(lane, *heads[0]) is None:
                heappop(heads)
        self.maybe_stale = self.maybe_stale and any(self.free_heads)

    def hold(self, keys: Sequence[int], lease: int) -> None:
        """Let a lease hold these keys."""
        mapped = self.by_key
        if mapped.keys().isdisjoint(keys):
            mapped.update(dict.fromkeys(keys, lease))
            return
        for key in keys:
            found = mapped.get(key)
            if isinstance(found, KeyLine):
                found.lease = lease
                self.maybe_stale = True
            else:
                mapped[key] = lease

    def release(self, keys: Sequence[int], lease: int) -> None:
        """Let a lease no longer hold these keys; a key may occur several times."""
        mapped, update_each = self.by_key, bool(self.fences or self.parked) or self.freed is not None
        new_heads: dict[int, list[tuple[int, int, int]]] = {}
        lane, new = -1, list[tuple[int, int, int]]()
        for key in keys:
            found = mapped.get(key)
            if type(found) is KeyLine:
                if found.lease != lease:
                    continue
                found.lease = 0
                at, numbers = found.waiting.at, found.waiting.numbers
                if update_each or found.backing_off or found.parked:
                    self.update_head(key, found)
                elif at >= len(numbers):
                    del mapped[key]
                else:
                    if numbers[at + 2] != lane:
                        lane = numbers[at + 2]
                        new = new_heads.setdefault(lane, [])
                    new.append((numbers[at + 3], numbers[at], key))
            elif found == lease:
                del mapped[key]
                if self.freed is not None:
                    self.freed.append(key)
        for lane, new in new_heads.items():
            heads = self.free_heads[lane]
            if len(new) * BULK > len(heads):
                heads += new
                heads.sort()  # a sorted list is a heap, and is quickly sorted again
            else:
                for entry in new:
                    heappush(heads, entry)

    def update_head(self, key: int, line: KeyLine) -> None:
        """After a change of a line: if it is free, remove it when empty, or add its head unless that is fenced."""
        self.maybe_stale = True
        if line.parked:
            self.parked.add(key)
        elif self.parked:
            self.parked.discard(key)
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

    def pass_over(self, key: int, extent: Extent) -> None:
        """Put items into the line of their key; if nothing holds the key, they can be leased at once."""
        line = self.line(key)
        before = line.waiting.first.start if line.waiting else None
        line.push(extent)
        if not line.busy and line.waiting.first.start != before:
            self.update_head(key, line)

    def pass_over_each(self, keys: Sequence[int], start: int, lane: int, ready_at: int) -> None:
        """Put the items from offset `start` on into the lines of these keys, in order, at their own offsets."""
        mapped = self.by_key
        if len(keys) >= GROUPED * len(set(keys)):
            by_key: defaultdict[int, list[int]] = defaultdict(list)
            for offset, key in enumerate(keys, start):
                by_key[key].append(offset)
            for key, its_offsets in by_key.items():
                self._pass_over_runs(key, from_offsets(its_offsets), lane, ready_at)
            return
        stop = start
        for index, key in enumerate(keys, 1):
            stop += 1
            if index < len(keys) and keys[index] == key:
                continue  # items of one key in a row are put into its line together
            line = mapped.get(key)
            if type(line) is KeyLine:
                numbers = line.waiting.numbers
                if line.waiting.at < len(numbers) and numbers[_STOP] < start and numbers[_POSITION] < start:
                    numbers.extend((start, stop, lane, start, ready_at))
                    start = stop
                    continue
            self.pass_over(key, Extent(start, stop, lane, start, ready_at))
            start = stop

    def _pass_over_runs(self, key: int, runs: list[int], lane: int, ready_at: int) -> None:
        """Put items into the line of their key, at their own offsets."""
        while runs:
            line = self.by_key.get(key)
            if type(line) is KeyLine and line.waiting and line.waiting.ends_before(runs[0]):
                line.waiting.append_items(runs, lane, ready_at)
                return
            self.pass_over(key, Extent(runs[0], runs[1], lane, runs[0], ready_at))
            runs = runs[2:]

    def take(self, takes: Sequence[LineTake], lease: int) -> None:
        """Remove items from the fronts of key lines; the lease holds their keys."""
        mapped = self.by_key
        taken = {take.key for take in takes}
        for key, unit in groupby(takes, _KEY) if len(taken) < len(takes) else ():
            line = mapped.get(key)
            if type(line) is KeyLine:
                line.lease = lease
                line.waiting.take_all([*unit])
            else:  # damage took the record that put them there
                mapped[key] = lease
        for take in takes if len(taken) == len(takes) else ():
            line = mapped.get(take.key)
            if type(line) is not KeyLine:
                mapped[take.key] = lease
                continue
            line.lease = lease
            waiting = line.waiting
            at, numbers = waiting.at, waiting.numbers
            if at < len(numbers) and numbers[at] == take.start and numbers[at + 1] == take.stop:
                waiting.at = at = at + _FIELDS  # as `drop_first` does
                if at * 2 > len(numbers):
                    del numbers[:at]
                    waiting.at = 0
            else:
                waiting.take(take.start, take.stop)
        for heads in self.free_heads:
            if heads and len(heads) <= len(taken) * BULK:
                heads[:] = [entry for entry in heads if entry[2] not in taken]
                heads.sort()
            elif heads:
                self.maybe_stale = True

    def remove_lost(self, lost: RunSet) -> None:
        """Remove lost items from all lines. Their keys cannot be read any more, so every line is searched."""
        for key, line in self.lines():
            waiting = [offset for extent in line.waiting for offset in offsets(lost.within(extent.start, extent.stop))]
            for offset in waiting:
                line.drop(offset)
            parked = [offset for offset in line.parked if offset not in lost]
            backing_off = line.backing_off is not None and line.backing_off[0] in lost
            if waiting or backing_off or len(parked) < len(line.parked):
                line.parked = parked
                line.backing_off = None if backing_off else line.backing_off
                self.update_head(key, line)
