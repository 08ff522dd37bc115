"""Runs of several tasks put in one order.

Owns: `Merger`. When an order is asked for and two runs hold rows of the same partition, these would follow each other run by run. If it is
enough to sort the runs, they are; else those that share a partition are written anew, one partition at a time: the sidecars are sorted as
a whole, and the frames are read alongside, each once. What is in memory at a time is a partition's sidecars and a frame of each run.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs.drafting import FREE, Sheet
from penstock.logs.files import Files
from penstock.logs.staging import StagedReader, StagedWriter
from penstock.spark.framing import SIDECAR, Placed, Run
from penstock.spark.ordering import Order
from penstock.words.clock import Clock
from penstock.words.limits import MAX_BATCH_ITEMS


class Merger:
    """Merges runs that lie in one folder."""

    def __init__(self, files: Files, folder: str, incarnation: int, order: Order, clock: Clock) -> None:
        self._files = files
        self._folder = folder
        self._incarnation = incarnation
        self._order = order
        self._clock = clock
        self._orders: dict[str, pa.Table] = {}

    def merged(self, runs: Sequence[Run], begin: Callable[[int], StagedWriter]) -> list[Run]:
        """The runs such that, taken one after the other, each home's rows stand in order. `begin` opens a part by its number."""
        shared = {home for home in set().union(*(run.homes for run in runs)) if sum(home in run.homes for run in runs) > 1} - {FREE}
        involved = [run for run in runs if run.homes & shared]
        if not involved:
            return [*runs]
        self._orders = {run.name: _read_sidecar(f"{self._folder}/{run.name}{SIDECAR}") for run in involved}
        others = [run for run in runs if not run.homes & shared]
        sorted_runs = self._sorted(involved)
        if self._follow(sorted_runs, shared):
            return [*others, *sorted_runs]
        homes = sorted(set().union(*(run.homes for run in involved)))
        return [*others, *(self._merge(involved, home, begin(place)) for place, home in enumerate(homes))]

    # -- whether it is enough to sort them -----------------------------------------------------------

    def _sorted(self, runs: Sequence[Run]) -> list[Run]:
        """By their first rows."""
        firsts = pa.concat_tables([self._orders[run.name].slice(0, 1) for run in runs])
        return [runs[place] for place in self._order.rows(firsts).to_pylist()]

    def _follow(self, runs: Sequence[Run], homes: set[int]) -> bool:
        last: dict[int, pa.Table] = {}
        for run in runs:
            for home in run.homes & homes:
                rows = self._rows_of(run, home)
                if home in last and not self._order.follows(last[home], rows.slice(0, 1)):
                    return False
                last[home] = rows.slice(rows.num_rows - 1, 1)
        return True

    def _rows_of(self, run: Run, home: int) -> pa.Table:
        """What the sidecar says of the rows of a home, in their order."""
        found, at = [], 0
        for frame in run.frames:
            if frame.home == home:
                found.append(self._orders[run.name].slice(at, frame.items))
            at += frame.items
        return pa.concat_tables(found)

    # -- one partition -------------------------------------------------------------------------------

    def _merge(self, runs: Sequence[Run], home: int, writer: StagedWriter) -> Run:
        having = [run for run in runs if home in run.homes]
        orders = [self._rows_of(run, home) for run in having]
        rows = self._order.rows(pa.concat_tables(orders))
        origin = pa.concat_arrays([pa.repeat(pa.scalar(place, pa.int32()), order.num_rows) for place, order in enumerate(orders)]).take(
            rows
        )
        sources = [_Source(self._files, f"{self._folder}/{run.name}", self._incarnation, run, home) for run in having]
        placed: list[Placed] = []
        try:
            for start in range(0, len(rows), MAX_BATCH_ITEMS):
                counts = dict(zip(*_counted(origin.slice(start, MAX_BATCH_ITEMS)), strict=True))
                sheet = Sheet.join([sources[place].take(counts[place]) for place in sorted(counts)])
                # Of each run the next rows are taken: joined, they stand as their indexes would if sorted. The inverse mends that.
                sheet = sheet.take(pc.array_sort_indices(pc.array_sort_indices(rows.slice(start, MAX_BATCH_ITEMS))))
                steps, now = sheet.steps(), self._clock.read()
                for low, high in pairwise(steps):
                    placed.append(Placed(home, high - low, writer.add(sheet.cut(low, high).draft(now), max(home, 0))))
        finally:
            for source in sources:
                source.close()
        _, items = writer.finish()
        return Run(writer.path.rpartition("/")[2], items, placed)


class _Source:
    """The rows of one home in one run, one after the other."""

    def __init__(self, files: Files, path: str, incarnation: int, run: Run, home: int) -> None:
        self._reader = StagedReader(files, path, incarnation)
        self._sheets = self._read(run, home)
        self._rest = next(self._sheets)

    def _read(self, run: Run, home: int) -> Iterator[Sheet]:
        for sequence, frame in enumerate(run.frames, 1):
            if frame.home == home:
                yield Sheet.read(self._reader.at(frame.position, sequence)[1])

    def take(self, count: int) -> Sheet:
        """The next so many rows, which are there."""
        found = []
        while count:
            if not len(self._rest):
                self._rest = next(self._sheets)
            taken = min(count, len(self._rest))
            found.append(self._rest.cut(0, taken))
            self._rest = self._rest.cut(taken, len(self._rest))
            count -= taken
        return Sheet.join(found)

    def close(self) -> None:
        self._reader.close()


def _counted(values: pa.Array) -> tuple[list[int], list[int]]:
    found = pc.value_counts(values)
    return found.field("values").to_pylist(), found.field("counts").to_pylist()


def _read_sidecar(path: str) -> pa.Table:
    with pa.OSFile(path) as file:
        return pa.ipc.open_file(file).read_all()
