"""Streams that consume, on a real Spark: every item reaches the sink, and is completed when it has."""

from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import penstock
import penstock.spark
from penstock import Broker, NewItem, Queue
from penstock.errors import InvalidRequest, QueueHeld
from tests.spark.consuming_runs import ConsumingStreamRun, numbers_by_key, produce_keyed
from tests.spark.memory_sink import MemorySink
from tests.spark.stream_runs import fill
from tests.spark.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Handler = Any


class ConsumingSink(MemorySink):
    """A sink for a consuming stream."""

    def __init__(self, spark: "SparkSession", broker: str, place: Path, **options: object) -> None:
        super().__init__(place)
        self.spark = spark
        self.options = {"broker": broker, "queue": "orders", "consume": "true", **{name: str(value) for name, value in options.items()}}

    def start(self, handle: Handler = None, **trigger: Any) -> "StreamingQuery":
        return self.keep(self.spark.readStream.format("penstock").options(**self.options).load(), handle, **trigger)

    def drain(self, handle: Handler = None) -> "StreamingQuery":
        """Consume what is available now."""
        query = self.start(handle, availableNow=True)
        query.awaitTermination()
        return query


def counts(queue: Queue) -> tuple[int, int, int]:
    found = queue.stats()
    return found.ready, found.leased, found.completed


def test_everything_is_consumed_and_completed_the_last_batch_too(
    spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker
) -> None:
    """Afterwards other consumers can lease at once. A second run continues; a failed run repeats its batch."""
    queue = broker.create_queue("orders", partitions=3)
    ids = fill(queue, 1_000)
    sink = ConsumingSink(spark, broker_dir, tmp_path, maxItemsPerTrigger=400, minPartitions=4)
    query = sink.drain()
    assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [400, 400, 200]
    assert sink.ids == sorted(ids)
    assert {row.id: row.payload for row in sink.rows} == {id: b"%08d" % n for n, id in enumerate(ids)}
    assert counts(queue) == (0, 0, 1_000)
    ids += (one := fill(queue, 1, 1_000))
    assert queue.lease(1)[0].id == one[0]

    def fail(batch: DataFrame) -> None:
        raise RuntimeError("the sink is full")

    ids += fill(queue, 30, 1_001)
    with pytest.raises(StreamingQueryException, match="the sink is full"):
        sink.drain(fail)
    failed = sink.batches[3]
    assert len(failed) == 30 and counts(queue) == (0, 31, 1_000)
    ids += fill(queue, 5, 1_031)
    sink.drain()
    assert sorted(sink.batches[3]) == sorted(failed)
    assert counts(queue) == (0, 1, 1_035)
    assert sink.ids == sorted({*ids} - {*one})


