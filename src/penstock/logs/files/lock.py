"""The lock of a storage root, and what its holder says about itself in the lock file.

Owns: `DirectoryLock`, `LockHolder`, `take_lock` and `read_holder`.
The lock is the system's lock on the file `LOCK`, so it ends with the process that holds it. The text in the file has a
fixed size, so that locking a root needs no space on a full disk. It names the holder, for messages, and has what a
client needs to connect to it (wire/): a secret that is new with every owner, and the socket if that is not in the root.
Only the user who owns the file can read it.
The holder notes when it begins to open the broker, and removes that note when the broker is open. So the next holder
learns of openings that killed their process.
"""

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from threading import Event

import msgspec

from penstock.logs.files.filesystem import Files
from penstock.words.clock import MINUTE, Clock
from penstock.words.errors import AccessDenied, BrokerLocked

LOCK = "LOCK"
TEXT_BYTES = 512
LOCK_ATTEMPTS = 5
LOCK_RETRY_SECONDS = 0.01
UNFINISHED_WITHIN = MINUTE
"""How long an opening that did not finish is remembered."""
_NOTED = 8


class LockHolder(msgspec.Struct, omit_defaults=True):
    """The process that holds a lock, as it described itself."""

    pid: int
    host: str
    since: int
    """Wall time in microseconds."""
    exclusive: bool = False
    """Whether it shares the broker with no other process."""
    secret: str = ""
    """What a client must know; "" when clients cannot connect (yet)."""
    socket: str = ""
    """The path of its socket, if that is not in the root."""
    unfinished: list[int] = []
    """When openings began, of this process and of those before it, since one finished (wall)."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if self.pid == os.getpid() and self.host == _host():
            return f"this very process since {since}"
        return f"process {self.pid} on {self.host} since {since}"


class DirectoryLock:
    """A lock that this process holds."""

    def __init__(self, files: Files, root: str, handle: int, holder: LockHolder) -> None:
        self.root = root
        self.holder = holder
        self._files = files
        self._handle = handle
        self._write()

    def announce(self, secret: str, socket: str) -> None:
        """Tell clients how to connect."""
        self.holder.secret, self.holder.socket = secret, socket
        self._write()

    def withdraw(self) -> None:
        """Remove the note of this process that it opens the broker: it does not."""
        del self.holder.unfinished[-1:]
        with suppress(OSError):
            self._write()

    def note_opened(self) -> None:
        """Remove the notes of openings: this one has ended, and its process lives."""
        self.holder.unfinished = []
        with suppress(OSError):  # the broker is open all the same
            self._write()

    def release(self) -> None:
        """Unlock. A forked child has closed its copy (words/forks.py), and must not call this."""
        self._files.unlock(self._handle)

    def _write(self) -> None:
        text = json.dumps(msgspec.to_builtins(self.holder)).encode().ljust(TEXT_BYTES - 1) + b"\n"
        self._files.pwrite(self._handle, text, 0)


def take_lock(files: Files, root: str, clock: Clock, attempts: int = LOCK_ATTEMPTS, exclusive: bool = True) -> DirectoryLock:
    """Lock a root; BrokerLocked, with the holder's name, if another process has it."""
    path = f"{root}/{LOCK}"
    handle = None
    for attempt in range(attempts):  # FileInbox.has_owner of another process holds it for a moment
        if attempt:
            Event().wait(LOCK_RETRY_SECONDS)
        try:
            handle = files.lock(path)
        except PermissionError as error:
            raise AccessDenied(
                f"{path} cannot be opened ({error}); run as the user who owns the directory, or open it with read_only=True"
            ) from error
        if handle is not None:
            break
    if handle is None:
        holder = read_holder(files, root)
        raise BrokerLocked(f"{root} is in use by {holder or 'another process'}, and this needs it alone; close that one first")
    try:
        now, former = clock.read().wall, read_holder(files, root)
        unfinished = [when for when in (former.unfinished if former is not None else []) if now - UNFINISHED_WITHIN < when <= now]
        return DirectoryLock(files, root, handle, LockHolder(os.getpid(), _host(), now, exclusive, unfinished=[*unfinished, now][-_NOTED:]))
    except BaseException:
        files.unlock(handle)
        raise


def read_holder(files: Files, root: str) -> LockHolder | None:
    """What the last holder of the lock said; None when that cannot be read. AccessDenied for another user's file."""
    try:
        handle = files.open(f"{root}/{LOCK}", "read")
        try:
            return msgspec.json.decode(files.pread(handle, TEXT_BYTES, 0), type=LockHolder)
        finally:
            files.close(handle)
    except PermissionError as error:
        raise AccessDenied(
            f"{root}/{LOCK} cannot be opened ({error}); run as the user who owns the directory, or open it with read_only=True"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _host() -> str:
    return os.uname().nodename[:100]
