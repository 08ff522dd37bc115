"""Processes that do not own a broker, for tests of its inbox.

Owns: `OtherProcess`, which publishes writes in the inbox of a broker under test; `cut_at_each_call`, which interrupts
work at every file call; and short functions for the owner's side.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.logs.columns import encode
from penstock.logs.files.filesystem import Files
from penstock.logs.files.inbox import FileInbox
from penstock.logs.store import StagedPart, WriteManifest, write_name
from penstock.operations import A, Operation
from penstock.rules.records import Produced
from penstock.testing import Halt, SimulatedFiles
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of

ROOT = "/data"
BEGAN = 1_700_000_000_000_000
KEYS = [f"key-{number}" for number in range(12)]
"""The keys of the items that most tests here write: texts such as "key-3:1"."""


class OtherProcess:
    """A process that does not own the directory."""

    def __init__(self, files: Files, root: str = ROOT) -> None:
        self.files = files
        self.root = root
        self.inbox = FileInbox(files, root)
        self._writes = 0

    def stage(self, incarnation: int, parts: Sequence[Sequence[Batch]], write: str = "") -> tuple[str, list[StagedPart]]:
        """Stage parts, each of some frames; gives the name of the write, and its parts for the manifest."""
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
        """Publish a write of these frames, in so many parts; gives whether it is new to the inbox."""
        shares = [batches[at * len(batches) // parts : (at + 1) * len(batches) // parts] for at in range(parts)]
        write, said = self.stage(incarnation, shares, write)
        return self.inbox.publish(write, incarnation, WriteManifest(said, source, number))

    def publish_texts(self, queue: QueueUnderTest, *texts: str, keyed: bool = True, **options: Any) -> bool:
        """Publish a write of one frame: of texts such as "key:1", in which the key is before the colon."""
        keys = [text.partition(":")[0] for text in texts] if keyed else None
        return self.publish(queue.incarnation, batch_of(*texts, keys=keys), **options)

    def inbox_files(self) -> list[str]:
        """The names of the files in the inbox."""
        path = f"{self.root}/inbox"
        return self.files.list(path) if self.files.exists(path) else []

    def answer_files(self) -> list[str]:
        path = f"{self.root}/answers"
        return self.files.list(path) if self.files.exists(path) else []


def other_process(broker: BrokerUnderTest) -> OtherProcess:
    """Another process on the simulated disk of a broker."""
    return OtherProcess(broker.storage.files)  # type: ignore[attr-defined]


def process_inbox(broker: BrokerUnderTest) -> bool:
    """Let the owner process its inbox, without threads; gives whether it did anything."""
    done = broker.embedded.inbox.process()
    broker.turn()
    return done


def ask_owner(broker: BrokerUnderTest, queue: QueueUnderTest, operation: Operation[A]) -> A:
    """Call an operation on a queue, as the owner does for another process. Sets its queue."""
    operation.queue = queue.incarnation
    broker.embedded.streams.expire_consumer_rights()  # as the owner's thread does
    try:
        return broker.embedded.call(operation)
    finally:
        broker.turn()


def numbers_by_key(served: Sequence[str]) -> dict[str, list[int]]:
    """From texts such as "key:1": key → its numbers, in the order in which they were served."""
    found: dict[str, list[int]] = {}
    for text in served:
        key, _, number = text.partition(":")
        found.setdefault(key, []).append(int(number))
    return found


def cut_at_each_call(
    files: SimulatedFiles, prepare: Callable[[SimulatedFiles], Callable[[], object]], power_cuts: Sequence[bool], step: int = 1
) -> Iterator[tuple[SimulatedFiles, bool]]:
    """Copies of a disk on which work was cut off in its first file call, its second, …; and whether the work was done
    before.

    prepare: makes a copy ready, and gives the work.
    power_cuts: for each series of cuts, whether it is made by power cuts or by kills. In the last cut of each series
        the work was done.
    step: only every so manyth call; each series begins at another one.
    """
    for seed, power in enumerate(power_cuts):
        done = False
        call = seed * step // len(power_cuts)
        while not done:
            call += step
            disk = files.copy()
            disk._rng = random.Random(1_000 * seed + call)
            work = prepare(disk)
            disk.fail(disk.calls + call, "halt")
            try:
                work()
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
    """Texts with the numbers from start to before stop, for every key."""
    return [f"{key}:{number}" for number in range(start, stop) for key in KEYS]


def keyed_batch(*texts: str) -> Batch:
    return batch_of(*texts, keys=[text.partition(":")[0] for text in texts])


def logged_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "penstock" and record.levelno >= logging.WARNING]
