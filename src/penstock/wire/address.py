"""Where the socket of a directory is.

Owns: `listen` and `connect`. The socket is a file in the directory itself, so that containers which share the
directory share the socket. A path that is too long for a socket address is reached through the directory's descriptor
(`/proc/self/fd`). Where neither works (no procfs, or a file system without sockets), the socket is in a runtime
directory of the user; the owner's lock file then names it.
Only the process that holds the directory's lock calls `listen`, so it may remove the socket of a former owner.
"""

import contextlib
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator

from penstock.words import forks

SOCKET = "socket"
MAX_PATH_BYTES = 100
"""Less than every system allows (macOS 104, Linux 108)."""
BACKLOG = 128


def listen(directory: str) -> tuple[socket.socket, str]:
    """A listening socket for a directory, and its path if that is not the usual one (else "")."""
    try:
        with _short_path(directory) as path:
            return _bind(path), ""
    except OSError:
        path = _runtime_path(directory)
        return _bind(path), path


def connect(directory: str, path: str = "") -> socket.socket:
    """A connection to the socket of a directory, or to the path that its owner gave. Raises OSError."""
    if path:
        return _connect(path)
    with _short_path(directory) as found:
        return _connect(found)


def unlink(directory: str, path: str = "") -> None:
    """Remove the socket file. For the holder of the lock."""
    with contextlib.suppress(OSError):
        os.unlink(path or f"{directory}/{SOCKET}")


def _bind(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = forks.open_tracked(_new_socket)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(listener.fileno(), 0o600)  # the mode of the file that `bind` creates
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _connect(path: str) -> socket.socket:
    connection = forks.open_tracked(_new_socket)
    try:
        connection.setblocking(False)  # a full backlog is an error at once: the caller tries again
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


@contextlib.contextmanager
def _short_path(directory: str) -> Iterator[str]:
    """A path of the directory's socket that is short enough for an address; OSError when there is none."""
    path = f"{directory}/{SOCKET}"
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield path
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def _runtime_path(directory: str) -> str:
    """A path in a directory that only this user can write to."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        folder = f"{base}/penstock-{os.getuid()}"
        if base and len(os.fsencode(f"{folder}/{name}")) <= MAX_PATH_BYTES:
            break
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user or is open to others")
    return f"{folder}/{name}"
