"""`penstock work module:function`: run a worker from the command line.

Owns: the command. The function is imported with the current directory on the path. Failures are printed to stderr when
they happen; the answer, printed when the worker has drained, is its counts.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from threading import Event, Thread
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.failures import NEGATIVE, NOT_FOUND, CommandFailed
from penstock.cli.log_output import LogFormatOption, LogLevelOption
from penstock.words.logs import DEFAULT_LEVEL
from penstock.worker.outcomes import RetryPolicy
from penstock.worker.settings import Hooks
from penstock.worker.worker import AnyQueue, Worker

POLL_SECONDS = 0.2
"""The time between two readings of the worker's counts."""

group = typer.Typer()


@command(group, "work")
def work(
    session: CommandContext,
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The function to call with each item; sync or async.")],
    queue: Annotated[
        list[str],
        typer.Option("--queue", "-q", metavar="NAME[=WEIGHT]", help="A queue to lease from; may be repeated.", autocompletion=queue_names),
    ],
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", metavar="N", help="How many handlers run at once.  [default: 1]", show_default=False),
    ] = None,
    processes: Annotated[int, typer.Option(metavar="N", help="Run handlers in this many processes instead of threads.")] = 0,
    per_partition: Annotated[
        int | None, typer.Option(metavar="N", help="How many handlers run at once for one partition.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Call the function with lists of up to this many items.")] = 0,
    per_key: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --batch: the most items of one key in a call. [default: chosen]", show_default=False),
    ] = None,
    handler_timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="How long a handler may run.", show_default=False)] = None,
    lease_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The duration of leases.  [default: the queue's]", show_default=False)
    ] = None,
    rate: Annotated[float | None, typer.Option(metavar="N", help="The most items per second of each queue.", show_default=False)] = None,
    retry_delay: Annotated[str, typer.Option(metavar="DURATION", help="The wait before the second attempt; doubled each time.")] = "1s",
    retry_most: Annotated[str, typer.Option(metavar="DURATION", help="The longest wait before an attempt.")] = "10m",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the consumer.  [default: host and process id]", show_default=False)
    ] = None,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when no unresolved item is left.")] = False,
    until_idle: Annotated[
        str | None, typer.Option(metavar="DURATION", help="End when no item came for this time, or none is left.", show_default=False)
    ] = None,
    drain_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long draining waits for running handlers.", show_default=False)
    ] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Print the traceback of each failure.")] = False,
    own: Annotated[
        bool, typer.Option("--own/--no-own", help="Whether this process may become the owner of the directory.", show_default=False)
    ] = True,
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = DEFAULT_LEVEL,
) -> None:
    """Handle items with a Python function. A signal (Ctrl-C, SIGTERM) drains the worker; a second one stops it.

    Exit code 1 if items were being handled when it was stopped.
    """
    session.log.choose(log_format, log_level)
    weights = option_values.parse_weights(queue, "--queue")
    policy = RetryPolicy(
        base=option_values.parse_duration(retry_delay, "--retry-delay"), most=option_values.parse_duration(retry_most, "--retry-most")
    )
    options: dict[str, Any] = {
        "concurrency": concurrency,
        "processes": processes,
        "per_partition": per_partition,
        "batch": batch,
        "per_key": per_key,
        "handler_timeout": None if handler_timeout is None else option_values.parse_duration(handler_timeout, "--handler-timeout"),
        "lease_timeout": None if lease_timeout is None else option_values.parse_duration(lease_timeout, "--lease-timeout"),
        "rate": rate,
        "name": name,
        "retry": policy,
        "drain_timeout": None if drain_timeout is None else option_values.parse_duration(drain_timeout, "--drain-timeout"),
    }
    handler = import_function(target)
    with session.broker(traces=traces, own=own) as broker:
        queues: dict[AnyQueue, int] = {broker.queue(one): weight for one, weight in weights.items()}
        drain = _DrainNote(session)
        worker = Worker(queues, handler, hooks=Hooks(draining=drain.print), **options)
        with ExitStack() as stack:
            stack.enter_context(_status_line(session, worker, drain))
            if session.as_json:
                stack.enter_context(_stdout_to_stderr())
            worker.run(until_empty=until_empty if until_idle is None else option_values.parse_duration(until_idle, "--until-idle"))
        if not (until_empty or until_idle):
            session.end_echo()  # a signal has ended it
        done = worker.stats()
        if done.in_hand:
            session.end_echo(again=drain.printed)
            left = text_output.format_count(done.in_hand, "item")
            session.print_note(f"ended at once: {left} not finished, to be handled again when the leases are over")
    counts = [(done.handled, "done"), (done.retried, "retried"), (done.buried, "buried"), (done.snoozed, "snoozed"), (done.late, "late")]
    text = ", ".join(f"{count:,} {word}" for count, word in counts if count) or "nothing was done"
    session.print_answer(msgspec.to_builtins(done), text)
    if done.in_hand:
        raise typer.Exit(NEGATIVE)


def import_function(target: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise CommandFailed(f"the function is {target!r}; give it as module:function, such as shop.orders:handle")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    found = _module(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise CommandFailed(f"module {module_name!r} has no {path!r}; fix the name", NOT_FOUND)
    if not callable(found) or isinstance(found, Worker):
        raise CommandFailed(f"{target!r} is {type(found).__name__}; name a function of an item")
    return found  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise CommandFailed(f"there is no module {error.name!r} here; fix the name, or run this in its directory", NOT_FOUND) from None
        raise CommandFailed(f"module {name!r} cannot be imported: there is no module {error.name!r}; install it", NOT_FOUND) from None
    except Exception as error:
        raise CommandFailed(f"module {name!r} cannot be imported: {type(error).__name__}: {error}; fix the module") from None


# -- while the worker runs ---------------------------------------------------------------------------


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send the output of handlers and child processes to stderr: with --json, stdout is for the document only."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _repeated(action: Callable[[], None]) -> Iterator[None]:
    """Call a function every POLL_SECONDS in a thread."""
    ended = Event()

    def run() -> None:
        while not ended.wait(POLL_SECONDS):
            action()

    thread = Thread(target=run, daemon=True, name="penstock cli")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _status_line(session: CommandContext, worker: Worker, drain: "_DrainNote") -> Iterator[None]:
    """On a terminal, a line with the counts of the worker."""
    if not session.err.is_terminal or session.as_json or session.log.as_json:
        yield
        return
    with (
        session.display(),
        session.err.status(Text("waiting for items; Ctrl-C ends")) as status,
        _repeated(lambda: status.update(_counts(worker, drain))),
    ):
        yield


def _counts(worker: Worker, drain: "_DrainNote") -> Text:
    done = worker.stats()
    how = "draining; Ctrl-C again ends at once" if drain.printed else "Ctrl-C ends"
    return Text(f"{done.handled:,} done ({done.per_second:,.0f}/s), {done.failed:,} failed, {done.in_hand:,} leased; {how}")


class _DrainNote:
    """Says that the worker drains, if items are being handled."""

    def __init__(self, session: CommandContext) -> None:
        self._session = session
        self.printed = False

    def print(self, items: int) -> None:
        if items:
            self.printed = True
            self._session.end_echo()
            verb = "is" if items == 1 else "are"
            self._session.print_note(f"draining: {text_output.format_count(items, 'item')} {verb} being handled; Ctrl-C again ends at once")
