"""`penstock spark …`: the data pipeline around a queue.

Owns: the commands of that group. Each runs a job of penstock.spark and shows its result. They read and write beside the owner of the
directory, and need no owner.
Nothing here imports pyspark before a command needs it: without penstock[spark] every other command works, and these say what to install.
What can be checked without Spark is checked before it is started, because that takes ten seconds.
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, command
from penstock.cli.failures import MISSING_EXTRA, NOT_FOUND, CommandFailed
from penstock.spark.jobs.findings import findings
from penstock.spark.jobs.report_metrics import Percentiles, ReportMetrics
from penstock.spark.jobs.report_text import duration_text, share
from penstock.words.errors import BrokerLocked

group = typer.Typer(no_args_is_help=True, help="The data pipeline on Apache Spark. Needs penstock[spark].")
NAMED = 5
"""Reasons and ids that are named; the others are counted."""
NEEDED = ("pyspark", "pyarrow")
NOISE = ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "py4j")
"""Loggers of pyspark's that say on stderr what an error says too."""

MasterOption: TypeAlias = Annotated[str, typer.Option(metavar="URL", help="Where Spark runs: local[N], spark://…, sc://…")]
ConfOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.", show_default=False)
]
MASTER = "local[*]"
_MASTERS = re.compile(r"local(\[(\*|[1-9]\d*)(,\s*[1-9]\d*)?\])?|local-cluster\[\d+,\d+,\d+\]|(spark|sc|k8s)://.+|yarn")


def broker_option(session: CommandContext) -> str:
    """The broker as the data source takes it; it must be there."""
    session.require_broker()
    return json.dumps([session.target, *session.roots]) if session.roots else session.target


def check_spark(master: str, conf: Sequence[str] | None) -> dict[str, str]:
    """Spark's settings, if it is installed and can be started so."""
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
    """A Spark, for as long as the command lasts. One that runs in this process already is used, and left running."""
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
def job_progress_bar(session: CommandContext) -> Iterator["Said | None"]:
    """A bar on stderr that shows what a job says; None, so that it need say nothing, where nobody looks."""
    if not session.err.is_terminal or session.as_json:
        yield None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=session.err, transient=True) as bars:
        task = bars.add_task("starting Spark", total=None)
        yield lambda what, done, total: bars.update(task, description=escape(what), completed=done, total=total or None)


# -- load, archive, redrive ---------------------------------------------------------------------------


