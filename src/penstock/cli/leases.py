"""`penstock lease`, `complete`, `retry`, `bury`, `extend`: leasing and settling items by hand.

Owns: those commands. A lease outlives the command that took it. Its token is enough to settle it, from any process.
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
    list[str] | None, typer.Argument(metavar="TOKEN…", help="As lease printed them; '-' reads them from stdin.", show_default=False)
]
ReasonOption: TypeAlias = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the item.", show_default=False)
]
SHOWN = 5
Settle: TypeAlias = Callable[[Queue, Sequence[str]], None]


def register(app: typer.Typer) -> None:
    for name, function in (("lease", lease), ("complete", complete), ("retry", retry), ("bury", bury), ("extend", extend)):
        command(app, name)(function)


def lease(
    session: CommandContext,
    queue: QueueArgument,
    count: Annotated[int, typer.Argument(metavar="COUNT", help="How many at most.")] = 1,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait when there is nothing.")] = "0s",
    lease_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long they are held; as the queue says unless given.", show_default=False)
    ] = None,
    per_key: Annotated[int, typer.Option(metavar="N", help="Up to so many consecutive items of a key.")] = 1,
    consumer: Annotated[str, typer.Option(metavar="NAME", help="Who works on them; you unless given.", show_default=False)] = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the tokens alone, one a line.")] = False,
) -> None:
    """Take items to work on. They come back when their lease ends, unless they are settled with the token before.

    Exit code 1 when there was nothing.
    """
    patience = option_values.parse_duration(wait, "--wait")
    held = None if lease_timeout is None else option_values.parse_duration(lease_timeout, "--lease-timeout")
    with session.broker() as broker:
        found = broker.queue(queue).lease(count, wait=patience, lease_timeout=held, per_key=per_key, consumer=consumer or _myself())
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
    session.print_answer([text_output.lease_document(one) for one in found], *([text] if rows else [] if tokens else ["nothing is ready"]))
    if not rows:
        raise typer.Exit(NEGATIVE)


def _myself() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        name = "someone"
    return f"{name}@{os.uname().nodename}"


def complete(session: CommandContext, tokens: TokensArgument = None) -> None:
    """Items are done."""
    _settle(session, tokens, "completed", lambda queue, given: queue.complete(given))


def retry(
    session: CommandContext,
    tokens: TokensArgument = None,
    delay: Annotated[str, typer.Option(metavar="DURATION", help="Not before so long from now.")] = "0s",
    reason: ReasonOption = "",
    uncounted: Annotated[bool, typer.Option("--uncounted", help="Give the attempt back.")] = False,
) -> None:
    """Items go back, to be leased again."""
    pause = option_values.parse_duration(delay, "--delay")
    _settle(session, tokens, "retried", lambda queue, given: queue.retry(given, delay=pause, reason=reason, counted=not uncounted))


def bury(session: CommandContext, tokens: TokensArgument = None, reason: ReasonOption = "") -> None:
    """Items are given up: they go to the dead queue, or stay buried where they are."""
    _settle(session, tokens, "buried", lambda queue, given: queue.bury(given, reason=reason))


def extend(
    session: CommandContext,
    tokens: TokensArgument = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="From now on; as long as first given unless said.", show_default=False)
    ] = None,
) -> None:
    """Leases are held for longer."""
    held = None if timeout is None else option_values.parse_duration(timeout, "--timeout")
    _settle(session, tokens, "extended", lambda queue, given: queue.extend(given, timeout=held))


# -- settling ----------------------------------------------------------------------------------------


def _settle(session: CommandContext, tokens: Sequence[str] | None, verb: str, settle: Settle) -> None:
    """Settle each queue's tokens with one call. What is lost is named; everything else is done."""
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
        raise CommandFailed(f"no lease is held any more of {named}; drop that work, it may be someone else's now", LEASE_LOST)


def _tokens(given: Sequence[str] | None) -> list[str]:
    tokens = [part for text in given or () for part in (sys.stdin.read().split() if text == "-" else [text])]
    if not tokens:
        raise CommandFailed("no token is named; give those that lease printed, or '-' to read them from stdin")
    for token in tokens:
        parse_token(token)
    return list(dict.fromkeys(tokens))


def _by_queue(broker: Broker, tokens: Sequence[str]) -> list[tuple[Queue | None, list[str]]]:
    """The tokens by the queue that gave them, of each item one at a time; None stands for a queue that is no more."""
    names = {info.incarnation: info.name for info in all_queues(broker)}
    seen: Counter[tuple[int, str]] = Counter()
    shares: dict[tuple[str | None, int], list[str]] = {}
    for token in tokens:
        item = parse_token(token).incarnation, _id(token)
        shares.setdefault((names.get(f"{item[0]:016x}"), seen[item]), []).append(token)
        seen[item] += 1
    return [(None if name is None else broker.queue(name), share) for (name, _), share in shares.items()]


def _refused(queue: Queue | None, tokens: Sequence[str], settle: Settle) -> list[str]:
    """Settle the tokens; gives those whose lease is lost."""
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
