"""The homes that the conformance suite runs on.

A kind of home joins by a class here and a line in `HOMES`. Each opens its home on a new broker, and says whether it may change anything.
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
    """A new broker, and the home under test: of the broker itself, or of somebody who only reaches it."""

    keeps_leases: ClassVar[bool] = True
    """Whether it keeps leases from ending."""
    lease_may_wait: ClassVar[bool] = True
    """Whether a lease may wait in it."""

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
    """A home that sends operations and answers as bytes, as every wire does."""

    def open(self, folder: Path) -> Home:
        return EncodingHome(self.owner)


class InboxHomeUnderTest(HomeUnderTest):
    """A directory that another process owns."""

    keeps_leases = False
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
    """Passes everything on as bytes."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.clock = home.clock
        self.keep, self.let_go, self.close = home.keep, home.let_go, home.close

    def call(self, operation: Operation[A], /) -> A:
        answer = self._home.call(operations.decode(operations.encode(operation)))
        passed: A = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=answer_type(type(operation)))
        return passed

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        def tell(answer: Any) -> None:
            if done is not None and not isinstance(answer, PenstockError):
                answer = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=answer_type(type(operation)))
            if done is not None:
                done(answer)

        return self._home.submit(operations.decode(operations.encode(operation)), tell)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._home.log(queue, partition)

    def staging(self) -> Staging:
        return self._home.staging()
