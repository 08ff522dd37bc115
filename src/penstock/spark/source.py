"""The data source "penstock".

Owns: `PenstockSource`, which Spark makes once per read, write or stream and asks for what it needs; `register`; and the schemas of the
tables in Spark's own types. What it gives lives in modules of its own, imported when they are wanted:
`batch.BatchReader(options, columns)`, `stream.StreamReader(options, columns)`, `consume.ConsumingReader(options, columns)`,
`writer.BatchWriter(options, schema, overwrite)` and `writer.StreamWriter(options, schema, overwrite)`.
"""

from collections.abc import Mapping
from contextlib import closing

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, DataSourceStreamArrowWriter, DataSourceStreamReader
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

from penstock.service.tables import schemas
from penstock.spark.options import SourceOptions, parse
from penstock.spark.reaching import reading
from penstock.words.errors import InvalidRequest

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
        options = parse(self.options)
        with closing(reading(options.broker)) as home:
            home.find(options.queue)  # what cannot be read is said at once, not when something is done with it
        return spark_schema(chosen(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.batch import BatchReader

        options = parse(self.options)
        return BatchReader(options, columns_of(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from penstock.spark.writer import BatchWriter

        return BatchWriter(parse(self.options), schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse(self.options)
        if options.consume:
            from penstock.spark.consume import ConsumingReader

            return ConsumingReader(options, columns_of(options, schema))
        from penstock.spark.stream import StreamReader

        return StreamReader(options, columns_of(options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from penstock.spark.writer import StreamWriter

        return StreamWriter(parse(self.options), schema, overwrite)


def chosen(options: SourceOptions) -> pa.Schema:
    """The schema of the table, as far as the options ask for it."""
    table = schemas.TABLES[options.table]
    if options.columns is not None:
        return schemas.narrowed(table, options.columns)
    return table if options.include_headers else schemas.narrowed(table, [name for name in table.names if name != "headers"])


def spark_schema(schema: pa.Schema) -> StructType:
    """The same columns in Spark's types."""
    return StructType([StructField(field.name, _TYPES[field.type]) for field in schema])


def columns_of(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """The columns of a schema that a user may have given instead of ours: some of the table's, each of the type that it has there."""
    table = schemas.TABLES[options.table]
    for field in schema.fields:
        if field.name not in table.names:
            raise InvalidRequest(f"table {options.table} has no column {field.name!r}; it has {', '.join(table.names)}")
        meant = _TYPES[table.field(field.name).type]
        if field.dataType != meant:
            found = f"column {field.name!r} of table {options.table} is {meant.simpleString()}, not {field.dataType.simpleString()}"
            raise InvalidRequest(f"{found}; leave the schema out and cast the column after reading")
    return tuple(schema.names)
