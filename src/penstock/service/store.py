"""Where a broker's logs lie: a directory, or memory.

Owns: `Store` (the contract) and `MemoryStore`. A `logs.directory.Directory` is one too.
"""

from collections import defaultdict
from typing import Protocol

from penstock.logs.api import Durability, Frame, Log
from penstock.logs.memory import MemoryLog


class Store(Protocol):
    """Logs by incarnation and partition."""

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log: ...
    def remove(self, incarnation: int) -> None:
        """Remove every log of an incarnation; none may be open."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """Logs that end with the process, and not before: they may be opened again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Frame]] = defaultdict(list)

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> Log:
        return MemoryLog(incarnation, partition, self._kept[incarnation, partition])

    def remove(self, incarnation: int) -> None:
        for owner in [owner for owner in self._kept if owner[0] == incarnation]:
            del self._kept[owner]

    def close(self) -> None:
        """Nothing is held."""
