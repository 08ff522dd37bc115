"""Streams over a queue that was restored from a backup, without a JVM."""

from pathlib import Path

import pytest

import penstock
from penstock.spark.batch_reader import BatchReader
from penstock.spark.options import READ, parse_options
from penstock.spark.source import selected_schema
from penstock.words.errors import InvalidRequest
from tests.spark.stream_runs import Offset, StreamRun, fill


@pytest.fixture
def original(tmp_path: Path) -> dict[str, Offset]:
    """Offsets of streams over a queue, at its backup and after it; the backup is restored as "new"."""
    path, found = str(tmp_path / "data"), {}
    with penstock.open(path) as broker:
        queue = broker.create_queue("orders", partitions=2)
        fill(queue, 10)
        for when in ("at the backup", "after"):
            for table in ("items", "events"):
                stream = StreamRun(path, table=table)
                while stream.batch() >= 0:
                    pass
                found[f"{table} {when}"] = stream.at
            if when == "at the backup":
                penstock.backup(broker, tmp_path / "backup")
                fill(queue, 10, 10)
    penstock.restore(tmp_path / "backup", tmp_path / "new")
    return found


@pytest.mark.parametrize("table", ["items", "events"])
def test_an_offset_beyond_the_backup_is_refused(tmp_path: Path, original: dict[str, Offset], table: str) -> None:
    with penstock.open(tmp_path / "new") as broker:
        fill(broker.queue("orders"), 50, 100)  # the restored log has grown beyond where the original was
        for strict in ("true", "false"):
            stream = StreamRun(str(tmp_path / "new"), start=original[f"{table} after"], table=table, failOnDataLoss=strict)
            with pytest.raises(InvalidRequest, match=r"was restored from a backup that ends at .* new checkpointLocation"):
                stream.batch()


def test_an_offset_that_the_backup_has_goes_on(tmp_path: Path, original: dict[str, Offset]) -> None:
    with penstock.open(tmp_path / "new") as broker:
        ids = fill(broker.queue("orders"), 50, 100)
        stream = StreamRun(str(tmp_path / "new"), start=original["items at the backup"], maxItemsPerTrigger=20)
        assert sorted(stream.all()) == sorted(ids)
        more = fill(broker.queue("orders"), 5, 200)
        assert sorted(stream.all()) == sorted([*ids, *more])
        events = StreamRun(str(tmp_path / "new"), start=original["events at the backup"], table="events")
        while events.batch() >= 0:
            pass
        assert {row["id"] for row in events.rows if row["event"] == "produced"} == {*ids, *more}


def test_a_new_stream_and_a_batch_read_around_the_hole(tmp_path: Path, original: dict[str, Offset]) -> None:
    path = str(tmp_path / "new")
    with penstock.open(path) as broker:
        fill(broker.queue("orders"), 50, 100)
    assert len(StreamRun(path, maxItemsPerTrigger=7).all()) == 60
    options = parse_options({"broker": path, "queue": "orders", "minPartitions": "6"}, READ)
    reader = BatchReader(options, selected_schema(options).names)
    tasks = reader.partitions()
    assert sum(batch.num_rows for task in tasks for batch in reader.read(task)) == 60
    assert 4 <= len(tasks) <= 12


def test_an_offset_of_another_restore_is_refused(tmp_path: Path, original: dict[str, Offset]) -> None:
    with penstock.open(tmp_path / "new") as broker:
        fill(broker.queue("orders"), 5, 100)
        stream = StreamRun(str(tmp_path / "new"))
        stream.all()
    penstock.restore(tmp_path / "backup", tmp_path / "third")
    with pytest.raises(InvalidRequest, match="of another copy of queue 'orders'"):
        StreamRun(str(tmp_path / "third"), start=stream.at).batch()


def test_a_given_start_inside_the_hole_is_refused(tmp_path: Path, original: dict[str, Offset]) -> None:
    with pytest.raises(InvalidRequest, match="not in the backup from which the queue was restored"):
        StreamRun(str(tmp_path / "new"), startingOffsets='{"0": 1000}')
