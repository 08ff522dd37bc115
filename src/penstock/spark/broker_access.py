"""How Spark's processes reach a broker.

Owns: `BrokerRoots`, `parse_broker`, `open_home` and `open_snapshot`. Driver and tasks are different processes, perhaps
on different machines. `BrokerRoots` is plain data that is sent to them; each process opens its own home. A broker's
directory must have the same path on every node. (Jobs that must own the broker open it in jobs/owner_client.py.)
"""

import json
import os
from typing import Any, TypeAlias

from penstock.broker.inbox_client import InboxClient
from penstock.broker.snapshot import Snapshot
from penstock.logs.backends import MEMORY
from penstock.operations import Home
from penstock.words.errors import InvalidRequest

BrokerRoots: TypeAlias = tuple[str, ...]
"""A broker: the paths of its storage roots, the primary root first."""

FILE = "file://"


def open_home(roots: BrokerRoots, **options: Any) -> Home:
    """Open the broker from a process that does not own it; the caller closes it. `options`: those of `InboxClient`."""
    return InboxClient.open([*roots], **options)


def open_snapshot(roots: BrokerRoots) -> Home:
    """Open the broker as it is published now, for several queries on the same state; the caller closes it."""
    return Snapshot.open([*roots])


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
    if "://" in path:
        scheme = path.partition("://")[0]
        raise InvalidRequest(f"{given!r:.200} cannot be read or written by Spark; this version knows directories, not {scheme}://")
    return os.path.abspath(os.path.expanduser(path))
