"""The files beneath the logs: the system's operations, and the few ways in which logs put bytes down.

Owns: the `Files` contract and `SystemFiles`, the operating system's (`penstock.testing.SimulatedFiles` is the other one, with a disk that
fails); `write_all`, `write_file`, `replace_file` and the like, which write everything or fail; `storage_failed`, which puts an OSError into
our words: every one that enters `penstock.logs` leaves it so.
Every operation raises OSError as the system does; nothing here retries.
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
from penstock.words.errors import StorageFailed

Mode: TypeAlias = Literal["read", "append", "update"]
"""read: must exist. append: created when missing, every write goes to the end. update: created when missing, written by position."""

_FLAGS = {
    "read": os.O_RDONLY,
    "append": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "update": os.O_RDWR | os.O_CREAT,
}
_F_FULLFSYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Files(Protocol):
    """What a log needs of a disk. Handles are small integers."""

    def open(self, path: str, mode: Mode) -> int: ...
    def close(self, handle: int) -> None: ...
    def write(self, handle: int, parts: Sequence[Buffer]) -> int:
        """Append; may write less than asked, and says how much."""
        ...

    def pread(self, handle: int, size: int, position: int) -> bytes: ...
    def pwrite(self, handle: int, data: Buffer, position: int) -> int: ...
    def truncate(self, handle: int, size: int) -> None: ...
    def size(self, handle: int) -> int: ...
    def sync(self, handle: int) -> None:
        """Data and what is needed to read it back are on the device when this returns."""
        ...

    def sync_directory(self, path: str) -> None: ...
    def exists(self, path: str) -> bool: ...
    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def make_directory(self, path: str) -> None:
        """With its parents; fine when there."""
        ...

    def rename(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None:
        """Remove a directory, which must be empty."""
        ...

    def lock(self, path: str) -> int | None:
        """Take the exclusive lock of a file (created when missing) and give its handle; None when another holder has it."""
        ...

    def free_bytes(self, path: str) -> int: ...
    def filesystem(self, path: str) -> str:
        """The type of file system a path lies on, such as "ext4", or "" when unknown."""
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
        handle = self.open(path, "update")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return handle

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


def filesystem_in(mountinfo: str, path: str) -> str:
    """The type of file system that `path` lies on, by the text of Linux's mountinfo."""
    mounts = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, mounted = left.split(), right.split()
        if len(fields) >= 5 and mounted:
            point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
            mounts.append((point, mounted[0]))
    return _kind_at(mounts, path)


def filesystem_in_mount(listing: str, path: str) -> str:
    """The same by what macOS's mount prints: `/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled)`."""
    mounts = []
    for line in listing.splitlines():
        left, _, right = line.rpartition(" (")
        _, on, point = left.partition(" on ")
        if on and right.endswith(")"):
            mounts.append((point, right[:-1].split(",")[0].strip()))
    return _kind_at(mounts, path)


def _kind_at(mounts: Iterable[tuple[str, str]], path: str) -> str:
    """The type of the mount that a path lies in: the longest mount point wins, then the later one."""
    best, kind = -1, ""
    for point, mounted in mounts:
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), mounted
    return kind


# -- writing that is whole or fails ----------------------------------------------------------------


MAX_PIECES = 1024
"""Pieces that one system call takes (IOV_MAX on Linux and macOS)."""
COPY_BYTES = 1 << 20
TEMPORARY = ".tmp"


def write_all(files: Files, handle: int, pieces: Sequence[Buffer], size: int) -> None:
    """Append pieces of that size together, by one call unless the system stops short."""
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
    """Write a stretch of a file over itself and sync it.

    A sync that failed, perhaps in a process that is gone, leaves pages that read well, are not on the device and count as clean:
    only writing them again makes the next sync carry them.
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
    """Write zeros over a stretch of a file. Not synced."""
    handle = files.open(path, "update")
    try:
        while start < stop:
            size = min(COPY_BYTES, stop - start)
            _pwrite_all(files, handle, bytes(size), start)
            start += size
    finally:
        files.close(handle)


def write_file(files: Files, path: str, data: bytes) -> None:
    """Fill a file in place and sync it. A crash may leave a part: for files that know whether they are whole."""
    handle = files.open(path, "update")
    try:
        files.truncate(handle, 0)
        _pwrite_all(files, handle, data, 0)
        files.sync(handle)
    finally:
        files.close(handle)


def replace_file(files: Files, directory: str, name: str, data: bytes) -> None:
    """Put a file in place of another: a crash leaves the old one or the new one, whole."""
    path = f"{directory}/{name}"
    write_file(files, path + TEMPORARY, data)
    files.rename(path + TEMPORARY, path)
    files.sync_directory(directory)


def copy_file(files: Files, source: str, target: str) -> None:
    """Make a whole, synced copy; its name lasts when the directory is synced. Fine when it is there already."""
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
    """Whether two files hold the same."""
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
    """Make a directory's name last, and those of its parents, as far as this user may."""
    parent = os.path.dirname(path)
    if parent not in ("", path):
        with contextlib.suppress(PermissionError):  # one that may not even be read was not made by us
            files.sync_directory(parent)
        sync_parents(files, parent)


def read_file(files: Files, path: str) -> bytes | None:
    """A small file's bytes, or None when there is none."""
    if not files.exists(path):
        return None
    handle = files.open(path, "read")
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
    errno.EROFS: "the disk is read-only; mount it for writing, or open the broker read-only",
    errno.EACCES: "access is denied; give this user the right to read and write there",
    errno.EMFILE: "too many files are open; raise the limit of open files (ulimit -n)",
}


def storage_failed(error: OSError, doing: str, path: str) -> StorageFailed:
    """What to raise for a system error met while doing something to a path."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    advice = _ADVICE.get(number, f"{os.strerror(number)} ({name}); look at the disk, then send the request again")
    return StorageFailed(f"{doing} {path} failed: {advice}")
