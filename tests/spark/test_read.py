"""A queue read by a real Spark: the same rows as were produced, and as the broker itself tells."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import penstock
from penstock import Broker, NewItem
from penstock.words.ids import parse_id
from tests.tables.test_state import broker_with_dead_letters, dead_letter, listed

WHEN = datetime(2031, 2, 3, 4, 5, 6, 789_012, tzinfo=UTC)
KINDS = ("invoice", "mail", None)


def read(spark: SparkSession, path: object, queue: str = "orders", **options: object) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.read.format("penstock").options(broker=str(path), queue=queue, **given).load()


def produced(n: int) -> NewItem:
    return NewItem(
        b"%d" % n * (n % 7),
        key=None if n % 5 == 0 else f"kunde-{n % 11}",
        headers={"n": str(n), "raw": bytes([n % 256])} if n % 3 == 0 else None,
        kind=KINDS[n % 3],
        encoding="mine" if n % 4 == 0 else None,
        reference=f"ref-{n}" if n % 2 else None,
        priority=n % 10,
        at=WHEN + timedelta(seconds=n) if n % 6 == 0 else None,
        ttl=timedelta(days=1, seconds=n, microseconds=1) if n % 8 == 1 else None,
    )


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Broker, dict[str, NewItem], list[datetime]]]:
    """A queue with every kind of item, produced in five steps: the items by id, and when each step began."""
    path = tmp_path_factory.mktemp("read") / "broker"
    given: dict[str, NewItem] = {}
    began = []
    with penstock.open(path) as broker:
        queue = broker.create_queue("orders", partitions=3)
        for part in range(5):
            began.append(datetime.now(UTC))
            items = [produced(n) for n in range(40 * part, 40 * part + 40)]
            given |= dict(zip(queue.produce_many(items), items, strict=True))
        yield path, broker, given, began


def as_bytes(headers: Any) -> dict[str, bytes] | None:
    return {name: value if isinstance(value, bytes) else value.encode() for name, value in headers.items()} if headers else None


def test_every_column_is_what_was_produced(spark: SparkSession, orders: Any) -> None:
    path, broker, given, _ = orders
    rows = (
        read(spark, path, includeHeaders=True)
        .withColumn("at", F.unix_micros("at"))
        .withColumn("made", F.unix_micros("produced_at"))
        .collect()
    )
    assert len(rows) == len(given) == 200
    listed_at = {item.id: item.produced_at for item in listed(broker, "orders", "ready", "scheduled")}
    for row in rows:
        item = given[row.id]
        assert (row.partition, row.offset) == parse_id(row.id)
        assert bytes(row.payload) == item.payload
        assert (None if row.key is None else bytes(row.key).decode()) == item.key
        assert (None if row.headers is None else {name: bytes(value) for name, value in row.headers.items()}) == as_bytes(item.headers)
        assert (row.kind, row.encoding, row.reference, row.priority) == (item.kind, item.encoding, item.reference, item.priority)
        assert row.at == (None if item.at is None else round(item.at.timestamp() * 1e6))
        assert row.ttl == item.ttl
        assert row.made == round(listed_at[row.id].timestamp() * 1e6)
        assert (row.origin_queue, row.origin_id) == (None, None)


def test_a_range_of_offsets(spark: SparkSession, orders: Any) -> None:
    path, _, given, _ = orders
    ends = {number: 1 + max(offset for p, offset in map(parse_id, given) if p == number) for number in range(3)}
    starting, ending = '{"0": 10, "2": 5}', f'{{"0": {ends[0] - 3}, "1": -1}}'
    rows = read(spark, path, startingOffsets=starting, endingOffsets=ending, columns="id").collect()
    wanted = {id for id, (p, o) in ((id, parse_id(id)) for id in given) if {0: 10, 1: 0, 2: 5}[p] <= o < {**ends, 0: ends[0] - 3}[p]}
    assert len(rows) == len(wanted) and {row.id for row in rows} == wanted


def test_a_range_of_times(spark: SparkSession, orders: Any) -> None:
    path, _, given, began = orders
    ids = [*given]
    for low, high in ((2, 4), (0, 1), (4, None)):
        options = {"startingTimestamp": began[low].isoformat()} | ({"endingTimestamp": began[high].isoformat()} if high else {})
        rows = read(spark, path, columns="id", **options).collect()
        assert sorted(row.id for row in rows) == sorted(ids[40 * low : 40 * high if high else None])
    none = read(spark, path, endingTimestamp=round(began[0].timestamp() * 1e6))
    assert none.collect() == []


def test_splits_finer_than_a_partition(spark: SparkSession, orders: Any) -> None:
    path, _, given, _ = orders
    frame = read(spark, path, columns="id", minPartitions=10)
    rows = frame.withColumn("task", F.spark_partition_id()).collect()
    assert len(rows) == 200 and {row.id for row in rows} == {*given}
    assert 10 <= frame.rdd.getNumPartitions() <= 13 and len({row.task for row in rows}) >= 10


def test_columns_headers_and_a_schema_of_ones_own(spark: SparkSession, orders: Any) -> None:
    path, *_ = orders
    assert "headers" not in read(spark, path).columns and "headers" in read(spark, path, includeHeaders=True).columns
    frame = read(spark, path, columns="payload, headers,id")
    assert frame.columns == ["payload", "headers", "id"] and frame.count() == 200
    own = spark.read.format("penstock").schema("offset bigint, key binary").options(broker=str(path), queue="orders").load()
    assert own.columns == ["offset", "key"] and own.count() == 200 and own.where("key is null").count() == 40


def test_an_empty_queue_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    with penstock.open(tmp_path) as broker:
        broker.create_queue("orders", partitions=2)
    for table in ("items", "events", "state", "dead"):
        assert read(spark, tmp_path, table=table).collect() == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"queue": "nothing"}, "there is no queue 'nothing'"),
    ({"broker": "/no/such/place"}, "/no/such/place does not exist"),
    ({"table": "lines"}, "there is no table 'lines'; give one of items, events, dead, state"),
    ({"colums": "id"}, "there is no option 'colums'; is columns meant?"),
    ({"startingOffsets": '{"0": 99999}'}, "startingOffsets gives partition 0 the offset 99999, which is in the future; it ends at"),
    ({"endingOffsets": '{"7": 0}'}, r"endingOffsets names partition 7; queue 'orders' has \[0, 1, 2\]"),
]
"""One of each kind; the others are refused in the same places (test_queue_tables.py, test_options.py)."""


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_bad_options_are_refused_on_the_driver(spark: SparkSession, orders: Any, options: dict[str, Any], message: str) -> None:
    given = {"broker": str(orders[0]), "queue": "orders", **options}
    before = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
    with pytest.raises(PySparkException, match=message):
        spark.read.format("penstock").options(**given).load().collect()
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == before  # no task ever ran


def test_a_wrong_schema_is_refused_on_the_driver(spark: SparkSession, orders: Any) -> None:
    reader = spark.read.format("penstock").options(broker=str(orders[0]), queue="orders")
    with pytest.raises(PySparkException, match="column 'offset' of table items is bigint, not string; leave the schema out and cast"):
        reader.schema("offset string").load().collect()
    with pytest.raises(PySparkException, match="table items has no column 'value'; it has id"):
        reader.schema("value binary").load().collect()


# -- while things change -------------------------------------------------------------------------------


def test_rows_read_while_producers_write_are_a_prefix(spark: SparkSession, tmp_path: Path) -> None:
    enough = threading.Event()
    with penstock.open(tmp_path) as broker:
        queue = broker.create_queue("orders", partitions=2)

        def produce() -> None:
            n = 0
            while not enough.is_set():
                queue.produce_many([NewItem(b"%d" % (n + m), key=f"k{m}") for m in range(20)])
                n += 20

        thread = threading.Thread(target=produce)
        thread.start()
        seen: dict[int, int] = {0: 0, 1: 0}
        try:
            for _ in range(4):
                rows = read(spark, tmp_path, columns="partition,offset").collect()
                for number in seen:
                    offsets = sorted(row.offset for row in rows if row.partition == number)
                    assert offsets == [*range(len(offsets))] and len(offsets) >= seen[number]
                    seen[number] = len(offsets)
        finally:
            enough.set()
            thread.join()
        assert min(seen.values()) > 0
        assert read(spark, tmp_path).count() == queue.stats().produced


def test_items_that_a_resize_forwarded_are_read_once(spark: SparkSession, tmp_path: Path) -> None:
    with penstock.open(tmp_path) as broker:
        queue = broker.create_queue("orders", partitions=1)
        ids = queue.produce_many([NewItem(b"%d" % n, key=f"k{n}") for n in range(30)])
        queue.lease(30).complete()
        queue.resize(4)
        # ready where their slots no longer live; a lease finds that out, and they are forwarded
        assert queue.seek(at=datetime(1970, 1, 1, tzinfo=UTC)) == 30
        done = 0
        while done < 30:
            leased = queue.lease(30, wait=20)
            assert leased
            leased.complete()
            done += len(leased)
        assert queue.stats().produced > 30
        assert sorted(row.id for row in read(spark, tmp_path, columns="id").collect()) == sorted(ids)
        told = read(spark, tmp_path, table="events", columns="event").groupBy("event").count().collect()
        assert {row.event: row["count"] for row in told}["sent"] == queue.stats().produced - 30


def test_items_that_retention_removed_are_refused_or_left_out(spark: SparkSession, tmp_path: Path) -> None:
    with penstock.open(tmp_path, segment_bytes=4_096, compression=False) as broker:
        queue = broker.create_queue("orders", retention={"max_segments": 2})
        for n in range(60):
            queue.produce_many([NewItem(b"%d" % n * 50) for _ in range(10)])
        queue.lease(590).complete()
        queue.compact()
        found = sorted(row.offset for row in read(spark, tmp_path, columns="offset").collect())
        start = found[0]
        assert start > 0 and found == [*range(start, 600)]
        gone = r"startingOffsets gives partition 0 the offset 0, and retention has removed everything before \d+; give \d+ or more"
        with pytest.raises(PySparkException, match=gone):
            read(spark, tmp_path, startingOffsets='{"0": 0}').collect()
        lax = read(spark, tmp_path, startingOffsets='{"0": 0}', failOnDataLoss=False, columns="offset").collect()
        assert sorted(row.offset for row in lax) == found


def test_several_storage_roots(spark: SparkSession, tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    with penstock.open(roots[0], roots=roots[1:]) as broker:
        ids = broker.create_queue("orders", partitions=4).produce_many([NewItem(b"x", key=f"{n}") for n in range(40)])
    found = read(spark, f'["{roots[0]}", "{roots[1]}"]', columns="id").collect()
    assert sorted(row.id for row in found) == sorted(ids)
    with pytest.raises(PySparkException, match="add the storage root that holds it"):
        read(spark, roots[0]).collect()


# -- the other tables ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buried_items(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Broker]]:
    path = tmp_path_factory.mktemp("dead") / "broker"
    with broker_with_dead_letters(path) as broker:
        broker.queue("orders").lease(1, consumer="busy")
        broker.queue("orders").produce(b"later", at=WHEN)
        yield path, broker


def micros(when: datetime | None) -> int | None:
    return None if when is None else round(when.timestamp() * 1e6)


def test_state_is_what_the_broker_tells(spark: SparkSession, buried_items: tuple[Path, Broker]) -> None:
    path, broker = buried_items
    for name in ("orders", "dead", "plain"):
        frame = read(spark, path, name, table="state").withColumn("made", F.unix_micros("produced_at"))
        rows = {row.id: row for row in frame.withColumn("ready", F.unix_micros("ready_at")).collect()}
        items = listed(broker, name, "ready", "scheduled", "leased", "buried", "moving")
        assert sorted(rows) == sorted(item.id for item in items)
        stats = broker.queue(name).stats()
        for state in ("ready", "scheduled", "leased", "buried"):
            assert sum(row.state == state for row in rows.values()) == getattr(stats, state)
        for item in items:
            row = rows[item.id]
            assert (row.state, row.attempts, row.reason) == (item.state, item.attempts, item.reason or None)
            assert (row.kind, row.reference, row.priority, row.size_bytes) == (item.kind, item.reference, item.priority, len(item.payload))
            assert row.made == micros(item.produced_at) and row.ready == (micros(WHEN) if item.state == "scheduled" else None)
            assert row.consumer == (broker.queue(name).explain(item.id).consumer or None)


def test_events_are_what_the_broker_tells(spark: SparkSession, buried_items: tuple[Path, Broker]) -> None:
    path, broker = buried_items
    for name in ("orders", "plain"):
        rows = read(spark, path, name, table="events").withColumn("at", F.unix_micros("at")).orderBy("partition", "sequence").collect()
        by_id: dict[str, list[Row]] = {}
        for row in rows:
            by_id.setdefault(row.id, []).append(row)
        assert len(by_id) == broker.queue(name).stats().produced
        for id, found in by_id.items():
            told = [event for event in broker.queue(name).history(id) if (event.queue, event.id) == (name, id)]
            wanted = [
                (
                    *(one.event, round(one.at.timestamp() * 1e6), one.attempt, one.reason or None, one.consumer or None),
                    f"{one.lease:x}" if one.lease else None,
                )
                for one in told
            ]
            assert [(row.event, row.at, row.attempt, row.reason, row.consumer, row.lease) for row in found] == wanted


def test_events_of_a_range(spark: SparkSession, buried_items: tuple[Path, Broker]) -> None:
    path, _ = buried_items
    whole = read(spark, path, table="events").withColumn("at", F.unix_micros("at")).collect()
    times = sorted({row.at for row in whole})
    low, high = times[1], times[-1]
    by_time = read(spark, path, table="events", startingTimestamp=low, endingTimestamp=high).withColumn("at", F.unix_micros("at")).collect()
    assert sorted(by_time) == sorted(row for row in whole if low <= row.at < high)
    some = read(spark, path, table="events", startingOffsets='{"0": 3}', endingOffsets='{"1": 4}', columns="partition,sequence").collect()
    kept = [row for row in whole if not (row.partition == 0 and row.sequence < 3) and not (row.partition == 1 and row.sequence >= 4)]
    assert sorted((row.partition, row.sequence) for row in some) == sorted((row.partition, row.sequence) for row in kept)


def test_dead_is_what_the_broker_lists(spark: SparkSession, buried_items: tuple[Path, Broker]) -> None:
    path, broker = buried_items
    waiting = listed(broker, "dead", "ready", "scheduled", "leased")
    cases = {
        "plain": [dead_letter(item, "plain") for item in listed(broker, "plain", "buried")],
        "orders": [dead_letter(item, "dead") for item in waiting if item.origin and item.origin.queue == "orders"],
        "mails": [dead_letter(item, "dead") for item in waiting if item.origin and item.origin.queue == "mails"],
        "dead": [dead_letter(item, "dead") for item in [*listed(broker, "dead", "buried"), *waiting]],
    }
    for name, wanted in cases.items():
        rows = read(spark, path, name, table="dead", includeHeaders=True).collect()
        found = [{key: bytes(row[key]) if isinstance(row[key], bytearray) else row[key] for key in wanted[0]} for row in rows]
        assert wanted and sorted(found, key=lambda one: one["dead_id"]) == sorted(wanted, key=lambda one: str(one["dead_id"]))
        assert all(row.buried_at is not None for row in rows if row.reason != "still bad" and bytes(row.payload) != b"by hand")
