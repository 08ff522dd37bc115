"""The nightly pipeline: files become a queue, workers handle it, and Spark archives, aggregates, triages and reports.

Needs `pip install 'penstock[spark]'`. Here one program does it all; each step may be a program of its own beside the
workers, or a command (`penstock spark load`, `archive`, `redrive`, `report`).
"""

import json
import tempfile
from pathlib import Path

from pyspark.sql import functions as F

import penstock
import penstock.spark

place = Path(tempfile.mkdtemp())
data, archive, windows = str(place / "data"), str(place / "archive"), str(place / "windows")
lines = [json.dumps({"order": n, "customer": f"customer-{n % 40}", "amount": n * 7 % 100}) for n in range(400)]
(place / "orders.json").write_text("\n".join([*lines, "{ this line is broken"]))
limit = 90


def handle(item: penstock.Item) -> None:
    if item.value["amount"] >= limit:
        raise penstock.Bury(f"order {item.value['order']} is above the limit of {limit}")


spark = penstock.spark.session(master="local[2]", **{"spark.sql.shuffle.partitions": 2})
with penstock.open(data) as broker:
    dead = broker.create_queue("orders.dead")
    orders = broker.create_queue("orders", partitions=2, dead_queue=dead)

    # Load: each customer's orders in the order of their numbers; what is no order is set aside.
    schema, aside = "order long, customer string, amount long", str(place / "quarantine")
    file = str(place / "orders.json")
    loaded = penstock.spark.load(spark, file, data, "orders", key="customer", schema=schema, order_by="order", quarantine=aside)
    print(f"load: {loaded.items} orders, {loaded.quarantined} malformed line set aside")

    # Workers: any number of processes, on this machine; here one, until the queue is empty.
    penstock.Worker(orders, handle, concurrency=4).run(until_empty=True)
    print(f"work: {orders.stats().completed} completed, {dead.stats().ready} buried")

    # Archive: Parquet by date, each order once, however often it runs.
    print(f"archive: {penstock.spark.archive(spark, data, 'orders', archive).rows} orders")

    # Triage: the dead letters are a table, and SQL finds what they have in common.
    spark.read.format("penstock").options(broker=data, queue="orders", table="dead").load().createOrReplaceTempView("dead")
    spark.sql("""
        SELECT regexp_replace(reason, '[0-9]+', '…') AS reason, count(*) AS orders, count(DISTINCT key) AS customers
        FROM dead GROUP BY 1""").show(truncate=False)

    # Redrive: the limit was too low; the orders that fit the new one are handled again.
    limit = 95
    back = penstock.spark.redrive(spark, data, "orders", "reason LIKE '%limit%' AND cast(payload_json:amount AS int) < 95")
    penstock.Worker(orders, handle, concurrency=4).run(until_empty=True)
    print(f"redrive: {back.items} orders; {orders.stats().completed} completed, {dead.stats().ready} buried")

    # Aggregate: a stream counts the events of each second. A window is written when the watermark has passed its end;
    # the next run goes on from the checkpoint.
    events = spark.readStream.format("penstock").options(broker=data, queue="orders", table="events").load()
    counts = events.withWatermark("at", "0 seconds").groupBy(F.window("at", "1 second"), "event").count()
    stream = counts.writeStream.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True)
    stream.format("parquet").start(windows).awaitTermination()
    spark.read.parquet(windows).groupBy("event").agg(F.sum("count").alias("in closed windows")).orderBy("event").show()

    # Report: one HTML page with plots.
    metrics = penstock.spark.report(spark, data, "orders", place / "report.html")
    print(f"report: {metrics.completed} completed, {metrics.buried} buried")
    print(place / "report.html")
spark.stop()
