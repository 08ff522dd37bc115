"""The items of a key come in order through resizes, on a real broker's directory and without a JVM."""

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from penstock import Broker, NewItem, Queue
from penstock.broker import partition_layout
from penstock.reports import QueueDescription
from penstock.rules.options import Options
from penstock.spark.batch_reader import BatchReader
from penstock.spark.generations import Generations
from penstock.spark.options import READ, parse_options
from penstock.words.clock import SystemClock
from penstock.words.errors import InvalidRequest
from tests.spark.stream_runs import Offset, StreamRun

KEYS = [f"k{number}" for number in range(12)]


@pytest.fixture
def queue(broker: Broker) -> "KeyedQueue":
    return KeyedQueue(broker.create_queue("orders", partitions=2))


class KeyedQueue:
    """A queue whose items of each key are numbered by their payload."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.produced = 0

    def produce(self, each: int = 3) -> None:
        """Produce so many items of each key."""
        self.queue.produce_many([NewItem(str(self.produced + n).encode(), key=key) for n in range(each) for key in KEYS])
        self.produced += each

    def resize(self, partitions: int) -> None:
        self.queue.resize(partitions)


class OrderedRun(StreamRun):
    """A run whose rows know their micro-batch."""

    def __init__(self, broker: str, start: Offset | None = None, **options: object) -> None:
        super().__init__(broker, "orders", start, **options)
        self.batches = 0

    def batch(self) -> int:
        seen = len(self.rows)
        size = super().batch()
        for row in self.rows[seen:]:
            row["batch"] = self.batches
        self.batches += 1
        return size


def check_order(rows: list[dict[str, Any]], expected: int) -> None:
    """Check that the items of each key are all there and in order: in one partition, or in a later micro-batch."""
    by_key: dict[bytes, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["payload"])):
        by_key.setdefault(row["key"], []).append(row)
    assert set(by_key) == {key.encode() for key in KEYS}
    for found in by_key.values():
        assert [int(row["payload"]) for row in found] == list(range(expected))
        for one, following in pairwise(found):
            together = one["partition"] == following["partition"] and one["offset"] < following["offset"]
            assert one["batch"] < following["batch"] or (one["batch"] == following["batch"] and together)


@pytest.mark.parametrize("widths", [(5,), (1,), (5, 1, 3), (3, 2, 3, 2)])
@pytest.mark.parametrize("limit", [7, 1_000])
def test_a_backlog_over_resizes_is_read_in_order(broker_dir: str, queue: KeyedQueue, widths: tuple[int, ...], limit: int) -> None:
    queue.produce()
    for width in widths:
        queue.resize(width)
        queue.produce()
    stream = OrderedRun(broker_dir, maxItemsPerTrigger=limit)
    stream.all()
    check_order(stream.rows, queue.produced)
    assert stream.batches >= len(widths) + 1


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_beside_producers_and_resizes(broker_dir: str, queue: KeyedQueue, seed: int) -> None:
    chance = random.Random(seed)
    stream = OrderedRun(broker_dir, maxItemsPerTrigger=25)
    for _ in range(14):
        step = chance.choice(("produce", "produce", "resize", "batch", "batch", "restart"))
        if step == "produce":
            queue.produce(chance.randint(1, 3))
        elif step == "resize":
            queue.resize(chance.randint(1, 6))
        elif step == "batch":
            stream.batch()
        else:
            again = OrderedRun(broker_dir, start=stream.at, maxItemsPerTrigger=25)
            again.rows, again.batches = stream.rows, stream.batches
            stream = again
    queue.produce(1)
    stream.all()
    check_order(stream.rows, queue.produced)


def test_partitions_that_are_set_read_only_and_take_items_again(broker_dir: str, queue: KeyedQueue) -> None:
    stream = OrderedRun(broker_dir)
    for read_only in (True, False, True):
        queue.produce()
        queue.queue.set_read_only(0, read_only)
    queue.produce()
    stream.all()
    check_order(stream.rows, queue.produced)


def test_items_scheduled_before_a_resize_come_where_they_were_produced(broker_dir: str, queue: KeyedQueue) -> None:
    due = datetime.now(UTC) + timedelta(seconds=0.25)
    queue.queue.produce_many([NewItem(b"0", key=key, at=due) for key in KEYS])
    queue.produced = 1
    queue.resize(6)
    queue.produce()
    left = len(KEYS) * queue.produced
    while left:  # a lease that comes to an item of a key that lives elsewhere now forwards it
        batch = queue.queue.lease(left, wait=5)
        assert len(batch)
        left -= len(batch)
        batch.complete()
    stream = OrderedRun(broker_dir)
    stream.all()
    assert sum(stream.at[number] for number in stream.at if number.isdecimal()) > len(KEYS) * queue.produced, "some were forwarded"
    check_order(stream.rows, queue.produced)


def test_an_available_now_run_ends_although_the_queue_is_resized(broker_dir: str, queue: KeyedQueue) -> None:
    queue.produce()
    queue.resize(4)
    queue.produce()
    stream = OrderedRun(broker_dir, maxItemsPerTrigger=10)
    stream.reader.prepareForTriggerAvailableNow()
    stream.batch()
    queue.resize(3)
    queue.produce()
    stream.all()
    check_order(stream.rows, 6)
    following = OrderedRun(broker_dir, start=stream.at)
    following.all()
    assert Counter(row["key"] for row in following.rows) == {key.encode(): 3 for key in KEYS}


def test_a_stream_that_begins_later_is_in_order_too(broker_dir: str, queue: KeyedQueue) -> None:
    queue.produce()
    now = SystemClock().read().wall
    queue.produce(2)
    queue.resize(5)
    queue.produce(2)
    stream = OrderedRun(broker_dir, startingTimestamp=now)
    stream.all()
    for row in stream.rows:
        row["payload"] = int(row["payload"]) - 3
    check_order(stream.rows, 4)
    stream = OrderedRun(broker_dir, startingOffsets='{"0": 1, "1": -1, "2": 0}')
    stream.all()
    old = [row["batch"] for row in stream.rows if row["partition"] == 0 and int(row["payload"]) < 5]
    assert old and max(old) < min(row["batch"] for row in stream.rows if row["partition"] > 1)


# -- generations -------------------------------------------------------------------------------------------


def batch_rows(broker_dir: str, **options: object) -> list[dict[str, Any]]:
    parsed = parse_options({"broker": broker_dir, "queue": "orders", **{name: str(value) for name, value in options.items()}}, READ)
    reader = BatchReader(parsed, parsed.columns or ("key", "payload", "partition", "offset", "generation"))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_a_batch_query_can_be_ordered_by_generation_and_offset(broker_dir: str, queue: KeyedQueue) -> None:
    queue.produce()
    for width in (5, 2, 4):
        queue.resize(width)
        queue.produce()
    rows = batch_rows(broker_dir)
    assert {row["generation"] for row in rows} == {1, 2, 3, 4}
    for key in KEYS:
        found = sorted((row["generation"], row["offset"], int(row["payload"])) for row in rows if row["key"] == key.encode())
        assert [payload for _, _, payload in found] == list(range(12))
        assert [generation for generation, _, _ in found] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert batch_rows(broker_dir, columns="generation, id")[0].keys() == {"generation", "id"}


def test_only_items_have_a_generation() -> None:
    with pytest.raises(
        InvalidRequest, match="includeGeneration is true but table events has no generation; leave it out, or read table items"
    ):
        parse_options({"broker": "data", "queue": "orders", "table": "events", "includeGeneration": "true"})


def described(marks: dict[int, dict[int, int]], retired: Sequence[int] = ()) -> QueueDescription:
    return QueueDescription("orders", 7, 0, Options(), 1, [0], [*retired], [], marks=marks)


def test_resizes_that_are_forgotten_are_one_generation() -> None:
    known = Generations(described({40: {0: 10, 1: 20}, 41: {0: 15, 2: 5}}))
    ends = {0: 30, 1: 30, 2: 30}
    assert known.next_stop({}, ends) == {0: 10, 1: 20, 2: 0}
    assert known.next_stop({0: 10, 1: 19}, ends) == {0: 10, 1: 20, 2: 0}
    assert known.next_stop({0: 10, 1: 20}, ends) == {0: 15, 1: 20, 2: 5}
    assert known.next_stop({0: 15, 1: 25, 2: 5}, ends) == ends
    assert repr(known) == "Generations(39 to 41)"


def test_a_partition_that_was_retired_long_ago_is_read_first(broker_dir: str, queue: KeyedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_layout, "KEPT_MAPS", 2)
    queue.resize(4)
    queue.produce()
    for width in (3, 2, 3, 2, 3, 2):  # partition 3 is retired first
        queue.resize(width)
    queue.produce()
    stream = OrderedRun(broker_dir)
    stream.all()
    assert 3 in {row["partition"] for row in stream.rows}
    check_order(stream.rows, queue.produced)
    rows = batch_rows(broker_dir)
    newest = max(row["generation"] for row in rows)
    assert {row["generation"] < newest for row in rows if row["partition"] == 3} == {True}


def test_a_partition_that_was_retired_before_the_known_resizes_is_read_first() -> None:
    """Catalogs of earlier versions have no mark of it."""
    known = Generations(described({40: {0: 10}, 41: {0: 15, 2: 5}}, retired=[1, 2]))
    ends = {0: 30, 1: 30, 2: 5}
    assert known.next_stop({}, ends) == {0: 10, 1: 30, 2: 0}
    assert known.next_stop({0: 10, 1: 30}, ends) == {0: 15, 1: 30, 2: 5}
    assert known.column(1, pa.array([0, 29])).to_pylist() == [39, 39]
    assert known.column(2, pa.array([0, 4])).to_pylist() == [40, 40]
    assert Generations(described({}, retired=[1])).next_stop({}, ends) == ends


def test_a_log_that_ends_before_a_mark_does_not_hold_a_stream_up() -> None:
    known = Generations(described({2: {0: 10}}))
    assert known.next_stop({0: 8}, {0: 8, 1: 3}) == {0: 8, 1: 3}
