"""Tasks that write, one by one and without a JVM: what they hold in memory, and what they leave behind when they
fail."""

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import types as T

import penstock
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.inbox import StagedWriter
from penstock.logs.log import Draft
from penstock.spark import merge, part_files
from penstock.spark.broker_access import open_home
from penstock.spark.options import parse_options
from penstock.spark.sort_order import SortOrder
from penstock.spark.staging import StagedWriteClient
from penstock.spark.writer import BatchWriter, StreamWriter, TaskCommitMessage
from penstock.words.errors import QueueNotFound, StorageFailed
from penstock.words.limits import KIB, MIB
from tests.broker.storages import FullDiskFiles
from tests.spark.failing_writers import inbox, published_items

ORDER = SortOrder.parse(["nr"])
SCHEMA = T.StructType().add("payload", T.StringType()).add("nr", T.LongType())


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    return broker_dir


def rows(*numbers: int, payload: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"payload": pa.array([payload] * len(numbers)), "nr": pa.array(numbers, pa.int64())})


def left(broker: str) -> list[str]:
    return sorted(path.name for path in Path(broker, "inbox").rglob("*"))


# -- memory ------------------------------------------------------------------------------------------


def test_runs_are_merged_by_a_few_bytes_at_a_time(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (part_files, merge):
        monkeypatch.setattr(module, "ORDERED_BYTES", MIB)
    writing = StagedWriteClient((orders,))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    payload = "x" * (100 * KIB)
    runs = [
        run
        for task in range(2)
        for run in writing.stage(write, destination, ORDER, (rows(n, payload=payload) for n in range(task, 200, 2)), f"{task}")
    ]
    held, sizes, before, add = [], [], pa.total_allocated_bytes(), StagedWriter.add

    def noting(self: StagedWriter, draft: Draft, partition: int = 0) -> int:
        held.append(pa.total_allocated_bytes() - before)
        sizes.append(sum(map(len, draft.parts)))
        return add(self, draft, partition)

    monkeypatch.setattr(StagedWriter, "add", noting)
    assert writing.publish(write, destination, ORDER, "test", 1, runs)
    assert len(sizes) == 20 and max(sizes) <= MIB + 10 * KIB
    assert max(held) < 8 * MIB  # of 20 MiB in all
    assert len(published_items(orders)) == 200


def test_many_runs_are_merged_with_few_files_open(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "GATHERED_ROWS", 2)
    writing = StagedWriteClient((orders,))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    runs = writing.stage(write, destination, ORDER, (rows(n, n + 100) for n in range(100, 0, -1)), "0")
    files = OpenFileCounter()
    assert StagedWriteClient((orders,), partial(open_home, files=files)).publish(write, destination, ORDER, "test", 1, runs)
    assert len(runs) == 100 and files.most <= 3
    assert len(published_items(orders)) == 200


class OpenFileCounter(SystemFiles):
    """Counts the open files."""

    def __init__(self) -> None:
        self.most = self._open = 0

    def open(self, path: str, mode: Any) -> int:
        self._open += 1
        self.most = max(self.most, self._open)
        return super().open(path, mode)

    def close(self, handle: int) -> None:
        self._open -= 1
        os.close(handle)


@pytest.mark.parametrize("order", [ORDER, SortOrder()])
def test_small_rows_are_gathered_up_to_a_number(orders: str, monkeypatch: pytest.MonkeyPatch, order: SortOrder) -> None:
    monkeypatch.setattr(part_files, "GATHERED_ROWS", 50)
    writing = StagedWriteClient((orders,))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    given = (rows(*range(1_000 - start, 990 - start, -1)) for start in range(0, 500, 10))
    runs = writing.stage(write, destination, order, (batch.select(["payload", *order.columns]) for batch in given), "0")
    assert [frame.items for run in runs for frame in run.frames] == [50] * 10
    assert len(runs) == (10 if order.columns else 1)


# -- tasks that fail ---------------------------------------------------------------------------------


def failing(count: int) -> Iterator[pa.RecordBatch]:
    for number in range(count, 0, -1):
        yield rows(number, number + 1)
    raise RuntimeError("a task that fails")


@pytest.mark.parametrize("batches", [0, 1, 5])
def test_a_task_that_fails_leaves_neither_parts_nor_sidecars(orders: str, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    monkeypatch.setattr(part_files, "GATHERED_BYTES", 1)
    writing = StagedWriteClient((orders,))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    with pytest.raises(RuntimeError, match="a task that fails"):
        writing.stage(write, destination, ORDER, failing(batches), "0")
    assert left(orders) == [f"{write}.staged"]
    writing.abandon_empty(write)
    assert left(orders) == []


@pytest.mark.parametrize("order", [ORDER, SortOrder()])
def test_a_full_disk_has_nothing_left_of_a_task(orders: str, order: SortOrder) -> None:
    writing = StagedWriteClient((orders,), partial(open_home, files=FullDiskFiles()))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    with pytest.raises(StorageFailed, match="the disk is full"):
        writing.stage(write, destination, order, iter([rows(1, 2).select(["payload", *order.columns])]), "0")
    writing.abandon_empty(write)
    assert left(orders) == []


def test_a_sidecar_that_cannot_be_written_is_said_and_removed(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sidecar:
        def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
            file.write(b"some")

        def write_table(self, table: pa.Table) -> None:
            raise OSError(errno.ENOSPC, "full")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(pa.ipc, "new_file", Sidecar)
    writing = StagedWriteClient((orders,))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    with pytest.raises(StorageFailed, match=r"writing .*\.frames\.order failed: the disk is full"):
        writing.stage(write, destination, ORDER, iter([rows(1, 2)]), "0")
    writing.abandon_empty(write)
    assert left(orders) == []


# -- siblings ----------------------------------------------------------------------------------------


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sql.streaming.queryId": "query", "streaming.sql.batchId": "3"}
    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 1, getLocalProperty=known.get)
    monkeypatch.setattr(TaskContext, "get", lambda: context)


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("order_by", ["nr", None])
def test_a_stream_task_that_fails_takes_no_place_from_the_others(orders: str, order_by: str | None) -> None:
    options = {"broker": orders, "queue": "orders"} | ({"orderBy": order_by} if order_by else {})
    columns = ["payload", *([order_by] if order_by else [])]
    writer = StreamWriter(parse_options(options), T.StructType([SCHEMA[name] for name in columns]), False)

    def slow() -> Iterator[pa.RecordBatch]:
        with pytest.raises(RuntimeError):
            writer.write(batch.select(columns) for batch in failing(1))
        yield rows(1, 2).select(columns)

    found = writer.write(slow())
    assert isinstance(found, TaskCommitMessage)
    writer.commit([found], 3)
    assert len(published_items(orders)) == 2 and len(inbox(orders)) == 1


@pytest.mark.usefixtures("in_a_task")
def test_a_batch_task_that_comes_late_finds_no_place(orders: str) -> None:
    writer = BatchWriter(parse_options({"broker": orders, "queue": "orders", "orderBy": "nr"}), SCHEMA, False)
    writer.abort([])
    with pytest.raises(StorageFailed, match="No such file"):
        writer.write(iter([rows(1)]))
    assert inbox(orders) == []


# -- what is known -----------------------------------------------------------------------------------


def test_a_write_is_known_while_it_waits_and_when_it_is_adopted(orders: str) -> None:
    writing = StagedWriteClient((orders,))
    destination = writing.find("orders")
    assert not writing.is_published(destination, "mine", 1)
    write = writing.new_write_name()
    runs = writing.stage(write, destination, SortOrder(), iter([rows(1).select(["payload"])]), "0", prepared=False)
    assert not writing.is_published(destination, "mine", 1)
    assert writing.publish(write, destination, SortOrder(), "mine", 2, runs)
    assert writing.is_published(destination, "mine", 2) and not writing.is_published(destination, "yours", 2)
    with penstock.open(orders):
        assert writing.wait_adopted(destination, "mine", 2, 30)
    assert [writing.is_published(destination, "mine", number) for number in (1, 2, 3)] == [True, True, False]
    assert not writing.is_published(destination, "yours", 1)
    with pytest.raises(QueueNotFound, match="the queue was deleted"):
        writing.is_published(destination._replace(incarnation=destination.incarnation + 1), "mine", 1)
