"""What rules look at of items on disk, kept at hand for a while.

Owns: `Blocks`. A cache, never state: anything in it can be read again. Neighbouring small frames are joined into one block,
so a backlog that was produced item by item is looked at as cheaply as one produced in batches.
Limits: BLOCKS blocks of about BLOCK_ITEMS items.
"""

from collections import OrderedDict

from penstock.logs.api import Gap, Log
from penstock.logs.columns import Columns
from penstock.rules.routing import NO_KEY
from penstock.rules.state import Block, Missing
from penstock.words.limits import DEFAULT_PRIORITY

BLOCKS = 64
BLOCK_ITEMS = 1_000


class Blocks:
    """The blocks used last."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._last: Block | None = None

    def find(self, offset: int) -> Block:
        last = self._last
        if last is not None and last.base <= offset < last.stop:
            return last
        for block in self._blocks.values():
            if block.base <= offset < block.stop:
                self._blocks.move_to_end(block.base)
                self._last = block
                return block
        raise Missing(offset)

    def fetch(self, offset: int) -> None:
        """Read the block that holds `offset`."""
        block = _read(self._log, offset)
        self._blocks[block.base] = self._last = block
        self._blocks.move_to_end(block.base)
        if len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
        self._last = None


def _read(log: Log, offset: int) -> Block:
    found: list[Columns] = []
    for frame in log.read(offset, offset + BLOCK_ITEMS):
        if isinstance(frame, Gap):
            if found:
                break
            if frame.start <= offset < frame.stop:
                return Block(offset, frame.stop, lost=True)
        elif not found or found[-1].stop == frame.base:
            found.append(Columns(frame))
        else:
            break
    if not found or not found[0].base <= offset < found[-1].stop:
        return Block(offset, offset + 1, lost=True)
    return found[0].block() if len(found) == 1 else _joined(found)


def _joined(parts: list[Columns]) -> Block:
    keys: list[int] | None = None
    if any(part.key_ids is not None for part in parts):
        keys = [key for part in parts for key in (part.key_ids or [NO_KEY] * (part.stop - part.base))]
    priorities: bytes | None = None
    if any(part.priorities is not None for part in parts):
        priorities = b"".join(part.priorities or bytes([DEFAULT_PRIORITY]) * (part.stop - part.base) for part in parts)
    return Block(parts[0].base, parts[-1].stop, keys, priorities)
