"""Writes DataFrames and streams to a queue.

Owns: `BatchWriter` and `StreamWriter`. The driver checks options and columns before a task runs. Tasks stage their
rows. The driver's commit publishes the part files that the commit messages name, as one write; an abort removes them.
So a task that Spark repeats or runs twice adds nothing twice, and a write that fails adds nothing.
A batch write is identified by its writeId, or its application and version (txnAppId), or a new name; a batch of a
stream by the query's id and the batch's number. A write that was published before under its identity adds nothing;
a batch of a stream only if it has the same rows (batch_content.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StructType

from penstock.api import arrow
from penstock.spark.batch_content import MASK, ContentSum, is_repeated
from penstock.spark.options import CHECK, SKIP, SPARK_TYPES, SourceOptions, require_directories
from penstock.spark.part_files import PartFile
from penstock.spark.sort_order import SortOrder
from penstock.spark.staging import Destination, StagedWriteClient
from penstock.words.errors import InvalidRequest
from penstock.words.fields import BY_NAME
from penstock.words.sources import APPLICATION, STREAM, WriteContent

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class TaskCommitMessage(WriterCommitMessage):
    """The part files that a task has staged."""

    write: str
    files: list[PartFile]
    query: str = ""
    checksum: int = 0
    """The sum of its rows, for a stream."""


class _Writer:
    """What both writers have in common."""

    def __init__(self, options: SourceOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest('items can be added to a queue, not overwritten; use .mode("append") or .outputMode("append")')
        if options.table != "items":
            raise InvalidRequest(f"table {options.table} cannot be written; leave the option out, rows become items")
        self._options = options
        self._order = SortOrder.parse(options.order_by)
        self._order.check(schema)
        check_columns(schema, self._order)
        self._client = StagedWriteClient(require_directories(options.broker))
        self._destination: Destination = self._client.find(options.queue)
        self._name = self._client.new_write_name()

    def _stage(self, write: str, batches: "Iterator[pa.RecordBatch]", *, prepared: bool = True) -> list[PartFile]:
        context = TaskContext.get()
        assert context is not None  # Spark calls `write` in tasks
        task = f"{context.partitionId():06d}-{context.taskAttemptId()}"
        return self._client.stage(write, self._destination, self._order, batches, task, prepared=prepared)

    def _publish(
        self, write: str, source: str, number: int, files: Sequence[PartFile], *, known: bool = False, checksum: int | None = None
    ) -> None:
        """Publish what was staged, unless there is nothing or the number is known; wait until it is adopted."""
        if known or not files:
            self._client.abandon(write)
        else:
            self._client.publish(write, self._destination, self._order, source, number, files, checksum)
        if files:
            self._client.wait_adopted(self._destination, source, number, self._options.adopt_timeout)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, options: SourceOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if options.repeated_batch != CHECK:
            raise InvalidRequest("repeatedBatch is for streams; leave it out")
        # here, not in tasks: a task that comes after the commit finds no folder and fails
        self._client.prepare(self._name)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> WriterCommitMessage:
        return TaskCommitMessage(self._name, self._stage(self._name, iterator))

    def commit(self, messages: "list[WriterCommitMessage | None]") -> None:
        if self._options.txn_version is None:
            self._publish(self._name, self._options.write_id or self._name, 1, _files(messages))
            return
        source, number = f"{APPLICATION}{self._options.txn_app_id}", self._options.txn_version + 1
        # the owner refuses a number that it has adopted; one below a number that still waits must be refused here
        known = number <= self._client.published(self._destination, source)[0]
        self._publish(self._name, source, number, _files(messages), known=known)

    def abort(self, messages: "list[WriterCommitMessage | None]") -> None:
        self._client.abandon(self._name)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query. Spark creates one for the tasks of a batch and one for its commit."""

    def __init__(self, options: SourceOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if options.write_id:
            raise InvalidRequest("writeId is for batch writes; leave it out: a stream's batches are known by the query's checkpoint")
        if options.txn_app_id:
            raise InvalidRequest(
                "txnAppId is for batch writes, such as df.write in foreachBatch; leave it out, the checkpoint identifies a stream"
            )

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            raise InvalidRequest("Spark does not say which batch of which query this is; use df.write in foreachBatch, with a writeId")
        write = f"{self._name}-{batch}"
        try:
            # Spark does not call the driver before a batch's commit
            content = ContentSum()
            files = self._stage(write, content.passing(iterator), prepared=False)
            return TaskCommitMessage(write, files, query, content.checksum)
        except BaseException:
            self._client.abandon_empty(write)  # Spark's abort gets only the messages of tasks that succeeded
            raise

    def commit(self, messages: "list[WriterCommitMessage | None]", batchId: int) -> None:
        staged = [message for message in messages if isinstance(message, TaskCommitMessage)]
        if not staged:
            return
        files = _files(staged)
        source, content = f"{STREAM}{staged[0].query}", _content(batchId + 1, staged)
        known = bool(files) and is_repeated(
            content, *self._client.published(self._destination, source), skip=self._options.repeated_batch == SKIP
        )
        self._publish(staged[0].write, source, content.number, files, known=known, checksum=content.checksum)

    def abort(self, messages: "list[WriterCommitMessage | None]", batchId: int) -> None:
        for write in {message.write for message in messages if isinstance(message, TaskCommitMessage)}:
            self._client.abandon(write)


def _content(number: int, staged: Sequence[TaskCommitMessage]) -> WriteContent:
    items = sum(file.items for message in staged for file in message.files)
    return WriteContent(number, items, sum(message.checksum for message in staged) & MASK)


def _files(messages: "Sequence[WriterCommitMessage | None]") -> list[PartFile]:
    return [file for message in messages if isinstance(message, TaskCommitMessage) for file in message.files]


# -- checks ------------------------------------------------------------------------------------------


def check_columns(schema: StructType, order: SortOrder) -> None:
    """InvalidRequest if rows of that schema cannot be items."""
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise InvalidRequest(f"the DataFrame has several columns {twice!r}; keep one")
    unknown = [name for name in schema.names if name not in arrow.COLUMNS and name not in order.columns]
    if unknown:
        it = "it" if len(unknown) == 1 else "them"
        raise InvalidRequest(
            f"{arrow.unknown_columns_message(unknown)}, name {it} in orderBy, or rename {it} to one of {', '.join(arrow.COLUMNS)}"
        )
    for field in schema.fields:
        wanted = _wanted(field.name, field.dataType) if field.name in arrow.COLUMNS else ""
        if wanted:
            raise InvalidRequest(f"the column {field.name!r} is {field.dataType.simpleString()}; give {wanted}")
    if "payload" not in schema.names:
        raise InvalidRequest(
            f"the DataFrame has no column 'payload' (it has {', '.join(schema.names) or 'none'}); give the column with the items this name"
        )


def _wanted(name: str, kind: DataType) -> str:
    """The type that a column should have instead; "" if its type is right."""
    try:
        found = to_arrow_type(kind, timezone="UTC")
    except PySparkException:  # a type that Arrow has no match for
        found = None
    refused = arrow.expected_type(name, found)
    return SPARK_TYPES.get(BY_NAME[name].type, refused) if refused else ""
