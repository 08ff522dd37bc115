"""A queue and Apache Spark, both ways: a DataFrame becomes items, the log becomes a DataFrame, and a stream consumes what is ready.

Needs `pip install 'penstock[spark]'`. Spark works beside the program that has the directory open: here they are the same one.
"""

import tempfile
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import penstock
import penstock.spark

place = Path(tempfile.mkdtemp())
data, checkpoint = str(place / "data"), str(place / "checkpoint")
spark = penstock.spark.session()  # finds a Java, or brings one along

with penstock.open(data) as broker:
    dead = broker.create_queue("orders.dead")
    orders = broker.create_queue("orders", partitions=4, dead_queue=dead)

    # A DataFrame becomes items, all or none of them; each customer's stand in the order of their numbers.
    rows = spark.range(1_000).select(
        F.col("id").alias("number"),
        F.concat(F.lit("customer-"), F.col("id") % 10).alias("key"),
        F.to_json(F.struct("id")).cast("binary").alias("payload"),
        F.lit("json").alias("encoding"),
    )
    penstock.spark.write(rows, data, "orders", order_by="number")
    print(orders.stats().ready, "items are ready")

    # A worker handles some. What happened is a table, and so is what is there now.
    orders.lease(300, per_key=30, consumer="host-1").complete()
    source = spark.read.format("penstock").options(broker=data, queue="orders")
    print(source.option("table", "events").load().groupBy("event").count().orderBy("event").collect())

    # A stream consumes the rest: what a batch has committed is completed, what it cannot handle is given up by its id.
    def handle(batch: DataFrame, number: int) -> None:
        batch = batch.withColumn("order", F.get_json_object(F.col("payload").cast("string"), "$.id").cast("int"))
        penstock.spark.settle(batch.where("order % 100 = 99"), data, "orders", "bury", reason="it has no address")

    stream = spark.readStream.format("penstock").options(broker=data, queue="orders", consume="true").load()
    query = stream.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    print(orders.stats().completed, "orders are completed,", dead.stats().ready, "wait for somebody to mend them")

    # Dead letters are chosen by SQL, and go back to where they came from.
    back = penstock.spark.redrive(spark, data, "orders", "reason like '%address%' and cast(payload_json:id as int) > 500")
    print(back.items, "go back")
spark.stop()
