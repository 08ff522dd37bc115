"""A queue's log as Parquet: everything once, whatever happens in between; retention waits for it and then goes on."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock import NewItem
from penstock.errors import InvalidRequest, QueueBusy, QueueNotFound, StorageFailed
from penstock.spark.jobs import archive as job
from penstock.spark.jobs import manifest as manifests
from penstock.spark.jobs.archive import ArchiveResult, archive
from tests.spark.stream_runs import StreamRun, fill, resolve, small_segments
from tests.spark.waiting import wait_until


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def archived(lake: str, table: str = "items") -> list[dict[str, Any]]:
    """The rows of the files, read without Spark."""
    found: list[dict[str, Any]] = ds.dataset(f"{lake}/{table}", partitioning="hive").to_table().to_pylist()
    return found


def told(path: str) -> manifests.ArchiveManifest:
    found = manifests.read(path)
    assert found is not None
    return found


def crash(*given: Any) -> manifests.ArchiveManifest:
    """Replaces a step and fails; only the empty manifest of a new archive is written."""
    if isinstance(given[-1], manifests.ArchiveManifest) and not given[-1].batches:
        return write(*given)
    raise OSError(errno.EIO, "the end")


write = manifests.write


def check_manifest(lake: str, found: ArchiveResult) -> None:
    """Check that the manifest matches the files."""
    root = Path(lake, found.table)
    listed = {file.path: file for batch in told(found.manifest).batches for file in batch.files}
    assert set(listed) == {str(path.relative_to(root)) for path in root.rglob("*.parquet")}
    for path, file in listed.items():
        rows = ds.dataset(str(root / path)).to_table(columns=["partition", "offset"]).to_pylist()
        assert (file.rows, file.size_bytes) == (len(rows), (root / path).stat().st_size)
        for part in file.ranges:
            offsets = [row["offset"] for row in rows if row["partition"] == part.partition]
            assert (part.first, part.last, part.rows) == (min(offsets), max(offsets), len(offsets))
        assert sum(part.rows for part in file.ranges) == file.rows
    assert found.total_rows == sum(file.rows for file in listed.values())


def test_runs_add_what_is_new_and_retention_follows(spark: SparkSession, broker_dir: str, lake: str) -> None:
    with small_segments(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=2, retention={"max_age": 0, "max_bytes": 1})
        ids = queue.produce_many([NewItem(os.urandom(100), key=f"k{n}", headers={"n": str(n)}) for n in range(300)])
        first = archive(spark, broker_dir, "orders", lake, max_items_per_batch=200)
        assert (first.rows, first.total_rows, first.batches) == (300, 300, 2)
        ends = {number: part.produced for number, part in enumerate(queue.stats().partitions)}
        assert first.cursor.startswith("archive-")
        wait_until(lambda: queue.cursors().get(first.cursor) == ends)

        queue.resize(3)
        ids += queue.produce_many([NewItem(os.urandom(100), key=f"k{n}", headers={"n": str(n)}) for n in range(300)])
        items = {item.id: item for item in queue.cursor("all").read(1_000)}
        queue.cursor("all").release()
        resolve(queue, 600)
        queue.compact()
        kept = [item.id for item in queue.cursor("kept").read(1_000)]
        queue.cursor("kept").release()
        assert set(ids[300:]) <= set(kept) and len(kept) < 600  # what is archived goes, what is not stays

        second = archive(spark, broker_dir, "orders", lake)
        assert (second.rows, second.total_rows) == (300, 600)
        check_manifest(lake, second)
        rows = {row["id"]: row for row in archived(lake)}
        assert Counter(row["id"] for row in archived(lake)) == Counter(ids)
        for id, item in items.items():
            row = rows[id]
            assert (row["payload"], row["key"].decode(), dict(row["headers"])) == (
                item.payload,
                item.key,
                {"n": str(item.headers["n"]).encode()},
            )
            assert (row["produced_at"], str(row["date"]), row["queue"]) == (item.produced_at, str(item.produced_at.date()), "orders")

        ends = {part.partition: part.produced for part in queue.stats().partitions}
        wait_until(lambda: queue.cursors().get(first.cursor) == ends)
        queue.compact()
        assert len(queue.cursor("kept").read(1_000)) < 300
        third = archive(spark, broker_dir, "orders", lake)
        assert (third.rows, third.files, third.batches, third.total_rows) == (0, 0, 0, 600)

    back = spark.read.parquet(f"{lake}/items")
    assert back.count() == 600 and back.select("id").distinct().count() == 600


@pytest.mark.parametrize("steps", [["write"], pytest.param(["sync", "describe_files"], marks=pytest.mark.long)])
def test_rows_of_a_failed_batch_are_archived_once(
    spark: SparkSession, broker_dir: str, lake: str, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    """The files are written, and then a step fails: writing, syncing or reading them back."""
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=2)
        ids = fill(queue, 100)

        for step in steps:
            with monkeypatch.context() as patch:
                patch.setattr(manifests, step, crash)
                with pytest.raises(StorageFailed, match="EIO"):
                    archive(spark, broker_dir, "orders", lake)
            assert len(archived(lake)) == 100
        ids += fill(queue, 50, 100)
        found = archive(spark, broker_dir, "orders", lake)
        assert (found.rows, found.batches) == (150, 2)
        assert Counter(row["id"] for row in archived(lake)) == Counter(ids)
        check_manifest(lake, found)


@pytest.mark.long
def test_a_checkpoint_that_was_lost(spark: SparkSession, broker_dir: str, lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=2)
        ids = fill(queue, 150)
        found = archive(spark, broker_dir, "orders", lake)
        with monkeypatch.context() as patch:  # and a batch cut short as well
            patch.setattr(manifests, "write", crash)
            ids += fill(queue, 25, 150)
            with pytest.raises(StorageFailed, match="EIO"):
                archive(spark, broker_dir, "orders", lake)
        shutil.rmtree(Path(found.manifest).parent / "checkpoint")
        found = archive(spark, broker_dir, "orders", lake)
        assert found.rows == 25
        assert Counter(row["id"] for row in archived(lake)) == Counter(ids)
        check_manifest(lake, found)


@pytest.mark.long
def test_events_and_other_queues_lie_beside(spark: SparkSession, broker_dir: str, lake: str) -> None:
    with penstock.open(broker_dir) as broker:
        for name in ("orders", "mails"):
            fill(broker.create_queue(name), 20)
        resolve(broker.queue("orders"), 20)
        broker._home.log(broker._find("orders").incarnation, 0).close()  # by which all is published
        for name in ("orders", "mails"):
            assert archive(spark, broker_dir, name, lake, cursor="").rows == 20
        assert broker.queue("orders").cursors() == {}
        found = archive(spark, broker_dir, "orders", lake, table="events")
        shutil.rmtree(Path(found.manifest).parent / "checkpoint")
        assert archive(spark, broker_dir, "orders", lake, table="events").rows == 0
        events = Counter(event.event for id in range(20) for event in broker.queue("orders").history(f"0-{id}"))
    assert Counter(row["event"] for row in archived(lake, "events")) == events and found.rows == events.total()
    assert Counter(row["queue"] for row in archived(lake)) == {"orders": 20, "mails": 20}

    with penstock.open(broker_dir) as broker:  # deleted and created anew: another queue of the same name
        broker.delete_queue("mails")
        fill(broker.create_queue("mails"), 5)
        assert archive(spark, broker_dir, "mails", lake, cursor="").rows == 5
    assert Counter(row["queue"] for row in archived(lake)) == {"orders": 20, "mails": 25}


def test_an_archive_begins_at_what_it_holds(spark: SparkSession, broker_dir: str, tmp_path: Path) -> None:
    """A new archive, and one whose directory was removed, hold everything, whatever other archives and cursors there
    are."""
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=2)
        fill(queue, 10)
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        first = archive(spark, broker_dir, "orders", one)
        second = archive(spark, broker_dir, "orders", two)
        assert (first.rows, second.rows) == (10, 10) and first.cursor != second.cursor
        wait_until(lambda: sum(queue.cursors().get(first.cursor, {}).values()) == 10)
        shutil.rmtree(one)
        assert archive(spark, broker_dir, "orders", one).rows == 10
        assert sorted(row["id"] for row in archived(one)) == sorted(row["id"] for row in archived(two))
        shared = [archive(spark, broker_dir, "orders", str(tmp_path / name), cursor="mine").rows for name in ("three", "four")]
        assert shared == [10, 10]


def test_where_a_run_without_a_checkpoint_begins(lake: str) -> None:
    known = manifests.ArchiveManifest("items", "orders", "0" * 16)
    assert job._starting_offsets(known, lake) == "earliest"  # and not at a cursor
    files = [manifests.ArchivedFile("x", 1, 3, [manifests.PartitionRange(0, 5, 7, 3)])]
    assert json.loads(job._starting_offsets(known.with_batch(manifests.ArchivedBatch("b", "now", files)), lake)) == {"0": 8}


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_an_archive_of_events_continues_within_a_frame(broker_dir: str, lake: str, batches: int, earlier: bool) -> None:
    """Its manifest alone says where; also one of an earlier version, which does not count the last rows."""
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=2)
        fill(queue, 100)
        resolve(queue, 3)
        fill(queue, 20, 100)
    stream = StreamRun(broker_dir, table="events", maxItemsPerTrigger=50)
    known = manifests.ArchiveManifest("events", "orders", stream.at["incarnation"])
    Path(lake).mkdir()
    for number in range(batches):
        before = len(stream.rows)
        assert stream.batch() > 0
        path = f"{lake}/part-{number}.parquet"
        pq.write_table(pa.Table.from_pylist(stream.rows[before:]).select(["partition", "sequence"]), path)
        known = known.with_batch(manifests.ArchivedBatch(str(number), "now", manifests.describe_files([path], lake, "sequence")))
    if earlier:
        known = msgspec.json.decode(re.sub(rb',"last_rows":\d+', b"", msgspec.json.encode(known)), type=manifests.ArchiveManifest)
    assert known.rows == len(stream.rows)
    rest = StreamRun(broker_dir, table="events", startingOffsets=job._starting_offsets(known, lake))
    rest.all()
    everything = StreamRun(broker_dir, table="events")
    everything.all()
    events = Counter((row["event"], row["id"]) for row in everything.rows)
    assert Counter((row["event"], row["id"]) for row in stream.rows + rest.rows) == events


def test_each_archive_has_a_cursor_of_its_own(broker_dir: str, tmp_path: Path) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    locations = [job.check_arguments(broker_dir, "orders", str(tmp_path / name)) for name in ("one", "two", "one/")]
    assert locations[0].cursor == locations[2].cursor != locations[1].cursor


def test_an_archive_with_a_missing_part_is_refused(broker_dir: str, tmp_path: Path) -> None:
    """Refused before Spark is used."""
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    nobody: Any = None

    def run(name: str, **options: Any) -> None:
        archive(nobody, broker_dir, "orders", str(tmp_path / name), **options)

    def made(name: str) -> Any:
        return job.check_arguments(broker_dir, "orders", str(tmp_path / name))

    files = [manifests.ArchivedFile("x", 1, 3, [manifests.PartitionRange(0, 0, 2, 3)])]
    location = made("no manifest")
    folder = Path(location.data, "date=2024-01-01", f"batch={location.incarnation:016x}-aa-00000000")
    folder.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=r"holds files of this queue, but their manifest .*manifest.json is missing"):
        run("no manifest")
    assert folder.exists()  # not removed as the files of a killed run

    location = made("no files")
    os.makedirs(location.metadata)
    manifests.write(location.manifest, location.empty_manifest().with_batch(manifests.ArchivedBatch("b", "now", files)))
    with pytest.raises(InvalidRequest, match=r"names 3 rows, but their folder .* is missing"):
        run("no files")

    kept = tmp_path / "kept"
    (kept / "commits").mkdir(parents=True)
    (kept / "commits" / "1").touch()
    (kept / "metadata").write_text('{"id": "a-a"}')
    with pytest.raises(InvalidRequest, match="counts rows as archived that this archive does not hold"):
        run("new", checkpoint=str(kept))
    assert not (tmp_path / "new").exists()
    location = made("older")
    os.makedirs(location.metadata)
    for newest, sound in (("aa-00000000", False), ("aa-00000001", True), ("aa-00000002", True), ("bb-00000003", False)):
        batch = manifests.ArchivedBatch(f"{location.incarnation:016x}-{newest}", "now", [])
        manifests.write(location.manifest, location.empty_manifest().with_batch(batch))
        if sound:
            job._require_consistent(location, str(kept))
        else:
            with pytest.raises(InvalidRequest, match="or remove it: then the archive continues from its manifest"):
                run("older", checkpoint=str(kept))


def test_files_of_a_killed_run_that_cannot_be_removed(broker_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    location = job.check_arguments(broker_dir, "orders", str(tmp_path / "lake"))
    Path(location.data, "date=2024-01-01", f"batch={location.incarnation:016x}-aa-00000000").mkdir(parents=True)
    monkeypatch.setattr("penstock.spark.jobs.archive.shutil.rmtree", crash)
    with pytest.raises(StorageFailed, match="EIO"):
        job._remove_unfinished(location, location.empty_manifest())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_items_per_batch": 0}, "max_items_per_batch is 0; give a whole number from 1"),
        ({"table": "state"}, "cannot be archived"),
        ({"cursor": "x" * 2_000}, "cursor's name"),
    ],
)
def test_a_wrong_argument_leaves_nothing_behind(broker_dir: str, lake: str, options: dict[str, Any], said: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    nobody: Any = None
    with pytest.raises(InvalidRequest, match=said):
        archive(nobody, broker_dir, "orders", lake, **options)
    assert not Path(lake).exists()


def test_wrong_arguments_of_archive(spark: SparkSession, broker_dir: str, lake: str) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
        with pytest.raises(QueueNotFound):
            archive(spark, broker_dir, "nope", lake)
        with pytest.raises(InvalidRequest, match="table 'dead' cannot be archived; use items, events"):
            archive(spark, broker_dir, "orders", lake, table="dead")
        with pytest.raises(InvalidRequest, match="give a directory that every node of Spark sees"):
            archive(spark, broker_dir, "orders", "s3a://bucket/lake")
        with job._locked(job._location(lake, "items", broker._find("orders"))), pytest.raises(QueueBusy, match="by another run"):
            archive(spark, broker_dir, "orders", lake)


STEPS = ("write", "sync", "describe_files", "manifest", "after")


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_each_step(spark: SparkSession, broker_dir: str, lake: str, step: str) -> None:
    """A process is killed in its second micro-batch; the next run archives the rest."""
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=2)
        ids = fill(queue, 300)
        command = [sys.executable, "-m", "tests.spark.archive_program", broker_dir, lake, step]
        ended = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=300)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        before = json.loads(next(Path(lake, "_penstock").rglob("manifest.json")).read_text())
        assert len(before["batches"]) == (2 if step == "after" else 1)
        found = archive(spark, broker_dir, "orders", lake, max_items_per_batch=100)
        assert Counter(row["id"] for row in archived(lake)) == Counter(ids) and found.total_rows == 300
        check_manifest(lake, found)
