"""A backup of a broker's files: a directory with copies of its logs, its published writes and its API keys.

Owns: `BackupManifest` and its file, `BackupWriter`, which makes a backup, and `read_manifest` and `check_files`, which
check one. docs/format.md has the layout.
    <target>/backup.json             the manifest, with a checksum of every file; written last, so it means: complete
    <target>/backup.unfinished       locked by the process that makes the backup; removed last
    <target>/logs/<incarnation>/<partition>/<segment>.log, synced
    <target>/inbox/<write>.drop/…    published writes that were in no log yet
    <target>/keys.json               the API keys of servers
The owner of the broker cuts the logs at one instant (`LogPosition`, `store.py`). What is before the cut is copied while
the owner goes on. Retention may remove or rewrite segments meanwhile, so all segments are opened before the cut and
again after it: an open file keeps its bytes. A segment that was replaced between is taken as it was before, which is a
state that a crash could leave, too. At most two segments that are new since the first opening are accepted: the newest
two are never rewritten, so nothing was removed between. Otherwise the cut must be made again (`pin_cut` gives False).
"""

import errno
import fcntl
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from google_crc32c import extend

from penstock.logs.files.filesystem import COPY_BYTES, SystemFiles, read_file, replace_file, storage_failed, sync_parents, write_file
from penstock.logs.files.root import BACKUP_FILES, INBOX, KEYS, LOGS
from penstock.logs.files.segment import LOG, SegmentName, parse_name
from penstock.logs.files.sidefiles import SYNCED
from penstock.logs.store import LogPosition
from penstock.words.errors import BrokerLocked, CorruptLog, InvalidRequest

(MANIFEST, UNFINISHED), KEY_FILE = BACKUP_FILES, "keys.json"
FORMAT = 1
NEW_SEGMENTS = 2
_CONTENT = (LOGS, INBOX, KEY_FILE, f"{MANIFEST}.tmp")


class BackedUpFile(msgspec.Struct, frozen=True):
    """A file of a backup."""

    path: str
    """Relative to the backup."""
    size: int
    checksum: int
    """CRC-32C of its bytes."""
    source: tuple[int, int, int] = (0, 0, 0)
    """Device, inode and time of change of the file that it was copied from, if that was complete; else zeros."""


class BackedUpLog(msgspec.Struct, frozen=True):
    """A log of a backup. Its files are in `logs/`."""

    incarnation: int
    partition: int
    offset: int
    sequence: int
    """Its next offset and the sequence of its last frame; 0 where the owner did not know them."""


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup consists of."""

    format: int = FORMAT
    cut_at: int
    """The instant of the backup (wall): it has what was answered before, and nothing that was answered later."""
    logs: list[BackedUpLog]
    files: list[BackedUpFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


# -- reading a backup ----------------------------------------------------------------------------------


def is_backup(directory: str) -> bool:
    """Whether a directory holds a backup, complete or not."""
    return any(os.path.exists(f"{directory}/{name}") for name in (MANIFEST, UNFINISHED))


def read_manifest(backup: str) -> BackupManifest:
    """The manifest of a complete backup. InvalidRequest if it is not complete, CorruptLog if it is damaged."""
    try:
        raw = read_file(SystemFiles(), f"{backup}/{MANIFEST}")
    except OSError as error:
        raise storage_failed(error, "reading", backup) from error
    if raw is None:
        what = "is an unfinished backup" if os.path.exists(f"{backup}/{UNFINISHED}") else "is no backup"
        raise InvalidRequest(f"{backup} {what}; give a directory that penstock backup has finished")
    body, _, checksum = raw.rstrip(b"\n").rpartition(b"\n")
    try:
        if int(checksum, 16) != extend(0, body):
            raise ValueError("its checksum is wrong")
        manifest = msgspec.json.decode(body, type=BackupManifest)
    except (ValueError, msgspec.MsgspecError) as error:
        raise CorruptLog(f"the manifest of the backup {backup} is damaged ({error}); use another backup") from error
    if manifest.format > FORMAT:
        raise CorruptLog(f"the backup {backup} has format {manifest.format}, this Penstock knows {FORMAT}; use a newer Penstock")
    return manifest


def check_files(backup: str, files: Sequence[BackedUpFile], advance: Callable[[int], None] = lambda size: None) -> list[str]:
    """Read files of a backup; gives a line for each that is missing or damaged."""
    wrong = []
    for file in files:
        try:
            with open(f"{backup}/{file.path}", "rb") as opened:
                checksum = size = 0
                while data := opened.read(COPY_BYTES):
                    checksum, size = extend(checksum, data), size + len(data)
                    advance(len(data))
        except FileNotFoundError:
            wrong.append(f"{file.path} is missing")
        except OSError as error:
            raise storage_failed(error, "reading", f"{backup}/{file.path}") from error
        else:
            if (size, checksum) != (file.size, file.checksum):
                wrong.append(f"{file.path} is damaged: it is not what the backup wrote")
    return wrong


# -- pins ----------------------------------------------------------------------------------------------


class PinnedSegments:
    """The open segments of one log."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.handles: dict[SegmentName, int] = {}
        self._newest: SegmentName | None = None
        for name in self._names():
            with suppress(FileNotFoundError):  # removed since; what it held is dropped or in a rewritten segment
                self.handles[name] = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        self._newest = max(self.handles, default=None)

    def pin_cut(self) -> bool:
        """After the cut: open the segments that are new. False if one may have been removed or rewritten since."""
        names = self._names()
        new = [name for name in names if name not in self.handles]
        if len(new) > NEW_SEGMENTS or (self._newest is not None and not self._is_pinned(self._newest)):
            return False
        for name in new:
            if self._newest is not None and name < self._newest:
                return False
            self.handles[name] = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        return True

    def _is_pinned(self, name: SegmentName) -> bool:
        """Whether the file of that name is the one that is open."""
        try:
            now = os.stat(self._path(name))
        except FileNotFoundError:
            return False
        pinned = os.fstat(self.handles[name])
        return (now.st_dev, now.st_ino) == (pinned.st_dev, pinned.st_ino)

    def _names(self) -> list[SegmentName]:
        try:
            return sorted(name for name in map(parse_name, os.listdir(self.directory)) if name is not None)
        except FileNotFoundError:
            return []

    def _path(self, name: SegmentName) -> str:
        return f"{self.directory}/{name}{LOG}"

    def close(self) -> None:
        for handle in self.handles.values():
            os.close(handle)
        self.handles.clear()


