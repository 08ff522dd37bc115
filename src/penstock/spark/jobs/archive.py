"""The job `archive`: copies the items or events of a queue into Parquet files, by queue and date.

Owns: `archive` and `ArchiveResult`. A run is a streaming query that reads what is available now and ends. Its
checkpoint is in the archive.
    <path>/items/queue=<name>/date=<day>/batch=<batch>/part-….parquet
    <path>/_penstock/items/<name>-<incarnation>/{manifest.json, checkpoint/, lock}
Exactly once: the checkpoint fixes the rows of a micro-batch before they are written, and its files are in folders named
after it. A micro-batch that is repeated after a crash replaces its own files. It is archived when its files are synced
and in the manifest.
A run continues from the archive's checkpoint, or from its manifest; a new archive begins at the earliest retained item.
Each archive has a named cursor that keeps retention from removing what is not archived. The cursor follows the archive;
no run begins at the cursor. Table events has no cursor.
Limits: an archive is a directory that driver and executors see under the same path.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from glob import escape, glob

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.api import arguments as calls
from penstock.logs.files.filesystem import SystemFiles, storage_failed
from penstock.reports import QueueDescription
from penstock.rules.routing import digest
from penstock.spark.broker_access import open_broker, parse_broker
from penstock.spark.jobs import manifest as manifests
from penstock.spark.jobs.manifest import ArchivedBatch, ArchiveManifest
from penstock.spark.jobs.progress import Progress, translate_spark_errors
from penstock.spark.options import MAX_NUMBER
from penstock.spark.positions import StreamPosition, last_restore
from penstock.spark.queue_tables import QueueTables
from penstock.spark.source import register
from penstock.words.errors import InvalidRequest, PenstockError, QueueBusy
from penstock.words.limits import check_range

CURSOR = "archive"
OPEN_SECONDS = 10.0
"""How long to wait for an owner that does not answer yet."""
TABLES = {"items": "produced_at", "events": "at"}
"""The tables that can be archived, and the column whose date is a row's folder."""
METADATA_FOLDER = "_penstock"
"""Readers of Parquet ignore folders whose names begin with an underscore."""


class ArchiveResult(msgspec.Struct, frozen=True):
    """What a run added to an archive."""

    queue: str
    table: str
    path: str
    """The folder of this table, for spark.read.parquet."""
    manifest: str
    rows: int
    files: int
    size_bytes: int
    batches: int
    total_rows: int
    """Rows of this queue and table in the archive now."""
    cursor: str
    """The cursor that makes retention keep what is not archived; "" if there is none."""


class _Location(msgspec.Struct, frozen=True):
    """Where the archive of one queue and table is. Plain data: Spark Connect sends it to another process."""

    data: str
    """The folder of the Parquet files."""
    metadata: str
    """The folder of manifest, checkpoint and lock."""
    table: str
    queue: str
    incarnation: int
    cursor: str
    """The default name of the cursor. It depends on the path: two archives of a queue must not share a cursor."""

    @property
    def manifest(self) -> str:
        return f"{self.metadata}/manifest.json"

    @property
    def number(self) -> str:
        """The column that numbers the rows of a partition."""
        return "offset" if self.table == "items" else "sequence"

    def empty_manifest(self) -> ArchiveManifest:
        return ArchiveManifest(self.table, self.queue, f"{self.incarnation:016x}")

    def folders(self, batch: str) -> list[str]:
        """The existing folders of a micro-batch (glob pattern) of this queue."""
        return glob(f"{escape(self.data)}/date=*/batch={self.incarnation:016x}-{batch}")

    def batch(self, checkpoint: str, number: int) -> str:
        """The name of a micro-batch. Names of later micro-batches of a checkpoint are greater."""
        with open(f"{checkpoint}/metadata", encoding="utf-8") as file:  # Spark keeps the query's id there
            return f"{self.incarnation:016x}-{json.load(file)['id'].replace('-', '')}-{number:08d}"


