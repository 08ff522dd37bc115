"""The files and directories of a simulated disk: what a process reads from them, and what a power cut leaves of them.

Owns: `SimulatedFile`, `SimulatedDirectory` and the changes to them; `Tree`, which finds, creates, renames and removes
them by path, and raises OSError as a system does. Handles and faults are in disk.py.
Invariants
- `seen` is what reads give; `kept` is what survives a power cut; `pending` are the changes that are in `seen` only,
  oldest first;
- a power cut changes nothing that was synced;
- all randomness comes from the generator that is passed in, so that a seed repeats a power cut exactly.
Paths are separated by slashes; a leading slash and doubled slashes make no difference.
"""

import errno
import os
import random
from collections.abc import Iterator
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple, TypeAlias

SECTOR = 512
"""A disk writes this many bytes at once or not at all."""


class CrashOutcome(Enum):
    """What a power cut does to the pending changes of one file or directory."""

    KEPT = auto()
    LOST = auto()
    CUT_SHORT = auto()
    """The first changes are kept, the next is torn, the others are lost. In a log that is a torn tail."""
    SCATTERED = auto()
    """Each change is kept, torn or lost by itself, as a cache that writes in any order does."""


class Write(NamedTuple):
    """Bytes written at a position."""

    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        write_at(content, self.position, self.data)

    def tear(self, content: bytearray, rng: random.Random) -> None:
        """Write only a part: the beginning, or some of the sectors."""
        if rng.random() < 0.5:
            self._leave_beginning(content, rng)
        else:
            self._leave_sectors(content, rng)

    def _leave_beginning(self, content: bytearray, rng: random.Random) -> None:
        """A file may grow by any number of bytes; old bytes are overwritten by whole sectors."""
        end = self.position + rng.randint(0, len(self.data))
        if end < len(content):
            end = max(self.position, end - end % SECTOR)
        write_at(content, self.position, self.data[: end - self.position])

    def _leave_sectors(self, content: bytearray, rng: random.Random) -> None:
        end = self.position + len(self.data)
        extend_to(content, end)
        start = self.position
        while start < end:
            stop = min(end, start - start % SECTOR + SECTOR)
            if rng.random() < 0.5:
                content[start:stop] = self.data[start - self.position : stop - self.position]
            start = stop


