"""The file system interface of the logs, and functions that write whole files.

Owns: the `Files` contract and `SystemFiles`, its implementation by the operating system (the other one is
`penstock.testing.SimulatedFiles`, whose disk can fail); `write_all`, `write_file`, `replace_file` and similar
functions, which write everything or fail; `storage_failed`, which turns an OSError into StorageFailed. No OSError
leaves `penstock.logs`.
All other functions here raise OSError as the system does. Nothing here retries.
"""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeAlias

from penstock.logs.log import Buffer
from penstock.words import forks
from penstock.words.errors import StorageFailed

Mode: TypeAlias = Literal["read", "append", "update", "private"]
"""read: the file must exist. append: created if missing, every write goes to the end. update: created if missing,
written by position. private: as update, and only the file's user can read it."""

_FLAGS = {
    "read": os.O_RDONLY,
    "append": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "update": os.O_RDWR | os.O_CREAT,
    "private": os.O_RDWR | os.O_CREAT,
}
_F_FULLFSYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Files(Protocol):
    """The file operations that logs use. Handles are small integers."""

    def open(self, path: str, mode: Mode) -> int: ...
    def close(self, handle: int) -> None: ...
    def write(self, handle: int, parts: Sequence[Buffer]) -> int:
        """Append; returns the number of bytes written, which may be less than given."""
        ...

    def pread(self, handle: int, size: int, position: int) -> bytes: ...
    def pwrite(self, handle: int, data: Buffer, position: int) -> int: ...
    def truncate(self, handle: int, size: int) -> None: ...
    def size(self, handle: int) -> int: ...
    def sync(self, handle: int) -> None:
        """Write the data, and the metadata needed to read it back, to the device."""
        ...

    def sync_directory(self, path: str) -> None: ...
    def exists(self, path: str) -> bool: ...
    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents, as far as they do not exist."""
        ...

    def rename(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None:
        """Remove a directory, which must be empty."""
        ...

    def lock(self, path: str) -> int | None:
        """Take the exclusive lock of a file (created if missing) and return its handle; None if it is locked.

        Only the user who created the file can read it. A forked child closes the handle when it starts.
        """
        ...

    def unlock(self, handle: int) -> None:
        """Release a lock and close its file. A locked file is not closed by `close`."""
        ...

    def free_bytes(self, path: str) -> int: ...
    def filesystem(self, path: str) -> str:
        """The type of the path's file system, such as "ext4"; "" if unknown."""
        ...


