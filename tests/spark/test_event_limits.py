"""A micro-batch of table events has no more rows than asked for, however many a frame of the log holds."""

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock import Broker, Queue
from penstock.spark.positions import StreamPosition, end_of_event_batch
from tests.spark.stream_runs import StreamRun, fill, resolve, small_segments

FRAMES = st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 40), max_size=6), max_size=4)


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders", partitions=2)


def every_event(broker_dir: str) -> list[dict[str, object]]:
    stream = StreamRun(broker_dir, table="events")
    stream.rows = stream.between(stream.at, stream.reader.latestOffset(stream.at, ReadAllAvailable()))
    return by_partition(stream)


def by_partition(stream: StreamRun) -> list[dict[str, object]]:
    return sorted(stream.rows, key=lambda row: row["partition"])  # rows of a partition stay in their order


def test_a_batch_ends_within_a_frame(broker_dir: str, queue: Queue) -> None:
    fill(queue, 500)
    resolve(queue, 300)
    stream = StreamRun(broker_dir, table="events", maxItemsPerTrigger=70)
    sizes = []
    while (size := stream.batch()) >= 0:
        sizes.append(size)
    assert sum(sizes) == 500 + 300 + 300, "produced, leased, completed"
    assert set(sizes[: sum(sizes) // 70]) == {70}, "every batch is full as long as there is enough"
    assert by_partition(stream) == every_event(broker_dir)


def test_a_new_run_continues_within_a_frame(broker_dir: str, queue: Queue) -> None:
    fill(queue, 200)
    first = StreamRun(broker_dir, table="events", maxItemsPerTrigger=30)
    before = first.at
    assert first.batch() == 30
    assert set(first.at["rows"]) == {"0", "1"}
    again = StreamRun(broker_dir, start=before, table="events")
    assert again.between(before, first.at) == first.rows, "a repeated batch has the same rows"
    following = StreamRun(broker_dir, start=first.at, table="events")
    following.all()
    following.rows = first.rows + following.rows
    assert by_partition(following) == every_event(broker_dir)


def test_an_offset_without_rows_begins_with_its_frame(broker_dir: str, queue: Queue) -> None:
    fill(queue, 60)
    stream = StreamRun(broker_dir, table="events", maxItemsPerTrigger=1_000)
    old = {name: stream.at[name] for name in ("incarnation", "table")}
    assert len(StreamRun(broker_dir, start=old, table="events").all()) == 60


def test_tasks_are_cut_at_segments_and_rows(broker_dir: str) -> None:
    with small_segments(broker_dir) as broker:
        queue = broker.create_queue("orders")
        for start in range(0, 600, 100):
            fill(queue, 100, start, size=60)
            resolve(queue, 100)
    stream = StreamRun(broker_dir, table="events", maxItemsPerTrigger=450, minPartitions=4)
    before = stream.at
    assert stream.batch() == 450
    assert len(stream.reader.partitions(before, stream.at)) > 1
    stream.all()
    assert by_partition(stream) == every_event(broker_dir)


@given(FRAMES, st.integers(1, 60))
def test_the_rows_of_all_frames_come_once(frames: Mapping[int, list[int]], limit: int) -> None:
    ends = {partition: len(rows) + 1 for partition, rows in frames.items()}
    position, seen, total = StreamPosition(1, "events", dict.fromkeys(frames, 1)), 0, sum(map(sum, frames.values()))

    def counted(partition: int) -> Iterator[tuple[int, int]]:
        found = enumerate(frames[partition], 1)
        return ((sequence, rows) for sequence, rows in found if rows and sequence >= position.at[partition])

    def rows_before(at: StreamPosition) -> int:
        return sum(sum(frames[p][: at.at[p] - 1]) + at.rows.get(p, 0) for p in frames)

    while position.at != ends:
        at, rows = end_of_event_batch(position, ends, limit, counted)
        following = StreamPosition(1, "events", at, rows={partition: read for partition, read in rows.items() if read})
        assert following != position, "it goes on"
        assert rows_before(following) - seen <= limit
        assert rows_before(following) - seen == limit or rows_before(following) == total
        position, seen = following, rows_before(following)
    assert seen == total
