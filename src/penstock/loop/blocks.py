"""Items at hand: what was produced or read lately and may be wanted soon.

Owns: `Frames` (items by offset) and `Blocks` (what rules look at of them: key ids and priorities). Caches, never state: anything
in them can be read again from the log. What is produced is kept as it came, so that a consumer close behind needs neither disk
nor decoding; neighbouring small frames are joined into one block, so that a backlog produced item by item is looked at as cheaply
as one produced in batches.
Limits: FRAMES_BYTES (payloads and about what Python adds to them), BLOCKS blocks of BLOCK_ITEMS items or one frame.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from penstock.logs.api import Frame, Gap, Readable
from penstock.logs.columns import Columns
from penstock.rules.records import Produced
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Block, Missing
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


class Fresh:
    """Items as they were produced. Answers what `Columns` answers."""

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
        return self._batch.cut(start - self.base, stop - self.base)


class Items(NamedTuple):
    """Items that follow each other, from `start` on."""

    start: int
    batch: Batch
    produced_at: int


Held: TypeAlias = Columns | Fresh


class Frames:
    """Items by offset: what was produced or read last."""

    def __init__(self, log: Readable) -> None:
        self._log = log
        self._held: dict[int, Held] = {}
        self._bases: list[int] = []
        self._bytes = 0
        self.gaps = RunSet()
        """What the log said is damaged, in the last `collect` or `fetch`."""
        self._read_to = 0  # where the last read ended: what lies before it is the least likely to be wanted

    def put(self, record: Produced, wall: int) -> None:
        """Keep what is being written, if there is room."""
        if self._bytes > FRAMES_BYTES:
            if self._bases[0] >= self._read_to:
                return
            self._drop_read()
        self._add(Fresh(record, wall))

    def read(self, start: int, stop: int) -> Iterator[Held]:
        """What overlaps [start, stop), in order; where something is missing, damage took it."""
        while start < stop:
            found = self._find(start)
            if found is None:
                self._fetch(start, stop)
                found = self._find(start)
            if found is None:  # lost: on to the next that is there
                start = min((base for base in self._bases if base > start), default=stop)
            else:
                yield found
                start = self._read_to = found.stop

    def collect(self, runs: Sequence[int]) -> tuple[list[tuple[Held, int, int]], list[int]]:
        """The parts of frames that hold the items of `runs`, and the runs of what was not found."""
        found: list[tuple[Held, int, int]] = []
        lost: list[int] = []
        self.gaps.clear()
        for start, stop in pairs(runs):
            at = start
            for held in self.read(start, stop):
                if at < held.base:
                    lost += (at, held.base)
                first, at = max(at, held.base), min(stop, held.stop)
                found.append((held, first, at))
            if at < stop:
                lost += (at, stop)
        return found, lost

    def _find(self, offset: int) -> Held | None:
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            return None
        found = self._held[self._bases[at]]
        return found if offset < found.stop else None

    def _fetch(self, start: int, stop: int) -> None:
        if self._bytes > FRAMES_BYTES // 2:
            self._drop_read()
        if self._bytes > FRAMES_BYTES // 2:
            self.clear()
        for frame in self._read_some(start, max(stop, start + READ_AHEAD_ITEMS)):
            if isinstance(frame, Gap):
                self.gaps.add(frame.start, frame.stop)
            else:
                self._replace(Columns(frame))

    def _read_some(self, start: int, stop: int) -> Iterator[Frame | Gap]:
        """From `start` on, at most about FETCH_BYTES at a time: nobody knows how large items are before one is read."""
        first = self._log.read(start, start + 1)
        yield from first
        frame = first[-1] if first else None
        if isinstance(frame, Frame):
            there = frame.base + frame.count
            more = min(stop - there, FETCH_BYTES * frame.count // max(1, len(frame.body)) - frame.count)
            if more > 0:
                yield from self._log.read(there, there + more)
        elif stop > start + 1:
            yield from self._log.read(start + 1, min(stop, start + READ_AHEAD_ITEMS))

    def _replace(self, read: Columns) -> None:
        """Hold a frame that was read, instead of the produces in it that were held one by one: what is held never overlaps."""
        low, high = bisect_left(self._bases, read.base), bisect_left(self._bases, read.stop)
        if high - low == 1 and self._held[self._bases[low]].stop == read.stop:
            return
        self._let_go(low, high)
        self._add(read)

    def _let_go(self, low: int, high: int) -> None:
        self._bytes -= sum(self._held.pop(base).size_bytes + ENTRY_BYTES for base in self._bases[low:high])
        del self._bases[low:high]

    def _add(self, held: Held) -> None:
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


class Blocks:
    """The blocks used last. All that one decision asks for are kept until the next `trim`, however many they are."""

    def __init__(self, frames: Frames) -> None:
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
        raise Missing([offset])

    def fetch(self, offset: int) -> None:
        """Read the block that holds `offset`, and some that follow: who asks for one will ask for the next, and decide anew each time."""
        if self._holds(offset):
            return
        self._frames.gaps.clear()
        parts: list[Held] = []
        size = 0
        for held in self._frames.read(offset, offset + AHEAD_ITEMS):
            size += held.size_bytes
            if size > FETCH_BYTES and parts:
                break
            if parts and (held.base != parts[-1].stop or held.stop - parts[0].base > BLOCK_ITEMS):
                self._add(parts)
                parts = []
            parts.append(held)
        self._add(parts)
        if not self._holds(offset):  # lost, as far as the next that is there
            if offset not in self._frames.gaps:
                raise StorageFailed(f"item {offset} was not found in its log, which does not say that it is damaged; try again")
            at = bisect_right(self._bases, offset)
            following = self._bases[at] if at < len(self._bases) else offset + AHEAD_ITEMS
            self._keep(Block(offset, min(following, offset + AHEAD_ITEMS), lost=True))

    def _holds(self, offset: int) -> bool:
        at = bisect_right(self._bases, offset) - 1
        return at >= 0 and offset < self._blocks[self._bases[at]].stop

    def _add(self, parts: list[Held]) -> None:
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


def _joined(parts: list[Held]) -> Block:
    keys: list[int] | None = None
    if any(part.key_ids is not None for part in parts):
        keys = [key for part in parts for key in (part.key_ids or [NO_KEY] * (part.stop - part.base))]
    priorities: bytes | None = None
    if any(part.priorities is not None for part in parts):
        priorities = b"".join(part.priorities or bytes([DEFAULT_PRIORITY]) * (part.stop - part.base) for part in parts)
    return Block(parts[0].base, parts[-1].stop, keys, priorities)
