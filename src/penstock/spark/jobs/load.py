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
from pyspark.sql.types import StringType

from penstock.spark.broker_access import parse_broker
from penstock.spark.jobs import source_files
from penstock.spark.jobs.order_columns import ColumnKinds, order_column, sort_column, sort_type, value_kind
from penstock.spark.jobs.progress import Progress, report_task_progress, translate_spark_errors
from penstock.spark.jobs.row_mapping import DETAIL, RAW, REASON, REASONS, ColumnMapping, map_rows
from penstock.spark.jobs.source_files import FILE, absolute
from penstock.spark.routing import write
from penstock.spark.sort_order import SortOrder, order_terms
from penstock.spark.source import register
from penstock.spark.staging import StagedWriteClient
from penstock.words.errors import InvalidRequest
from penstock.words.sources import LOAD, MAX_SOURCE_LENGTH

NUMBER = 1
"""The number of the write: a load's source has only one."""


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
        defined. Without a schema, texts of CSV and JSON are sorted as the numbers or times that they are.
    quarantine: a folder for rows that cannot be items. `load=<id>/` in it gets JSON lines of raw row, file, reason
        and detail.
    load_id: identifies the load; derived from the files' names, sizes and times unless given. The other arguments are
        not part of it: to load the same files with another key or other options, give another id.
    options: options of Spark's reader, such as {"sep": ";"}.
    """
    check_arguments(source, broker, queue, format=format, order_by=order_by, load_id=load_id)
    writes = StagedWriteClient(parse_broker(broker))
    destination = writes.find(queue)
    order = SortOrder.parse(order_terms(order_by))
    given = {name: str(value) for name, value in (options or {}).items()}
    register(spark)
    with report_task_progress(spark, "listing the files", progress):
        files = source_files.find_files(spark, source, format)
        id = load_id or files.id
        name = f"{LOAD}{id}"
        if writes.is_published(destination, name, NUMBER):
            return LoadResult(id, files.count, 0, 0, 0, {}, None, True, writes.wait_adopted(destination, name, NUMBER, 0))
        read = source_files.read_rows(spark, files, schema, given)
        rows = map_rows(read, ColumnMapping(payload, key, reference, kind), order.columns)
        order.check(read.schema)
    texts = [] if schema is not None else _text_columns(read, order, files.format)
    folder = None if quarantine is None else f"{absolute(quarantine).rstrip('/')}/load={_file_name(id)}"
    with report_task_progress(spark, "checking", progress), translate_spark_errors("checking the rows"):
        total, reasons, kinds = _quarantine(rows, folder, texts, files.format == "json")
    bad = sum(reasons.values())
    if bad and folder is None:
        raise InvalidRequest(f"{_bad_rows(bad, total, reasons)}; fix them, or give a quarantine for them: nothing was loaded")
    types = {number: sort_type(order.columns[number], found) for number, found in kinds.items()}
    if total > bad:
        good = rows.filter(F.col(REASON).isNull()).drop(REASON, DETAIL, RAW, FILE)
        good = good.withColumns({order_column(number): sort_column(F.col(order_column(number)), kind) for number, kind in types.items()})
        ways = [f"{order_column(number)} {way.removesuffix('ending')}" for number, way in enumerate(order.directions)]
        with report_task_progress(spark, "loading", progress), translate_spark_errors("writing to the queue"):
            write(good, broker, queue, order_by=ways or None, writeId=name)
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
    most = MAX_SOURCE_LENGTH - len(LOAD)
    if load_id is not None and len(load_id) > most:
        raise InvalidRequest(f"load_id has {len(load_id):,} characters; give at most {most}")


def _file_name(id: str) -> str:
    """An id as the name of a folder: without a slash, different for different ids."""
    return id.replace("%", "%25").replace("/", "%2F")


def _text_columns(read: DataFrame, order: SortOrder, format: str) -> list[int]:
    """The terms of the order whose columns are texts only because the format has no types."""
    typed = format == "parquet"
    return [] if typed else [number for number, name in enumerate(order.columns) if isinstance(read.schema[name].dataType, StringType)]


def _quarantine(
    rows: DataFrame, folder: str | None, texts: Sequence[int], json: bool
) -> tuple[int, dict[str, int], dict[int, ColumnKinds]]:
    """Count all rows, and the bad ones by reason; write the bad ones to `folder`, if one is given.

    Also find the kinds of values that good rows have in columns of the order: in those of the terms `texts`.
    """
    counts = [F.count(F.lit(1)).alias("rows"), *(F.count_if(F.col(REASON) == reason).alias(reason) for reason in REASONS)]
    for number in texts:
        value = F.col(order_column(number))
        kind = F.when(F.col(REASON).isNull(), value_kind(value, json))
        found_kinds = {"kinds": F.coalesce(F.bit_or(kind), F.lit(0)), "lowest": F.min_by(value, kind), "highest": F.max_by(value, kind)}
        counts += [column.alias(f"{order_column(number)}_{name}") for name, column in found_kinds.items()]
    if folder is None:
        found = rows.agg(*counts).collect()[0].asDict()
    else:
        counted = Observation()
        wrong = rows.observe(counted, *counts).filter(F.col(REASON).isNotNull())
        named = {"raw": RAW, "file": FILE, "reason": REASON, "detail": DETAIL}
        wrong.select(*(F.col(column).alias(name) for name, column in named.items())).write.mode("overwrite").json(folder)
        found = counted.get
    kinds = {number: ColumnKinds(*(found.pop(f"{order_column(number)}_{name}") for name in ColumnKinds._fields)) for number in texts}
    total = int(found.pop("rows"))
    return total, {reason: int(number) for reason, number in found.items() if number}, kinds


def _bad_rows(bad: int, total: int, reasons: Mapping[str, int]) -> str:
    shown = ", ".join(f"{number:,} × {reason}" for reason, number in sorted(reasons.items(), key=lambda one: -one[1]))
    return f"{bad:,} of {total:,} rows cannot be items ({shown})"
