"""`penstock spark …`: the data pipeline around a queue.

Owns: the commands of that group. Each runs a job of penstock.spark and prints its result. The jobs work with and
without an owner of the directory.
pyspark is imported only when a command needs it: without penstock[spark] every other command works, and these print
what to install. Arguments are checked before Spark is started, because starting it takes ten seconds.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer
from rich.markup import escape

from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, command
from penstock.cli.failures import MISSING_EXTRA, NOT_FOUND, CommandFailed
from penstock.spark.jobs.findings import findings
from penstock.spark.jobs.report_metrics import Percentiles, ReportMetrics
from penstock.spark.jobs.report_text import duration_text, share, when
from penstock.words.errors import BrokerLocked

group = typer.Typer(no_args_is_help=True, help="The data pipeline on Apache Spark. Needs penstock[spark].")
NAMED = 5
"""How many reasons and ids are printed."""
NEEDED = ("pyspark", "pyarrow")
NOISE = ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "py4j")
"""Loggers of pyspark that print to stderr what the error says too."""

MasterOption: TypeAlias = Annotated[str, typer.Option(metavar="URL", help="Where Spark runs: local[N], spark://…, sc://…")]
ConfOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; may be repeated.", show_default=False)
]
MASTER = "local[*]"
_MASTERS = re.compile(r"local(\[(\*|[1-9]\d*)(,\s*[1-9]\d*)?\])?|local-cluster\[\d+,\d+,\d+\]|(spark|sc|k8s)://.+|yarn")


def broker_option(session: CommandContext) -> str:
    """The option `broker` of the data source. Raises if there is no broker."""
    session.require_directory("Spark reads and writes the files of the server's machine")
    session.require_broker()
    return json.dumps([session.target, *session.roots]) if session.roots else session.target


def check_spark(master: str, conf: Sequence[str] | None) -> dict[str, str]:
    """Parse Spark's settings. Raises if they or the master are wrong, or if Spark is not installed."""
    settings = option_values.parse_pairs(conf or (), "--conf", "spark.driver.memory=4g")
    if not _MASTERS.fullmatch(master):
        raise CommandFailed(
            f"--master is {master!r:.100}; give local[*], local[N] for N threads, spark://HOST:PORT, sc://HOST, k8s://… or yarn"
        )
    missing = next((name for name in NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise CommandFailed(f"Spark is not installed (no module {missing}); pip install 'penstock[spark]'", MISSING_EXTRA)
    return settings


@contextmanager
def open_spark(master: str, conf: Sequence[str] | None) -> Iterator["SparkSession"]:
    """A Spark session for the duration of the command. A session that runs already is used, and not stopped."""
    settings = check_spark(master, conf)
    from penstock.spark.jobs.progress import translate_spark_errors
    from penstock.spark.session import active_session as already_running
    from penstock.spark.session import session as spark_session

    for name in NOISE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = already_running()
    with translate_spark_errors("starting Spark"):
        spark = spark_session(master=master, **settings)
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()


@contextmanager
def job_progress_bar(session: CommandContext) -> Iterator["JobProgress | None"]:
    """A progress bar on stderr; gives the function that updates it, or None if the bar is not shown."""
    with session.rich_progress() as progress:
        if progress is None:
            yield None
            return
        task = progress.add_task("starting Spark", total=None)
        yield lambda what, done, total: progress.update(task, description=escape(what), completed=done, total=total or None)


# -- load, archive, redrive ---------------------------------------------------------------------------


@command(group, "load")
def load(
    session: CommandContext,
    queue: QueueArgument,
    source: Annotated[list[str], typer.Argument(metavar="SOURCE…", help="Files or folders of Parquet, CSV or JSON lines.")],
    format: Annotated[
        str | None, typer.Option(metavar="parquet|csv|json", help="The format of the files.  [default: by their names]", show_default=False)
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload-column",
            metavar="NAME",
            help="The column with the payload.  [default: 'payload' if it exists, else the whole row as JSON]",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key-column", metavar="NAME", help="The column with the key.", show_default=False)] = None,
    reference: Annotated[
        str | None, typer.Option("--reference-column", metavar="NAME", help="The column with the reference.", show_default=False)
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="TEXT", help="The kind of all items.", show_default=False)] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="DDL", help="The columns and types, such as 'id long, amount double'.", show_default=False)
    ] = None,
    order_by: Annotated[
        str | None,
        typer.Option(metavar="COLUMNS", help="The order of the items of a key, such as 'ts, n desc'.", show_default=False),
    ] = None,
    quarantine: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write rows that cannot be items here. Without it one such row fails all.", show_default=False),
    ] = None,
    load_id: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The id of the load.  [default: from the names, sizes and times of the files]", show_default=False
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of Spark's file reader; may be repeated.", show_default=False)
    ] = None,
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Load files into a queue: one item per row, all items or none. Repeating the same load adds nothing."""
    broker = broker_option(session)
    options = option_values.parse_pairs(option or (), "--option", "sep=;")
    missing = next((path for path in source if "://" not in path and not set("*?[{") & set(path) and not os.path.lexists(path)), None)
    if missing is not None:
        raise CommandFailed(f"there is no {missing!r:.200}; fix the path", NOT_FOUND)
    check_spark(master, conf)
    from penstock.spark.jobs import load as job

    job.check_arguments(source, broker, queue, format=format, order_by=order_by, load_id=load_id)
    with job_progress_bar(session) as progress, open_spark(master, conf) as spark:
        found = job.load(
            spark,
            source,
            broker,
            queue,
            format=format,
            payload=payload,
            key=key,
            reference=reference,
            kind=kind,
            schema=schema,
            order_by=order_by,
            quarantine=quarantine,
            load_id=load_id,
            options=options,
            progress=progress,
        )
    if not found.adopted:
        with suppress(BrokerLocked), session.broker():  # opening a broker without owner adopts the published write
            found = msgspec.structs.replace(found, adopted=True)
    more = []
    files = text_output.format_count(found.files, "file")
    if found.repeated:
        text = f"{files} loaded before (load {found.load_id}); nothing was added"
        more = ["To load the same files again, or with other columns or options, give another --load-id."]
    else:
        text = f"{text_output.format_count(found.items, 'item')} loaded from {files} (load {found.load_id})"
    if found.quarantined:
        more = [f"{text_output.format_count(found.quarantined, 'row')} quarantined in {found.quarantine}:"]
    session.print_answer(msgspec.to_builtins(found), text, *more, *(f"  {number:,} × {reason}" for reason, number in found.reasons.items()))


@command(group, "archive")
def archive(
    session: CommandContext,
    queue: QueueArgument,
    path: Annotated[str, typer.Argument(metavar="DIR", help="The directory of the archive; created if it does not exist.")],
    table: Annotated[str, typer.Option(metavar="items|events", help="Which table of the queue to archive.")] = "items",
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The cursor that keeps retention from deleting unarchived items; '' for none.  [default: one for this archive]",
            show_default=False,
        ),
    ] = None,
    max_items: Annotated[
        int | None, typer.Option("--max-items-per-batch", metavar="N", help="The most items of one micro-batch.", show_default=False)
    ] = None,
    allow_loss: Annotated[bool, typer.Option("--allow-loss", help="Continue if retention deleted unarchived items.")] = False,
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Append the new items or events of a queue to an archive of Parquet files, each exactly once."""
    broker = broker_option(session)
    if max_items is not None and max_items < 1:
        raise CommandFailed(f"--max-items-per-batch is {max_items}; give 1 or more")
    check_spark(master, conf)
    from penstock.spark.jobs import archive as job

    job.check_arguments(broker, queue, path, table=table, cursor=cursor, max_items_per_batch=max_items)
    with job_progress_bar(session) as progress, open_spark(master, conf) as spark:
        found = job.archive(
            spark,
            broker,
            queue,
            path,
            table=table,
            cursor=cursor,
            max_items_per_batch=max_items,
            fail_on_data_loss=not allow_loss,
            progress=progress,
        )
    rows = text_output.format_count(found.rows, table.removesuffix("s"))
    files = f"{text_output.format_count(found.files, 'file')} ({text_output.format_size(found.size_bytes)})"
    text = f"{rows} archived in {files}; {found.total_rows:,} in {found.path}"
    session.print_answer(msgspec.to_builtins(found), text)


