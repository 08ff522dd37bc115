"""Failures of commands: exit codes and messages.

Owns: the exit codes, `CommandFailed`, and the one line that is printed for any error. A test compares `EXIT_CODES` with docs/cli.md.
"""

import re
from typing import Final

from penstock.words import errors
from penstock.words.errors import PenstockError

OK: Final = 0
NEGATIVE: Final = 1
USAGE: Final = 2
MISSING_EXTRA: Final = 3
LOCKED: Final = 4
NOT_FOUND: Final = 5
STORAGE: Final = 6
LEASE_LOST: Final = 7
EXISTS: Final = 8
RETRY_LATER: Final = 9
DENIED: Final = 10
INTERNAL_ERROR: Final = 70
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

EXIT_CODES: Final[dict[int, str]] = {
    OK: "done",
    NEGATIVE: "done, and the answer is no: nothing was leased, `verify` found damage, `import` or `repair` left something behind",
    USAGE: "the command is wrong as it stands: an unknown option, a value out of bounds",
    MISSING_EXTRA: "what the command needs is not installed; the line says what to install",
    LOCKED: "another process owns the directory, or the broker was closed",
    NOT_FOUND: "there is no such broker, queue, item or file",
    STORAGE: "storage failed, is damaged, or left the outcome unknown",
    LEASE_LOST: "a lease had ended; what was still held is settled",
    EXISTS: "there is a queue of that name, with other options",
    RETRY_LATER: "the queue is full, busy or held; the same command may succeed later",
    DENIED: "not allowed",
    INTERNAL_ERROR: "an error that nobody thought of: please report it (`PENSTOCK_DEBUG=1` shows where it came from)",
    INTERRUPTED: "ended by Ctrl-C",
    PIPE_CLOSED: "whoever read the output has gone",
}

_CODES: Final[dict[type[PenstockError], int]] = {
    errors.InvalidRequest: USAGE,
    errors.QueueNotFound: NOT_FOUND,
    errors.QueueExists: EXISTS,
    errors.AccessDenied: DENIED,
    errors.QueueBusy: RETRY_LATER,
    errors.QueueFull: RETRY_LATER,
    errors.QueueHeld: RETRY_LATER,
    errors.StorageFailed: STORAGE,
    errors.OutcomeUnknown: STORAGE,
    errors.LeaseLost: LEASE_LOST,
    errors.BrokerClosed: LOCKED,
    errors.BrokerLocked: LOCKED,
    errors.CorruptLog: STORAGE,
}


_OPTIONS: Final = {
    *(
        "lease_timeout",
        "max_attempts",
        "ttl",
        "priority_aging",
        "dedup_window",
        "on_bury",
        "max_items",
        "max_bytes",
        "durability",
        "max_age",
    ),
    *("max_segments", "min_segments", "limit", "per_key", "wait", "timeout", "delay", "partition", "concurrency", "processes", "batch"),
    *("per_partition", "handler_timeout"),
}
_NAMED = re.compile(r"([a-z_]+) is ")


class CommandFailed(Exception):
    """A command cannot go on. The message reads as those of penstock.errors."""

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that ended a command."""
    if isinstance(error, CommandFailed):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), INTERNAL_ERROR)


def error_message(error: BaseException) -> str:
    """What is said of it: one line, or nothing when the user knows already."""
    code = exit_code_of(error)
    if code in (INTERRUPTED, PIPE_CLOSED):
        return ""
    text = " ".join(str(error).split())
    if code == INTERNAL_ERROR:
        return f"unexpected {type(error).__name__}: {text}; this is a bug in Penstock, PENSTOCK_DEBUG=1 shows where it came from"
    return with_option_flags(text) or type(error).__name__


def with_option_flags(text: str) -> str:
    """An error of the API in the words of the command line."""
    found = _NAMED.match(text)
    if found is not None and found[1] in _OPTIONS:
        text = f"--{found[1].replace('_', '-')}{text[found.end(1) :]}"
    return text.replace(", or a timedelta", "").replace("pass exist_ok=True", "add --exist-ok")
