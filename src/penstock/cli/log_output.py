"""How a long-running command writes its log.

Owns: the options --log-format and --log-level, and `LogOutput`. Text is for people: one line per message. JSON lines
are for log collectors; then everything that the command writes to stderr is such a line.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import typer

from penstock.api.traces import current_span_ids
from penstock.cli.failures import CommandFailed
from penstock.words.logs import DEFAULT_LEVEL, FORMAT_VARIABLE, LEVEL_VARIABLE, LEVELS, JsonLogFormatter, json_log

LogFormatOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--log-format", envvar=FORMAT_VARIABLE, metavar="text|json", help=f"How the log is written to stderr (${FORMAT_VARIABLE})."
    ),
]
LogLevelOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--log-level", envvar=LEVEL_VARIABLE, metavar="|".join(LEVELS), help=f"The least level that is logged (${LEVEL_VARIABLE})."
    ),
]


class LogOutput:
    """The format and the level of a command's log. All copies of a CommandContext share it."""

    def __init__(self) -> None:
        self.as_json = False
        self.level: str = DEFAULT_LEVEL

    def choose(self, log_format: str, log_level: str) -> None:
        """Use the values of the options, checked."""
        if log_format not in ("text", "json"):
            raise CommandFailed(f"--log-format is {log_format!r}; give text or json")
        if log_level not in LEVELS:
            raise CommandFailed(f"--log-level is {log_level!r}; give {', '.join(LEVELS)}")
        self.as_json, self.level = log_format == "json", log_level

    @contextmanager
    def json_lines(self) -> Iterator[None]:
        """Write the log to stderr as JSON lines while the block runs, in child processes too."""
        former = {name: os.environ.get(name) for name in (FORMAT_VARIABLE, LEVEL_VARIABLE)}
        os.environ.update({FORMAT_VARIABLE: "json", LEVEL_VARIABLE: self.level})
        try:
            with json_log(sys.stderr, self.level, current_span_ids):
                yield
        finally:
            for name, value in former.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def json_line(text: str, level: int) -> str:
    """A message of a command as a line of the log."""
    record = logging.LogRecord("penstock.cli", level, __file__, 0, text, None, None)
    return JsonLogFormatter(current_span_ids).format(record)
