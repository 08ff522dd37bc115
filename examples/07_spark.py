"""A queue and Apache Spark: write a DataFrame as items, read the log as a DataFrame, and consume items with a stream.

Needs `pip install 'penstock[spark]'`. Spark may run in another program than the broker's owner; here both are this one.
"""

import tempfile
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import penstock
import penstock.spark

directory = Path(tempfile.mkdtemp())
data, checkpoint = str(directory / "data"), str(directory / "checkpoint")
spark = penstock.spark.session()  # finds a Java

with penstock.open(data) as broker:
    dead = broker.create_queue("orders.dead")
    orders = broker.create_queue("orders", partitions=4, dead_queue=dead)

    # Write a DataFrame as items, all or none; each customer's items in the order of their numbers.
    rows = spark.range(1_000).select(
        F.col("id").alias("number"),
        F.concat(F.lit("customer-"), F.col("id") % 10).alias("key"),
        F.to_json(F.struct("id")).cast("binary").alias("payload"),
        F.lit("json").alias("encoding"),
    )
    penstock.spark.write(rows, data, "orders", order_by="number")
    print(orders.stats().ready, "items are ready")

    # Handle some items, and read the events as a table.
    orders.lease(300, per_key=30, consumer="host-1").complete()
    source = spark.read.format("penstock").options(broker=data, queue="orders")
    print(source.option("table", "events").load().groupBy("event").count().orderBy("event").collect())

    # A stream consumes the rest: committed items are completed; items that cannot be handled are buried.
    def handle(batch: DataFrame, number: int) -> None:
        batch = batch.withColumn("order", F.get_json_object(F.col("payload").cast("string"), "$.id").cast("int"))
        penstock.spark.settle(batch.where("order % 100 = 99"), data, "orders", "bury", reason="it has no address")

    stream = spark.readStream.format("penstock").options(broker=data, queue="orders", consume="true").load()
    query = stream.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    print(orders.stats().completed, "orders are completed,", dead.stats().ready, "are dead letters")

    # Redrive the dead letters that a SQL predicate selects.
    back = penstock.spark.redrive(spark, data, "orders", "reason like '%address%' and cast(payload_json:id as int) > 500")
    print(back.items, "are redriven")
spark.stop()