class PinnedFiles:
    """Everything that a backup may need, open, so that it stays readable. Use it as a context manager."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.logs: dict[str, PinnedSegments] = {}
        self.writes: dict[str, dict[str, int]] = {}
        """Published write → its open files."""
        self._inbox = f"{roots[0]}/{INBOX}"
        allow_many_files()
        try:
            self._pin_writes()
            for root in roots:
                for incarnation in _listed(f"{root}/{LOGS}"):
                    for partition in _listed(f"{root}/{LOGS}/{incarnation}"):
                        self._pin_log(f"{root}/{LOGS}/{incarnation}/{partition}")
        except BaseException:
            self.close()
            raise

    def pin_cut(self, cut: Sequence[LogPosition], writes: Sequence[str]) -> bool:
        """After the cut: whether everything that it needs is pinned. If not, pin and cut again."""
        self._pin_writes()
        known = [*self.logs]
        for log in cut:
            if log.directory not in known:
                self._pin_log(log.directory)
        return all(self.logs[log.directory].pin_cut() for log in cut) and all(write in self.writes for write in writes)

    def _pin_log(self, directory: str) -> None:
        self.logs[directory] = PinnedSegments(directory)

    def _pin_writes(self) -> None:
        for write in _listed(self._inbox):
            if write.endswith(".drop") and write not in self.writes:
                opened: dict[str, int] = {}
                try:
                    for name in os.listdir(f"{self._inbox}/{write}"):
                        opened[name] = os.open(f"{self._inbox}/{write}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                    self.writes[write] = opened
                except FileNotFoundError:  # it is adopted and being removed
                    for handle in opened.values():
                        os.close(handle)

    def __enter__(self) -> "PinnedFiles":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for pinned in self.logs.values():
            pinned.close()
        for opened in self.writes.values():
            for handle in opened.values():
                os.close(handle)
        self.logs, self.writes = {}, {}


def allow_many_files() -> None:
    """Let this process open as many files as it may: a backup has every segment open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses some values; then the limit stays as it is
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- making a backup -----------------------------------------------------------------------------------


