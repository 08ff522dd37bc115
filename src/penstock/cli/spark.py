"""`penstock spark …`: the pipeline around a queue.

Owns: the commands load, archive and redrive of that group; report is spark_report.py's. Each is a job of penstock.spark with its answer in
words. They read and write beside whoever owns the directory, and need nobody to.
"""

import os
from contextlib import suppress
from typing import Annotated

import msgspec
import typer

from penstock.cli import reading, show, spark_report
from penstock.cli.commands import QueueArgument, command
from penstock.cli.failures import NOT_FOUND, Failed
from penstock.cli.session import Session
from penstock.cli.sparking import MASTER, ConfOption, MasterOption, bar, broker_of, ready, running
from penstock.words.errors import BrokerLocked

group = typer.Typer(no_args_is_help=True, help="The data pipeline on Apache Spark. Needs penstock[spark].")
NAMED = 5
"""Reasons and ids that are named; the others are counted."""


@command(group, "load")
def load(
    session: Session,
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
    broker = broker_of(session)
    options = reading.pairs(option or (), "--option", "sep=;")
    missing = next((path for path in source if "://" not in path and not set("*?[{") & set(path) and not os.path.lexists(path)), None)
    if missing is not None:
        raise Failed(f"there is no {missing!r:.200}; mend the path", NOT_FOUND)
    ready(master, conf)
    from penstock.spark.jobs import load as job

    job.check(source, broker, queue, format=format, order_by=order_by, load_id=load_id)
    with bar(session) as said, running(master, conf) as spark:
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
        with suppress(BrokerLocked), session.owner():  # nobody owns it: whoever opens it takes in what waits
            found = msgspec.structs.replace(found, adopted=True)
    more = []
    if found.repeated:
        text = f"{show.counted(found.files, 'file')} loaded before (load {found.load_id}); nothing was added"
        more = ["To load the same files once more, or with other columns or options, give another --load-id."]
    else:
        text = f"{show.counted(found.items, 'item')} loaded from {show.counted(found.files, 'file')} (load {found.load_id})"
    if found.quarantined:
        more = [f"{show.counted(found.quarantined, 'row')} quarantined in {found.quarantine}:"]
    session.answer(msgspec.to_builtins(found), text, *more, *(f"  {number:,} × {reason}" for reason, number in found.reasons.items()))


@command(group, "archive")
def archive(
    session: Session,
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
    broker = broker_of(session)
    if max_items is not None and max_items < 1:
        raise Failed(f"--max-items-per-batch is {max_items}; give 1 or more")
    ready(master, conf)
    from penstock.spark.jobs import archive as job

    job.check(broker, queue, path, table=table, cursor=cursor, max_items_per_batch=max_items)
    with bar(session) as said, running(master, conf) as spark:
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
    rows = show.counted(found.rows, table.removesuffix("s"))
    text = f"{rows} archived in {show.counted(found.files, 'file')} ({show.size(found.size_bytes)}); {found.total_rows:,} in {found.path}"
    session.answer(msgspec.to_builtins(found), text)


@command(group, "redrive")
def redrive(
    session: Session,
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
    broker = broker_of(session)
    patience = reading.duration(timeout, "--timeout")
    ready(master, conf)
    from penstock.spark.jobs import redrive as job

    job.check(broker, queue, where, to=to, limit=limit)
    with bar(session) as said, running(master, conf) as spark:
        found = job.redrive(spark, broker, queue, where, to=to, limit=limit, preview=preview, timeout=float(patience), progress=said)
    there = ", ".join(f"{number:,} to {name}" for name, number in found.to.items())
    if preview:
        text = f"{show.counted(found.chosen, 'dead letter')} would go{f': {there}' if there else ''}"
    else:
        text = f"{show.counted(found.items, 'dead letter')} sent{f': {there}' if there else ''}"
    reasons = [f"  {number:,} × {reason or 'no reason given'}" for reason, number in [*found.reasons.items()][:NAMED]]
    headings = ("queue", "id", "key", "attempts", "reason", "payload")
    rows = [
        (one.dead_queue, one.dead_id, one.key or show.NOTHING, show.number(one.attempts), one.reason or show.NOTHING, one.payload)
        for one in found.sample
    ]
    sample = [show.Table(headings, rows, right=("attempts",), whole=("queue", "id"), spare=("key",))] if rows else []
    if not preview and found.items < found.chosen:
        named = f": {', '.join(found.changed[:NAMED])}{' …' if len(found.changed) > NAMED else ''}" if found.changed else ""
        session.note(f"{show.counted(found.chosen - found.items, 'letter')} changed meanwhile and did not go{named}")
    session.answer(msgspec.to_builtins(found), text, *reasons, *sample)


spark_report.register(group)
