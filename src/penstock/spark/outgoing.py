"""Writing to a broker's directory without owning it.

Owns: `DirectoryWriting`. Tasks stage parts, the driver's commit publishes them as one drop in the inbox, and whoever owns the directory
adopts it. Nothing is locked and no log is touched.
A write has a name of its own, new for every attempt of the whole; a part has one that no other attempt of a task gives.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

import pyarrow as pa

from penstock.broker.snapshot import Snapshot
from penstock.logs.backends import open_inbox
from penstock.logs.files.system import Files
from penstock.logs.store import Manifest, PartWriter, StagedPart, write_name
from penstock.rules.slots import SlotMap
from penstock.spark.framing import Framer, Run
from penstock.spark.home import Destination, Target
from penstock.spark.merging import Merger
from penstock.spark.ordering import Order
from penstock.words.clock import SECOND, Clock, SystemClock

FRAMES = ".frames"
LOOK_SECONDS = 0.01


class DirectoryWriting:
    """A directory that is written to, from any process that reaches it."""

    def __init__(self, target: Target, files: Files | None = None, clock: Clock | None = None) -> None:
        self._target = target
        self._files = files
        self._clock = clock or SystemClock()
        self._inbox = open_inbox(target, files)

    def find(self, queue: str) -> Destination:
        """The queue as it is now."""
        with contextlib.closing(Snapshot.open(self._target, files=self._files)) as snapshot:
            found = snapshot.find(queue)
            return Destination(found.name, found.incarnation, snapshot.map_of(queue).pack())

    def begin(self) -> str:
        """A name for a write that begins now. Its place is made by `prepare`."""
        return write_name(self._clock.read().wall)

    def prepare(self, write: str) -> None:
        """Make the place in which a write is staged; to be repeated without harm."""
        self._inbox.begin(write)

    def stage(
        self, write: str, destination: Destination, order: Order, batches: Iterator[pa.RecordBatch], task: str, *, prepared: bool = True
    ) -> list[Run]:
        """Write the rows of one task attempt aside, durably; what a failed attempt wrote is removed."""
        name = f"{task}-{os.urandom(4).hex()}"

        def begin(number: int) -> PartWriter:
            return self._inbox.writer(write, f"{name}-{number}{FRAMES}", destination.incarnation, make=not prepared)

        framer = Framer(SlotMap.unpack(0, destination.owners).owners, order, begin, self._clock)
        try:
            return framer.write(batches)
        except BaseException:
            framer.discard()
            raise

    def publish(self, write: str, destination: Destination, order: Order, source: str, number: int, runs: Sequence[Run]) -> bool:
        """Let what was staged become items of the queue, all or none, and once for each source and number; False: it waits already."""
        if order.columns:
            runs = self._in_order(write, destination, order, runs)
        parts = [StagedPart(run.name, len(run.frames), run.items) for run in runs]
        return self._inbox.publish(write, destination.incarnation, Manifest(parts, source, number))

    def abandon(self, write: str) -> None:
        """Remove whatever was staged."""
        self._inbox.abandon(write)

    def leave(self, write: str) -> None:
        """Remove the place of a write if nothing is staged in it."""
        self._inbox.abandon_empty(write)

    def known(self, destination: Destination, source: str, number: int) -> bool:
        """Whether this source and number, or a later one, was adopted or waits for it."""
        if self._inbox.pending(destination.incarnation, source, number):  # asked first: what waits no more is in the catalog by then
            return True
        with contextlib.closing(Snapshot.open(self._target, files=self._files)) as snapshot:
            return snapshot.adopted(destination.incarnation, source) >= number

    def settle(self, destination: Destination, source: str, number: int, seconds: float) -> bool:
        """Wait until the owner has adopted what was published, if there is one, and no longer than that; whether it has."""
        deadline = self._clock.read().elapsed + int(seconds * SECOND)
        pause = threading.Event()
        while self._inbox.pending(destination.incarnation, source, number):
            if self._clock.read().elapsed >= deadline or not self._inbox.has_owner():
                return False
            pause.wait(LOOK_SECONDS)
        return True

    def close(self) -> None:
        """Nothing is held."""

    # -- steps ---------------------------------------------------------------------------------------

    def _in_order(self, write: str, destination: Destination, order: Order, runs: Sequence[Run]) -> list[Run]:
        def begin(number: int) -> PartWriter:
            return self._inbox.writer(write, f"merged-{number:05d}{FRAMES}", destination.incarnation)

        return Merger(self._inbox, write, destination.incarnation, order, self._clock).merged(runs, begin)

    def __repr__(self) -> str:
        return f"DirectoryWriting({self._target[0]!r})"
