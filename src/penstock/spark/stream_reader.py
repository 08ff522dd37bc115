"""Streaming queries (spark.readStream) that read a queue's log and lease nothing; exactly once with Spark's checkpoint.

Owns: `StreamReader`, for tables items and events. An offset says how far each partition is read (positions.py). A range
between two offsets always has the same rows, as long as retention removes none. Spark repeats a micro-batch after a
crash, so rows count as read only when the next micro-batch begins.
Partitions added by a resize are read from their first item on; retired ones are read to their end. A micro-batch has
items of one generation only (generations.py): items of keys that a resize moved come after all items of these keys in
their old partition, in a later micro-batch.
Items that retention or damage removed before they were read are an error, unless failOnDataLoss is false. With
`cursor`, retention keeps what is not read yet.
Takes no lock. Everything but `read` runs on the driver, in one process, one call at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows, SupportsTriggerAvailableNow

from penstock.operations import MoveCursor
from penstock.reports import QueueDescription
from penstock.rules.runs import RunSet, count, pairs
from penstock.spark.broker_access import ask_present_owner, open_home
from penstock.spark.generations import Generations
from penstock.spark.options import SourceOptions
from penstock.spark.positions import (
    BACKLOG,
    LAG,
    StreamPosition,
    check_not_after_backup,
    end_at_hole,
    end_of_batch,
    end_of_event_batch,
    end_within_bytes,
    last_restore,
    parse_position,
    unread_count,
)
from penstock.spark.queue_tables import LazyQueueTables, QueueTables
from penstock.spark.ranges import (
    EventSplit,
    PartitionBounds,
    Split,
    first_positions,
    item_bounds,
    sequence_bounds,
    split,
    starts_at_latest,
)
from penstock.tables.events import FrameRows
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import InvalidRequest, QueueNotFound

DEFAULT_BATCH_ITEMS = 1_000_000
"""Items of a micro-batch, unless maxItemsPerTrigger or a larger minimum is given: a long backlog is read in several
steps."""
CURSOR_SECONDS = 2.0
"""How long a micro-batch waits for the owner to move the stream's cursor."""
SHOWN_RUNS = 3


