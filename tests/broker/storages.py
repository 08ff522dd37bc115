"""Storages of a broker under test: in memory, on a simulated disk, in a real directory.

Owns: `BrokerStorage` and its kinds, which outlive the broker that is opened on them, and the failing disks
`PartlyFailingFiles` and `FullDiskFiles`.
"""

import errno
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.broker.embedded import EmbeddedBroker
from penstock.logs.files.filesystem import Mode, SystemFiles
from penstock.logs.log import Buffer, Durability
from penstock.logs.memory import MemoryStore
from penstock.testing import SimulatedFiles


class BrokerStorage(ABC):
    """Storage that outlives a broker."""

    @abstractmethod
    def open(self, **options: Any) -> EmbeddedBroker:
        """Open the broker of this storage."""

    def kill(self) -> None:
        """End the broker's process without closing it."""
        return


class MemoryStorage(BrokerStorage):
    """Logs in memory, which a second broker finds."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def open(self, **options: Any) -> EmbeddedBroker:
        return EmbeddedBroker(self._store, **options)


class SimulatedStorage(BrokerStorage):
    """A simulated disk, which may fail."""

    def __init__(self, files: SimulatedFiles | None = None) -> None:
        self.files = files or SimulatedFiles()

    def open(self, **options: Any) -> EmbeddedBroker:
        return EmbeddedBroker.open("/data", files=self.files, **options)

    def kill(self) -> None:
        self.files.kill()


class FullDiskFiles(SystemFiles):
    """A real disk that writes only the first bytes of each write."""

    def write(self, handle: int, parts: Any) -> int:
        os.write(handle, b"some")
        raise OSError(errno.ENOSPC, "full")


class PartlyFailingFiles(SimulatedFiles):
    """A simulated disk on which chosen paths fail until a test ends that."""

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__(rng)
        self.failing_paths: set[str] = set()
        """Parts of paths where every change fails with EIO."""
        self.tried: list[str] = []
        """The calls that failed."""
        self._paths: dict[int, str] = {}

    def break_partition(self, number: int) -> None:
        self.failing_paths.add(f"/{number:05d}/")

    def _refuse(self, call: str, path: str) -> None:
        if any(part in path for part in self.failing_paths):
            self.tried.append(call)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def open(self, path: str, mode: Mode) -> int:
        if mode != "read":
            self._refuse("open", path)
        handle = super().open(path, mode)
        self._paths[handle] = path
        return handle

    def write(self, handle: int, parts: Sequence[Buffer]) -> int:
        self._refuse("write", self._paths[handle])
        return super().write(handle, parts)

    def pwrite(self, handle: int, data: Buffer, position: int) -> int:
        self._refuse("pwrite", self._paths.get(handle, ""))
        return super().pwrite(handle, data, position)

    def truncate(self, handle: int, size: int) -> None:
        self._refuse("truncate", self._paths.get(handle, ""))
        super().truncate(handle, size)

    def sync(self, handle: int) -> None:
        self._refuse("sync", self._paths.get(handle, ""))
        super().sync(handle)


class DirectoryStorage(BrokerStorage):
    """A real directory. Only one broker at a time: it cannot be killed (that is in test_kill.py)."""

    def __init__(self, path: Path, durability: Durability = "os") -> None:
        self._path = path / "data"
        self._durability: Durability = durability

    def open(self, **options: Any) -> EmbeddedBroker:
        return EmbeddedBroker.open(self._path, durability=self._durability, **options)


def partly_failing_disk(storage: BrokerStorage) -> PartlyFailingFiles:
    assert isinstance(storage, SimulatedStorage) and isinstance(storage.files, PartlyFailingFiles)
    return storage.files
