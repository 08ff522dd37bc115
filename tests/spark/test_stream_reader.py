"""What a stream's reader tells Spark, on a real broker's directory and without a JVM."""

from datetime import UTC, datetime

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from penstock import Broker, Queue
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError, QueueNotFound
from tests.spark.stream_runs import StreamRun, fill, resolve, small_segments
from tests.spark.waiting import wait_until

EVERYTHING = ReadAllAvailable()


# -- where it begins ----------------------------------------------------------------------------------


def test_a_stream_begins_at_the_first_item(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 50)
    stream = StreamRun(broker_dir)
    assert sorted(stream.all()) == sorted(ids)
    assert {row["id"]: row["payload"] for row in stream.rows} == {id: b"%08d" % n for n, id in enumerate(ids)}


def test_a_queue_without_items_is_a_stream_without_rows(broker_dir: str, queue: Queue) -> None:
    stream = StreamRun(broker_dir)
    assert stream.all() == []
    ids = fill(queue, 5)
    assert sorted(stream.all()) == sorted(ids)


def test_latest_begins_after_the_existing_items(broker_dir: str, queue: Queue) -> None:
    fill(queue, 20)
    stream = StreamRun(broker_dir, startingOffsets="latest")
    after = fill(queue, 20, 20)
    first = stream.reader.latestOffset(stream.at, EVERYTHING)
    assert first == stream.at, "the first batch keeps where latest was, and reads nothing"
    assert stream.reader.initialOffset() == stream.at
    assert sorted(stream.all()) == sorted(after)


def test_latest_is_not_moved_by_a_crash_in_the_first_batch(broker_dir: str, queue: Queue) -> None:
    fill(queue, 20)
    before = StreamRun(broker_dir, startingOffsets="latest")
    logged = before.reader.latestOffset(before.at, EVERYTHING)
    after = fill(queue, 20, 20)
    again = StreamRun(broker_dir, startingOffsets="latest")  # begins later, and repeats the batch that was logged
    assert again.between(again.at, logged) == []
    again.at = logged
    again.reader._first_empty = False
    assert sorted(again.all()) == sorted(after)


def test_offsets_by_partition(broker_dir: str, queue: Queue) -> None:
    fill(queue, 60)
    ends = {p.partition: p.produced for p in queue.stats().partitions}
    stream = StreamRun(broker_dir, startingOffsets='{"0": 5, "1": -1, "2": -2}')
    assert {stream.at["0"], stream.at["1"], stream.at["2"]} == {5, ends[1], 0}
    assert len(stream.all()) == ends[0] - 5 + ends[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"0": 1000}', "startingOffsets gives partition 0 the offset 1000, which is in the future; it ends at"),
        ('{"7": 0}', r"startingOffsets names partition 7; queue 'orders' has \[0, 1, 2\]"),
    ],
)
def test_offsets_that_are_not_there_are_refused(broker_dir: str, queue: Queue, given: str, message: str) -> None:
    fill(queue, 9)
    with pytest.raises(InvalidRequest, match=message):
        StreamRun(broker_dir, startingOffsets=given)


def test_a_stream_begins_at_a_time(broker_dir: str, queue: Queue) -> None:
    fill(queue, 20)
    now = SystemClock().read().wall
    after = fill(queue, 20, 20)
    assert sorted(StreamRun(broker_dir, startingTimestamp=now).all()) == sorted(after)
    text = datetime.fromtimestamp(now / SECOND, UTC).isoformat()
    assert set(after) <= set(StreamRun(broker_dir, startingTimestamp=text).all())
    assert len(StreamRun(broker_dir, startingTimestamp=0).all()) == 40


def test_a_time_to_come_is_refused(broker_dir: str, queue: Queue) -> None:
    with pytest.raises(InvalidRequest, match="startingTimestamp is in the future; give a time that has passed, or startingOffsets=latest"):
        StreamRun(broker_dir, startingTimestamp=SystemClock().read().wall + 3_600 * SECOND)


# -- how far it goes ------------------------------------------------------------------------------------


def test_a_batch_is_no_larger_than_asked(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 100)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=7)
    sizes = []
    while (size := stream.batch()) >= 0:
        sizes.append(size)
    assert sizes == [7] * 14 + [2]
    assert sorted(row["id"] for row in stream.rows) == sorted(ids)


def test_limits_of_sparks_own(broker_dir: str, queue: Queue) -> None:
    fill(queue, 30)
    stream = StreamRun(broker_dir)
    assert len(stream.between(stream.at, stream.reader.latestOffset(stream.at, EVERYTHING))) == 30
    assert len(stream.between(stream.at, stream.reader.latestOffset(stream.at, ReadMaxRows(4)))) == 4
    assert len(stream.between(stream.at, stream.reader.latestOffset(stream.at, ReadMinRows(30)))) == 30
    assert stream.reader.latestOffset(stream.at, ReadMinRows(31)) == stream.at


