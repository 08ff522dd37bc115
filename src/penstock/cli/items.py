"""`penstock items`, `find`, `item`, `explain`, `cancel`, `reschedule`, `keys held`, `keys release`: items and keys.

Owns: those commands. All but `cancel`, `reschedule` and `keys release` only look: they never become the owner and
change nothing.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import msgspec
import typer

from penstock.api._sync.queue import Queue
from penstock.api.arguments import STATES, ListedItem
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, command
from penstock.cli.failures import NEGATIVE, NOT_FOUND, CommandFailed
from penstock.reports import ItemChange, ItemEvent, ItemExplanation
from penstock.words.clock import SystemClock
from penstock.words.errors import InvalidRequest
from penstock.words.ids import FIRST_FOREIGN_NUMBER, format_id, parse_id
from penstock.words.values import timestamp

LimitOption = Annotated[int, typer.Option("--limit", "-n", metavar="N", help="The most rows.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The item's id, such as 3-17.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of items, such as 3-17.")]
StateOption = Annotated[
    list[str] | None,
    typer.Option("--state", metavar="|".join(STATES), help="Only items in this state; may be repeated.", show_default=False),
]
AfterOption = Annotated[str | None, typer.Option(metavar="ID", help="List the items after this one.", show_default=False)]

RESOLVED = ("completed", "cancelled")
"""States of items whose attempts only their history knows."""

group = typer.Typer()
keys = typer.Typer()


# -- items -------------------------------------------------------------------------------------------


@command(group, "items")
def items(
    session: CommandContext,
    queue: QueueArgument,
    state: StateOption = None,
    after: AfterOption = None,
    limit: LimitOption = 100,
) -> None:
    """List the items of a queue by partition, oldest first."""
    with session.view() as broker:
        found = broker.queue(queue).items(state, after, limit)
    more = f"there may be more: --after {found[-1].id}" if len(found) == limit else ""
    session.print_answer(
        [text_output.listed_document(one) for one in found], *([items_table(found)] if found else ["there are no such items"])
    )
    if more and not session.as_json:
        session.print_note(more)


@command(group, "find")
def find(
    session: CommandContext,
    queue: QueueArgument,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only items with this key.", show_default=False)] = None,
    reference: Annotated[str | None, typer.Option(metavar="TEXT", help="Only items with this reference.", show_default=False)] = None,
    state: StateOption = None,
    after: AfterOption = None,
    limit: LimitOption = 100,
) -> None:
    """Find items by key, reference or both. This scans the queue: in a large one, give --state as well.

    Exit code 1 if there are none.
    """
    found: list[ListedItem] = []
    with session.view() as broker:
        asked = broker.queue(queue)
        while True:
            page = asked.find(key=key, reference=reference, state=state, after=after, limit=limit - len(found))
            found, after = [*found, *page], page.after
            if after is None or len(found) >= limit:
                break
    session.print_answer(
        [text_output.listed_document(one) for one in found], *([items_table(found)] if found else ["there are no such items"])
    )
    if after is not None and not session.as_json:
        session.print_note(f"there may be more: --after {after}")
    if not found:
        raise typer.Exit(NEGATIVE)


def items_table(found: list[ListedItem]) -> text_output.TextTable:
    """A row for each item."""
    rows = [
        (
            one.id,
            one.state,
            one.key if one.key is not None else text_output.NO_VALUE,
            one.kind or text_output.NO_VALUE,
            text_output.NO_VALUE if one.state in RESOLVED else text_output.format_number(one.attempts),
            text_output.format_time(one.produced_at),
            text_output.format_payload(one),
            one.reason or (one.origin.reason if one.origin is not None else ""),
        )
        for one in found
    ]
    headings = ("id", "state", "key", "kind", "attempts", "produced", "payload", "reason")
    return text_output.TextTable(
        headings, rows, right=("attempts",), uncut=("id", "state", "produced"), optional=("kind", "attempts", "reason", "produced")
    )


@command(group, "item")
def item(session: CommandContext, queue: QueueArgument, id: IdArgument) -> None:
    """Show an item and its history through all queues it was in."""
    with session.view() as broker:
        found = broker.queue(queue)
        explained = _explained(found, id)
        events = found.history(id)
        now = _find(broker.queue(explained.queue) if explained.queue else found, explained.id)
    facts = [
        ("item", f"{explained.id} in queue {explained.queue}" if explained.queue else f"{id}, which was in queue {queue}"),
        ("state", _why(explained)),
        *([] if now is None else _described(now, explained, events)),
    ]
    headings = ("at", "event", "queue", "id", "attempt", "consumer", "more")
    table = text_output.TextTable(
        headings, map(_event_row, events), right=("attempt",), uncut=("at", "event", "queue", "id"), optional=("consumer", "attempt")
    )
    document = {
        "item": None if now is None else text_output.listed_document(now),
        "state": msgspec.to_builtins(explained),
        "history": [text_output.event_document(event) for event in events],
    }
    session.print_answer(document, text_output.format_pairs(facts), "", table if events else "its history is no longer kept")


def _explained(queue: Queue, id: str) -> ItemExplanation:
    parse_id(id)
    try:
        return queue.explain(id)
    except InvalidRequest as error:  # the id is well-formed, but there is no such item
        raise CommandFailed(str(error), NOT_FOUND) from None


def _why(explained: ItemExplanation) -> str:
    """The state of an item and the reason for it. Most reasons begin with the state."""
    return explained.why if explained.why.startswith(explained.state) else f"{explained.state}: {explained.why}"


def _ready_at(explained: ItemExplanation) -> str:
    """When a scheduled item becomes ready: its producer's time, unless it was rescheduled or backs off."""
    if explained.state != "scheduled" or explained.ready_in_seconds is None:
        return ""
    return text_output.format_time(timestamp(SystemClock().read().wall) + timedelta(seconds=explained.ready_in_seconds))


