"""The data source "penstock".

Owns: `PenstockSource`, which Spark creates for each read, write or stream; `register`; and the tables' schemas in
Spark's types. Options are checked when a table is loaded. Spark does not say then whether it loads a batch or a stream,
so an option that only one of them refuses raises its error when the query starts.
Readers and writers are imported when they are first needed.
"""

import json
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

from penstock.spark.catalog_tables import is_catalog_table, remember_options, remembered_options, table_options
from penstock.spark.options import PATH, READ, STREAM, WRITE, SourceOptions, Use, parse_options, require_directories
from penstock.spark.queue_tables import GENERATION, QueueTables
from penstock.tables import schemas
from penstock.words.errors import InvalidRequest, PenstockError

NAME = "penstock"
BROKER = "broker"
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
    """Register the format "penstock" with a session; repeating it does no harm.

    InvalidRequest if the session's tasks run a Python that cannot import penstock.
    """
    from penstock.spark.active_session import activate_in_writers, activated
    from penstock.spark.worker_python import check_worker_python

    check_worker_python(spark)
    activate_in_writers(NAME)
    with activated(spark):  # Spark refuses a name that the active session has, which may be another one
        spark.dataSource.register(PenstockSource)


class PenstockSource(DataSource):
    """Reads a queue as tables, and writes rows into a queue as items."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        """The columns that the options select."""
        options = self._parsed_options(READ, STREAM)
        if options.consume:
            from penstock.spark.consuming_reader import check_consume_options

            check_consume_options(options)
        with QueueTables.open(options.broker) as tables:
            for queue in options.queues:
                tables.find(queue)  # raises now if there is no such queue, not when the query runs
        schema = spark_schema(selected_schema(options))
        if not is_catalog_table(self.options):
            return schema
        kept = {name: value for name, value in table_options(self.options).items() if name.lower() not in (BROKER, PATH)}
        return remember_options(schema, {**kept, BROKER: json.dumps(options.broker)})  # paths are absolute now

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.batch_reader import BatchReader

        if remembered_options(schema) and self.options:
            raise InvalidRequest(
                "a query of a table of the catalog cannot add options, because Spark may use them for every read of the table in a "
                "statement; make a temporary view with them, or read with format('penstock')"
            )
        options = self._parsed_options(READ, schema=schema)
        return BatchReader(options, selected_columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from penstock.spark.writer import BatchWriter

        return BatchWriter(self._parsed_options(WRITE), schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            options = self._parsed_options(STREAM, schema=schema)
            columns = selected_columns(options, schema)
            if options.consume:
                from penstock.spark.consuming_reader import ConsumingReader

                return ConsumingReader(options, columns)
            if options.several:
                from penstock.spark.multi_queue_reader import MultiQueueReader

                return MultiQueueReader(options, columns)
            from penstock.spark.stream_reader import StreamReader

            return StreamReader(options, columns)
        except PenstockError as error:
            from penstock.spark.consuming_reader import in_stream_process

            if not in_stream_process():
                raise
            return FailedStreamReader(error)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from penstock.spark.writer import StreamWriter

        return StreamWriter(self._parsed_options(WRITE), schema, overwrite)

    def _parsed_options(self, *uses: Use, schema: StructType | None = None) -> SourceOptions:
        given: Mapping[str, str] = table_options(self.options) if is_catalog_table(self.options) else self.options
        if schema is not None and not {BROKER, PATH} & {name.lower() for name in given}:
            given = {**remembered_options(schema), **given}
        options = parse_options(given, *uses)
        require_directories(options.broker)
        return options


class FailedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises an error at every call. If `streamReader` itself raises in Spark's stream process, Spark fails with an
    error of its own and hides ours; from a reader's call Spark shows it."""

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


def selected_schema(options: SourceOptions) -> pa.Schema:
    """The columns of the table that the options select."""
    table = options.schema
    if options.columns is not None:
        return schemas.select_columns(table, options.columns)
    left_out = {"headers": not options.include_headers, GENERATION: not options.include_generation}
    return schemas.select_columns(table, [name for name in table.names if not left_out.get(name)])


def spark_schema(schema: pa.Schema) -> StructType:
    """The same columns in Spark's types."""
    return StructType([StructField(field.name, _TYPES[field.type]) for field in schema])


def selected_columns(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """The column names of a schema. InvalidRequest unless each is a column of the table and has its type."""
    table = options.schema
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
