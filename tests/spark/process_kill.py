"""How the programs of this folder die: at once, all of them, as by a power cut.

Owns: `mortal` and `die`. Whichever process meets the step kills the group of the driver, with the JVM, and its own: workers of Python have
one of theirs. Its own comes last, for nothing is done after it.
"""

import os
import signal
from pathlib import Path
from typing import Any

_GROUP = "DRIVER_GROUP"


def enable_kill(**environment: str) -> None:
    """Let the driver, which this is, be found by those who kill it; it and its workers also have this environment."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    os.environ |= {_GROUP: str(os.getpgid(0)), "PYTHONPATH": path, **environment}


def kill_all(*_: Any, **__: Any) -> None:
    """Wherever this runs, and in place of whatever."""
    for group in (int(os.environ[_GROUP]), os.getpgid(0)):
        os.killpg(group, signal.SIGKILL)
    signal.pause()
