"""Writing to a broker's directory without owning it.

Owns: `DirectoryWriting`. Tasks stage parts, the driver's commit publishes them as one drop in the inbox, and whoever owns the directory
adopts it. Nothing is locked and no log is touched.
A write has a name of its own, new for every attempt of the whole; a part has one that no other attempt of a task gives.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa

from penstock.broker.snapshot import Snapshot
from penstock.logs.failures import storage_failed
from penstock.logs.files.drops import STAGED, Drops, Manifest, Part, write_name
from penstock.logs.files.marker import INBOX, LOCK
from penstock.logs.files.staging import StagedWriter
from penstock.logs.files.system import Files, SystemFiles
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
        self._root = target[0]
        self._files = files or SystemFiles()
        self._clock = clock or SystemClock()
        self._drops = Drops(self._files, self._root)

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
        try:
            self._drops.begin(write)
        except OSError as error:
            raise storage_failed(error, "writing to", self._root) from error

    def stage(
        self, write: str, destination: Destination, order: Order, batches: Iterator[pa.RecordBatch], task: str, *, prepared: bool = True
    ) -> list[Run]:
        """Write the rows of one task attempt aside, durably; what a failed attempt wrote is removed."""
        folder, name = self._folder(write), f"{task}-{os.urandom(4).hex()}"
        make_folder = None if prepared else partial(self._drops.begin, write)

        def begin(number: int) -> StagedWriter:
            return StagedWriter(self._files, f"{folder}/{name}-{number}{FRAMES}", destination.incarnation, make_folder)

        framer = Framer(SlotMap.unpack(0, destination.owners).owners, order, begin, self._clock)
        try:
            return framer.write(batches)
        except BaseException:
            framer.discard()
            raise

    def publish(self, write: str, destination: Destination, order: Order, source: str, number: int, runs: Sequence[Run]) -> bool:
        """Let what was staged become items of the queue, all or none, and once for each source and number; False: it waits already."""
        folder = self._folder(write)
        try:
            if order.columns:
                runs = self._in_order(folder, destination, order, runs)
            named = {run.name for run in runs}
            for file in self._files.list(folder):
                if file not in named:  # of attempts that failed or came second, and what the rows were ordered by
                    self._files.remove(f"{folder}/{file}")
            parts = [Part(run.name, len(run.frames), run.items) for run in runs]
            return self._drops.publish(write, destination.incarnation, Manifest(parts, source, number))
        except OSError as error:
            raise storage_failed(error, "writing to", self._root) from error

    def abandon(self, write: str) -> None:
        """Remove whatever was staged."""
        try:
            self._drops.abandon(write)
        except OSError as error:
            raise storage_failed(error, "writing to", self._root) from error

    def leave(self, write: str) -> None:
        """Remove the place of a write if nothing is staged in it."""
        with contextlib.suppress(OSError):
            self._files.remove_directory(self._folder(write))

    def known(self, destination: Destination, source: str, number: int) -> bool:
        """Whether this source and number, or a later one, was adopted or waits for it."""
        if self._drops.pending(destination.incarnation, source, number):  # asked first: what waits no more is in the catalog by then
            return True
        with contextlib.closing(Snapshot.open(self._target, files=self._files)) as snapshot:
            return snapshot.adopted(destination.incarnation, source) >= number

    def settle(self, destination: Destination, source: str, number: int, seconds: float) -> bool:
        """Wait until the owner has adopted what was published, if there is one, and no longer than that; whether it has."""
        deadline = self._clock.read().elapsed + int(seconds * SECOND)
        pause = threading.Event()
        while self._drops.pending(destination.incarnation, source, number):
            if self._clock.read().elapsed >= deadline or not self._is_owned():
                return False
            pause.wait(LOOK_SECONDS)
        return True

    def close(self) -> None:
        """Nothing is held."""

    # -- steps ---------------------------------------------------------------------------------------

    def _folder(self, write: str) -> str:
        return f"{self._root}/{INBOX}/{write}{STAGED}"

    def _in_order(self, folder: str, destination: Destination, order: Order, runs: Sequence[Run]) -> list[Run]:
        def begin(number: int) -> StagedWriter:
            return StagedWriter(self._files, f"{folder}/merged-{number:05d}{FRAMES}", destination.incarnation)

        return Merger(self._files, folder, destination.incarnation, order, self._clock).merged(runs, begin)

    def _is_owned(self) -> bool:
        """Whether somebody has the directory open. Nobody is kept from opening it but for the moment of the look."""
        try:
            handle = self._files.lock(f"{self._root}/{LOCK}")
        except OSError:
            return True  # it cannot be told from here, so there may be somebody
        if handle is None:
            return True
        self._files.close(handle)
        return False

    def __repr__(self) -> str:
        return f"DirectoryWriting({self._root!r})"