@command(group, "load")
def load(
    session: CommandContext,
    queue: QueueArgument,
    source: Annotated[list[str], typer.Argument(metavar="SOURCE…", help="Files or folders of Parquet, CSV or JSON lines.")],
    format: Annotated[
        str | None, typer.Option(metavar="parquet|csv|json", help="What they are; by their names unless given.", show_default=False)
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload-column", metavar="NAME", help="The column that is the payload; else 'payload', else the whole row as JSON."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key-column", metavar="NAME", help="… that is the key.", show_default=False)] = None,
    reference: Annotated[
        str | None, typer.Option("--reference-column", metavar="NAME", help="… that is the reference.", show_default=False)
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="TEXT", help="A kind for all items.", show_default=False)] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="DDL", help="Columns and types, such as 'id long, amount double'.", show_default=False)
    ] = None,
    order_by: Annotated[
        str | None,
        typer.Option(metavar="COLUMNS", help="What the items of a key are ordered by, such as 'ts, n desc'.", show_default=False),
    ] = None,
    quarantine: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where rows go that cannot be items; without it one refuses all.", show_default=False)
    ] = None,
    load_id: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the load is known by; else the files' names, sizes and times.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of Spark's reader; may be repeated.", show_default=False)
    ] = None,
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Load files into a queue, a row an item, all or none; the same load again adds nothing."""
    broker = broker_option(session)
    options = option_values.parse_pairs(option or (), "--option", "sep=;")
    missing = next((path for path in source if "://" not in path and not set("*?[{") & set(path) and not os.path.lexists(path)), None)
    if missing is not None:
        raise CommandFailed(f"there is no {missing!r:.200}; mend the path", NOT_FOUND)
    check_spark(master, conf)
    from penstock.spark.jobs import load as job

    job.check_arguments(source, broker, queue, format=format, order_by=order_by, load_id=load_id)
    with job_progress_bar(session) as said, open_spark(master, conf) as spark:
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
            progress=said,
        )
    if not found.adopted:
        with suppress(BrokerLocked), session.broker():  # nobody owns it: whoever opens it takes in what waits
            found = msgspec.structs.replace(found, adopted=True)
    more = []
    if found.repeated:
        text = f"{text_output.format_count(found.files, 'file')} loaded before (load {found.load_id}); nothing was added"
        more = ["To load the same files once more, or with other columns or options, give another --load-id."]
    else:
        text = f"{text_output.format_count(found.items, 'item')} loaded from {text_output.format_count(found.files, 'file')} (load {found.load_id})"
    if found.quarantined:
        more = [f"{text_output.format_count(found.quarantined, 'row')} quarantined in {found.quarantine}:"]
    session.print_answer(msgspec.to_builtins(found), text, *more, *(f"  {number:,} × {reason}" for reason, number in found.reasons.items()))


@command(group, "archive")
def archive(
    session: CommandContext,
    queue: QueueArgument,
    path: Annotated[str, typer.Argument(metavar="DIR", help="The archive; made when it is not there.")],
    table: Annotated[str, typer.Option(metavar="items|events", help="What was produced, or what happened.")] = "items",
    cursor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The cursor that keeps retention from what is not archived; one of this archive's own unless given, '' for none.",
            show_default=False,
        ),
    ] = None,
    max_items: Annotated[
        int | None, typer.Option("--max-items-per-batch", metavar="N", help="So many in one micro-batch at most.", show_default=False)
    ] = None,
    allow_loss: Annotated[bool, typer.Option("--allow-loss", help="Go on past what retention took before it was archived.")] = False,
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Add to an archive of Parquet files what a queue's log holds and the archive does not, exactly once."""
    broker = broker_option(session)
    if max_items is not None and max_items < 1:
        raise CommandFailed(f"--max-items-per-batch is {max_items}; give 1 or more")
    check_spark(master, conf)
    from penstock.spark.jobs import archive as job

    job.check_arguments(broker, queue, path, table=table, cursor=cursor, max_items_per_batch=max_items)
    with job_progress_bar(session) as said, open_spark(master, conf) as spark:
        found = job.archive(
            spark,
            broker,
            queue,
            path,
            table=table,
            cursor=cursor,
            max_items_per_batch=max_items,
            fail_on_data_loss=not allow_loss,
            progress=said,
        )
    rows = text_output.format_count(found.rows, table.removesuffix("s"))
    text = f"{rows} archived in {text_output.format_count(found.files, 'file')} ({text_output.format_size(found.size_bytes)}); {found.total_rows:,} in {found.path}"
    session.print_answer(msgspec.to_builtins(found), text)


