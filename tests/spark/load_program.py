"""Loads a file and kills itself at the commit; test_jobs_load.py runs it.

    python -m tests.spark.load_program BROKER SOURCE before|after

The commit runs in one of Spark's processes.
"""

import os
import sys

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.spark import load, session
from penstock.spark import source as sources
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
    """Registered instead of PenstockSource."""

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return KilledBatchWriter(parse_options(self.options), schema, overwrite)


def main(broker: str, source: str, step: str) -> None:
    enable_kill(STEP=step)
    sources.PenstockSource = KilledLoadSource  # type: ignore[misc]
    load(session("mortal", "local[2]"), source, broker, "orders")


if __name__ == "__main__":
    main(*sys.argv[1:])
