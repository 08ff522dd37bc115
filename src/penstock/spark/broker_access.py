"""How Spark reaches a broker.

Owns: `Target`, `parse_broker`, `open_home` and `open_snapshot`. Driver and tasks are different processes, perhaps on different machines: a
target is plain data that can be sent to them, a home is opened where it is used. A directory must be reachable under the same path from
every node. Another kind of broker adds a line here; everything else in this folder speaks operations.
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
"""A broker: the storage roots of its directory, the first being the primary one."""

FILE = "file://"


def open_home(target: BrokerRoots, **options: Any) -> Home:
    """The broker, seen from a process that does not own it. Close it. `options` are those of `InboxClient`."""
    return InboxClient.open([*target], **options)


def open_snapshot(target: BrokerRoots) -> Home:
    """The broker as it is published now, to be asked many things that go together. Close it."""
    return Snapshot.open([*target])


def parse_broker(given: str) -> BrokerRoots:
    """The broker that the option of that name gives: a path, or several storage roots as a JSON list of paths, the first one first."""
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
        raise InvalidRequest(f"{MEMORY!r} ends with its process, and Spark's tasks are others; give a directory")
    path = given.removeprefix(FILE)
    if "://" in path:
        scheme = path.partition("://")[0]
        raise InvalidRequest(f"{given!r:.200} cannot be read or written by Spark; this version knows directories, not {scheme}://")
    return os.path.abspath(os.path.expanduser(path))
