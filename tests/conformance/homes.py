"""The homes that the conformance suite runs on.

To add a kind of home, add a class here and a line in `HOMES`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from penstock import operations
from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.inbox_client import InboxClient
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, Cancel, Home, Operation, answer_type
from penstock.words.errors import PenstockError


class HomeUnderTest:
    """A new broker, and a home through which it is used."""

    extends_leases: ClassVar[bool] = True
    """Whether it extends leases automatically."""
    lease_may_wait: ClassVar[bool] = True
    """Whether a lease may wait for items."""

    def __init__(self, folder: Path) -> None:
        self.stack = ExitStack()
        self.owner = EmbeddedBroker.open(self.target(folder))
        self.stack.callback(self.owner.close)
        self.home = self.open(folder)

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


class InboxHomeUnderTest(HomeUnderTest):
    """A directory that another process owns."""

    extends_leases = False
    lease_may_wait = False

    def open(self, folder: Path) -> Home:
        client = InboxClient.open(self.target(folder))
        self.stack.callback(client.close)
        return client


HOMES: dict[str, Callable[[Path], HomeUnderTest]] = {
    "memory": MemoryHomeUnderTest,
    "directory": DirectoryHomeUnderTest,
    "bytes": EncodedHomeUnderTest,
    "inbox": InboxHomeUnderTest,
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
