"""The directory in which a local Spark keeps what is its own: shuffles, spilled rows, a launcher for Java.

Owns: `make`, `remove` and the sweep of what processes left that were killed. A directory is alive while its lock is held, which the system
ends with the process; so nothing that is in use is ever swept, whoever shares the temporary directory with us.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from penstock.logs.files.filesystem import SystemFiles

PREFIX = "penstock-spark-"
LOCK = "alive"

_held: dict[Path, int] = {}
"""The handles of locks: open until the directory is removed, or the process ends."""


def make() -> Path:
    """A new directory that only this user may enter. Those of dead processes go first."""
    _sweep(Path(tempfile.gettempdir()))
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = SystemFiles().lock(str(scratch / f"{LOCK}.new"))
    assert handle is not None  # nobody else knows the name
    (scratch / f"{LOCK}.new").rename(scratch / LOCK)  # held before it can be found
    _held[scratch] = handle
    return scratch


def remove(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    handle = _held.pop(scratch, None)
    if handle is not None:
        os.close(handle)


def _sweep(place: Path) -> None:
    for left in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or just being removed
            if left.stat().st_uid != os.geteuid() or not (left / LOCK).exists():
                continue
            handle = SystemFiles().lock(str(left / LOCK))
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
