"""`penstock spark report`: a page about how a queue does.

Owns: that command. Spark and the plots are loaded when it runs, not before.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli import reading, show
from penstock.cli.commands import QueueArgument, command
from penstock.cli.failures import Failed
from penstock.cli.session import Session
from penstock.cli.sparking import MASTER, ConfOption, MasterOption, bar, broker_of, ready, running
from penstock.spark.jobs.figures import ReportFigures, Spread
from penstock.spark.jobs.findings import findings
from penstock.spark.jobs.wording import share, span

OutOption = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="FILE", help="Where to write the page; QUEUE-report.html unless given.", show_default=False),
]
SinceOption = Annotated[str | None, typer.Option(metavar="TIME", help="Only what happened from then on.", show_default=False)]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Only what happened before then.", show_default=False)]


def register(group: typer.Typer) -> None:
    command(group, "report")(report)


def report(
    session: Session,
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
    broker = broker_of(session)
    path = Path(out if out is not None else f"{queue}-report.html")
    times = {name: reading.instant(text, f"--{name}") for name, text in (("since", since), ("until", until)) if text is not None}
    if path.is_dir():
        raise Failed(f"--out is {str(path)!r:.200}, a directory; give the name of the file to write, such as report.html")
    if not path.parent.is_dir():
        raise Failed(f"--out is {str(path)!r:.200}, and there is no directory {str(path.parent)!r:.200}; make it, or give another place")
    if len(times) == 2 and times["since"] >= times["until"]:
        raise Failed("--since is not before --until; give the earlier time as --since")
    ready(master, conf)
    with session.view() as view:
        view.queue(queue)
    with bar(session) as said, running(master, conf) as spark:
        from penstock.spark.jobs import report as job

        figures = job.report(spark, broker, queue, path, since=times.get("since"), until=times.get("until"), progress=said)
    session.answer(
        document(figures, path), f"report  {path.resolve()}", "", show.facts(facts(figures)), "", *map(show.printable, findings(figures))
    )


def document(figures: ReportFigures, path: Path) -> dict[str, Any]:
    """All figures, for a program."""
    found: dict[str, Any] = msgspec.to_builtins(figures)
    return {"report": str(path.resolve()), **found, "imbalance": figures.imbalance, "findings": findings(figures)}


def facts(figures: ReportFigures) -> list[tuple[str, str]]:
    """The figures that matter most, for a person."""
    failed = f"{figures.failed:,} ({share(figures.failed, figures.settled)} of all attempts)" if figures.failed else "0"
    return [
        ("produced", f"{figures.produced:,}"),
        ("completed", f"{figures.completed:,}"),
        ("not completed", failed),
        ("waiting", _spread(figures.waiting)),
        ("handling", _spread(figures.handling)),
        ("ready now", f"{figures.ready:,}" + (f", the oldest for {span(figures.age.worst)}" if figures.ready else "")),
        ("dead letters now", f"{figures.dead_letters:,}"),
    ]


def _spread(spread: Spread) -> str:
    return f"p50 {span(spread.p50)}, p90 {span(spread.p90)}, p99 {span(spread.p99)}" if spread.count else ""
