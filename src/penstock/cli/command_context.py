"""The broker and the output streams of a command.

Owns: `CommandContext`. A command that changes something opens the broker: through the process that owns the directory,
or as its owner if there is none. A command that only looks asks the owner too, and reads the files if there is none or
it does not answer; it never becomes the owner. Only `queue create` and `own --create` make a directory. The broker of a
server is used over HTTP by every command that needs no files.
Answers go to stdout, everything else (progress, notes, errors) to stderr.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from penstock.api._sync.broker import Broker
from penstock.api._sync.broker import open as open_broker
from penstock.broker.directory_view import PATIENCE, DirectoryView
from penstock.broker.snapshot import Snapshot
from penstock.broker.targets import checked_target, is_url
from penstock.cli import text_output
from penstock.cli.failures import NEGATIVE, NOT_FOUND, CommandFailed
from penstock.cli.log_output import LogOutput, json_line
from penstock.logs.backends import MEMORY, holds_broker
from penstock.operations import DescribeOwner, Home
from penstock.reports import OwnerDescription
from penstock.words.clock import SECOND
from penstock.words.errors import AccessDenied
from penstock.words.logs import LEVELS

BROKER_VARIABLE = "PENSTOCK_BROKER"
OWNER_TIMEOUT = 10.0
"""Seconds that a command which changes something waits for an owner that does not answer."""
OutputPart = text_output.TextTable | str


class StderrLogHandler(logging.Handler):
    """Prints each log record as a line on stderr; with `traces`, also its traceback."""

    def __init__(self, session: "CommandContext", traces: bool) -> None:
        super().__init__()
        self._session = session
        self._traces = logging.Formatter() if traces else None

    def emit(self, record: logging.LogRecord) -> None:
        self._session.print_note(text_output.printable(record.getMessage()))
        if self._traces is not None and record.exc_info:
            self._session.err.print(Text(self._traces.formatException(record.exc_info)))


class CommandContext:
    """The broker and the output streams of one run of a command."""

    def __init__(
        self,
        target: str = "",
        roots: Sequence[str] = (),
        as_json: bool = False,
        owner_timeout: float | None = None,
        log: LogOutput | None = None,
        certificates: Mapping[str, str] | None = None,
    ) -> None:
        """owner_timeout: how long to wait for an owner that does not answer; None: the default of each command.
        certificates: the options of `penstock.open` for https://.
        """
        self.as_json = as_json
        self._certificates = dict(certificates or {})
        self.roots = [os.path.expanduser(root) for root in roots]
        self.owner_timeout = owner_timeout
        self.log = log or LogOutput()
        self._target = target
        self._view: DirectoryView | None = None
        self._viewed: Home | None = None
        """The home of the broker that is looked at."""
        self._shows_display = False
        """Whether a display is on the terminal that is drawn again and again, such as a progress bar."""
        self._echo_ended = False
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def with_options(self, target: str | None, as_json: bool) -> "CommandContext":
        """The same context with the options that followed the command."""
        given = target or self._target
        return CommandContext(given, self.roots, as_json or self.as_json, self.owner_timeout, self.log, self._certificates)

    # -- the broker ----------------------------------------------------------------------------------

    @property
    def names_broker(self) -> bool:
        """Whether the command line or the environment names a broker."""
        return bool(self._target)

    @property
    def target(self) -> str:
        """The directory of the broker, or the address of its server; raises if none was given or it is neither."""
        if not self._target:
            raise CommandFailed(f"no broker is named; give its directory or address with --broker, or set {BROKER_VARIABLE}")
        if self._target == MEMORY:
            raise CommandFailed(f"{MEMORY} ends with the process that opened it; give a directory")
        checked_target(self._target, self.roots)
        return self._target if self.is_server else os.path.expanduser(self._target)

    @property
    def is_server(self) -> bool:
        """Whether the broker is that of a server."""
        return is_url(self._target)

    def require_directory(self, why: str) -> None:
        """Raise for the address of a server. why: as in "API keys are managed on the server's machine"."""
        if "://" in self._target and self._target != MEMORY:
            raise CommandFailed(f"{why}; run this command there, with --broker and the directory of the broker")

    @contextmanager
    def broker(self, *, create: bool = False, traces: bool = False, **options: Any) -> Iterator[Broker]:
        """Open the broker through its owner, or as its owner; the directory must exist unless `create`.

        Its log is printed to stderr. traces: with tracebacks. options: those of `penstock.open`.
        """
        if not create:
            self.require_broker()
        wait = OWNER_TIMEOUT if self.owner_timeout is None else self.owner_timeout
        chosen = {"roots": self.roots or None, "wait": wait, **self._certificates, **options}
        with self.log_to_stderr(traces), open_broker(self.target, **chosen) as broker:
            yield broker

    @contextmanager
    def view(self) -> Iterator[Broker]:
        """Open the broker only to look at it."""
        if self.is_server:
            with self.broker(wait=PATIENCE / SECOND if self.owner_timeout is None else self.owner_timeout) as broker:
                self._viewed = broker.home
                yield broker
            return
        self.require_broker()
        patience = PATIENCE if self.owner_timeout is None else int(self.owner_timeout * SECOND)
        self._view = self._viewed = DirectoryView(checked_target(self.target, self.roots), patience=patience, on_silent=self.print_note)
        with Broker(self._view, self.target) as broker:
            yield broker

    def refresh(self) -> None:
        """Look at the present state from now on."""
        if self._view is not None:
            self._view.refresh()

    def describe_owner(self) -> tuple[OwnerDescription | None, bool]:
        """The owner of the broker that is looked at, and whether it answers.

        This command is left out of its clients. None if no process is the owner; or, with an answer, if the API key of
        this command does not allow to know it.
        """
        assert self._viewed is not None
        try:
            found = self._viewed.call(DescribeOwner())
        except AccessDenied:
            return None, True
        own = next((client for client in found.clients if client.pid == os.getpid()), None)
        if own is not None and not self.is_server:
            found.clients.remove(own)
        return found if found.pid else None, self._view is None or self._view.is_live

    @contextmanager
    def snapshot(self) -> Iterator[Broker]:
        """Open the broker as its files are, without asking the owner."""
        self.require_directory("the files of a broker are on the server's machine")
        self.require_broker()
        with Broker(Snapshot.open(checked_target(self.target, self.roots)), self.target) as broker:
            yield broker

    @contextmanager
    def log_to_stderr(self, traces: bool = False) -> Iterator[None]:
        """Print Penstock's log to stderr.

        Text is not printed if the program (a handler's module, say) has configured logging.
        """
        if self.log.as_json:
            with self.log.json_lines():
                yield
            return
        log, handler = logging.getLogger("penstock"), StderrLogHandler(self, traces)
        if log.hasHandlers():
            yield
            return
        former = log.level
        log.addHandler(handler)
        log.setLevel(LEVELS[self.log.level])
        try:
            yield
        finally:
            log.setLevel(former)
            log.removeHandler(handler)

    def require_broker(self, makes_one: str = "penstock queue create, or penstock own --create") -> None:
        """Raise unless the directory exists and holds a broker. A server is asked when it is used.

        makes_one: the commands that the error names.
        """
        if self.is_server:
            return
        advice = f"fix the path, or create a broker there: {makes_one}"
        if not os.path.lexists(self.target):
            raise CommandFailed(f"there is no directory {self.target!r}; {advice}", NOT_FOUND)
        if not holds_broker(self.target, may_be_foreign=True):
            if os.listdir(self.target):  # of other programs: no broker is created among them
                advice = "fix the path"
            raise CommandFailed(f"{self.target!r} holds no broker; {advice}", NOT_FOUND)

    # -- output --------------------------------------------------------------------------------------

    def print_answer(self, document: Any, *parts: OutputPart) -> None:
        """Print the answer: the document with --json, else these tables and lines."""
        if self.as_json:
            self.write_line(json.dumps(document, indent=2, ensure_ascii=not self._unicode))
            return
        for part in parts:
            if isinstance(part, str):
                self.write_line(part)
            elif self.out.is_terminal:
                self.out.print(part.for_terminal(self.out.width))
            else:
                self.write_line(part.plain())

    def print_next_answer(self, document: Any, *parts: OutputPart) -> None:
        """Print one of several answers. With --json each answer is one line."""
        if self.as_json:
            self.write_line(json.dumps(document, ensure_ascii=not self._unicode))
        else:
            self.print_answer(None, *parts)
        sys.stdout.flush()

    def write_line(self, text: str) -> None:
        """Write a line to stdout without formatting."""
        sys.stdout.write(f"{text}\n")

    def print_note(self, text: str) -> None:
        """Write a line to stderr that is not part of the answer."""
        if self.log.as_json:
            sys.stderr.write(f"{json_line(text, logging.INFO)}\n")
        else:
            self.err.print(Text(f"penstock: {text}"))

    def end_echo(self, again: bool = False) -> None:
        """After Ctrl-C: end the line with the ^C that the terminal echoes, so that what follows has its own line.

        again: it was pressed once more since the last call.
        """
        if not (self._shows_display or (self._echo_ended and not again)) and sys.stderr.isatty():
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._echo_ended = True

    @contextmanager
    def ended_by_interrupt(self) -> Iterator[None]:
        """A block that Ctrl-C ends without an error."""
        try:
            yield
        except KeyboardInterrupt:
            self.end_echo()

    @contextmanager
    def display(self) -> Iterator[None]:
        """Mark the block in which a display is drawn again and again. It erases the echo of Ctrl-C."""
        self._shows_display = True
        try:
            yield
        except KeyboardInterrupt:
            self._echo_ended = True
            raise
        finally:
            self._shows_display = False

    @property
    def _unicode(self) -> bool:
        return (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"

    def confirm(self, what: str, yes: bool) -> None:
        """Ask before something is deleted, unless --yes was given. Raises if the answer is no or stdin is not a tty."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise CommandFailed(f"this {what}; add --yes to do it")
        if not typer.confirm(f"This {what}. Continue?", err=True):
            raise CommandFailed("nothing was changed; add --yes to do it without being asked", NEGATIVE)

    @contextmanager
    def progress_bar(
        self, title: str, total: int | None, wanted: bool | None = None, *, sizes: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """A progress bar on stderr; gives the function that advances it.

        total: None if it is not known.
        wanted: None shows the bar on a terminal only.
        sizes: the bar counts bytes.
        """
        with self.rich_progress(wanted, sizes=sizes) as progress:
            if progress is None:
                yield lambda steps: None
                return
            task = progress.add_task(escape(title), total=total)
            yield lambda steps: progress.advance(task, steps)

    @contextmanager
    def rich_progress(self, wanted: bool | None = None, *, sizes: bool = False) -> Iterator[Progress | None]:
        """The display of progress bars on stderr, or None if it is not shown. Arguments as of `progress_bar`."""
        if wanted is False or (wanted is None and (not self.err.is_terminal or self.as_json)):
            yield None
            return
        counts = DownloadColumn() if sizes else MofNCompleteColumn()
        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), counts, TimeElapsedColumn()]
        with self.display(), Progress(*columns, console=self.err, transient=self.err.is_terminal) as progress:
            yield progress
