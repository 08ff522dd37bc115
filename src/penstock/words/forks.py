"""What a forked child must not keep of its parent.

Owns: `count`, which tells an object made before a fork from one made after it, and the descriptors that a child closes
when it starts: locks and sockets. A child that kept them would keep a directory locked after its parent has died, and
the parent's clients would not notice its end.
Such descriptors are opened by `open_tracked` or `open_tracked_handle`, during which no other thread can fork: there is
no moment in which one is open and not yet noted. They are closed in the child, never shut down: the parent uses them.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

count = 0
"""How many forks lie between the first process and this one. Read it as `forks.count`."""


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)
_opening = threading.RLock()
"""Held while a descriptor is opened and noted, and during a fork."""
_tracked: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_handles: set[int] = set()


def open_tracked(make: Callable[[], C]) -> C:
    """Open something that a forked child closes at once. `make` must not wait."""
    with _opening:
        made = make()
        _tracked.add(made)
        return made


def open_tracked_handle(make: Callable[[], int | None]) -> int | None:
    """The same for a plain descriptor (None: there is none). Call `forget_handle` before it is closed."""
    with _opening:
        handle = make()
        if handle is not None:
            _handles.add(handle)
        return handle


def forget_handle(handle: int) -> None:
    _handles.discard(handle)


def _before() -> None:
    _opening.acquire()


def _in_parent() -> None:
    with suppress(RuntimeError):  # an interrupt in `_before`
        _opening.release()


def _in_child() -> None:
    global count, _opening
    count += 1
    _opening = threading.RLock()
    while _handles:
        with suppress(OSError):
            os.close(_handles.pop())
    for one in list(_tracked):
        with suppress(BaseException):  # no caller could handle it, and the others must still be closed
            one.close()
    _tracked.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
