"""Batches of a stream, loads and applications that write again, without a JVM: the same rows add nothing, and other
rows are never dropped without a word."""

import logging
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import types as T

import penstock
from penstock import Broker
from penstock.operations import FindImports
from penstock.rules import catalog
from penstock.spark.batch_content import ContentSum
from penstock.spark.options import parse_options
from penstock.spark.sort_order import SortOrder
from penstock.spark.staging import StagedWriteClient
from penstock.spark.writer import BatchWriter, StreamWriter
from penstock.words.errors import InvalidRequest
from tests.spark.failing_writers import inbox
from tests.spark.waiting import wait_until

SCHEMA = T.StructType().add("key", T.StringType()).add("payload", T.StringType())


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=2)
    return broker_dir


@pytest.fixture
def owner(orders: str) -> Iterator[Broker]:
    with penstock.open(orders) as broker:
        yield broker


class StreamOfBatches:
    """Writes the batches of one streaming query, as Spark does: one writer for the tasks, one for the commit."""

    def __init__(self, broker: str, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        self._options = {"broker": broker, "queue": "orders", **options}
        self._patch = monkeypatch

    def write(self, number: int, *tasks: range | list[int], **options: str) -> None:
        known = {"sql.streaming.queryId": "query", "streaming.sql.batchId": str(number)}
        context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 1, getLocalProperty=known.get)
        self._patch.setattr(TaskContext, "get", lambda: context)
        parsed = parse_options({**self._options, **options})
        in_tasks, in_driver = StreamWriter(parsed, SCHEMA, False), StreamWriter(parsed, SCHEMA, False)
        messages: list[Any] = [in_tasks.write(iter([batch_of(task)])) for task in tasks]
        try:
            in_driver.commit(messages, number)
        except BaseException:
            in_driver.abort(messages, number)
            raise


def batch_of(numbers: range | list[int]) -> pa.RecordBatch:
    return pa.record_batch({"key": [f"k{number % 5}" for number in numbers], "payload": [str(number) for number in numbers]})


def adopt(broker: str) -> None:
    """Open the broker until it has adopted all that was published."""
    with penstock.open(broker):
        wait_until(lambda: not inbox(broker))


def payloads(broker: Broker, path: str) -> list[int]:
    """The items of the queue, when all that was published is adopted."""
    wait_until(lambda: not inbox(path))
    return sorted(int(item.payload) for item in broker.queue("orders").cursor("check").read(10_000))


# -- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopted", [False, True])
def test_a_repeated_batch_adds_nothing_whatever_its_order_and_tasks(
    orders: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, adopted: bool
) -> None:
    stream = StreamOfBatches(orders, monkeypatch)
    for number in range(3):
        stream.write(number, range(100 * number, 100 * number + 60), range(100 * number + 60, 100 * number + 100))
    if adopted:
        adopt(orders)
    shuffled = [*range(200, 300)]
    random.Random(7).shuffle(shuffled)
    stream.write(2, shuffled[:10], shuffled[10:])
    stream.write(0, range(100))  # a checkpoint from long ago whose batches are planned in the same way
    with penstock.open(orders) as broker:
        assert payloads(broker, orders) == [*range(300)]
    assert inbox(orders) == [] and caplog.records == []


@pytest.mark.parametrize("adopted", [False, True])
def test_a_restored_checkpoint_that_plans_other_batches_is_refused(orders: str, monkeypatch: pytest.MonkeyPatch, adopted: bool) -> None:
    stream = StreamOfBatches(orders, monkeypatch)
    for number in range(6):
        stream.write(number, range(100 * number, 100 * (number + 1)))
    if adopted:
        adopt(orders)
    waiting = len(inbox(orders))
    with pytest.raises(InvalidRequest, match="batch 3 of this stream was published with 100 rows and now has 250; it would add nothing"):
        stream.write(3, range(300, 550))
    with pytest.raises(
        InvalidRequest, match=r"batch 4 of this stream was published with 100 rows and now has other ones.*repeatedBatch=skip"
    ):
        stream.write(4, range(350, 450))
    with pytest.raises(InvalidRequest, match="batch 5 of this stream was published with 100 rows and now has 250"):
        stream.write(5, range(500, 750))
    assert len(inbox(orders)) == waiting, "nothing is left of them"
    stream.write(6, range(600, 700))
    with penstock.open(orders) as broker:
        assert payloads(broker, orders) == [*range(700)]


