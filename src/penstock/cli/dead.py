"""`penstock dead …`: items that were given up, and the way back.

Owns: the commands of that group. Dead letters of a queue are what lies buried in it and what waits in its dead queue having come from it;
those of a dead queue are all that waits in it.
"""

from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.api._sync.broker import Broker
from penstock.api.arguments import ListedItem
from penstock.api.options import QueueInfo
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.items import LimitOption
from penstock.cli.queues import all_queues

PAGE = 1_000
WAITING = ("ready", "scheduled", "leased")

group = typer.Typer(no_args_is_help=True, help="Items that were given up.")


@command(group, "list")
def list_dead(
    session: CommandContext,
    queue: Annotated[
        str | None,
        typer.Argument(metavar="QUEUE", help="Its dead letters; without it, how many each queue has.", autocompletion=queue_names),
    ] = None,
    limit: LimitOption = 100,
) -> None:
    """Dead letters: what became of them, where they came from, and why."""
    with session.snapshot() as broker:
        if queue is None:
            _list_counts(session, broker)
        else:
            _list_letters(session, broker, queue, limit)


def _list_counts(session: CommandContext, broker: Broker) -> None:
    queues = all_queues(broker)
    in_use = {info.dead_queue for info in queues}
    documents, rows = [], []
    for info in queues:
        found = broker.queue(info.name).stats()
        waiting = found.ready + found.scheduled + found.leased if info.name in in_use else 0
        documents.append({"queue": info.name, "dead_queue": info.dead_queue, "buried": found.buried, "waiting": waiting})
        rows.append(
            (
                info.name,
                info.dead_queue or text_output.NO_VALUE,
                text_output.format_number(found.buried),
                text_output.format_number(waiting),
            )
        )
    table = text_output.TextTable(
        ("queue", "dead queue", "buried here", "dead letters waiting"), rows, right=("buried here", "dead letters waiting")
    )
    session.print_answer(documents, table if rows else "there are no queues")


def _list_letters(session: CommandContext, broker: Broker, name: str, limit: int) -> None:
    info = broker.queue(name).info()
    found: list[tuple[str, ListedItem]] = []
    for letter in _letters(broker, info):
        found.append(letter)
        if len(found) >= limit:
            break
    rows = [_row(where, letter) for where, letter in found]
    headings = ("queue", "id", "from", "attempts", "given up", "reason", "key", "kind", "payload")
    table = text_output.TextTable(
        headings, rows, right=("attempts",), uncut=("queue", "id", "from", "given up"), optional=("kind", "key", "payload", "given up")
    )
    session.print_answer(
        [{"queue": where, **text_output.listed_document(letter)} for where, letter in found], table if rows else "there are no dead letters"
    )


def _letters(broker: Broker, info: QueueInfo) -> Iterator[tuple[str, ListedItem]]:
    yield from ((info.name, letter) for letter in _pages(broker, info.name, ("buried",)))
    if info.dead_queue is not None:
        for letter in _pages(broker, info.dead_queue, WAITING):
            if letter.origin is not None and letter.origin.queue == info.name:
                yield info.dead_queue, letter
    elif any(other.dead_queue == info.name for other in all_queues(broker)):
        yield from ((info.name, letter) for letter in _pages(broker, info.name, WAITING))


def _pages(broker: Broker, name: str, states: tuple[str, ...]) -> Iterator[ListedItem]:
    after: str | None = None
    while page := broker.queue(name).items(states, after, PAGE):
        yield from page
        after = page[-1].id


def _row(where: str, letter: ListedItem) -> tuple[str, ...]:
    origin = letter.origin
    from_ = f"{origin.queue} {origin.id}" if origin is not None else text_output.NO_VALUE
    attempts = origin.attempts if origin is not None else letter.attempts
    reason = letter.reason or (origin.reason if origin is not None else "")
    at = text_output.iso_time(origin.buried_at) if origin is not None else None
    given_up = text_output.format_time(option_values.parse_time(at, "")) if at else text_output.NO_VALUE
    key = letter.key if letter.key is not None else text_output.NO_VALUE
    return (
        where,
        letter.id,
        from_,
        text_output.format_number(attempts),
        given_up,
        reason,
        key,
        letter.kind or text_output.NO_VALUE,
        text_output.format_payload(letter),
    )


@command(group, "redrive")
def redrive(
    session: CommandContext,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The queue they lie in.", autocompletion=queue_names)],
    to: Annotated[str, typer.Option(metavar="QUEUE", help="Where they go; SOURCE itself makes what is buried there ready.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Only those: kind, key, reference, encoding, reason, origin_queue or headers.NAME; may be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="How many at most.", show_default=False)] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Move nothing; tell what would be moved.")] = False,
) -> None:
    """Send dead letters back, each exactly once."""
    chosen = option_values.parse_pairs(where or (), "--where", "kind=invoice")
    with session.snapshot() if preview else session.broker() as broker, session.progress_bar("redriving", None):
        found = broker.redrive(source, to=to, where=chosen or None, limit=limit, preview=preview)
    text = f"{text_output.format_count(found.items, 'item')} {'would go' if preview else 'sent'} from {source} to {to}"
    ids = [f"  {', '.join(found.ids[:20])}{' …' if len(found.ids) > 20 else ''}"] if preview and found.ids else []
    session.print_answer({"items": found.items, "ids": found.ids, "preview": preview}, text, *ids)
