"""The store in files: one or more storage roots, and the partitions' logs inside them.

Owns: `FileStore`. Layout: `<root>/penstock.json`, `<root>/LOCK`,
`<root>/logs/<incarnation, 16 hex>/<partition, 5 digits>/`; the first root also has the inbox (inbox.py).
- All files of a partition are in one root. A new partition is created in the root that has the fewest partitions for
  its weight.
- Opening checks every root before it writes to any of them: a directory that is refused is not changed.
- A read-only store takes no lock and writes nothing.
- A forked child cannot use its parent's store: the child closes its copy when it starts.
"""

import os
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext, suppress

import msgspec

from penstock.logs.disk_threads import DiskThreads
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import Files, SystemFiles, read_file, storage_failed, sync_parents
from penstock.logs.files.inbox import FileInbox
from penstock.logs.files.lock import LOCK_ATTEMPTS, DirectoryLock, LockHolder, read_holder, take_lock
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.root import FORMAT, LOGS, Marker, Root, check_order, nearest, parse_roots, read_marker, root_id, write_marker
from penstock.logs.files.segment import LOG, LogId, parse_name
from penstock.logs.files.sidefiles import SYNCED, SyncedPosition, file_size, read_summary, unpack_synced
from penstock.logs.log import DURABILITIES, SEGMENT_BYTES, Durability
from penstock.logs.store import CATALOG, LogPosition
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, BrokerLocked, CorruptLog, InvalidRequest, QueueBusy, StorageFailed
from penstock.words.limits import check_range

MIN_FREE_BYTES = 1024 * 1024
"""A new root needs at least this much free space."""
BROKER_ID_BYTES = 8
MAX_NUMBER = 99_999
"""Highest number of a partition. It may exceed the number of partitions, because numbers are never reused."""


