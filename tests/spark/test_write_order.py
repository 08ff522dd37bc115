"""Runs of many tasks in one order, as Spark would sort them; without a JVM."""

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.logs.arrow_batch import ANY_PARTITION
from penstock.rules import slots
from penstock.spark import part_files
from penstock.spark.sort_order import SortOrder, is_identity
from penstock.spark.staging import Destination, StagedWriteClient
from tests.spark.failing_writers import PublishedItem, inbox, published_items

PARTITIONS = 3
KEYS = st.none() | st.sampled_from(["a", "b", "c", "d", "e", "f"])
NUMBERS = st.none() | st.integers(-3, 3)
FLOATS = st.none() | st.sampled_from([-math.inf, -1.5, 0.0, 2.5, math.inf, math.nan])
ITEMS = st.lists(st.tuples(KEYS, NUMBERS, FLOATS), max_size=30)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("order") / "broker")
    with penstock.open(path) as opened:
        opened.create_queue("orders", partitions=PARTITIONS)
        opened.create_queue("single")
    return path


def table(rows: list[tuple[Any, ...]], start: int) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([row[0] for row in rows], pa.string()),
            "payload": pa.array([b"%d" % number for number in range(start, start + len(rows))], pa.binary()),
            "n": pa.array([row[1] for row in rows], pa.int64()),
            "x": pa.array([row[2] for row in rows], pa.float64()),
        }
    )


def written(broker: str, tasks: list[list[tuple[Any, ...]]], order: SortOrder, queue: str = "orders") -> list[PublishedItem]:
    """The published items after tasks wrote these rows in batches of three; empties the inbox."""
    writing = StagedWriteClient((broker,))
    destination, write, runs, start = writing.find(queue), writing.new_write_name(), [], 0
    writing.prepare(write)
    for number, rows in enumerate(tasks):
        given = table(rows, start)
        used = given.select([name for name in given.column_names if name in ("key", "payload", *order.columns)])
        runs += writing.stage(write, destination, order, iter(used.to_batches(3)), str(number))
        start += len(rows)
    if not runs:
        writing.abandon(write)
        return []
    assert writing.publish(write, destination, order, "test", 1, runs)
    found = published_items(broker)
    for name in inbox(broker):
        for file in Path(broker, "inbox", name).iterdir():
            file.unlink()
        Path(broker, "inbox", name).rmdir()
    return found


def spark_order(row: tuple[Any, ...], descending: tuple[bool, bool]) -> tuple[Any, ...]:
    """A sort key as in Spark: NULL first when ascending and last when descending, NaN above all numbers."""
    found: list[Any] = []
    for value, down in zip(row[1:], descending, strict=True):
        sign = -1 if down else 1
        rank = 0 if value is None else 2 if value != value else 1
        found += [sign * rank, 0 if rank != 1 else sign * value]
    return tuple(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=4), st.booleans(), st.booleans(), st.sampled_from([1, 200, part_files.GATHERED_BYTES]))
def test_rows_of_every_key_stand_in_order(broker: str, tasks: list[list[Any]], down_n: bool, down_x: bool, gathered: int) -> None:
    order = SortOrder(("n", "x"), tuple("descending" if down else "ascending" for down in (down_n, down_x)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_files, "GATHERED_BYTES", gathered)
        found = written(broker, tasks, order)
    rows = [row for task in tasks for row in task]
    assert sorted(int(row.payload) for row in found) == [*range(len(rows))]
    assert [row.key for row in found] == [rows[int(row.payload)][0] for row in found]
    by_partition = defaultdict(list)
    for row in found:
        if row.key is not None:
            by_partition[row.partition].append(int(row.payload))
    for numbers in by_partition.values():
        assert numbers == sorted(numbers, key=lambda number: (*spark_order(rows[number], (down_n, down_x)), number))


def test_equal_rows_stay_as_they_come_where_runs_are_sorted(broker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a run of each three rows: those without a key do not follow each other
    monkeypatch.setattr(part_files, "GATHERED_BYTES", 1)
    rows = [(None, 2, 0.0), (None, 2, 0.0), ("a", 5, 0.0), (None, 1, 0.0), ("a", 5, 0.0)]
    found = written(broker, [rows], SortOrder(("n",), ("ascending",)))
    assert [int(row.payload) for row in found if row.key == "a"] == [2, 4]


@settings(max_examples=20, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=3))
def test_without_an_order_rows_of_a_task_stay_as_they_come(broker: str, tasks: list[list[Any]]) -> None:
    found = written(broker, tasks, SortOrder())
    by_key = defaultdict(list)
    for row in found:
        by_key[row.key].append(int(row.payload))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert sum(map(len, by_key.values())) == sum(map(len, tasks))


def test_a_queue_of_one_partition_is_in_order_without_keys(broker: str) -> None:
    tasks = [[(None, number, 0.0) for number in numbers] for numbers in ([5, 1, 3], [4, 2, 0])]
    found = written(broker, tasks, SortOrder(("n",), ("ascending",)), "single")
    assert [int(row.payload) for row in found] == [5, 1, 4, 2, 3, 0]  # as 0, 1, … 5


def test_frames_of_every_partition_are_told_apart(broker: str) -> None:
    writing = StagedWriteClient((broker,))
    destination, write = writing.find("orders"), writing.new_write_name()
    writing.prepare(write)
    rows = [(key, 0, 0.0) for key in (None, "a", "b", "c", "d", "e", "f", None)]
    (run,) = writing.stage(write, destination, SortOrder(), iter(table(rows, 0).select(["key", "payload"]).to_batches()), "0")
    writing.abandon(write)
    assert run.items == 8 and len(run.frames) == len(run.partitions) and ANY_PARTITION in run.partitions
    assert sum(frame.items for frame in run.frames if frame.partition == ANY_PARTITION) == 2


def test_a_row_after_another() -> None:
    order = SortOrder.parse(["n desc", "x"])
    one = partial(table, start=0)
    assert order.follows(one([(None, 2, 1.0)]), one([(None, 1, 0.0)]))
    assert order.follows(one([(None, 1, 1.0)]), one([(None, 1, 1.0)]))
    assert not order.follows(one([(None, 1, 1.0)]), one([(None, 1, None)]))
    assert not order.follows(one([(None, None, 1.0)]), one([(None, 1, 0.0)]))


def test_in_place() -> None:
    assert (
        is_identity(pa.array([], pa.uint64())) and is_identity(pa.array([0], pa.uint64())) and is_identity(pa.array([0, 1, 2], pa.uint64()))
    )
    assert not is_identity(pa.array([1, 0], pa.uint64()))


def test_the_map_of_a_destination_is_the_queues(broker: str) -> None:
    found = StagedWriteClient((broker,)).find("orders")
    assert isinstance(found, Destination) and found.packed_slot_map == slots.first_map(range(PARTITIONS)).pack()
