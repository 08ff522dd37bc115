"""`penstock stats` and `penstock watch`: how many items are in each state, once or repeatedly.

Owns: those commands. They only look: they never become the owner and change nothing. Both show which process owns the
directory and which ones are its clients; `watch` also shows how many items are produced and completed per second.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from threading import Event
from typing import Annotated, TypeAlias

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from penstock.api._sync.broker import Broker
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.failures import CommandFailed
from penstock.cli.owner import SeenOwner
from penstock.cli.queues import all_queues
from penstock.reports import PartitionStats, QueueStats
from penstock.words.clock import SECOND, Moment, SystemClock
from penstock.words.values import timestamp

RATES = ("in/s", "done/s")
SHORTEST_INTERVAL = 0.1
COUNTS = ("ready", "scheduled", "leased", "buried", "moving", "completed", "produced")
OPTIONAL = ("moving", "produced", "oldest", "buried", "completed")
"""Columns that are dropped on a narrow terminal."""
NO_QUEUES = "there are no queues"
Rates: TypeAlias = tuple[float | None, float | None]
"""Items produced and completed per second; None if not known."""

group = typer.Typer()


# -- stats -------------------------------------------------------------------------------------------


@command(group, "stats")
def stats(
    session: CommandContext,
    queue: Annotated[
        str | None,
        typer.Argument(metavar="QUEUE", help="Show this queue by partition; without it, all queues.", autocompletion=queue_names),
    ] = None,
) -> None:
    """Show how many items are in each state, and warnings."""
    with session.view() as broker:
        if queue is not None:
            one, owner = broker.queue(queue).stats(), SeenOwner.of(session)
            session.print_answer({**text_output.stats_document(one), "owner": owner.document()}, *_queue_parts(one, owner))
            return
        found, owner = [broker.queue(info.name).stats() for info in all_queues(broker)], SeenOwner.of(session)
    warnings = [f"{one.name}: {warning}" for one in found for warning in one.warnings]
    session.print_answer(
        {"owner": owner.document(), "queues": [text_output.stats_document(one) for one in found]},
        *(queues_table(found) if found else NO_QUEUES, "", *owner.lines(), *_warning_lines(warnings)),
    )


def queues_table(found: list[QueueStats], rates: Mapping[str, Rates] | None = None) -> text_output.TextTable:
    """A row for each queue; with `rates`, also the rates by queue name."""
    more = ("oldest", *(() if rates is None else RATES))
    rows = [
        (
            one.name,
            *(text_output.format_number(getattr(one, name)) for name in COUNTS),
            oldest(one),
            *(text_output.NO_VALUE if rate is None else f"{rate:,.0f}" for rate in (rates[one.name] if rates is not None else ())),
        )
        for one in found
    ]
    return text_output.TextTable(("queue", *COUNTS, *more), rows, right=(*COUNTS, *more), uncut=("queue",), optional=OPTIONAL)


def oldest(one: QueueStats) -> str:
    """How long the oldest ready item of a queue has been ready."""
    return text_output.format_duration(max((part.oldest_ready_seconds for part in one.partitions), default=0.0) or None)


def _queue_parts(one: QueueStats, owner: SeenOwner) -> list[text_output.TextTable | str]:
    headings = ("partition", "status", *COUNTS, "oldest", "size")
    table = text_output.TextTable(
        headings, [_partition_row(part) for part in one.partitions], right={*headings} - {"status"}, optional=OPTIONAL
    )
    facts = [
        ("consumers", ", ".join(f"{name or 'unnamed'} ({count:,})" for name, count in one.consumers.items())),
        ("waiting", _waiting(one)),
        ("cancelled", text_output.format_count(one.cancelled, "item") if one.cancelled else ""),
        ("transfers", text_output.format_count(one.transfers, "batch", "batches") + " under way" if one.transfers else ""),
        ("resizing", text_output.format_count(len(one.resizing), "fence") + " left" if one.resizing else ""),
    ]
    more = text_output.format_pairs(facts)
    return [queues_table([one]), "", table, *(["", more] if more else []), "", *owner.lines(), *_warning_lines(one.warnings)]


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


def _warning_lines(warnings: list[str]) -> list[str]:
    return [f"! {text_output.printable(warning)}" for warning in warnings]


# -- watch -------------------------------------------------------------------------------------------


class StatsSample:
    """The statistics of queues at one time, and the rates since the sample before."""

    def __init__(self, at: Moment, owner: SeenOwner, queues: list[QueueStats], before: "StatsSample | None" = None) -> None:
        self.at = at
        self.owner = owner
        self.queues = queues
        seconds = 0.0 if before is None else (at.elapsed - before.at.elapsed) / SECOND
        known = {} if before is None else {one.name: one for one in before.queues}
        self.rates = {one.name: _rates(known.get(one.name), one, seconds) for one in queues}

    def table(self) -> text_output.TextTable:
        return queues_table(self.queues, self.rates)

    def document(self) -> text_output.Document:
        queues = []
        for one in self.queues:
            produced, completed = self.rates[one.name]
            queues.append({**text_output.stats_document(one), "produced_per_second": produced, "completed_per_second": completed})
        return {"at": text_output.iso_time(self.at.wall), "owner": self.owner.document(), "queues": queues}

    @property
    def wall(self) -> datetime:
        return timestamp(self.at.wall)

    @property
    def warnings(self) -> list[str]:
        return [f"! {one.name}: {text_output.printable(warning)}" for one in self.queues for warning in one.warnings]


def _rates(before: QueueStats | None, now: QueueStats, seconds: float) -> Rates:
    """Items produced and completed per second. The second is None if retention deleted completed items meanwhile."""
    if before is None or seconds <= 0:
        return None, None
    done = now.completed - before.completed
    return max(0, now.produced - before.produced) / seconds, done / seconds if done >= 0 else None


@command(group, "watch")
def watch(
    session: CommandContext,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE…", help="Show only these queues.", autocompletion=queue_names)
    ] = None,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="The time between two samples.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Print one sample and end.")] = False,
) -> None:
    """Show the statistics of queues repeatedly, until Ctrl-C. With --json each sample is one line."""
    pause = option_values.parse_duration(interval, "--interval")
    if pause < SHORTEST_INTERVAL:
        raise CommandFailed(f"--interval is {interval!r}; give {SHORTEST_INTERVAL}s or more")
    with session.view() as broker:
        samples = _samples(session, broker, queues, pause)
        if once:
            _print_sample(session, next(samples))
        elif session.as_json or not session.out.is_terminal:
            for sample in samples:
                _print_sample(session, sample)
        else:
            with session.display(), Live(console=session.out, auto_refresh=False) as live:
                for sample in samples:
                    live.update(_live_view(sample, session.out.width), refresh=True)


def _samples(session: CommandContext, broker: Broker, names: list[str] | None, pause: float) -> Iterator[StatsSample]:
    """Take samples without end."""
    sample: StatsSample | None = None
    while True:
        found = [broker.queue(name).stats() for name in names or [info.name for info in all_queues(broker)]]
        sample = StatsSample(SystemClock().read(), SeenOwner.of(session), found, sample)
        yield sample
        Event().wait(pause)
        session.refresh()


def _print_sample(session: CommandContext, sample: StatsSample) -> None:
    body = sample.table() if sample.queues else NO_QUEUES
    session.print_next_answer(sample.document(), text_output.format_time(sample.wall), body, *sample.owner.lines(), *sample.warnings)


def _live_view(sample: StatsSample, width: int) -> Group:
    return Group(
        Text(f"{text_output.format_time(sample.wall)}   Ctrl-C ends", style="dim"),
        sample.table().for_terminal(width) if sample.queues else Text(NO_QUEUES),
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in sample.owner.lines()),
        *(Text(line, style="yellow") for line in sample.warnings),
    )
