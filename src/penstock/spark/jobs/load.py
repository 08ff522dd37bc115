"""Files into a queue: Parquet, CSV or JSON, each row an item, each load once.

Owns: `load` and `LoadResult`. Rows that cannot be items go to a quarantine, with what is wrong with them; without one, a single such row
refuses the load before anything is written. The good rows are one write: all of them become items or none.
A load has an id, derived from its files unless given; the same load done again adds nothing. A load that was killed is simply done again.
"""

from collections.abc import Mapping as Map
from collections.abc import Sequence

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from penstock.spark.broker_access import parse_broker
from penstock.spark.jobs import source_files as source_files
from penstock.spark.jobs.progress import Progress, report_task_progress, translate_spark_errors
from penstock.spark.jobs.row_mapping import DETAIL, RAW, REASON, REASONS, ColumnMapping, map_rows
from penstock.spark.jobs.source_files import FILE, absolute
from penstock.spark.routing import write
from penstock.spark.sort_order import SortOrder
from penstock.spark.staging import StagedWriteClient
from penstock.words.errors import InvalidRequest

NUMBER = 1
"""A load is one write of its source: its first and last."""
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
    """Where they lie; None when there were none."""
    repeated: bool
    """The same load was done before: nothing was looked at, nothing was added."""
    adopted: bool
    """The items are in the queue; else they wait, durably, for whoever owns the broker or opens it next."""


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
    options: Map[str, str] | None = None,
    progress: Progress | None = None,
) -> LoadResult:
    """Load files into a queue, a row an item.

    source: a file or a folder, or several, wherever Spark can read.
    format: parquet, csv or json (a value a line); by the files' names unless given.
    payload: the column that is the payload. Without it a column of that name is, and other columns called as fields of items are those;
        where there is none, the row as JSON is the payload.
    key, reference: the columns that are these.
    kind: a word that all items get.
    schema: columns and types as SQL has them; rows that do not fit are malformed. Without it all values of CSV are text.
    order_by: columns by which the items of a key follow each other, such as "ts, seq desc"; without it their order is not defined.
    quarantine: a folder for rows that cannot be items; there, `load=<id>/` holds JSON lines of raw row, file, reason and detail.
    load_id: by which the load is known again; else the files' names, sizes and times. How they are read does not count: the same files
        with another key or other options need another id.
    options: those of Spark's reader, such as {"sep": ";"}.
    """
    check_arguments(source, broker, queue, format=format, order_by=order_by, load_id=load_id)
    writes = StagedWriteClient(parse_broker(broker))
    destination = writes.find(queue)
    order = _columns(order_by)
    ordered_by = SortOrder.parse(order).columns
    given = {name: str(value) for name, value in (options or {}).items()}
    with report_task_progress(spark, "looking", progress):
        files = source_files.find_files(spark, source, format)
        id = load_id or files.id
        name = f"{PREFIX}{id}"
        if writes.is_published(destination, name, NUMBER):
            return LoadResult(id, files.count, 0, 0, 0, {}, None, True, writes.wait_adopted(destination, name, NUMBER, 0))
        rows = map_rows(source_files.read_rows(spark, files, schema, given), ColumnMapping(payload, key, reference, kind), ordered_by)
    place = None if quarantine is None else f"{absolute(quarantine).rstrip('/')}/load={id}"
    with report_task_progress(spark, "checking", progress), translate_spark_errors("checking the rows"):
        total, reasons = _sort_out(rows, place)
    bad = sum(reasons.values())
    if bad and place is None:
        raise InvalidRequest(f"{_told(bad, total, reasons)}; mend them, or give a quarantine for them: nothing was loaded")
    if total > bad:
        good = rows.filter(F.col(REASON).isNull()).drop(REASON, DETAIL, RAW, FILE)
        with report_task_progress(spark, "loading", progress), translate_spark_errors("writing to the queue"):
            write(good, broker, queue, order_by=order or None, writeId=name)
    adopted = writes.wait_adopted(destination, name, NUMBER, 0)
    return LoadResult(id, files.count, total, total - bad, bad, reasons, place if bad else None, False, adopted)


def check_arguments(
    source: str | Sequence[str],
    broker: str,
    queue: str,
    *,
    format: str | None = None,
    order_by: str | Sequence[str] | None = None,
    load_id: str | None = None,
) -> None:
    """Refuse whatever of the arguments can be found wrong without a Spark."""
    StagedWriteClient(parse_broker(broker)).find(queue)
    source_files.check(source, format)
    SortOrder.parse(_columns(order_by))
    if load_id is not None and not load_id.strip():
        raise InvalidRequest("load_id is empty; give a text, or leave it out")


def _columns(order_by: str | Sequence[str] | None) -> list[str]:
    return [part.strip() for part in (order_by.split(",") if isinstance(order_by, str) else order_by or ())]


def _sort_out(rows: DataFrame, place: str | None) -> tuple[int, dict[str, int]]:
    """Count the rows, and those that are wrong by reason; the latter are written to `place`, if there is one."""
    counts = [F.count(F.lit(1)).alias("rows"), *(F.count_if(F.col(REASON) == reason).alias(reason) for reason in REASONS)]
    if place is None:
        found = rows.agg(*counts).collect()[0].asDict()
    else:
        counted = Observation()
        wrong = rows.observe(counted, *counts).filter(F.col(REASON).isNotNull())
        named = {"raw": RAW, "file": FILE, "reason": REASON, "detail": DETAIL}
        wrong.select(*(F.col(column).alias(name) for name, column in named.items())).write.mode("overwrite").json(place)
        found = counted.get
    total = int(found.pop("rows"))
    return total, {reason: int(number) for reason, number in found.items() if number}


def _told(bad: int, total: int, reasons: Map[str, int]) -> str:
    shown = ", ".join(f"{number:,} × {reason}" for reason, number in sorted(reasons.items(), key=lambda one: -one[1]))
    return f"{bad:,} of {total:,} rows cannot be items ({shown})"
