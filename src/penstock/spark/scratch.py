"""The temporary directory of a local Spark: shuffles, spilled rows, a launcher for Java.

Owns: `make`, `remove`, and the removal of directories that killed processes left. A directory is in use while its lock
is held; the system releases the lock when the process ends. So a directory in use is never removed.
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
"""The handles of the locks, open until the directory is removed or the process ends."""


def make() -> Path:
    """Make a directory that only this user may enter. Removes those of dead processes first."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = SystemFiles().lock(str(scratch / f"{LOCK}.new"))
    assert handle is not None  # the name is new, so no other process has it
    (scratch / f"{LOCK}.new").rename(scratch / LOCK)  # locked before another process can find it
    _held[scratch] = handle
    return scratch


def remove(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    handle = _held.pop(scratch, None)
    if handle is not None:
        os.close(handle)


def _remove_abandoned(parent: Path) -> None:
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be removing it
            if left.stat().st_uid != os.geteuid() or not (left / LOCK).exists():
                continue
            handle = SystemFiles().lock(str(left / LOCK))
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
