"""The lock of a storage root: one process owns it, and says who it is.

Owns: the `LOCK` file. The lock itself is the system's, so it ends with its holder; the text inside is only for the message that a
second opener gets. Its size never changes: taking the lock of a root on a full disk needs no space.
"""

import json
import os
from datetime import UTC, datetime
from threading import Event

from penstock.logs.files.marker import LOCK
from penstock.logs.files.system import Files
from penstock.words.clock import Clock
from penstock.words.errors import BrokerLocked

TEXT_BYTES = 512
LOOKS = 5
LOOK_SECONDS = 0.01


def take(files: Files, root: str, clock: Clock) -> int:
    """Lock a root and give the handle that holds it, or say who does. Raises OSError as the system does."""
    path = f"{root}/{LOCK}"
    for _ in range(LOOKS):  # one who only looks whether there is an owner has it for a moment
        handle = files.lock(path)
        if handle is not None:
            break
        Event().wait(LOOK_SECONDS)
    if handle is None:
        raise BrokerLocked(f"{root} is in use by {_holder(files, path)}; one process at a time can open it, so close that one first")
    try:
        files.pwrite(handle, _text(clock), 0)
    except OSError:
        files.close(handle)
        raise
    return handle


def _text(clock: Clock) -> bytes:
    holder = {"pid": os.getpid(), "host": _host(), "since": clock.read().wall}
    return json.dumps(holder).encode().ljust(TEXT_BYTES - 1) + b"\n"


def _host() -> str:
    return os.uname().nodename[:200]


def _holder(files: Files, path: str) -> str:
    try:
        handle = files.open(path, "read")
        try:
            found = json.loads(files.pread(handle, TEXT_BYTES, 0))
        finally:
            files.close(handle)
        if found["pid"] == os.getpid() and found["host"] == _host():
            return f"this very process since {_date(found['since'])} (a broker that was not closed)"
        return f"process {found['pid']} on {found['host']} since {_date(found['since'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _date(wall: int) -> str:
    return datetime.fromtimestamp(wall / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
