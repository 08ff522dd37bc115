"""Batch queries (spark.read): everything that a queue has published, or a range of it.

Owns: `BatchReader` and the tasks it plans. For tables items and events the driver fixes the ranges of offsets or log
sequences when Spark plans the query, up to what is published then; so a task that Spark repeats reads the same rows.
Tables state and dead have no ranges: their tasks read what is published when they run.
With the option `where`, ranges and partitions without matching rows are not read, and tasks give matching rows only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.reports import QueueDescription
from penstock.rules.runs import RunSet, pairs
from penstock.spark.options import EARLIEST, LATEST, SourceOptions
from penstock.spark.positions import StreamPosition
from penstock.spark.queue_tables import DeadLetterPartition, QueueTables
from penstock.spark.ranges import FIRST, LAST, PartitionBounds, first_positions, item_bounds, sequence_bounds
from penstock.spark.row_filter import RowFilter
from penstock.words.errors import InvalidRequest

EVENT_SEGMENTS = 2
"""How many segments of a log one task of table events reads, unless minPartitions asks for more tasks."""


class ItemTask(InputPartition):
    """A range of item offsets of one partition."""

    def __init__(self, incarnation: int, partition: int, start: int, stop: int) -> None:
        self.incarnation, self.partition, self.start, self.stop = incarnation, partition, start, stop


class EventTask(ItemTask):
    """A range of log sequences of one partition."""


class StateTask(InputPartition):
    """The items of one partition that are not completed."""

    def __init__(self, incarnation: int, partition: int) -> None:
        self.incarnation, self.partition = incarnation, partition


class DeadTask(InputPartition):
    """The dead letters of one partition."""

    def __init__(self, source: DeadLetterPartition) -> None:
        self.source = source


class BatchReader(DataSourceReader):
    """Reads one table of a queue."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        if options.consume:
            raise InvalidRequest(
                "consume is true, and a batch query consumes nothing; use spark.readStream, with trigger(availableNow=True) for one run"
            )
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        with QueueTables.open(self._options.broker) as tables:
            queue = tables.find(self._options.queue)
            return [*_PLANS[self._options.table](self._options, tables, queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        where = self._options.where
        if where is None:
            yield from self._read(partition, self._columns)
            return
        needed = [*dict.fromkeys([*self._columns, *where.columns])]
        yield from where.keep(self._read(partition, needed), self._columns)

    def _read(self, partition: InputPartition, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        options = self._options
        strict = options.fail_on_data_loss
        walls = options.where.walls() if options.where is not None else None
        with QueueTables.open(options.broker) as tables:
            match partition:
                case EventTask(incarnation=incarnation, partition=number, start=start, stop=stop):
                    since, until = options.starting_timestamp, options.ending_timestamp
                    yield from tables.events(incarnation, number, start, stop, columns, since=since, until=until, fail_on_data_loss=strict)
                case ItemTask(incarnation=incarnation, partition=number, start=start, stop=stop):
                    yield from tables.items(incarnation, number, [start, stop], columns, walls=walls, fail_on_data_loss=strict)
                case StateTask(incarnation=incarnation, partition=number):
                    yield from tables.states(incarnation, number, columns)
                case DeadTask(source=source):
                    yield from tables.dead(source, columns)
                case _:  # where there is no task, Spark reads an InputPartition of its own
                    return

    def __repr__(self) -> str:
        return f"BatchReader({self._options.queue!r}, {self._options.table})"


# -- planning ----------------------------------------------------------------------------------------


def _plan_items(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    bounds = item_bounds(tables.published(queue))
    starts = first_positions(_checked(options), tables, queue, bounds)
    stops = tables.offsets_at(queue, options.ending_timestamp) if options.ending_timestamp is not None else _stops(options, queue, bounds)
    ranges = _ranges(queue, starts, {number: min(stop, bounds.stop[number]) for number, stop in stops.items()})
    if options.where is not None:
        wanted = {number: options.where.offsets(number) for number in _matching(options.where, tables, queue, ranges)}
        ranges = _clipped(ranges, wanted)
    runs = [(number, *run) for number, one in ranges.items() for run in pairs(RunSet(one).subtract(tables.holes(queue, number)))]
    total = sum(stop - start for _, start, stop in runs)
    for number, start, stop in runs:
        pieces = -(-options.min_partitions * (stop - start) // total)
        cuts = tables.item_cuts(queue, number, start, stop, pieces)
        for low, high in zip([start, *cuts], [*cuts, stop], strict=True):
            yield ItemTask(queue.incarnation, number, low, high)


def _plan_events(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    bounds = sequence_bounds(tables.published(queue), intact_only=options.fail_on_data_loss)
    starts = first_positions(_checked(options), tables, queue, bounds)
    ranges = _ranges(queue, starts, _stops(options, queue, bounds))
    if options.where is not None:
        ranges = _clipped(ranges, dict.fromkeys(options.where.partitions(ranges), options.where.sequences()))
    for number, (start, stop) in ranges.items():
        cuts = tables.sequence_cuts(queue, number, start, stop)
        wanted = max(-(-options.min_partitions // len(ranges)), (len(cuts) + 1) // EVENT_SEGMENTS)
        cuts = [cuts[(len(cuts) + 1) * index // wanted - 1] for index in range(1, wanted)] if wanted <= len(cuts) else cuts
        for low, high in zip([start, *cuts], [*cuts, stop], strict=True):
            yield EventTask(queue.incarnation, number, low, high)


def _plan_states(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    published = tables.published(queue)
    numbers = published if options.where is None else _matching(options.where, tables, queue, published)
    return (StateTask(queue.incarnation, number) for number in numbers)


def _plan_dead(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    # every partition, whatever `where` says: the column is the partition in which an item was buried, not where it is
    return (DeadTask(source) for source in tables.dead_letter_partitions(queue))


def _matching(where: RowFilter, tables: QueueTables, queue: QueueDescription, numbers: Iterable[int]) -> list[int]:
    """Those of the partitions that may have matching items."""
    found, keys = where.partitions(numbers), where.keys()
    if keys is None:
        return found
    holding = {*tables.partitions_of(queue, keys)}
    return [number for number in found if number in holding]


_PLANS = {"items": _plan_items, "events": _plan_events, "state": _plan_states, "dead": _plan_dead}


def _checked(options: SourceOptions) -> SourceOptions:
    """The options; InvalidRequest if their range is empty for every queue."""
    if options.starting_offsets == LATEST:
        raise InvalidRequest("startingOffsets is latest, and a batch ends there; give earliest or offsets, or use spark.readStream")
    if isinstance(options.starting_offsets, StreamPosition) and any(options.starting_offsets.rows.values()):
        raise InvalidRequest("startingOffsets ends within a frame of the log; read on from there with spark.readStream")
    if options.ending_offsets == EARLIEST:
        raise InvalidRequest("endingOffsets is earliest, so that there is nothing to read; give latest or offsets")
    since, until = options.starting_timestamp, options.ending_timestamp
    if since is not None and until is not None and since >= until:
        raise InvalidRequest("startingTimestamp is not before endingTimestamp; swap them, or give others")
    return options


def _stops(options: SourceOptions, queue: QueueDescription, bounds: PartitionBounds) -> dict[int, int]:
    """Where the range of each partition ends: as endingOffsets says, else at the end of the partition."""
    stops = dict(bounds.stop)
    given = options.ending_offsets
    for number, offset in given.items() if isinstance(given, dict) else ():
        if number not in stops:
            raise InvalidRequest(f"endingOffsets names partition {number}; queue {queue.name!r} has {sorted(stops)}")
        offset = {FIRST: bounds.start[number], LAST: stops[number]}.get(offset, offset)
        if offset > stops[number]:
            raise InvalidRequest(
                f"endingOffsets gives partition {number} the offset {offset}, which is in the future; it ends at {stops[number]}"
            )
        stops[number] = offset
    return stops


def _ranges(queue: QueueDescription, starts: Mapping[int, int], stops: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """The ranges that are not empty, by partition."""
    for number, start in starts.items():
        if start > stops.get(number, start):
            raise InvalidRequest(
                f"the range of partition {number} of queue {queue.name!r} begins at {start} and ends at {stops[number]}; "
                "let endingOffsets be no less than startingOffsets"
            )
    return {number: (start, stops[number]) for number, start in starts.items() if start < stops.get(number, start)}


def _clipped(ranges: Mapping[int, tuple[int, int]], wanted: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """What the ranges have in common with the wanted ones, without empty ranges."""
    both = {
        number: (max(start, wanted[number][0]), min(stop, wanted[number][1]))
        for number, (start, stop) in ranges.items()
        if number in wanted
    }
    return {number: one for number, one in both.items() if one[0] < one[1]}
