"""Targets that a user gives to open a broker.

Owns: `checked_target`, which refuses targets that this version cannot open, and `open_home`.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.live_snapshot import LiveSnapshot
from penstock.broker.shared import open_shared
from penstock.logs.backends import MEMORY, Root
from penstock.operations import Home
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest

OPEN_WAIT = 10 * SECOND
"""How long an `open` waits by default for an owner that does not answer yet."""
TargetPath: TypeAlias = str | os.PathLike[str]


def checked_target(target: TargetPath, roots: Sequence[TargetPath | Root] | None) -> Any:
    """The target with its further storage roots, for `EmbeddedBroker.open`; InvalidRequest when it cannot be opened."""
    if not isinstance(target, str | os.PathLike) or not isinstance(path := os.fspath(target), str):
        raise InvalidRequest(f"the target is {type(target).__name__}; give the path of a directory, or {MEMORY!r}")
    if not path:
        raise InvalidRequest(f"the target is empty; give the path of a directory ('.' is this one), or {MEMORY!r}")
    if "://" in path and path != MEMORY:
        raise InvalidRequest(f"{path!r:.200} cannot be opened; this version opens directories and {MEMORY!r}")
    path = path if path == MEMORY else os.path.expanduser(path)
    if not roots:
        return path
    if path == MEMORY:
        raise InvalidRequest(f"{MEMORY!r} has no storage roots; leave roots out, or give a directory")
    if isinstance(roots, str | os.PathLike):
        raise InvalidRequest("roots is a single path; give a list of them")
    return [path, *roots]


def open_home(
    target: TargetPath,
    *,
    roots: Sequence[TargetPath | Root] | None = None,
    wait: int = OPEN_WAIT,
    own: bool = True,
    exclusive: bool = False,
    read_only: bool = False,
    **options: Any,
) -> Home:
    """Open the broker of a directory (created if it is new), or one in memory.

    `options` are those of `EmbeddedBroker.open`. With a clock, files or no threads of its own, which are for tests, a
    process shares its directory with no other.
    """
    found = checked_target(target, roots)
    if read_only and exclusive:
        raise InvalidRequest("read_only and exclusive exclude each other; give one of them")
    if not own and exclusive:
        raise InvalidRequest("exclusive is for the owner, which own=False does not allow; give one of them")
    if read_only:
        return LiveSnapshot.open(found, files=options.get("files"), clock=options.get("clock"))
    for_tests = options.get("clock") is not None or options.get("files") is not None or not options.get("threaded", True)
    if found == MEMORY or exclusive or for_tests:
        if not own:
            raise InvalidRequest("own=False needs a directory that another process owns; leave it out")
        return EmbeddedBroker.open(found, **options)
    shared = {name: value for name, value in options.items() if name not in ("clock", "files", "threaded")}
    return open_shared(found, own=own, wait=wait, **shared)
