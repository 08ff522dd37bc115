"""The option `where`: what is read with it is exactly what is left when the same rows are filtered afterwards.

No JVM: the reader is planned and read as Spark does it.
"""

import operator
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import NewItem
from penstock.errors import InvalidRequest
from penstock.spark.batch_reader import BatchReader, ItemTask
from penstock.spark.options import READ, STREAM, parse_options
from penstock.spark.source import selected_schema
from penstock.testing import ManualClock
from tests.spark.waiting import wait_until

START = datetime(2026, 5, 1, tzinfo=UTC)
BATCHES = 8
OPERATORS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A queue that was resized while it was filled, and whose clock was set back; with and without keys,
    `at` and kinds, partly handled. A tenth of a second lies between the batches."""
    directory = tmp_path_factory.mktemp("filtered") / "broker"
    clock = ManualClock(START)
    with penstock.open(directory, clock=clock, segment_bytes=4_000) as broker:
        broker.create_queue("dead", partitions=2)
        queue = broker.create_queue("orders", partitions=2, dead_queue="dead")
        for number in range(BATCHES):
            if number == 4:
                queue.resize(5)
            queue.produce_many(
                [
                    NewItem(
                        {"n": 40 * number + index},
                        key=None if index % 5 == 0 else f"k{index % 7}",
                        kind="" if index % 3 else "paid",
                        at=START + timedelta(days=index) if index % 4 == 0 else None,
                    )
                    for index in range(40)
                ]
            )
            clock.advance(0.1)
            if number == 5:
                clock.step_wall(-0.45)
        for lease in queue.lease(30):
            if lease.offset % 3:
                lease.complete()
            else:
                lease.bury("broken")
        wait_until(lambda: broker.queue("dead").stats().ready >= 5 and queue.stats().moving == 0)  # the dead letters are in their queue
        yield directory


def rows(path: Path, table: str, where: str = "", columns: str = "") -> list[dict[str, Any]]:
    given = {"broker": str(path), "queue": "orders", "table": table, **({"where": where} if where else {})}
    options = parse_options({**given, **({"columns": columns} if columns else {})}, READ)
    reader = BatchReader(options, selected_schema(options).names)
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


def tasks(path: Path, where: str, **options: str) -> list[ItemTask]:
    given = parse_options({"broker": str(path), "queue": "orders", "where": where, **options}, READ)
    return [task for task in BatchReader(given, ["id"]).partitions() if isinstance(task, ItemTask)]


def matches(row: dict[str, Any], conditions: list[tuple[str, str, list[Any]]]) -> bool:
    """SQL's AND: a condition on null is not true."""
    return all(
        row[column] is not None and any(OPERATORS[sign](row[column], value) for value in values) for column, sign, values in conditions
    )


def literal(value: Any) -> str:
    if isinstance(value, datetime):
        return f"TIMESTAMP '{value.isoformat()}'"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'" if len(value) % 2 else f"'{value.decode()}'"
    return str(value) if isinstance(value, int) else "'{}'".format(value.replace("'", "''"))


ZONES = [UTC, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-8))]
NEAR = st.builds(
    lambda step, micros, zone: (START + timedelta(microseconds=100_000 * step + micros)).astimezone(zone),
    st.integers(-2, 10),
    st.integers(-1, 1),
    st.sampled_from(ZONES),
)
LATER = st.builds(lambda days, micros: START + timedelta(days=days, microseconds=micros), st.integers(0, 40), st.integers(-1, 1))
KEYS = st.sampled_from([*(f"k{index}".encode() for index in range(7)), b"other", b"", b"\xff"])
NUMBERS = st.integers(-1, 6)
OFFSETS = st.integers(-1, 200)
IDS = st.one_of(st.builds("{}-{}".format, NUMBERS, OFFSETS), st.just("it's no id"))
EVENTS = st.sampled_from(["produced", "leased", "completed", "buried", "moved", "never"])
COLUMNS = {
    "items": {
        "partition": NUMBERS,
        "offset": OFFSETS,
        "produced_at": NEAR,
        "at": LATER,
        "key": KEYS,
        "id": IDS,
        "kind": st.sampled_from(["paid", "", "z"]),
    },
    "events": {"partition": NUMBERS, "offset": OFFSETS, "at": NEAR, "event": EVENTS, "sequence": OFFSETS, "attempt": NUMBERS, "id": IDS},
    "state": {"partition": NUMBERS, "offset": OFFSETS, "key": KEYS, "state": st.sampled_from(["ready", "buried"]), "produced_at": NEAR},
    "dead": {"partition": NUMBERS, "offset": OFFSETS, "key": KEYS, "reason": st.sampled_from(["broken", "a"]), "buried_at": NEAR},
}


@st.composite
def conditions(draw: st.DrawFn, table: str) -> list[tuple[str, str, list[Any]]]:
    found = []
    for column in draw(st.lists(st.sampled_from([*COLUMNS[table]]), min_size=1, max_size=3)):
        sign = draw(st.sampled_from([*OPERATORS]))
        found.append((column, sign, draw(st.lists(COLUMNS[table][column], min_size=1, max_size=3 if sign == "=" else 1))))
    return found


def shown(wanted: list[tuple[str, str, list[Any]]]) -> str:
    one = "{} {} {}".format
    many = "{} in ({})".format
    return " AND ".join(
        many(column, ", ".join(map(literal, values))) if len(values) > 1 else one(column, sign, literal(values[0]))
        for column, sign, values in wanted
    )


