"""`penstock lease`, `complete`, `retry`, `bury`, `extend`: lease and settle items by hand.

Owns: those commands. A lease outlives the command that took it. Any process can settle it with its token.
"""

import getpass
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import typer

from penstock.api._sync.broker import Broker
from penstock.api._sync.queue import Queue
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, command
from penstock.cli.failures import LEASE_LOST, NEGATIVE, CommandFailed
from penstock.cli.queues import all_queues
from penstock.words.errors import LeaseLost
from penstock.words.ids import parse_token

TokensArgument: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="TOKEN…", help="Tokens that `lease` printed; '-' reads them from stdin.", show_default=False)
]
ReasonOption: TypeAlias = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="The reason; it is kept with the item.", show_default=False)
]
SHOWN = 5
Settle: TypeAlias = Callable[[Queue, Sequence[str]], None]

group = typer.Typer()


@command(group, "lease")
def lease(
    session: CommandContext,
    queue: QueueArgument,
    count: Annotated[int, typer.Argument(metavar="COUNT", help="The most items.")] = 1,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait if no item is ready.")] = "0s",
    lease_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The duration of the lease.  [default: the queue's]", show_default=False)
    ] = None,
    per_key: Annotated[int, typer.Option(metavar="N", help="The most consecutive items of a key.")] = 1,
    consumer: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the consumer.  [default: user and host]", show_default=False)
    ] = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print only the tokens, one per line.")] = False,
) -> None:
    """Lease items and print their tokens. Items that are not settled before their lease ends become ready again.

    Exit code 1 if no item was ready.
    """
    seconds = option_values.parse_duration(wait, "--wait")
    held = None if lease_timeout is None else option_values.parse_duration(lease_timeout, "--lease-timeout")
    with session.broker() as broker:
        asked = broker.queue(queue)
        found = asked.lease(count, wait=seconds, lease_timeout=held, per_key=per_key, consumer=consumer or _user_at_host())
        why_none = "" if found else _why_none(asked)
    rows = [
        (
            one.id,
            one.item.key or text_output.NO_VALUE,
            text_output.format_number(one.attempts),
            text_output.format_payload(one.item),
            one.token,
        )
        for one in found
    ]
    table = text_output.TextTable(
        ("id", "key", "attempts", "payload", "token"), rows, right=("attempts",), uncut=("id", "token"), optional=("attempts", "key")
    )
    text = "\n".join(one.token for one in found) if tokens else table
    session.print_answer([text_output.lease_document(one) for one in found], *([text] if rows else [] if tokens else [why_none]))
    if not rows:
        raise typer.Exit(NEGATIVE)


def _why_none(queue: Queue) -> str:
    """Why no item could be leased."""
    found = queue.stats()
    if all(one.paused_lease for one in found.partitions):
        return f"leasing from queue {queue.name} is paused; `penstock queue resume {queue.name}` resumes it"
    if found.ready:
        keys, partitions = f"`penstock keys held {queue.name}`", f"`penstock stats {queue.name}`"
        why = f"their keys are held ({keys}), or their partition is paused or failing ({partitions})"
        return f"nothing can be leased, of {text_output.format_count(found.ready, 'ready item')}: {why}"
    later = f"; {text_output.format_count(found.scheduled, 'item')} scheduled for later" if found.scheduled else ""
    return f"nothing is ready{later}"


def _user_at_host() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        name = "someone"
    return f"{name}@{os.uname().nodename}"


@command(group, "complete")
def complete(session: CommandContext, tokens: TokensArgument = None) -> None:
    """Complete leased items."""
    _settle(session, tokens, "completed", lambda queue, given: queue.complete(given))


@command(group, "retry")
def retry(
    session: CommandContext,
    tokens: TokensArgument = None,
    delay: Annotated[str, typer.Option(metavar="DURATION", help="The items become ready after this time.")] = "0s",
    reason: ReasonOption = "",
    uncounted: Annotated[bool, typer.Option("--uncounted", help="Do not count the attempt.")] = False,
) -> None:
    """Make leased items ready again."""
    pause = option_values.parse_duration(delay, "--delay")
    _settle(session, tokens, "retried", lambda queue, given: queue.retry(given, delay=pause, reason=reason, counted=not uncounted))


@command(group, "bury")
def bury(session: CommandContext, tokens: TokensArgument = None, reason: ReasonOption = "") -> None:
    """Bury leased items: they move to the dead queue, or stay buried in their queue if it has none."""
    _settle(session, tokens, "buried", lambda queue, given: queue.bury(given, reason=reason))


@command(group, "extend")
def extend(
    session: CommandContext,
    tokens: TokensArgument = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The new duration from now.  [default: the first duration]", show_default=False)
    ] = None,
) -> None:
    """Extend leases."""
    held = None if timeout is None else option_values.parse_duration(timeout, "--timeout")
    _settle(session, tokens, "extended", lambda queue, given: queue.extend(given, timeout=held))


# -- settling ----------------------------------------------------------------------------------------


def _settle(session: CommandContext, tokens: Sequence[str] | None, verb: str, settle: Settle) -> None:
    """Settle the tokens of each queue with one call. Raises at the end if some leases were lost."""
    given = _tokens(tokens)
    done, lost = [], []
    with session.broker() as broker:
        for queue, share in _by_queue(broker, given):
            refused = _refused(queue, share, settle)
            lost += refused
            done += [token for token in share if token not in refused]
    words = [f"{text_output.format_count(len(done), 'item')} {verb}"] if done else []
    session.print_answer({verb: len(done), "lost": lost}, *words)
    if lost:
        named = ", ".join(map(_id, lost[:SHOWN])) + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")
        raise CommandFailed(f"the lease of {named} has ended; discard the work, another consumer may have leased the item", LEASE_LOST)


def _tokens(given: Sequence[str] | None) -> list[str]:
    tokens = [part for text in given or () for part in (sys.stdin.read().split() if text == "-" else [text])]
    if not tokens:
        raise CommandFailed("no token was given; give tokens that lease printed, or '-' to read them from stdin")
    for token in tokens:
        parse_token(token)
    return list(dict.fromkeys(tokens))


def _by_queue(broker: Broker, tokens: Sequence[str]) -> list[tuple[Queue | None, list[str]]]:
    """Groups of tokens with their queue; None for a deleted queue. A group has at most one token of each item."""
    names = {info.incarnation: info.name for info in all_queues(broker)}
    seen: Counter[tuple[int, str]] = Counter()
    shares: dict[tuple[str | None, int], list[str]] = {}
    for token in tokens:
        item = parse_token(token).incarnation, _id(token)
        shares.setdefault((names.get(f"{item[0]:016x}"), seen[item]), []).append(token)
        seen[item] += 1
    return [(None if name is None else broker.queue(name), share) for (name, _), share in shares.items()]


def _refused(queue: Queue | None, tokens: Sequence[str], settle: Settle) -> list[str]:
    """Settle the tokens. Gives those whose lease is lost."""
    if queue is None:
        return list(tokens)
    try:
        settle(queue, tokens)
    except LeaseLost as error:
        ids = set(getattr(error, "lost", ()))
        return [token for token in tokens if not ids or _id(token) in ids]
    return []


def _id(token: str) -> str:
    parsed = parse_token(token)
    return f"{parsed.partition}-{parsed.offset}"