@command(group, "redrive")
def redrive(
    session: CommandContext,
    queue: QueueArgument,
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL",
            help="A predicate over the table dead with payload_text and payload_json, such as 'cast(payload_json:id AS int) = 1'; "
            "'true' for all.",
        ),
    ],
    to: Annotated[
        str | None, typer.Option(metavar="QUEUE", help="The queue to send them to.  [default: their origin]", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="The most dead letters, oldest first.", show_default=False)] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Send nothing; print what would be sent.")] = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for the owner and for transfers.")] = "30s",
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Send the dead letters that match a SQL predicate back to be handled again, each exactly once."""
    broker = broker_option(session)
    seconds = option_values.parse_duration(timeout, "--timeout")
    check_spark(master, conf)
    from penstock.spark.jobs import redrive as job

    job.check_arguments(broker, queue, where, to=to, limit=limit)
    with job_progress_bar(session) as progress, open_spark(master, conf) as spark:
        found = job.redrive(spark, broker, queue, where, to=to, limit=limit, preview=preview, timeout=float(seconds), progress=progress)
    counts = ", ".join(f"{number:,} to {name}" for name, number in found.to.items())
    verb = "would be sent" if preview else "sent"
    number = found.chosen if preview else found.items
    text = f"{text_output.format_count(number, 'dead letter')} {verb}{f': {counts}' if counts else ''}"
    reasons = [f"  {number:,} × {reason or 'no reason given'}" for reason, number in [*found.reasons.items()][:NAMED]]
    headings = ("queue", "id", "key", "attempts", "reason", "payload")
    rows = [
        (
            one.dead_queue,
            one.dead_id,
            one.key or text_output.NO_VALUE,
            text_output.format_number(one.attempts),
            one.reason or text_output.NO_VALUE,
            one.payload,
        )
        for one in found.sample
    ]
    sample = [text_output.TextTable(headings, rows, right=("attempts",), uncut=("queue", "id"), optional=("key",))] if rows else []
    if not preview and found.items < found.chosen:
        named = f": {', '.join(found.changed[:NAMED])}{' …' if len(found.changed) > NAMED else ''}" if found.changed else ""
        session.print_note(f"{text_output.format_count(found.chosen - found.items, 'dead letter')} changed meanwhile, not sent{named}")
    session.print_answer(msgspec.to_builtins(found), text, *reasons, *sample)


if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.jobs.progress import Progress as JobProgress


# -- report ------------------------------------------------------------------------------------------

OutOption = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="FILE", help="The file to write.  [default: QUEUE-report.html]", show_default=False),
]
SinceOption = Annotated[str | None, typer.Option(metavar="TIME", help="Only events from this time on.", show_default=False)]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Only events before this time.", show_default=False)]


@command(group, "report")
def report(
    session: CommandContext,
    queue: QueueArgument,
    out: OutOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Write a report about a queue with plots: throughput, times, failures, keys, backlog, dead letters.

    The report is one HTML file that needs no network.
    """
    broker = broker_option(session)
    path = Path(out if out is not None else f"{queue}-report.html")
    times = {name: option_values.parse_time(text, f"--{name}") for name, text in (("since", since), ("until", until)) if text is not None}
    if path.is_dir():
        raise CommandFailed(f"--out is {str(path)!r:.200}, a directory; give the name of the file to write, such as report.html")
    if not path.parent.is_dir():
        raise CommandFailed(
            f"--out is {str(path)!r:.200}, and there is no directory {str(path.parent)!r:.200}; create it, or give another path"
        )
    if len(times) == 2 and times["since"] >= times["until"]:
        raise CommandFailed("--since is not before --until; give the earlier time as --since")
    check_spark(master, conf)
    with session.snapshot() as snapshot:
        snapshot.queue(queue)
    with job_progress_bar(session) as progress, open_spark(master, conf) as spark:
        from penstock.spark.jobs import report as job

        figures = job.report(spark, broker, queue, path, since=times.get("since"), until=times.get("until"), progress=progress)
    session.print_answer(
        report_document(figures, path),
        f"report  {path.resolve()}",
        "",
        text_output.format_pairs(figure_pairs(figures)),
        "",
        *map(text_output.printable, findings(figures)),
    )