@pytest.mark.parametrize("table", [*COLUMNS])
def test_it_gives_what_a_filter_after_reading_gives(path: Path, table: str) -> None:
    everything = rows(path, table)
    assert len(everything) > 5

    @settings(max_examples=30 if table == "items" else 12)
    @given(conditions(table))
    def compare(wanted: list[tuple[str, str, list[Any]]]) -> None:
        assert rows(path, table, shown(wanted)) == [row for row in everything if matches(row, wanted)]

    compare()


def test_the_generation_of_items_can_be_chosen(path: Path) -> None:
    later = rows(path, "items", "generation > 1", columns="id, generation")
    assert {row["generation"] for row in later} == {2}
    assert len(later) + len(rows(path, "items", "generation = 1")) == len(rows(path, "items")) == 2 * len(later)


def test_the_columns_of_the_filter_need_not_be_read(path: Path) -> None:
    expected = [{"id": row["id"]} for row in rows(path, "items") if row["key"] == b"k3" and row["offset"] >= 20]
    assert len(expected) > 10
    assert rows(path, "items", "key = 'k3' and offset >= 20", columns="id") == expected


def test_items_of_a_key_before_and_after_a_resize_are_found(path: Path) -> None:
    found = rows(path, "items", "key = 'k3'")
    assert len({row["partition"] for row in found}) > 1
    assert len(found) == sum(row["key"] == b"k3" for row in rows(path, "items"))


def test_a_key_is_looked_for_in_its_partition_if_the_queue_was_never_resized(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "broker") as broker:
        queue = broker.create_queue("orders", partitions=4)
        queue.produce_many([NewItem({"n": number}, key=f"k{number % 9}") for number in range(90)])
        for key in range(9):
            [task] = tasks(tmp_path / "broker", f"key = 'k{key}'")
            assert len(rows(tmp_path / "broker", "items", f"key = 'k{key}'")) == 10
            assert len(rows(tmp_path / "broker", "state", f"key = 'k{key}' AND partition = {task.partition}")) == 10
        assert tasks(tmp_path / "broker", "key = 'k1' AND key = 'k2'") == []
        queue.resize(6)
        queue.produce_many([NewItem({"n": number}, key=f"k{number % 9}") for number in range(90)])
        for key in range(9):
            assert len(rows(tmp_path / "broker", "items", f"key = 'k{key}'")) == 20


def test_only_the_ranges_that_may_match_are_read(path: Path) -> None:
    assert [(task.partition, task.start, task.stop) for task in tasks(path, "partition = 1 AND offset BETWEEN 20 AND 29")] == [(1, 20, 30)]
    assert [(task.partition, task.start, task.stop) for task in tasks(path, "id IN ('0-7', '1-3', '1-9')")] == [(0, 7, 8), (1, 3, 10)]
    assert {task.partition for task in tasks(path, "partition IN (0, 3)", minPartitions="9")} == {0, 3}
    for nothing in ("partition = 77", "offset < 0", "offset > 9 AND offset < 9", "id = '0-5' AND id = '0-6'", "id = 'x'"):
        assert tasks(path, nothing) == []
    assert {task.start for task in tasks(path, "sequence >= 5", table="events")} == {5}


def test_it_goes_with_the_other_ranges(path: Path) -> None:
    found = tasks(path, "offset < 30", startingOffsets='{"0": 10}', endingOffsets='{"1": 20}')
    assert [(task.start, task.stop) for task in found if task.partition < 2] == [(10, 30), (0, 20)]


@pytest.mark.parametrize(
    ("table", "text", "why"),
    [
        ("items", "partition = 1 OR offset = 2", "'OR' is where AND must be"),
        ("items", "NOT partition = 1", "'NOT' is no column of table items"),
        ("items", "event = 'leased'", "'event' is no column of table items"),
        ("items", "partition", "it ends too early"),
        ("items", "partition =", "it ends too early"),
        ("items", "partition = 1 AND", "it ends too early"),
        ("items", "partition = '1'", "\"'1'\" is no value for partition"),
        ("items", "partition = 4294967296", "4294967296 is too large for partition"),
        ("items", "offset = 9223372036854775808", "is too large for offset"),
        ("items", "partition <> 1", "'>' is no value for partition"),
        ("items", "partition LIKE 1", "'LIKE' follows partition"),
        ("items", "partition IN (1", "it ends too early"),
        ("items", "partition IN (1 2)", "the list of partition has no end"),
        ("items", "partition IS NULL", "'IS' follows partition"),
        ("items", "key = X'0'", "is no value for key"),
        ("items", "key = 7", "'7' is no value for key"),
        ("items", "ttl > 5", "ttl cannot be compared"),
        ("items", "upper(kind) = 'A'", "'upper' is no column"),
        ("items", "offset + 1 = 2", r"it has '\+ 1 = 2'"),
        ("events", "at > 'yesterday'", "at in where is 'yesterday'; give ISO 8601"),
        ("events", "at > 1790000000", "which in microseconds is before 2000"),
        ("items", " ", "where is empty"),
    ],
)
def test_what_it_cannot_do_is_refused(table: str, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        parse_options({"broker": "/data", "queue": "q", "table": table, "where": text}, READ)


def test_it_is_for_batches() -> None:
    with pytest.raises(InvalidRequest, match=r"where is for spark.read; leave it out"):
        parse_options({"broker": "/data", "queue": "q", "where": "partition = 1"}, STREAM)
