"""Where a broker's logs lie: a directory, or memory.

Owns: `Store` (the contract), `MemoryStore` and `open_store`. A `logs.directory.Directory` is a store too.
"""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from penstock.logs.api import Committer, Durability, Frame, Log, Readable
from penstock.logs.files.directory import DURABILITIES, Directory, Root
from penstock.logs.files.syncs import Syncs
from penstock.logs.files.system import Files
from penstock.logs.memory import MemoryLog
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest

MEMORY = "memory://"
CATALOG = 0
"""The incarnation, and the partition, of the catalog."""
Target: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Root]"


class Store(Committer, Protocol):
    """Logs by incarnation and partition."""

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log: ...
    def make(self, incarnation: int, *partitions: int) -> None:
        """Make the places of new logs."""
        ...

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """What was left of a log when it was closed; b"" when it was never opened; None when it must be opened to know anything of it."""
        ...

    def reader(self, incarnation: int, partition: int) -> Readable:
        """A log as far as it is published, beside its owner."""
        ...

    def remove(self, incarnation: int) -> None:
        """Remove every log of an incarnation; none may be open."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """Logs that end with the process, and not before: they may be opened again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Frame]] = defaultdict(list)
        syncs = Syncs(lambda incarnation, partition: MEMORY)
        self.commit, self.run, self.close = syncs.commit, syncs.run, syncs.close

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log:
        return MemoryLog(incarnation, partition, self._kept[incarnation, partition])

    def make(self, incarnation: int, *partitions: int) -> None:
        """A list is made when it is asked for."""

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """A log in memory is opened as quickly as anything could be looked up."""
        return None if self._kept[incarnation, partition] else b""

    def reader(self, incarnation: int, partition: int) -> Readable:
        """As it is now."""
        log = MemoryLog(incarnation, partition, list(self._kept[incarnation, partition]))
        deque(log.recover(), maxlen=0)
        return log

    def remove(self, incarnation: int) -> None:
        for owner in [owner for owner in self._kept if owner[0] == incarnation]:
            del self._kept[owner]


def open_store(
    target: Target,
    files: Files | None,
    durability: Durability,
    segment_bytes: int,
    compression: bool,
    clock: Clock,
    entropy: Callable[[int], bytes],
) -> Store:
    """The store that a target names: memory, or a directory (or several), made when it is new."""
    if durability not in DURABILITIES:
        raise InvalidRequest(f"durability is {durability!r}; use one of {', '.join(DURABILITIES)}")
    if target == MEMORY:
        return MemoryStore()
    directory = Directory.open(
        target,
        files=files,
        durability=durability,
        segment_bytes=segment_bytes,
        compression=compression,
        clock=clock,
        entropy=entropy,
    )
    logs = directory.logs()
    if logs and (CATALOG, CATALOG) not in logs:
        directory.close()
        raise InvalidRequest(
            f"{directory.roots[0].path} is one of several storage roots and not the first; open the first, with this one in roots"
        )
    return directory
