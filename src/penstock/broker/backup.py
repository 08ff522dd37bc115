"""Backups of a broker's directory, and their restore.

Owns: `backup`, which copies the files of a broker that may be in use by any number of processes, and `restore`, which
makes a broker of such a copy. The owner of the directory only says where its logs end (`CutLogs`); the files are copied
by the process that makes the backup (logs/files/backup.py has the order, broker/backup_point.py the instant).
A restored broker keeps the incarnations of its queues, and is kept apart from the original by its offsets and lease
numbers (rules/restore.py, ADR 25).
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from threading import Event
from typing import Any, Protocol, TypeAlias

import msgspec

from penstock.broker.shared import join_shared
from penstock.broker.targets import MIN_FREE_BYTES, OPEN_WAIT, checked_target, is_url, open_local
from penstock.logs.backends import MEMORY, BackupManifest, BackupWriter, PinnedFiles, RestoreTarget, Root, directories, read_manifest
from penstock.logs.log import SEGMENT_BYTES
from penstock.logs.store import CATALOG
from penstock.loop.catalog import Catalog
from penstock.loop.partition import Partition
from penstock.loop.restored_partition import keep_apart
from penstock.operations import CutLogs, Home
from penstock.reports import BackupPoint
from penstock.rules.catalog import QueueEntry, QueueRestored, RestorePoint
from penstock.rules.restore import draw_first_lease
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError, QueueBusy

CUTS = 20
"""How often the instant is chosen anew, because retention removed files at the same time."""
BUSY_SECONDS = 0.05
BUSY_TIMEOUT = 60 * SECOND
"""How long to wait for partitions that are being opened."""
_OPTIONS: dict[str, Any] = {
    "durability": "fsync",
    "min_free_bytes": MIN_FREE_BYTES,
    "segment_bytes": SEGMENT_BYTES,
    "compression": True,
    "entropy": os.urandom,
}
"""How the broker is opened if no other process has it open: as `penstock.open` does."""
_log = logging.getLogger("penstock")
Path: TypeAlias = str | os.PathLike[str]
Progress: TypeAlias = Callable[[int], None]


class OpenBroker(Protocol):
    """A broker of the API."""

    @property
    def home(self) -> Home: ...


class BackupReport(msgspec.Struct, frozen=True):
    """What a backup consists of."""

    path: str
    cut_at: int
    """The instant of the backup (wall microseconds)."""
    logs: int
    files: int
    size_bytes: int
    linked_bytes: int
    """How much of it is shared with the previous backup."""
    writes: int
    """Published writes that no log has yet."""


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore did."""

    path: str
    cut_at: int
    """The instant of the backup (wall microseconds)."""
    queues: int
    partitions: int
    size_bytes: int
    returned: int
    """Items that were leased at the instant of the backup, and are ready again."""
    failed: list[str]
    """Partitions that do not open, with the reason; they do not open in the restored broker either."""


# -- backup --------------------------------------------------------------------------------------------


def backup(
    source: "Path | OpenBroker", target: Path, *, roots: Sequence[Path | Root] | None = None, previous: Path | None = None
) -> BackupReport:
    """Back up a broker into a new directory, while it is used.

    source: its directory, or the open broker (needed if this process opened it with exclusive=True).
    roots: its other storage roots.
    previous: an earlier backup on the same file system. Segments that are complete in it are linked, not copied.

    The backup has everything that was answered before the call, and is as of one instant. A backup that was cut off is
    refused by `restore`, and begun anew by the next call with this target.
    """
    return run_backup(source, target, roots=roots, previous=previous)


def run_backup(
    source: "Path | OpenBroker",
    target: Path,
    *,
    roots: Sequence[Path | Root] | None = None,
    previous: Path | None = None,
    wait: int = OPEN_WAIT,
    copied: Progress = lambda size: None,
) -> BackupReport:
    """As `backup`. copied: called with the size of each file that was copied, and of each that was read back."""
    if isinstance(source, str | os.PathLike):
        found = _directory(source, roots)
        home = join_shared(found) or open_local(source, roots=roots, wait=wait, **_OPTIONS)
        held: Any = closing(home)
    else:
        home = source.home
        held = nullcontext()
    with held:
        path = _outside(_new_directory(target), _cut(home).roots)
        return _write_backup(home, path, None if previous is None else os.path.expanduser(os.fspath(previous)), copied)


def _write_backup(home: Home, target: str, previous: str | None, copied: Progress) -> BackupReport:
    with BackupWriter(target, previous) as writer:
        point, pinned = _pinned_point(home)
        with pinned:
            logs = [writer.copy_log(log, pinned.logs[log.directory], copied) for log in point.logs]
            for write in point.writes:
                writer.copy_write(write, pinned.writes[write])
            writer.copy_keys(point.roots[0])
        manifest = writer.finish(point.at, logs, copied)
        linked = writer.linked_bytes
    _log.info("%s was backed up to %s, %d bytes", point.roots[0], writer.target, manifest.size_bytes)
    return BackupReport(writer.target, point.at, len(logs), len(manifest.files), manifest.size_bytes, linked, len(point.writes))


