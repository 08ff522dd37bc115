"""A Python data source that does nothing but yield Arrow batches from files: the most that any Python source can reach.

Owns: `BareSource`, which Spark's processes get by value, and `write_bare`, which writes its files.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

ROWS = 10_000
"""Rows of an Arrow batch, as in Penstock's."""


def write_bare(rows: DataFrame, folder: Path) -> None:
    """Write rows as Arrow files, one for each partition of the queue that they are from."""
    folder.mkdir()
    table = rows.toArrow()
    for partition in sorted(set(table.column("partition").to_pylist())):
        part = table.filter(pa.compute.equal(table.column("partition"), partition))
        with pa.OSFile(str(folder / f"{partition}.arrow"), "wb") as file, pa.ipc.new_stream(file, part.schema) as writer:
            writer.write_table(part.combine_chunks(), ROWS)


def register_bare(spark: SparkSession) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    spark.dataSource.register(BareSource)


class BareSource(DataSource):
    """The source "bare"; its schema is given with the query, its option is `path`."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def reader(self, schema: StructType) -> "BareReader":
        return BareReader(self.options["path"])

    def streamReader(self, schema: StructType) -> "BareStreamReader":
        return BareStreamReader(self.options["path"])


def read_batches(path: str) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(path) as file:
        yield from pa.ipc.open_stream(file)


class BareReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(Path(self.folder).iterdir())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_batches(partition.value)


class BareStreamReader(DataSourceStreamReader):
    """A stream of one micro-batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def initialOffset(self) -> dict[str, Any]:
        return {"read": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return {"read": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(Path(self.folder).iterdir())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_batches(partition.value)
