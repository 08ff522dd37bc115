"""How much a micro-batch takes, when it waits, where it may begin, and what progress shows. Without a JVM."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from penstock import Broker, NewItem, Queue
from penstock.spark import stream_reader
from penstock.spark.batch_reader import BatchReader
from penstock.spark.options import READ, STREAM, parse_options
from penstock.spark.positions import end_within_bytes
from penstock.testing import ManualClock
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from tests.spark.stream_runs import Offset, StreamRun, fill, resolve

SIZES = st.dictionaries(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 90)), max_size=5), max_size=4)


def sizes_of(stream: StreamRun) -> list[int]:
    found = []
    while (size := stream.batch()) >= 0:
        found.append(size)
    return found


# -- bytes -------------------------------------------------------------------------------------------------


def test_a_batch_has_about_as_many_bytes_as_asked(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 200, size=1_000)
    stream = StreamRun(broker_dir, maxBytesPerTrigger=50_000)
    sizes = sizes_of(stream)
    assert sorted(row["id"] for row in stream.rows) == sorted(ids)
    assert all(30 <= size <= 50 for size in sizes[:-2])
    assert set(sizes_of(StreamRun(broker_dir, maxBytesPerTrigger=50_000, maxItemsPerTrigger=20))) == {20}


def test_an_item_that_is_larger_than_the_limit_is_read_alone(broker_dir: str, queue: Queue) -> None:
    queue.produce_many([NewItem(bytes(5_000), key=f"k{number}") for number in range(8)])
    assert sizes_of(StreamRun(broker_dir, maxBytesPerTrigger=100)) == [1] * 8


@given(SIZES, st.integers(1, 200))
def test_bytes_are_limited_over_all_partitions(frames: Mapping[int, list[tuple[int, int]]], limit: int) -> None:
    ends = {partition: sum(items for items, _ in found) for partition, found in frames.items()}
    at: dict[int, int] = {}

    def sized(partition: int) -> Iterator[tuple[int, int, int]]:
        first = 0
        for items, size in frames[partition]:
            yield first, first + items, size
            first += items

    def bytes_between(start: Mapping[int, int], stop: Mapping[int, int]) -> int:
        parts = [(p, frame) for p in frames for frame in sized(p)]
        inside = [max(0, min(last, stop.get(p, 0)) - max(first, start.get(p, 0))) for p, (first, last, _) in parts]
        return sum(items * max(1, size // (last - first)) for items, (_, (first, last, size)) in zip(inside, parts, strict=True))

    while any(at.get(partition, 0) < end for partition, end in ends.items()):
        following = end_within_bytes(at, ends, limit, sized)
        taken = sum(following.values()) - sum(at.values())
        assert taken > 0, "it goes on"
        assert bytes_between(at, following) <= limit or taken == 1
        at = following


# -- waiting for enough --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["items", "events"])
def test_a_batch_waits_for_enough_rows_or_for_the_delay(broker_dir: str, queue: Queue, table: str) -> None:
    stream = StreamRun(broker_dir, table=table, minOffsetsPerTrigger=10, maxTriggerDelay="90s")
    clock = ManualClock()
    stream.reader._clock = clock
    fill(queue, 4)
    assert stream.batch() == 4, "the first micro-batch of a run does not wait"
    fill(queue, 9, 4)
    assert stream.batch() == -1
    fill(queue, 1, 13)
    assert stream.batch() == 10
    fill(queue, 2, 14)
    clock.advance(89)
    assert stream.batch() == -1
    clock.advance(1)
    assert stream.batch() == 2


def test_a_batch_holds_what_it_waited_for(broker_dir: str, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "DEFAULT_BATCH_ITEMS", 5)
    stream = StreamRun(broker_dir, minOffsetsPerTrigger=10)
    stream.reader._clock = ManualClock()
    fill(queue, 1)
    assert stream.batch() == 1
    fill(queue, 10, 1)
    assert stream.batch() == 10, "more than the limit that holds unless one is given"
    fill(queue, 9, 11)
    assert stream.batch() == -1


def test_nothing_waits_where_it_would_wait_for_ever(broker_dir: str, queue: Queue) -> None:
    fill(queue, 3)
    stream = StreamRun(broker_dir, minOffsetsPerTrigger=10)
    stream.reader.prepareForTriggerAvailableNow()
    stream.batch()
    fill(queue, 2, 3)
    again = StreamRun(broker_dir, start=stream.at, minOffsetsPerTrigger=10)
    again.reader.prepareForTriggerAvailableNow()
    assert again.batch() == 2
    fill(queue, 2, 5)
    everything: ReadLimit = ReadAllAvailable()
    last = StreamRun(broker_dir, start=again.at, minOffsetsPerTrigger=10)
    assert last.reader.latestOffset(last.at, everything) != last.at


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxTriggerDelay": "5m"}, "maxTriggerDelay is given without minOffsetsPerTrigger, which it limits; give both, or leave it out"),
        (
            {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "5"},
            "maxTriggerDelay is '5'; give a time with its unit, such as 15m, 90s or 500ms",
        ),
        ({"minOffsetsPerTrigger": "9", "maxItemsPerTrigger": "8"}, "minOffsetsPerTrigger is 9 and maxItemsPerTrigger 8; give no larger"),
        ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger is '0'; give a whole number from 1"),
        (
            {"maxBytesPerTrigger": "5", "table": "events"},
            "maxBytesPerTrigger is given, and events have no payload; give maxItemsPerTrigger",
        ),
        ({"startingOffsets": '{"incarnation": "7", "stream": "c", "grant": 1}'}, "startingOffsets is .*; paste an endOffset of a stream"),
    ],
)
def test_limits_that_cannot_be_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_options({"broker": "data", "queue": "orders", **options}, STREAM)


@pytest.mark.parametrize(
    ("given", "seconds"), [("15m", 900), ("1.5 h", 5_400), ("500ms", 0.5), ("2d", 172_800), ("90 S", 90), ("2min", 120)]
)
def test_a_delay_has_a_unit(given: str, seconds: float) -> None:
    options = {"broker": "data", "queue": "orders", "minOffsetsPerTrigger": "5", "maxTriggerDelay": given}
    assert parse_options(options, STREAM).max_trigger_delay == seconds


# -- pasted offsets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["items", "events"])
def test_an_end_offset_can_be_a_starting_offset(broker_dir: str, queue: Queue, table: str) -> None:
    fill(queue, 90)
    resolve(queue, 30)
    first = StreamRun(broker_dir, table=table, maxItemsPerTrigger=50)
    first.batch()
    second = StreamRun(broker_dir, table=table, startingOffsets=json.dumps(first.at))
    assert second.at == first.at
    second.all()
    whole = StreamRun(broker_dir, table=table)
    whole.all()
    assert sorted(map(str, first.rows + second.rows)) == sorted(map(str, whole.rows))


def test_the_latest_offset_of_progress_can_be_a_starting_offset(broker_dir: str, queue: Queue) -> None:
    fill(queue, 30)
    first = StreamRun(broker_dir, maxItemsPerTrigger=7)
    first.batch()
    latest = first.reader.reportLatestOffset()
    after = fill(queue, 10, 30)
    assert sorted(StreamRun(broker_dir, startingOffsets=json.dumps(latest)).all()) == sorted(after)
    assert sorted(row["id"] for row in batch_rows(broker_dir, startingOffsets=json.dumps(latest))) == sorted(after)


def batch_rows(broker_dir: str, **options: str) -> list[dict[str, Any]]:
    reader = BatchReader(parse_options({"broker": broker_dir, "queue": "orders", **options}, READ), ["id"])
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_an_offset_of_something_else_is_refused(broker_dir: str, broker: Broker, queue: Queue) -> None:
    fill(queue, 20)
    other = StreamRun(broker_dir, table="events", maxItemsPerTrigger=5)
    other.batch()
    with pytest.raises(
        InvalidRequest, match=r"startingOffsets is an offset of table events of queue .*, and table items of queue 'orders'"
    ):
        StreamRun(broker_dir, startingOffsets=json.dumps(other.at))
    with pytest.raises(InvalidRequest, match=r"startingOffsets ends within a frame of the log; read on from there with spark.readStream"):
        batch_rows(broker_dir, table="events", startingOffsets=json.dumps(other.at))
    broker.create_queue("more")
    with pytest.raises(InvalidRequest, match=r"startingOffsets is an offset of table events of queue .*, and table events of queue 'more'"):
        StreamRun(broker_dir, "more", table="events", startingOffsets=json.dumps(other.at))


# -- progress ------------------------------------------------------------------------------------------------


def latest(stream: StreamRun) -> Offset:
    found = stream.reader.reportLatestOffset()
    assert found is not None
    return found


def test_progress_shows_backlog_and_lag(broker_dir: str, queue: Queue) -> None:
    fill(queue, 30)
    stream = StreamRun(broker_dir, maxItemsPerTrigger=12)
    clock = ManualClock()
    stream.batch()
    clock.advance((stream.reader._clock.read().wall - clock.read().wall) / SECOND + 20)
    stream.reader._clock = clock
    assert latest(stream)["backlog"] == 18
    assert 20 <= latest(stream)["lagSeconds"] < 40
    stream.all()
    assert (latest(stream)["backlog"], latest(stream)["lagSeconds"]) == (0, 0.0)


def test_progress_of_events_counts_frames(broker_dir: str, queue: Queue) -> None:
    fill(queue, 30)
    stream = StreamRun(broker_dir, table="events", maxItemsPerTrigger=5)
    stream.batch()
    assert latest(stream)["backlog"] == 3, "three partitions have a frame that is not read completely"
    stream.all()
    assert latest(stream)["backlog"] == 0


def test_progress_of_a_consuming_stream(start: Any, queue: Queue) -> None:
    fill(queue, 30)
    stream = start(maxItemsPerTrigger=12)
    assert stream.reader.reportLatestOffset() is None
    stream.batch()
    found = stream.reader.reportLatestOffset()
    assert (found["grant"], found["backlog"]) == (1, 18)
    assert found["lagSeconds"] >= 0
