"""The rows of a task as runs of frames: gathered, put in order, each frame of items of one partition.

Owns: `PartFileBuilder` and `Run`. A run is a part file in which the rows of each home stand in the order asked for; without an order there is one
run, with one there may be several, when more rows come than are sorted at a time: who publishes them looks whether they must be merged
(merge.py). Beside an ordered run lies its sidecar, the columns it is ordered by, row by row as in the frames.
Rows are gathered up to GATHERED_BYTES and GATHERED_ROWS, so that frames are large even where a task writes to many partitions. Frames of
ordered runs are smaller (ORDERED_BYTES): who merges them has one of each run in memory.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.api.arrow import COLUMNS, read_columns
from penstock.logs.arrow_batch import ArrowBatch
from penstock.logs.files.filesystem import storage_failed
from penstock.logs.store import PartWriter
from penstock.spark.sort_order import SortOrder, is_identity
from penstock.words.clock import Clock
from penstock.words.errors import InvalidRequest, StorageFailed
from penstock.words.limits import MAX_BATCH_ITEMS, MIB

GATHERED_BYTES = 64 * MIB
GATHERED_ROWS = 500_000
"""Of small rows it is not their bytes that take memory, but what is worked out for each."""
ORDERED_BYTES = 16 * MIB
SIZE = "__penstock_bytes"
"""The column of a sidecar that tells how large each item is: who merges must know before it reads."""


class StagedFrame(NamedTuple):
    """A frame of a run."""

    partition: int
    """The partition, or FREE."""
    items: int
    position: int
    """Where it begins in the file."""


class PartFile(NamedTuple):
    """A staged part, as its commit message describes it."""

    name: str
    items: int
    frames: list[StagedFrame]

    @property
    def partitions(self) -> set[int]:
        return {frame.partition for frame in self.frames}


class PartFileBuilder:
    """Writes the rows of one task attempt."""

    def __init__(self, owners: "array[int]", order: SortOrder, begin: Callable[[int], PartWriter], clock: Clock) -> None:
        """`begin` opens the part of the run of a number; its file is named after it."""
        self._owners = owners
        self._order = order
        self._begin = begin
        self._clock = clock
        self._gathered_rows = GATHERED_ROWS if order.columns else min(GATHERED_ROWS, MAX_BATCH_ITEMS * len(set(owners)))
        self._rows = 0
        self._writer: PartWriter | None = None
        self._sidecar: pa.ipc.RecordBatchFileWriter | None = None
        self._sidecar_file: BinaryIO | None = None
        self._frames: list[StagedFrame] = []
        self._last: dict[int, pa.Table] = {}
        """Of each home, the last row of this run: the columns it is ordered by."""
        self._runs: list[PartFile] = []
        self._writers: list[PartWriter] = []

    def write(self, batches: Iterator[pa.RecordBatch]) -> list[PartFile]:
        """Stage all rows, durably."""
        held: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            if batch.num_rows:
                held.append(batch)
                rows, size = rows + batch.num_rows, size + batch.nbytes
            if size >= GATHERED_BYTES or rows >= self._gathered_rows:
                self._add(pa.Table.from_batches(held))
                held, rows, size = [], 0, 0
        if held:
            self._add(pa.Table.from_batches(held))
        self._end_run()
        return self._runs

    def discard(self) -> None:
        """Remove what was written, as far as that can be done: why it is not wanted is what the caller is to hear."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._end_sidecar()
        for writer in self._writers:
            with contextlib.suppress(StorageFailed):
                writer.discard()

    # -- steps ---------------------------------------------------------------------------------------

    def _add(self, table: pa.Table) -> None:
        sheet, order = self._sheet(table), table.select(self._order.columns)
        homes = sheet.partitions(self._owners)
        rows = self._order.sort_indices(order, homes) if self._order.columns else pc.array_sort_indices(homes)
        if not is_identity(rows):
            sheet, homes = sheet.take(rows), homes.take(rows)
            order = order.take(rows) if self._order.columns else order
        if self._order.columns:
            order = order.append_column(SIZE, sheet.sizes().cast(pa.int32()))
        ends = pc.run_end_encode(homes)
        stops = [0, *ends.run_ends.to_pylist()]
        groups = [*zip(ends.values.to_pylist(), stops, stops[1:], strict=False)]
        if self._order.columns:
            self._note_order(order, groups)
        for home, start, stop in groups:
            self._add_frames(sheet.slice(start, stop), home)
        self._rows += table.num_rows

    def _sheet(self, table: pa.Table) -> ArrowBatch:
        try:
            return ArrowBatch.from_columns(read_columns(table.select([name for name in table.column_names if name in COLUMNS])))
        except InvalidRequest as error:
            raise InvalidRequest(f"from row {self._rows} of this task on, {error}" if self._rows else f"in this task, {error}") from None

    def _add_frames(self, sheet: ArrowBatch, home: int) -> None:
        writer = self._open()
        steps, now = sheet.frame_boundaries(ORDERED_BYTES if self._order.columns else None), self._clock.read()
        for start, stop in pairwise(steps):
            position = writer.add(sheet.slice(start, stop).draft(now), max(home, 0))
            self._frames.append(StagedFrame(home, stop - start, position))

    def _open(self) -> PartWriter:
        if self._writer is None:
            self._writer = self._begin(len(self._runs))
            self._writers.append(self._writer)
        return self._writer

    def _note_order(self, order: pa.Table, groups: Sequence[tuple[int, int, int]]) -> None:
        """Put the rows into the sidecar; begin another run when they do not follow what is in this one."""
        for home, start, _ in groups:
            if home in self._last and not self._order.follows(self._last[home], order.slice(start, 1)):
                self._end_run()
                break
        writer = self._open()
        writer.begin()  # before the sidecar is made: a folder with a part in it is there to stay
        try:
            if self._sidecar is None:
                self._sidecar_file = writer.sidecar()
                self._sidecar = pa.ipc.new_file(self._sidecar_file, order.schema)
            self._sidecar.write_table(order)
        except OSError as error:
            raise storage_failed(error, "writing", self._sidecar_name(writer)) from error
        for home, _, stop in groups:
            self._last[home] = order.take([stop - 1])  # a copy: a slice would keep everything

    def _end_run(self) -> None:
        if self._writer is None:
            return
        name = self._sidecar_name(self._writer)
        try:
            self._end_sidecar()
        except OSError as error:
            raise storage_failed(error, "writing", name) from error
        part = self._writer.finish()
        self._runs.append(PartFile(part.name, part.items, self._frames))
        self._writer, self._frames, self._last = None, [], {}

    def _sidecar_name(self, writer: PartWriter) -> str:
        """For messages: its path, where it is a file."""
        return getattr(self._sidecar_file, "name", f"the sidecar of {writer.name}")

    def _end_sidecar(self) -> None:
        writer, file = self._sidecar, self._sidecar_file
        self._sidecar = self._sidecar_file = None
        try:
            if writer is not None:
                writer.close()
        finally:
            if file is not None:
                file.close()
