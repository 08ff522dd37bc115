"""The driver of a campaign: three streams in one Spark, until it is killed or told to stop; campaign.py runs it.

    python -m tests.spark.campaign_program FOLDER TIMEOUT

write: FOLDER/rows, JSON files → the queue. read: the queue → FOLDER/read. consume: the queue → FOLDER/consume, with
TIMEOUT as consumerTimeout. A sink has a file of rows for each micro-batch, written by a rename; a repeated batch
replaces its file. A query that fails is started again, as a supervisor would, and the failure is noted in
FOLDER/failures. The program ends when the file FOLDER/stop is there, or when its JVM is gone.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.spark import session
from tests.spark.kill_points import CONSUME, DRIVER, FOLDER, JVM, READ, SOURCES, WRITE, reached, record_process
from tests.spark.process_kill import enable_kill

QUEUE = "orders"
ROW = "key string, payload string, seq long"
ITEMS_PER_BATCH = 400
"""Of the stream that reads: few, so that it has a backlog when the queue is resized."""
POLL_SECONDS = 0.05


def sink(folder: Path, direction: str) -> Callable[[DataFrame, int], None]:
    """A function for foreachBatch that stores the keys and payloads of a batch."""

    def keep(rows: DataFrame, number: int) -> None:
        reached(direction, "sink")
        lines = [f"{bytes(row.key).decode()} {bytes(row.payload).decode()}\n" for row in rows.select("key", "payload").collect()]
        place = folder / direction / f"{number:08d}"
        place.with_suffix(".new").write_text("".join(lines))
        place.with_suffix(".new").rename(place)
        reached(direction, "sunk")

    return keep


def queries(spark: SparkSession, folder: Path, timeout: str) -> dict[str, Callable[[], StreamingQuery]]:
    """How each stream is started."""
    place = {"broker": str(folder / "data"), "queue": QUEUE}

    def checkpoint(direction: str) -> dict[str, str]:
        return {"checkpointLocation": str(folder / f"checkpoint-{direction}")}

    def write() -> StreamingQuery:
        rows = spark.readStream.schema(ROW).json(str(folder / "rows"))
        return rows.writeStream.format(f"killable-{WRITE}").options(**place, **checkpoint(WRITE), orderBy="seq").start()

    def read() -> StreamingQuery:
        items = spark.readStream.format(f"killable-{READ}").options(**place, cursor="lake", maxItemsPerTrigger=ITEMS_PER_BATCH).load()
        return items.writeStream.foreachBatch(sink(folder, READ)).options(**checkpoint(READ)).start()

    def consume() -> StreamingQuery:
        items = spark.readStream.format(f"killable-{CONSUME}").options(**place, consume="true", consumerTimeout=timeout).load()
        return items.writeStream.foreachBatch(sink(folder, CONSUME)).options(**checkpoint(CONSUME)).start()

    return {WRITE: write, READ: read, CONSUME: consume}


def main(place: str, timeout: str) -> None:
    folder = Path(place)
    enable_kill(**{FOLDER: place})
    record_process(folder, DRIVER, os.getpid())
    # Tasks are tried again; the JVM compiles quickly rather than well, because it lives for seconds.
    conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1", "spark.sql.shuffle.partitions": 2}
    spark = session("campaign", "local[2,8]", **conf)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.proc.pid
    record_process(folder, JVM, java)
    for source in SOURCES:
        spark.dataSource.register(source)
    ways = queries(spark, folder, timeout)
    running = {direction: start() for direction, start in ways.items()}
    while not (folder / "stop").exists():
        if gateway.proc.poll() is not None:
            os._exit(1)
        for direction, query in running.items():
            if not query.isActive:
                with (folder / "failures").open("a") as failures:
                    failures.write(f"{direction}: {str(query.exception())[:2_000]!r}\n")
                running[direction] = ways[direction]()
        time.sleep(POLL_SECONDS)
    for query in running.values():
        query.stop()
    spark.stop()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (PySparkException, ConnectionError, EOFError) as error:  # the JVM was killed
        print(f"ended by {error!r:.500}", file=sys.stderr, flush=True)
        os._exit(1)