class FileStore:
    """The open storage roots of one broker."""

    def __init__(
        self, files: Files, roots: Sequence[Root], durability: Durability, segment_bytes: int, compression: bool, read_only: bool
    ) -> None:
        self.files = files
        self.roots = roots
        self.durability: Durability = durability
        self.segment_bytes = segment_bytes
        """The size at which the owner rotates a log."""
        self.compression = compression
        self.read_only = read_only
        self.broker_id = ""
        self.name = roots[0].path
        self.inbox = FileInbox(files, self.name)
        self.lock_attempts = LOCK_ATTEMPTS
        self.exclusive = True
        self.before_unlock: Callable[[], None] = lambda: None
        """Called while the locks are still held, when they are about to be released."""
        self._locks: list[DirectoryLock] = []
        self._roots_by_log: dict[LogId, Root] = {}
        self.absent_roots: list[str] = []
        """The roots that the broker once had and that were not given: their paths when they were last open."""
        self._logs: weakref.WeakSet[FileLog] = weakref.WeakSet()
        self._closed = False
        self.disk = DiskThreads(self.root_of)

    @classmethod
    def open(
        cls,
        roots: "str | os.PathLike[str] | Iterable[str | os.PathLike[str] | tuple[str | os.PathLike[str], float] | Root]",
        *,
        files: Files | None = None,
        durability: Durability = "fsync",
        segment_bytes: int = SEGMENT_BYTES,
        compression: bool = True,
        read_only: bool = False,
        clock: Clock | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        lock_attempts: int = LOCK_ATTEMPTS,
        exclusive: bool = True,
    ) -> "FileStore":
        """Open the storage roots, of which the first is the primary one; create those that do not exist."""
        parsed = parse_roots(roots)
        if durability not in DURABILITIES:
            raise InvalidRequest(f"durability is {durability!r}; use one of {', '.join(DURABILITIES)}")
        check_range("segment_bytes", segment_bytes, 1, 1 << 40)
        store = cls(files or SystemFiles(), parsed, durability, segment_bytes, compression, read_only)
        store.lock_attempts, store.exclusive = lock_attempts, exclusive
        store._open(clock or SystemClock(), entropy)
        _opened.add(store)
        return store

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> FileLog:
        """Return the log of a partition, not recovered yet. Creates the log if there is none and `create` is true."""
        self._check_open()
        if self.read_only:
            raise InvalidRequest(f"{self.roots[0].path} is open read-only; use reader(), or open it for writing")
        log_id = _log_id(incarnation, partition)
        if any(log.log_id == log_id and not log.closed for log in self._logs):
            raise BrokerLocked(f"{log_id} is open already in this process; close that log first")
        if log_id not in self._roots_by_log and not create:
            raise self._missing(log_id)
        root = self._roots_by_log.get(log_id) or (self.roots[0] if incarnation == CATALOG else self._root_for_new_log())
        path = _log_path(root, log_id)
        self._make_log_directory(path)
        self._roots_by_log[log_id] = root
        log = FileLog(self.files, path, *log_id, durability=durability or self.durability, compression=self.compression)
        self._logs.add(log)
        return log

    def create_logs(self, incarnation: int, *partitions: int) -> None:
        """Create the directories of new logs, durably: from then on a directory that is missing counts as damage."""
        self._check_open()
        created: dict[LogId, Root] = {}
        for partition in partitions:
            log_id = _log_id(incarnation, partition)
            if log_id not in self._roots_by_log:
                created[log_id] = self._root_for_new_log(created.values())
        try:
            for log_id, root in created.items():
                self.files.make_directory(_log_path(root, log_id))
            for root in set(created.values()):  # one sync of the parent directory makes all new names durable
                sync_parents(self.files, _log_path(root, LogId(incarnation, 0)))
        except OSError as error:
            raise storage_failed(error, "making logs of", f"{incarnation:016x}") from error
        self._roots_by_log.update(created)

    def remove_logs(self, incarnation: int) -> None:
        """Remove the logs of a deleted queue. Logs that do not exist are ignored."""
        self._check_open()
        for log_id in [log_id for log_id in [*self._roots_by_log] if log_id.incarnation == incarnation]:
            if any(log.log_id == log_id and not log.closed for log in self._logs):
                raise BrokerLocked(f"{log_id} is open; close that log before it is removed")
        try:
            for root in self.roots:
                _remove_tree(self.files, f"{root.path}/{LOGS}", f"{incarnation:016x}")
        except OSError as error:
            raise storage_failed(error, "removing", f"{incarnation:016x}") from error
        for log_id in [log_id for log_id in [*self._roots_by_log] if log_id.incarnation == incarnation]:
            self._roots_by_log.pop(log_id, None)

    def reader(self, incarnation: int, partition: int) -> PublishedLog:
        """Return a lock-free reader of a partition's log."""
        self._check_open()
        log_id = LogId(incarnation, partition)
        if log_id not in self._roots_by_log:
            self._reload()  # the owner may have created it since the last reload
        return PublishedLog(self.files, self.path_of(*log_id), *log_id)

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """The summary that was written when the log was closed.

        b"" if the log was never opened. None if the summary is missing or out of date: then the log must be opened.
        """
        log_id = LogId(incarnation, partition)
        if log_id not in self._roots_by_log:
            return None
        try:
            return read_summary(self.files, _log_path(self._roots_by_log[log_id], log_id))
        except OSError:
            return None

    @property
    def lock(self) -> DirectoryLock:
        """The lock of the primary root, which this process holds."""
        self._check_open()
        return self._locks[0]

    def owner(self) -> LockHolder | None:
        """The process that owns the broker, as it described itself; None when no process does."""
        return read_holder(self.files, self.name) if self.inbox.has_owner() else None

    def free_bytes(self) -> dict[int, int]:
        """Number of a storage root → its free space; without those that cannot be asked."""
        found = {}
        for number, root in enumerate(self.roots):
            with suppress(OSError):
                found[number] = self.files.free_bytes(root.path)
        return found

    def directories(self) -> list[str]:
        return [root.path for root in self.roots]

    def positions(self, incarnations: Container[int]) -> list[LogPosition]:
        self._check_open()
        opened = {log.log_id: log for log in list(self._logs) if not log.closed}
        found = []
        for log_id in sorted([*self._roots_by_log]):
            if log_id.incarnation in incarnations:
                log, directory = opened.get(log_id), self.path_of(*log_id)
                synced = log.synced if log is not None else None
                if log is not None and synced is None:
                    raise QueueBusy(f"partition {log_id.partition} of {log_id.incarnation:016x} is being opened; try again in a moment")
                found.append(_position(log_id, directory, synced) if synced is not None else self._closed_position(log_id, directory))
        return found

    def _closed_position(self, log_id: LogId, directory: str) -> LogPosition:
        """The end of a log that is not open. If its owner was killed, it may end after its published position."""
        try:
            names = sorted(name for name in map(parse_name, self.files.list(directory)) if name is not None)
            raw = read_file(self.files, f"{directory}/{SYNCED}") or b""
            if not names:
                return LogPosition(*log_id, directory, "", 0, raw)
            size, synced = file_size(self.files, f"{directory}/{names[-1]}{LOG}"), unpack_synced(raw)
        except OSError as error:
            raise storage_failed(error, "reading", directory) from error
        if synced is not None and (synced.segment, synced.position) == (names[-1], size):
            return _position(log_id, directory, synced)
        return LogPosition(*log_id, directory, str(names[-1]), size, raw)

    def note_opened(self) -> None:
        """The opening of the broker has ended, and not by the end of its process."""
        for lock in self._locks:
            lock.note_opened()

    def logs(self) -> list[LogId]:
        """Every log in the roots, sorted."""
        self._check_open()
        if self.read_only:
            self._reload()
        return sorted(self._roots_by_log)

    def incarnations(self) -> set[int]:
        return {log_id.incarnation for log_id in self.logs()}

    def root_of(self, incarnation: int, partition: int) -> Root | None:
        """The root that holds a partition's log; None if no root does."""
        return self._roots_by_log.get(LogId(incarnation, partition))

    def path_of(self, incarnation: int, partition: int) -> str:
        """The directory of a partition's log; CorruptLog if no root holds it."""
        log_id = LogId(incarnation, partition)
        if log_id not in self._roots_by_log:
            raise self._missing(log_id)
        return _log_path(self._roots_by_log[log_id], log_id)

    def close(self) -> None:
        """Close the logs that are still open, then release the locks: a process must not write without the locks."""
        self._closed = True
        self.disk.close()
        try:
            for log in list(self._logs):
                log.close()
        finally:
            self._unlock()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"FileStore({[root.path for root in self.roots]}, {state}, {len(self._roots_by_log)} logs)"

    # -- opening -------------------------------------------------------------------------------------

    def _open(self, clock: Clock, entropy: Callable[[int], bytes]) -> None:
        markers = [read_marker(self.files, root.path) for root in self.roots]
        broker_id = next((found.broker for found in markers if found is not None), "")
        self._check_roots(markers, broker_id)
        given = {found.root for found in markers if found is not None} | {root.path for root in self.roots}
        named = dict.fromkeys(root for found in markers if found is not None for root in found.roots)
        self.absent_roots = [path for id, path in named if id not in given and path not in given]
        self.broker_id = broker_id or ("" if self.read_only else entropy(BROKER_ID_BYTES).hex())
        try:
            if not self.read_only:
                self._lock_and_mark(markers, clock)
            self._roots_by_log = self._find_logs()
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise storage_failed(error, "opening", self.roots[0].path) from error
            raise

    def _check_roots(self, markers: Sequence[Marker | None], broker_id: str) -> None:
        check_order([root.path for root in self.roots], markers)
        for root, found in zip(self.roots, markers, strict=True):
            if found is not None and found.broker != broker_id:
                message = f"{root.path} belongs to another broker ({found.broker}, not {broker_id})"
                raise InvalidRequest(f"{message}; give each broker its own roots")
            if self.read_only and not self.files.exists(root.path):
                raise InvalidRequest(f"{root.path} does not exist; give a directory that does, or open it for writing")

    def _lock_and_mark(self, markers: Sequence[Marker | None], clock: Clock) -> None:
        new = [root for root, found in zip(self.roots, markers, strict=True) if found is None]
        for root in new:
            self._check_space(root)
            self.files.make_directory(root.path)
            sync_parents(self.files, root.path)
        for root in self.roots:
            self._locks.append(take_lock(self.files, root.path, clock, self.lock_attempts, self.exclusive))
        found = [read_marker(self.files, root.path) for root in self.roots]  # as they are under the locks
        self._check_roots(found, self.broker_id)
        self._write_markers([marker or Marker(self.broker_id, clock.read().wall) for marker in found])

    def _write_markers(self, markers: Sequence[Marker]) -> None:
        """Write the markers that are missing, older, or do not name the roots as they are now."""
        paths = [root.path for root in self.roots]
        ids = [marker.root or root_id(marker, path) for marker, path in zip(markers, paths, strict=True)]
        absent = {id: path for marker in markers for id, path in marker.roots if id not in ids and path not in paths}
        roots = (*zip(ids, paths, strict=True), *absent.items())
        for path, id, marker in zip(paths, ids, markers, strict=True):
            if marker.format < FORMAT or (marker.root, marker.roots) != (id, roots):
                # a full disk must not keep a broker closed only because its roots cannot be noted
                with nullcontext() if marker.format < FORMAT else suppress(OSError):
                    write_marker(self.files, path, marker._replace(root=id, roots=roots))
        self.absent_roots = [*absent.values()]

    def _check_space(self, root: Root) -> None:
        if self.files.free_bytes(nearest(self.files, root.path)) < MIN_FREE_BYTES:
            raise StorageFailed(f"the disk under {root.path} is full; free some space, then open it again")

    def _reload(self) -> None:
        try:
            self._roots_by_log = self._find_logs()
        except OSError as error:
            raise storage_failed(error, "reading", self.name) from error

    def _find_logs(self) -> dict[LogId, Root]:
        found: dict[LogId, Root] = {}
        for root in self.roots:
            for log_id in _log_ids(self.files, f"{root.path}/{LOGS}"):
                if log_id in found:
                    raise CorruptLog(f"{log_id} is in both {found[log_id].path} and {root.path}; move the older copy away")
                found[log_id] = root
        return found

    # -- new logs ------------------------------------------------------------------------------------

    def _make_log_directory(self, path: str) -> None:
        """Create a log's directory and make its name durable. One that has files was synced when it was created."""
        try:
            self.files.make_directory(path)
            if not self.files.list(path):
                sync_parents(self.files, path)
        except OSError as error:
            raise storage_failed(error, "making", path) from error

    def _missing(self, log_id: LogId) -> CorruptLog:
        absent = f" (the broker also had {', '.join(self.absent_roots)})" if self.absent_roots else ""
        looked, name = ", ".join(root.path for root in self.roots), "the catalog" if log_id.incarnation == CATALOG else str(log_id)
        return CorruptLog(f"{name} has no log in {looked}; add the storage root that holds it{absent}")

    def _root_for_new_log(self, more: Iterable[Root] = ()) -> Root:
        """The writable root with the fewest logs for its weight; `more` are roots that get one more log each."""
        writable = [root for root in self.roots if not root.read_only]
        if not writable:
            raise StorageFailed("every storage root is read-only; add one that takes new partitions")
        if len(writable) == 1:
            return writable[0]
        used = [*self._roots_by_log.values(), *more]
        return min(writable, key=lambda root: (used.count(root) + 1) / root.weight)

    # -- closing -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed(f"the directory {self.roots[0].path} is closed here (or was opened before a fork); open it again")

    def _unlock(self) -> None:
        if self._locks:
            self.before_unlock()
        while self._locks:
            self._locks.pop().release()

    def _abandon(self) -> None:
        """Close the store in a forked child. Its copies of the locks are closed already (words/forks.py)."""
        self._closed = True
        self._locks.clear()
        for log in list(self._logs):
            with suppress(BaseException):  # there is no caller to raise to, and the remaining logs must be closed
                log.close_without_sync()


