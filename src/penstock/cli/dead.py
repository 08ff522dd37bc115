"""`penstock dead …`: list and redrive dead letters.

Owns: the commands of that group. The dead letters of a queue are the items buried in it and the waiting items of its
dead queue that came from it. The dead letters of a dead queue are all its waiting items.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
import typer

from penstock.api._sync.broker import Broker
from penstock.api.arguments import ListedItem
from penstock.api.options import QueueInfo
from penstock.api.redrive import RedriveSample
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.items import LimitOption
from penstock.cli.queues import all_queues

PAGE = 1_000
MAX_COUNTED = 100_000
"""How many items of a dead queue are read to count from which queues they came."""
WAITING = ("ready", "scheduled", "leased")

group = typer.Typer(no_args_is_help=True, help="List and redrive dead letters.")


@command(group, "list")
def list_dead(
    session: CommandContext,
    queue: Annotated[
        str | None,
        typer.Argument(metavar="QUEUE", help="List its dead letters; without it, count those of each queue.", autocompletion=queue_names),
    ] = None,
    limit: LimitOption = 100,
) -> None:
    """List dead letters with their origin and the reason."""
    with session.view() as broker:
        if queue is None:
            _list_counts(session, broker)
        else:
            _list_dead_letters(session, broker, queue, limit)


def _list_counts(session: CommandContext, broker: Broker) -> None:
    """How many dead letters `dead list QUEUE` would list for each queue."""
    queues = all_queues(broker)
    origins = {name: _count_origins(broker, name) for name in sorted({info.dead_queue for info in queues if info.dead_queue})}
    documents, rows = [], []
    for info in queues:
        found = broker.queue(info.name).stats()
        counted_all = True
        if info.dead_queue is not None:
            waiting, counted_all = origins[info.dead_queue].by_queue[info.name], origins[info.dead_queue].complete
        else:
            waiting = found.ready + found.scheduled + found.leased if info.name in origins else 0
        documents.append(
            {"queue": info.name, "dead_queue": info.dead_queue, "buried": found.buried, "waiting": waiting, "counted_all": counted_all}
        )
        rows.append(
            (
                info.name,
                info.dead_queue or text_output.NO_VALUE,
                text_output.format_number(found.buried),
                f"{'' if counted_all else 'at least '}{text_output.format_number(waiting)}",
            )
        )
    table = text_output.TextTable(("queue", "dead queue", "buried here", "in a dead queue"), rows, right=("buried here", "in a dead queue"))
    session.print_answer(documents, table if rows else "there are no queues")


class OriginCounts(NamedTuple):
    """From which queues the waiting items of a dead queue came."""

    by_queue: Counter[str]
    complete: bool
    """Whether all items were counted."""


def _count_origins(broker: Broker, dead_queue: str) -> OriginCounts:
    found: Counter[str] = Counter()
    items = _items(broker, dead_queue, WAITING)
    for item in islice(items, MAX_COUNTED):
        if item.origin is not None:
            found[item.origin.queue] += 1
    return OriginCounts(found, next(items, None) is None)


def _list_dead_letters(session: CommandContext, broker: Broker, name: str, limit: int) -> None:
    found = list(islice(_dead_letters(broker, broker.queue(name).info()), max(limit, 1)))
    rows = [_row(queue, item) for queue, item in found]
    headings = ("queue", "id", "from", "attempts", "buried at", "reason", "key", "kind", "payload")
    table = text_output.TextTable(
        headings, rows, right=("attempts",), uncut=("queue", "id", "from", "buried at"), optional=("kind", "key", "payload", "buried at")
    )
    session.print_answer(
        [{"queue": queue, **text_output.listed_document(item)} for queue, item in found], table if rows else "there are no dead letters"
    )


def _dead_letters(broker: Broker, info: QueueInfo) -> Iterator[tuple[str, ListedItem]]:
    """The dead letters of a queue, each with the name of the queue that holds it."""
    yield from ((info.name, item) for item in _items(broker, info.name, ("buried",)))
    if info.dead_queue is not None:
        for item in _items(broker, info.dead_queue, WAITING):
            if item.origin is not None and item.origin.queue == info.name:
                yield info.dead_queue, item
    elif any(other.dead_queue == info.name for other in all_queues(broker)):
        yield from ((info.name, item) for item in _items(broker, info.name, WAITING))


def _items(broker: Broker, name: str, states: tuple[str, ...]) -> Iterator[ListedItem]:
    """All items of a queue in these states, read page by page."""
    after: str | None = None
    while page := broker.queue(name).items(states, after, PAGE):
        yield from page
        after = page[-1].id


def _row(queue: str, item: ListedItem) -> tuple[str, ...]:
    origin = item.origin
    return (
        queue,
        item.id,
        f"{origin.queue} {origin.id}" if origin is not None else text_output.NO_VALUE,
        text_output.format_number(origin.attempts if origin is not None else item.attempts),
        text_output.format_time(item.buried_at),
        item.reason or (origin.reason if origin is not None else ""),
        item.key if item.key is not None else text_output.NO_VALUE,
        item.kind or text_output.NO_VALUE,
        text_output.format_payload(item),
    )


@command(group, "redrive")
def redrive(
    session: CommandContext,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The queue that holds the dead letters.", autocompletion=queue_names)],
    to: Annotated[str, typer.Option(metavar="QUEUE", help="The queue to send them to; SOURCE makes the items buried in it ready again.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Only items with this kind, key, reference, encoding, reason, state, origin_queue or headers.NAME; may be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="The most items.", show_default=False)] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Move nothing; count what would be moved, and print the first 100.")] = False,
) -> None:
    """Send dead letters to a queue to be handled again, each exactly once."""
    chosen = option_values.parse_pairs(where or (), "--where", "kind=invoice")
    with session.view() if preview else session.broker() as broker, session.progress_bar("redriving", None):
        found = broker.redrive(source, to=to, where=chosen or None, limit=limit, preview=preview)
    text = f"{text_output.format_count(found.items, 'item')} {'would be sent' if preview else 'sent'} from {source} to {to}"
    document = {"items": found.items, "ids": found.ids, "preview": preview}
    if not preview:
        session.print_answer(document, text)
        return
    shown: list[text_output.TextTable | str] = [_preview_table(found.sample)] if found.sample else []
    if found.items > len(found.sample):
        shown.append(f"and {text_output.format_count(found.items - len(found.sample), 'item')} more")
    session.print_answer({**document, "sample": msgspec.to_builtins(found.sample)}, text, *shown)


def _preview_table(sample: Sequence[RedriveSample]) -> text_output.TextTable:
    headings = ("id", "state", "from", "attempts", "buried at", "reason", "key", "kind", "payload")
    rows = [
        (
            item.id,
            item.state,
            item.origin_queue or text_output.NO_VALUE,
            text_output.format_number(item.attempts),
            text_output.format_time(item.buried_at or item.produced_at),
            item.reason or text_output.NO_VALUE,
            item.key if item.key is not None else text_output.NO_VALUE,
            item.kind or text_output.NO_VALUE,
            item.payload,
        )
        for item in sample
    ]
    return text_output.TextTable(headings, rows, right=("attempts",), uncut=("id", "state", "from"), optional=("kind", "key", "buried at"))
