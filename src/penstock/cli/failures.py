"""Failures of commands: exit codes and messages.

Owns: the exit codes, `CommandFailed`, and the line that is printed for an error. A test compares `EXIT_CODES` with
docs/cli.md.
"""

import re
from collections.abc import Mapping
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
    OK: "success",
    NEGATIVE: "a negative result: nothing was leased, `verify` found damage, `import` or `repair` could not process everything, "
    "`serve` ended requests or `work` ended items unfinished, `serve --check` found differences",
    USAGE: "the command line is wrong: an unknown option, a value out of bounds",
    MISSING_EXTRA: "a package that the command needs is not installed; the message says what to install",
    LOCKED: "the process that owns the directory does not answer, or shares it with no other; or the command needs the directory alone",
    NOT_FOUND: "there is no such broker, queue, cursor, item, API key or file",
    STORAGE: "storage failed or is damaged, or the outcome is unknown",
    LEASE_LOST: "some leases had ended; the items of the other leases are settled",
    EXISTS: "a queue of that name exists with other options",
    RETRY_LATER: "the queue is full, busy or held, or `serve` cannot listen on an address; the same command may succeed later",
    DENIED: "access denied: no valid API key, one that does not allow this, or a file of another user",
    INTERNAL_ERROR: "an unexpected error: please report it (`PENSTOCK_DEBUG=1` prints the traceback)",
    INTERRUPTED: "interrupted by Ctrl-C",
    PIPE_CLOSED: "the reader of the output closed the pipe",
}

_CODES: Final[dict[type[PenstockError], int]] = {
    errors.InvalidRequest: USAGE,
    errors.BodyTooLarge: USAGE,
    errors.UnknownPath: USAGE,
    errors.MethodNotAllowed: USAGE,
    errors.NotAcceptable: USAGE,
    errors.QueueNotEmpty: USAGE,
    errors.UnsupportedMediaType: USAGE,
    errors.QueueNotFound: NOT_FOUND,
    errors.QueueExists: EXISTS,
    errors.Unauthenticated: DENIED,
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


_IN_COMMANDS: Final = {
    ", or a timedelta": "",
    "pass exist_ok=True": "add --exist-ok",
    "ensure_queue does that": "penstock queue ensure does that",
    "wait longer (wait=…)": "wait longer (penstock --owner-timeout …)",
    "(own=False)": "(--no-own)",
    "ca_file=…": "--ca-file",
    "give the API key as api_key=…, or in ": "give the API key in ",
    "api_key=… in Python, or the variable": "the variable",
    "list the items with items()": "list the items: penstock items",
    ", or None for the queue's own": ", or leave it out for the queue's own",
    ", 'headers.<name>', or a function of an item": " or headers.NAME",
    "an item has a dedup_window and no dedup id; give it one, or leave the dedup_window out": "--dedup-window is given without a dedup id; "
    "give --dedup or --dedup-field too, or leave it out",
}
"""Words of the API in messages, and what commands say instead."""
_NAMED = re.compile(r"(?:item 0: the (?=priority|ttl|dedup_window))?([a-z_]+) is ")
"""A message about a parameter. The options of `produce` that count for all its items are first refused for item 0."""


class CommandFailed(Exception):
    """A command failed. The message has the form of those of penstock.errors: what is wrong; what to do."""

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


def error_message(error: BaseException, flags: Mapping[str, str]) -> str:
    """One line about an error; empty after Ctrl-C or a closed pipe. `flags`: parameter name → option of the command."""
    code = exit_code_of(error)
    if code in (INTERRUPTED, PIPE_CLOSED):
        return ""
    text = " ".join(str(error).split())
    if code == INTERNAL_ERROR:
        return f"unexpected {type(error).__name__}: {text}; this is a bug in Penstock, PENSTOCK_DEBUG=1 shows where it came from"
    return with_option_flags(text, flags) or type(error).__name__


def with_option_flags(text: str, flags: Mapping[str, str]) -> str:
    """Replace the names of parameters in an error of the API by the options of the command."""
    found = _NAMED.match(text)
    if found is not None and found[1] in flags:
        text = f"{flags[found[1]]}{text[found.end(1) :]}"
    for said, meant in _IN_COMMANDS.items():
        text = text.replace(said, meant)
    return text
