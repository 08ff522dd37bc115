"""How Spark's processes reach a broker.

Owns: `BrokerRoots`, `parse_broker`, `open_home`, `open_snapshot`, `open_broker` and `ask_present_owner`. Driver and
tasks are different processes. `BrokerRoots` is plain data that is sent to them; each process opens its own home. They
never own the directory, which is on a disk of the machine that they and the owner run on. Only a job, which runs in the
user's program, owns it like any program while no other process does (`open_broker`).
"""

import json
import logging
import os
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.broker.directory_client import DirectoryClient
from penstock.logs.backends import MEMORY, Files
from penstock.operations import TIMEOUT, Home, Operation
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, PenstockError

if TYPE_CHECKING:
    from penstock.api._sync.broker import Broker

BrokerRoots: TypeAlias = tuple[str, ...]
"""A broker: the paths of its storage roots, the primary root first."""

FILE = "file://"
_log = logging.getLogger("penstock")


def open_home(roots: BrokerRoots, timeout: int = TIMEOUT, files: Files | None = None) -> Home:
    """Open the broker from a process that does not own it; the caller closes it. timeout: how long a change waits for
    an owner.
    """
    return DirectoryClient([*roots], timeout, files)


def open_snapshot(roots: BrokerRoots) -> Home:
    """Open the broker as it is published now, for several queries on the same state; the caller closes it."""
    from penstock.broker.snapshot import Snapshot

    return Snapshot.open([*roots])


def open_broker(roots: BrokerRoots, wait_seconds: float) -> "Broker":
    """Open the broker as any program does: as its owner if no process is it, else as a client of the owner."""
    # imported here: only jobs need them, and Spark's Python processes start sooner without
    from penstock.api._sync.broker import Broker
    from penstock.api._sync.broker import open as open_directory
    from penstock.broker.shared import join_shared

    joined = join_shared([*roots])
    return Broker(joined, roots[0]) if joined is not None else open_directory(roots[0], roots=[*roots[1:]], wait=wait_seconds)


def ask_present_owner(roots: BrokerRoots, operation: Operation[Any], seconds: float) -> bool:
    """Ask for a change that is useful but not needed: only if some process owns the broker now, and without waiting
    longer than that for its answer. Gives whether the change was made.
    """
    answers: SimpleQueue[Any] = SimpleQueue()
    try:
        with closing(DirectoryClient([*roots], int(seconds * SECOND))) as client:
            if not client.has_owner():
                return False
            client.submit(operation, answers.put)
            answer = answers.get(timeout=seconds)
    except (PenstockError, Empty) as error:
        answer = error
    if isinstance(answer, Exception):
        _log.warning("%s was not done: %s", type(operation).__name__, str(answer) or "its owner does not answer")
    return not isinstance(answer, Exception)


def parse_broker(given: str) -> BrokerRoots:
    """Parse the option `broker`: a path, or a JSON list of the paths of its storage roots, the primary root first."""
    text = given.strip()
    if text.startswith("["):
        try:
            paths = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f'the broker {given!r:.200} is not a JSON list ({error}); give ["first/root", "second/root"]') from None
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise InvalidRequest(f'the broker {given!r:.200} is not a list of paths; give ["first/root", "second/root"]')
    else:
        paths = [text]
    return tuple(_path(path) for path in paths)


def _path(given: str) -> str:
    if not given:
        raise InvalidRequest("the broker is empty; give the path of its directory")
    if given == MEMORY:
        raise InvalidRequest(f"{MEMORY!r} exists only in its own process, and Spark's tasks are other processes; give a directory")
    path = given.removeprefix(FILE)
    path = path.removeprefix("file:") if path.startswith("file:/") else path  # as Spark writes the location of a table
    if "://" in path:
        scheme = path.partition("://")[0]
        raise InvalidRequest(f"{given!r:.200} cannot be read or written by Spark; this version knows directories, not {scheme}://")
    return os.path.abspath(os.path.expanduser(path))
