"""Stream writes: every row once, however often a batch is begun."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import penstock
from tests.spark.failing_writers import SOURCES, inbox, manifests, published_items

ROOT = Path(__file__).parents[2]
ROWS_PER_FILE = 30
DEADLINE = 120


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
    return broker_dir


def fill(place: Path, files: int) -> list[bytes]:
    """Write files of rows, one per batch; gives the payloads."""
    place.mkdir(exist_ok=True)
    for number in range(files):
        rows = range(ROWS_PER_FILE * number, ROWS_PER_FILE * (number + 1))
        (place / f"{number}.json").write_text(
            "".join(json.dumps({"key": f"k{row % 7}", "payload": f"{row}", "seq": row}) + "\n" for row in rows)
        )
        os.utime(place / f"{number}.json", (1_000 + number, 1_000 + number))  # the order in which they are read
    return sorted(b"%d" % row for row in range(ROWS_PER_FILE * files))


def stream(spark: SparkSession, place: Path) -> DataFrame:
    return spark.readStream.schema("key string, payload string, seq long").option("maxFilesPerTrigger", 1).json(str(place))


def start(df: DataFrame, place: Path, broker: str, source: str = "penstock", **options: str) -> StreamingQuery:
    given = {"checkpointLocation": str(place / "checkpoint"), "broker": broker, "queue": "orders", **options}
    return df.writeStream.format(source).options(**given).trigger(availableNow=True).start()


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(DEADLINE), "the query did not end"


def test_every_batch_is_dropped_by_the_querys_id_and_its_number(spark: SparkSession, orders: str, tmp_path: Path) -> None:
    payloads = fill(tmp_path / "rows", 3)
    query = start(stream(spark, tmp_path / "rows").drop("seq"), tmp_path, orders)
    finish(query)
    assert sorted(row.payload for row in published_items(orders)) == payloads
    assert sorted((manifest.source, manifest.number) for manifest in manifests(orders)) == [
        (f"stream-{query.id}", number) for number in (1, 2, 3)
    ]
    assert len(inbox(orders)) == 3


def test_rows_of_a_batch_are_in_order(spark: SparkSession, orders: str, tmp_path: Path) -> None:
    fill(tmp_path / "rows", 1)
    finish(start(stream(spark, tmp_path / "rows").repartition(3), tmp_path, orders, orderBy="seq desc"))
    for key in range(7):
        numbers = [int(row.payload) for row in published_items(orders) if row.key == f"k{key}"]
        assert numbers == [row for row in reversed(range(ROWS_PER_FILE)) if row % 7 == key]


@pytest.mark.parametrize("adopted", [False, True])
def test_batches_that_were_published_and_not_committed_come_again_and_add_nothing(
    spark: SparkSession, orders: str, tmp_path: Path, adopted: bool
) -> None:
    spark.dataSource.register(SOURCES[0])
    payloads, runs = fill(tmp_path / "rows", 2), 0
    rows = stream(spark, tmp_path / "rows").drop("seq")
    found: list[bytes] = []
    said: list[bool] = []
    while runs < 3:
        runs += 1
        try:
            finish(start(rows, tmp_path, orders, SOURCES[0].name()))
        except PySparkException as error:
            said.append("the driver is gone" in str(error))
            found += adopt(orders) if adopted else []
    assert said == [True, True]
    assert sorted(path.name for path in tmp_path.glob("failed-*")) == ["failed-0", "failed-1"]
    assert sorted(found + adopt(orders)) == payloads
    assert inbox(orders) == []


def adopt(broker: str) -> list[bytes]:
    """The items that the owner has in addition."""
    found = []
    with penstock.open(broker) as opened:
        queue = opened.queue("orders")
        while len(batch := queue.lease(1_000)):
            found += [lease.item.payload for lease in batch]
            batch.complete()
    return found


def test_a_batch_that_fails_adds_nothing_and_leaves_nothing(spark: SparkSession, orders: str, tmp_path: Path) -> None:
    fill(tmp_path / "rows", 1)
    rows = stream(spark, tmp_path / "rows").repartition(2).selectExpr("key", "if(seq = 17, null, payload) payload")
    with pytest.raises(PySparkException, match="the payload is null; give bytes or text"):
        finish(start(rows, tmp_path, orders))
    assert inbox(orders) == []


def test_a_table_that_is_replaced_by_every_batch_is_refused(spark: SparkSession, orders: str, tmp_path: Path) -> None:
    fill(tmp_path / "rows", 1)
    rows = stream(spark, tmp_path / "rows").groupBy("key").count().selectExpr("key", "cast(count as string) payload")
    options = {"checkpointLocation": str(tmp_path / "checkpoint"), "broker": orders, "queue": "orders"}
    with pytest.raises(PySparkException, match="not overwritten"):
        finish(rows.writeStream.format("penstock").options(**options).outputMode("complete").trigger(availableNow=True).start())
    assert inbox(orders) == []


@pytest.mark.long
def test_a_driver_killed_between_publishing_and_spark_s_commit(orders: str, tmp_path: Path) -> None:
    payloads = fill(tmp_path / "rows", 3)
    endings = []
    for _ in range(4):
        command = [sys.executable, "-m", "tests.spark.write_program", orders, str(tmp_path)]
        with (tmp_path / "log").open("ab") as log:
            started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            try:
                endings.append(started.wait(DEADLINE))
            finally:
                if started.poll() is None:
                    os.killpg(started.pid, signal.SIGKILL)
                    started.wait()
    assert endings == [-signal.SIGKILL] * 3 + [0], (tmp_path / "log").read_text()
    assert sorted(adopt(orders)) == payloads


@pytest.mark.long
def test_a_checkpoint_restored_from_an_older_copy_drops_no_rows_silently(spark: SparkSession, orders: str, tmp_path: Path) -> None:
    rows, checkpoint, copy = tmp_path / "rows", tmp_path / "checkpoint", tmp_path / "copy"
    fill(rows, 1)
    finish(start(stream(spark, rows).drop("seq"), tmp_path, orders))
    shutil.copytree(checkpoint, copy)
    payloads = fill(rows, 3)
    finish(start(stream(spark, rows).drop("seq"), tmp_path, orders))
    os.replace(checkpoint, tmp_path / "newest")
    shutil.copytree(copy, checkpoint)
    fill(rows, 4)
    other = spark.readStream.schema("key string, payload string, seq long").option("maxFilesPerTrigger", 3).json(str(rows))
    with pytest.raises(PySparkException, match="batch 1 of this stream was published with 30 rows and now has 90; it would add nothing"):
        finish(start(other.drop("seq"), tmp_path, orders))
    assert sorted(row.payload for row in published_items(orders)) == payloads
    assert len(inbox(orders)) == 3, "nothing is left of the batch that was refused"
    shutil.rmtree(checkpoint)
    os.replace(tmp_path / "newest", checkpoint)
    finish(start(other.drop("seq"), tmp_path, orders))
    assert sorted(row.payload for row in published_items(orders)) == sorted(b"%d" % row for row in range(4 * ROWS_PER_FILE))