class Truncate(NamedTuple):
    """A file cut, or extended with zeros, to a size."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]
        extend_to(content, self.size)

    def tear(self, content: bytearray, rng: random.Random) -> None:
        """A change of size is atomic."""
        if rng.random() < 0.5:
            self.apply(content)


def write_at(content: bytearray, position: int, data: bytes) -> None:
    extend_to(content, position)
    content[position : position + len(data)] = data


def extend_to(content: bytearray, size: int) -> None:
    content.extend(bytes(max(0, size - len(content))))


class SimulatedFile:
    """The bytes of a file."""

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
        """After a failed sync, do as Linux does: reads still give the changes, but no later sync writes them."""
        self.pending.clear()

    def flip(self, bit: int) -> None:
        """Damage one bit, in `seen` and in `kept`."""
        index, mask = bit // 8, 1 << bit % 8
        for content in (self.seen, self.kept):
            if index < len(content):
                content[index] ^= mask

    def crash(self, rng: random.Random) -> None:
        outcome = rng.choice(list(CrashOutcome))
        if outcome is CrashOutcome.CUT_SHORT:
            self._cut_short(rng)
        elif outcome is not CrashOutcome.LOST:
            for change in self.pending:
                if outcome is CrashOutcome.KEPT or rng.random() < 0.5:
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
    """A name added."""

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
    """A name changed, atomically. Afterwards the node has only this name, even when earlier changes were lost."""

    source: str
    target: str
    node: "Node"

    def apply(self, entries: "dict[str, Node]") -> None:
        for name in [self.source] if entries.get(self.source) is self.node else [name for name in entries if entries[name] is self.node]:
            del entries[name]
        entries[self.target] = self.node


class SimulatedDirectory:
    """The names in a directory. Syncing a file does not sync its name; syncing the directory does."""

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
        outcome = rng.choice(list(CrashOutcome))
        first_lost = rng.randint(0, len(self.pending))
        for number, change in enumerate(self.pending):
            chance = {
                CrashOutcome.KEPT: 1.0,
                CrashOutcome.LOST: 0.0,
                CrashOutcome.CUT_SHORT: float(number < first_lost),
                CrashOutcome.SCATTERED: 0.5,
            }[outcome]
            if rng.random() < chance:
                change.apply(self.kept)
        self.pending.clear()
        self.seen = dict(self.kept)
        for node in self.seen.values():
            node.crash(rng)


Node: TypeAlias = SimulatedFile | SimulatedDirectory


# -- paths -------------------------------------------------------------------------------------------


class Tree:
    """All files and directories of one disk."""

    def __init__(self) -> None:
        self.root = SimulatedDirectory()

    def find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in names_of(path):
            node = node.seen.get(name) if isinstance(node, SimulatedDirectory) else None
        return node

    def file(self, path: str) -> SimulatedFile:
        node = self.find(path)
        if isinstance(node, SimulatedDirectory):
            raise error(errno.EISDIR, path)
        if node is None:
            raise error(errno.ENOENT, path)
        return node

    def directory(self, path: str) -> SimulatedDirectory:
        node = self.find(path)
        if isinstance(node, SimulatedFile):
            raise error(errno.ENOTDIR, path)
        if node is None:
            raise error(errno.ENOENT, path)
        return node

    def make_file(self, path: str) -> SimulatedFile:
        """The file of that path, created when it is missing."""
        if self.find(path) is None:
            self.directory(os.path.dirname(path)).change(Link(names_of(path)[-1], SimulatedFile()))
        return self.file(path)

    def make_directory(self, path: str) -> SimulatedDirectory:
        """The directory of that path, created with its parents when it is missing."""
        directory = self.root
        for name in names_of(path):
            if name not in directory.seen:
                directory.change(Link(name, SimulatedDirectory()))
            inner = directory.seen[name]
            if isinstance(inner, SimulatedFile):
                raise error(errno.EEXIST, path)
            directory = inner
        return directory

    def remove(self, path: str) -> None:
        file = self.file(path)
        self.directory(os.path.dirname(path)).change(Unlink(names_of(path)[-1], file))

    def remove_directory(self, path: str) -> None:
        directory = self.directory(path)
        if directory.seen:
            raise error(errno.ENOTEMPTY, path)
        self.directory(os.path.dirname(path)).change(Unlink(names_of(path)[-1], directory))

    def rename(self, source: str, target: str) -> None:
        node, existing = self.find(source), self.find(target)
        if node is None:
            raise error(errno.ENOENT, source)
        if isinstance(node, SimulatedDirectory) and isinstance(existing, SimulatedFile):
            raise error(errno.ENOTDIR, target)
        if isinstance(existing, SimulatedDirectory) and existing is not node and isinstance(node, SimulatedFile):
            raise error(errno.EISDIR, target)
        if isinstance(existing, SimulatedDirectory) and existing is not node and existing.seen:
            raise error(errno.ENOTEMPTY, target)
        self.directory(os.path.dirname(source)).change(Rename(names_of(source)[-1], names_of(target)[-1], node))

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every path with its node, parents first. The path of a directory ends with a slash."""
        waiting = [("/", self.root)]
        while waiting:
            path, directory = waiting.pop()
            yield path, directory
            for name, node in sorted(directory.seen.items()):
                if isinstance(node, SimulatedDirectory):
                    waiting.append((f"{path}{name}/", node))
                else:
                    yield path + name, node

    def files(self) -> list[SimulatedFile]:
        return [node for _, node in self.walk() if isinstance(node, SimulatedFile)]

    def used_bytes(self) -> int:
        return sum(len(file.seen) for file in self.files())

    def sync_names(self) -> None:
        """Sync every directory."""
        for _, node in self.walk():
            if isinstance(node, SimulatedDirectory):
                node.sync()

    def crash(self, rng: random.Random) -> None:
        self.root.crash(rng)


@lru_cache(1_000)
def names_of(path: str) -> tuple[str, ...]:
    return tuple(name for name in path.split("/") if name not in ("", "."))


def error(number: int, path: str) -> OSError:
    """The OSError that a system raises; OSError chooses the subclass (FileNotFoundError, …) by the number."""
    return OSError(number, os.strerror(number), path)
