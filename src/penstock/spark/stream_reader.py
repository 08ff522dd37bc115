"""A queue as a stream: what is published, in micro-batches that Spark's checkpoint makes exactly once.

Owns: `StreamReader`, for the tables items and events. An offset says how far each partition was read (positions.py); a range between two
offsets reads the same again, however often, as long as retention leaves it alone. Spark repeats a micro-batch after a crash, so that what
was read counts as read only when the next one begins.
Partitions that appear by a resize are read from their first item on, those that are let go to their end.
What retention or damage took before it was read is an error, unless failOnDataLoss is false; with a `cursor`, retention waits.
No lock is taken and nothing is leased. Everything but `read` runs on the driver, in one process, one call after the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, ReadMinRows, SupportsTriggerAvailableNow

from penstock.operations import MoveCursor
from penstock.reports import QueueDescription
from penstock.rules.runs import RunSet, count, pairs
from penstock.spark.broker_access import open_home
from penstock.spark.options import SourceOptions
from penstock.spark.positions import StreamPosition, end_of_batch, parse_position, unread_count
from penstock.spark.queue_tables import QueueTables
from penstock.spark.ranges import PartitionBounds, Split, first_positions, sequence_bounds, split, starts_at_latest
from penstock.words.errors import InvalidRequest, QueueNotFound

DEFAULT_BATCH_ITEMS = 1_000_000
"""Of a micro-batch, unless maxItemsPerTrigger says otherwise: so that a long backlog is worked off in steps that can be kept."""
SHOWN_RUNS = 3


class StreamTask(InputPartition):
    """What one task reads."""

    def __init__(self, incarnation: int, part: Split) -> None:
        super().__init__(part)
        self.incarnation = incarnation
        self.part = part


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what a queue holds and held, or what happened in it, as it comes."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = check_stream_options(options)
        self._columns = tuple(columns)
        self._tables: QueueTables | None = None
        self._initial: StreamPosition | None = None
        self._hold = False
        """Whether the first micro-batch is to be empty."""
        self._goal: dict[int, int] | None = None
        """Where a run that takes what is available now ends."""
        self._kept: dict[int, int] | None = None
        """Where the cursor was told to stand."""

    # -- how far -------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:  # asked for twice, and must then be the same
            queue = self._look()
            ends = self._ends(queue)
            at = first_positions(self._options, self._reading, queue, ends)
            # Where the latest was is known only now: an empty first batch puts it into the checkpoint before anything is read.
            self._hold = starts_at_latest(self._options)
            self._initial = StreamPosition(queue.incarnation, self._options.table, at, self._gone(queue, at, ends.stop))
        return self._initial.to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_items_per_trigger or DEFAULT_BATCH_ITEMS)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends. Whatever is before `start` is in the sink."""
        queue = self._look()
        before = self._own(queue, start)
        ends = self._ends(queue)
        self._keep(before, ends.stop)
        if self._hold:
            self._hold = False
            return start
        at = self._none_taken(queue, before, ends)
        goal = ends.stop if self._goal is None else self._goal
        if isinstance(limit, ReadMinRows) and self._goal is None and unread_count(at, goal) < limit.min_rows:
            goal = {}
        at = end_of_batch(at, goal, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        return StreamPosition(queue.incarnation, before.table, at, self._gone(queue, at, ends.stop)).to_offset()

    def prepareForTriggerAvailableNow(self) -> None:
        self._goal = dict(self._ends(self._look()).stop)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        queue = self._reading.find(self._options.queue)
        return StreamPosition(queue.incarnation, self._options.table, dict(self._ends(queue).stop)).to_offset()

    # -- what to read --------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """A micro-batch, or one that Spark repeats after a crash: then nothing else was asked before."""
        queue = self._look()
        first, last = self._own(queue, start), self._own(queue, end)
        wanted: dict[int, list[int]] = {}
        for partition, stop in last.at.items():
            begins = max(first.at.get(partition, 0), self._lowest)
            gone = self._missing(queue, partition, begins, stop)
            if count(gone) > first.missing.get(partition, 0) - last.missing.get(partition, 0):
                self._lost(queue, partition, gone)
            wanted[partition] = RunSet((begins, stop)).subtract(gone)
        events = self._options.table == "events"
        parts = self._cut_at_bases(queue, wanted) if events else split(wanted, self._options.min_partitions)
        return [StreamTask(queue.incarnation, part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of a range."""
        assert isinstance(partition, StreamTask)
        number, runs, strict = partition.part.partition, partition.part.runs, self._options.fail_on_data_loss
        with QueueTables.open(self._options.broker) as tables:
            if self._options.table == "events":
                yield from tables.events(partition.incarnation, number, runs[0], runs[-1], self._columns, fail_on_data_loss=strict)
            else:
                yield from tables.items(partition.incarnation, number, runs, self._columns, fail_on_data_loss=strict, exact=True)

    def _cut_at_bases(self, queue: QueueDescription, wanted: Mapping[int, Sequence[int]]) -> list[Split]:
        """Events can only be read from a Base on: a cut elsewhere would have to be read twice."""
        parts = []
        for partition, runs in wanted.items():
            for begins, stop in pairs(runs):
                few = len(wanted) >= self._options.min_partitions
                cuts = [] if few else self._reading.sequence_cuts(queue, partition, begins, stop)
                parts += [Split(partition, [a, b]) for a, b in zip([begins, *cuts], [*cuts, stop], strict=True)]
        return parts

    # -- what is done with -----------------------------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        """Spark says so late, and of the last micro-batch of a run never: `latestOffset` says it too."""
        queue = self._reading.find(self._options.queue)
        self._keep(self._own(queue, end), self._ends(queue).stop)

    def _keep(self, position: StreamPosition, ends: Mapping[int, int]) -> None:
        """Everything before a position is read: retention need not wait for it any more, but for what comes."""
        at = {partition: position.at.get(partition, 0) for partition in {*ends, *position.at}}
        if self._options.cursor and at != self._kept:
            with closing(open_home(self._options.broker)) as home:  # done by the owner when there is one: nobody waits for it
                home.submit(MoveCursor(queue=position.incarnation, name=self._options.cursor, to=at, forward_only=True))
            self._kept = at

    def stop(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None

    # -- looking ---------------------------------------------------------------------------------------

    @property
    def _reading(self) -> QueueTables:
        if self._tables is None:  # not before it is needed: tasks get a copy of this reader
            self._tables = QueueTables.open(self._options.broker)
        return self._tables

    @property
    def _lowest(self) -> int:
        """The first number there ever is: items are counted from 0, frames of a log from 1."""
        return 1 if self._options.table == "events" else 0

    def _look(self) -> QueueDescription:
        """The queue as it is published now."""
        if self._tables is not None:
            self._tables.refresh()
        return self._reading.find(self._options.queue)

    def _ends(self, queue: QueueDescription) -> PartitionBounds:
        bounds = self._reading.published(queue)
        if self._options.table == "events":
            return sequence_bounds(bounds, whole=self._options.fail_on_data_loss)
        return PartitionBounds(
            {partition: one.start for partition, one in bounds.items()}, {partition: one.end for partition, one in bounds.items()}
        )

    def _own(self, queue: QueueDescription, offset: Mapping[str, Any]) -> StreamPosition:
        """An offset that Spark gives back, if it is of this very queue and table."""
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
        return position

    # -- what is gone ----------------------------------------------------------------------------------

    def _missing(self, queue: QueueDescription, partition: int, start: int, stop: int) -> list[int]:
        """What cannot be read of a range, as flat runs."""
        if start >= stop:
            return []
        if self._options.table == "events":
            first = self._ends(queue).start.get(partition, 0)
            return [start, min(first, stop)] if max(start, self._lowest) < first else []
        return self._reading.missing(queue, partition, start, stop)

    def _gone(self, queue: QueueDescription, at: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """How much is missing at or behind a position, in each partition."""
        if self._options.table == "events":  # a stream begins at what is whole, and of that only the front goes
            return {}
        return {partition: count(self._missing(queue, partition, at.get(partition, 0), end)) for partition, end in ends.items()}

    def _none_taken(self, queue: QueueDescription, position: StreamPosition, ends: PartitionBounds) -> dict[int, int]:
        """The numbers of a position, if since then nothing behind them was taken; or, where that is allowed, those to go on from."""
        at = dict(position.at)
        for partition, end in ends.stop.items():
            begins = at.get(partition, 0)
            if begins > end:
                self._fell_back(queue, partition, begins, end)
                at[partition] = end
            gone = self._missing(queue, partition, begins, end)
            if count(gone) > position.missing.get(partition, 0):
                self._lost(queue, partition, gone)
        return at

    def _lost(self, queue: QueueDescription, partition: int, gone: Sequence[int]) -> None:
        """Something is gone that was not read: the error, unless it is not wanted."""
        if not self._options.fail_on_data_loss:
            return
        one, what = ("log sequence", "log sequences") if self._options.table == "events" else ("item", "items")
        shown = [f"{start}–{stop - 1}" if stop - start > 1 else str(start) for start, stop in pairs(gone)][:SHOWN_RUNS]
        more = f" and more ({count(list(gone)):,} in all)" if len(gone) > 2 * SHOWN_RUNS else ""
        raise InvalidRequest(
            f"{one if count(list(gone)) == 1 else what} {', '.join(shown)}{more} of partition {partition} of queue {queue.name!r} went by "
            "retention or damage before this stream read them; set failOnDataLoss=false to go on without them, or start with a new "
            "checkpointLocation. So that retention waits, give the stream a cursor, or keep resolved items longer"
        )

    def _fell_back(self, queue: QueueDescription, partition: int, number: int, end: int) -> None:
        if self._options.fail_on_data_loss:
            raise InvalidRequest(
                f"partition {partition} of queue {queue.name!r} ends at {end}, but this stream has read up to {number}: its directory is "
                "an older copy, or a power cut took what was not synced; start with a new checkpointLocation, or set failOnDataLoss=false "
                f"to go on at {end}"
            )

    def __repr__(self) -> str:
        return f"StreamReader({self._options.queue!r}, {self._options.table})"


def check_stream_options(options: SourceOptions) -> SourceOptions:
    """The options, if a stream can do as they say."""
    if options.table not in ("items", "events"):
        raise InvalidRequest(f"table {options.table} tells what is now; read it with spark.read, or stream table items or events")
    for name, value in (("endingOffsets", options.ending_offsets), ("endingTimestamp", options.ending_timestamp)):
        if value is not None:
            raise InvalidRequest(f"{name} is given, and a stream has no end; leave it out, or read with spark.read")
    if options.cursor and options.table == "events":
        raise InvalidRequest("a cursor counts items, and table events is streamed; leave cursor out, and keep resolved items long enough")
    return options
