"""Waiting for another process: asked again and again until a deadline, never a fixed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE = 0.02


def wait_until(predicate: Callable[[], T], seconds: float = 60.0) -> T:
    """Wait until `predicate` gives a true value, and give it; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not (found := predicate()):
        assert time.monotonic() < deadline, f"still not true after {seconds:g} s"
        time.sleep(PAUSE)
    return found
