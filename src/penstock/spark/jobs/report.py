"""The report: how a queue does, as one HTML page that opens without a network.

Owns: `report`. It reads the tables of the data source `penstock` (no lock, only what is durable), has the figures computed in Spark
(measure.py), and writes the page (page.py) in one piece.
"""

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.reports import QueueDescription
from penstock.spark.broker_access import parse_broker
from penstock.spark.jobs import charts, event_durations, page
from penstock.spark.jobs.progress import Progress, translate_spark_errors
from penstock.spark.jobs.report_metrics import STAGES, ReportMetrics
from penstock.spark.jobs.report_queries import ReportRequest, ReportTables, compute_metrics
from penstock.spark.queue_tables import QueueTables
from penstock.spark.source import NAME, register
from penstock.words import values
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import InvalidRequest

COLUMNS = {
    "events": event_durations.EVENT_COLUMNS,
    "items": ("partition", "offset", "key", "produced_at"),
    "state": ("partition", "offset", "state", "produced_at"),
    "dead": ("reason", "buried_at"),
}


def report(
    spark: SparkSession,
    broker: str | os.PathLike[str],
    queue: str,
    path: str | os.PathLike[str],
    *,
    since: datetime | float | None = None,
    until: datetime | float | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> ReportMetrics:
    """Write a page about a queue to `path`, and give the figures on it.

    since, until: only what happened from the one and before the other; the backlog and dead letters are those of now in any case.
    progress: told what is being done, and how much of all is done.
    """
    charts.require_matplotlib()
    begin, end = _range(since, until)
    place = _writable(Path(path))
    target = os.fspath(broker)
    info = _found(target, queue)
    register(spark)
    tables = ReportTables(**{name: _table(spark, target, queue, name) for name in COLUMNS})
    frame = ReportRequest(queue, (clock or SystemClock()).read().wall, list(info.active), begin, end)
    with translate_spark_errors(f"the report on {queue!r}"):
        figures = compute_metrics(tables, frame, _teller(progress))
    _write(place, page.render(figures))
    return figures


def _teller(progress: Progress | None) -> Callable[[str], None]:
    stages = [*STAGES]
    return lambda title: progress(title, stages.index(title), len(stages)) if progress is not None else None


def _range(since: datetime | float | None, until: datetime | float | None) -> tuple[int | None, int | None]:
    begin = None if since is None else values.instant(since, "since")
    end = None if until is None else values.instant(until, "until")
    if begin is not None and end is not None and begin >= end:
        raise InvalidRequest("since is not before until; give the earlier time as since")
    return begin, end


def _found(target: str, queue: str) -> QueueDescription:
    with QueueTables.open(parse_broker(target)) as tables:
        return tables.find(queue)


def _table(spark: SparkSession, target: str, queue: str, table: str) -> DataFrame:
    """What retention takes while it is read is left out: a report of the rest is better than none."""
    given = {"broker": target, "queue": queue, "table": table, "columns": ",".join(COLUMNS[table]), "failOnDataLoss": "false"}
    return spark.read.format(NAME).options(**given).load()


def _writable(path: Path) -> Path:
    """Found out before the work, not after it."""
    if path.is_dir():
        raise InvalidRequest(f"{str(path)!r} is a directory; give the name of the file to write, such as report.html")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no directory {str(path.parent)!r}; make it, or give another place for the report")
    return path


def _write(path: Path, text: str) -> None:
    """Whole or not at all: whoever looks meanwhile sees the page that was there before."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        aside.write_text(text, "utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise InvalidRequest(f"the report cannot be written to {str(path)!r} ({error.strerror}); give another place") from error
