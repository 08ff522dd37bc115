"""Writing to a queue without owning it.

Owns: `StagedWriteClient` and `Destination`. Tasks stage parts, the driver's commit publishes them as one drop, and the queue's owner adopts it.
A write has a name of its own, new for every attempt of the whole; a part has one that no other attempt of a task gives.
It is sent to tasks, so it holds nothing open; only `stage` and `leave` are theirs.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, TypeVar

import pyarrow as pa

from penstock.logs.store import PartWriter, StagedPart, Staging, write_name
from penstock.operations import FindQueue, FindWrite, Home, PublishWrite, ReadSlotMap
from penstock.rules.slots import SlotMap
from penstock.spark.broker_access import BrokerRoots, open_home
from penstock.spark.merge import Merger
from penstock.spark.part_files import PartFile, PartFileBuilder
from penstock.spark.sort_order import SortOrder
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import PenstockError, QueueNotFound

FRAMES = ".frames"
LOOK_SECONDS = 0.01
T = TypeVar("T")


class Destination(NamedTuple):
    """A queue that is written to, as it was when the write began."""

    queue: str
    incarnation: int
    packed_slot_map: bytes
    """Its slot map, packed."""


class StagedWriteClient:
    """A broker that is written to, from any process that reaches it."""

    def __init__(self, target: BrokerRoots, open_home: Callable[[BrokerRoots], Home] = open_home, clock: Clock | None = None) -> None:
        self._target = target
        self._open_home = open_home
        self._clock = clock or SystemClock()
        self._staging: Staging = self._ask(lambda home: home.staging())

    def _ask(self, step: Callable[[Home], T]) -> T:
        with closing(self._open_home(self._target)) as home:
            return step(home)

    def find(self, queue: str) -> Destination:
        """The queue as it is now."""

        def step(home: Home) -> Destination:
            found = home.call(FindQueue(name=queue))
            return Destination(found.name, found.incarnation, home.call(ReadSlotMap(queue=found.incarnation)))

        return self._ask(step)

    def new_write_name(self) -> str:
        """A name for a write that begins now. Its place is made by `prepare`."""
        return write_name(self._clock.read().wall)

    def prepare(self, write: str) -> None:
        """Make the place in which a write is staged; to be repeated without harm."""
        self._staging.begin_write(write)

    def stage(
        self, write: str, destination: Destination, order: SortOrder, batches: Iterator[pa.RecordBatch], task: str, *, prepared: bool = True
    ) -> list[PartFile]:
        """Write the rows of one task attempt aside, durably; gives what `publish` wants to know of them. What a failed attempt wrote is
        removed.

        prepared: without its place nothing is written; else the place is made where it is missing, also when it was left meanwhile.
        """
        name = f"{task}-{os.urandom(4).hex()}"

        def begin(number: int) -> PartWriter:
            return self._staging.part_writer(write, f"{name}-{number}{FRAMES}", destination.incarnation, make=not prepared)

        framer = PartFileBuilder(SlotMap.unpack(0, destination.packed_slot_map).owners, order, begin, self._clock)
        try:
            return framer.write(batches)
        except BaseException:
            framer.discard()
            raise

    def publish(self, write: str, destination: Destination, order: SortOrder, source: str, number: int, runs: Sequence[PartFile]) -> bool:
        """Let what was staged become items of the queue, all or none, and once for each source and number; False: it waits already."""
        if order.columns:
            runs = self._in_order(write, destination, order, runs)
        parts = [StagedPart(run.name, len(run.frames), run.items) for run in runs]
        operation = PublishWrite(queue=destination.incarnation, write=write, source=source, number=number, parts=parts)
        return self._ask(lambda home: home.call(operation))

    def abandon(self, write: str) -> None:
        """Remove whatever was staged."""
        self._staging.abandon(write)

    def abandon_empty(self, write: str) -> None:
        """Remove the place of a write if nothing is staged in it."""
        self._staging.abandon_empty(write)

    def is_published(self, destination: Destination, source: str, number: int) -> bool:
        """Whether this source and number, or a later one, became items of the queue before, or waits for it."""
        query = FindWrite(queue=destination.incarnation, source=source, number=number)
        return self._ask(lambda home: home.call(query)) != "unknown"

    def wait_adopted(self, destination: Destination, source: str, number: int, seconds: float) -> bool:
        """Wait until the owner has adopted what was published, if there is one, and no longer than that; whether it has."""
        query = FindWrite(queue=destination.incarnation, source=source, number=number)
        deadline = self._clock.read().elapsed + int(seconds * SECOND)
        pause = threading.Event()

        def step(home: Home) -> bool:
            while (found := home.call(query)) == "waiting" and self._clock.read().elapsed < deadline:
                pause.wait(LOOK_SECONDS)
            return found not in ("waiting", "unattended")

        try:
            return self._ask(step)
        except QueueNotFound:  # deleted since: there is nothing more to wait for
            return True
        except PenstockError:  # it is published, whatever cannot be looked at now: nobody must write it again
            return False

    def _in_order(self, write: str, destination: Destination, order: SortOrder, runs: Sequence[PartFile]) -> list[PartFile]:
        def begin(number: int) -> PartWriter:
            return self._staging.part_writer(write, f"merged-{number:05d}{FRAMES}", destination.incarnation)

        return Merger(self._staging, write, destination.incarnation, order, self._clock).merged(runs, begin)

    def __repr__(self) -> str:
        return f"StagedWrites({self._target[0]!r})"
