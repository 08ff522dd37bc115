"""What is to be read of a queue: where it begins and ends, and how it is cut into tasks.

Owns: `PartitionBounds`, the range that there is (`sequence_bounds`: of events), `begin`, where a read begins in it, `Split`, what a task is told to
read, and `split`. Whatever lies outside of what there is, is refused.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import msgspec

from penstock.logs.log import LogRange
from penstock.reports import QueueDescription
from penstock.rules.runs import count, pairs
from penstock.spark.options import SourceOptions
from penstock.spark.queue_tables import QueueTables
from penstock.words.clock import SystemClock
from penstock.words.errors import InvalidRequest

FIRST, LAST = -2, -1
"""In JSON, as Kafka's connector has it: earliest and latest."""


class PartitionBounds(NamedTuple):
    """What there is of each partition: from `start` on, before `stop`. Offsets of items or log sequences."""

    start: Mapping[int, int]
    stop: Mapping[int, int]


def sequence_bounds(bounds: Mapping[int, LogRange], *, whole: bool) -> PartitionBounds:
    """What there is to tell of each partition: with `whole`, only where retention has taken nothing of it."""
    starts = {partition: one.intact_from if whole else one.first_sequence for partition, one in bounds.items()}
    return PartitionBounds(starts, {partition: one.sequence + 1 for partition, one in bounds.items()})


def first_positions(options: SourceOptions, tables: QueueTables, queue: QueueDescription, ends: PartitionBounds) -> dict[int, int]:
    """The first number to be read in each partition."""
    given = options.starting_offsets
    if options.starting_timestamp is not None:
        found = _since(options, tables, queue, options.starting_timestamp)
        return {partition: max(number, ends.start.get(partition, 0)) for partition, number in found.items()}
    if given == "latest":
        return dict(ends.stop)
    if isinstance(given, dict):
        return {**ends.start, **{partition: _place(options, queue, ends, partition, number) for partition, number in given.items()}}
    known = tables.cursor(queue, options.cursor) if given is None and options.cursor else {}
    return {partition: max(start, known.get(partition, 0)) for partition, start in ends.start.items()}


def starts_at_latest(options: SourceOptions) -> bool:
    """Whether it begins at an end, which is elsewhere a moment later."""
    given = options.starting_offsets
    return given == "latest" or (isinstance(given, dict) and LAST in given.values())


def _since(options: SourceOptions, tables: QueueTables, queue: QueueDescription, wall: int) -> dict[int, int]:
    if wall > SystemClock().read().wall:
        raise InvalidRequest("startingTimestamp lies in the future; give one that has passed, or startingOffsets=latest")
    return tables.sequences_at(queue, wall) if options.table == "events" else tables.offsets_at(queue, wall)


def _place(options: SourceOptions, queue: QueueDescription, ends: PartitionBounds, partition: int, number: int) -> int:
    if partition not in ends.stop:
        raise InvalidRequest(f"startingOffsets names partition {partition}; queue {queue.name!r} has {sorted(ends.stop)}")
    start, stop = ends.start[partition], ends.stop[partition]
    number = {FIRST: start, LAST: stop}.get(number, max(number, 1 if options.table == "events" else 0))  # sequences begin at 1
    if number > stop:
        raise InvalidRequest(f"startingOffsets gives partition {partition} the offset {number}, which is in the future; it ends at {stop}")
    if number < start and options.fail_on_data_loss:
        raise InvalidRequest(
            f"startingOffsets gives partition {partition} the offset {number}, and retention has taken what is before {start}; "
            f"give {start} or more, earliest, or failOnDataLoss=false"
        )
    return max(number, start)


# -- cut into tasks ------------------------------------------------------------------------------------


class Split(msgspec.Struct, frozen=True):
    """Numbers of one partition: offsets of items or log sequences, as flat runs."""

    partition: int
    runs: list[int]


def split(wanted: Mapping[int, Sequence[int]], least: int = 0) -> list[Split]:
    """A split for each partition that has something, and more of them, evenly cut, until there are `least` or nothing is left to cut."""
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
    """Flat runs in so many pieces of sizes that differ by one at most."""
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
