"""Opens the store that a target names: memory, or one or more directories.

Owns: `open_store`, `open_read_only` and `holds_broker`; only these choose between the kinds of store.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from penstock.logs.files.backup import BackupManifest, BackupWriter, PinnedFiles, read_manifest
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import Files, SystemFiles
from penstock.logs.files.lock import LOCK_ATTEMPTS, LockHolder, read_holder
from penstock.logs.files.restore import RestoreTarget
from penstock.logs.files.root import LOGS, Root, parse_roots, read_marker
from penstock.logs.log import DURABILITIES, Durability
from penstock.logs.memory import MemoryStore
from penstock.logs.store import CATALOG, ReadStore, Store
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest, PenstockError

__all__ = [
    "MEMORY",
    "BackupManifest",
    "BackupWriter",
    "FileStore",
    "Files",
    "LockHolder",
    "PinnedFiles",
    "RestoreTarget",
    "Root",
    "Target",
    "directories",
    "holder_of",
    "holds_broker",
    "open_directory",
    "open_read_only",
    "open_store",
    "parse_roots",
    "read_manifest",
]
MEMORY = "memory://"
Target: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Root]"


def open_store(
    target: Target,
    files: Files | None,
    durability: Durability,
    segment_bytes: int,
    compression: bool,
    clock: Clock,
    entropy: Callable[[int], bytes],
) -> Store:
    """Open a store as its owner; it is created when it does not exist."""
    if durability not in DURABILITIES:
        raise InvalidRequest(f"durability is {durability!r}; use one of {', '.join(DURABILITIES)}")
    if target == MEMORY:
        return MemoryStore()
    return open_directory(target, files, durability, segment_bytes, compression, clock, entropy)


def open_directory(
    target: Target,
    files: Files | None,
    durability: Durability,
    segment_bytes: int,
    compression: bool,
    clock: Clock,
    entropy: Callable[[int], bytes],
    lock_attempts: int = LOCK_ATTEMPTS,
    exclusive: bool = True,
) -> FileStore:
    """Open one or more directories as their owner. BrokerLocked when another process is it."""
    directory = FileStore.open(
        target,
        files=files,
        durability=durability,
        segment_bytes=segment_bytes,
        compression=compression,
        clock=clock,
        entropy=entropy,
        lock_attempts=lock_attempts,
        exclusive=exclusive,
    )
    try:
        _check_catalog(directory)
    except PenstockError:
        directory.close()
        raise
    return directory


def _check_catalog(directory: FileStore) -> None:
    """Raise if the catalog is missing in a directory that is not new. It must not be created again: its queues would
    be lost.
    """
    logs, absent = directory.logs(), directory.absent_roots
    if (CATALOG, CATALOG) in logs or not (logs or absent):
        return
    if absent:  # an earlier version could put the catalog into a further root
        raise InvalidRequest(
            f"the catalog of the broker in {directory.name} is in a storage root that was not given; "
            f"give all its roots: it also had {', '.join(absent)}"
        )
    raise InvalidRequest(
        f"{directory.name} holds partitions of a broker without its catalog; if the broker has several storage roots, give all of them, "
        "the first one first; else restore the directory from a backup"
    )


def open_read_only(target: Target, files: Files | None = None) -> ReadStore:
    """Open a store without owning it; another process may own it at the same time."""
    if target == MEMORY:
        raise InvalidRequest(f"{MEMORY!r} is visible only to the process that opened it; give a directory")
    directory = FileStore.open(target, files=files, read_only=True)
    if not directory.broker_id:
        raise InvalidRequest(f"{directory.name} is no broker's directory; give one that a broker was opened in")
    return directory


def directories(target: Target) -> list[str]:
    """The absolute paths of the directories that a target names; the first is the primary root."""
    return [root.path for root in parse_roots(target)]


def holder_of(directory: str) -> LockHolder | None:
    """The process that owns or last owned a directory, as it described itself; None when that is not known."""
    return read_holder(SystemFiles(), directory)


def holds_broker(directory: str, *, may_be_foreign: bool = False) -> bool:
    """Whether this directory contains a broker. One with other files is refused, unless it `may_be_foreign`."""
    files = SystemFiles()
    return read_marker(files, os.path.abspath(directory), may_be_foreign=may_be_foreign) is not None or files.exists(f"{directory}/{LOGS}")
