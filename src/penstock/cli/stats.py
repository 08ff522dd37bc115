"""`penstock stats` and `penstock watch`: how many items are in which state, once or as they change.

Owns: those commands. They use a view: they take no lock and change nothing. `watch` also shows how fast items come and go.
"""

from collections.abc import Iterator
from datetime import datetime
from threading import Event
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from penstock.api._sync.broker import Broker
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext, terminal_text
from penstock.cli.command_tree import command, queue_names
from penstock.cli.failures import CommandFailed
from penstock.cli.queues import all_queues
from penstock.reports import PartitionStats, QueueStats
from penstock.words.clock import SECOND, Moment, SystemClock
from penstock.words.values import timestamp

RATES = ("in/s", "done/s")
SHORTEST = 0.1
COUNTS = ("ready", "scheduled", "leased", "buried", "moving", "completed", "produced")
SPARE = ("moving", "produced", "oldest", "buried", "completed")
"""What can be done without where there is no room."""


def register(app: typer.Typer) -> None:
    command(app, "stats")(stats)
    command(app, "watch")(watch)


# -- stats -------------------------------------------------------------------------------------------


def stats(
    session: CommandContext,
    queue: Annotated[
        str | None, typer.Argument(metavar="QUEUE", help="This queue, by partition; all unless given.", autocompletion=queue_names)
    ] = None,
) -> None:
    """How many items are in which state, and what needs attention."""
    with session.snapshot() as broker:
        if queue is not None:
            one = broker.queue(queue).stats()
            session.print_answer(text_output.stats_document(one), *_queue_parts(one))
            return
        found = [broker.queue(info.name).stats() for info in all_queues(broker)]
    warnings = [f"{one.name}: {warning}" for one in found for warning in one.warnings]
    session.print_answer(
        [text_output.stats_document(one) for one in found],
        *([queues_table(found), *_warned(warnings)] if found else ["there are no queues"]),
    )


def queues_table(found: list[QueueStats]) -> text_output.TextTable:
    """Queues, one a row."""
    rows = [(one.name, *(text_output.format_number(getattr(one, name)) for name in COUNTS), oldest(one)) for one in found]
    return text_output.TextTable(("queue", *COUNTS, "oldest"), rows, right=(*COUNTS, "oldest"), uncut=("queue",), optional=SPARE)


def oldest(one: QueueStats) -> str:
    """How long the item has been ready that has been so the longest."""
    return text_output.format_duration(max((part.oldest_ready_seconds for part in one.partitions), default=0.0) or None)


def _queue_parts(one: QueueStats) -> list[text_output.TextTable | str]:
    headings = ("partition", "status", *COUNTS, "oldest", "size")
    table = text_output.TextTable(
        headings, [_partition_row(part) for part in one.partitions], right={*headings} - {"status"}, optional=SPARE
    )
    facts = [
        ("consumers", ", ".join(f"{name or 'unnamed'} ({count:,})" for name, count in one.consumers.items())),
        ("waiting", _waiting(one)),
        ("transfers", text_output.format_count(one.transfers, "batch", "batches") + " on the way" if one.transfers else ""),
        ("resizing", text_output.format_count(len(one.resizing), "fence") + " left" if one.resizing else ""),
    ]
    more = text_output.format_pairs(facts)
    return [queues_table([one]), "", table, *(["", more] if more else []), *_warned(one.warnings)]


def _partition_row(part: PartitionStats) -> tuple[str, ...]:
    paused = [side for side, is_paused in (("lease", part.paused_lease), ("produce", part.paused_produce)) if is_paused]
    status = part.status + (f" ({' and '.join(paused)} paused)" if paused else "")
    counts = (text_output.format_number(getattr(part, name)) for name in COUNTS)
    return (
        str(part.partition),
        status,
        *counts,
        text_output.format_duration(part.oldest_ready_seconds or None),
        text_output.format_size(part.size_bytes),
    )


def _waiting(one: QueueStats) -> str:
    parts = [(one.waiting_consumers, "consumer"), (one.waiting_producers, "producer")]
    return ", ".join(text_output.format_count(count, name) for count, name in parts if count)


