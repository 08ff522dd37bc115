"""Writes to a queue from processes that do not own the broker.

Owns: `StagedWriteClient` and `Destination`. Tasks stage part files, the driver publishes them as one write, and the
owner adopts it. Each attempt of a write has a new name; each attempt of a task gives its part files new names.
The client is sent to tasks, so it holds nothing open. Tasks call only `stage` and `abandon_empty`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, TypeVar

import pyarrow as pa

from penstock.logs.store import PartWriter, StagedPart, Staging, write_name
from penstock.operations import FindPublished, FindQueue, FindWrite, Home, PublishWrite, ReadSlotMap
from penstock.rules.slots import SlotMap
from penstock.spark.broker_access import BrokerRoots, open_home
from penstock.spark.merge import Merger
from penstock.spark.part_files import PartFile, PartFileBuilder
from penstock.spark.sort_order import SortOrder
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import PenstockError, QueueNotFound
from penstock.words.sources import WriteContent

FRAMES = ".frames"
LOOK_SECONDS = 0.01
T = TypeVar("T")


class Destination(NamedTuple):
    """The queue of a write, as it was when the write began."""

    queue: str
    incarnation: int
    packed_slot_map: bytes


class StagedWriteClient:
    """Stages and publishes writes, from any process that sees the broker's directory."""

    def __init__(self, roots: BrokerRoots, open_home: Callable[[BrokerRoots], Home] = open_home, clock: Clock | None = None) -> None:
        self._roots = roots
        self._open_home = open_home
        self._clock = clock or SystemClock()
        self._staging: Staging = self._with_home(lambda home: home.staging())

    def _with_home(self, step: Callable[[Home], T]) -> T:
        with closing(self._open_home(self._roots)) as home:
            return step(home)

    def find(self, queue: str) -> Destination:
        """The queue as it is now. QueueNotFound if there is none of that name."""

        def step(home: Home) -> Destination:
            found = home.call(FindQueue(name=queue))
            return Destination(found.name, found.incarnation, home.call(ReadSlotMap(queue=found.incarnation)))

        return self._with_home(step)

    def new_write_name(self) -> str:
        """A new name for a write."""
        return write_name(self._clock.read().wall)

    def prepare(self, write: str) -> None:
        """Make the folder in which a write is staged. Calling it again does no harm."""
        self._staging.begin_write(write)

    def stage(
        self, write: str, destination: Destination, order: SortOrder, batches: Iterator[pa.RecordBatch], task: str, *, prepared: bool = True
    ) -> list[PartFile]:
        """Write the rows of a task attempt into synced part files, for `publish`. Removes them on error.

        prepared: `prepare` was called before; fails if the folder is gone. Otherwise the folder is made if it is
        missing.
        """
        name = f"{task}-{os.urandom(4).hex()}"

        def begin(number: int) -> PartWriter:
            return self._staging.part_writer(write, f"{name}-{number}{FRAMES}", destination.incarnation, make=not prepared)

        builder = PartFileBuilder(SlotMap.unpack(0, destination.packed_slot_map).owners, order, begin, self._clock)
        try:
            return builder.write(batches)
        except BaseException:
            builder.discard()
            raise

    def publish(
        self,
        write: str,
        destination: Destination,
        order: SortOrder,
        source: str,
        number: int,
        files: Sequence[PartFile],
        checksum: int | None = None,
    ) -> bool:
        """Publish the part files, all or none, once for each source and number. False: it was published and waits.

        checksum: of their rows, if the queue shall remember what they held.
        """
        if order.columns:
            files = self._merged(write, destination, order, files)
        parts = [StagedPart(file.name, len(file.frames), file.items) for file in files]
        operation = PublishWrite(queue=destination.incarnation, write=write, source=source, number=number, parts=parts, checksum=checksum)
        return self._with_home(lambda home: home.call(operation))

    def abandon(self, write: str) -> None:
        """Remove everything staged for a write."""
        self._staging.abandon(write)

    def abandon_empty(self, write: str) -> None:
        """Remove the folder of a write if nothing is staged in it."""
        self._staging.abandon_empty(write)

    def published(self, destination: Destination, source: str) -> tuple[int, list[WriteContent]]:
        """The highest published number of a source, 0 if there is none, and what its last writes held."""
        query = FindPublished(queue=destination.incarnation, source=source)
        return self._with_home(lambda home: home.call(query))

    def is_published(self, destination: Destination, source: str, number: int) -> bool:
        """Whether this source and number, or a later one, was published; it may wait for the owner."""
        query = FindWrite(queue=destination.incarnation, source=source, number=number)
        return self._with_home(lambda home: home.call(query)) != "unknown"

    def wait_adopted(self, destination: Destination, source: str, number: int, seconds: float) -> bool:
        """Wait up to `seconds` until the owner has adopted the write; gives whether it has. False without an owner."""
        query = FindWrite(queue=destination.incarnation, source=source, number=number)
        deadline = self._clock.read().elapsed + int(seconds * SECOND)
        pause = threading.Event()

        def step(home: Home) -> bool:
            while (found := home.call(query)) == "waiting" and self._clock.read().elapsed < deadline:
                pause.wait(LOOK_SECONDS)
            return found not in ("waiting", "unattended")

        try:
            return self._with_home(step)
        except QueueNotFound:  # the queue was deleted: nothing to wait for
            return True
        # it is published, though the answer is unknown: an error would make the caller write it again
        except PenstockError:
            return False

    def _merged(self, write: str, destination: Destination, order: SortOrder, files: Sequence[PartFile]) -> list[PartFile]:
        def begin(number: int) -> PartWriter:
            return self._staging.part_writer(write, f"merged-{number:05d}{FRAMES}", destination.incarnation)

        return Merger(self._staging, write, destination.incarnation, order, self._clock).merged(files, begin)

    def __repr__(self) -> str:
        return f"StagedWriteClient({self._roots[0]!r})"
