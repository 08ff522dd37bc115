"""A stream over several queues, on a real broker's directory and without a JVM."""

import json
from collections import Counter
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock import Broker, Queue
from penstock.spark import stream_reader
from penstock.spark.multi_queue_reader import MultiQueueReader
from penstock.spark.options import READ, STREAM, WRITE, parse_options
from penstock.spark.source import selected_schema
from penstock.testing import ManualClock
from penstock.words.errors import InvalidRequest, QueueNotFound
from tests.spark.stream_runs import Offset, StreamRun, fill, resolve


class SeveralRun(StreamRun):
    """One run of a stream over several queues."""

    def __init__(self, broker: str, start: Offset | None = None, **options: object) -> None:
        given = {"broker": broker, **{name: str(value) for name, value in options.items()}}
        self.options = parse_options(given, STREAM)
        self.reader: Any = MultiQueueReader(self.options, selected_schema(self.options).names)
        self.at = start if start is not None else self.reader.initialOffset()
        self.rows = []
        self._first = start is None

    def found(self) -> Counter[str]:
        """Read everything; gives the rows of each queue."""
        while self.batch() >= 0:
            pass
        return Counter(row["queue"] for row in self.rows)


@pytest.fixture
def orders(broker: Broker) -> Queue:
    return broker.create_queue("orders", partitions=2)


@pytest.fixture
def refunds(broker: Broker) -> Queue:
    return broker.create_queue("refunds")


@pytest.mark.parametrize("table", ["items", "events"])
@pytest.mark.parametrize("limit", [7, 1_000])
def test_a_list_of_queues_is_one_stream(broker_dir: str, orders: Queue, refunds: Queue, table: str, limit: int) -> None:
    ids = {"orders": fill(orders, 40), "refunds": fill(refunds, 25)}
    stream = SeveralRun(broker_dir, queue="orders, refunds", table=table, maxItemsPerTrigger=limit)
    assert stream.batch() == min(limit, 65)
    assert stream.found() == {"orders": 40, "refunds": 25}
    for name, expected in ids.items():
        assert sorted(row["id"] for row in stream.rows if row["queue"] == name) == sorted(expected)


def test_limits_are_shared(broker_dir: str, orders: Queue, refunds: Queue) -> None:
    fill(orders, 100, size=500)
    fill(refunds, 4, size=500)
    stream = SeveralRun(broker_dir, queue="orders,refunds", maxItemsPerTrigger=20)
    assert stream.batch() == 20
    assert Counter(row["queue"] for row in stream.rows) == {"orders": 16, "refunds": 4}
    one = SeveralRun(broker_dir, queue="orders,refunds", maxItemsPerTrigger=1)
    for _ in range(6):
        assert one.batch() == 1
    assert {row["queue"] for row in one.rows} == {"orders", "refunds"}, "also a tiny limit reads all queues"
    small = SeveralRun(broker_dir, queue="orders,refunds", maxBytesPerTrigger=4_000)
    assert 2 <= small.batch() <= 8


def test_a_stream_waits_for_the_rows_of_all_queues(broker_dir: str, orders: Queue, refunds: Queue) -> None:
    stream = SeveralRun(broker_dir, queue="orders,refunds", minOffsetsPerTrigger=10, maxTriggerDelay="60s")
    stream.reader._clock = clock = ManualClock()
    fill(orders, 1)
    assert stream.batch() == 1
    fill(orders, 5, 1)
    assert stream.batch() == -1
    fill(refunds, 5)
    assert stream.batch() == 10
    fill(refunds, 1, 5)
    assert stream.batch() == -1
    clock.advance(60)
    assert stream.batch() == 1


def test_a_batch_of_several_queues_holds_what_it_waited_for(
    broker_dir: str, orders: Queue, refunds: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_reader, "DEFAULT_BATCH_ITEMS", 5)
    stream = SeveralRun(broker_dir, queue="orders,refunds", minOffsetsPerTrigger=10)
    stream.reader._clock = ManualClock()
    fill(orders, 6)
    fill(refunds, 6)
    assert len(stream.between(stream.at, stream.reader.latestOffset(stream.at, ReadMaxRows(4)))) == 4
    assert stream.batch() == 10
    assert stream.batch() == -1


def test_a_new_queue_of_a_pattern_joins(broker_dir: str, broker: Broker, orders: Queue, refunds: Queue) -> None:
    fill(orders, 10)
    fill(refunds, 10)
    stream = SeveralRun(broker_dir, queuePattern="or.*", startingOffsets="latest")
    assert stream.found() == {}
    fill(orders, 3, 10)
    organs = broker.create_queue("organs")
    fill(organs, 5)
    assert stream.batch() == 3, "the new queue joins without rows"
    assert set(stream.at["queues"]) == {"orders", "organs"}
    again = SeveralRun(broker_dir, start=stream.at, queuePattern="or.*", startingOffsets="latest")
    assert again.found() == {"organs": 5}


