"""How a function becomes a command.

Owns: `command`, which gives every command the options that all have (--broker, --json) and turns whatever ends it into one line and an exit
code; `CommandTree`, which does the same for what is wrong with the command line itself; and completion of queue names.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import typer
from typer.core import TyperGroup

from penstock.cli.command_context import BROKER_VARIABLE, CommandContext
from penstock.cli.failures import INTERRUPTED, NEGATIVE, PIPE_CLOSED, USAGE, error_message, exit_code_of

F = TypeVar("F", bound=Callable[..., None])
DEBUG = "PENSTOCK_DEBUG"
ORDER = (
    *("queue", "produce", "work", "lease", "complete", "retry", "bury", "extend"),
    *("stats", "watch", "items", "item", "explain", "keys", "dead", "verify", "repair", "import"),
)

BrokerOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--broker", "-b", metavar="DIR", help=f"The broker's directory; {BROKER_VARIABLE} unless given.", show_default=False),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
_COMMON = (
    inspect.Parameter("broker", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=BrokerOption),
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption),
)
_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def command(group: typer.Typer, name: str, more: Iterable[inspect.Parameter] = ()) -> Callable[[F], F]:
    """Make a function of a Session a command. Its docstring is the help, its other parameters are arguments and options.

    more: parameters that it takes as **named ones.
    """

    def register(function: F) -> F:
        own = [*inspect.signature(function, eval_str=True).parameters.values()][1:]
        own = [_numbered(one) for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD] + [*more]

        def run(context: typer.Context, broker: str | None, as_json: bool, **given: Any) -> None:
            session: CommandContext = context.obj.with_options(broker, as_json)
            try:
                function(session, **given)
            except (typer.Exit, typer.Abort):
                raise
            except BaseException as error:
                raise typer.Exit(print_error(error)) from None

        parameters = [_CONTEXT, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *_COMMON]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__doc__ = function.__doc__
        group.command(name)(run)
        return function

    return register


def _numbered(parameter: inspect.Parameter) -> inspect.Parameter:
    """A whole number is read here, so that what is not one is said in our words."""
    kinds, *about = get_args(parameter.annotation)
    if kinds in (int, int | None):
        about = [copy(one) for one in about]
        about[0].parser = whole_number
    return parameter.replace(annotation=Annotated[kinds, *about])


def whole_number(given: str | int) -> int:
    try:
        return int(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is no whole number") from None


def print_error(error: BaseException) -> int:
    """Say in one line what went wrong; gives the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else NEGATIVE
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    line = error_message(error)
    if isinstance(error, BrokenPipeError):
        _leave_pipe()
    elif line:
        typer.echo(f"penstock: {line}", err=True)
    return exit_code_of(error)


def _leave_pipe() -> None:
    """Nobody reads stdout any more: what is still buffered goes nowhere, or the interpreter would complain at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class CommandTree(TyperGroup):
    """The whole command line. What is wrong with it is said in one line too."""

    def list_commands(self, ctx: Any) -> list[str]:
        """As one meets them, not by the alphabet."""
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command that the arguments name; ends the process."""
        options["standalone_mode"] = False
        try:
            result = super().main(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError as error:
            sys.exit(print_error(error))
        except typer.Abort:
            sys.exit(INTERRUPTED)
        except SystemExit as error:
            sys.exit(PIPE_CLOSED if isinstance(error.__context__, BrokenPipeError) else error.code)
        except Exception as error:
            sys.exit(_usage(error))
        sys.exit(result if isinstance(result, int) else 0)


def _usage(error: Exception) -> int:
    """Say what is wrong with a command line. The errors of the parser are told by their shape: it has moved between packages."""
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
    """Names of queues that begin so: for the shell, which must never see an error."""
    with suppress(BaseException):
        session = CommandContext(_broker_of(context))
        with session.snapshot() as broker:
            return [info.name for info in broker.queues(prefix=incomplete, limit=100)]
    return []


def _broker_of(context: Any) -> str:
    """The broker that the line so far names."""
    while context is not None:
        if context.params.get("broker"):
            return str(context.params["broker"])
        context = context.parent
    return os.environ.get(BROKER_VARIABLE, "")


QueueArgument: TypeAlias = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=queue_names)]
YesOption: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
PartitionOption: TypeAlias = Annotated[
    int | None, typer.Option("--partition", metavar="N", help="This partition only.", show_default=False)
]
