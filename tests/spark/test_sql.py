"""Queues in Spark SQL, and the source as Spark finds it by itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import DataSource

import penstock
from penstock import Broker, NewItem, Queue
from penstock.spark.source import PenstockSource
from tests.spark.waiting import wait_until

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def queue(broker: Broker) -> Queue:
    """A queue with 120 items in three partitions."""
    queue = broker.create_queue("orders", partitions=3)
    queue.produce_many([NewItem({"n": number}, key=f"k{number % 7}") for number in range(120)])
    return queue


@pytest.fixture
def view(spark: SparkSession, broker_dir: str, queue: Queue) -> Iterator[str]:
    """A temporary view of table items."""
    spark.sql(f"CREATE TEMPORARY VIEW orders USING penstock OPTIONS (broker '{broker_dir}', queue 'orders')")
    yield "orders"
    spark.catalog.dropTempView("orders")


def number(spark: SparkSession, query: str) -> int:
    [[found]] = spark.sql(query).collect()
    return int(found)


# -- how Spark finds it ------------------------------------------------------------------------------


def test_spark_finds_it_where_it_is_not_registered(spark: SparkSession, broker_dir: str, queue: Queue) -> None:
    other = spark.newSession()
    assert other.read.format("penstock").options(broker=broker_dir, queue="orders").load().count() == 120


def test_its_package_gives_the_source_and_is_cheap_to_import() -> None:
    assert "pyspark_penstock" in {module.name for module in iter_modules()}
    from pyspark_penstock import DefaultSource

    assert issubclass(DefaultSource, DataSource)
    assert DefaultSource.name() == PenstockSource.name()
    assert type(DefaultSource({"queue": "orders"})) is PenstockSource
    program = "import sys, pyspark.sql.datasource; known = {*sys.modules}; import pyspark_penstock; print(*{*sys.modules} - known)"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["pyspark_penstock"]


def test_a_path_is_the_broker(spark: SparkSession, broker_dir: str, queue: Queue) -> None:
    assert spark.read.format("penstock").option("queue", "orders").load(broker_dir).count() == 120
    rows = spark.createDataFrame([("more",)], "payload string")
    rows.write.format("penstock").option("queue", "orders").mode("append").save(broker_dir)
    wait_until(lambda: queue.stats().produced == 121)


# -- views -------------------------------------------------------------------------------------------


def test_a_temporary_view(spark: SparkSession, broker_dir: str, view: str) -> None:
    assert number(spark, "SELECT count(*) FROM orders WHERE cast(key AS string) = 'k3' AND partition >= 0") == 17
    spark.sql(f"CREATE TEMPORARY VIEW events USING penstock OPTIONS (broker '{broker_dir}', queue 'orders', table 'events')")
    assert number(spark, "SELECT count(*) FROM orders JOIN events USING (id) WHERE event = 'produced'") == 120
    where = "key IN ('k3', 'k4') AND offset < 1000"
    spark.sql(f"CREATE TEMPORARY VIEW some USING penstock OPTIONS (broker '{broker_dir}', queue 'orders', where \"{where}\")")
    assert number(spark, "SELECT count(*) FROM some") == 34


def test_a_view_with_columns_to_write_takes_inserts(spark: SparkSession, broker_dir: str, queue: Queue) -> None:
    columns = "key string, payload string, kind string"
    spark.sql(f"CREATE TEMPORARY VIEW sink ({columns}) USING penstock OPTIONS (broker '{broker_dir}', queue 'orders', adoptTimeout '60')")
    spark.sql("INSERT INTO sink VALUES ('a', '{\"n\": 1}', 'new'), ('a', '{\"n\": 2}', 'new')")
    assert queue.stats().produced == 122
    with pytest.raises(PySparkException, match="items can be added to a queue, not overwritten"):
        spark.sql("INSERT OVERWRITE sink VALUES ('a', 'b', 'new')")
    assert queue.stats().produced == 122


def test_a_view_to_read_refuses_inserts(spark: SparkSession, view: str, queue: Queue) -> None:
    with pytest.raises(PySparkException, match="'id'"):
        spark.sql("INSERT INTO orders SELECT * FROM orders")
    assert queue.stats().produced == 120


# -- tables of the catalog ---------------------------------------------------------------------------


def test_a_table_of_the_catalog(spark: SparkSession, broker_dir: str, queue: Queue, tmp_path: Path) -> None:
    spark.sql(f"CREATE TABLE kept USING penstock OPTIONS (broker '{broker_dir}', queue 'orders', columns 'id, key, payload')")
    try:
        assert spark.table("kept").columns == ["id", "key", "payload"]
        assert number(spark, "SELECT count(*) FROM kept") == 120
        queue.produce("one more")
        assert number(spark, "SELECT count(DISTINCT id) FROM kept") == 121
        with pytest.raises(PySparkException, match="cannot add options"):
            spark.sql("SELECT count(*) FROM kept WITH (where = \"key = 'k0'\")").collect()
        stream = spark.readStream.table("kept").writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        stream.trigger(availableNow=True).start(str(tmp_path / "lake")).awaitTermination()
        assert spark.read.parquet(str(tmp_path / "lake")).count() == 121
        with pytest.raises(PySparkException, match="the option broker is missing"):
            spark.sql("INSERT INTO kept (key, payload) VALUES (X'61', X'62')")
        for change in ("DELETE FROM kept WHERE id = '0-1'", "UPDATE kept SET payload = X'00'", "TRUNCATE TABLE kept"):
            with pytest.raises(PySparkException, match=r"not support|UNSUPPORTED"):
                spark.sql(change)
    finally:
        spark.sql("DROP TABLE kept")
    assert queue.stats().produced == 121


def test_a_table_at_a_location_leaves_the_broker_when_it_is_dropped(spark: SparkSession, broker_dir: str, queue: Queue) -> None:
    spark.sql(f"CREATE TABLE placed USING penstock OPTIONS (queue 'orders', table 'state') LOCATION '{broker_dir}'")
    try:
        assert number(spark, "SELECT count(*) FROM placed WHERE state = 'ready'") == 120
    finally:
        spark.sql("DROP TABLE placed")
    assert len(queue.lease(7)) == 7
    assert Path(broker_dir).is_dir()


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("SELECT * FROM penstock.`{0}`", "UNSUPPORTED_DATASOURCE_FOR_DIRECT_QUERY"),
        ("SELECT * FROM penstock('{0}')", "UNRESOLVABLE_TABLE_VALUED_FUNCTION"),
        (
            "INSERT OVERWRITE DIRECTORY '{0}' USING penstock OPTIONS (queue 'orders') SELECT 'a' AS payload",
            "Only Data Sources providing FileFormat",
        ),
        (
            "CREATE TABLE made USING penstock OPTIONS (broker '{0}', queue 'orders') AS SELECT 'a' AS payload",
            "the option broker is missing",
        ),
        ("CREATE TABLE no_queue USING penstock OPTIONS (broker '{0}')", "the option queue is missing"),
    ],
)
def test_what_sql_cannot_do(spark: SparkSession, broker_dir: str, queue: Queue, query: str, error: str) -> None:
    with pytest.raises(Exception, match=error):
        spark.sql(query.format(broker_dir)).collect()
    assert queue.stats().produced == 120


# -- filters -----------------------------------------------------------------------------------------


def test_a_dataframe_with_several_filters_is_right_in_a_session_with_pushdown(spark: SparkSession, broker_dir: str, queue: Queue) -> None:
    """Spark keeps one plan of a Python source for all queries of a DataFrame, so that a source that let Spark push
    filters would give wrong rows here."""
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, "true")
    try:
        frame = spark.read.format("penstock").options(broker=broker_dir, queue="orders").load()
        counts = {partition: frame.where(f"partition = {partition}").count() for partition in range(3)}
        assert sum(counts.values()) == frame.count() == 120 and all(counts.values())
        both = frame.where("partition = 0").union(frame.where("partition = 1")).groupBy("partition").count()
        assert sorted(both.collect()) == [Row(partition=0, count=counts[0]), Row(partition=1, count=counts[1])]
    finally:
        spark.conf.set(PUSHDOWN, str(before))


def test_where_gives_what_spark_would_give(spark: SparkSession, broker_dir: str, queue: Queue) -> None:
    where = "partition IN (0, 2) AND offset >= 7 AND produced_at >= TIMESTAMP '2020-01-01T00:00:00+05:30' AND priority = 5"
    source = spark.read.format("penstock").options(
        broker=broker_dir, queue="orders", columns="id, partition, offset, produced_at, priority"
    )
    everything = source.load()
    found = source.option("where", where).load()
    expected = sorted(everything.where(where).collect())
    assert expected and sorted(found.collect()) == expected


# -- spark-sql ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_spark_sql_of_the_command_line_needs_no_setting(tmp_path: Path) -> None:
    import pyspark

    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("orders").produce_many([NewItem({"n": number}) for number in range(7)])
    home = Path(pyspark.__file__).parent
    view = "CREATE TEMPORARY VIEW v USING penstock OPTIONS (broker 'data', queue 'orders')"  # relative to the driver's directory
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [
        str(home / "bin" / "spark-sql"),
        "--master",
        "local[1]",
        "--conf",
        "spark.ui.enabled=false",
        "-e",
        f"{view}; SELECT count(*) FROM v",
    ]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2_000:]
    assert run.stdout.split() == [json.dumps(7)]