class SystemFiles:
    """The operating system's files."""

    write = staticmethod(os.writev)
    pread = staticmethod(os.pread)
    pwrite = staticmethod(os.pwrite)
    truncate = staticmethod(os.ftruncate)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)
    remove = staticmethod(os.unlink)
    remove_directory = staticmethod(os.rmdir)
    exists = staticmethod(os.path.exists)

    def open(self, path: str, mode: Mode) -> int:
        if mode == "private":
            return _open_private(path)
        return os.open(path, _FLAGS[mode] | os.O_CLOEXEC, 0o644)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def sync(self, handle: int) -> None:
        if _F_FULLFSYNC is not None:  # macOS: fsync alone leaves the data in the drive's cache
            fcntl.fcntl(handle, _F_FULLFSYNC)
        else:
            os.fdatasync(handle)

    def sync_directory(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def lock(self, path: str) -> int | None:
        return forks.open_tracked_handle(lambda: self._lock(path))

    def _lock(self, path: str) -> int | None:
        handle = _open_private(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return handle

    def unlock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            forks.forget_handle(handle)
            os.close(handle)

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def filesystem(self, path: str) -> str:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if sys.platform.startswith("linux"):
                with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
                    return filesystem_in(table.read(), os.path.realpath(path))
            table_text = subprocess.run(["/sbin/mount"], capture_output=True, text=True, check=True, timeout=10).stdout
            return filesystem_in_mount(table_text, os.path.realpath(path))
        return ""


def _open_private(path: str) -> int:
    handle = os.open(path, _FLAGS["private"] | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(handle).st_mode & 0o077:  # created by an earlier version, or copied
            os.fchmod(handle, 0o600)
    except OSError:
        os.close(handle)
        raise
    return handle


def filesystem_in(mountinfo: str, path: str) -> str:
    """The type of the path's file system, by the text of Linux's mountinfo."""
    mounts = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, mounted = left.split(), right.split()
        if len(fields) >= 5 and mounted:
            point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
            mounts.append((point, mounted[0]))
    return _kind_at(mounts, path)


def filesystem_in_mount(listing: str, path: str) -> str:
    """The type of the path's file system, by the output of macOS's mount.

    A line of it: `/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled)`.
    """
    mounts = []
    for line in listing.splitlines():
        left, _, right = line.rpartition(" (")
        _, on, point = left.partition(" on ")
        if on and right.endswith(")"):
            mounts.append((point, right[:-1].split(",")[0].strip()))
    return _kind_at(mounts, path)


def _kind_at(mounts: Iterable[tuple[str, str]], path: str) -> str:
    """The type of the mount that contains a path: the longest mount point wins, then the later one."""
    best, kind = -1, ""
    for point, mounted in mounts:
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), mounted
    return kind


# -- whole writes ----------------------------------------------------------------------------------


MAX_PIECES = 1024
"""The most pieces that one system call accepts (IOV_MAX on Linux and macOS)."""
COPY_BYTES = 1 << 20
TEMPORARY = ".tmp"


def write_all(files: Files, handle: int, pieces: Sequence[Buffer], size: int) -> None:
    """Append all pieces, `size` bytes together, by one system call unless it writes less than given."""
    if len(pieces) > MAX_PIECES:
        pieces = [b"".join(pieces)]
    written = files.write(handle, pieces)
    if written < size:
        rest = memoryview(b"".join(pieces))[written:]
        while rest:
            written = files.write(handle, [rest])
            if not written:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            rest = rest[written:]


def write_again(files: Files, path: str, start: int, stop: int) -> None:
    """Write bytes of a file over themselves and sync the file.

    After a failed sync, perhaps by an earlier process, the page cache may hold data that is not on the device although
    the system considers it written. Only writing the data again makes the next sync store it.
    """
    handle = files.open(path, "update")
    try:
        while start < stop:
            data = files.pread(handle, min(COPY_BYTES, stop - start), start)
            _pwrite_all(files, handle, data, start)
            start += len(data)
        files.sync(handle)
    finally:
        files.close(handle)


def overwrite_with_zeros(files: Files, path: str, start: int, stop: int) -> None:
    """Write zeros over bytes of a file. Does not sync."""
    handle = files.open(path, "update")
    try:
        while start < stop:
            size = min(COPY_BYTES, stop - start)
            _pwrite_all(files, handle, bytes(size), start)
            start += size
    finally:
        files.close(handle)


def write_file(files: Files, path: str, data: bytes, mode: Mode = "update", *, sync: bool = True) -> None:
    """Write a file in place and sync it. A crash may leave a part of it, so the content must carry a checksum."""
    handle = files.open(path, mode)
    try:
        files.truncate(handle, 0)
        _pwrite_all(files, handle, data, 0)
        if sync:
            files.sync(handle)
    finally:
        files.close(handle)


def replace_file(files: Files, directory: str, name: str, data: bytes, mode: Mode = "update", *, sync: bool = True) -> None:
    """Write a file atomically and durably: a crash leaves the whole old file or the whole new one.

    Without `sync` that holds when the process is killed, but not when the machine crashes.
    """
    path = f"{directory}/{name}"
    write_file(files, path + TEMPORARY, data, mode, sync=sync)
    files.rename(path + TEMPORARY, path)
    if sync:
        files.sync_directory(directory)


def copy_file(files: Files, source: str, target: str) -> None:
    """Copy a file atomically and sync the copy; an existing target is replaced. The directory is not synced."""
    before, after = files.open(source, "read"), files.open(target + TEMPORARY, "update")
    try:
        files.truncate(after, 0)
        for start in range(0, files.size(before), COPY_BYTES):
            _pwrite_all(files, after, files.pread(before, COPY_BYTES, start), start)
        files.sync(after)
    finally:
        files.close(before)
        files.close(after)
    files.rename(target + TEMPORARY, target)


def same_bytes(files: Files, one: str, other: str) -> bool:
    """Whether two files have the same content."""
    first, second = files.open(one, "read"), files.open(other, "read")
    try:
        size = files.size(first)
        starts = range(0, size, COPY_BYTES)
        same = all(files.pread(first, COPY_BYTES, start) == files.pread(second, COPY_BYTES, start) for start in starts)
        return size == files.size(second) and same
    finally:
        files.close(first)
        files.close(second)


def sync_parents(files: Files, path: str) -> None:
    """Sync every parent directory of a path, so that the path's names are durable, as far as this user may."""
    parent = os.path.dirname(path)
    if parent not in ("", path):
        with contextlib.suppress(PermissionError):  # a directory that this user cannot read was not created by Penstock
            files.sync_directory(parent)
        sync_parents(files, parent)


def read_file(files: Files, path: str) -> bytes | None:
    """The bytes of a small file; None if it does not exist."""
    try:
        handle = files.open(path, "read")
    except FileNotFoundError:  # not asked for before: another process may remove the file meanwhile
        return None
    try:
        return files.pread(handle, files.size(handle), 0)
    finally:
        files.close(handle)


def _pwrite_all(files: Files, handle: int, data: bytes, position: int) -> None:
    rest = memoryview(data)
    while rest:
        written = files.pwrite(handle, rest, position)
        if not written:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        rest, position = rest[written:], position + written


# -- errors ----------------------------------------------------------------------------------------


_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space, then send the request again",
    errno.EDQUOT: "the disk quota is used up; raise it or free some space, then send the request again",
    errno.EROFS: "the disk is read-only; mount it for writing, or open the broker with read_only=True",
    errno.ENOTDIR: "a part of the path is a file; give the path of a directory",
    errno.ENAMETOOLONG: "the path is too long; give a shorter one",
    errno.EACCES: "access is denied; give this user the right to read and write there",
    errno.EMFILE: "too many files are open; raise the limit of open files (ulimit -n)",
}


def storage_failed(error: OSError, doing: str, path: str) -> StorageFailed:
    """The StorageFailed for an OSError; `doing` says what was done to the path."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    advice = _ADVICE.get(number, f"{os.strerror(number)} ({name}); check the disk, then send the request again")
    return StorageFailed(f"{doing} {path} failed: {advice}")
