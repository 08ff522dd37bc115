"""Signals that end a worker.

Owns: `ending`. SIGTERM and SIGINT are taken while a worker runs, and given back afterwards. Only the main thread can take signals; in
others nothing is changed.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ending(ask: Callable[[], None], wanted: bool = True) -> Iterator[None]:
    """Within this, each of the signals calls `ask`."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        ask()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
