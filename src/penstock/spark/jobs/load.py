"""The job `load`: adds the rows of Parquet, CSV or JSON files to a queue as items, each load once.

Owns: `load` and `LoadResult`. Rows that cannot be items are written to a quarantine folder, with the reason; without a
quarantine one such row refuses the whole load before anything is written. The good rows are one write: all of them
become items, or none.
A load has an id, derived from its files unless given. A load of the same id adds nothing. After a crash, repeat the
load.
"""

from collections.abc import Mapping, Sequence

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from penstock.spark.broker_access import parse_broker
from penstock.spark.jobs import source_files
from penstock.spark.jobs.progress import Progress, report_task_progress, translate_spark_errors
from penstock.spark.jobs.row_mapping import DETAIL, RAW, REASON, REASONS, ColumnMapping, map_rows
from penstock.spark.jobs.source_files import FILE, absolute
from penstock.spark.routing import write
from penstock.spark.sort_order import SortOrder, order_terms
from penstock.spark.source import register
from penstock.spark.staging import StagedWriteClient
from penstock.words.errors import InvalidRequest

NUMBER = 1
"""The number of the write: a load's source has only one."""
PREFIX = "load:"


class LoadResult(msgspec.Struct, frozen=True):
    """What a load did."""

    load_id: str
    files: int
    rows: int
    items: int
    """Rows that became items."""
    quarantined: int
    reasons: dict[str, int]
    """Why rows were quarantined, and how many."""
    quarantine: str | None
    """The folder of the quarantined rows; None if there are none."""
    repeated: bool
    """Whether a load of this id was done before; then nothing was read and nothing was added."""
    adopted: bool
    """Whether the items are in the queue. If not, they are durable and wait for an owner."""


def load(
    spark: SparkSession,
    source: str | Sequence[str],
    broker: str,
    queue: str,
    *,
    format: str | None = None,
    payload: str | None = None,
    key: str | None = None,
    reference: str | None = None,
    kind: str | None = None,
    schema: str | None = None,
    order_by: str | Sequence[str] | None = None,
    quarantine: str | None = None,
    load_id: str | None = None,
    options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> LoadResult:
    """Add the rows of files to a queue, each row as an item.

    source: a file, a folder (with its subfolders), or a list of them; any path that Spark can read.
    format: parquet, csv or json (one value per line); by the files' names unless given.
    payload: the column with the payload. Without it, the column named payload; columns named as other fields of items
        give these fields. If there is no such column, the payload is the row as JSON.
    key, reference: the columns with the key and the reference.
    kind: the kind of all items.
    schema: columns and types, as in SQL; rows that do not fit are malformed. Without it all values of CSV are text.
    order_by: columns that give the order of the items of a key, such as "ts, seq desc"; else their order is not
        defined.
    quarantine: a folder for rows that cannot be items. `load=<id>/` in it gets JSON lines of raw row, file, reason
        and detail.
    load_id: identifies the load; derived from the files' names, sizes and times unless given. The other arguments are
        not part of it: to load the same files with another key or other options, give another id.
    options: options of Spark's reader, such as {"sep": ";"}.
    """
    check_arguments(source, broker, queue, format=format, order_by=order_by, load_id=load_id)
    writes = StagedWriteClient(parse_broker(broker))
    destination = writes.find(queue)
    order = order_terms(order_by)
    ordered_by = SortOrder.parse(order).columns
    given = {name: str(value) for name, value in (options or {}).items()}
    register(spark)
    with report_task_progress(spark, "listing the files", progress):
        files = source_files.find_files(spark, source, format)
        id = load_id or files.id
        name = f"{PREFIX}{id}"
        if writes.is_published(destination, name, NUMBER):
            return LoadResult(id, files.count, 0, 0, 0, {}, None, True, writes.wait_adopted(destination, name, NUMBER, 0))
        rows = map_rows(source_files.read_rows(spark, files, schema, given), ColumnMapping(payload, key, reference, kind), ordered_by)
    folder = None if quarantine is None else f"{absolute(quarantine).rstrip('/')}/load={_file_name(id)}"
    with report_task_progress(spark, "checking", progress), translate_spark_errors("checking the rows"):
        total, reasons = _quarantine(rows, folder)
    bad = sum(reasons.values())
    if bad and folder is None:
        raise InvalidRequest(f"{_bad_rows(bad, total, reasons)}; fix them, or give a quarantine for them: nothing was loaded")
    if total > bad:
        good = rows.filter(F.col(REASON).isNull()).drop(REASON, DETAIL, RAW, FILE)
        with report_task_progress(spark, "loading", progress), translate_spark_errors("writing to the queue"):
            write(good, broker, queue, order_by=order or None, writeId=name)
    adopted = writes.wait_adopted(destination, name, NUMBER, 0)
    return LoadResult(id, files.count, total, total - bad, bad, reasons, folder if bad else None, False, adopted)


def check_arguments(
    source: str | Sequence[str],
    broker: str,
    queue: str,
    *,
    format: str | None = None,
    order_by: str | Sequence[str] | None = None,
    load_id: str | None = None,
) -> None:
    """Check the arguments without Spark: InvalidRequest or QueueNotFound."""
    StagedWriteClient(parse_broker(broker)).find(queue)
    source_files.check_source(source, format)
    SortOrder.parse(order_terms(order_by))
    if load_id is not None and not load_id.strip():
        raise InvalidRequest("load_id is empty; give a text, or leave it out")


def _file_name(id: str) -> str:
    """An id as the name of a folder: without a slash, different for different ids."""
    return id.replace("%", "%25").replace("/", "%2F")


def _quarantine(rows: DataFrame, folder: str | None) -> tuple[int, dict[str, int]]:
    """Count all rows, and the bad ones by reason; write the bad ones to `folder`, if one is given."""
    counts = [F.count(F.lit(1)).alias("rows"), *(F.count_if(F.col(REASON) == reason).alias(reason) for reason in REASONS)]
    if folder is None:
        found = rows.agg(*counts).collect()[0].asDict()
    else:
        counted = Observation()
        wrong = rows.observe(counted, *counts).filter(F.col(REASON).isNotNull())
        named = {"raw": RAW, "file": FILE, "reason": REASON, "detail": DETAIL}
        wrong.select(*(F.col(column).alias(name) for name, column in named.items())).write.mode("overwrite").json(folder)
        found = counted.get
    total = int(found.pop("rows"))
    return total, {reason: int(number) for reason, number in found.items() if number}


def _bad_rows(bad: int, total: int, reasons: Mapping[str, int]) -> str:
    shown = ", ".join(f"{number:,} × {reason}" for reason, number in sorted(reasons.items(), key=lambda one: -one[1]))
    return f"{bad:,} of {total:,} rows cannot be items ({shown})"
