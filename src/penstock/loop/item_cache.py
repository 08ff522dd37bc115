"""Items at hand: what was produced or read lately and may be wanted soon.

Owns: `ItemCache` (items by offset) and `BlockCache` (what rules look at of them: key ids and priorities). Caches, never state: anything
in them can be read again from the log. What is produced is kept as it came, so that a consumer close behind needs neither disk
nor decoding; neighbouring small frames are joined into one block, so that a backlog produced item by item is looked at as cheaply
as one produced in batches.
There is one way to read a range, `ItemCache.read`: it goes from one end of the range to the other and gives items, and gaps where damage took
items. Whatever it meets, it goes on behind it.
Limits: FRAMES_BYTES (payloads and about what Python adds to them), BLOCKS blocks of BLOCK_ITEMS items or one frame.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from penstock.logs.columns import FrameColumns
from penstock.logs.log import Gap, ReadableLog
from penstock.rules.records import Produced
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import pairs
from penstock.rules.state import Block, MissingBlocks
from penstock.words.batch import Batch
from penstock.words.errors import StorageFailed
from penstock.words.limits import DEFAULT_PRIORITY, MIB

FRAMES_BYTES = 8 * MIB
ENTRY_BYTES = 400
ITEM_BYTES = 40
READ_AHEAD_ITEMS = 64
FETCH_BYTES = 1 * MIB
BLOCKS = 64
BLOCK_ITEMS = 1_000
AHEAD_ITEMS = 4_000


class ProducedItems:
    """Items as they were produced. Answers what `FrameColumns` answers."""

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


class Items(NamedTuple):
    """Items that follow each other, from `start` on."""

    start: int
    batch: Batch
    produced_at: int


CachedItems: TypeAlias = FrameColumns | ProducedItems


class ReadResult(NamedTuple):
    """What was found of some items."""

    parts: list[tuple[CachedItems, int, int]]
    """The parts of frames that hold them: (frame, first offset, stop)."""
    gaps: list[Gap]
    """The gaps that took some of them, whole: a gap may reach beyond what was asked for."""
    absent: list[int]
    """Runs of those of which the log says nothing, as it does of what retention took out."""


class ItemCache:
    """Items by offset: what was produced or read last."""

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self._held: dict[int, CachedItems] = {}
        self._bases: list[int] = []
        self._bytes = 0
        self._read_to = 0  # where the last read ended: what lies before it is the least likely to be wanted

    def put(self, record: Produced, wall: int) -> None:
        """Keep what is being written, if there is room."""
        if self._bytes > FRAMES_BYTES:
            if self._bases[0] >= self._read_to:
                return
            self._drop_read()
        self._add(ProducedItems(record, wall))

    def read(self, start: int, stop: int) -> Iterator[CachedItems | Gap]:
        """Everything that overlaps [start, stop), in order: items, and gaps. What lies between them, the log does not have."""
        while start < stop:
            gaps: list[Gap] = []
            reached = start
            held = self._find(start)
            if held is None:
                gaps, reached = self._fetch(start, stop)
                held = self._find(start)
            if held is not None:
                yield held
                start = self._read_to = held.stop
                continue
            gap = next((gap for gap in gaps if gap.start <= start < gap.stop), None)
            if gap is not None:
                yield gap
                start = gap.stop
            else:  # it is not there: on to the next that is, or to the end of what was looked at
                start = min(
                    [reached, *self._bases[bisect_right(self._bases, start) :][:1], *(gap.start for gap in gaps if gap.start > start)]
                )

    def collect(self, runs: Sequence[int]) -> ReadResult:
        """What there is of the items of `runs`."""
        found = ReadResult([], [], [])
        for start, stop in pairs(runs):
            at = start
            for one in self.read(start, stop):
                first, end = (one.start, one.stop) if isinstance(one, Gap) else (one.base, one.stop)
                if at < first:
                    found.absent.extend((at, first))
                if not isinstance(one, Gap):
                    found.parts.append((one, max(at, first), min(stop, end)))
                elif one not in found.gaps:
                    found.gaps.append(one)
                at = min(stop, end)
            if at < stop:
                found.absent.extend((at, stop))
        return found

    def _find(self, offset: int) -> CachedItems | None:
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            return None
        found = self._held[self._bases[at]]
        return found if offset < found.stop else None

    def _fetch(self, start: int, stop: int) -> tuple[list[Gap], int]:
        """Read on from `start`, about FETCH_BYTES at most. Gives the gaps, and the offset up to which everything there is was read."""
        if self._bytes > FRAMES_BYTES // 2:
            self._drop_read()
        if self._bytes > FRAMES_BYTES // 2:
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
        """Hold a frame that was read, instead of the produces in it that were held one by one: what is held never overlaps."""
        low, high = bisect_left(self._bases, read.base), bisect_left(self._bases, read.stop)
        if high - low == 1 and self._bases[low] == read.base and self._held[read.base].stop == read.stop:
            return
        self._let_go(low, high)
        self._add(read)

    def _let_go(self, low: int, high: int) -> None:
        self._bytes -= sum(self._held.pop(base).size_bytes + ENTRY_BYTES for base in self._bases[low:high])
        del self._bases[low:high]

    def _add(self, held: CachedItems) -> None:
        self._held[held.base] = held
        self._bytes += held.size_bytes + ENTRY_BYTES
        if self._bases and held.base < self._bases[-1]:
            insort(self._bases, held.base)
        else:
            self._bases.append(held.base)

    def _drop_read(self) -> None:
        """Let go of everything before the place that was read last."""
        self._let_go(0, bisect_left(self._bases, self._read_to))

    def clear(self) -> None:
        self._held.clear()
        self._bases.clear()
        self._bytes = 0


class BlockCache:
    """The blocks used last. All that one decision asks for are kept until the next `trim`, however many they are."""

    def __init__(self, frames: ItemCache) -> None:
        self._frames = frames
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
        """Read the block that holds `offset`, and some that follow: who asks for one will ask for the next, and decide anew each time.

        Gives the gaps that were met. What they took is in blocks that say so.
        """
        gaps: list[Gap] = []
        if self._holds(offset):
            return gaps
        parts: list[CachedItems] = []
        size = 0
        for found in self._frames.read(offset, offset + AHEAD_ITEMS):
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
        """Where the last block ends that begins at or before an offset."""
        at = bisect_right(self._bases, offset) - 1
        return self._blocks[self._bases[at]].stop if at >= 0 else 0

    def _add(self, parts: list[CachedItems]) -> None:
        if parts:
            self._keep(parts[0].block() if len(parts) == 1 else _joined(parts))

    def _keep(self, block: Block) -> None:
        if block.base not in self._blocks:
            insort(self._bases, block.base)
        self._blocks[block.base] = block

    def trim(self) -> None:
        """Between decisions: let go of the oldest items' blocks when there are too many."""
        if len(self._bases) > BLOCKS:
            for base in self._bases[: -BLOCKS // 2]:
                del self._blocks[base]
            del self._bases[: -BLOCKS // 2]

    def clear(self) -> None:
        self._blocks.clear()
        self._bases.clear()
        self._last = Block(0, 0)


def _joined(parts: list[CachedItems]) -> Block:
    keys: list[int] | None = None
    if any(part.key_ids is not None for part in parts):
        keys = [key for part in parts for key in (part.key_ids or [NO_KEY] * (part.stop - part.base))]
    priorities: bytes | None = None
    if any(part.priorities is not None for part in parts):
        priorities = b"".join(part.priorities or bytes([DEFAULT_PRIORITY]) * (part.stop - part.base) for part in parts)
    return Block(parts[0].base, parts[-1].stop, keys, priorities)
