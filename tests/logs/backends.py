"""Shared by the tests of logs: the backends, drafts to append, and frames that can be compared.

Owns: `LogBackend` (one subclass per kind of log), `LOG_BACKENDS` (every backend that the shared tests run on), `draft`,
`comparable` and `expected`. A new backend needs a subclass of `LogBackend` and a line in `LOG_BACKENDS`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import Files, SystemFiles
from penstock.logs.log import Buffer, Draft, Frame, FrameType, Gap, Log
from penstock.logs.memory import MemoryLog
from penstock.testing import SimulatedFiles

INCARNATION = 0x0123_4567_89AB_CDEF
PARTITION = 7


class ComparableFrame(NamedTuple):
    """A frame with its body as bytes, so that frames can be compared."""

    type: FrameType
    sequence: int
    base: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    columns: int
    elapsed: int
    wall: int
    body: bytes


def comparable(frames: Iterable[Frame | Gap]) -> list[ComparableFrame]:
    """Frames that can be compared. A Gap fails the test."""
    found = list(frames)
    gaps = [frame for frame in found if isinstance(frame, Gap)]
    assert gaps == []
    return [ComparableFrame(*frame[:-1], bytes(frame[-1])) for frame in found if isinstance(frame, Frame)]


def expected(drafts: Iterable[Draft], first_sequence: int = 1) -> list[ComparableFrame]:
    """The frames that must be read after these drafts were appended."""
    return [
        ComparableFrame(draft[0], sequence, *draft[1:-1], b"".join(draft.parts)) for sequence, draft in enumerate(drafts, first_sequence)
    ]


def draft(base: int, count: int = 1, *parts: Buffer, type: FrameType = FrameType.DATA) -> Draft:
    """A draft whose fields all differ, so that a test finds mixed-up fields."""
    columns = 0x80 + count if type is FrameType.DATA else 0
    return Draft(type, base, count, columns, 1_000_000 + base, 1_767_225_600_000_000 + base, parts)


def base_draft(base: int, body: bytes = b"the whole state") -> Draft:
    return draft(base, 1, body, type=FrameType.BASE)


def state_draft(base: int, body: bytes = b"what happened") -> Draft:
    return draft(base, 2, body, type=FrameType.STATE)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


class LogBackend(ABC):
    """Opens logs of one kind. Logs can be opened again while the backend exists."""

    @abstractmethod
    def open(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        """Open a log, created when missing. The caller recovers it."""

    @abstractmethod
    def reopen(self, log: Log) -> Log:
        """Open a log again as if its owner had been killed. The caller recovers it."""

    def start(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        """Open a log and recover it, so that it accepts appends."""
        log = self.open(incarnation, partition)
        list(log.recover())
        return log


class MemoryLogBackend(LogBackend):
    """Logs in memory; a reopened log gets the same list."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Frame]] = {}

    def open(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        return MemoryLog(incarnation, partition, self._kept.setdefault((incarnation, partition), []))

    def reopen(self, log: Log) -> Log:
        return self.open(log.incarnation, log.partition)


class FileLogBackend(LogBackend):
    """Logs in a directory of any `Files`."""

    def __init__(self, root: str, files: Files) -> None:
        self.files = files
        self._root = root
        self._directory = FileStore.open([root], files=files)

    def open(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        return self._directory.log(incarnation, partition)

    def reopen(self, log: Log) -> Log:
        if isinstance(log, FileLog):
            log.close_without_sync()
        self._directory.close()
        self._directory = FileStore.open([self._root], files=self.files)
        return self.open(log.incarnation, log.partition)


LOG_BACKENDS: dict[str, Callable[[Path], LogBackend]] = {
    "memory": lambda path: MemoryLogBackend(),
    "files": lambda path: FileLogBackend(str(path / "data"), SystemFiles()),
    "simulated files": lambda path: FileLogBackend("/data", SimulatedFiles()),
}


def append_all(log: Log, groups: Sequence[Sequence[Draft]]) -> None:
    for group in groups:
        log.append(group)
