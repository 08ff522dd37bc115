"""Which range of a queue a query reads, and how the range is cut into tasks.

Owns: `PartitionBounds` (`item_bounds`, `sequence_bounds`), what can be read; `first_positions`, where a query begins;
`Split` and `EventSplit`, what a task of a stream reads; and `split`. A start outside the bounds is an InvalidRequest.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import msgspec

from penstock.logs.log import LogRange
from penstock.reports import QueueDescription
from penstock.rules.runs import count, pairs
from penstock.spark.options import SourceOptions
from penstock.spark.positions import StreamPosition, check_not_after_backup
from penstock.spark.queue_tables import QueueTables
from penstock.words.clock import SystemClock
from penstock.words.errors import InvalidRequest

FIRST, LAST = -2, -1
"""The numbers for earliest and latest in JSON, as in Spark's Kafka connector."""


class PartitionBounds(NamedTuple):
    """What can be read of each partition: from `start` on, before `stop`; item offsets or log sequences."""

    start: Mapping[int, int]
    stop: Mapping[int, int]


def item_bounds(published: Mapping[int, LogRange]) -> PartitionBounds:
    """The item offsets of each partition."""
    starts = {partition: one.start for partition, one in published.items()}
    return PartitionBounds(starts, {partition: one.end for partition, one in published.items()})


def sequence_bounds(published: Mapping[int, LogRange], *, intact_only: bool) -> PartitionBounds:
    """The log sequences of each partition; with `intact_only`, from where retention has removed nothing."""
    starts = {partition: one.intact_from if intact_only else one.first_sequence for partition, one in published.items()}
    return PartitionBounds(starts, {partition: one.sequence + 1 for partition, one in published.items()})


def first_positions(options: SourceOptions, tables: QueueTables, queue: QueueDescription, bounds: PartitionBounds) -> dict[int, int]:
    """The first number to read in each partition."""
    given = options.starting_offsets
    if options.starting_timestamp is not None:
        found = _since(options, tables, queue, options.starting_timestamp)
        return {partition: max(number, bounds.start.get(partition, 0)) for partition, number in found.items()}
    if given == "latest":
        return dict(bounds.stop)
    if isinstance(given, StreamPosition):
        given = _check_pasted(given, options, queue)
    if isinstance(given, dict):
        chosen = {partition: _check_start(options, queue, bounds, partition, number) for partition, number in given.items()}
        for partition, number in chosen.items() if options.table == "items" else ():
            _check_not_in_hole(number, partition, tables.holes(queue, partition))
        return {**bounds.start, **chosen}
    known = tables.cursor(queue.incarnation, options.cursor) if given is None and options.cursor else {}
    return {partition: max(start, known.get(partition, 0)) for partition, start in bounds.start.items()}


def _check_pasted(position: StreamPosition, options: SourceOptions, queue: QueueDescription) -> dict[int, int]:
    """The numbers of an offset that was given as startingOffsets. InvalidRequest if it is of something else."""
    if (position.incarnation, position.table) != (queue.incarnation, options.table):
        raise InvalidRequest(
            f"startingOffsets is an offset of table {position.table} of queue {position.incarnation:016x}, and table {options.table} of "
            f"queue {queue.name!r} ({queue.incarnation:016x}) is read; give an offset of a stream of this one"
        )
    check_not_after_backup(position, queue)
    return position.at


def starts_at_latest(options: SourceOptions) -> bool:
    """Whether a query begins at the present end of a partition, which moves."""
    given = options.starting_offsets
    return given == "latest" or (isinstance(given, dict) and LAST in given.values())


def _since(options: SourceOptions, tables: QueueTables, queue: QueueDescription, wall: int) -> dict[int, int]:
    if wall > SystemClock().read().wall:
        raise InvalidRequest("startingTimestamp is in the future; give a time that has passed, or startingOffsets=latest")
    return tables.sequences_at(queue, wall) if options.table == "events" else tables.offsets_at(queue, wall)


def _check_start(options: SourceOptions, queue: QueueDescription, bounds: PartitionBounds, partition: int, number: int) -> int:
    """Where to begin in a partition that startingOffsets names. InvalidRequest if that is outside the bounds."""
    if partition not in bounds.stop:
        raise InvalidRequest(f"startingOffsets names partition {partition}; queue {queue.name!r} has {sorted(bounds.stop)}")
    start, stop = bounds.start[partition], bounds.stop[partition]
    # sequences begin at 1
    number = {FIRST: start, LAST: stop}.get(number, max(number, 1 if options.table == "events" else 0))
    if number > stop:
        raise InvalidRequest(f"startingOffsets gives partition {partition} the offset {number}, which is in the future; it ends at {stop}")
    if number < start and options.fail_on_data_loss:
        raise InvalidRequest(
            f"startingOffsets gives partition {partition} the offset {number}, and retention has removed everything before {start}; "
            f"give {start} or more, earliest, or failOnDataLoss=false"
        )
    return max(number, start)


def _check_not_in_hole(number: int, partition: int, holes: Sequence[int]) -> None:
    for start, stop in pairs(holes):
        if start < number < stop:
            raise InvalidRequest(
                f"startingOffsets gives partition {partition} the offset {number}, which is not in the backup from which the queue was "
                f"restored; give {start}, where the backup ends, or {stop}, where new items begin"
            )


# -- cuts between tasks --------------------------------------------------------------------------------


class Split(msgspec.Struct, frozen=True):
    """What one task reads of a partition: item offsets, as flat runs."""

    partition: int
    runs: list[int]


class EventSplit(msgspec.Struct, frozen=True):
    """What one task reads of a partition's events: the frames [start, stop), without the first `skip` rows of the frame
    `start`, and with the first `rows` rows of the frame `stop`."""

    partition: int
    start: int
    stop: int
    skip: int = 0
    rows: int = 0


def split(wanted: Mapping[int, Sequence[int]], least: int = 0) -> list[Split]:
    """A split for each partition that is not empty, or more, of even size, until there are `least`."""
    sizes = {partition: count(list(runs)) for partition, runs in wanted.items()}
    parts = {partition: 1 for partition, size in sizes.items() if size}
    heaviest = [(-float(size), partition) for partition, size in sizes.items() if size]  # by the size of a part
    heapify(heaviest)
    for _ in range(min(least, sum(sizes.values())) - len(parts)):
        _, partition = heaviest[0]
        parts[partition] += 1
        heapreplace(heaviest, (-sizes[partition] / parts[partition], partition))
    return [Split(partition, piece) for partition in sorted(parts) for piece in cut(wanted[partition], parts[partition])]


def cut(runs: Sequence[int], pieces: int) -> list[list[int]]:
    """Cut flat runs into pieces whose sizes differ by one at most."""
    size = count(list(runs))
    edges = [size * number // pieces for number in range(pieces + 1)]
    found: list[list[int]] = [[] for _ in range(pieces)]
    seen = piece = 0
    for start, stop in pairs(runs):
        while start < stop:
            while edges[piece + 1] <= seen:
                piece += 1
            end = min(stop, start + edges[piece + 1] - seen)
            found[piece] += (start, end)
            seen += end - start
            start = end
    return [one for one in found if one]
