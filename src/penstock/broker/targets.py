"""Targets that a user gives to open a broker.

Owns: `checked_target`, which refuses targets that this version cannot open, and `open_home`.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.broker.embedded import EmbeddedBroker
from penstock.logs.backends import MEMORY, Root
from penstock.operations import Home
from penstock.words.errors import InvalidRequest

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


def open_home(target: TargetPath, *, roots: Sequence[TargetPath | Root] | None = None, **options: Any) -> Home:
    """Open the broker of a directory (created if it is new), or one in memory.

    `options` are those of `EmbeddedBroker.open`.
    """
    return EmbeddedBroker.open(checked_target(target, roots), **options)