def test_a_repeated_batch_has_the_same_rows(broker_dir: str, broker: Broker, orders: Queue) -> None:
    fill(orders, 10)
    stream = SeveralRun(broker_dir, queuePattern=".*")
    before = stream.at
    fill(broker.create_queue("new"), 5)
    stream.batch()
    again = SeveralRun(broker_dir, start=before, queuePattern=".*")
    fill(orders, 10, 10)
    assert again.between(before, stream.at) == stream.rows
    assert Counter(row["queue"] for row in stream.rows) == {"orders": 10}


def test_a_deleted_queue_of_a_pattern_ends(broker_dir: str, broker: Broker, orders: Queue, refunds: Queue) -> None:
    fill(orders, 4)
    fill(refunds, 4)
    stream = SeveralRun(broker_dir, queuePattern=".*", failOnDataLoss=False)
    stream.found()
    resolve(refunds, 4)
    broker.delete_queue("refunds")
    fill(orders, 2, 4)
    strict = SeveralRun(broker_dir, start=stream.at, queuePattern=".*")
    with pytest.raises(QueueNotFound, match=r"queue 'refunds' was deleted since this stream began; .* or set failOnDataLoss=false"):
        strict.batch()
    assert stream.batch() == 2
    assert set(stream.at["queues"]) == {"orders"}
    fill(broker.create_queue("refunds"), 3)
    assert stream.found()["refunds"] == 4 + 3, "a queue of the same name is a new queue"


def test_a_deleted_queue_of_a_list_is_an_error(broker_dir: str, broker: Broker, orders: Queue, refunds: Queue) -> None:
    stream = SeveralRun(broker_dir, queue="orders,refunds", failOnDataLoss=False)
    stream.found()
    broker.delete_queue("refunds")
    with pytest.raises(QueueNotFound, match="there is no queue 'refunds'"):
        stream.batch()
    broker.create_queue("refunds")
    with pytest.raises(QueueNotFound, match="queue 'refunds' was deleted since this stream began; start with a new checkpointLocation"):
        stream.batch()


def test_a_queue_that_leaves_the_list_keeps_its_place(broker_dir: str, broker: Broker, orders: Queue, refunds: Queue) -> None:
    fill(refunds, 3)
    first = SeveralRun(broker_dir, queue="orders,refunds")
    first.found()
    fill(refunds, 4, 3)
    third = broker.create_queue("third")
    fill(third, 2)
    second = SeveralRun(broker_dir, start=first.at, queue="orders,third")
    assert second.found() == {"third": 2}
    last = SeveralRun(broker_dir, start=second.at, queue="orders,refunds")
    assert last.found() == {"refunds": 4}


@pytest.mark.parametrize("again", [False, True])
def test_a_queue_that_left_the_list_may_be_deleted(broker_dir: str, broker: Broker, orders: Queue, refunds: Queue, again: bool) -> None:
    broker.create_queue("third")
    fill(refunds, 3)
    first = SeveralRun(broker_dir, queue="orders,refunds")
    first.found()
    broker.delete_queue("refunds")
    if again:
        broker.create_queue("refunds")
    fill(orders, 4)
    second = SeveralRun(broker_dir, start=first.at, queue="orders,third")
    assert second.found() == {"orders": 4}
    assert second.at["queues"]["refunds"] == first.at["queues"]["refunds"]
    pattern = SeveralRun(broker_dir, start=first.at, queuePattern="or.*")
    assert pattern.found() == {"orders": 4}
    if again:
        returned = SeveralRun(broker_dir, start=second.at, queue="orders,refunds")
        with pytest.raises(QueueNotFound, match="queue 'refunds' was deleted since this stream began"):
            returned.batch()


@pytest.mark.parametrize("again", [False, True])
def test_a_queue_that_is_deleted_after_a_batch_was_planned(
    broker_dir: str, broker: Broker, orders: Queue, refunds: Queue, again: bool
) -> None:
    fill(orders, 4)
    fill(refunds, 4)
    stream = SeveralRun(broker_dir, queuePattern=".*", failOnDataLoss=False)
    before, planned = stream.at, stream.reader.latestOffset(stream.at, stream.reader.getDefaultReadLimit())
    broker.delete_queue("refunds")
    if again:
        broker.create_queue("refunds")
    report = stream.reader.reportLatestOffset()
    assert "orders" in report["queues"] and report["backlog"] == 0
    repeated = SeveralRun(broker_dir, start=before, queuePattern=".*", failOnDataLoss=False)
    for run in (stream, repeated):
        assert Counter(row["queue"] for row in run.between(before, planned)) == {"orders": 4}
    repeated.at = planned
    fill(orders, 2, 4)
    assert repeated.found() == {"orders": 2}
    for strict in ({"queuePattern": ".*"}, {"queue": "orders,refunds", "failOnDataLoss": False}):
        with pytest.raises(QueueNotFound, match="queue 'refunds' was deleted since this stream began"):
            SeveralRun(broker_dir, start=before, **strict).between(before, planned)


