"""Consumes a queue into files and kills itself at a given step; test_consume_kill.py runs it.

    python -m tests.spark.consume_program BROKER CHECKPOINT SINK WHERE BATCH TIMEOUT

WHERE is a step of a micro-batch, BATCH the number of the batch; "-" is nowhere. TIMEOUT is consumerTimeout.
The sink is a directory with a file of ids for each batch, written by a rename; a repeated batch replaces its file.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from penstock.spark import session
from penstock.spark.consuming_reader import ConsumingReader
from penstock.spark.options import parse_options
from penstock.spark.source import PenstockSource, selected_columns
from tests.spark.process_kill import enable_kill, kill_all

ITEMS_PER_BATCH = 40
STEPS = ("initial", "ask", "latest", "partitions", "read", "sink", "sunk")


class KilledConsumingReader(ConsumingReader):
    """Kills the program at a step of the batch whose number is that of the last completed grant."""

    def initialOffset(self) -> dict[str, Any]:
        found = super().initialOffset()
        self._reached("initial", found)
        return found

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._reached("ask", start)
        found = super().latestOffset(start, limit)
        self._reached("latest", start)
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found = super().partitions(start, end)
        self._reached("partitions", start)
        for part in found:
            part.start = start  # type: ignore[attr-defined]
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in super().read(partition):
            yield batch
            self._reached("read", partition.start)  # type: ignore[attr-defined]

    def _reached(self, step: str, offset: dict[str, Any]) -> None:
        where, batch = os.environ["DIE_AT"].split()
        if step == where and offset["grant"] == int(batch):
            kill_all()


class KilledConsumingSource(PenstockSource):
    @classmethod
    def name(cls) -> str:
        return "mortal"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse_options(self.options)
        return KilledConsumingReader(options, selected_columns(options, schema))


def consume(spark: SparkSession, form: str, where: str, batch: int, *, broker: str, checkpoint: str, sink: str, timeout: str) -> None:
    """Consume all available items into the sink."""

    def keep(rows: DataFrame, number: int) -> None:
        if (where, batch) == ("sink", number):
            kill_all()
        ids = [row.id for row in rows.select("id").collect()]
        place = Path(sink) / f"{number:06d}"
        place.with_suffix(".new").write_text("\n".join(ids))
        place.with_suffix(".new").rename(place)
        if (where, batch) == ("sunk", number):
            kill_all()

    options = {
        "broker": broker,
        "queue": "orders",
        "consume": "true",
        "consumerTimeout": timeout,
        "maxItemsPerTrigger": str(ITEMS_PER_BATCH),
    }
    stream = spark.readStream.format(form).options(**options).load()
    stream.writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def main(broker: str, checkpoint: str, sink: str, where: str, batch: str, timeout: str) -> None:
    enable_kill(DIE_AT=f"{where} {batch}")
    spark = session("mortal", "local[2]")
    spark.dataSource.register(KilledConsumingSource)
    consume(spark, "mortal", where, int(batch), broker=broker, checkpoint=checkpoint, sink=sink, timeout=timeout)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