_opened: "weakref.WeakSet[FileStore]" = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_opened):
        store._abandon()


os.register_at_fork(after_in_child=_after_fork)


def _position(log_id: LogId, directory: str, synced: SyncedPosition) -> LogPosition:
    """The position of a log that ends where it is synced. A copy of it is synced by fsync in every durability mode."""
    copied = msgspec.structs.replace(synced, durability="fsync").pack()
    return LogPosition(*log_id, directory, str(synced.segment), synced.position, copied, synced.offset, synced.sequence)


def _log_id(incarnation: int, partition: int) -> LogId:
    """The id of a log; InvalidRequest if a number is out of range."""
    return LogId(check_range("incarnation", incarnation, 0, (1 << 64) - 1), check_range("partition", partition, 0, MAX_NUMBER))


def _log_ids(files: Files, path: str) -> Iterable[LogId]:
    for incarnation in files.list(path) if files.exists(path) else []:
        if incarnation.startswith("."):  # a file of the desktop, such as .DS_Store
            continue
        for partition in files.list(f"{path}/{incarnation}"):
            try:
                yield LogId(int(incarnation, 16), int(partition))
            except ValueError:
                raise CorruptLog(f"{path}/{incarnation}/{partition} is not the directory of a log; move it away") from None


def _remove_tree(files: Files, parent: str, name: str) -> None:
    """Remove a queue's directory: its partitions and their files. There are no deeper levels."""
    path = f"{parent}/{name}"
    if not files.exists(path):
        return
    for partition in files.list(path):
        for name in files.list(f"{path}/{partition}"):
            files.remove(f"{path}/{partition}/{name}")
        files.remove_directory(f"{path}/{partition}")
    files.remove_directory(path)
    files.sync_directory(parent)


def _log_path(root: Root, log_id: LogId) -> str:
    return f"{root.path}/{LOGS}/{log_id.incarnation:016x}/{log_id.partition:05d}"
