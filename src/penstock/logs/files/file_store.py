"""A broker's storage: one or more root directories, locked and marked, and the partitions' logs inside them.

Owns: `FileStore`. Layout: `<root>/penstock.json`, `<root>/LOCK`, `<root>/logs/<incarnation, 16 hex>/<partition, 5 digits>/`;
in the first root also the inbox (inbox.py).
A partition lies wholly in one root and is found wherever it lies; a new one goes where weight says there is most room.
Every root is looked at before anything is written to any: a refused directory is left as it was.
A read-only directory takes no lock and writes nothing. A forked child cannot use its parent's: it lets go of it when it starts.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from penstock.logs.disk_threads import DiskThreads
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import Files, SystemFiles, storage_failed, sync_parents
from penstock.logs.files.inbox import FileInbox
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.root import LOGS, Marker, Root, nearest, parse_roots, read_marker, take_lock, write_marker
from penstock.logs.files.segment import LogId
from penstock.logs.files.sidefiles import read_summary
from penstock.logs.log import DURABILITIES, SEGMENT_BYTES, Durability
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, BrokerLocked, CorruptLog, InvalidRequest, StorageFailed
from penstock.words.limits import check_range

MIN_FREE_BYTES = 1024 * 1024
"""A new root is not begun with less space than this."""
BROKER_ID_BYTES = 8
MAX_NUMBER = 99_999
"""Highest number of a partition: numbers are never reused, so there may be more of them than partitions."""


class FileStore:
    """A broker's storage roots, open."""

    def __init__(
        self, files: Files, roots: Sequence[Root], durability: Durability, segment_bytes: int, compression: bool, read_only: bool
    ) -> None:
        self.files = files
        self.roots = roots
        self.durability: Durability = durability
        self.segment_bytes = segment_bytes
        """The size at which an owner rotates."""
        self.compression = compression
        self.read_only = read_only
        self.broker_id = ""
        self.name = roots[0].path
        self.inbox = FileInbox(files, self.name)
        self._locks: list[int] = []
        self._places: dict[LogId, Root] = {}
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
    ) -> "FileStore":
        """Open storage roots, the first being the primary one; make them when they are new."""
        found = parse_roots(roots)
        if durability not in DURABILITIES:
            raise InvalidRequest(f"durability is {durability!r}; use one of {', '.join(DURABILITIES)}")
        check_range("segment_bytes", segment_bytes, 1, 1 << 40)
        directory = cls(files or SystemFiles(), found, durability, segment_bytes, compression, read_only)
        directory._open(clock or SystemClock(), entropy)
        _opened.add(directory)
        return directory

    def log(self, incarnation: int, partition: int, create: bool = True, durability: Durability | None = None) -> FileLog:
        """The log of a partition, to be recovered; a new one when there is none and `create` is set."""
        self._usable()
        if self.read_only:
            raise InvalidRequest(f"{self.roots[0].path} is open read-only; use reader(), or open it for writing")
        owner = _owner(incarnation, partition)
        if any(log.log_id == owner and not log.closed for log in self._logs):
            raise BrokerLocked(f"{owner} is open already in this process; close that log first")
        if owner not in self._places and not create:
            raise _missing(owner, self.roots)
        root = self._places.get(owner) or self._roomiest()
        path = _log_path(root, owner)
        self._make(path)
        self._places[owner] = root
        log = FileLog(self.files, path, *owner, durability=durability or self.durability, compression=self.compression)
        self._logs.add(log)
        return log

    def create_logs(self, incarnation: int, *partitions: int) -> None:
        """Make the places of new logs, durably, so that they are missed when they are not there."""
        self._usable()
        made: dict[LogId, Root] = {}
        for partition in partitions:
            owner = _owner(incarnation, partition)
            if owner not in self._places:
                made[owner] = self._roomiest(made.values())
        try:
            for owner, root in made.items():
                self.files.make_directory(_log_path(root, owner))
            for root in set(made.values()):  # the names of all of them last when the directory that they are in is synced
                sync_parents(self.files, _log_path(root, LogId(incarnation, 0)))
        except OSError as error:
            raise storage_failed(error, "making logs of", f"{incarnation:016x}") from error
        self._places.update(made)

    def remove_logs(self, incarnation: int) -> None:
        """Remove the logs of a queue that is no more; those that are gone already do not matter."""
        self._usable()
        for owner in [owner for owner in [*self._places] if owner.incarnation == incarnation]:
            if any(log.log_id == owner and not log.closed for log in self._logs):
                raise BrokerLocked(f"{owner} is open; close that log before it is removed")
        try:
            for root in self.roots:
                _remove_tree(self.files, f"{root.path}/{LOGS}", f"{incarnation:016x}")
        except OSError as error:
            raise storage_failed(error, "removing", f"{incarnation:016x}") from error
        for owner in [owner for owner in [*self._places] if owner.incarnation == incarnation]:
            self._places.pop(owner, None)

    def reader(self, incarnation: int, partition: int) -> PublishedLog:
        """A lock-free reader of a partition."""
        self._usable()
        owner = LogId(incarnation, partition)
        if owner not in self._places:
            self._look_again()  # the owner may have made it since
        return PublishedLog(self.files, self.path_of(*owner), *owner)

    def summary(self, incarnation: int, partition: int) -> bytes | None:
        """What was left of a log when it was closed; b"" when it was never opened; None when it must be opened to know anything of it."""
        owner = LogId(incarnation, partition)
        if owner not in self._places:
            return None
        try:
            return read_summary(self.files, _log_path(self._places[owner], owner))
        except OSError:
            return None

    def logs(self) -> list[LogId]:
        """Every partition that has a log here, in order."""
        self._usable()
        if self.read_only:
            self._look_again()
        return sorted(self._places)

    def incarnations(self) -> set[int]:
        return {owner.incarnation for owner in self.logs()}

    def root_of(self, incarnation: int, partition: int) -> Root | None:
        """Where a partition lies."""
        return self._places.get(LogId(incarnation, partition))

    def path_of(self, incarnation: int, partition: int) -> str:
        """The directory of a partition's log, which must be here."""
        owner = LogId(incarnation, partition)
        if owner not in self._places:
            raise _missing(owner, self.roots)
        return _log_path(self._places[owner], owner)

    def close(self) -> None:
        """Close the logs that are still open, then give up the locks: nobody may write without them."""
        self._closed = True
        self.disk.close()
        try:
            for log in list(self._logs):
                log.close()
        finally:
            self._unlock()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"Directory({[root.path for root in self.roots]}, {state}, {len(self._places)} logs)"

    # -- opening -------------------------------------------------------------------------------------

    def _open(self, clock: Clock, entropy: Callable[[int], bytes]) -> None:
        markers = [read_marker(self.files, root.path) for root in self.roots]
        broker_id = next((found.broker for found in markers if found is not None), "")
        self._refuse_strangers(markers, broker_id)
        self.broker_id = broker_id or ("" if self.read_only else entropy(BROKER_ID_BYTES).hex())
        try:
            if not self.read_only:
                self._lock_and_mark(markers, clock)
            self._places = self._survey()
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise storage_failed(error, "opening", self.roots[0].path) from error
            raise

    def _refuse_strangers(self, markers: Sequence[Marker | None], broker_id: str) -> None:
        for root, found in zip(self.roots, markers, strict=True):
            if found is not None and found.broker != broker_id:
                message = f"{root.path} belongs to another broker ({found.broker}, not {broker_id})"
                raise InvalidRequest(f"{message}; give each broker its own roots")
            if self.read_only and not self.files.exists(root.path):
                raise InvalidRequest(f"{root.path} does not exist; give a directory that does, or open it for writing")

    def _lock_and_mark(self, markers: Sequence[Marker | None], clock: Clock) -> None:
        new = [root for root, found in zip(self.roots, markers, strict=True) if found is None]
        for root in new:
            self._refuse_full(root)
            self.files.make_directory(root.path)
            sync_parents(self.files, root.path)
        for root in self.roots:
            self._locks.append(take_lock(self.files, root.path, clock))
        for root in new:
            write_marker(self.files, root.path, Marker(self.broker_id, clock.read().wall))

    def _refuse_full(self, root: Root) -> None:
        if self.files.free_bytes(nearest(self.files, root.path)) < MIN_FREE_BYTES:
            raise StorageFailed(f"the disk under {root.path} is full; free some space, then open it again")

    def _look_again(self) -> None:
        try:
            self._places = self._survey()
        except OSError as error:
            raise storage_failed(error, "reading", self.name) from error

    def _survey(self) -> dict[LogId, Root]:
        places: dict[LogId, Root] = {}
        for root in self.roots:
            for owner in _owners(self.files, f"{root.path}/{LOGS}"):
                if owner in places:
                    raise CorruptLog(f"{owner} lies in both {places[owner].path} and {root.path}; move the older copy away")
                places[owner] = root
        return places

    # -- placing -------------------------------------------------------------------------------------

    def _make(self, path: str) -> None:
        """Make a log's directory and see to it that its name lasts, unless there is a log in it: then that was done before."""
        try:
            self.files.make_directory(path)
            if not self.files.list(path):
                sync_parents(self.files, path)
        except OSError as error:
            raise storage_failed(error, "making", path) from error

    def _roomiest(self, more: Iterable[Root] = ()) -> Root:
        """The root for a new partition, when these are to have one more each."""
        takers = [root for root in self.roots if not root.read_only]
        if not takers:
            raise StorageFailed("every storage root is read-only; add one that takes new partitions")
        if len(takers) == 1:
            return takers[0]
        held = [*self._places.values(), *more]
        return min(takers, key=lambda root: (held.count(root) + 1) / root.weight)

    # -- letting go ----------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._closed:
            raise BrokerClosed(f"the directory {self.roots[0].path} is closed here (or was opened before a fork); open it again")

    def _unlock(self) -> None:
        while self._locks:
            self.files.close(self._locks.pop())

    def _abandon(self) -> None:
        """In a forked child: a copy of the lock's handle would keep the directory locked after its parent's death."""
        self._closed = True
        try:
            for log in list(self._logs):
                log.close_without_sync()
        finally:
            self._unlock()


