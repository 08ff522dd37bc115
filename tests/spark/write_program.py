"""Streams files into a queue and kills itself after each published batch; test_write_stream.py runs it.

    python -m tests.spark.write_program BROKER PLACE

Files are in PLACE/rows, the checkpoint in PLACE/checkpoint. The first time a batch is published, the program is killed.
"""

import os
import sys
from pathlib import Path

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.spark import session
from penstock.spark.options import parse_options
from penstock.spark.source import PenstockSource
from penstock.spark.writer import StreamWriter
from tests.spark.process_kill import enable_kill, kill_all
from tests.spark.test_write_stream import finish, start, stream


class KilledStreamWriter(StreamWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        super().commit(messages, batchId)
        mark = Path(os.environ["PLACE"]) / f"published-{batchId}"
        if not mark.exists():
            mark.touch()
            kill_all()


class KilledStreamSink(PenstockSource):
    @classmethod
    def name(cls) -> str:
        return "mortal"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return KilledStreamWriter(parse_options(self.options), schema, overwrite)


def main(broker: str, place: str) -> None:
    enable_kill(PLACE=place)
    spark = session("mortal", "local[2]")
    spark.dataSource.register(KilledStreamSink)
    finish(start(stream(spark, Path(place, "rows")).drop("seq"), Path(place), broker, "mortal"))


if __name__ == "__main__":
    main(*sys.argv[1:])