def _warned(warnings: list[str]) -> list[str]:
    return [f"! {text_output.printable(warning)}" for warning in warnings]


# -- watch -------------------------------------------------------------------------------------------


class StatsSample:
    """What one look saw, and how fast things moved since the look before."""

    def __init__(self, at: Moment, queues: list[QueueStats], before: "StatsSample | None" = None) -> None:
        self.at = at
        self.queues = queues
        seconds = 0.0 if before is None else (at.elapsed - before.at.elapsed) / SECOND
        known = {} if before is None else {one.name: one for one in before.queues}
        self.rates = {one.name: _rates(known.get(one.name), one, seconds) for one in queues}

    def table(self) -> text_output.TextTable:
        rows = [
            (one.name, *(text_output.format_number(getattr(one, name)) for name in COUNTS), oldest(one), *self._shown(one))
            for one in self.queues
        ]
        return text_output.TextTable(
            ("queue", *COUNTS, "oldest", *RATES), rows, right=(*COUNTS, "oldest", *RATES), uncut=("queue",), optional=SPARE
        )

    def _shown(self, one: QueueStats) -> list[str]:
        return [text_output.NO_VALUE if rate is None else f"{rate:,.0f}" for rate in self.rates[one.name]]

    def document(self) -> text_output.Document:
        queues = []
        for one in self.queues:
            came, done = self.rates[one.name]
            queues.append({**text_output.stats_document(one), "produced_per_second": came, "completed_per_second": done})
        return {"at": text_output.iso_time(self.at.wall), "queues": queues}

    @property
    def wall(self) -> datetime:
        return timestamp(self.at.wall)

    @property
    def warnings(self) -> list[str]:
        return [f"! {one.name}: {text_output.printable(warning)}" for one in self.queues for warning in one.warnings]


def _rates(before: QueueStats | None, now: QueueStats, seconds: float) -> tuple[float | None, float | None]:
    """Items a second that came, and that were completed. Retention lets completed ones go: then that is not known."""
    if before is None or seconds <= 0:
        return None, None
    done = now.completed - before.completed
    return max(0, now.produced - before.produced) / seconds, done / seconds if done >= 0 else None


def watch(
    session: CommandContext,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE…", help="Those queues; all unless given.", autocompletion=queue_names)
    ] = None,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="How often to look.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Watch queues change; Ctrl-C ends it. With --json each look is a line."""
    pause = option_values.parse_duration(interval, "--interval")
    if pause < SHORTEST:
        raise CommandFailed(f"--interval is {interval!r}; give {SHORTEST}s or more")
    with session.snapshot() as broker:
        looks = _looks(session, broker, queues, pause)
        if once:
            _tell(session, next(looks))
        elif session.as_json or not session.out.is_terminal:
            for look in looks:
                _tell(session, look)
        else:
            with Live(console=session.out, auto_refresh=False) as live:
                for look in looks:
                    live.update(_drawn(look, session.out.width), refresh=True)


def _looks(session: CommandContext, broker: Broker, names: list[str] | None, pause: float) -> Iterator[StatsSample]:
    """One look after the other, for ever."""
    look: StatsSample | None = None
    while True:
        found = [broker.queue(name).stats() for name in names or [info.name for info in all_queues(broker)]]
        look = StatsSample(SystemClock().read(), found, look)
        yield look
        Event().wait(pause)
        session.refresh()


def _tell(session: CommandContext, look: StatsSample) -> None:
    session.print_next_answer(look.document(), *_parts(look))


def _parts(look: StatsSample) -> list[text_output.TextTable | str]:
    return [text_output.format_time(look.wall), look.table() if look.queues else "there are no queues", *look.warnings]


def _drawn(look: StatsSample, width: int) -> Group:
    body = terminal_text(look.table(), width) if look.queues else Text("there are no queues")
    return Group(
        Text(f"{text_output.format_time(look.wall)}   Ctrl-C ends", style="dim"),
        body,
        *(Text(line, style="yellow") for line in look.warnings),
    )
