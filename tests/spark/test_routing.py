"""Slots in Spark: the same as Python's, and rows where their partition's task is."""

import random

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import penstock
from penstock import spark as penstock_spark
from penstock.rules import routing, slots
from penstock.spark.routing import partition_index
from penstock.words.errors import InvalidRequest
from tests.rules.test_routing import VECTORS


def test_texts_and_bytes_have_the_slots_of_the_design(spark: SparkSession) -> None:
    chance = random.Random(7)
    keys = [*VECTORS, *(chance.randbytes(chance.randrange(70)) for _ in range(2_000)), None]
    rows = spark.createDataFrame([(key,) for key in keys], StructType([StructField("key", BinaryType())]))
    found = {
        None if row.key is None else bytes(row.key): row.slot
        for row in rows.select("key", penstock_spark.slot("key").alias("slot")).collect()
    }
    assert found == {key: None if key is None else routing.slot(key) for key in keys}
    assert all(found[key] == expected for key, expected in VECTORS.items())


def test_a_text_has_the_slot_of_its_bytes(spark: SparkSession) -> None:
    texts = ["a", "", "kākāriki", "🦀🐍", "x" * 1_000, "customer-42"]
    rows = spark.createDataFrame([(text,) for text in texts], StructType([StructField("key", StringType())]))
    found = {row.key: row.slot for row in rows.select("key", penstock_spark.slot(F.col("key")).alias("slot")).collect()}
    assert found == {text: routing.slot(text.encode()) for text in texts}


def test_homes_follow_a_map_that_was_resized_many_times(spark: SparkSession) -> None:
    owners = slots.first_map([0, 1, 2])
    for partitions in ([0, 1, 2, 3, 4], [0, 2, 4], [0, 2, 4, 5, 6, 7, 8]):
        owners = slots.next_map(owners, partitions)
    numbers = sorted(set(owners.owners))
    rows = spark.range(routing.SLOTS).select("id", partition_index(F.col("id").cast("int"), owners.owners).alias("home")).collect()
    assert all(numbers[row.home] == owners.owners[row.id] for row in rows)


def test_routed_rows_lie_with_those_of_their_partition(spark: SparkSession, broker_dir: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
    owners = slots.first_map([0, 1, 2]).owners
    df = spark.range(0, 900, 1, 4).selectExpr("if(id % 10 = 0, null, concat('k', id)) key", "cast(id as string) payload")
    routed = penstock_spark.routed(df, broker_dir, "orders")
    assert routed.columns == df.columns
    found = routed.select("*", F.spark_partition_id().alias("task")).collect()
    assert len(found) == 900 and routed.rdd.getNumPartitions() == 3
    assert all(row.task == owners[routing.slot(row.key.encode())] for row in found if row.key is not None)
    assert len({row.task for row in found if row.key is None}) > 1


def test_rows_without_keys_are_not_moved(spark: SparkSession, broker_dir: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
        broker.create_queue("single")
    df = spark.range(0, 10, 1, 5).selectExpr("cast(id as string) payload")
    assert penstock_spark.routed(df, broker_dir, "orders").rdd.getNumPartitions() == 5
    assert penstock_spark.routed(df, broker_dir, "single").rdd.getNumPartitions() == 1


def test_routing_refuses_wrong_columns(spark: SparkSession, broker_dir: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=3)
    df = spark.range(10).selectExpr("id key", "'x' payload")
    with pytest.raises(InvalidRequest, match="the column 'key' is bigint; give binary or string"):
        penstock_spark.write(df, broker_dir, "orders")
    with pytest.raises(InvalidRequest, match="orderBy names 'ts'"):
        penstock_spark.write(df, broker_dir, "orders", order_by="ts")
    stream = spark.readStream.format("rate").load().selectExpr("'x' payload")
    with pytest.raises(InvalidRequest, match="the DataFrame is a stream"):
        penstock_spark.write(stream, broker_dir, "orders")