def _find(queue: Queue, id: str) -> ListedItem | None:
    """The item with its payload; None if it is no longer kept."""
    partition, offset = parse_id(id)
    before = format_id(partition, offset - 1) if offset else format_id(partition - 1, FIRST_FOREIGN_NUMBER - 1) if partition else None
    page = queue.items(None, before, 1)
    return page[0] if page and page[0].id == id else None


def _described(one: ListedItem, explained: ItemExplanation, events: Sequence[ItemEvent]) -> list[tuple[str, str]]:
    origin = one.origin
    here = [event for event in events if (event.queue, event.id) == (explained.queue, one.id)]
    attempts = max([one.attempts, *(event.attempt for event in here)]) if one.state in RESOLVED else one.attempts
    not_before = _ready_at(explained)
    if not not_before and one.at is not None and not any(event.event == "rescheduled" for event in here):
        not_before = text_output.format_time(one.at)
    return [
        ("key", one.key or ""),
        ("kind", one.kind or ""),
        ("reference", one.reference or ""),
        ("encoding", one.encoding or ""),
        ("priority", str(one.priority)),
        ("attempts", str(attempts)),
        ("produced", text_output.format_time(one.produced_at)),
        ("not before", not_before),
        ("ttl", text_output.format_duration(one.ttl) if one.ttl is not None else ""),
        ("came from", f"{origin.id} in queue {origin.queue}" if origin is not None else ""),
        *((f"header {name}", value if isinstance(value, str) else repr(value)) for name, value in one.headers.items()),
        ("payload", text_output.format_payload(one)),
    ]


def _event_row(event: ItemEvent) -> tuple[str, ...]:
    more = [event.reason, f"to {event.destination}" if event.destination else "", f"from {event.source}" if event.source else ""]
    at = text_output.format_time(event.at) if event.at_wall else text_output.NO_VALUE
    attempt = text_output.format_number(event.attempt) if event.attempt else ""
    return (at, event.event, event.queue, event.id, attempt, event.consumer, ", ".join(filter(None, more)))


