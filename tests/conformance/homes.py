"""The homes that the conformance suite runs on.

To add a kind of home, add a class here and a line in `HOMES`.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from penstock import operations
from penstock.broker.directory_client import DirectoryClient
from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.shared import SharedBroker
from penstock.broker.targets import open_home
from penstock.logs.log import SEGMENT_BYTES, ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, Cancel, Home, Operation, answer_type
from penstock.words.clock import SECOND
from penstock.words.errors import PenstockError
from tests.server.conftest import serve

OPTIONS: dict[str, Any] = {"durability": "fsync", "segment_bytes": SEGMENT_BYTES, "compression": True, "entropy": os.urandom}


def open_shared_owner(stack: ExitStack, target: str) -> tuple[SharedBroker, EmbeddedBroker]:
    """The broker of a directory that this process owns and shares."""
    shared = SharedBroker(target, own=True, wait=SECOND, **OPTIONS)
    stack.callback(shared.close)
    owner = shared._owner
    assert isinstance(owner, EmbeddedBroker)
    return shared, owner


class HomeUnderTest:
    """A new broker, and a home through which it is used."""

    has_files = True
    """Whether the home reaches the broker's files."""

    def __init__(self, folder: Path) -> None:
        self.stack = ExitStack()
        self.owner = EmbeddedBroker.open(self.target(folder))
        self.stack.callback(self.owner.close)
        self.home: Home = self.open(folder)

    def target(self, folder: Path) -> str:
        return str(folder / "data")

    def open(self, folder: Path) -> Home:
        return self.owner


class MemoryHomeUnderTest(HomeUnderTest):
    """The broker of this process, in memory."""

    def target(self, folder: Path) -> str:
        return "memory://"


class DirectoryHomeUnderTest(HomeUnderTest):
    """The broker of this process, in a directory."""


class EncodedHomeUnderTest(HomeUnderTest):
    """A home that encodes operations and answers as bytes, as a network would."""

    def open(self, folder: Path) -> Home:
        return EncodingHome(self.owner)


class FilesHomeUnderTest(HomeUnderTest):
    """A directory that another process owns (here: another home of this process), with queries from its files."""

    def __init__(self, folder: Path) -> None:
        self.stack = ExitStack()
        _, self.owner = open_shared_owner(self.stack, self.target(folder))
        self.home = DirectoryClient(self.target(folder), SECOND)
        self.stack.callback(self.home.close)


class ClientHomeUnderTest(HomeUnderTest):
    """A directory that another process owns (here: another home of this process), through its socket."""

    def __init__(self, folder: Path) -> None:
        self.stack = ExitStack()
        _, self.owner = open_shared_owner(self.stack, self.target(folder))
        client = SharedBroker(self.target(folder), own=False, wait=SECOND)
        self.stack.callback(client.close)
        self.home = client


class OwnerHomeUnderTest(HomeUnderTest):
    """A directory that this process owns and shares."""

    def __init__(self, folder: Path) -> None:
        self.stack = ExitStack()
        self.home, self.owner = open_shared_owner(self.stack, self.target(folder))


class HttpHomeUnderTest(HomeUnderTest):
    """A directory that a server owns (here: one of this process), over HTTP."""

    has_files = False

    def open(self, folder: Path) -> Home:
        home = open_home(self.stack.enter_context(serve(self.owner)).url)
        self.stack.callback(home.close)
        return home


HOMES: dict[str, Callable[[Path], HomeUnderTest]] = {
    "memory": MemoryHomeUnderTest,
    "directory": DirectoryHomeUnderTest,
    "bytes": EncodedHomeUnderTest,
    "files": FilesHomeUnderTest,
    "owner": OwnerHomeUnderTest,
    "client": ClientHomeUnderTest,
    "http": HttpHomeUnderTest,
}


class EncodingHome:
    """Encodes and decodes every operation and answer."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.clock = home.clock
        self.auto_extend, self.stop_extending, self.close = home.auto_extend, home.stop_extending, home.close

    def call(self, operation: Operation[A], /) -> A:
        answer = self._home.call(operations.decode(operations.encode(operation)))
        passed: A = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=answer_type(type(operation)))
        return passed

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        def callback(answer: Any) -> None:
            if done is not None and not isinstance(answer, PenstockError):
                answer = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=answer_type(type(operation)))
            if done is not None:
                done(answer)

        return self._home.submit(operations.decode(operations.encode(operation)), callback)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._home.log(queue, partition)

    def staging(self) -> Staging:
        return self._home.staging()