class BackupWriter:
    """Writes the files of one backup. Use it as a context manager; without `finish` the backup stays unfinished."""

    def __init__(self, target: str, previous: str | None = None) -> None:
        self.target = os.path.abspath(target)
        self.linked_bytes = 0
        """Bytes that were linked to the previous backup instead of copied."""
        self._files: list[BackedUpFile] = []
        self._previous, self._known = "", dict[str, BackedUpFile]()
        if previous is not None:
            self._previous = os.path.abspath(previous)
            self._known = {file.path: file for file in read_manifest(self._previous).files if any(file.source)}
        try:
            self._lock = self._begin()
        except OSError as error:
            raise storage_failed(error, "writing", self.target) from error

    def _begin(self) -> int:
        names = set(_listed(self.target))
        if os.path.isfile(self.target):
            raise InvalidRequest(f"{self.target} is a file; give a new directory")
        if MANIFEST in names:
            raise InvalidRequest(f"{self.target} holds a backup; give a new directory, and this one as the previous backup to save space")
        if names and UNFINISHED not in names:
            raise InvalidRequest(f"{self.target} is not empty (it holds {min(names)!r}); give a new or an empty directory")
        os.makedirs(self.target, mode=0o700, exist_ok=True)
        handle = os.open(f"{self.target}/{UNFINISHED}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise BrokerLocked(f"another process is writing a backup to {self.target}; give another directory, or wait") from error
        for name in _CONTENT:  # of a backup that was cut off
            remove_tree(f"{self.target}/{name}")
        sync_parents(SystemFiles(), f"{self.target}/{UNFINISHED}")
        return handle

    def copy(self, source: int, path: str, size: int | None = None, *, complete: bool = False) -> None:
        """Copy the first `size` bytes of an open file (None: all of it) to a path of the backup, and sync the copy.

        complete: the file does not change any more. If the previous backup has it, it is linked instead.
        """
        found = os.fstat(source)
        identity = (found.st_dev, found.st_ino, found.st_mtime_ns) if complete else (0, 0, 0)
        size = found.st_size if size is None else size
        target = f"{self.target}/{path}"
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        known = self._known.get(path)
        if known is not None and complete and (known.source, known.size) == (identity, size) and self._link(path, target):
            self._files.append(known)
            self.linked_bytes += size
            return
        checksum = position = 0
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while position < size:
                data = os.pread(source, min(COPY_BYTES, size - position), position)
                if not data:
                    raise CorruptLog(f"{path} ended at byte {position} while it was backed up, and should have {size}; run penstock verify")
                checksum = extend(checksum, data)
                position += _write(copy, data)
            SystemFiles().sync(copy)
        finally:
            os.close(copy)
        self._files.append(BackedUpFile(path, size, checksum, identity))

    def _link(self, path: str, target: str) -> bool:
        try:
            os.link(f"{self._previous}/{path}", target)
        except OSError:  # another file system, or one without links: it is copied
            return False
        return True

    def copy_log(self, log: LogPosition, pinned: PinnedSegments, copied: Callable[[int], None]) -> BackedUpLog:
        """Copy the segments of a log up to the cut. copied: called with the size of each."""
        folder = f"{LOGS}/{log.incarnation:016x}/{log.partition:05d}"
        os.makedirs(f"{self.target}/{folder}", mode=0o700, exist_ok=True)
        newest = parse_name(log.segment + LOG)
        for name, handle in sorted(pinned.handles.items()):
            if newest is not None and name <= newest:
                last = name == newest
                self.copy(handle, f"{folder}/{name}{LOG}", log.size if last else None, complete=not last)
                copied(self._files[-1].size)
        if newest is not None and newest not in pinned.handles:
            raise CorruptLog(f"segment {newest} of {log.directory} is missing; run penstock verify, then repair")
        if log.synced:
            path = f"{folder}/{SYNCED}"
            write_file(SystemFiles(), f"{self.target}/{path}", log.synced)
            self._files.append(BackedUpFile(path, len(log.synced), extend(0, log.synced)))
        return BackedUpLog(log.incarnation, log.partition, log.offset, log.sequence)

    def copy_write(self, write: str, opened: Mapping[str, int]) -> None:
        """Copy a published write."""
        for name, handle in sorted(opened.items()):
            self.copy(handle, f"{INBOX}/{write}/{name}")

    def copy_keys(self, root: str) -> None:
        """Copy the API keys, if there are any."""
        with suppress(FileNotFoundError):
            handle = os.open(f"{root}/{KEYS}/{KEY_FILE}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.copy(handle, KEY_FILE)
            finally:
                os.close(handle)

    def finish(self, cut_at: int, logs: list[BackedUpLog], advance: Callable[[int], None]) -> BackupManifest:
        """Check the whole backup and make it complete. CorruptLog if a file cannot be read back."""
        manifest = BackupManifest(cut_at=cut_at, logs=logs, files=self._files)
        wrong = check_files(self.target, manifest.files, advance)
        if wrong:
            raise CorruptLog(
                f"the backup in {self.target} cannot be read back ({wrong[0]}); check its disk, or make it without a previous one"
            )
        for folder in sorted({os.path.dirname(f"{self.target}/{file.path}") for file in manifest.files}):
            sync_parents(SystemFiles(), f"{folder}/.")
        body = msgspec.json.encode(manifest)
        replace_file(SystemFiles(), self.target, MANIFEST, body + b"\n%08x\n" % extend(0, body))
        os.unlink(f"{self.target}/{UNFINISHED}")
        return manifest

    def __enter__(self) -> "BackupWriter":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)


def _write(handle: int, data: bytes) -> int:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]
    return len(data)


def remove_tree(path: str) -> None:
    """Remove a file, or a directory with everything in it, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        for name in _listed(path):
            remove_tree(f"{path}/{name}")
        os.rmdir(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def copied_files(manifest: BackupManifest, log: BackedUpLog) -> Iterator[BackedUpFile]:
    """The files of one log."""
    folder = f"{LOGS}/{log.incarnation:016x}/{log.partition:05d}/"
    return (file for file in manifest.files if file.path.startswith(folder))
