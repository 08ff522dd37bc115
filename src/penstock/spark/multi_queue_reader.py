"""Streaming queries over several queues: a list of them, or all whose names match a pattern.

Owns: `MultiQueueReader`. It has a `StreamReader` for each queue, and shares the limits of a micro-batch among them. Its
offset has the offset of each queue:
    {"queues": {"orders": {"incarnation": "5f0c…", …}, "refunds": {…}}}
A queue that is new to the stream joins with a micro-batch that has none of its rows, only its first position; so that
position is in the checkpoint before anything is read. A queue that the options no longer name keeps its position, and
nothing of it is read; it may be deleted. Another queue that was deleted is an error, unless there is a pattern and
failOnDataLoss is false: then the stream goes on without it.
Everything but `read` runs on the driver, in one process, one call at a time.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows, SupportsTriggerAvailableNow

from penstock.reports import QueueDescription
from penstock.spark.options import QueueStarts, SourceOptions
from penstock.spark.positions import BACKLOG, INCARNATION, LAG, QUEUES, parse_positions, shares
from penstock.spark.queue_tables import QUEUE, LazyQueueTables
from penstock.spark.stream_reader import StreamReader, check_stream_options, default_read_limit, delay_is_over
from penstock.tables.schemas import select_columns
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import QueueNotFound

_log = logging.getLogger("penstock")


class QueueTask(InputPartition):
    """What one task of a micro-batch reads, and of which queue."""

    def __init__(self, queue: str, task: InputPartition) -> None:
        super().__init__(task.value)
        self.queue, self.task = queue, task


class MultiQueueReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new items or events of several queues as they are published."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = check_stream_options(options)
        self._columns = tuple(columns)
        self._readers: dict[str, StreamReader] = {}
        self._tables = LazyQueueTables(options.broker)
        self._clock: Clock = SystemClock()
        self._initial: dict[str, Any] | None = None
        self._run_names: list[str] | None = None
        """With trigger availableNow: the queues that there were when the run began."""
        self._planned_at: int | None = None
        """When the last micro-batch with rows was planned (elapsed)."""
        self._planned: list[str] = []
        """The queues that the last micro-batch that was planned covers."""

    # -- offsets -------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:  # Spark asks twice and needs the same answer
            self._initial = {QUEUES: {name: self._reader(name).initialOffset() for name in sorted(self._find_all())}}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return default_read_limit(self._options)

    def prepareForTriggerAvailableNow(self) -> None:
        self._run_names = sorted(self._find_all())
        for name in self._run_names:
            self._reader(name).prepareForTriggerAvailableNow()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends. Everything before `start` is in the sink."""
        found = self._find_all()
        at = self._without_deleted(parse_positions(start), found)
        reading = [name for name in at if name in found]
        ends = at | self._plan({name: at[name] for name in reading}, limit)
        if ends != at:
            self._planned_at = self._clock.read().elapsed
        self._planned = reading
        for name in sorted(found) if self._run_names is None else self._run_names:
            if name not in at and name in found:
                ends[name] = self._first_offset(name)
        return {QUEUES: {name: ends[name] for name in sorted(ends)}}

    def _plan(self, at: Mapping[str, dict[str, Any]], limit: ReadLimit) -> dict[str, dict[str, Any]]:
        """Where the next micro-batch ends in each queue."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        least = limit.min_rows if isinstance(limit, ReadMinRows) else self._options.min_offsets_per_trigger
        if (most is None and least is None) or isinstance(limit, ReadAllAvailable):
            return {name: self._reader(name).latestOffset(offset, limit) for name, offset in at.items()}
        names = sorted(at)
        enough = max(most or 0, least or 0)
        unread = {index: self._reader(name).unread(at[name], enough) for index, name in enumerate(names)}
        if least is not None and self._must_wait(limit) and sum(unread.values()) < least:
            return {}
        turn = sum(number for offset in at.values() for number in offset.values() if type(number) is int)
        parts = shares(unread, most, turn) if most is not None else unread
        behind = sum(1 for rows in parts.values() if rows)
        ends = {}
        for index, name in enumerate(names):
            reader, size = self._reader(name), self._options.max_bytes_per_trigger
            reader.max_bytes = None if size is None else max(1, size // max(1, behind))
            ends[name] = reader.latestOffset(at[name], ReadMaxRows(parts.get(index, 0)))
        return ends

    def _must_wait(self, limit: ReadLimit) -> bool:
        """Whether a micro-batch waits while there are few rows. Never with trigger availableNow: it would not end."""
        if self._run_names is not None:
            return False
        return isinstance(limit, ReadMinRows) or not delay_is_over(self._options, self._planned_at, self._clock)

    def _without_deleted(self, at: dict[str, dict[str, Any]], found: Mapping[str, QueueDescription]) -> dict[str, dict[str, Any]]:
        """The positions in the queues that exist, or are not read. An error if another one was deleted, unless the
        stream may do without it."""
        kept = {}
        for name, offset in at.items():
            if not self._is_wanted(name) or (name in found and offset[INCARNATION] == f"{found[name].incarnation:016x}"):
                kept[name] = offset
            else:
                self._leave_out(name)
        return kept

    def _leave_out(self, name: str) -> None:
        """Go on without a queue that was deleted. An error if the stream may not do without it."""
        if self._options.fail_on_data_loss or (self._is_wanted(name) and not self._options.queue_pattern):
            raise QueueNotFound(
                f"queue {name!r} was deleted since this stream began; start with a new checkpointLocation"
                + (", or set failOnDataLoss=false to continue without it" if self._options.queue_pattern else "")
            )
        _log.warning("queue %r was deleted; the stream goes on without what was not read of it", name)
        self._close_reader(name)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends of the queues, with how much the last micro-batch leaves unread, and since when. A queue that was
        deleted meanwhile has none; the next micro-batch decides what becomes of the stream."""
        found = {}
        for name in self._planned:
            with suppress(QueueNotFound):
                found[name] = self._reader(name).reportLatestOffset() or {}
        backlog = sum(one.get(BACKLOG, 0) for one in found.values())
        return {QUEUES: found, BACKLOG: backlog, LAG: max((one.get(LAG, 0.0) for one in found.values()), default=0.0)}

    # -- rows ----------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch. When Spark repeats one after a crash, this is the first call of the process."""
        before, tasks = parse_positions(start), []
        for name, last in parse_positions(end).items():
            first = before.get(name)
            if first is None or first == last or first[INCARNATION] != last[INCARNATION]:
                continue
            try:
                tasks += [QueueTask(name, task) for task in self._reader(name).partitions(first, last)]
            except QueueNotFound:  # deleted after the micro-batch was planned
                self._leave_out(name)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Runs in the task's process."""
        assert isinstance(partition, QueueTask)
        schema = select_columns(self._options.schema, self._columns)
        for batch in self._reader(partition.queue).read(partition.task):
            names = pa.repeat(pa.scalar(partition.queue, pa.string()), batch.num_rows)
            arrays = [names if name == QUEUE else batch.column(name) for name in self._columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Move the cursors, if the stream has any."""
        found = self._find_all() if self._options.cursor else {}
        for name, offset in parse_positions(end).items():
            if name in found and offset[INCARNATION] == f"{found[name].incarnation:016x}":
                self._reader(name).commit(offset)

    def stop(self) -> None:
        for name in [*self._readers]:
            self._close_reader(name)
        self._tables.close()

    # -- the queues ------------------------------------------------------------------------------------

    def _find_all(self) -> dict[str, QueueDescription]:
        """The queues that the options name, as they are published now."""
        if not self._options.queue_pattern:
            return {name: self._tables.opened.find(name) for name in self._options.queues}
        return {queue.name: queue for queue in self._tables.opened.queues() if self._is_wanted(queue.name)}

    def _is_wanted(self, name: str) -> bool:
        """Whether the options name a queue."""
        pattern = self._options.queue_pattern
        return bool(re.fullmatch(pattern, name)) if pattern else name in self._options.queues

    def _reader(self, name: str) -> StreamReader:
        if name not in self._readers:
            starts = self._options.starting_offsets
            start = starts.by_queue.get(name) if isinstance(starts, QueueStarts) else starts
            self._readers[name] = StreamReader(self._options_of(name, starting_offsets=start), self._stored_columns)
            if self._run_names is not None:
                self._readers[name].prepareForTriggerAvailableNow()
        return self._readers[name]

    def _first_offset(self, name: str) -> dict[str, Any]:
        """Where a queue that is new to the stream begins: with its first item, whatever startingOffsets says."""
        beginning = StreamReader(self._options_of(name, starting_offsets=None, starting_timestamp=None), self._stored_columns)
        try:
            return beginning.initialOffset()
        finally:
            beginning.stop()

    def _options_of(self, name: str, **changes: Any) -> SourceOptions:
        return msgspec.structs.replace(self._options, queue=name, queue_pattern="", columns=None, min_offsets_per_trigger=None, **changes)

    @property
    def _stored_columns(self) -> list[str]:
        """The columns that the queues' readers give. At least one, because it has the number of rows."""
        return [name for name in self._columns if name != QUEUE] or ["id"]

    def _close_reader(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            reader.stop()

    def __repr__(self) -> str:
        return f"MultiQueueReader({self._options.queue_pattern or self._options.queue!r}, {self._options.table})"