def test_available_now_reads_only_existing_items(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 30)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=8)
    stream.reader.prepareForTriggerAvailableNow()
    fill(queue, 30, 30)
    queue.resize(5)
    fill(queue, 30, 60)
    assert sorted(stream.all()) == sorted(ids)


def test_the_latest_offset_is_reported(broker_dir: str, queue: Queue) -> None:
    fill(queue, 30)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=3)
    stream.batch()
    reported = stream.reader.reportLatestOffset()
    assert reported is not None
    assert sum(reported[str(n)] for n in range(3)) == 30
    assert sum(stream.at[str(n)] for n in range(3)) == 3


def test_splits_are_as_many_as_asked(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 90)
    stream = StreamRun(broker_dir, minPartitions=8)
    end = stream.reader.latestOffset(stream.at, EVERYTHING)
    assert len(stream.reader.partitions(stream.at, end)) == 8
    assert sorted(row["id"] for row in stream.between(stream.at, end)) == sorted(ids)


# -- again and again ------------------------------------------------------------------------------------


def test_a_range_reads_the_same_again(broker_dir: str, queue: Queue) -> None:
    fill(queue, 40)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=25)
    end = stream.reader.latestOffset(stream.at, ReadMaxRows(25))
    once = stream.between(stream.at, end)
    fill(queue, 40, 40)
    resolve(queue, 40)
    queue.resize(2)
    other = StreamRun(broker_dir, start=stream.at)
    assert other.between(stream.at, end) == once


def test_a_stream_continues_from_its_checkpoint(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 40)
    first = StreamRun(broker_dir, maxItemsPerTrigger=13)
    first.batch()
    ids += fill(queue, 40, 40)
    second = StreamRun(broker_dir, start=first.at)
    assert sorted([row["id"] for row in first.rows] + second.all()) == sorted(ids)


def test_partitions_come_and_go(broker_dir: str, queue: Queue) -> None:
    """Items that a resize forwards are read in their first partition."""
    ids = fill(queue, 40)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=11)
    for step, width in enumerate((6, 1, 4, 2), 1):
        stream.batch()
        queue.resize(width)
        ids += fill(queue, 40, 40 * step)
    assert sorted(stream.all()) == sorted(ids)
    assert len(stream.rows) == len(ids) == 200


def test_a_partition_without_items_is_not_worth_a_batch(broker_dir: str, queue: Queue) -> None:
    fill(queue, 40)
    stream = StreamRun(broker_dir)
    stream.all()
    queue.resize(9)
    assert stream.batch() == -1


# -- what is refused ------------------------------------------------------------------------------------


def test_a_queue_created_anew_is_not_the_one_that_was_read(broker_dir: str, broker: Broker, queue: Queue) -> None:
    fill(queue, 10)
    stream = StreamRun(broker_dir)
    stream.all()
    queue.delete()
    with pytest.raises(QueueNotFound, match="there is no queue 'orders'"):
        stream.batch()
    fill(broker.create_queue("orders", partitions=3), 30)
    for other in (stream, StreamRun(broker_dir, start=stream.at)):
        with pytest.raises(
            QueueNotFound, match=r"deleted and created anew since this stream began .*; start with a new checkpointLocation"
        ):
            other.batch()
        with pytest.raises(QueueNotFound, match="deleted and created anew"):
            other.between(stream.at, stream.at)


def test_a_checkpoint_of_the_other_table_is_refused(broker_dir: str, queue: Queue) -> None:
    fill(queue, 10)
    stream = StreamRun(broker_dir)
    stream.all()
    with pytest.raises(InvalidRequest, match="the checkpoint is of table items, and table events is asked for; read table items, or start"):
        StreamRun(broker_dir, start=stream.at, table="events").batch()