def _directory(source: Path, roots: Sequence[Path | Root] | None) -> Any:
    if is_url(source) or source == MEMORY:
        raise InvalidRequest(f"{os.fspath(source)!r} has no files here; back up the directory of the broker, on the machine of its server")
    found = checked_target(source, roots)
    missing = next((path for path in directories(found) if not os.path.isdir(path)), None)
    if missing is not None:
        raise InvalidRequest(f"{missing} does not exist; give the directory of a broker")
    return found


def _new_directory(target: Path) -> str:
    path = os.fspath(target)
    if not isinstance(path, str) or not path or "\0" in path or "://" in path:
        raise InvalidRequest(f"the target of a backup is {target!r:.200}; give the path of a new directory")
    return os.path.expanduser(path)


def _outside(target: str, roots: Sequence[str]) -> str:
    """The target; InvalidRequest if it is inside a storage root."""
    for root in roots:
        if os.path.commonpath([os.path.realpath(root), os.path.realpath(target)]) == os.path.realpath(root):
            raise InvalidRequest(f"{target} is inside {root}, which is to be backed up; give a directory elsewhere")
    return target


def _pinned_point(home: Home) -> tuple[BackupPoint, PinnedFiles]:
    """An instant, and the open files of everything that a backup of it needs."""
    for _ in range(CUTS):
        pinned = PinnedFiles(_cut(home).roots)
        try:
            point = _cut(home)
            if pinned.pin_cut(point.logs, point.writes):
                return point, pinned
        except BaseException:
            pinned.close()
            raise
        pinned.close()
    raise QueueBusy("files are removed faster than they can be opened; back up again when retention is less busy")


def _cut(home: Home) -> BackupPoint:
    """The instant of the backup; waits while a partition is being opened."""
    clock = SystemClock()
    deadline = clock.read().elapsed + BUSY_TIMEOUT
    while True:
        try:
            return home.call(CutLogs())
        except QueueBusy:
            if clock.read().elapsed > deadline:
                raise
            Event().wait(BUSY_SECONDS)


# -- restore -------------------------------------------------------------------------------------------


def restore(backup: Path, directory: Path, *, roots: Sequence[Path | Root] | None = None) -> RestoreReport:
    """Make a broker of a backup, in a new directory, with these further storage roots.

    Nobody may use the directory meanwhile. A restore that was cut off leaves a directory that cannot be opened, and is
    begun anew by the next call.
    """
    return run_restore(backup, directory, roots=roots)


def run_restore(
    backup: Path,
    directory: Path,
    *,
    roots: Sequence[Path | Root] | None = None,
    clock: Clock | None = None,
    entropy: Callable[[int], bytes] = os.urandom,
    copied: Progress = lambda size: None,
) -> RestoreReport:
    """As `restore`. copied: called with the size of each piece that was copied."""
    source = os.path.abspath(os.path.expanduser(os.fspath(backup)))
    manifest = read_manifest(source)
    paths = [_new_directory(directory), *(roots or ())]
    clock = clock or SystemClock()
    with RestoreTarget(paths) as target:
        target.copy(source, manifest, copied)
        report = _keep_apart(target, manifest, clock, entropy)
        target.finish()
    _log.info("%s was restored from the backup %s", target.roots[0].path, source)
    return report


def _keep_apart(target: RestoreTarget, manifest: BackupManifest, clock: Clock, entropy: Callable[[int], bytes]) -> RestoreReport:
    """Record the restore in the catalog, and open every partition once, which applies it there."""
    store = target.store
    catalog = Catalog(store.log(CATALOG, CATALOG, create=False), clock)
    try:
        at = clock.read().wall
        for entry in catalog.entries:
            ends = [(log.partition, log.offset, log.sequence) for log in manifest.logs if log.incarnation == entry.incarnation]
            catalog.run([QueueRestored(entry.incarnation, RestorePoint(at, draw_first_lease(entropy), ends))])
        returned, failed = 0, []
        partitions = [(entry, number) for entry in catalog.entries for number in range(entry.next_partition)]
        for entry, number in partitions:
            try:
                returned += _open_once(target, entry, number, clock)
            except PenstockError as error:
                failed.append(f"partition {number} of queue {entry.name!r}: {error}")
                _log.warning("partition %d of queue %r does not open in the restored broker: %s", number, entry.name, error)
        queues = len(catalog.entries)
    finally:
        catalog.close()
    return RestoreReport(target.roots[0].path, manifest.cut_at, queues, len(partitions), manifest.size_bytes, returned, failed)


def _open_once(target: RestoreTarget, entry: QueueEntry, number: int, clock: Clock) -> int:
    """Open a partition of the restored broker and close it; gives how many items were leased."""
    log = target.store.log(entry.incarnation, number, create=False)
    try:
        partition = Partition(log, clock, entry.options.policy, queue=entry.name)
    except BaseException:
        log.close()
        raise
    try:
        leased = partition.state.counts.leased
        keep_apart(partition, entry)
    finally:
        partition.close()
    return leased