def test_a_batch_that_takes_long_keeps_its_right(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    """Other consumers and streams are refused until the query is stopped."""
    queue = broker.create_queue("orders", partitions=2)
    fill(queue, 20)
    begun, go_on = Event(), Event()

    def work(batch: DataFrame) -> None:
        begun.set()
        go_on.wait(60)

    sink = ConsumingSink(spark, broker_dir, tmp_path, maxItemsPerTrigger=10, consumerTimeout=1)
    query = sink.start(work)
    try:
        assert begun.wait(60)
        other = ConsumingSink(spark, broker_dir, tmp_path / "other", consumerTimeout=2)
        with pytest.raises(StreamingQueryException, match=r"queue 'orders' is consumed by spark:\w+, which alone may lease from it"):
            other.drain()  # it waits for its timeout, which is longer than that of the first
        assert other.batches == {}
        with pytest.raises(QueueHeld):
            queue.lease(1)
        assert counts(queue) == (10, 10, 0), "no lease has ended"
    finally:
        go_on.set()
    wait_until(lambda: queue.stats().completed == 20)
    query.stop()
    wait_until(lambda: not queue.stats().holder)
    assert len(queue.lease(1)) == 0


def test_items_that_a_batch_cannot_handle_are_settled(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    dead = broker.create_queue("orders.dead")
    queue = broker.create_queue("orders", partitions=2, dead_queue=dead)
    ids = fill(queue, 30)
    said: list[int] = []

    def work(batch: DataFrame) -> None:
        number = F.col("payload").cast("string").cast("int")
        late, bad = batch.where(number == 7), batch.where(number % 10 == 5)
        for _ in range(2):  # as when Spark repeats a batch
            said.append(penstock.spark.settle(late, broker_dir, "orders", delay=3_600, reason="later"))
            said.append(penstock.spark.settle(bad, broker_dir, "orders", "bury", reason=F.concat(F.lit("bad "), number)))

    sink = ConsumingSink(spark, broker_dir, tmp_path)
    sink.drain(work)
    assert said == [1, 3, 1, 3]
    wait_until(lambda: dead.stats().ready == 3)  # the owner transfers dead letters after it has answered
    found = queue.stats()
    assert (found.completed, found.scheduled, found.leased, found.buried) == (26, 1, 0, 0)
    assert (told := queue.explain(ids[7])).state == "scheduled" and 3_500 < (told.ready_in_seconds or 0) <= 3_600
    letters = {item.payload: item.origin.reason for item in dead.lease(10).items if item.origin is not None}
    assert letters == {b"%08d" % n: f"bad {n}" for n in (5, 15, 25)}


def test_retried_items_come_again_until_their_last_attempt(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    """The later items of its key come with it, in order."""
    queue = broker.create_queue("orders", partitions=2, max_attempts=3)
    queue.produce_many([NewItem(b"%d" % n, key="a" if n < 5 else f"k{n}") for n in range(10)])

    def work(batch: DataFrame) -> None:
        penstock.spark.settle(batch.where("payload = X'32'"), broker_dir, "orders", reason="no luck")

    sink = ConsumingSink(spark, broker_dir, tmp_path)
    query = sink.start(work)
    wait_until(lambda: queue.stats().buried == 1 and queue.stats().depth == 0)
    query.stop()
    wait_until(lambda: not queue.stats().holder, 30)  # which would be longer if it had not been given back
    batches = [sorted(row.payload for row in rows) for rows in sink.batches.values() if rows]
    assert batches == [[b"%d" % n for n in range(10)], [b"2", b"3", b"4"], [b"2", b"3", b"4"], [b"3", b"4"]]
    (buried,) = [row.id for row in sink.rows if row.payload == b"2"][:1]
    told = queue.explain(buried)
    assert (told.state, told.attempts, told.reason) == ("buried", 3, "attempts spent: no luck")


def test_lines_of_keys_through_resizes(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    produce_keyed(queue, 20, 10)
    sink = ConsumingSink(spark, broker_dir, tmp_path, maxItemsPerTrigger=150, perKey=4)
    query = sink.start()
    for step, width in enumerate((5, 1, 3)):
        batches = len(sink.batches)
        wait_until(lambda: len(sink.batches) > batches)  # noqa: B023
        queue.resize(width)
        produce_keyed(queue, 20, 5, 10 + 5 * step)
    wait_until(lambda: queue.stats().depth == 0)
    query.stop()
    assert numbers_by_key((row.key, row.payload) for row in sink.rows) == {f"k{key}": [*range(25)] for key in range(20)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cursor": "lake"}, "cursor is given, and consume=true takes what is ready; leave one of them out"),
        ({"table": "events"}, "only table items can be consumed"),
        ({"queue": "nothing"}, "there is no queue 'nothing'"),
    ],
)
def test_wrong_options_are_refused_before_reading(
    spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker, options: dict[str, str], message: str
) -> None:
    queue = broker.create_queue("orders")
    fill(queue, 5)
    sink = ConsumingSink(spark, broker_dir, tmp_path, **options)
    with pytest.raises((StreamingQueryException, AnalysisException), match=message):
        sink.drain()
    assert sink.batches == {} and counts(queue) == (5, 0, 0)


@pytest.mark.long
def test_a_queue_created_anew_is_refused(spark: "SparkSession", tmp_path: Path, broker_dir: str, broker: Broker) -> None:
    queue = broker.create_queue("orders")
    fill(queue, 5)
    sink = ConsumingSink(spark, broker_dir, tmp_path)
    sink.drain()
    queue.delete()
    fill(queue := broker.create_queue("orders"), 50)
    with pytest.raises(StreamingQueryException, match="deleted and created anew since this stream began"):
        sink.drain()
    assert counts(queue) == (50, 0, 0)


# -- settle by itself --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("broker")
def test_settle_refuses_wrong_arguments(spark: "SparkSession", broker_dir: str, broker: Broker) -> None:
    broker.create_queue("orders")
    rows = spark.createDataFrame([("0-1",)], ["id"])
    with pytest.raises(InvalidRequest, match="the DataFrame has no column 'id' to settle by; keep it when you select: it has other"):
        penstock.spark.settle(rows.select(F.col("id").alias("other")), broker_dir, "orders")
    with pytest.raises(InvalidRequest, match="action is 'drop'; give 'retry' or 'bury'"):
        penstock.spark.settle(rows, broker_dir, "orders", "drop")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"1 of these items \(0-1\) are not leased by a stream that consumes this queue"):
        penstock.spark.settle(rows, broker_dir, "orders")
    assert penstock.spark.settle(rows.where("id is null"), broker_dir, "orders") == 0


def test_settle_goes_in_steps(spark: "SparkSession", broker_dir: str, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.consuming_reader.SETTLED_AT_ONCE", 7)
    queue = broker.create_queue("orders", partitions=2)
    fill(queue, 25)
    stream = ConsumingStreamRun(broker_dir)
    stream.batch()
    rows = spark.createDataFrame([(id, None if n % 2 else f"no {n % 4}") for n, id in enumerate(stream.ids[:20])], ["id", "why"])
    assert penstock.spark.settle(rows, broker_dir, "orders", "bury", reason=F.col("why")) == 20
    assert penstock.spark.settle(rows, broker_dir, "orders", "bury", reason=F.col("why")) == 20, "as often as one likes"
    assert stream.batch() == -1
    stream.kill()
    found = queue.stats()
    assert (found.buried, found.completed) == (20, 5)
    assert sorted({queue.explain(id).reason for id in stream.ids[:20]}) == ["", "no 0", "no 2"]
