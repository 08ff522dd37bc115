"""Kills all processes of a test program at once, as a power failure would.

Owns: `enable_kill` and `kill_all`. The process that reaches the step kills the process group of the driver, with the
JVM, and then its own group: Spark's Python workers have another group.
"""

import os
import signal
from pathlib import Path
from typing import Any

_GROUP = "DRIVER_GROUP"


def enable_kill(**environment: str) -> None:
    """Call in the driver: makes its process group known to `kill_all`, and sets environment variables for its
    workers."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    os.environ |= {_GROUP: str(os.getpgid(0)), "PYTHONPATH": path, **environment}


def kill_all(*_: Any, **__: Any) -> None:
    """Kill driver and workers, from any of them. Takes any arguments, to replace any function."""
    for group in (int(os.environ[_GROUP]), os.getpgid(0)):
        os.killpg(group, signal.SIGKILL)
    signal.pause()
