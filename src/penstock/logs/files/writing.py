"""Writing that is whole or fails: the few ways in which the file log puts bytes down.

Owns: `write_all`, `rewrite`, `blank`, `write_file`, `replace_file`, `copy_file`, `keep_names`, `read_file`, `same_bytes`.
Each raises OSError when a byte did not get there.
"""

import contextlib
import errno
import os
from collections.abc import Sequence

from penstock.logs.api import Buffer
from penstock.logs.files.system import Files

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


def rewrite(files: Files, path: str, start: int, stop: int) -> None:
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


def blank(files: Files, path: str, start: int, stop: int) -> None:
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


def keep_names(files: Files, path: str) -> None:
    """Make a directory's name last, and those of its parents, as far as this user may."""
    parent = os.path.dirname(path)
    if parent not in ("", path):
        with contextlib.suppress(PermissionError):  # one that may not even be read was not made by us
            files.sync_directory(parent)
        keep_names(files, parent)


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
