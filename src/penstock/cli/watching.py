"""`penstock watch`: queues as they change.

Owns: the command. It looks again and again through a view, and shows besides the counts how fast items come and go.
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
from penstock.cli import documents, reading, show
from penstock.cli.commands import command, queue_names
from penstock.cli.failures import Failed
from penstock.cli.looking import COUNTS, SPARE, oldest
from penstock.cli.queues import all_queues
from penstock.cli.session import Session, drawn
from penstock.reports import QueueStats
from penstock.words import values
from penstock.words.clock import SECOND, Moment, SystemClock

RATES = ("in/s", "done/s")
SHORTEST = 0.1


class Look:
    """What one look saw, and how fast things moved since the look before."""

    def __init__(self, at: Moment, queues: list[QueueStats], before: "Look | None" = None) -> None:
        self.at = at
        self.queues = queues
        seconds = 0.0 if before is None else (at.elapsed - before.at.elapsed) / SECOND
        known = {} if before is None else {one.name: one for one in before.queues}
        self.rates = {one.name: _rates(known.get(one.name), one, seconds) for one in queues}

    def table(self) -> show.Table:
        rows = [(one.name, *(show.number(getattr(one, name)) for name in COUNTS), oldest(one), *self._shown(one)) for one in self.queues]
        return show.Table(("queue", *COUNTS, "oldest", *RATES), rows, right=(*COUNTS, "oldest", *RATES), whole=("queue",), spare=SPARE)

    def _shown(self, one: QueueStats) -> list[str]:
        return [show.NOTHING if rate is None else f"{rate:,.0f}" for rate in self.rates[one.name]]

    def document(self) -> documents.Document:
        queues = []
        for one in self.queues:
            came, done = self.rates[one.name]
            queues.append({**documents.stats(one), "produced_per_second": came, "completed_per_second": done})
        return {"at": documents.wall(self.at.wall), "queues": queues}

    @property
    def wall(self) -> datetime:
        return values.timestamp(self.at.wall)

    @property
    def warnings(self) -> list[str]:
        return [f"! {one.name}: {show.printable(warning)}" for one in self.queues for warning in one.warnings]


def _rates(before: QueueStats | None, now: QueueStats, seconds: float) -> tuple[float | None, float | None]:
    """Items a second that came, and that were completed. Retention lets completed ones go: then that is not known."""
    if before is None or seconds <= 0:
        return None, None
    done = now.completed - before.completed
    return max(0, now.produced - before.produced) / seconds, done / seconds if done >= 0 else None


def register(app: typer.Typer) -> None:
    command(app, "watch")(watch)


def watch(
    session: Session,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE…", help="Those queues; all unless given.", autocompletion=queue_names)
    ] = None,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="How often to look.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Watch queues change; Ctrl-C ends it. With --json each look is a line."""
    pause = reading.duration(interval, "--interval")
    if pause < SHORTEST:
        raise Failed(f"--interval is {interval!r}; give {SHORTEST}s or more")
    with session.view() as broker:
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


def _looks(session: Session, broker: Broker, names: list[str] | None, pause: float) -> Iterator[Look]:
    """One look after the other, for ever."""
    look: Look | None = None
    while True:
        found = [broker.queue(name).stats() for name in names or [info.name for info in all_queues(broker)]]
        look = Look(SystemClock().read(), found, look)
        yield look
        Event().wait(pause)
        session.refresh()


def _tell(session: Session, look: Look) -> None:
    session.stream(look.document(), *_parts(look))


def _parts(look: Look) -> list[show.Table | str]:
    return [show.when(look.wall), look.table() if look.queues else "there are no queues", *look.warnings]


def _drawn(look: Look, width: int) -> Group:
    body = drawn(look.table(), width) if look.queues else Text("there are no queues")
    return Group(Text(f"{show.when(look.wall)}   Ctrl-C ends", style="dim"), body, *(Text(line, style="yellow") for line in look.warnings))
