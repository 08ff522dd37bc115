"""A queue as a table: everything that is published, or a range of it, once.

Owns: `BatchReader`. The driver decides what is read, when Spark plans: ranges of offsets (or, of events, of sequences) up to what is
published then, so that every row is read once however often a task is tried. Tables state and dead tell what is when their tasks look.
"""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.reports import QueueDescription
from penstock.spark.options import EARLIEST, LATEST, SourceOptions
from penstock.spark.queue_tables import DeadLetterPartition, QueueTables
from penstock.spark.ranges import FIRST, LAST, PartitionBounds, first_positions, sequence_bounds
from penstock.words.errors import InvalidRequest

EVENT_SEGMENTS = 2
"""Segments of a log whose events one task reads, unless more tasks are asked for."""


class ItemTask(InputPartition):
    """Items of a partition."""

    def __init__(self, incarnation: int, partition: int, start: int, stop: int) -> None:
        self.incarnation, self.partition, self.start, self.stop = incarnation, partition, start, stop


class EventTask(ItemTask):
    """What happened in a partition; the range is of sequences."""


class StateTask(InputPartition):
    """What is not completed in a partition."""

    def __init__(self, incarnation: int, partition: int) -> None:
        self.incarnation, self.partition = incarnation, partition


class DeadTask(InputPartition):
    """Dead letters that lie in one place."""

    def __init__(self, place: DeadLetterPartition) -> None:
        self.place = place


class BatchReader(DataSourceReader):
    """Reads one of the tables of a queue."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        if options.consume:
            raise InvalidRequest(
                "consume is true, and a batch only looks; use spark.readStream, with trigger(availableNow=True) for one run"
            )
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        with QueueTables.open(self._options.broker) as tables:
            queue = tables.find(self._options.queue)
            return [*_PLANS[self._options.table](self._options, tables, queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options, columns = self._options, self._columns
        strict = options.fail_on_data_loss
        with QueueTables.open(options.broker) as tables:
            match partition:
                case EventTask(incarnation=incarnation, partition=number, start=start, stop=stop):
                    since, until = options.starting_timestamp, options.ending_timestamp
                    yield from tables.events(incarnation, number, start, stop, columns, since=since, until=until, fail_on_data_loss=strict)
                case ItemTask(incarnation=incarnation, partition=number, start=start, stop=stop):
                    yield from tables.items(incarnation, number, [start, stop], columns, fail_on_data_loss=strict)
                case StateTask(incarnation=incarnation, partition=number):
                    yield from tables.states(incarnation, number, columns)
                case DeadTask(place=place):
                    yield from tables.dead(place, columns)
                case _:  # Spark's own, where there is nothing to read
                    return

    def __repr__(self) -> str:
        return f"BatchReader({self._options.queue!r}, {self._options.table})"


# -- what is read ------------------------------------------------------------------------------------


def _plan_items(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    bounds = tables.published(queue)
    ends = PartitionBounds({number: one.start for number, one in bounds.items()}, {number: one.end for number, one in bounds.items()})
    starts = first_positions(_checked(options), tables, queue, ends)
    stops = tables.offsets_at(queue, options.ending_timestamp) if options.ending_timestamp is not None else _stops(options, queue, ends)
    ranges = _ranges(queue, starts, {number: min(stop, ends.stop[number]) for number, stop in stops.items()})
    total = sum(stop - start for start, stop in ranges.values())
    for number, (start, stop) in ranges.items():
        pieces = -(-options.min_partitions * (stop - start) // total)
        cuts = tables.item_cuts(queue, number, start, stop, pieces)
        for low, high in zip([start, *cuts], [*cuts, stop], strict=True):
            yield ItemTask(queue.incarnation, number, low, high)


def _plan_events(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    bounds = tables.published(queue)
    ends = sequence_bounds(bounds, whole=options.fail_on_data_loss)
    starts = first_positions(_checked(options), tables, queue, ends)
    ranges = _ranges(queue, starts, _stops(options, queue, ends))
    for number, (start, stop) in ranges.items():
        cuts = tables.sequence_cuts(queue, number, start, stop)
        wanted = max(-(-options.min_partitions // len(ranges)), (len(cuts) + 1) // EVENT_SEGMENTS)
        cuts = [cuts[(len(cuts) + 1) * place // wanted - 1] for place in range(1, wanted)] if wanted <= len(cuts) else cuts
        for low, high in zip([start, *cuts], [*cuts, stop], strict=True):
            yield EventTask(queue.incarnation, number, low, high)


def _plan_states(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    return (StateTask(queue.incarnation, number) for number in tables.published(queue))


def _plan_dead(options: SourceOptions, tables: QueueTables, queue: QueueDescription) -> Iterator[InputPartition]:
    return (DeadTask(place) for place in tables.dead_letter_partitions(queue))


_PLANS = {"items": _plan_items, "events": _plan_events, "state": _plan_states, "dead": _plan_dead}


def _checked(options: SourceOptions) -> SourceOptions:
    """The options, if there can be anything between the ends."""
    if options.starting_offsets == LATEST:
        raise InvalidRequest("startingOffsets is latest, and a batch ends there; give earliest or offsets, or use spark.readStream")
    if options.ending_offsets == EARLIEST:
        raise InvalidRequest("endingOffsets is earliest, so that there is nothing to read; give latest or offsets")
    since, until = options.starting_timestamp, options.ending_timestamp
    if since is not None and until is not None and since >= until:
        raise InvalidRequest("startingTimestamp is not before endingTimestamp; swap them, or give others")
    return options


def _stops(options: SourceOptions, queue: QueueDescription, ends: PartitionBounds) -> dict[int, int]:
    """Where each partition's range ends: as given, else where the partition does."""
    stops = dict(ends.stop)
    given = options.ending_offsets
    for number, offset in given.items() if isinstance(given, dict) else ():
        if number not in stops:
            raise InvalidRequest(f"endingOffsets names partition {number}; queue {queue.name!r} has {sorted(stops)}")
        offset = {FIRST: ends.start[number], LAST: stops[number]}.get(offset, offset)
        if offset > stops[number]:
            raise InvalidRequest(
                f"endingOffsets gives partition {number} the offset {offset}, which is in the future; it ends at {stops[number]}"
            )
        stops[number] = offset
    return stops


def _ranges(queue: QueueDescription, starts: Mapping[int, int], stops: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """The ranges in which there is something."""
    for number, start in starts.items():
        if start > stops.get(number, start):
            raise InvalidRequest(
                f"the range of partition {number} of queue {queue.name!r} begins at {start} and ends at {stops[number]}; "
                "let endingOffsets be no less than startingOffsets"
            )
    return {number: (start, stops[number]) for number, start in starts.items() if start < stops.get(number, start)}