def test_an_available_now_run_reads_what_there_was(broker_dir: str, broker: Broker, orders: Queue, refunds: Queue) -> None:
    fill(orders, 10)
    stream = SeveralRun(broker_dir, queuePattern=".*", maxItemsPerTrigger=4)
    fill(broker.create_queue("before"), 3)
    stream.reader.prepareForTriggerAvailableNow()
    fill(orders, 10, 10)
    fill(broker.queue("before"), 10, 3)
    fill(broker.create_queue("after"), 3)
    assert stream.found() == {"orders": 10, "before": 3}


def test_starting_offsets_by_queue_and_pasted(broker_dir: str, orders: Queue, refunds: Queue) -> None:
    fill(orders, 20)
    fill(refunds, 20)
    first = SeveralRun(broker_dir, queue="orders,refunds", startingOffsets='{"refunds": {"0": 15}}', maxItemsPerTrigger=10)
    first.batch()
    rest = SeveralRun(broker_dir, queue="orders,refunds", startingOffsets=json.dumps(first.at))
    assert first.found() == {"orders": 20, "refunds": 5}
    assert rest.found().total() == 15
    latest = first.reader.reportLatestOffset()
    assert (latest["backlog"], latest["lagSeconds"]) == (0, 0.0)
    assert SeveralRun(broker_dir, queue="orders,refunds", startingOffsets=json.dumps(latest)).found() == {}


def test_a_checkpoint_of_one_queue_is_not_of_several(broker_dir: str, orders: Queue, refunds: Queue) -> None:
    fill(orders, 5)
    one, several = StreamRun(broker_dir), SeveralRun(broker_dir, queue="orders,refunds")
    one.all()
    several.found()
    fill(orders, 2, 5)
    fill(refunds, 2)
    with pytest.raises(InvalidRequest, match="of a stream of one queue, and several are read; name this queue alone, or start with a new"):
        SeveralRun(broker_dir, start=one.at, queue="orders,refunds").batch()
    with pytest.raises(InvalidRequest, match=r"of a stream of several queues \('orders, refunds'\), and queue names one; give its name as"):
        StreamRun(broker_dir, start=several.at).batch()
    assert SeveralRun(broker_dir, start=several.at, queuePattern="orders").found() == {"orders": 2}
    starts = json.dumps({"orders": one.at})
    assert SeveralRun(broker_dir, queue="orders,refunds", startingOffsets=starts).found() == {"orders": 2, "refunds": 2}


def test_each_queue_has_the_cursor(broker_dir: str, orders: Queue, refunds: Queue) -> None:
    fill(orders, 6)
    fill(refunds, 2)
    stream = SeveralRun(broker_dir, queue="orders,refunds", cursor="lake")
    stream.found()
    stream.reader.commit(stream.at)
    assert sum(orders.cursors()["lake"].values()) == 6
    assert refunds.cursors()["lake"] == {0: 2}
    stream.reader.stop()


def test_the_name_of_the_queue_can_be_the_only_column(broker_dir: str, orders: Queue, refunds: Queue) -> None:
    fill(orders, 6)
    stream = SeveralRun(broker_dir, queue="orders,refunds", columns="queue")
    assert stream.found() == {"orders": 6}
    assert stream.rows[0] == {"queue": "orders"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "a,b", "consume": "true"}, "consume is true, and a stream consumes one queue; name one, and start a stream for each"),
        ({"queue": "a,b", "startingOffsets": '{"0": 5}'}, "startingOffsets has no names of queues; give earliest, latest, or JSON such as"),
        ({"queue": "a,b", "startingOffsets": '{"c": {"0": 5}}'}, "startingOffsets names queue 'c', which this stream does not read"),
        ({"queue": "a", "startingOffsets": '{"a": {"0": 5}}'}, "startingOffsets names queues, and queue 'a' is read; give JSON such as"),
        ({"queue": "a,"}, "queue is 'a,'; give names with commas between them, such as 'orders, refunds'"),
        ({"queue": "a,a"}, "queue names 'a' twice; name it once"),
        ({"queue": "a", "queuePattern": "b"}, "both queue and queuePattern are given; leave one out"),
        ({"queuePattern": "("}, r"queuePattern is '\(', which is no regular expression .*; give one, such as"),
        ({}, "the option queue is missing"),
        ({"queue": "a", "columns": "queue"}, "table items has no column 'queue'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_options({"broker": "data", **options}, STREAM)


def test_only_streams_read_several_queues() -> None:
    for use in (READ, WRITE):
        with pytest.raises(InvalidRequest, match=r"several queues are named, which only a stream can read together \(spark.readStream\)"):
            parse_options({"broker": "data", "queue": "a,b"}, use)
