"""What the tests of logs share: where each backend keeps its logs, drafts to append, and frames in a form that can be compared.

Owns: `Home` (a place that outlives a log; one subclass a backend), `HOMES` (every backend that must conform), `draft` and `told`.
A backend joins by a subclass of `Home` and a line in `HOMES`.
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
    """A frame with its body as bytes: two frames are the same when these are equal."""

    type: FrameType
    sequence: int
    base: int
    count: int  # type: ignore[assignment]  # the word of the format; tuple.count is not missed
    columns: int
    elapsed: int
    wall: int
    body: bytes


def comparable(frames: Iterable[Frame | Gap]) -> list[ComparableFrame]:
    """Frames to compare. A Gap fails the test: these are for logs that nothing has happened to."""
    found = list(frames)
    gaps = [frame for frame in found if isinstance(frame, Gap)]
    assert gaps == []
    return [ComparableFrame(*frame[:-1], bytes(frame[-1])) for frame in found if isinstance(frame, Frame)]


def expected(drafts: Iterable[Draft], first_sequence: int = 1) -> list[ComparableFrame]:
    """What must be read back when these were appended."""
    return [
        ComparableFrame(draft[0], sequence, *draft[1:-1], b"".join(draft.parts)) for sequence, draft in enumerate(drafts, first_sequence)
    ]


def draft(base: int, count: int = 1, *parts: Buffer, type: FrameType = FrameType.DATA) -> Draft:
    """A draft whose fields all differ from each other, so that a mix-up shows."""
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
    """Where a backend's logs live."""

    @abstractmethod
    def open(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        """Open a log, made when missing; the caller recovers."""

    @abstractmethod
    def reopen(self, log: Log) -> Log:
        """End the log's owner without a word, and open it anew; what was synced is there. The caller recovers."""

    def start(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        """Open a log and recover it: it takes appends."""
        log = self.open(incarnation, partition)
        list(log.recover())
        return log


class MemoryLogBackend(LogBackend):
    """Lists, handed from one owner of a log to the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[Frame]] = {}

    def open(self, incarnation: int = INCARNATION, partition: int = PARTITION) -> Log:
        return MemoryLog(incarnation, partition, self._kept.setdefault((incarnation, partition), []))

    def reopen(self, log: Log) -> Log:
        return self.open(log.incarnation, log.partition)


class FileLogBackend(LogBackend):
    """A directory, on any `Files`."""

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
