"""The tree of a simulated disk: paths and the nodes they lead to.

Owns: `Tree`, which finds, makes, renames and removes, and raises OSError as a system does. It knows nothing of handles or faults.
Paths are separated by slashes; a leading one and doubled ones make no difference.
"""

import errno
import os
import random
from collections.abc import Iterator
from functools import lru_cache

from penstock.testing.device import Link, Node, Rename, SimulatedDirectory, SimulatedFile, Unlink


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
        """The file of that path, made when it is missing."""
        if self.find(path) is None:
            self.directory(os.path.dirname(path)).change(Link(names_of(path)[-1], SimulatedFile()))
        return self.file(path)

    def make_directory(self, path: str) -> SimulatedDirectory:
        """The directory of that path, made with its parents when it is missing."""
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
        node, there = self.find(source), self.find(target)
        if node is None:
            raise error(errno.ENOENT, source)
        if isinstance(node, SimulatedDirectory) and isinstance(there, SimulatedFile):
            raise error(errno.ENOTDIR, target)
        if isinstance(there, SimulatedDirectory) and there is not node and isinstance(node, SimulatedFile):
            raise error(errno.EISDIR, target)
        if isinstance(there, SimulatedDirectory) and there is not node and there.seen:
            raise error(errno.ENOTEMPTY, target)
        self.directory(os.path.dirname(source)).change(Rename(names_of(source)[-1], names_of(target)[-1], node))

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every path with its node, parents first; a directory's path ends in a slash."""
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
        """Keep every name there is, as if each directory had been synced."""
        for _, node in self.walk():
            if isinstance(node, SimulatedDirectory):
                node.sync()

    def crash(self, rng: random.Random) -> None:
        self.root.crash(rng)


@lru_cache(1_000)
def names_of(path: str) -> tuple[str, ...]:
    return tuple(name for name in path.split("/") if name not in ("", "."))


def error(number: int, path: str) -> OSError:
    """OSError picks its subclass (FileNotFoundError, …) by the number, as the system's own do."""
    return OSError(number, os.strerror(number), path)