@command(group, "redrive")
def redrive(
    session: CommandContext,
    queue: QueueArgument,
    where: Annotated[
        str,
        typer.Option(
            metavar="SQL",
            help="Which: a predicate over table dead, payload_text and payload_json, such as 'cast(payload_json:id AS int) = 1'; "
            "'true' for all.",
        ),
    ],
    to: Annotated[str | None, typer.Option(metavar="QUEUE", help="Where they go; else where they came from.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="How many at most, the oldest first.", show_default=False)] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Send nothing; tell what would be sent.")] = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long the broker's owner may take for a thousand.")] = "30s",
    master: MasterOption = MASTER,
    conf: ConfOption = None,
) -> None:
    """Send dead letters of a queue back, chosen by a SQL predicate, each exactly once."""
    broker = broker_option(session)
    patience = option_values.parse_duration(timeout, "--timeout")
    check_spark(master, conf)
    from penstock.spark.jobs import redrive as job

    job.check_arguments(broker, queue, where, to=to, limit=limit)
    with job_progress_bar(session) as said, open_spark(master, conf) as spark:
        found = job.redrive(spark, broker, queue, where, to=to, limit=limit, preview=preview, timeout=float(patience), progress=said)
    there = ", ".join(f"{number:,} to {name}" for name, number in found.to.items())
    if preview:
        text = f"{text_output.format_count(found.chosen, 'dead letter')} would go{f': {there}' if there else ''}"
    else:
        text = f"{text_output.format_count(found.items, 'dead letter')} sent{f': {there}' if there else ''}"
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
        session.print_note(f"{text_output.format_count(found.chosen - found.items, 'letter')} changed meanwhile and did not go{named}")
    session.print_answer(msgspec.to_builtins(found), text, *reasons, *sample)


if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.jobs.progress import Progress as Said


# -- report ------------------------------------------------------------------------------------------

OutOption = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="FILE", help="Where to write the page; QUEUE-report.html unless given.", show_default=False),
]
SinceOption = Annotated[str | None, typer.Option(metavar="TIME", help="Only what happened from then on.", show_default=False)]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Only what happened before then.", show_default=False)]


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
    """Write a page about a queue, with plots: throughput, times, failures, keys, backlog, dead letters.

    It is one HTML file that opens without a network.
    """
    broker = broker_option(session)
    path = Path(out if out is not None else f"{queue}-report.html")
    times = {name: option_values.parse_time(text, f"--{name}") for name, text in (("since", since), ("until", until)) if text is not None}
    if path.is_dir():
        raise CommandFailed(f"--out is {str(path)!r:.200}, a directory; give the name of the file to write, such as report.html")
    if not path.parent.is_dir():
        raise CommandFailed(
            f"--out is {str(path)!r:.200}, and there is no directory {str(path.parent)!r:.200}; make it, or give another place"
        )
    if len(times) == 2 and times["since"] >= times["until"]:
        raise CommandFailed("--since is not before --until; give the earlier time as --since")
    check_spark(master, conf)
    with session.snapshot() as view:
        view.queue(queue)
    with job_progress_bar(session) as said, open_spark(master, conf) as spark:
        from penstock.spark.jobs import report as job

        figures = job.report(spark, broker, queue, path, since=times.get("since"), until=times.get("until"), progress=said)
    session.print_answer(
        report_document(figures, path),
        f"report  {path.resolve()}",
        "",
        text_output.format_pairs(figure_pairs(figures)),
        "",
        *map(text_output.printable, findings(figures)),
    )


def report_document(figures: ReportMetrics, path: Path) -> dict[str, Any]:
    """All figures, for a program."""
    found: dict[str, Any] = msgspec.to_builtins(figures)
    return {"report": str(path.resolve()), **found, "imbalance": figures.imbalance, "findings": findings(figures)}


def figure_pairs(figures: ReportMetrics) -> list[tuple[str, str]]:
    """The figures that matter most, for a person."""
    failed = f"{figures.failed:,} ({share(figures.failed, figures.settled)} of all attempts)" if figures.failed else "0"
    return [
        ("produced", f"{figures.produced:,}"),
        ("completed", f"{figures.completed:,}"),
        ("not completed", failed),
        ("waiting", _spread(figures.waiting)),
        ("handling", _spread(figures.handling)),
        ("ready now", f"{figures.ready:,}" + (f", the oldest for {duration_text(figures.age.worst)}" if figures.ready else "")),
        ("dead letters now", f"{figures.dead_letters:,}"),
    ]


def _spread(spread: Percentiles) -> str:
    return f"p50 {duration_text(spread.p50)}, p90 {duration_text(spread.p90)}, p99 {duration_text(spread.p99)}" if spread.count else ""
