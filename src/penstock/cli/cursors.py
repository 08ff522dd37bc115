"""`penstock cursor …`: list, create, move and delete the cursors of a queue.

Owns: the commands of that group. A cursor is a named reading position; retention keeps the items that it has not read,
so an operator must be able to see which cursor is behind, and to move or delete one whose reader is gone.
"""

from typing import Annotated, Any, NamedTuple

import typer

from penstock.api._sync.queue import Queue
from penstock.api.arguments import Start, cursor_start
from penstock.api.cursor_lags import PartitionLag, cursor_lags
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, YesOption, command
from penstock.cli.failures import NOT_FOUND, CommandFailed
from penstock.operations import FindOffsets
from penstock.words.errors import InvalidRequest
from penstock.words.ids import format_id

group = typer.Typer(no_args_is_help=True, help="List, create, move and delete cursors: reading positions in a queue.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The cursor's name.")]
START = "oldest|newest|TIME|ID"


class CursorReport(NamedTuple):
    """A cursor, and what it has not read."""

    name: str
    partitions: list[PartitionLag]

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "lag": self.lag, "partitions": [one._asdict() for one in self.partitions]}


@command(group, "list")
def list_cursors(session: CommandContext, queue: QueueArgument) -> None:
    """List the cursors of a queue, and how many items each has not read."""
    with session.view() as broker:
        found = _reports(broker.queue(queue))
    rows = [
        (one.name, text_output.format_number(one.lag), ", ".join(f"{at.partition}-{at.position}" for at in one.partitions)) for one in found
    ]
    table = text_output.TextTable(("name", "lag", "next items"), rows, right=("lag",), uncut=("name",))
    session.print_answer([one.document() for one in found], table if rows else f"queue {queue} has no cursors")


@command(group, "show")
def show(session: CommandContext, queue: QueueArgument, name: NameArgument) -> None:
    """Show how far a cursor has read in each partition."""
    with session.view() as broker:
        found = _report(broker.queue(queue), name)
    _print_report(session, found)


@command(group, "create")
def create(
    session: CommandContext,
    queue: QueueArgument,
    name: NameArgument,
    start: Annotated[str, typer.Option("--start", metavar=START, help="Where it begins to read.")] = "oldest",
) -> None:
    """Create a cursor. From then on retention keeps the items that it has not read."""
    where = _parse_start(start, "--start")
    with session.broker() as broker:
        found = broker.queue(queue)
        if name in found.cursors():
            raise CommandFailed(f"queue {queue} has a cursor {name!r} already; `penstock cursor seek` moves it")
        refuse_beyond_end(found, cursor_start(where))
        found.cursor(name, start=where)
        report = _report(found, name)
    _print_report(session, report)


@command(group, "seek")
def seek(
    session: CommandContext,
    queue: QueueArgument,
    name: NameArgument,
    to: Annotated[str, typer.Argument(metavar=START, help="An end, a time (items produced then or later), or an item in its partition.")],
) -> None:
    """Move a cursor. A program that is reading with it goes on where it is, and saves its own position again."""
    where = _parse_start(to, "the position")
    with session.broker() as broker:
        found = broker.queue(queue)
        _report(found, name)  # `queue.cursor` would create one that does not exist
        refuse_beyond_end(found, cursor_start(where))
        found.cursor(name).seek(where)
        report = _report(found, name)
    _print_report(session, report)


@command(group, "delete")
def delete(session: CommandContext, queue: QueueArgument, name: NameArgument, yes: YesOption = False) -> None:
    """Delete a cursor. Retention no longer keeps items for it."""
    if not yes:
        with session.view() as broker:
            lag = _report(broker.queue(queue), name).lag
        session.confirm(f"deletes cursor {name} of queue {queue}, which has not read {text_output.format_count(lag, 'item')}", yes)
    with session.broker() as broker:
        found = broker.queue(queue)
        lag = _report(found, name).lag
        found.cursor(name).release()
    session.print_answer({"queue": queue, "deleted": name, "lag": lag}, f"cursor {name} deleted")


def _parse_start(text: str, option: str) -> Start:
    """An end of the queue, the id of an item, or a time."""
    try:
        cursor_start(text)
    except InvalidRequest:
        try:
            return option_values.parse_time(text, option)
        except CommandFailed:
            raise CommandFailed(f"{option} is {text!r}; give oldest, newest, a time as 2030-01-31T08:00:00Z, or an item's id") from None
    return text


def refuse_beyond_end(queue: Queue, at: dict[int, int] | str | int) -> None:
    """Raise for an item that is not produced yet, except the next one: that is the end of its partition."""
    if not isinstance(at, dict):
        return
    ends = queue.home.call(FindOffsets(queue=queue.incarnation, at="newest"))
    for partition, offset in at.items():
        if offset > ends.get(partition, offset):  # a partition that does not exist is refused later
            item, end = format_id(partition, offset), format_id(partition, ends[partition])
            raise CommandFailed(f"there is no item {item}, partition {partition} ends before {end}; give that at most")


def _reports(queue: Queue) -> list[CursorReport]:
    """Every cursor of a queue, by name."""
    cursors = queue.cursors()
    oldest = queue.home.call(FindOffsets(queue=queue.incarnation, at="oldest"))
    ends = queue.home.call(FindOffsets(queue=queue.incarnation, at="newest"))
    return [CursorReport(name, cursor_lags(at, oldest, ends)) for name, at in sorted(cursors.items())]


def _report(queue: Queue, name: str) -> CursorReport:
    found = _reports(queue)
    for one in found:
        if one.name == name:
            return one
    there = ", ".join(one.name for one in found) or "none"
    raise CommandFailed(f"there is no cursor {name!r} in queue {queue.name!r}; there are: {there}", NOT_FOUND)


def _print_report(session: CommandContext, report: CursorReport) -> None:
    headings = ("partition", "next item", "end", "lag")
    rows = [tuple(map(text_output.format_number, one)) for one in report.partitions]
    session.print_answer(report.document(), text_output.TextTable(headings, rows, right=headings))
