"""What a command works with: the broker it is about, and where it speaks.

Owns: `Session`. A command that changes something opens the broker as its owner; one that only looks opens a view, which takes no lock,
writes nothing and works while another process owns the directory. Only commands that make something new make a directory.
Answers go to stdout, everything else (progress, notes, errors) to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from penstock.api._sync.broker import Broker
from penstock.api._sync.broker import open as open_broker
from penstock.broker.snapshot import Snapshot
from penstock.broker.targets import checked_target
from penstock.cli import text_output
from penstock.cli.failures import NEGATIVE, NOT_FOUND, CommandFailed
from penstock.logs.backends import MEMORY, holds_broker

BROKER_VARIABLE = "PENSTOCK_BROKER"
OutputPart = text_output.TextTable | str


class CommandContext:
    """One run of one command."""

    def __init__(self, target: str = "", roots: Sequence[str] = (), as_json: bool = False) -> None:
        self.as_json = as_json
        self.roots = list(roots)
        self._target = target
        self._snapshot: Snapshot | None = None
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def with_options(self, target: str | None, as_json: bool) -> "CommandContext":
        """The same, with what was said behind the command."""
        return CommandContext(target or self._target, self.roots, as_json or self.as_json)

    # -- the broker ----------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        if not self._target:
            raise CommandFailed(f"no broker is named; give its directory with --broker, or set {BROKER_VARIABLE}")
        if self._target == MEMORY:
            raise CommandFailed(f"{MEMORY} ends with the process that opened it; give a directory")
        checked_target(self._target, self.roots)
        return self._target

    @contextmanager
    def broker(self, *, create: bool = False) -> Iterator[Broker]:
        """The broker, to change something."""
        if not create:
            self.require_broker()
        with open_broker(self.target, roots=self.roots) as broker:
            yield broker

    @contextmanager
    def snapshot(self) -> Iterator[Broker]:
        """The broker, to look at it."""
        self.require_broker()
        self._snapshot = Snapshot.open(checked_target(self.target, self.roots))
        with Broker(self._snapshot, self.target) as broker:
            yield broker

    def refresh(self) -> None:
        """Let what is looked at go on to what is there now."""
        if self._snapshot is not None:
            self._snapshot.refresh()

    def require_broker(self) -> None:
        """The directory must be there, and hold a broker."""
        advice = "mend the path, or create a queue there: penstock queue create"
        if not os.path.lexists(self.target):
            raise CommandFailed(f"there is no directory {self.target!r}; {advice}", NOT_FOUND)
        if not holds_broker(self.target):
            raise CommandFailed(f"{self.target!r} holds no broker; {advice}", NOT_FOUND)

    # -- speaking ------------------------------------------------------------------------------------

    def print_answer(self, document: Any, *parts: OutputPart) -> None:
        """Answer with the document (--json) or with these tables and lines."""
        if self.as_json:
            self.write_line(json.dumps(document, indent=2, ensure_ascii=not self._unicode))
            return
        for part in parts:
            if isinstance(part, str):
                self.write_line(part)
            elif self.out.is_terminal:
                self.out.print(terminal_text(part, self.out.width))
            else:
                self.write_line(part.plain())

    def print_next_answer(self, document: Any, *parts: OutputPart) -> None:
        """One answer of several: with --json, each is a line."""
        if self.as_json:
            self.write_line(json.dumps(document, ensure_ascii=not self._unicode))
        else:
            self.print_answer(None, *parts)
        sys.stdout.flush()

    def write_line(self, text: str) -> None:
        """A line on stdout, as it is."""
        sys.stdout.write(f"{text}\n")

    def print_note(self, text: str) -> None:
        """Something besides the answer."""
        self.err.print(Text(f"penstock: {text}"))

    @property
    def _unicode(self) -> bool:
        return (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"

    def confirm(self, what: str, yes: bool) -> None:
        """Ask before something is gone for good. Where nobody can be asked, --yes must have been given."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise CommandFailed(f"this {what}; add --yes to do it")
        if not typer.confirm(f"This {what}. Go on?", err=True):
            raise CommandFailed("nothing was changed; add --yes to do it without being asked", NEGATIVE)

    @contextmanager
    def progress_bar(
        self, title: str, total: int | None, wanted: bool | None = None, *, sizes: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """A bar on stderr, as far as `total` is known; gives the function that moves it on. None shows it on a terminal only.

        sizes: it counts bytes.
        """
        if wanted is False or (wanted is None and (not self.err.is_terminal or self.as_json)):
            yield lambda steps: None
            return
        columns = [
            SpinnerColumn(),
            TextColumn(escape(title)),
            BarColumn(),
            DownloadColumn() if sizes else MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=self.err, transient=self.err.is_terminal) as bars:
            task = bars.add_task("", total=total)
            yield lambda steps: bars.advance(task, steps)


def terminal_text(table: text_output.TextTable, width: int) -> Text:
    """A table for a terminal."""
    heading, *rows = table.lines(width)
    return Text("\n").join([Text(heading, style="bold"), *map(Text, rows)])