def test_the_last_batch_may_have_other_values_in_as_many_rows(
    owner: Broker, orders: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = StreamOfBatches(orders, monkeypatch)
    stream.write(0, range(100))
    stream.write(0, range(100, 200))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "batch 0 of this stream was published with 100 rows and now has other ones; it adds nothing"
    ]
    assert payloads(owner, orders) == [*range(100)]


def test_batches_that_differ_can_be_skipped(
    owner: Broker, orders: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = StreamOfBatches(orders, monkeypatch, repeatedBatch="skip")
    for number in range(3):
        stream.write(number, range(100 * number, 100 * (number + 1)))
    stream.write(1, range(100, 350))
    assert "batch 1 of this stream was published with 100 rows and now has 250; it adds nothing" in caplog.text
    assert payloads(owner, orders) == [*range(300)]


def test_an_earlier_batch_that_is_not_known_any_more_is_refused(owner: Broker, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_CONTENTS", 2)
    stream = StreamOfBatches(orders, monkeypatch)
    for number in range(4):
        stream.write(number, range(10 * number, 10 * (number + 1)))
    stream.write(2, range(20, 30))
    with pytest.raises(
        InvalidRequest, match="batch 1 of this stream has 10 rows, and batches up to 3 were published, this one too long ago"
    ):
        stream.write(1, range(10, 20))
    assert payloads(owner, orders) == [*range(40)]


def test_a_stream_that_an_earlier_version_wrote_continues(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = StagedWriteClient((orders,))
    destination = client.find("orders")
    for number in (1, 2):  # as published before there were checksums
        write = client.new_write_name()
        files = client.stage(write, destination, SortOrder(), iter([batch_of([number])]), "0", prepared=False)
        client.publish(write, destination, SortOrder(), "stream-query", number, files)
    adopt(orders)
    stream = StreamOfBatches(orders, monkeypatch)
    stream.write(1, [2])
    with pytest.raises(InvalidRequest, match="batch 0 of this stream has 1 rows, and batches up to 1 were published"):
        stream.write(0, [1])
    stream.write(2, [3])
    with penstock.open(orders) as broker:
        assert payloads(broker, orders) == [1, 2, 3]


def test_an_empty_batch_is_no_batch(owner: Broker, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamOfBatches(orders, monkeypatch)
    stream.write(0, range(10))
    stream.write(1, [])
    stream.write(0, [])
    stream.write(2, range(10, 20))
    with pytest.raises(InvalidRequest, match="too long ago or without rows"):
        stream.write(1, range(20, 30))
    assert payloads(owner, orders) == [*range(20)] and inbox(orders) == []


def test_the_checksum_depends_on_every_column_and_not_on_the_order() -> None:
    instant = datetime(2026, 5, 1, tzinfo=UTC)
    rows: list[dict[str, Any]] = [
        {
            "payload": b"p%d" % n,
            "key": f"k{n % 2}",
            "priority": n,
            "at": instant + timedelta(seconds=n),
            "ttl": timedelta(seconds=n + 1),
            "headers": [("a", b"%d" % n)],
            "kind": None if n else "first",
        }
        for n in range(4)
    ]
    types = {
        "payload": pa.binary(), "key": pa.string(), "priority": pa.int32(), "at": pa.timestamp("us", "UTC"), "ttl": pa.duration("us"),
        "headers": pa.map_(pa.string(), pa.binary()), "kind": pa.large_string(), "nr": pa.int64(),
    }  # fmt: skip

    def checksum(*batches: list[dict[str, Any]]) -> int:
        content, schema = ContentSum(), pa.schema(types)
        passed = [*content.passing(iter([pa.RecordBatch.from_pylist(batch, schema) for batch in batches]))]
        assert [batch.num_rows for batch in passed] == [len(batch) for batch in batches]
        return content.checksum

    whole = checksum(rows)
    assert 0 < whole < 1 << 63
    assert checksum(rows[2:], [], rows[1::-1]) == whole
    assert checksum([{**row, "nr": 7} for row in rows]) == whole, "a column that only orders is not content"
    others = {"payload": b"q", "key": "k9", "priority": 9, "at": instant, "ttl": timedelta(days=1), "headers": [("a", b"x")], "kind": "x"}
    changed = [checksum([*rows[:3], {**rows[3], name: value}]) for name, value in others.items()]
    assert len({whole, *changed}) == 1 + len(others)
    for name in others:  # the same values in every column, but in other rows
        swapped = [{**rows[0], name: rows[1][name]}, {**rows[1], name: rows[0][name]}, *rows[2:]]
        assert checksum(swapped) != whole, name
    half = [{**row, "payload": row["payload"] if row["priority"] else None} for row in rows]
    assert checksum(half[::-1]) == checksum(half) != whole
    assert checksum([{}, {}]) == 0


# -- applications that number their writes --------------------------------------------------------------


def write_version(broker: str, application: str, version: int, number: int) -> None:
    options = {"broker": broker, "queue": "orders", "txnAppId": application, "txnVersion": str(version)}
    writer = BatchWriter(parse_options(options), SCHEMA, False)
    writer.commit([writer.write(iter([batch_of([number])]))])


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 1, getLocalProperty=lambda name: None)
    monkeypatch.setattr(TaskContext, "get", lambda: context)


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("adopted", [False, True])
def test_a_version_at_or_below_the_last_one_adds_nothing(orders: str, adopted: bool) -> None:
    written = [("app", 0, 1), ("app", 0, 2), ("app", 5, 3), ("app", 3, 4), ("app", 5, 5), ("other", 3, 6), ("app", 6, 7)]
    for application, version, number in written:
        write_version(orders, application, version, number)
        if adopted:
            adopt(orders)
    with penstock.open(orders) as broker:
        assert payloads(broker, orders) == [1, 3, 6, 7]
        remembered = broker.queue("orders").home.call(FindImports(queue=broker.queue("orders").incarnation, prefix=""))
        assert remembered == {"txn:other": 4, "txn:app": 7}, "one number for each application"
    assert inbox(orders) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"txnAppId": "a"}, "txnAppId is given without txnVersion; give both"),
        ({"txnVersion": "1"}, "txnVersion is given without txnAppId; give both"),
        ({"txnAppId": "a", "txnVersion": "1", "writeId": "w"}, "both writeId and txnAppId are given; leave one out"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion is '-1'; give a whole number from 0"),
        ({"txnAppId": "a" * 997, "txnVersion": "1"}, "txnAppId has 997 characters; give at most 996"),
        ({"writeId": "w" * 1001}, "writeId has 1,001 characters; give at most 1000"),
        ({"writeId": "txn:a"}, "writeId begins with 'txn:', which is for txnAppId"),
        ({"repeatedBatch": "add"}, "repeatedBatch is 'add'; give check or skip"),
    ],
)
def test_options_that_identify_nothing_are_refused_before_a_task_runs(orders: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse_options({"broker": orders, "queue": "orders", **options}, "write")


def test_options_of_the_other_kind_of_write_are_refused(orders: str) -> None:
    given = {"broker": orders, "queue": "orders"}
    with pytest.raises(InvalidRequest, match="txnAppId is for batch writes"):
        StreamWriter(parse_options({**given, "txnAppId": "a", "txnVersion": "1"}), SCHEMA, False)
    with pytest.raises(InvalidRequest, match="repeatedBatch is for streams"):
        BatchWriter(parse_options({**given, "repeatedBatch": "skip"}), SCHEMA, False)


# -- who displaces whom --------------------------------------------------------------------------------


def test_many_write_ids_displace_no_load_and_no_stream(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_SOURCES", 5)
    client = StagedWriteClient((orders,))
    destination = client.find("orders")

    def write(source: str) -> None:
        name = client.new_write_name()
        files = client.stage(name, destination, SortOrder(), iter([batch_of([0])]), "0", prepared=False)
        client.publish(name, destination, SortOrder(), source, 1, files)

    with penstock.open(orders) as broker:
        sources = ["load:monday", "stream-1", *(f"w{number}" for number in range(7)), "load:monday", "stream-1", "w6"]
        for source in sources:
            write(source)
            assert client.wait_adopted(destination, source, 1, 30)
        assert broker.queue("orders").stats().produced == 9
        write("w0")  # the oldest of more than are remembered
        assert client.wait_adopted(destination, "w0", 1, 30) and broker.queue("orders").stats().produced == 10