class StreamTask(InputPartition):
    """What one task of a micro-batch reads."""

    def __init__(self, incarnation: int, part: Split | EventSplit) -> None:
        super().__init__(part)
        self.incarnation = incarnation
        self.part = part


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new items or events of a queue as they are published."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = check_stream_options(options)
        self._columns = tuple(columns)
        self._tables = LazyQueueTables(options.broker)
        self._initial: StreamPosition | None = None
        self._first_empty = False
        """Whether the first micro-batch must be empty."""
        self._clock: Clock = SystemClock()
        self.max_bytes = options.max_bytes_per_trigger
        self._planned: StreamPosition | None = None
        """Where the last micro-batch that was planned ends."""
        self._planned_at: int | None = None
        """When the last micro-batch with rows was planned (elapsed)."""
        self._goal: dict[int, int] | None = None
        """With trigger availableNow: where the run ends."""
        self._cursor_at: dict[int, int] | None = None
        """The position to which the cursor was last moved."""

    # -- offsets -------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:  # Spark asks twice and needs the same answer
            queue = self._find_queue()
            bounds = self._bounds(queue)
            at = first_positions(self._options, self._tables.opened, queue, bounds)
            # "latest" is resolved here. An empty first batch saves it in the checkpoint before anything is read.
            self._first_empty = starts_at_latest(self._options)
            given = self._options.starting_offsets
            pasted = given if isinstance(given, StreamPosition) else StreamPosition(queue.incarnation, self._options.table, {})
            rows = {partition: read for partition, read in pasted.rows.items() if at.get(partition) == pasted.at.get(partition)}
            self._initial = self._position(queue, at, bounds, rows)
        return self._initial.to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return default_read_limit(self._options)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends. Everything before `start` is in the sink."""
        queue, bounds = self._survey()
        before = self._check_position(queue, start)
        self._move_cursor(before, bounds.stop)
        if self._first_empty:
            self._first_empty = False
            return start
        at = self._check_nothing_lost(queue, before, bounds)
        goal = bounds.stop if self._goal is None else self._goal
        if self._must_wait(queue, before, at, goal, limit):
            self._planned = before
            return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        rows = dict(before.rows)
        if self._options.table == "events" and most is not None:
            at, rows = self._end_of_events(queue, before, at, goal, most)
        else:
            at, _ = self._without_holes(queue, at, goal)
            if self._options.table == "items":
                goal = Generations(queue).next_stop(at, goal)
            begins, goal = self._without_holes(queue, at, goal)
            at = end_of_batch(begins, goal, most)
            if self.max_bytes is not None and most is not None:
                at = self._end_within_bytes(queue, begins, at, self.max_bytes)
            rows = {partition: read for partition, read in rows.items() if at.get(partition) == begins.get(partition)}
        self._planned = self._position(queue, at, bounds, rows)
        end = self._planned.to_offset()
        if end != start:
            self._planned_at = self._clock.read().elapsed
        return end

    def _must_wait(
        self, queue: QueueDescription, before: StreamPosition, at: dict[int, int], goal: Mapping[int, int], limit: ReadLimit
    ) -> bool:
        """Whether there are too few rows for a micro-batch. Never with trigger availableNow, which would not end."""
        least = limit.min_rows if isinstance(limit, ReadMinRows) else self._options.min_offsets_per_trigger
        if least is None or self._goal is not None or isinstance(limit, ReadAllAvailable):
            return False
        if not isinstance(limit, ReadMinRows) and delay_is_over(self._options, self._planned_at, self._clock):
            return False
        return self._unread(queue, before, at, goal, least) < least

    def _unread(self, queue: QueueDescription, before: StreamPosition, at: dict[int, int], goal: Mapping[int, int], most: int) -> int:
        """How many rows there are to read. Events are counted up to `most` only."""
        if self._options.table == "items":
            return unread_count(at, goal)
        total = 0
        for partition in goal:
            first = before.rows.get(partition, 0) if at.get(partition) == before.at.get(partition) else 0
            total -= first
            for _, rows in self._event_rows(queue, partition, at, goal):
                total += rows
                if total >= most:
                    return most
        return total

    def unread(self, start: Mapping[str, Any], most: int) -> int:
        """How many rows there are from an offset on. Events are counted up to `most` only."""
        queue, bounds = self._survey()
        before = self._check_position(queue, start)
        return self._unread(queue, before, dict(before.at), bounds.stop if self._goal is None else self._goal, most)

    def _event_rows(self, queue: QueueDescription, partition: int, at: Mapping[int, int], goal: Mapping[int, int]) -> Iterator[FrameRows]:
        begins = max(at.get(partition, 0), self._lowest)
        return self._tables.opened.event_rows(
            queue.incarnation, partition, begins, goal[partition], fail_on_data_loss=self._options.fail_on_data_loss
        )

    def _end_of_events(
        self, queue: QueueDescription, before: StreamPosition, at: dict[int, int], goal: Mapping[int, int], most: int
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Where a micro-batch of at most so many events ends."""
        rows = {partition: read for partition, read in before.rows.items() if at.get(partition) == before.at.get(partition)}
        start = msgspec.structs.replace(before, at=at, rows=rows)
        return end_of_event_batch(start, goal, most, lambda partition: self._event_rows(queue, partition, at, goal))

    def _end_within_bytes(self, queue: QueueDescription, at: Mapping[int, int], ends: Mapping[int, int], most: int) -> dict[int, int]:
        """Where a micro-batch of items ends that has about so many bytes."""
        sizes = self._tables.opened.frame_sizes
        return end_within_bytes(
            at, ends, most, lambda partition: sizes(queue.incarnation, partition, at.get(partition, 0), ends[partition])
        )

    def _position(
        self, queue: QueueDescription, at: dict[int, int], bounds: PartitionBounds, rows: Mapping[int, int] | None = None
    ) -> StreamPosition:
        missing = self._missing_counts(queue, at, bounds.stop)
        return StreamPosition(queue.incarnation, self._options.table, at, missing, last_restore(queue), dict(rows or {}))

    def _without_holes(
        self, queue: QueueDescription, at: Mapping[int, int], goal: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Where a micro-batch begins and at most ends, so that it has no offsets that a restore skipped."""
        if not queue.restores or self._options.table == "events":
            return dict(at), dict(goal)
        ends = {
            partition: end_at_hole(at.get(partition, 0), end, self._tables.opened.holes(queue, partition))
            for partition, end in goal.items()
        }
        begins = {partition: start for partition, (start, _) in ends.items() if start}
        return {**at, **begins}, {partition: end for partition, (_, end) in ends.items()}

    def prepareForTriggerAvailableNow(self) -> None:
        self._goal = dict(self._survey()[1].stop)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The end of the queue, with how much of it the last micro-batch leaves unread, and since when."""
        queue = self._tables.opened.find(self._options.queue)
        ends = self._bounds(queue).stop
        latest = StreamPosition(queue.incarnation, self._options.table, dict(ends), {}, last_restore(queue)).to_offset()
        if self._planned is None or self._planned.incarnation != queue.incarnation:
            return latest
        at, events = self._planned.at, self._options.table == "events"
        behind = {partition: max(at.get(partition, 0), self._lowest) for partition in ends}
        behind = {partition: number for partition, number in behind.items() if number < ends[partition]}
        walls = [
            self._tables.opened.oldest_wall(queue.incarnation, partition, number, events=events) for partition, number in behind.items()
        ]
        now = self._clock.read().wall
        lag = max(0, now - min((wall for wall in walls if wall is not None), default=now)) / SECOND
        return latest | {BACKLOG: unread_count(behind, {one: ends[one] for one in behind}), LAG: round(lag, 3)}

    # -- rows ----------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch. When Spark repeats one after a crash, this is the first call of the process."""
        queue = self._find_queue()
        first, last = self._check_position(queue, start), self._check_position(queue, end)
        if self._options.table == "events":
            return [StreamTask(queue.incarnation, part) for part in self._event_splits(queue, first, last)]
        wanted: dict[int, list[int]] = {}
        for partition, stop in last.at.items():
            begins = first.at.get(partition, 0)
            missing = self._missing(queue, partition, begins, stop)
            if count(missing) > first.missing.get(partition, 0) - last.missing.get(partition, 0):
                self._raise_lost(queue, partition, missing)
            wanted[partition] = RunSet(RunSet((begins, stop)).subtract(missing)).subtract(self._tables.opened.holes(queue, partition))
        return [StreamTask(queue.incarnation, part) for part in split(wanted, self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Runs in the task's process."""
        assert isinstance(partition, StreamTask)
        part, incarnation, strict = partition.part, partition.incarnation, self._options.fail_on_data_loss
        with QueueTables.open(self._options.broker) as tables:
            if isinstance(part, EventSplit):
                start, stop, skip, rows = part.start, part.stop, part.skip, part.rows
                yield from tables.events(
                    incarnation, part.partition, start, stop, self._columns, skip=skip, rows=rows, fail_on_data_loss=strict
                )
            else:
                yield from tables.items(incarnation, part.partition, part.runs, self._columns, fail_on_data_loss=strict, exact=True)

    def _event_splits(self, queue: QueueDescription, first: StreamPosition, last: StreamPosition) -> list[EventSplit]:
        """What the tasks of a micro-batch of events read. Ranges are cut only at the beginnings of segments: events can
        be read only from a Base on."""
        parts = []
        for partition, stop in last.at.items():
            start, skip, rows = max(first.at.get(partition, 0), self._lowest), first.rows.get(partition, 0), last.rows.get(partition, 0)
            if missing := self._missing(queue, partition, start, stop):
                self._raise_lost(queue, partition, missing)
                start, skip = missing[-1], 0
            if (start, skip) < (stop, rows):
                few = len(last.at) >= self._options.min_partitions
                cuts = [] if few else self._tables.opened.sequence_cuts(queue, partition, start, stop)
                edges = [EventSplit(partition, *pair) for pair in zip([start, *cuts], [*cuts, stop], strict=True)]
                edges[0] = msgspec.structs.replace(edges[0], skip=skip)
                edges[-1] = msgspec.structs.replace(edges[-1], rows=rows)
                parts += edges
        return parts

    # -- the cursor ------------------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        """Move the cursor. So does `latestOffset`: Spark never calls `commit` for the last micro-batch of a run."""
        queue = self._tables.opened.find(self._options.queue)
        self._move_cursor(self._check_position(queue, end), self._bounds(queue).stop)

    def _move_cursor(self, position: StreamPosition, ends: Mapping[int, int]) -> None:
        """Move the cursor to a position, so that retention may remove what is before it and keeps what is after it."""
        at = {partition: position.at.get(partition, 0) for partition in {*ends, *position.at}}
        if not self._options.cursor or at == self._cursor_at:
            return
        operation = MoveCursor(queue=position.incarnation, name=self._options.cursor, to=at, forward_only=True)
        if self._cursor_at is None and not self._tables.opened.cursor(position.incarnation, self._options.cursor):
            with closing(open_home(self._options.broker)) as home:  # it must exist before anything is read
                home.call(operation)
        elif not ask_present_owner(self._options.broker, operation, CURSOR_SECONDS):
            return  # the next batch tries again: a cursor that is behind keeps more than is needed
        self._cursor_at = at

    def stop(self) -> None:
        self._tables.close()

    # -- the queue -------------------------------------------------------------------------------------

    @property
    def _lowest(self) -> int:
        """The first possible number: item offsets begin at 0, log sequences at 1."""
        return 1 if self._options.table == "events" else 0

    def _find_queue(self) -> QueueDescription:
        """The queue as it is published now."""
        return self._tables.refreshed().find(self._options.queue)

    def _survey(self) -> tuple[QueueDescription, PartitionBounds]:
        """The queue and its bounds, which contain no items of a later generation than the queue's marks."""
        while True:
            queue = self._find_queue()
            bounds = self._bounds(queue)
            now = self._tables.opened.find(self._options.queue)
            if (now.incarnation, now.marks.keys()) == (queue.incarnation, queue.marks.keys()):
                return queue, bounds

    def _bounds(self, queue: QueueDescription) -> PartitionBounds:
        published = self._tables.opened.published(queue)
        if self._options.table == "events":
            return sequence_bounds(published, intact_only=self._options.fail_on_data_loss)
        return item_bounds(published)

    def _check_position(self, queue: QueueDescription, offset: Mapping[str, Any]) -> StreamPosition:
        """Parse an offset from Spark's checkpoint. An error if it is of another queue, incarnation or table."""
        position = parse_position(offset)
        if position.incarnation != queue.incarnation:
            raise QueueNotFound(
                f"queue {queue.name!r} was deleted and created anew since this stream began (then {position.incarnation:016x}, "
                f"now {queue.incarnation:016x}), or the checkpoint is of another queue; start with a new checkpointLocation"
            )
        if position.table != self._options.table:
            raise InvalidRequest(
                f"the checkpoint is of table {position.table}, and table {self._options.table} is asked for; "
                f"read table {position.table}, or start with a new checkpointLocation"
            )
        check_not_after_backup(position, queue)
        return position

    # -- missing rows ----------------------------------------------------------------------------------

    def _missing(self, queue: QueueDescription, partition: int, start: int, stop: int) -> list[int]:
        """What retention or damage removed of a range, as flat runs."""
        if start >= stop:
            return []
        if self._options.table == "events":
            first = self._bounds(queue).start.get(partition, 0)
            return [start, min(first, stop)] if max(start, self._lowest) < first else []
        return self._tables.opened.missing(queue, partition, start, stop)

    def _missing_counts(self, queue: QueueDescription, at: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """How many items of each partition are missing from a position on."""
        # a stream of events begins where nothing is missing; `_missing` finds what goes later
        if self._options.table == "events":
            return {}
        return {partition: count(self._missing(queue, partition, at.get(partition, 0), end)) for partition, end in ends.items()}

    def _check_nothing_lost(self, queue: QueueDescription, position: StreamPosition, bounds: PartitionBounds) -> dict[int, int]:
        """The numbers to continue from. An error if items after them were removed, unless failOnDataLoss is false."""
        at = dict(position.at)
        for partition, end in bounds.stop.items():
            begins = at.get(partition, 0)
            if begins > end:
                self._raise_older(queue, partition, begins, end)
                at[partition] = end
            missing = self._missing(queue, partition, begins, end)
            if count(missing) > position.missing.get(partition, 0):
                self._raise_lost(queue, partition, missing)
        return at

    def _raise_lost(self, queue: QueueDescription, partition: int, missing: Sequence[int]) -> None:
        """Raise the error for items that were removed before they were read, unless failOnDataLoss is false."""
        if not self._options.fail_on_data_loss:
            return
        what = "log sequence" if self._options.table == "events" else "item"
        total = count(list(missing))
        shown = [f"{start}–{stop - 1}" if stop - start > 1 else str(start) for start, stop in pairs(missing)][:SHOWN_RUNS]
        more = f" and more ({total:,} in all)" if len(missing) > 2 * SHOWN_RUNS else ""
        raise InvalidRequest(
            f"{what}{'s' if total > 1 else ''} {', '.join(shown)}{more} of partition {partition} of queue {queue.name!r} "
            f"{'were' if total > 1 else 'was'} removed by retention or damage before this stream read them; set failOnDataLoss=false to "
            "continue without them, or start with a new checkpointLocation. To make retention wait, give the stream a cursor, or keep "
            "resolved items longer"
        )

    def _raise_older(self, queue: QueueDescription, partition: int, number: int, end: int) -> None:
        """Raise the error for a partition that ends before what the stream has read, unless failOnDataLoss is false."""
        if self._options.fail_on_data_loss:
            raise InvalidRequest(
                f"partition {partition} of queue {queue.name!r} ends at {end}, but this stream has read up to {number}: its directory is "
                "an older copy, or a power failure lost what was not synced; start with a new checkpointLocation, or set "
                f"failOnDataLoss=false to continue at {end}"
            )

    def __repr__(self) -> str:
        return f"StreamReader({self._options.queue!r}, {self._options.table})"


def default_read_limit(options: SourceOptions) -> ReadLimit:
    """How many rows a micro-batch has at most; never fewer than it waits for."""
    return ReadMaxRows(options.max_items_per_trigger or max(DEFAULT_BATCH_ITEMS, options.min_offsets_per_trigger or 0))


def delay_is_over(options: SourceOptions, planned_at: int | None, clock: Clock) -> bool:
    """Whether a stream no longer waits for minOffsetsPerTrigger. The first micro-batch of a run does not wait."""
    return planned_at is None or clock.read().elapsed - planned_at >= options.max_trigger_delay * SECOND


def check_stream_options(options: SourceOptions) -> SourceOptions:
    """The options; InvalidRequest if a stream cannot have them."""
    if options.table not in ("items", "events"):
        raise InvalidRequest(
            f"table {options.table} shows only the present state; read it with spark.read, or stream table items or events"
        )
    if options.cursor and options.table == "events":
        raise InvalidRequest("a cursor counts items, and table events is streamed; leave cursor out, and keep resolved items long enough")
    return options
