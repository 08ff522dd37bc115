"""A program that loads a file and dies at the commit; run by test_jobs_load.py as a process of its own.

    python -m tests.spark.load_program BROKER SOURCE before|after

The commit runs in a process of Spark's.
"""

import os
import sys

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.spark import load, session
from penstock.spark.options import parse_options
from penstock.spark.source import PenstockSource
from penstock.spark.writer import BatchWriter
from tests.spark.process_kill import enable_kill, kill_all


class KilledBatchWriter(BatchWriter):
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if os.environ["STEP"] == "after":
            super().commit(messages)
        kill_all()


class KilledLoadSource(PenstockSource):
    """Stands in for the source itself."""

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return KilledBatchWriter(parse_options(self.options), schema, overwrite)


def main(broker: str, source: str, step: str) -> None:
    enable_kill(STEP=step)
    spark = session("mortal", "local[2]")
    spark.dataSource.register(KilledLoadSource)
    load(spark, source, broker, "orders")


if __name__ == "__main__":
    main(*sys.argv[1:])
