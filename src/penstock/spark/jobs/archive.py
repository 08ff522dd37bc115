"""A queue's log as Parquet files, for good: everything that was produced (or that happened), by queue and date.

Owns: `archive` and `ArchiveResult`. A run is a structured stream that takes what is there now and ends; its checkpoint lies in the archive.
    <path>/items/queue=<name>/date=<day>/batch=<batch>/part-….parquet
    <path>/_penstock/items/<name>-<incarnation>/{manifest.json, checkpoint/, lock}
Exactly once: what a micro-batch holds is decided by the checkpoint before it is written, and its files lie in folders of its own name. So
one that is repeated after a crash takes the place of what it had written. It is archived when its files are synced and in the manifest.
Where a run begins is told by the archive itself, its checkpoint or its manifest; a new one begins at the earliest item that is kept.
A named cursor, one for each archive, holds retention back from what is not archived yet, and moves on behind it: nothing begins there.
Table events has no cursor.
Limits: an archive is a directory that driver and executors see under one path.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape, glob

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.api import arguments as calls
from penstock.logs.files.filesystem import SystemFiles, storage_failed
from penstock.reports import QueueDescription
from penstock.rules.routing import digest
from penstock.spark.broker_access import parse_broker
from penstock.spark.jobs import manifest as manifests
from penstock.spark.jobs.manifest import ArchivedBatch, ArchiveManifest
from penstock.spark.jobs.progress import Progress, translate_spark_errors
from penstock.spark.options import MAX_NUMBER
from penstock.spark.queue_tables import QueueTables
from penstock.words.errors import InvalidRequest, PenstockError, QueueBusy
from penstock.words.limits import check_range

CURSOR = "archive"
TABLES = {"items": "produced_at", "events": "at"}
"""What can be archived, and the time whose date a row lies under."""
METADATA_FOLDER = "_penstock"
"""Readers of Parquet pass over what begins so."""


class ArchiveResult(msgspec.Struct, frozen=True):
    """What a run added to an archive."""

    queue: str
    table: str
    path: str
    """Of the files of this table: spark.read.parquet takes it."""
    manifest: str
    rows: int
    files: int
    size_bytes: int
    batches: int
    total_rows: int
    """In the archive now, of this queue and table."""
    cursor: str
    """What holds retention back until the next run; "" when nothing does."""


class _Place(msgspec.Struct, frozen=True):
    """Where the archive of one queue and table lies. Plain data: Spark Connect sends it elsewhere."""

    data: str
    own: str
    table: str
    queue: str
    incarnation: int
    cursor: str
    """Its name unless one is given: two archives of a queue must not move each other's."""

    @property
    def manifest(self) -> str:
        return f"{self.own}/manifest.json"

    @property
    def number(self) -> str:
        """The column by which the rows of a partition are numbered."""
        return "offset" if self.table == "items" else "sequence"

    def nothing(self) -> ArchiveManifest:
        return ArchiveManifest(self.table, self.queue, f"{self.incarnation:016x}")

    def folders(self, batch: str) -> list[str]:
        """Those of a micro-batch of this queue, as far as they are there."""
        return glob(f"{escape(self.data)}/date=*/batch={self.incarnation:016x}-{batch}")

    def batch(self, checkpoint: str, number: int) -> str:
        """The name of a micro-batch; of one checkpoint, that of a later one is greater."""
        with open(f"{checkpoint}/metadata", encoding="utf-8") as file:  # Spark's: the query's id, as long as it has this checkpoint
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
    """Add to an archive what a queue's log holds and the archive does not; the same again adds only what is new.

    table: items, or events.
    cursor: the name under which retention is held back from what is not archived yet; one of the archive's own unless given, and ""
        holds nothing back. Release it (`queue.cursor(name).release()`) when an archive is given up or moved.
    checkpoint: where Spark keeps how far it has come; in the archive unless given. One that was lost is made anew from the manifest.
    max_items_per_batch: of one micro-batch; a million unless given.
    fail_on_data_loss: what retention took between two runs, before it was archived, is an error, and not left out.
    """
    place = check_arguments(broker, queue, path, table=table, cursor=cursor, max_items_per_batch=max_items_per_batch)
    kept = checkpoint or f"{place.own}/checkpoint"
    _require_whole(place, kept)
    cursor = "" if table != "items" else place.cursor if cursor is None else cursor
    with QueueTables.open(parse_broker(broker)) as tables:
        bounds = tables.published(tables.find(queue))
    with _alone(place), translate_spark_errors("archiving"):
        before = manifests.read(place.manifest)
        if before is None:  # from here on, files without a manifest are none of a run that was killed
            before = manifests.write(place.manifest, place.nothing())
        _remove_unfinished(place, before)
        options = {"broker": broker, "queue": queue, "table": table, "failOnDataLoss": str(fail_on_data_loss).lower()}
        if table == "items":
            options |= {"includeHeaders": "true", **({"cursor": cursor} if cursor else {})}
        if max_items_per_batch is not None:
            options["maxItemsPerTrigger"] = str(max_items_per_batch)
        options["startingOffsets"] = _begin(before)
        done = _told(progress, before, {partition: one.end if table == "items" else one.sequence + 1 for partition, one in bounds.items()})
        failed: list[PenstockError] = []
        stream = spark.readStream.format("penstock").options(**options).load()
        query = (
            stream.writeStream.foreachBatch(_writer(place, kept, done, failed))
            .option("checkpointLocation", kept)
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except PySparkException:
            if failed:  # what our own part of it ran into, rather than what Spark makes of that
                raise failed[0] from None
            raise
        finally:
            query.stop()
        after = manifests.read(place.manifest) or before
    known = {batch.name for batch in before.batches}
    added = [batch for batch in after.batches if batch.name not in known]
    return ArchiveResult(
        queue,
        table,
        os.path.dirname(place.data),
        place.manifest,
        sum(batch.rows for batch in added),
        sum(len(batch.files) for batch in added),
        sum(file.size_bytes for batch in added for file in batch.files),
        len(added),
        after.rows,
        cursor,
    )


def check_arguments(
    broker: str, queue: str, path: str, *, table: str = "items", cursor: str | None = None, max_items_per_batch: int | None = None
) -> _Place:
    """Whatever of the arguments can be found wrong without a Spark, and before anything is made; else where the archive lies."""
    if table not in TABLES:
        raise InvalidRequest(f"table {table!r:.100} cannot be archived; use {', '.join(TABLES)}")
    if max_items_per_batch is not None:
        check_range("max_items_per_batch", max_items_per_batch, 1, MAX_NUMBER)
    if cursor:
        calls.cursor_name(cursor)
    with QueueTables.open(parse_broker(broker)) as tables:
        return _place(path, table, tables.find(queue))


def _begin(known: ArchiveManifest) -> str:
    """Where a stream begins that has no checkpoint: behind what the archive holds. Cursors do not count: they may be another's."""
    return json.dumps({str(partition): last + 1 for partition, last in known.last_numbers().items()}) if known.batches else "earliest"


def _require_whole(place: _Place, checkpoint: str) -> None:
    """What the archive holds, what its manifest names and what its checkpoint counts as done must go together, or something is left out."""
    done = max((int(name) for name in _names(f"{checkpoint}/commits") if name.isdecimal()), default=-1)  # before the manifest is read
    known = manifests.read(place.manifest)
    if known is None and place.folders("*"):
        raise InvalidRequest(
            f"{place.data} holds files of this queue, and {place.manifest}, which names them, is not there; bring it back from a copy, "
            "or archive to another directory"
        )
    if known is not None and known.batches and not os.path.isdir(place.data):
        raise InvalidRequest(
            f"{place.manifest} names {known.rows:,} rows, and {place.data}, where they lay, is not there; bring it back from a copy, "
            f"or begin anew: remove {place.own}"
        )
    if done >= 0 and not _entered(place, checkpoint, done, "" if known is None else known.newest):
        raise InvalidRequest(
            f"the checkpoint {checkpoint} counts as done what this archive does not hold: it is another archive's, or newer; "
            "give this archive one of its own, or remove it: then the archive goes on from its manifest"
        )


def _entered(place: _Place, checkpoint: str, done: int, newest: str) -> bool:
    """Whether the newest micro-batch of an archive is the last that a checkpoint counts as done, or one after it."""
    try:
        name = place.batch(checkpoint, done)
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


def _place(path: str, table: str, info: QueueDescription) -> _Place:
    if not path or "://" in path.removeprefix("file://"):
        raise InvalidRequest(f"the path of the archive is {path!r:.200}; give a directory that every node of Spark sees")
    root = os.path.abspath(os.path.expanduser(path.removeprefix("file://")))
    own = f"{root}/{METADATA_FOLDER}/{table}/{info.name}-{info.incarnation:016x}"
    cursor = f"{CURSOR}-{digest(b'archive', root.encode()).hex()[:8]}"
    return _Place(f"{root}/{table}/queue={info.name}", own, table, info.name, info.incarnation, cursor)


@contextmanager
def _alone(place: _Place) -> Iterator[None]:
    """Two runs at a time would write the same micro-batches."""
    files = SystemFiles()
    try:
        files.make_directory(place.own)
        handle = files.lock(f"{place.own}/lock")
    except OSError as error:
        raise storage_failed(error, "preparing", place.own) from error
    if handle is None:
        raise QueueBusy(f"queue {place.queue!r} is being archived to {place.own} by another run; wait until it has ended")
    try:
        yield
    finally:
        files.close(handle)


def _remove_unfinished(place: _Place, known: ArchiveManifest) -> None:
    """What a run that was killed has written and not entered. If its micro-batch is still to be had, it is repeated."""
    entered = {batch.name for batch in known.batches}
    for folder in place.folders("*"):
        if os.path.basename(folder).removeprefix("batch=") not in entered:
            shutil.rmtree(folder)


def _told(progress: Progress | None, before: ArchiveManifest, ends: Mapping[int, int]) -> Callable[[ArchiveManifest], None] | None:
    """How far the numbers of the partitions have come, as a bar shows it."""
    if progress is None:
        return None
    lasts = before.last_numbers()
    total = sum(max(0, end - lasts.get(partition, -1) - 1) for partition, end in ends.items())
    progress("archiving", 0, total)
    return lambda now: progress("archiving", sum(last - lasts.get(partition, -1) for partition, last in now.last_numbers().items()), total)


# -- a micro-batch -----------------------------------------------------------------------------------


def _writer(
    place: _Place, checkpoint: str, done: Callable[[ArchiveManifest], None] | None, failed: list[PenstockError]
) -> Callable[[DataFrame, int], None]:
    def write(rows: DataFrame, number: int) -> None:
        try:
            known = _keep(rows, place, checkpoint, number)
        except PenstockError as error:
            failed.append(error)
            raise
        except OSError as error:
            failed.append(storage_failed(error, "writing", place.data))
            raise
        if done is not None:
            done(known)

    return write


def _keep(rows: DataFrame, place: _Place, checkpoint: str, number: int) -> ArchiveManifest:
    """Write a micro-batch and enter it; one that was written before, wholly or in part, is replaced."""
    batch = place.batch(checkpoint, number)
    session = rows.sparkSession  # the stream's own: what is set here is not set for others
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    dated = rows.withColumn("date", F.to_date(TABLES[place.table])).withColumn("batch", F.lit(batch))
    dated = dated.sortWithinPartitions("date", "batch", "partition", place.number)
    # Only the folders of this micro-batch are replaced; two queues may be written at a time.
    writer = dated.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    writer.partitionBy("date", "batch").parquet(place.data)
    paths = sorted(path for folder in place.folders(batch.partition("-")[2]) for path in glob(f"{escape(folder)}/*.parquet"))
    manifests.sync(paths, place.data)
    added = ArchivedBatch(batch, manifests.now(), manifests.describe_files(paths, os.path.dirname(place.data), place.number))
    known = manifests.read(place.manifest) or place.nothing()
    return manifests.write(place.manifest, known.with_batch(added))
