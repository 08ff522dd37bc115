"""Streams on a real Spark: what comes out equals what was produced, whatever happens meanwhile."""

import json
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame

from penstock import Broker, NewItem, Queue
from tests.spark.memory_sink import MemorySink
from tests.spark.stream_runs import fill, resolve, small_segments
from tests.spark.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def stream(spark: "SparkSession", broker: str, **options: object) -> DataFrame:
    given = {"broker": broker, "queue": "orders", **options}
    return spark.readStream.format("penstock").options(**{name: str(value) for name, value in given.items()}).load()


class StreamSink(MemorySink):
    """A sink for a stream."""

    def start(self, rows: DataFrame, **trigger: Any) -> "StreamingQuery":
        return self.keep(rows, **trigger)

    def drain(self, rows: DataFrame) -> "StreamingQuery":
        """Read everything there is now."""
        query = self.start(rows, availableNow=True)
        query.awaitTermination()
        return query


def test_a_stream_beside_a_producer_and_through_resizes(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    ids, enough = fill(queue, 50), Event()

    def produce() -> None:
        while not enough.is_set():
            ids.extend(fill(queue, 50, len(ids)))
            enough.wait(0.2)  # slower than the stream, which has to catch up in the end

    sink, producer = StreamSink(tmp_path), Thread(target=produce)
    query = sink.start(stream(spark, broker_dir, maxItemsPerTrigger=500, minPartitions=4))
    producer.start()
    try:
        for width in (5, 1, 3):
            batches = len(sink.batches)
            queue.resize(width)
            wait_until(lambda: len(sink.batches) > batches + 1)  # noqa: B023
    finally:
        enough.set()
        producer.join()
    query.processAllAvailable()
    query.stop()
    assert sink.ids == sorted(ids)
    assert {row.id: row.payload for row in sink.rows} == {id: b"%08d" % n for n, id in enumerate(ids)}
    assert max(len(rows) for rows in sink.batches.values()) <= 500
    progress = query.lastProgress
    assert progress is not None
    end = json.loads(progress.sources[0].endOffset)
    assert {key: value for key, value in end.items() if key.isdecimal()} == {
        str(one.partition): one.produced for one in queue.stats().partitions if one.produced
    }


def test_items_of_a_key_are_in_order_through_resizes(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue, sink, keys, produced = broker.create_queue("orders", partitions=2), StreamSink(tmp_path), 20, 0
    for width in (5, 1, 3):
        queue.produce_many([NewItem(str(number).encode(), key=f"k{number % keys}") for number in range(produced, produced + 400)])
        produced += 400
        queue.resize(width)
    sink.drain(stream(spark, broker_dir, maxItemsPerTrigger=150, includeGeneration=True))
    batches = [rows for _, rows in sorted(sink.batches.items()) if rows]
    assert [generation for rows in batches for generation in {row.generation for row in rows}] == [1] * 3 + [2] * 3 + [3] * 3
    seen = [sorted(int(row.payload) for row in rows if row.key == b"k7") for rows in batches]
    assert [number for numbers in seen for number in numbers] == list(range(7, produced, keys))


def test_several_queues_are_one_stream(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    for name, size in (("orders", 60), ("refunds", 40)):
        fill(broker.create_queue(name, partitions=2), size)
    sink = StreamSink(tmp_path)
    query = sink.drain(stream(spark, broker_dir, queue="orders,refunds", maxItemsPerTrigger=70))
    assert Counter(row.queue for row in sink.rows) == {"orders": 60, "refunds": 40}
    shown = [json.loads(progress.sources[0].latestOffset) for progress in query.recentProgress if progress.numInputRows]
    assert [one["backlog"] for one in shown] == [30, 0], "what is left after each micro-batch"
    assert shown[0]["lagSeconds"] > 0
    pasted = StreamSink(tmp_path / "pasted")
    end = query.recentProgress[0].sources[0].endOffset
    pasted.drain(stream(spark, broker_dir, queue="orders,refunds", startingOffsets=end))
    assert len(pasted.rows) == 30


def test_available_now_ends_and_goes_on_where_it_ended(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    """Stream to Parquet in limited batches, in several runs; a run without new items does nothing."""
    queue = broker.create_queue("orders", partitions=3)
    ids, lake, checkpoint = fill(queue, 1_000), str(tmp_path / "lake"), str(tmp_path / "checkpoint")

    def run() -> list[int]:
        rows = stream(spark, broker_dir, maxItemsPerTrigger=400)
        query = rows.writeStream.format("parquet").option("checkpointLocation", checkpoint).trigger(availableNow=True).start(lake)
        query.awaitTermination()
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def lying() -> list[str]:
        return sorted(row.id for row in spark.read.parquet(lake).select("id").collect())

    assert run() == [400, 400, 200]
    assert lying() == sorted(ids)
    ids += fill(queue, 30, 1_000)
    assert run() == [30]
    assert run() == []
    assert lying() == sorted(ids)


def test_latest_reads_what_comes_after(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    """Also if the first run read nothing."""
    queue = broker.create_queue("orders", partitions=2)
    fill(queue, 50)
    sink = StreamSink(tmp_path)
    sink.drain(stream(spark, broker_dir, startingOffsets="latest"))
    assert sink.batches == {0: []}
    after = fill(queue, 50, 50)
    sink.drain(stream(spark, broker_dir, startingOffsets="latest"))
    assert sink.ids == sorted(after)


def test_a_sink_that_fails_is_given_the_same_again(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    ids = fill(queue, 100)
    seen: list[list[str]] = []

    def fail(batch: DataFrame, number: int) -> None:
        seen.append(sorted(row.id for row in batch.select("id").collect()))
        raise RuntimeError("the sink is full")

    def start() -> None:
        rows = stream(spark, broker_dir, maxItemsPerTrigger=60)
        rows.writeStream.foreachBatch(fail).option("checkpointLocation", sink.checkpoint).trigger(
            availableNow=True
        ).start().awaitTermination()

    sink = StreamSink(tmp_path)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="the sink is full"):
            start()
        ids += fill(queue, 100, len(ids))
    sink.drain(stream(spark, broker_dir, maxItemsPerTrigger=60))
    assert seen[0] == seen[1] == sorted(row.id for row in sink.batches[0])
    assert sink.ids == sorted(ids)


def test_events_as_a_stream(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    fill(queue, 30)
    sink = StreamSink(tmp_path)
    sink.drain(stream(spark, broker_dir, table="events"))
    before = len(sink.rows)
    resolve(queue, 30)
    queue.resize(3)
    fill(queue, 10, 30)
    sink.drain(stream(spark, broker_dir, table="events"))
    told = [(row.event, row.id) for row in sink.rows]
    assert before == 30 and len(told) == len(set(told))
    assert sum(event == "produced" for event, _ in told) == 40
    assert sum(event == "completed" for event, _ in told) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": '{"0": 99}'}, "startingOffsets gives partition 0 the offset 99, which is in the future; it ends at"),
        ({"queue": "nothing"}, "there is no queue 'nothing'"),
        ({"endingOffsets": "latest"}, "endingOffsets is for spark.read; leave it out"),
    ],
)
def test_wrong_options_are_refused_before_reading(
    spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker, options: dict[str, str], message: str
) -> None:
    fill(broker.create_queue("orders"), 5)
    sink = StreamSink(tmp_path)
    with pytest.raises((StreamingQueryException, AnalysisException), match=message):
        sink.drain(stream(spark, broker_dir, **options))
    assert sink.batches == {}


def test_retention_passing_a_stream_is_said_in_its_error(spark: "SparkSession", tmp_path: Path, broker_dir: str) -> None:
    with small_segments(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=1, retention={"max_age": 0, "max_bytes": 1})
        fill(queue, 10, size=100)
        sink = StreamSink(tmp_path)
        sink.drain(stream(spark, broker_dir))
        for step in range(1, 10):
            fill(queue, 100, step * 100, size=100)
        resolve(queue, 900)
        assert sum(freed.items for freed in queue.compact()) > 10
        with pytest.raises(
            StreamingQueryException, match=r"items 10–\d+ of partition 0 of queue 'orders' were removed by retention or damage"
        ):
            sink.drain(stream(spark, broker_dir))
        sink.drain(stream(spark, broker_dir, failOnDataLoss=False))
        assert sink.rows[-1].id == "0-909" and 10 < len(sink.rows) < 910


def test_a_queue_created_anew_is_refused(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue: Queue = broker.create_queue("orders")
    fill(queue, 5)
    sink = StreamSink(tmp_path)
    sink.drain(stream(spark, broker_dir))
    queue.delete()
    fill(broker.create_queue("orders"), 50)
    with pytest.raises(StreamingQueryException, match="deleted and created anew since this stream began"):
        sink.drain(stream(spark, broker_dir))