_opened: "weakref.WeakSet[FileStore]" = weakref.WeakSet()


def _after_fork() -> None:
    for directory in list(_opened):
        with suppress(BaseException):  # nobody could be told of it, and the others must be let go of all the same
            directory._abandon()


os.register_at_fork(after_in_child=_after_fork)


def _owner(incarnation: int, partition: int) -> LogId:
    """Whose log it is, or what is wrong with the numbers."""
    return LogId(check_range("incarnation", incarnation, 0, (1 << 64) - 1), check_range("partition", partition, 0, MAX_NUMBER))


def _owners(files: Files, path: str) -> Iterable[LogId]:
    for incarnation in files.list(path) if files.exists(path) else []:
        if incarnation.startswith("."):  # a desktop's own files
            continue
        for partition in files.list(f"{path}/{incarnation}"):
            try:
                yield LogId(int(incarnation, 16), int(partition))
            except ValueError:
                raise CorruptLog(f"{path}/{incarnation}/{partition} is not the directory of a log; move it away") from None


def _remove_tree(files: Files, parent: str, name: str) -> None:
    """A queue's directory, for good: partitions with their files, and nothing deeper."""
    path = f"{parent}/{name}"
    if not files.exists(path):
        return
    for partition in files.list(path):
        for name in files.list(f"{path}/{partition}"):
            files.remove(f"{path}/{partition}/{name}")
        files.remove_directory(f"{path}/{partition}")
    files.remove_directory(path)
    files.sync_directory(parent)


def _log_path(root: Root, owner: LogId) -> str:
    return f"{root.path}/{LOGS}/{owner.incarnation:016x}/{owner.partition:05d}"


def _missing(owner: LogId, roots: Sequence[Root]) -> CorruptLog:
    return CorruptLog(f"{owner} has no log in {', '.join(root.path for root in roots)}; add the storage root that holds it")