@command(group, "explain")
def explain(session: CommandContext, queue: QueueArgument, id: IdArgument) -> None:
    """Show the state of an item and why it is not being handled."""
    with session.view() as broker:
        found = _explained(broker.queue(queue), id)
    moved = f" (now {found.id} in queue {found.queue})" if (found.queue, found.id) != (queue, id) and found.queue else ""
    ready_at = f" (at {time})" if (time := _ready_at(found)) else ""
    session.print_answer(msgspec.to_builtins(found), f"{id}{moved} is {text_output.printable(_why(found))}{ready_at}")


# -- waiting items -----------------------------------------------------------------------------------


@command(group, "cancel")
def cancel(session: CommandContext, queue: QueueArgument, ids: IdsArgument) -> None:
    """Cancel items that wait, ready or scheduled: they are never handled.

    Leased and resolved items are not changed.

    Exit code 1 if an item was not cancelled.
    """
    with session.broker() as broker:
        found = broker.queue(queue).cancel(*ids)
    _print_changes(session, found, "cancelled")


@command(group, "reschedule")
def reschedule(
    session: CommandContext,
    queue: QueueArgument,
    ids: IdsArgument,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Not before this time.", show_default=False)] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Not before this time from now.", show_default=False)] = None,
    now: Annotated[bool, typer.Option("--now", help="At once.")] = False,
) -> None:
    """Give items that wait, ready or scheduled, another time. Give one of --at, --delay and --now.

    They give up their place in the order of their key. Leased and resolved items are not changed.

    Exit code 1 if an item was not rescheduled.
    """
    if [at is not None, delay is not None, now].count(True) != 1:
        raise CommandFailed("the new time is missing or given twice; give one of --at, --delay and --now")
    time = None if at is None else option_values.parse_time(at, "--at")
    seconds = option_values.parse_duration(delay, "--delay") if delay is not None else 0 if now else None
    with session.broker() as broker:
        found = broker.queue(queue).reschedule(*ids, at=time, delay=seconds)
    _print_changes(session, found, "rescheduled")


def _print_changes(session: CommandContext, found: list[ItemChange], verb: str) -> None:
    done = sum(one.done for one in found)
    refused = [f"{one.id} was not {verb} ({one.outcome})" for one in found if not one.done]
    session.print_answer(msgspec.to_builtins(found), f"{text_output.format_count(done, 'item')} {verb}", *refused)
    if refused:
        raise typer.Exit(NEGATIVE)


# -- keys --------------------------------------------------------------------------------------------


@command(keys, "held")
def held(session: CommandContext, queue: QueueArgument, limit: LimitOption = 100) -> None:
    """List the held keys: what holds each, and how many items wait for it."""
    with session.view() as broker:
        found = broker.queue(queue).held_keys(limit)
    rows = [(_key(one.key), str(one.partition), one.why, one.item, text_output.format_number(one.waiting)) for one in found]
    table = text_output.TextTable(
        ("key", "partition", "why", "item", "waiting"), rows, right=("partition", "waiting"), uncut=("key", "item")
    )
    session.print_answer([text_output.held_key_document(one) for one in found], table if rows else "no key is held")


@command(keys, "release")
def release(session: CommandContext, queue: QueueArgument, key: Annotated[str, typer.Argument(metavar="KEY", help="The key.")]) -> None:
    """Release a parked key, so that its waiting items become ready. The buried items stay buried.

    Exit code 1 if the key is not parked.
    """
    with session.broker() as broker:
        free = broker.queue(queue).release(key)
    left = f"{text_output.format_count(free, 'buried item')} {'stays' if free == 1 else 'stay'} buried"
    said = f"key released; {left}" if free else f"no item parks this key; `penstock keys held {queue}` lists the keys"
    session.print_answer({"queue": queue, "key": key, "released": free}, said)
    if not free:
        raise typer.Exit(NEGATIVE)


def _key(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")
