"""Those outside of a broker's process, for tests of its inbox.

Owns: `OtherProcess`, who stages and publishes drops and puts errands beside a broker under test (tests/broker/broker_under_test.py); `cut_at_each_call`, a work of
theirs cut off at every file call; and short verbs for the owner's side of a broker run by hand.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from penstock import operations
from penstock.broker.inbox import RemoteAnswer, RemoteOperation
from penstock.logs.columns import encode
from penstock.logs.files.filesystem import Files
from penstock.logs.files.inbox import FileInbox
from penstock.logs.store import StagedPart, WriteManifest, write_name
from penstock.operations import A, Operation, answer_type
from penstock.rules.records import Produced
from penstock.testing import Halt, SimulatedFiles
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of

ROOT = "/data"
BEGAN = 1_700_000_000_000_000
Raw = dict[str, Any]
"""An operation, right or wrong, as what its bytes say."""
KEYS = [f"key-{number}" for number in range(12)]
"""Of the items that most tests here write: texts such as "key-3:1"."""


def errand(operation: Operation[Any] | Raw, answer: bool = True) -> bytes:
    """The bytes that are put into the inbox."""
    raw = msgspec.msgpack.encode(operation) if isinstance(operation, dict) else operations.encode(operation)
    return msgspec.msgpack.encode(RemoteOperation(msgspec.Raw(raw), answer))


class OtherProcess:
    """A process that does not own the directory."""

    def __init__(self, files: Files, root: str = ROOT) -> None:
        self.files = files
        self.root = root
        self.inbox = FileInbox(files, root)
        self._writes = 0
        self._asked = 0
        self._kinds: dict[str, type[Operation[Any]]] = {}

    # -- drops -----------------------------------------------------------------------------------------

    def stage(self, incarnation: int, parts: Sequence[Sequence[Batch]], write: str = "") -> tuple[str, list[StagedPart]]:
        """Write parts, each of some frames, aside; the name of the write, and what a manifest says of its parts."""
        self._writes += 1
        write = write or write_name(BEGAN + self._writes)
        self.inbox.begin_write(write)
        said = []
        for number, batches in enumerate(parts):
            writer = self.inbox.part_writer(write, f"part-{number}.frames", incarnation)
            for batch in batches:
                writer.add(encode([Produced(0, batch)], Moment(0, 0)))
            said.append(writer.finish())
        return write, said

    def publish(self, incarnation: int, *batches: Batch, source: str = "s", number: int = 1, parts: int = 1, write: str = "") -> bool:
        """A drop of these frames, in so many parts; whether it is new to the inbox."""
        shares = [batches[at * len(batches) // parts : (at + 1) * len(batches) // parts] for at in range(parts)]
        write, said = self.stage(incarnation, shares, write)
        return self.inbox.publish(write, incarnation, WriteManifest(said, source, number))

    def drop(self, queue: QueueUnderTest, *texts: str, keyed: bool = True, **options: Any) -> bool:
        """A drop of one frame: of texts such as "key:1", the key of each being what comes before its colon."""
        keys = [text.partition(":")[0] for text in texts] if keyed else None
        return self.publish(queue.incarnation, batch_of(*texts, keys=keys), **options)

    # -- errands ---------------------------------------------------------------------------------------

    def put_errand(self, incarnation: int, operation: Operation[Any] | Raw) -> str:
        """An errand about a queue, which need not be named in it, and that wants an answer; its name."""
        self._asked += 1
        name = f"errand-{self._asked}"
        if isinstance(operation, dict):
            operation = {"queue": incarnation, **operation}
        else:
            operation.queue = incarnation
            self._kinds[name] = type(operation)
        self.inbox.put_operation(incarnation, name, errand(operation))
        return name

    def answer(self, incarnation: int, name: str) -> Any:
        """What was answered, once; an error is raised."""
        found = self.inbox.blob(incarnation, name)
        assert found is not None, f"{name} is not answered"
        self.inbox.remove_blob(incarnation, name)
        reply = msgspec.msgpack.decode(found, type=RemoteAnswer)
        if reply.refused is not None:
            raise reply.refused.error()
        return msgspec.msgpack.decode(reply.answer, type=answer_type(self._kinds[name]) if name in self._kinds else Any)

    # -- looking ---------------------------------------------------------------------------------------

    def inbox_files(self) -> list[str]:
        """What lies in the inbox."""
        path = f"{self.root}/inbox"
        return self.files.list(path) if self.files.exists(path) else []

    def answer_files(self) -> list[str]:
        path = f"{self.root}/answers"
        return self.files.list(path) if self.files.exists(path) else []


def other_process(broker: BrokerUnderTest) -> OtherProcess:
    """Somebody beside a broker on a simulated disk."""
    return OtherProcess(broker.storage.files)  # type: ignore[attr-defined]


def look_into_inbox(broker: BrokerUnderTest) -> bool:
    """By hand: the owner looks into the inbox; whether it did anything."""
    done = broker.embedded.inbox.process()
    broker.turn()
    return done


def ask_through_inbox(broker: BrokerUnderTest, queue: QueueUnderTest, operation: Operation[A]) -> A:
    """An operation through the inbox, and its answer."""
    one = other_process(broker)
    name = one.put_errand(queue.incarnation, operation)
    look_into_inbox(broker)
    found: A = one.answer(queue.incarnation, name)
    return found


def numbers_by_key(served: Sequence[str]) -> dict[str, list[int]]:
    """Of texts such as "key:1", the numbers of each key, as they were served."""
    found: dict[str, list[int]] = {}
    for text in served:
        key, _, number = text.partition(":")
        found.setdefault(key, []).append(int(number))
    return found


def cut_at_each_call(files: SimulatedFiles, work: Callable[[SimulatedFiles], object]) -> Iterator[tuple[SimulatedFiles, bool]]:
    """Copies of a disk on which a work was cut off in its first file call, its second, …; and whether it was done before.

    By a kill, and by power cuts of several chances; the last of each is one after which all was done.
    """
    for seed, power in ((0, False), (1, True), (2, True), (3, True)):
        done = False
        call = 0
        while not done:
            call += 1
            disk = files.copy()
            disk._rng = random.Random(1_000 * seed + call)
            disk.fail(disk.calls + call, "halt")
            try:
                work(disk)
                done = True
            except Halt:
                pass
            disk.clear_faults()
            if power:
                disk.crash()
            else:
                disk.kill()
            yield disk, done


def texts(start: int, stop: int) -> list[str]:
    """Of every key the numbers [start, stop)."""
    return [f"{key}:{number}" for number in range(start, stop) for key in KEYS]


def keyed_batch(*texts: str) -> Batch:
    return batch_of(*texts, keys=[text.partition(":")[0] for text in texts])


def logged_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "penstock" and record.levelno >= logging.WARNING]
