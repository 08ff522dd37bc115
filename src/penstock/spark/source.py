"""The data source "penstock".

Owns: `PenstockSource`, which Spark makes once per read, write or stream and asks for what it needs; `register`; and the schemas of the
tables in Spark's own types. What can be known is refused when a table is loaded; whether it will be a batch or a stream is not known
then, so that what only one of them cannot do is said when it begins.
What it gives lives in modules of its own, imported when they are wanted:
`batch.BatchReader(options, columns)`, `stream.StreamReader(options, columns)`, `consume.ConsumingReader(options, columns)`,
`writer.BatchWriter(options, schema, overwrite)` and `writer.StreamWriter(options, schema, overwrite)`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.spark.options import READ, STREAM, WRITE, SourceOptions, Use, parse_options, require_directories
from penstock.spark.queue_tables import QueueTables
from penstock.tables import schemas
from penstock.words.errors import InvalidRequest, PenstockError

NAME = "penstock"
_TYPES: Mapping[pa.DataType, DataType] = {
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    schemas.INSTANT: TimestampType(),
    schemas.SPAN: DayTimeIntervalType(),
    schemas.HEADERS: MapType(StringType(), BinaryType()),
}


def register(spark: SparkSession) -> None:
    """Let a session know the format "penstock"."""
    spark.dataSource.register(PenstockSource)


class PenstockSource(DataSource):
    """A queue as tables, and tables as items of a queue."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        """The columns that the options ask for."""
        options = self._meant(READ, STREAM)
        if options.consume:
            from penstock.spark.consuming_reader import check_consume_options

            check_consume_options(options)
        with QueueTables.open(options.broker) as tables:
            tables.find(options.queue)  # what cannot be read is said at once, not when something is done with it
        return spark_schema(selected_schema(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.batch_reader import BatchReader

        options = self._meant(READ)
        return BatchReader(options, selected_columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from penstock.spark.writer import BatchWriter

        return BatchWriter(self._meant(WRITE), schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            options = self._meant(STREAM)
            columns = selected_columns(options, schema)
            if options.consume:
                from penstock.spark.consuming_reader import ConsumingReader

                return ConsumingReader(options, columns)
            from penstock.spark.stream_reader import StreamReader

            return StreamReader(options, columns)
        except PenstockError as error:
            if not _is_streams_process():
                raise
            return FailedStreamReader(error)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from penstock.spark.writer import StreamWriter

        return StreamWriter(self._meant(WRITE), schema, overwrite)

    def _meant(self, *uses: Use) -> SourceOptions:
        options = parse_options(self.options, *uses)
        require_directories(options.broker)
        return options


class FailedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream that cannot be. Spark's process of a stream stumbles over an error before it has a reader, and then tells of that alone:
    so it gets one, and is told by whatever it asks first."""

    def __init__(self, error: PenstockError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


def _is_streams_process() -> bool:
    from penstock.spark.consuming_reader import SPARK_STREAM_MODULE

    program = sys.modules["__main__"].__spec__
    return program is not None and program.name == SPARK_STREAM_MODULE


def selected_schema(options: SourceOptions) -> pa.Schema:
    """The schema of the table, as far as the options ask for it."""
    table = schemas.TABLES[options.table]
    if options.columns is not None:
        return schemas.select_columns(table, options.columns)
    return table if options.include_headers else schemas.select_columns(table, [name for name in table.names if name != "headers"])


def spark_schema(schema: pa.Schema) -> StructType:
    """The same columns in Spark's types."""
    return StructType([StructField(field.name, _TYPES[field.type]) for field in schema])


def selected_columns(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """The columns of a schema that a user may have given instead of ours: some of the table's, each of the type that it has there."""
    table = schemas.TABLES[options.table]
    if not schema.fields:
        raise InvalidRequest("the schema has no columns; leave it out, or name some of the table's")
    for field in schema.fields:
        if field.name not in table.names:
            raise InvalidRequest(f"table {options.table} has no column {field.name!r}; it has {', '.join(table.names)}")
        meant = _TYPES[table.field(field.name).type]
        if field.dataType != meant:
            found = f"column {field.name!r} of table {options.table} is {meant.simpleString()}, not {field.dataType.simpleString()}"
            raise InvalidRequest(f"{found}; leave the schema out and cast the column after reading")
    return tuple(schema.names)
