"""Merges the part files of several tasks so that the rows of each partition are in the order of orderBy.

Owns: `Merger`. Each part file is sorted. If two of them hold rows of the same partition, it may be enough to adopt the
files in another order. If not, the files that share a partition are written again, one partition at a time: the
sidecars of the partition are sorted as a whole, and the frames are read along, each once. Memory holds the sidecars of
one partition, a frame of each file, and the frame that is built from them. One file is open at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs.arrow_batch import ANY_PARTITION, ArrowBatch, batch_boundaries
from penstock.logs.store import PartWriter, Staging
from penstock.spark.part_files import ORDERED_BYTES, SIZE, PartFile, StagedFrame
from penstock.spark.sort_order import SortOrder
from penstock.words.clock import Clock


class Merger:
    """Merges the part files of one write."""

    def __init__(self, staging: Staging, write: str, incarnation: int, order: SortOrder, clock: Clock) -> None:
        self._staging = staging
        self._write = write
        self._incarnation = incarnation
        self._order = order
        self._clock = clock
        self._sidecars: dict[str, pa.Table] = {}

    def merged(self, files: Sequence[PartFile], begin: Callable[[int], PartWriter]) -> list[PartFile]:
        """Part files which, adopted in this order, have each partition's rows in order. `begin` opens part n."""
        holders = Counter(partition for file in files for partition in file.partitions)
        shared = {partition for partition, count in holders.items() if count > 1} - {ANY_PARTITION}
        involved = [file for file in files if file.partitions & shared]
        if not involved:
            return [*files]
        self._sidecars = {file.name: self._read_sidecar(file) for file in involved}
        others = [file for file in files if not file.partitions & shared]
        indexes = self._by_first_row(involved)
        if self._is_ordered(involved, indexes, shared):
            return [*others, *(involved[index] for index in indexes)]
        partitions = sorted(set().union(*(file.partitions for file in involved)))
        return [*others, *(self._merge(involved, partition, begin(number)) for number, partition in enumerate(partitions))]

    def _read_sidecar(self, part: PartFile) -> pa.Table:
        with self._staging.sidecar(self._write, part.name) as file:
            return pa.ipc.open_file(file).read_all()

    # -- whether another order of the files is enough ------------------------------------------------

    def _by_first_row(self, files: Sequence[PartFile]) -> list[int]:
        """The indexes of the files, sorted by their first rows."""
        firsts = pa.concat_tables([self._sidecars[file.name].slice(0, 1) for file in files])
        indexes: list[int] = self._order.sort_indices(firsts).to_pylist()
        return indexes

    def _is_ordered(self, files: Sequence[PartFile], indexes: Sequence[int], partitions: set[int]) -> bool:
        """Whether each partition's rows are in order when the files are adopted so; equal rows in the given order."""
        last: dict[int, tuple[int, pa.Table]] = {}
        for index in indexes:
            for partition in files[index].partitions & partitions:
                rows = self._rows_of(files[index], partition)
                if partition in last and not self._may_follow(*last[partition], index, rows.slice(0, 1)):
                    return False
                last[partition] = index, rows.slice(rows.num_rows - 1, 1)
        return True

    def _may_follow(self, index: int, before: pa.Table, next_index: int, after: pa.Table) -> bool:
        return self._order.follows(before, after) if index < next_index else not self._order.follows(after, before)

    def _rows_of(self, file: PartFile, partition: int) -> pa.Table:
        """The rows of a partition in a file's sidecar, in their order."""
        found, at = [], 0
        for frame in file.frames:
            if frame.partition == partition:
                found.append(self._sidecars[file.name].slice(at, frame.items))
            at += frame.items
        return pa.concat_tables(found)

    # -- one partition -------------------------------------------------------------------------------

    def _merge(self, files: Sequence[PartFile], partition: int, writer: PartWriter) -> PartFile:
        """Write all rows of a partition into one new part file, in order."""
        having = [file for file in files if partition in file.partitions]
        sidecars = [self._rows_of(file, partition) for file in having]
        whole = pa.concat_tables(sidecars)
        rows = self._order.sort_indices(whole)
        origin = pa.concat_arrays([pa.repeat(pa.scalar(index, pa.int32()), each.num_rows) for index, each in enumerate(sidecars)]).take(
            rows
        )
        sources = [_Source(self._staging, self._write, self._incarnation, file, partition) for file in having]
        frames: list[StagedFrame] = []
        for start, stop in pairwise(batch_boundaries(whole[SIZE].take(rows), ORDERED_BYTES)):
            counts = dict(zip(*_counted(origin.slice(start, stop - start)), strict=True))
            batch = ArrowBatch.join([sources[index].take(counts[index]) for index in sorted(counts)])
            # The next rows of each file are joined: they are in the order of their indexes in `whole`, ascending.
            # The inverse of the permutation that sorts these indexes puts the rows into the order of `rows`.
            batch = batch.take(pc.array_sort_indices(pc.array_sort_indices(rows.slice(start, stop - start))))
            frames.append(StagedFrame(partition, stop - start, writer.add(batch.draft(self._clock.read()), max(partition, 0))))
        part = writer.finish()
        return PartFile(part.name, part.items, frames)


class _Source:
    """Reads the rows of one partition from one part file, in order."""

    def __init__(self, staging: Staging, write: str, incarnation: int, file: PartFile, partition: int) -> None:
        self._open = partial(staging.part_reader, write, file.name, incarnation)
        self._batches = self._read(file, partition)
        self._rest = next(self._batches)

    def _read(self, file: PartFile, partition: int) -> Iterator[ArrowBatch]:
        for sequence, frame in enumerate(file.frames, 1):
            if frame.partition == partition:
                with closing(self._open()) as reader:  # open one at a time: there may be many files
                    found = reader.at(frame.position, sequence)
                yield ArrowBatch.from_frame(found)

    def take(self, count: int) -> ArrowBatch:
        """The next `count` rows; there must be so many."""
        found = []
        while count:
            if not len(self._rest):
                self._rest = next(self._batches)
            taken = min(count, len(self._rest))
            found.append(self._rest.slice(0, taken))
            self._rest = self._rest.slice(taken, len(self._rest))
            count -= taken
        return ArrowBatch.join(found)


def _counted(values: pa.Array) -> tuple[list[int], list[int]]:
    found = pc.value_counts(values)
    return found.field("values").to_pylist(), found.field("counts").to_pylist()