def report_document(figures: ReportMetrics, path: Path) -> dict[str, Any]:
    """All figures as a JSON document."""
    found: dict[str, Any] = msgspec.to_builtins(figures)
    return {"report": str(path.resolve()), **found, "imbalance": figures.imbalance, "findings": findings(figures)}


def figure_pairs(figures: ReportMetrics) -> list[tuple[str, str]]:
    """The most important figures as text."""
    failed = f"{figures.failed:,} ({share(figures.failed, figures.settled)} of all attempts)" if figures.failed else "0"
    return [
        ("produced", f"{figures.produced:,}"),
        ("completed", f"{figures.completed:,}"),
        ("buried", f"{figures.buried:,}"),
        ("failed attempts", failed),
        ("waiting", _spread(figures.waiting)),
        ("handling", _spread(figures.handling)),
        ("ready now", f"{figures.ready:,}" + (f", the oldest for {duration_text(figures.age.worst)}" if figures.ready else "")),
        ("scheduled now", f"{figures.scheduled:,}" + (f", the first at {when(figures.next_ready_at)}" if figures.next_ready_at else "")),
        ("dead letters now", f"{figures.dead_letters:,}"),
    ]


def _spread(spread: Percentiles) -> str:
    return f"p50 {duration_text(spread.p50)}, p90 {duration_text(spread.p90)}, p99 {duration_text(spread.p99)}" if spread.count else ""
