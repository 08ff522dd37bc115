"""What retention takes of a queue that is streamed is never passed over in silence: the readers' own methods, without a
JVM."""

from collections import Counter
from collections.abc import Iterator

import pytest
from pyspark.sql.types import StructType

from penstock import Broker, Queue
from penstock.errors import InvalidRequest
from penstock.spark.batch_reader import BatchReader
from penstock.spark.consuming_reader import ConsumingReader
from penstock.spark.options import parse_options
from penstock.spark.source import PenstockSource, selected_schema
from tests.spark.stream_runs import StreamRun, fill, small_segments


@pytest.fixture
def broker(broker_dir: str) -> Iterator[Broker]:
    with small_segments(broker_dir) as broker:
        yield broker


@pytest.fixture
def queue(broker: Broker) -> Queue:
    """A queue with 300 items."""
    queue = broker.create_queue("orders", partitions=1, retention={"max_segments": 1_000})
    for start in range(0, 300, 10):
        fill(queue, 10, start, size=100)
    return queue


def thin(queue: Queue) -> None:
    """Complete most items, and run retention."""
    for lease in queue.lease(300):
        if lease.offset % 10:
            lease.complete()
    queue.update(retention={"max_age": 0, "max_bytes": 1})
    queue.compact()


def batch(path: str, **options: object) -> list[dict[str, object]]:
    given = parse_options({"broker": path, "queue": "orders", **{name: str(value) for name, value in options.items()}})
    reader = BatchReader(given, selected_schema(given).names)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


# -- events ----------------------------------------------------------------------------------------------


def test_events_that_went_before_they_were_read_are_a_loss(broker_dir: str, queue: Queue) -> None:
    stream = StreamRun(broker_dir, table="events")
    start = stream.at
    stream.batch()
    assert Counter(row["event"] for row in stream.rows) == {"produced": 300}
    between = stream.at
    thin(queue)
    for step in range(300, 500, 10):
        fill(queue, 10, step, size=100)
    queue.compact()
    for again in (stream, StreamRun(broker_dir, start=between, table="events")):
        with pytest.raises(
            InvalidRequest, match=r"log sequences \d+–\d+ of partition 0 of queue 'orders' were removed by retention or damage before"
        ):
            again.batch()
        with pytest.raises(InvalidRequest, match=r"log sequences 1–\d+ of partition 0 of queue 'orders' were removed by retention"):
            again.between(start, between)
    careless = StreamRun(broker_dir, start=between, table="events", failOnDataLoss=False)
    assert careless.batch() >= 200


def test_a_task_that_comes_late_says_so(broker_dir: str, queue: Queue) -> None:
    stream = StreamRun(broker_dir, table="events")
    end = stream.reader.latestOffset(stream.at, stream.reader.getDefaultReadLimit())
    parts = stream.reader.partitions(stream.at, end)
    thin(queue)
    with pytest.raises(InvalidRequest, match=r"sequences 1 to \d+ of partition \d+ cannot be read: retention deleted them"):
        [*stream.reader.read(parts[0])]


def test_the_earliest_events_are_those_where_the_log_is_whole(broker_dir: str, queue: Queue) -> None:
    thin(queue)
    strict, lax = batch(broker_dir, table="events"), batch(broker_dir, table="events", failOnDataLoss=False)
    assert 0 < len(strict) < len(lax) and lax[-len(strict) :] == strict
    assert "produced" in {row["event"] for row in lax[: -len(strict)]}
    stream = StreamRun(broker_dir, table="events")
    stream.batch()
    assert stream.rows == strict
    assert batch(broker_dir, table="events", startingTimestamp=0) == strict
    with pytest.raises(
        InvalidRequest, match=r"startingOffsets gives partition 0 the offset 1, and retention has removed everything before \d+"
    ):
        batch(broker_dir, table="events", startingOffsets='{"0": 1}')
    assert batch(broker_dir, table="events", startingOffsets='{"0": 1}', failOnDataLoss=False) == lax


# -- items -----------------------------------------------------------------------------------------------


def test_items_that_went_between_planning_and_reading_are_a_loss(broker_dir: str, queue: Queue) -> None:
    planned = []
    for stream in (StreamRun(broker_dir), StreamRun(broker_dir, failOnDataLoss=False)):
        end = stream.reader.latestOffset(stream.at, stream.reader.getDefaultReadLimit())
        planned.append((stream.reader, stream.reader.partitions(stream.at, end)))
    thin(queue)
    (strict, (part,)), (lax, (other,)) = planned
    with pytest.raises(
        InvalidRequest, match=r"items 0-1 to 0-\d+ were lost to retention or damage before they were read; set failOnDataLoss=false"
    ):
        [*strict.read(part)]
    left = sum(batch.num_rows for batch in lax.read(other))
    assert 0 < left < 100 and len(batch(broker_dir)) == left, "a batch reads what there is"


# -- what is refused --------------------------------------------------------------------------------------


def test_a_consuming_stream_reads_all_items_that_it_completes(broker_dir: str, queue: Queue) -> None:
    options = parse_options({"broker": broker_dir, "queue": "orders", "consume": "true", "failOnDataLoss": "false"})
    with pytest.raises(InvalidRequest, match="failOnDataLoss is false, and consume=true would complete what it could not read"):
        ConsumingReader(options, ["id"])


def test_no_columns_are_refused(broker_dir: str, queue: Queue) -> None:
    source = PenstockSource({"broker": broker_dir, "queue": "orders"})
    for make in (source.reader, source.streamReader):
        with pytest.raises(InvalidRequest, match="the schema has no columns; leave it out, or name some of the table's"):
            make(StructType([]))
    with pytest.raises(InvalidRequest, match="columns is ''; give names with commas between them"):
        parse_options({"broker": broker_dir, "queue": "orders", "columns": ""})