def archive(
    spark: SparkSession,
    broker: str,
    queue: str,
    path: str,
    *,
    table: str = "items",
    cursor: str | None = None,
    checkpoint: str | None = None,
    max_items_per_batch: int | None = None,
    fail_on_data_loss: bool = True,
    progress: Progress | None = None,
) -> ArchiveResult:
    """Add to an archive everything that the queue's log has and the archive has not.

    table: items, or events.
    cursor: the name of the cursor that makes retention keep what is not archived; the archive's own unless given, ""
        for none. Release it (`queue.cursor(name).release()`) when an archive is abandoned or moved.
    checkpoint: the folder of Spark's checkpoint; in the archive unless given. If it is lost, the manifest replaces it.
    max_items_per_batch: of one micro-batch; a million unless given.
    fail_on_data_loss: raise an error if retention removed items that were not archived yet; if False, leave them out.
    """
    location = check_arguments(broker, queue, path, table=table, cursor=cursor, max_items_per_batch=max_items_per_batch)
    kept = checkpoint or f"{location.metadata}/checkpoint"
    _require_consistent(location, kept)
    cursor = "" if table != "items" else location.cursor if cursor is None else cursor
    roots = parse_broker(broker)
    with QueueTables.open(roots) as tables:
        found = tables.find(queue)
        bounds = tables.published(found)
    opened = open_broker(roots, OPEN_SECONDS) if cursor else nullcontext()  # somebody must move the cursor
    with opened, _locked(location), translate_spark_errors("archiving"):
        before = manifests.read(location.manifest)
        if before is None:  # now files without a manifest cannot come from a run that was killed
            before = manifests.write(location.manifest, location.empty_manifest())
        _remove_unfinished(location, before)
        options = {"broker": broker, "queue": queue, "table": table, "failOnDataLoss": str(fail_on_data_loss).lower()}
        if table == "items":
            options |= {"includeHeaders": "true", **({"cursor": cursor} if cursor else {})}
        if max_items_per_batch is not None:
            options["maxItemsPerTrigger"] = str(max_items_per_batch)
        options["startingOffsets"] = _starting_offsets(before, os.path.dirname(location.data), last_restore(found))
        done = _progress_reporter(
            progress, before, {partition: one.end if table == "items" else one.sequence + 1 for partition, one in bounds.items()}
        )
        failed: list[PenstockError] = []
        register(spark)
        stream = spark.readStream.format("penstock").options(**options).load()
        query = (
            stream.writeStream.foreachBatch(_writer(location, kept, done, failed))
            .option("checkpointLocation", kept)
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except PySparkException:
            if failed:  # our error, which Spark has wrapped in its own
                raise failed[0] from None
            raise
        finally:
            query.stop()
        after = manifests.read(location.manifest) or before
    known = {batch.name for batch in before.batches}
    added = [batch for batch in after.batches if batch.name not in known]
    return ArchiveResult(
        queue,
        table,
        os.path.dirname(location.data),
        location.manifest,
        sum(batch.rows for batch in added),
        sum(len(batch.files) for batch in added),
        sum(file.size_bytes for batch in added for file in batch.files),
        len(added),
        after.rows,
        cursor,
    )


def check_arguments(
    broker: str, queue: str, path: str, *, table: str = "items", cursor: str | None = None, max_items_per_batch: int | None = None
) -> _Location:
    """Check the arguments without Spark, before anything is written; gives where the archive is."""
    if table not in TABLES:
        raise InvalidRequest(f"table {table!r:.100} cannot be archived; use {', '.join(TABLES)}")
    if max_items_per_batch is not None:
        check_range("max_items_per_batch", max_items_per_batch, 1, MAX_NUMBER)
    if cursor:
        calls.cursor_name(cursor)
    with QueueTables.open(parse_broker(broker)) as tables:
        return _location(path, table, tables.find(queue))


def _starting_offsets(known: ArchiveManifest, root: str, restored: int = 0) -> str:
    """Where a stream without a checkpoint begins: after the archived rows, not at a cursor. A run of events may have
    ended within a frame. root: the table's folder; restored: when the queue was last restored from a backup."""
    if not known.batches:
        return "earliest"
    lasts = known.last_numbers()
    if known.table == "items":
        return json.dumps({str(partition): last + 1 for partition, last in lasts.items()})
    position = StreamPosition(int(known.incarnation, 16), known.table, lasts, restored=restored, rows=known.last_rows(root))
    return json.dumps(position.to_offset())


def _require_consistent(location: _Location, checkpoint: str) -> None:
    """InvalidRequest if files, manifest and checkpoint of the archive contradict each other: rows could be missing."""
    # first: a run may add to both now
    done = max((int(name) for name in _names(f"{checkpoint}/commits") if name.isdecimal()), default=-1)
    known = manifests.read(location.manifest)
    if known is None and location.folders("*"):
        raise InvalidRequest(
            f"{location.data} holds files of this queue, but their manifest {location.manifest} is missing; restore it from a copy, "
            "or archive to another directory"
        )
    if known is not None and known.batches and not os.path.isdir(location.data):
        raise InvalidRequest(
            f"{location.manifest} names {known.rows:,} rows, but their folder {location.data} is missing; restore it from a copy, "
            f"or start again: remove {location.metadata}"
        )
    if done >= 0 and not _is_archived(location, checkpoint, done, "" if known is None else known.newest):
        raise InvalidRequest(
            f"the checkpoint {checkpoint} counts rows as archived that this archive does not hold: it is another archive's, or newer; "
            "give this archive its own checkpoint, or remove it: then the archive continues from its manifest"
        )


def _is_archived(location: _Location, checkpoint: str, done: int, newest: str) -> bool:
    """Whether the archive's newest micro-batch is the last that a checkpoint counts as done, or a later one."""
    try:
        name = location.batch(checkpoint, done)
    except OSError as error:
        raise storage_failed(error, "reading", checkpoint) from error
    return newest.rpartition("-")[0] == name.rpartition("-")[0] and newest >= name


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_failed(error, "reading", folder) from error


def _location(path: str, table: str, info: QueueDescription) -> _Location:
    if not path or "://" in path.removeprefix("file://"):
        raise InvalidRequest(f"the path of the archive is {path!r:.200}; give a directory that every node of Spark sees")
    root = os.path.abspath(os.path.expanduser(path.removeprefix("file://")))
    metadata = f"{root}/{METADATA_FOLDER}/{table}/{info.name}-{info.incarnation:016x}"
    cursor = f"{CURSOR}-{digest(b'archive', root.encode()).hex()[:8]}"
    return _Location(f"{root}/{table}/queue={info.name}", metadata, table, info.name, info.incarnation, cursor)


@contextmanager
def _locked(location: _Location) -> Iterator[None]:
    """Hold the archive's lock. QueueBusy if another run holds it: both would write the same micro-batches."""
    files = SystemFiles()
    try:
        files.make_directory(location.metadata)
        handle = files.lock(f"{location.metadata}/lock")
    except OSError as error:
        raise storage_failed(error, "preparing", location.metadata) from error
    if handle is None:
        raise QueueBusy(f"queue {location.queue!r} is being archived to {location.metadata} by another run; wait until it has ended")
    try:
        yield
    finally:
        files.unlock(handle)


def _remove_unfinished(location: _Location, known: ArchiveManifest) -> None:
    """Remove files that a killed run wrote and did not enter in the manifest; the run's micro-batch is repeated."""
    entered = {batch.name for batch in known.batches}
    for folder in location.folders("*"):
        if os.path.basename(folder).removeprefix("batch=") not in entered:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise storage_failed(error, "removing", folder) from error


def _progress_reporter(
    progress: Progress | None, before: ArchiveManifest, ends: Mapping[int, int]
) -> Callable[[ArchiveManifest], None] | None:
    """A function that reports, for a manifest, how many numbers of the partitions are archived."""
    if progress is None:
        return None
    lasts = before.last_numbers()
    total = sum(max(0, end - lasts.get(partition, -1) - 1) for partition, end in ends.items())
    progress("archiving", 0, total)
    return lambda now: progress("archiving", sum(last - lasts.get(partition, -1) for partition, last in now.last_numbers().items()), total)


# -- a micro-batch -----------------------------------------------------------------------------------


def _writer(
    location: _Location, checkpoint: str, done: Callable[[ArchiveManifest], None] | None, failed: list[PenstockError]
) -> Callable[[DataFrame, int], None]:
    def write(rows: DataFrame, number: int) -> None:
        try:
            known = _write_batch(rows, location, checkpoint, number)
        except PenstockError as error:
            failed.append(error)
            raise
        except OSError as error:
            failed.append(storage_failed(error, "writing", location.data))
            raise
        if done is not None:
            done(known)

    return write


def _write_batch(rows: DataFrame, location: _Location, checkpoint: str, number: int) -> ArchiveManifest:
    """Write a micro-batch and enter it in the manifest; replaces what an earlier attempt wrote."""
    batch = location.batch(checkpoint, number)
    session = rows.sparkSession  # the stream's own session: the setting does not affect others
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    dated = rows.withColumn("date", F.to_date(TABLES[location.table])).withColumn("batch", F.lit(batch))
    dated = dated.sortWithinPartitions("date", "batch", "partition", location.number)
    # Replaces only the folders of this micro-batch: another queue may be archived at the same time.
    writer = dated.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    writer.partitionBy("date", "batch").parquet(location.data)
    paths = sorted(path for folder in location.folders(batch.partition("-")[2]) for path in glob(f"{escape(folder)}/*.parquet"))
    manifests.sync(paths, location.data)
    added = ArchivedBatch(batch, manifests.now(), manifests.describe_files(paths, os.path.dirname(location.data), location.number))
    known = manifests.read(location.manifest) or location.empty_manifest()
    return manifests.write(location.manifest, known.with_batch(added))
