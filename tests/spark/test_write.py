"""Batch writes on a real Spark: every row once, whatever happens to tasks, or none."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock
from penstock import spark as penstock_spark
from penstock.rules import slots
from penstock.rules.routing import slot
from tests.spark.failing_writers import SOURCES, inbox, manifests, published_items

ROWS = 300
OWNERS = slots.first_map([0, 1, 2]).owners


@pytest.fixture(scope="module", autouse=True)
def _sources(spark: SparkSession) -> None:
    for source in SOURCES:
        spark.dataSource.register(source)


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
    return broker_dir


def rows(spark: SparkSession, count: int = ROWS, tasks: int = 3, per_key: int = 10) -> DataFrame:
    """Rows with payloads 0, 1, …, several rows per key, and `seq`, which gives the order."""
    key = F.concat(F.lit("k"), F.floor(F.col("id") / per_key).cast("string"))
    return spark.range(0, count, 1, tasks).select(
        F.col("id").cast("string").cast("binary").alias("payload"), key.alias("key"), F.col("id").alias("seq")
    )


def save(df: DataFrame, broker: str, source: str = "penstock", **options: str) -> None:
    df.write.format(source).options(broker=broker, queue="orders", **options).mode("append").save()


def payloads(count: int = ROWS) -> list[bytes]:
    return sorted(b"%d" % n for n in range(count))


def test_every_row_is_published_once_in_its_keys_partition(spark: SparkSession, orders: str) -> None:
    save(rows(spark).drop("seq"), orders)
    found = published_items(orders)
    assert sorted(row.payload for row in found) == payloads()
    assert {(row.key, row.partition) for row in found} == {(f"k{n}", OWNERS[slot(b"k%d" % n)]) for n in range(ROWS // 10)}
    assert all(row.key == f"k{int(row.payload) // 10}" for row in found)


def test_a_task_writes_one_frame_for_each_partition(spark: SparkSession, orders: str) -> None:
    save(rows(spark, 3_000, tasks=2).drop("seq"), orders)
    assert [(part.frames, part.items) for part in manifests(orders)[0].parts] == [(3, 1_500)] * 2


@pytest.mark.parametrize("source", ["failing", "dying", "double"])
def test_tasks_that_fail_die_or_run_twice_add_every_row_once(spark: SparkSession, orders: str, source: str) -> None:
    save(rows(spark, tasks=2).drop("seq"), orders, source)
    assert sorted(row.payload for row in published_items(orders)) == payloads()
    assert len(inbox(orders)) == 1


@pytest.mark.parametrize("wrong", ["hopeless", "null"])
def test_a_write_that_fails_adds_nothing_and_leaves_nothing(spark: SparkSession, orders: str, wrong: str) -> None:
    df = rows(spark, tasks=2).drop("seq")
    if wrong == "null":
        df = df.withColumn("payload", F.when(F.col("payload") != b"77", F.col("payload")))
    said = "row 77 .key 'k7'.: the payload is null; give bytes or text" if wrong == "null" else "crashed"
    with pytest.raises(Exception, match=said):  # a worker that died is told by an error of the JVM
        save(df, orders, "penstock" if wrong == "null" else wrong)
    assert inbox(orders) == []


def test_an_empty_frame_adds_nothing(spark: SparkSession, orders: str) -> None:
    save(rows(spark).drop("seq").where("payload is null"), orders)
    assert inbox(orders) == []


def test_a_write_of_the_same_id_is_not_dropped_twice(spark: SparkSession, orders: str) -> None:
    for _ in range(2):
        save(rows(spark).drop("seq"), orders, writeId="load of today")
    assert [manifest.source for manifest in manifests(orders)] == ["load of today"]
    assert sorted(row.payload for row in published_items(orders)) == payloads()


def test_every_column_comes_through(spark: SparkSession, orders: str) -> None:
    df = spark.sql("""
        select 'text' payload, cast('k' as binary) key, map('h', 'v') headers, 'email' kind, 'plain' encoding, 'ref' reference, 3 priority,
               timestamp '2020-01-02 03:04:05 UTC' at, interval '1' day ttl, 'once' dedup""")
    save(df.union(df), orders)
    with penstock.open(orders) as broker:
        (lease,) = broker.queue("orders").lease(10)  # the second has the same dedup id
        item = lease.item
        assert (item.payload, item.key, item.headers, item.kind, item.encoding) == (b"text", "k", {"h": "v"}, "email", "plain")
        assert (item.reference, item.priority, item.ttl) == ("ref", 3, 86_400.0)
        assert item.at == datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_text_is_text_and_null_columns_are_none(spark: SparkSession, orders: str) -> None:
    save(spark.sql("select 'text' payload, cast(null as string) key, null kind"), orders)
    with penstock.open(orders) as broker:
        (lease,) = broker.queue("orders").lease(10)
        assert (lease.item.value, lease.item.key, lease.item.kind) == ("text", None, None)


# -- order -------------------------------------------------------------------------------------------


def in_order(broker: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in published_items(broker):
        found.setdefault(row.key or "", []).append(int(row.payload))
    return found


@pytest.mark.parametrize("direction", ["", " desc"])
def test_rows_of_a_key_follow_the_order_asked_for(spark: SparkSession, orders: str, direction: str) -> None:
    shuffled = rows(spark, per_key=60).repartition(3, F.xxhash64(F.lit(1), "seq"))
    save(shuffled, orders, orderBy=f"seq{direction}")
    found = in_order(orders)
    assert Counter(n for numbers in found.values() for n in numbers) == Counter(range(ROWS))
    assert all(numbers == sorted(numbers, reverse=bool(direction)) for numbers in found.values())
    assert all(name.startswith("merged") for name in (part.name for part in manifests(orders)[0].parts))


def test_a_routed_write_is_in_order_and_nothing_is_written_anew(spark: SparkSession, orders: str) -> None:
    shuffled = rows(spark, per_key=60).repartition(3, F.xxhash64(F.lit(1), "seq"))
    penstock_spark.write(shuffled, orders, "orders", order_by="seq")
    found = in_order(orders)
    assert Counter(n for numbers in found.values() for n in numbers) == Counter(range(ROWS))
    assert all(numbers == sorted(numbers) for numbers in found.values())
    assert not any(part.name.startswith("merged") for part in manifests(orders)[0].parts)


# -- and the owner -----------------------------------------------------------------------------------


def leased(broker: penstock.Broker) -> Iterator[bytes]:
    queue = broker.queue("orders")
    while len(batch := queue.lease(1_000)):
        yield from (lease.item.payload for lease in batch)
        batch.complete()


def test_items_are_there_when_the_owner_opens_the_directory(spark: SparkSession, orders: str) -> None:
    save(rows(spark).drop("seq"), orders)
    with penstock.open(orders) as broker:
        assert sorted(leased(broker)) == payloads()
    assert inbox(orders) == []


def test_the_program_that_owns_the_directory_writes_to_it(spark: SparkSession, broker_dir: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
        save(rows(spark), broker_dir, orderBy="seq")
        assert broker.queue("orders").stats().ready == ROWS
        assert sorted(leased(broker)) == payloads()
    assert inbox(broker_dir) == []


def test_keys_are_leased_in_the_order_that_was_asked_for(spark: SparkSession, broker_dir: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
        save(rows(spark, per_key=60).repartition(3, F.xxhash64(F.lit(1), "seq")), broker_dir, orderBy="seq desc")
        numbers = [int(payload) for payload in leased(broker)]
        for key in range(ROWS // 60):
            assert [n for n in numbers if n // 60 == key] == [*reversed(range(60 * key, 60 * key + 60))]
