"""How a function becomes a command.

Owns: `command`, which adds the options of all commands (--broker, --json) and turns an error into one line and an exit
code; `CommandTree`, which does the same for errors of the command line itself; and the completion of queue names.
"""

import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import typer
from typer.core import TyperGroup

from penstock.cli.command_context import BROKER_VARIABLE, CommandContext
from penstock.cli.failures import INTERRUPTED, NEGATIVE, PIPE_CLOSED, USAGE, error_message, exit_code_of
from penstock.cli.log_output import json_line

F = TypeVar("F", bound=Callable[..., None])
DEBUG = "PENSTOCK_DEBUG"
ORDER = (
    *("queue", "produce", "work", "own", "serve", "lease", "complete", "retry", "bury", "extend"),
    *("stats", "watch", "items", "item", "explain", "cursor", "keys", "dead", "verify", "repair", "backup", "restore", "import"),
)

BrokerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--broker",
        "-b",
        metavar="DIR|URL",
        help=f"The broker's directory, or the address of its server.  [default: ${BROKER_VARIABLE}]",
        show_default=False,
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
_COMMON = (
    inspect.Parameter("broker", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=BrokerOption),
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
)
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def command(group: typer.Typer, name: str, more: Iterable[inspect.Parameter] = ()) -> Callable[[F], F]:
    """Make a command of a function whose first parameter is a CommandContext.

    Its docstring is the help text; its other parameters are the arguments and options of the command.
    more: parameters that the function takes as **options.
    """

    def register(function: F) -> F:
        own = [*inspect.signature(function, eval_str=True).parameters.values()][1:]
        own = [_with_number_parser(one) for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD] + [*more]

        def run(context: typer.Context, broker: str | None, as_json: bool, **options: Any) -> None:
            session: CommandContext = context.obj.with_options(broker, as_json)
            try:
                function(session, **options)
            except (typer.Exit, typer.Abort):
                raise
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    session.end_echo()
                flags = {str(one.name): one.opts[0] for one in context.command.params if one.param_type_name == "option"}
                raise typer.Exit(print_error(error, flags, as_log_line=session.log.as_json)) from None

        parameters = [_CONTEXT, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *_COMMON]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__doc__ = function.__doc__
        group.command(name)(run)
        return function

    return register


def _with_number_parser(parameter: inspect.Parameter) -> inspect.Parameter:
    """Parse whole numbers with `whole_number`, for its error message."""
    kind, *metadata = get_args(parameter.annotation)
    if kind in (int, int | None):
        metadata = [copy(one) for one in metadata]
        metadata[0].parser = whole_number
    return parameter.replace(annotation=Annotated[kind, *metadata])


def whole_number(given: str | int) -> int:
    try:
        return int(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is no whole number") from None


def print_error(error: BaseException, flags: Mapping[str, str] = {}, *, as_log_line: bool = False) -> int:
    """Print one line about an error to stderr; gives the exit code.

    flags: the options of the command, by the names of their parameters.
    as_log_line: the command writes its log as JSON lines.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else NEGATIVE
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    line = error_message(error, flags)
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
    elif line:
        typer.echo(json_line(line, logging.ERROR) if as_log_line else f"penstock: {line}", err=True)
    return exit_code_of(error)


def _discard_stdout() -> None:
    """Send the buffered output to the null device. Otherwise the interpreter would print an error at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class CommandTree(TyperGroup):
    """The group of all commands. An error of the command line itself is one line too."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order of ORDER, not of the alphabet."""
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line and end the process."""
        options["standalone_mode"] = False
        try:
            result = super().main(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError as error:
            sys.exit(print_error(error))
        except typer.Abort:  # Ctrl-C at a question
            CommandContext().end_echo()
            sys.exit(INTERRUPTED)
        except SystemExit as error:
            sys.exit(PIPE_CLOSED if isinstance(error.__context__, BrokenPipeError) else error.code)
        except Exception as error:
            sys.exit(_print_usage_error(error))
        sys.exit(result if isinstance(result, int) else 0)


def _print_usage_error(error: Exception) -> int:
    """Print what is wrong with a command line. Parser errors are known by their methods, since their package varies."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return print_error(error)
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help() if context is not None else format_message(), err=True)
        return USAGE
    text = " ".join(str(format_message()).split()).rstrip(".")
    path = context.command_path if context is not None else "penstock"
    typer.echo(f"penstock: {text[:1].lower()}{text[1:]}; see {path} --help", err=True)
    return USAGE


# -- completion --------------------------------------------------------------------------------------


def queue_names(context: typer.Context, incomplete: str) -> list[str]:
    """The names of queues with this prefix, for the shell's completion, which must never print an error."""
    with suppress(BaseException):
        session = CommandContext(_broker_so_far(context), owner_timeout=0.0)
        with session.view() if session.is_server else session.snapshot() as broker:
            return [info.name for info in broker.queues(prefix=incomplete, limit=100)]
    return []


def _broker_so_far(context: Any) -> str:
    """The broker that the incomplete command line names."""
    while context is not None:
        if context.params.get("broker"):
            return str(context.params["broker"])
        context = context.parent
    return os.environ.get(BROKER_VARIABLE, "")


QueueArgument: TypeAlias = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=queue_names)]
YesOption: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
PartitionOption: TypeAlias = Annotated[
    int | None, typer.Option("--partition", metavar="N", help="Only this partition.", show_default=False)
]