def test_a_directory_that_is_an_older_copy_is_noticed(broker_dir: str, queue: Queue) -> None:
    fill(queue, 30)
    stream = StreamRun(broker_dir)
    stream.all()
    ahead = {**stream.at, "0": stream.at["0"] + 5}
    with pytest.raises(InvalidRequest, match=r"partition 0 of queue 'orders' ends at .*, but this stream has read up to .*: "):
        StreamRun(broker_dir, start=ahead).batch()
    assert StreamRun(broker_dir, start=ahead, failOnDataLoss=False).reader.latestOffset(ahead, EVERYTHING) == stream.at


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "state"}, "table state shows only the present state; read it with spark.read"),
        ({"table": "dead"}, "table dead shows only the present state"),
        ({"endingOffsets": "latest"}, "endingOffsets is for spark.read; leave it out"),
        ({"endingTimestamp": "0"}, "endingTimestamp is for spark.read; leave it out"),
        ({"table": "events", "cursor": "c"}, "a cursor counts items, and table events is streamed; leave cursor out"),
        ({"maxItemsPerTrigger": "0"}, "maxItemsPerTrigger is '0'; give a whole number from 1"),
        ({"queue": "nothing"}, "there is no queue 'nothing'"),
        ({"broker": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_wrong_options_are_refused(broker_dir: str, queue: Queue, options: dict[str, str], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        StreamRun(**{"broker": broker_dir, **options})  # type: ignore[arg-type]


# -- retention ------------------------------------------------------------------------------------------


def thinned(path: str) -> tuple[Broker, Queue]:
    """A queue of which retention has removed 250 items, except every tenth, which is not completed."""
    broker = small_segments(path)
    queue = broker.create_queue("orders", partitions=1, retention={"max_age": 0, "max_bytes": 1})
    ids = [id for step in range(0, 400, 50) for id in fill(queue, 50, step, size=100)]
    while len(batch := queue.lease(100)):
        for lease in batch:
            if int(lease.item.id.partition("-")[2]) < 250 and not lease.item.id.endswith("0"):
                lease.complete()
        if batch[-1].item.id == ids[-1]:
            break
    queue.compact()
    return broker, queue


def test_retention_that_passes_a_stream_is_an_error(broker_dir: str) -> None:
    with small_segments(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=1, retention={"max_age": 0, "max_bytes": 1})
        fill(queue, 100, size=100)
        stream = StreamRun(broker_dir, maxItemsPerTrigger=30)
        stream.batch()
        start, end = stream.at, stream.reader.latestOffset(stream.at, ReadMaxRows(30))
        for step in range(1, 10):
            fill(queue, 100, step * 100, size=100)
        resolve(queue, 900)
        assert sum(freed.items for freed in queue.compact()) > 30
        wrong = (
            r"items 30–\d+ of partition 0 of queue 'orders' were removed by retention or damage before this stream read them; "
            "set failOnDataLoss=false to continue without them, .* give the stream a cursor"
        )
        for other in (stream, StreamRun(broker_dir, start=start)):
            with pytest.raises(InvalidRequest, match=wrong):
                other.batch()
            with pytest.raises(InvalidRequest, match="items 30–59 of partition 0"):
                other.between(start, end)
        careless = StreamRun(broker_dir, start=start, failOnDataLoss=False)
        assert careless.between(start, end) == []
        found = careless.all()
        assert found[-1] == "0-999" and len(found) < 970
        assert found == [f"0-{n}" for n in range(1_000 - len(found), 1_000)]


def test_items_removed_before_the_stream_began_are_no_loss(broker_dir: str) -> None:
    broker, _ = thinned(broker_dir)
    with broker:
        freed = 400 - len(StreamRun(broker_dir).all())
        assert freed > 100
        stream = StreamRun(broker_dir, maxItemsPerTrigger=50)
        stream.batch()
        ids = [row["id"] for row in stream.rows]
        again = StreamRun(broker_dir, start=stream.at)
        assert len(ids + again.all()) == 400 - freed


def test_items_removed_later_are_a_loss_even_with_earlier_gaps(broker_dir: str) -> None:
    broker, queue = thinned(broker_dir)
    with broker:
        stream = StreamRun(broker_dir, maxItemsPerTrigger=50)
        stream.batch()
        queue.clear("leased")
        queue.clear("ready")
        for step in range(400, 600, 50):
            fill(queue, 50, step, size=100)
        queue.compact()
        assert len(StreamRun(broker_dir).all()) < 600 - 225
        with pytest.raises(InvalidRequest, match="removed by retention or damage"):
            stream.batch()


# -- a cursor --------------------------------------------------------------------------------------------


def test_a_cursor_follows_what_is_committed_to_the_last_batch(broker_dir: str, queue: Queue) -> None:
    fill(queue, 60)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=25, cursor="lake")
    stream.batch()
    assert wait_until(lambda: queue.cursors().get("lake")) == {0: 0, 1: 0, 2: 0}, "nothing is committed yet"
    stream.all()
    ends = {one.partition: one.produced for one in queue.stats().partitions}
    wait_until(lambda: queue.cursors()["lake"] == ends)


def test_a_new_stream_begins_at_its_cursor(broker_dir: str, queue: Queue) -> None:
    before = fill(queue, 30)
    assert sorted(StreamRun(broker_dir, cursor="lake").all()) == sorted(before)
    ends = {one.partition: one.produced for one in queue.stats().partitions}
    wait_until(lambda: queue.cursors().get("lake") == ends)
    after = fill(queue, 30, 30)
    assert sorted(StreamRun(broker_dir, cursor="lake").all()) == sorted(after)
    assert len(StreamRun(broker_dir, cursor="lake", startingOffsets="earliest").all()) == 60


def test_retention_waits_for_a_cursor(broker_dir: str) -> None:
    with small_segments(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=1, retention={"max_age": 0, "max_bytes": 1})
        fill(queue, 50, size=100)
        stream = StreamRun(broker_dir, maxItemsPerTrigger=30, cursor="lake")
        stream.batch()
        wait_until(lambda: "lake" in queue.cursors())
        for step in range(50, 500, 50):
            fill(queue, 50, step, size=100)
        resolve(queue, 450)
        queue.compact()
        assert len(stream.all()) == 500
