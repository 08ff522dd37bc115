"""Caches of a partition's items.

Owns: `ItemCache` (items by offset), `leased_items` (what a consumer is given), and `BlockCache` (the key ids and
priorities of items, which rules decide by).
Everything in them can be read again from the log. Produced items are cached as they were given, so that a consumer
close behind needs neither disk nor decoding; adopted ones (views) are read from the log when wanted. Small neighbouring
frames are joined into one block, so that a backlog produced item by item is searched as fast as one produced in
batches.
`ItemCache.read` reads a range from its start to its end and gives the items, and the gaps where damage took items. A
gap does not end the read.
Limits: CACHE_BYTES (payloads and about what Python adds to them), BLOCKS blocks of BLOCK_ITEMS items or one frame.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from penstock.logs.columns import FrameColumns
from penstock.logs.log import Gap, ReadableLog
from penstock.rules.records import Produced
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import offsets
from penstock.rules.state import Block, MissingBlocks
from penstock.words.batch import Batch
from penstock.words.errors import StorageFailed
from penstock.words.limits import DEFAULT_PRIORITY, MIB

CACHE_BYTES = 8 * MIB
ROOM_BYTES = 7 * MIB
ENTRY_BYTES = 400
ITEM_BYTES = 40
READ_AHEAD_ITEMS = 64
FETCH_BYTES = 1 * MIB
BLOCKS = 64
BLOCK_ITEMS = 1_000
AHEAD_ITEMS = 4_000


class ProducedItems:
    """Items as they were produced. Has the same methods as `FrameColumns`."""

    __slots__ = ("_batch", "base", "size_bytes", "stop", "wall")

    def __init__(self, record: Produced, wall: int) -> None:
        payloads = record.batch.payloads
        self.base = record.base
        self.stop = record.base + len(payloads)
        self.wall = wall
        self.size_bytes = len(payloads[0]) if len(payloads) == 1 else record.batch.size_bytes + ITEM_BYTES * len(payloads)
        self._batch = record.batch

    @property
    def key_ids(self) -> list[int] | None:
        return None if self._batch.key_ids is None else list(self._batch.key_ids)

    @property
    def priorities(self) -> bytes | None:
        return self._batch.priorities

    def block(self) -> Block:
        return Block(self.base, self.stop, self.key_ids, self.priorities)

    def payloads(self, start: int, stop: int) -> list[bytes]:
        return list(self._batch.payloads[start - self.base : stop - self.base])

    def batch(self, start: int, stop: int) -> Batch:
        return self._batch.slice(start - self.base, stop - self.base)

    def gather(self, chosen: Sequence[int]) -> Batch:
        base = self.base
        return self._batch.take([offset - base for offset in chosen])


class Items(NamedTuple):
    """Consecutive items; `start` is the offset of the first."""

    start: int
    batch: Batch
    produced_at: int

    @property
    def offsets(self) -> Sequence[int]:
        return range(self.start, self.start + len(self.batch))


class LeasedItems(NamedTuple):
    """Leased items that were produced together, in the order leased."""

    places: int | list[int]
    """Where they are: the offset of the first of consecutive items; else flat runs of their offsets, in their order."""
    batch: Batch
    produced_at: int

    @property
    def runs(self) -> list[int]:
        """Flat runs of their offsets, in their order."""
        places = self.places
        return [places, places + len(self.batch)] if isinstance(places, int) else places

    @property
    def offsets(self) -> Sequence[int]:
        """Their offsets, in order. They are made at each call."""
        places = self.places
        return range(places, places + len(self.batch)) if isinstance(places, int) else offsets(places)


CachedItems: TypeAlias = FrameColumns | ProducedItems
CachedPart: TypeAlias = tuple[CachedItems, list[int]]
"""Cached items, and flat runs of the offsets that are wanted of them, in order."""


class ReadResult(NamedTuple):
    """The result of reading runs of offsets."""

    parts: "list[CachedPart]"
    """What was found, in order."""
    gaps: list[Gap]
    """The gaps that took some of the items, uncut: a gap may reach beyond the runs."""
    absent: list[int]
    """Runs of items that are neither in the log nor in a gap, such as those that retention deleted."""


def leased_items(parts: Sequence[CachedPart]) -> list[LeasedItems]:
    """The items of these parts, in order. Neighbours that were produced together become one batch: a lease of many keys
    takes few items in a row."""
    if len(parts) == 1:
        ((cached, runs),) = parts
        if len(runs) == 2:
            return [LeasedItems(runs[0], cached.batch(runs[0], runs[1]), cached.wall)]
    found: list[LeasedItems] = []
    for cached, same in groupby(parts, itemgetter(0)):
        runs = [edge for _, runs in same for edge in runs]
        batch = cached.batch(*runs) if len(runs) == 2 else cached.gather(offsets(runs))
        found.append(LeasedItems(runs[0] if len(runs) == 2 else runs, batch, cached.wall))
    return found


def _ascending_until(starts: list[int]) -> list[int]:
    """The indexes before which the numbers stop ascending, and the length."""
    if starts == sorted(starts):
        return [len(starts)]
    return [*(index for index, (before, after) in enumerate(pairwise(starts), 1) if after < before), len(starts)]


class ItemCache:
    """The items that were produced or read last, by offset."""

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self._cached: dict[int, CachedItems] = {}
        self._bases: list[int] = []
        self._bytes = 0
        self._read: set[int] = set()
        """The bases of the entries that were read: only these are removed to make room."""
        self._wanted_from = 0
        """The lowest offset of the last `collect`. What stands before it is the least likely to be wanted again."""

    def put(self, record: Produced, wall: int) -> None:
        """Cache produced items, if there is room; not a view, which is adopted in bulk and read from the log later."""
        if record.batch.is_view:
            return
        if self._bytes > CACHE_BYTES:
            if not self._read:
                return
            self._remove_read()
        self._add(ProducedItems(record, wall))

    def read(self, start: int, stop: int) -> Iterator[CachedItems | Gap]:
        """Items and gaps that overlap [start, stop), by offset. Offsets between them are not in the log."""
        while start < stop:
            gaps: list[Gap] = []
            reached = start
            cached = self._find(start)
            if cached is None:
                gaps, reached = self._fetch(start, stop)
                cached = self._find(start)
            if cached is not None:
                self._read.add(cached.base)
                yield cached
                start = cached.stop
                continue
            gap = next((gap for gap in gaps if gap.start <= start < gap.stop), None)
            if gap is not None:
                yield gap
                start = gap.stop
            else:  # not in the log: continue at the next cached item or gap, or after what was fetched
                start = min(
                    [reached, *self._bases[bisect_right(self._bases, start) :][:1], *(gap.start for gap in gaps if gap.start > start)]
                )

    def find(self, start: int, stop: int) -> CachedItems | None:
        """The cached items that include all of [start, stop); None: they must be collected."""
        found = self._find(start)
        if found is None or found.stop < stop:
            return None
        self._read.add(found.base)
        self._wanted_from = start
        return found

    def collect(self, runs: list[int]) -> ReadResult:
        """Read the items of `runs`, frame by frame: a lease of many keys has a run for nearly every item."""
        found = ReadResult([], [], [])
        self._wanted_from = min(runs, default=0)
        starts = runs[::2]
        at = 0
        for end in _ascending_until(starts):
            while at < end:
                cached = self._find(starts[at])
                stop = at if cached is None else bisect_left(starts, cached.stop, at, end)
                if cached is not None and runs[2 * stop - 1] > cached.stop:
                    stop -= 1  # the last run goes on in the next frame
                if cached is not None and stop > at:
                    self._read.add(cached.base)
                    found.parts.append((cached, runs[2 * at : 2 * stop]))
                    at = stop
                else:
                    self._collect_run(starts[at], runs[2 * at + 1], found)
                    at += 1
        return found

    def _collect_run(self, start: int, stop: int, found: ReadResult) -> None:
        """Read one run, from several frames or from the log."""
        at = start
        for one in self.read(start, stop):
            first, end = (one.start, one.stop) if isinstance(one, Gap) else (one.base, one.stop)
            if at < first:
                found.absent.extend((at, first))
            if not isinstance(one, Gap):
                found.parts.append((one, [max(at, first), min(stop, end)]))
            elif one not in found.gaps:
                found.gaps.append(one)
            at = min(stop, end)
        if at < stop:
            found.absent.extend((at, stop))

    def _find(self, offset: int) -> CachedItems | None:
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            return None
        found = self._cached[self._bases[at]]
        return found if offset < found.stop else None

    def _fetch(self, start: int, stop: int) -> tuple[list[Gap], int]:
        """Cache about FETCH_BYTES from `start` on. Gives the gaps, and the offset up to which the log was read."""
        if self._bytes > CACHE_BYTES:
            self._remove_read()
        if self._bytes > CACHE_BYTES:
            self.clear()
        stop = max(stop, start + READ_AHEAD_ITEMS)
        gaps: list[Gap] = []
        size, reached = 0, start
        for found in self._log.read(start, stop, FETCH_BYTES):
            if isinstance(found, Gap):
                gaps.append(found)
            else:
                self._replace(FrameColumns(found))
                size += len(found.body)
                reached = found.base_offset + found.count
        return gaps, reached if size >= FETCH_BYTES else stop  # a log stops early only when it has read so much

    def _replace(self, read: FrameColumns) -> None:
        """Cache a frame that was read, in place of single produces of the same frame: entries never overlap."""
        low, high = bisect_left(self._bases, read.base), bisect_left(self._bases, read.stop)
        if high - low == 1 and self._bases[low] == read.base and self._cached[read.base].stop == read.stop:
            return
        self._remove(low, high)
        self._add(read)

    def _remove(self, low: int, high: int) -> None:
        for base in self._bases[low:high]:
            self._bytes -= self._cached.pop(base).size_bytes + ENTRY_BYTES
            self._read.discard(base)
        del self._bases[low:high]

    def _add(self, cached: CachedItems) -> None:
        self._cached[cached.base] = cached
        self._bytes += cached.size_bytes + ENTRY_BYTES
        if self._bases and cached.base < self._bases[-1]:
            insort(self._bases, cached.base)
        else:
            self._bases.append(cached.base)

    def _remove_read(self) -> None:
        """Make room: remove what was read and stands before the last `collect`, then from the end what was read.

        Leases of many keys read the same stretch of the log again and again, from its start to its end. If the stretch
        is larger than the cache, its start stays.
        """
        self._remove(0, bisect_right(self._bases, self._wanted_from) - 1)
        for base in sorted(self._read, reverse=True):
            if self._bytes <= ROOM_BYTES:
                break
            at = bisect_left(self._bases, base)
            self._remove(at, at + 1)

    def clear(self) -> None:
        self._cached.clear()
        self._bases.clear()
        self._read.clear()
        self._bytes = 0


class BlockCache:
    """The blocks used last. Nothing is removed before the next `trim`: one decision may need more than BLOCKS."""

    def __init__(self, items: ItemCache) -> None:
        self._items = items
        self._blocks: dict[int, Block] = {}
        self._bases: list[int] = []
        self._last = Block(0, 0)

    def find(self, offset: int) -> Block:
        if self._last.base <= offset < self._last.stop:
            return self._last
        at = bisect_right(self._bases, offset) - 1
        if at >= 0:
            found = self._blocks[self._bases[at]]
            if offset < found.stop:
                self._last = found
                return found
        raise MissingBlocks([offset])

    def fetch(self, offset: int) -> list[Gap]:
        """Read the block that holds `offset`, and some blocks after it: a decision is begun again after every fetch.

        Gives the gaps that were met. Items that they took are in blocks marked as lost. StorageFailed when the log has
        neither the item nor a gap.
        """
        gaps: list[Gap] = []
        if self._holds(offset):
            return gaps
        parts: list[CachedItems] = []
        size = 0
        for found in self._items.read(offset, offset + AHEAD_ITEMS):
            if isinstance(found, Gap):
                gaps.append(found)
                self._keep(Block(max(found.start, self._end_before(offset)), found.stop, lost=True))
                continue
            size += found.size_bytes
            if size > FETCH_BYTES and parts:
                break
            if parts and (found.base != parts[-1].stop or found.stop - parts[0].base > BLOCK_ITEMS):
                self._add(parts)
                parts = []
            parts.append(found)
        self._add(parts)
        if not self._holds(offset):
            raise StorageFailed(f"item {offset} was not found in its log, which does not say that it is damaged; try again")
        return gaps

    def _holds(self, offset: int) -> bool:
        return offset < self._end_before(offset)

    def _end_before(self, offset: int) -> int:
        """The end of the last block that begins at or before an offset."""
        at = bisect_right(self._bases, offset) - 1
        return self._blocks[self._bases[at]].stop if at >= 0 else 0

    def _add(self, parts: list[CachedItems]) -> None:
        if parts:
            self._keep(parts[0].block() if len(parts) == 1 else _join(parts))

    def _keep(self, block: Block) -> None:
        if block.base not in self._blocks:
            insort(self._bases, block.base)
        self._blocks[block.base] = block

    def trim(self) -> None:
        """Remove the blocks with the lowest offsets when there are more than BLOCKS. Called between decisions."""
        if len(self._bases) > BLOCKS:
            for base in self._bases[: -BLOCKS // 2]:
                del self._blocks[base]
            del self._bases[: -BLOCKS // 2]

    def clear(self) -> None:
        self._blocks.clear()
        self._bases.clear()
        self._last = Block(0, 0)


def _join(parts: list[CachedItems]) -> Block:
    keys: list[int] | None = None
    if any(part.key_ids is not None for part in parts):
        keys = [key for part in parts for key in (part.key_ids or [NO_KEY] * (part.stop - part.base))]
    priorities: bytes | None = None
    if any(part.priorities is not None for part in parts):
        priorities = b"".join(part.priorities or bytes([DEFAULT_PRIORITY]) * (part.stop - part.base) for part in parts)
    return Block(parts[0].base, parts[-1].stop, keys, priorities)
