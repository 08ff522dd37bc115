"""A program, not a test: rows go through a queue on one kind of Spark, and what came out is told as a line of JSON.

    python tests/spark/round_trip.py {cluster | connect | packaged} DIRECTORY

It owns the broker's directory itself. On a cluster an executor is killed (SIGKILL) in the midst of write, read and
stream. It is run as a script so that its functions reach the executors by value: these know the package, not the tests.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock import spark
from penstock.spark import java

ROWS, KEYS, TASKS = 24_000, 97, 6
SMALL = {"spark.sql.execution.arrow.maxRecordsPerBatch": "500", "spark.sql.shuffle.partitions": "4"}
Pass = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


# -- kinds of Spark ----------------------------------------------------------------------------------


def cluster() -> SparkSession:
    """Two executors in separate processes, as on two machines."""
    return spark.session("round-trip", "local-cluster[2,1,1024]", **SMALL)


def connect() -> SparkSession:
    """A client without a JVM, and a server in another process."""
    SparkSession.builder.remote("local[2]").getOrCreate()
    session = spark.session()  # takes the one that runs
    for name, value in SMALL.items():
        session.conf.set(name, value)
    return session


def packaged() -> SparkSession:
    """As on a machine where no Java is installed."""
    java.USUAL_PLACES = ()
    assert list(java.candidates(os.environ, java.USUAL_PLACES)) == [], "a Java was found; take it off the PATH and JAVA_HOME"
    return spark.session("round-trip", "local[2]", **SMALL)


# -- the round ---------------------------------------------------------------------------------------


def main(kind: str, place: Path) -> None:
    session = {"cluster": cluster, "connect": connect, "packaged": packaged}[kind]()
    trouble = fatal_once if kind == "cluster" else untroubled
    told: dict[str, Any] = {"kind": type(session).__module__}
    if kind != "connect":
        told["java"] = session.sparkContext._jvm.System.getProperty("java.home")  # type: ignore[union-attr]
    with penstock.open(place / "broker") as broker:
        for queue in ("in", "out"):
            broker.create_queue(queue, partitions=3)
        write(session, place, trouble(place / "killed-writing"))
        told["written"] = broker.queue("in").stats().ready
        told["read"] = faults(read(session, place, "in", trouble(place / "killed-reading")))
        stream(session, place, trouble(place / "killed-streaming"))
        told["streamed"] = broker.queue("out").stats().ready
        told["again"] = faults(read(session, place, "out", untroubled(place)))
        lake = session.read.parquet(str(place / "lake"))
        told["lake"] = [lake.count(), lake.distinct().count()]
    told["killed"] = sorted(path.name for path in place.glob("killed-*"))
    session.stop()
    print(json.dumps(told))


def write(session: SparkSession, place: Path, trouble: Pass) -> None:
    columns = ("cast(id as string) as payload", f"concat('k', id % {KEYS}) as key", "id as seq")
    rows = session.range(0, ROWS, 1, TASKS).selectExpr(*columns)
    troubled = rows.mapInArrow(trouble, rows.schema)
    troubled.write.format("penstock").mode("append").options(broker=str(place / "broker"), queue="in", orderBy="seq").save()


def read(session: SparkSession, place: Path, queue: str, trouble: Pass) -> DataFrame:
    rows = session.read.format("penstock").options(broker=str(place / "broker"), queue=queue, minPartitions=str(TASKS)).load()
    return rows.mapInArrow(trouble, rows.schema)


def stream(session: SparkSession, place: Path, trouble: Pass) -> None:
    """Stream from the first queue to the second, and from the second to files."""
    source = session.readStream.format("penstock").options(broker=str(place / "broker"), maxItemsPerTrigger=str(ROWS // 4))
    rows = source.option("queue", "in").load().selectExpr("payload", "key", "cast(cast(payload as string) as bigint) as seq")
    rows = rows.mapInArrow(trouble, rows.schema)
    onward = rows.writeStream.format("penstock").options(broker=str(place / "broker"), queue="out", orderBy="seq")
    onward.option("checkpointLocation", str(place / "onward")).trigger(availableNow=True).start().awaitTermination()
    files = source.option("queue", "out").load().selectExpr("cast(payload as string) as payload").writeStream.format("parquet")
    files.option("checkpointLocation", str(place / "filed")).trigger(availableNow=True).start(str(place / "lake")).awaitTermination()


def faults(rows: DataFrame) -> list[str]:
    """The errors in items read back: missing, doubled, or out of order within their key."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows.select("key", "partition", "offset", "payload").collect():
        found.setdefault(bytes(row.key).decode(), []).append((row.offset, int(bytes(row.payload))))
    wrong = []
    for key in (f"k{number}" for number in range(KEYS)):
        numbers = [number for _, number in sorted(found.get(key, []))]
        if sorted(numbers) != list(range(int(key[1:]), ROWS, KEYS)):
            wrong.append(f"{key}: {len(numbers)} items, {len(set(numbers))} different")
        elif numbers != sorted(numbers):
            wrong.append(f"{key}: not in order")
    return wrong


# -- trouble -----------------------------------------------------------------------------------------


def untroubled(_: Path) -> Pass:
    def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return passed


def fatal_once(mark: Path) -> Pass:
    """Passes rows through; the first task kills its executor in the middle. The file `mark` says that it has
    happened."""

    def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            yield batch
            if number == 1:
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                daemon = os.getppid()
                executor = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
                assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_bytes()
                os.kill(executor, signal.SIGKILL)
                signal.pause()

    return passed


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
