"""Runs of several tasks put in one order.

Owns: `Merger`. When an order is asked for and two runs hold rows of the same partition, these would follow each other run by run. If it is
enough to sort the runs, they are; else those that share a partition are written anew, one partition at a time: the sidecars are sorted as
a whole, and the frames are read alongside, each once. What is in memory at a time is a partition's sidecars, a frame of each run, and a
frame that is made of them; open is one file.
"""

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
    """Merges runs of one write."""

    def __init__(self, staging: Staging, write: str, incarnation: int, order: SortOrder, clock: Clock) -> None:
        self._staging = staging
        self._write = write
        self._incarnation = incarnation
        self._order = order
        self._clock = clock
        self._orders: dict[str, pa.Table] = {}

    def merged(self, runs: Sequence[PartFile], begin: Callable[[int], PartWriter]) -> list[PartFile]:
        """The runs such that, taken one after the other, each home's rows stand in order. `begin` opens a part by its number."""
        shared = {home for home in set().union(*(run.partitions for run in runs)) if sum(home in run.partitions for run in runs) > 1} - {
            ANY_PARTITION
        }
        involved = [run for run in runs if run.partitions & shared]
        if not involved:
            return [*runs]
        self._orders = {run.name: self._read_sidecar(run) for run in involved}
        others = [run for run in runs if not run.partitions & shared]
        places = self._sorted(involved)
        if self._follow(involved, places, shared):
            return [*others, *(involved[place] for place in places)]
        homes = sorted(set().union(*(run.partitions for run in involved)))
        return [*others, *(self._merge(involved, home, begin(place)) for place, home in enumerate(homes))]

    def _read_sidecar(self, run: PartFile) -> pa.Table:
        with self._staging.sidecar(self._write, run.name) as file:
            return pa.ipc.open_file(file).read_all()

    # -- whether it is enough to sort them -----------------------------------------------------------

    def _sorted(self, runs: Sequence[PartFile]) -> list[int]:
        """Their places, by their first rows."""
        firsts = pa.concat_tables([self._orders[run.name].slice(0, 1) for run in runs])
        found: list[int] = self._order.sort_indices(firsts).to_pylist()
        return found

    def _follow(self, runs: Sequence[PartFile], places: Sequence[int], homes: set[int]) -> bool:
        """Whether the rows of each home stand in order when the runs are taken so; equal ones as they came."""
        last: dict[int, tuple[int, pa.Table]] = {}
        for place in places:
            for home in runs[place].partitions & homes:
                rows = self._rows_of(runs[place], home)
                if home in last and not self._may_follow(*last[home], place, rows.slice(0, 1)):
                    return False
                last[home] = place, rows.slice(rows.num_rows - 1, 1)
        return True

    def _may_follow(self, place: int, before: pa.Table, next_place: int, after: pa.Table) -> bool:
        return self._order.follows(before, after) if place < next_place else not self._order.follows(after, before)

    def _rows_of(self, run: PartFile, home: int) -> pa.Table:
        """What the sidecar says of the rows of a home, in their order."""
        found, at = [], 0
        for frame in run.frames:
            if frame.partition == home:
                found.append(self._orders[run.name].slice(at, frame.items))
            at += frame.items
        return pa.concat_tables(found)

    # -- one partition -------------------------------------------------------------------------------

    def _merge(self, runs: Sequence[PartFile], home: int, writer: PartWriter) -> PartFile:
        having = [run for run in runs if home in run.partitions]
        orders = [self._rows_of(run, home) for run in having]
        whole = pa.concat_tables(orders)
        rows = self._order.sort_indices(whole)
        origin = pa.concat_arrays([pa.repeat(pa.scalar(place, pa.int32()), order.num_rows) for place, order in enumerate(orders)]).take(
            rows
        )
        sources = [_Source(self._staging, self._write, self._incarnation, run, home) for run in having]
        placed: list[StagedFrame] = []
        for start, stop in pairwise(batch_boundaries(whole[SIZE].take(rows), ORDERED_BYTES)):
            counts = dict(zip(*_counted(origin.slice(start, stop - start)), strict=True))
            sheet = ArrowBatch.join([sources[place].take(counts[place]) for place in sorted(counts)])
            # Of each run the next rows are taken: joined, they stand as their indexes would if sorted. The inverse mends that.
            sheet = sheet.take(pc.array_sort_indices(pc.array_sort_indices(rows.slice(start, stop - start))))
            placed.append(StagedFrame(home, stop - start, writer.add(sheet.draft(self._clock.read()), max(home, 0))))
        part = writer.finish()
        return PartFile(part.name, part.items, placed)


class _Source:
    """The rows of one home in one run, one after the other."""

    def __init__(self, staging: Staging, write: str, incarnation: int, run: PartFile, home: int) -> None:
        self._open = partial(staging.part_reader, write, run.name, incarnation)
        self._sheets = self._read(run, home)
        self._rest = next(self._sheets)

    def _read(self, run: PartFile, home: int) -> Iterator[ArrowBatch]:
        for sequence, frame in enumerate(run.frames, 1):
            if frame.partition == home:
                with closing(self._open()) as reader:  # there may be more runs than files may be open
                    found = reader.at(frame.position, sequence)
                yield ArrowBatch.from_frame(found)

    def take(self, count: int) -> ArrowBatch:
        """The next so many rows, which are there."""
        found = []
        while count:
            if not len(self._rest):
                self._rest = next(self._sheets)
            taken = min(count, len(self._rest))
            found.append(self._rest.slice(0, taken))
            self._rest = self._rest.slice(taken, len(self._rest))
            count -= taken
        return ArrowBatch.join(found)


def _counted(values: pa.Array) -> tuple[list[int], list[int]]:
    found = pc.value_counts(values)
    return found.field("values").to_pylist(), found.field("counts").to_pylist()
