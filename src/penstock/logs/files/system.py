"""The few file operations that logs stand on, so that tests can put a failing disk under them.

Owns: the `Files` contract and `SystemFiles`, the operating system's. `penstock.testing.SimulatedFiles` is the other one.
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

from penstock.logs.api import Buffer

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
