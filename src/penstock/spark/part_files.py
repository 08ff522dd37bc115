"""Writes the rows of a task into part files, whose frames hold items of one partition each.

Owns: `PartFileBuilder` and `PartFile`. Without orderBy a task writes one part file. With orderBy the rows of each
partition are sorted within a part file, and a task writes several files if it has more rows than are sorted at a time;
the driver merges them where needed (merge.py). Each ordered part file has a sidecar: a file with the columns of
orderBy, in the order of the rows.
Rows are collected up to GATHERED_BYTES and GATHERED_ROWS, so that frames are large even if a task writes to many
partitions. Frames of ordered files are smaller (ORDERED_BYTES): a merge holds one frame of each file in memory.
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
"""Limits memory where rows are small: sorting and routing need memory for each row."""
ORDERED_BYTES = 16 * MIB
SIZE = "__penstock_bytes"
"""The column of a sidecar with the size of each item, which a merge needs before it reads the frames."""


class StagedFrame(NamedTuple):
    """A frame of a part file."""

    partition: int
    """The partition, or ANY_PARTITION."""
    items: int
    position: int
    """Where the frame begins in the file."""


class PartFile(NamedTuple):
    """A staged part file, as the task's commit message describes it."""

    name: str
    items: int
    frames: list[StagedFrame]

    @property
    def partitions(self) -> set[int]:
        return {frame.partition for frame in self.frames}


class PartFileBuilder:
    """Writes the rows of one task attempt."""

    def __init__(self, owners: "array[int]", order: SortOrder, begin: Callable[[int], PartWriter], clock: Clock) -> None:
        """`begin` opens the part file of a number."""
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
        """The last row of each partition in this file: its columns of orderBy."""
        self._files: list[PartFile] = []
        self._writers: list[PartWriter] = []

    def write(self, batches: Iterator[pa.RecordBatch]) -> list[PartFile]:
        """Write all rows into part files and sync them."""
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
        self._end_file()
        return self._files

    def discard(self) -> None:
        """Remove what was written. Ignores errors: the caller raises the error that made the write fail."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._end_sidecar()
        for writer in self._writers:
            with contextlib.suppress(StorageFailed):
                writer.discard()

    # -- steps ---------------------------------------------------------------------------------------

    def _add(self, table: pa.Table) -> None:
        """Write collected rows, grouped by partition and sorted."""
        batch, sort_columns = self._batch(table), table.select(self._order.columns)
        partitions = batch.partitions(self._owners)
        rows = self._order.sort_indices(sort_columns, partitions) if self._order.columns else pc.array_sort_indices(partitions)
        if not is_identity(rows):
            batch, partitions = batch.take(rows), partitions.take(rows)
            sort_columns = sort_columns.take(rows) if self._order.columns else sort_columns
        if self._order.columns:
            sort_columns = sort_columns.append_column(SIZE, batch.sizes().cast(pa.int32()))
        ends = pc.run_end_encode(partitions)
        stops = [0, *ends.run_ends.to_pylist()]
        groups = [*zip(ends.values.to_pylist(), stops, stops[1:], strict=False)]
        if self._order.columns:
            self._write_sidecar(sort_columns, groups)
        for partition, start, stop in groups:
            self._add_frames(batch.slice(start, stop), partition)
        self._rows += table.num_rows

    def _batch(self, table: pa.Table) -> ArrowBatch:
        try:
            return ArrowBatch.from_columns(read_columns(table.select([name for name in table.column_names if name in COLUMNS])))
        except InvalidRequest as error:
            raise InvalidRequest(f"from row {self._rows} of this task on, {error}" if self._rows else f"in this task, {error}") from None

    def _add_frames(self, batch: ArrowBatch, partition: int) -> None:
        writer = self._open()
        boundaries, now = batch.frame_boundaries(ORDERED_BYTES if self._order.columns else None), self._clock.read()
        for start, stop in pairwise(boundaries):
            position = writer.add(batch.slice(start, stop).draft(now), max(partition, 0))
            self._frames.append(StagedFrame(partition, stop - start, position))

    def _open(self) -> PartWriter:
        if self._writer is None:
            self._writer = self._begin(len(self._files))
            self._writers.append(self._writer)
        return self._writer

    def _write_sidecar(self, sort_columns: pa.Table, groups: Sequence[tuple[int, int, int]]) -> None:
        """Write the rows' columns of orderBy; begin another part file if they do not sort after its last rows."""
        for partition, start, _ in groups:
            if partition in self._last and not self._order.follows(self._last[partition], sort_columns.slice(start, 1)):
                self._end_file()
                break
        writer = self._open()
        writer.begin()  # before the sidecar: a folder that holds a part is not removed as empty
        try:
            if self._sidecar is None:
                self._sidecar_file = writer.sidecar()
                self._sidecar = pa.ipc.new_file(self._sidecar_file, sort_columns.schema)
            self._sidecar.write_table(sort_columns)
        except OSError as error:
            raise storage_failed(error, "writing", self._sidecar_name(writer)) from error
        for partition, _, stop in groups:
            # a copy: a slice would keep the whole table in memory
            self._last[partition] = sort_columns.take([stop - 1])

    def _end_file(self) -> None:
        if self._writer is None:
            return
        name = self._sidecar_name(self._writer)
        try:
            self._end_sidecar()
        except OSError as error:
            raise storage_failed(error, "writing", name) from error
        part = self._writer.finish()
        self._files.append(PartFile(part.name, part.items, self._frames))
        self._writer, self._frames, self._last = None, [], {}

    def _sidecar_name(self, writer: PartWriter) -> str:
        """The path of the sidecar, for messages."""
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
