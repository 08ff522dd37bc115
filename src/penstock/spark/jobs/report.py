"""The job `report`: writes an HTML page about a queue, which opens without a network.

Owns: `report`. It reads the tables of the data source `penstock` (without a lock, only what is published), computes the
metrics in Spark (report_queries.py), and writes the page (page.py) as one file.
"""

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

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
    "state": ("partition", "offset", "state", "produced_at", "ready_at"),
    "dead": ("reason", "buried_at"),
}


def report(
    spark: SparkSession,
    broker: str | os.PathLike[str],
    queue: str,
    path: str | os.PathLike[str],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> ReportMetrics:
    """Write a page about a queue to `path`; gives its metrics.

    since, until: only events in this time. Backlog, scheduled items and dead letters are always those of now.
    progress: called with the current step, its number and the number of steps.
    """
    charts.require_matplotlib()
    begin, end = _range(since, until)
    destination = _writable(Path(path))
    directory = os.fspath(broker)
    with QueueTables.open(parse_broker(directory)) as queues:
        info = queues.find(queue)
    register(spark)
    tables = ReportTables(**{name: _table(spark, directory, queue, name) for name in COLUMNS})
    request = ReportRequest(queue, (clock or SystemClock()).read().wall, list(info.active), begin, end)
    with translate_spark_errors(f"the report on {queue!r}"):
        metrics = compute_metrics(tables, request, _step_reporter(progress))
    _write(destination, page.render(metrics))
    return metrics


def _step_reporter(progress: Progress | None) -> Callable[[str], None]:
    stages = [*STAGES]
    return lambda title: progress(title, stages.index(title), len(stages)) if progress is not None else None


def _range(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    begin = None if since is None else values.instant(since, "since")
    end = None if until is None else values.instant(until, "until")
    if begin is not None and end is not None and begin >= end:
        raise InvalidRequest("since is not before until; give the earlier time as since")
    return begin, end


def _table(spark: SparkSession, broker: str, queue: str, table: str) -> DataFrame:
    """A table of the queue. Rows that retention removes while they are read are left out, without an error."""
    given = {"broker": broker, "queue": queue, "table": table, "columns": ",".join(COLUMNS[table]), "failOnDataLoss": "false"}
    return spark.read.format(NAME).options(**given).load()


def _writable(path: Path) -> Path:
    """The path; InvalidRequest if no file can be written there. Called before Spark starts to compute."""
    if path.is_dir():
        raise InvalidRequest(f"{str(path)!r} is a directory; give the name of the file to write, such as report.html")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no directory {str(path.parent)!r}; make it, or give another path for the report")
    return path


def _write(path: Path, text: str) -> None:
    """Write the page by a rename: a reader sees the old or the new page, never a part."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidRequest(f"the report cannot be written to {str(path)!r} ({error.strerror}); give another path") from error
