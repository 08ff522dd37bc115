"""What a simulated disk holds: for each file and directory what a process sees, and what a power cut leaves of it.

Owns: `SimulatedFile` and `SimulatedDirectory`, the nodes of a `SimulatedFiles` tree, and the fates of changes that were not synced.
Invariants
- `seen` is what reads give; `kept` is what surely survives; `pending` are the changes between the two, oldest first;
- a power cut works on `pending` alone: what was synced is never touched;
- chance comes from the generator passed in, so a seed repeats a power cut to the byte.
"""

import random
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

SECTOR = 512
"""A disk writes this much at once or not at all."""


class CrashOutcome(Enum):
    """What becomes of a file's or directory's pending changes. Drawn once a node, so that the plain cases stay frequent."""

    KEPT = auto()
    LOST = auto()
    CUT_SHORT = auto()
    """The first ones are kept, the next is torn, the rest are lost: a log's ordinary torn tail."""
    SCATTERED = auto()
    """Each has its own fate: caches write back in any order."""


class Write(NamedTuple):
    """Bytes written at a position."""

    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        place(content, self.position, self.data)

    def tear(self, content: bytearray, rng: random.Random) -> None:
        """Leave a part: a beginning, or some sectors with holes (zeros, or what was there) between them."""
        if rng.random() < 0.5:
            self._leave_beginning(content, rng)
        else:
            self._leave_sectors(content, rng)

    def _leave_beginning(self, content: bytearray, rng: random.Random) -> None:
        """A file may grow by any number of bytes; what was there before is overwritten by whole sectors."""
        end = self.position + rng.randint(0, len(self.data))
        if end < len(content):
            end = max(self.position, end - end % SECTOR)
        place(content, self.position, self.data[: end - self.position])

    def _leave_sectors(self, content: bytearray, rng: random.Random) -> None:
        end = self.position + len(self.data)
        stretch(content, end)
        start = self.position
        while start < end:
            stop = min(end, start - start % SECTOR + SECTOR)
            if rng.random() < 0.5:
                content[start:stop] = self.data[start - self.position : stop - self.position]
            start = stop


class Truncate(NamedTuple):
    """A file cut, or stretched with zeros, to a size."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]
        stretch(content, self.size)

    def tear(self, content: bytearray, rng: random.Random) -> None:
        """A change of size happens whole or not at all."""
        if rng.random() < 0.5:
            self.apply(content)


def place(content: bytearray, position: int, data: bytes) -> None:
    stretch(content, position)
    content[position : position + len(data)] = data


def stretch(content: bytearray, size: int) -> None:
    content.extend(bytes(max(0, size - len(content))))


class SimulatedFile:
    """A file's bytes."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.kept = bytearray()
        self.pending: list[Write | Truncate] = []
        self.locked = False

    @property
    def unsynced_bytes(self) -> int:
        return sum(len(change.data) for change in self.pending if isinstance(change, Write))

    def change(self, change: Write | Truncate) -> None:
        change.apply(self.seen)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            change.apply(self.kept)
        self.pending.clear()

    def forget(self) -> None:
        """A sync failed: the system drops the changes from its to-do list, still shows them to readers, and reports success from now on."""
        self.pending.clear()

    def flip(self, bit: int) -> None:
        """Damage one bit, on the device and as seen."""
        place_in_byte, mask = bit // 8, 1 << bit % 8
        for content in (self.seen, self.kept):
            if place_in_byte < len(content):
                content[place_in_byte] ^= mask

    def crash(self, rng: random.Random) -> None:
        fate = rng.choice(list(CrashOutcome))
        if fate is CrashOutcome.CUT_SHORT:
            self._cut_short(rng)
        elif fate is not CrashOutcome.LOST:
            for change in self.pending:
                if fate is CrashOutcome.KEPT or rng.random() < 0.5:
                    change.apply(self.kept)
                elif rng.random() < 0.5:
                    change.tear(self.kept, rng)
        self.pending.clear()
        self.seen = bytearray(self.kept)
        self.locked = False

    def _cut_short(self, rng: random.Random) -> None:
        kept = rng.randint(0, len(self.pending))
        for change in self.pending[:kept]:
            change.apply(self.kept)
        for change in self.pending[kept : kept + 1]:
            change.tear(self.kept, rng)


class Link(NamedTuple):
    """A name made."""

    name: str
    node: "Node"

    def apply(self, entries: "dict[str, Node]") -> None:
        entries[self.name] = self.node


class Unlink(NamedTuple):
    """A name removed."""

    name: str
    node: "Node"

    def apply(self, entries: "dict[str, Node]") -> None:
        if entries.get(self.name) is self.node:
            del entries[self.name]


class Rename(NamedTuple):
    """A name changed, atomically: afterwards the node is there under this name alone, whatever became of earlier changes."""

    source: str
    target: str
    node: "Node"

    def apply(self, entries: "dict[str, Node]") -> None:
        for name in [self.source] if entries.get(self.source) is self.node else [name for name in entries if entries[name] is self.node]:
            del entries[name]
        entries[self.target] = self.node


class SimulatedDirectory:
    """A directory's names. A file's own sync does not keep its name; only the directory's does."""

    def __init__(self) -> None:
        self.seen: dict[str, Node] = {}
        self.kept: dict[str, Node] = {}
        self.pending: list[Link | Unlink | Rename] = []

    def change(self, change: Link | Unlink | Rename) -> None:
        change.apply(self.seen)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            change.apply(self.kept)
        self.pending.clear()

    def crash(self, rng: random.Random) -> None:
        fate = rng.choice(list(CrashOutcome))
        first_lost = rng.randint(0, len(self.pending))
        for number, change in enumerate(self.pending):
            chance = {
                CrashOutcome.KEPT: 1.0,
                CrashOutcome.LOST: 0.0,
                CrashOutcome.CUT_SHORT: float(number < first_lost),
                CrashOutcome.SCATTERED: 0.5,
            }[fate]
            if rng.random() < chance:
                change.apply(self.kept)
        self.pending.clear()
        self.seen = dict(self.kept)
        for node in self.seen.values():
            node.crash(rng)


Node: TypeAlias = SimulatedFile | SimulatedDirectory
