"""`penstock own`, and which process owns a directory.

Owns: that command; `SeenOwner`, the owner as `stats` and `watch` show it, with its clients. `own` is a process that
owns the directory and does nothing else: it waits while another process is the owner, and takes over when that ends.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event
from typing import Annotated, Any, NamedTuple

import typer

from penstock.api.arguments import wait_timeout
from penstock.broker.shared import SharedHome
from penstock.broker.targets import MIN_FREE_BYTES, open_home
from penstock.cli import option_values, text_output
from penstock.cli.command_context import OWNER_TIMEOUT, CommandContext
from penstock.cli.command_tree import command
from penstock.cli.failures import with_option_flags
from penstock.cli.log_output import LogFormatOption, LogLevelOption
from penstock.logs.log import SEGMENT_BYTES
from penstock.operations import DescribeOwner
from penstock.reports import ClientDescription, OwnerDescription
from penstock.words.errors import BrokerLocked, PenstockError
from penstock.words.logs import DEFAULT_LEVEL
from penstock.words.values import timestamp

SHOWN_CLIENTS = 10
OPEN_AGAIN_SECONDS = 1.0
CHECK_SECONDS = 5.0
"""How often `own` checks, while it waits, that the owner answers."""

group = typer.Typer()


# -- who owns a directory ----------------------------------------------------------------------------


class SeenOwner(NamedTuple):
    """The owner of a directory, as a command sees it."""

    description: OwnerDescription | None
    """None when no process is the owner, or when the command may not know it."""
    answers: bool
    """Whether it answered. If not, its clients are not known."""

    @classmethod
    def of(cls, session: CommandContext) -> "SeenOwner":
        """The owner of the broker that the command looks at."""
        return cls(*session.describe_owner())

    def document(self) -> text_output.Document | None:
        owner = self.description
        if owner is None:
            return None
        clients = [
            {"pid": one.pid, "name": one.name, "since": text_output.iso_time(one.since), "waiting_calls": one.calls}
            for one in owner.clients
        ]
        named = {"pid": owner.pid, "host": owner.host, "since": text_output.iso_time(owner.since)}
        return {**named, "answers": self.answers, "clients": clients if self.answers else None}

    def lines(self) -> list[str]:
        """One line for the owner and one for each client."""
        owner = self.description
        if owner is None:
            why = "not shown: the API key is for some queues only" if self.answers else "none: no process has the directory open"
            return text_output.format_pairs([("owner", why)]).splitlines()
        silent = "" if self.answers else ", which does not answer: its clients are not known"
        facts = [("owner", f"process {owner.pid} on {owner.host} since {_time(owner.since)}{silent}")]
        facts += [("client", _client(one)) for one in owner.clients[:SHOWN_CLIENTS]]
        left = len(owner.clients) - SHOWN_CLIENTS
        facts += [("", f"and {text_output.format_count(left, 'more client')}")] if left > 0 else []
        return text_output.format_pairs(facts).splitlines()


def _client(one: ClientDescription) -> str:
    calls = f", {text_output.format_count(one.calls, 'call')} waiting" if one.calls else ""
    return f"process {one.pid}{f' ({one.name})' if one.name else ''} since {_time(one.since)}{calls}"


def _time(microseconds: int) -> str:
    return text_output.format_time(timestamp(microseconds))


# -- own ---------------------------------------------------------------------------------------------


@command(group, "own")
def own(
    session: CommandContext,
    directory: Annotated[
        str | None, typer.Argument(metavar="DIR", help="The broker's directory, instead of --broker.", show_default=False)
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the directory if it does not exist.")] = False,
    durability: Annotated[
        str, typer.Option(metavar="fsync|interval|os", help="When items count as stored, in queues without a durability of their own.")
    ] = "fsync",
    min_free: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Refuse new items when the disk has less free space.  [default: 32MiB]", show_default=False),
    ] = None,
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = DEFAULT_LEVEL,
) -> None:
    """Own the directory and do nothing else, until SIGTERM or Ctrl-C. Prints a line when it becomes the owner.

    While another process is the owner, this one waits as its client, and takes over when that ends.
    """
    session.log.choose(log_format, log_level)
    session = session.with_options(directory, False)
    session.require_directory("a directory is owned by a process of its machine")
    free = MIN_FREE_BYTES if min_free is None else option_values.parse_size(min_free, "--min-free")
    options: dict[str, Any] = {"durability": durability, "min_free_bytes": free}
    if not create:
        session.require_broker("penstock own --create")
    with (
        session.ended_by_interrupt(),
        _interrupted_by_sigterm(),
        session.log_to_stderr(),
        closing(_open(session, options)) as home,
        session.ended_by_interrupt(),  # also before it closes, which may be logged
    ):
        if not home.wait_until_owner(0):
            session.print_note(f"waiting for {home.broker.describe_owner()} to end")
            _wait(session, home)
        document = {"pid": os.getpid(), "host": os.uname().nodename, "directory": home.broker.directory}
        session.print_next_answer(document, f"process {os.getpid()} owns {home.broker.directory}")
        forever = threading.Event()
        while not forever.wait(CHECK_SECONDS):  # not `signal.pause`: a signal that comes right before that call would not end it
            pass


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _open(session: CommandContext, options: dict[str, Any]) -> SharedHome:
    """Open the directory, however long another process has it that does not answer or shares it with no other."""
    notes = _Notes(session)
    while True:
        try:
            home = open_home(
                session.target,
                roots=session.roots,
                wait=wait_timeout(OWNER_TIMEOUT if session.owner_timeout is None else session.owner_timeout),
                segment_bytes=SEGMENT_BYTES,
                compression=True,
                entropy=os.urandom,
                **options,
            )
        except BrokerLocked as error:
            notes.print(error)
            Event().wait(OPEN_AGAIN_SECONDS)
        else:
            assert isinstance(home, SharedHome)
            return home


def _wait(session: CommandContext, home: SharedHome) -> None:
    """Wait until this process is the owner. Prints why it cannot be, and that the owner does not answer."""
    notes = _Notes(session)
    while not home.wait_until_owner(CHECK_SECONDS):
        try:
            home.call(DescribeOwner())
        except PenstockError as error:
            notes.print(error)


class _Notes:
    """Prints errors that are not fatal, each once."""

    def __init__(self, session: CommandContext) -> None:
        self._session = session
        self._told: set[tuple[type[PenstockError], str]] = set()

    def print(self, error: PenstockError) -> None:
        told = type(error), re.sub(r"\d+\.\d s", "", str(error))  # how long it waited is not the same each time
        if told not in self._told:
            self._told.add(told)
            self._session.print_note(f"{with_option_flags(str(error), {})}; still waiting")
