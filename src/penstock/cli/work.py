"""`penstock work module:function`: a worker without a line of code around it.

Owns: the command. The function is imported as Python would from the current directory. What fails is told on stderr as it happens; the
answer, once the worker has drained, is what it did.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from threading import Event, Thread
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from penstock.api._sync.queue import Queue
from penstock.cli import option_values, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.failures import NOT_FOUND, CommandFailed
from penstock.words.errors import PenstockError
from penstock.worker.outcomes import RetryPolicy
from penstock.worker.worker import AnyQueue, Worker

LOOK = 0.2
"""Seconds between looks at the queues, or at what was done."""


def register(app: typer.Typer) -> None:
    command(app, "work")(work)


def work(
    session: CommandContext,
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="What is called with each item; sync or async.")],
    queue: Annotated[
        list[str],
        typer.Option("--queue", "-q", metavar="NAME[=WEIGHT]", help="Where items come from; may be repeated.", autocompletion=queue_names),
    ],
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", metavar="N", help="Items at once (1).", show_default=False)
    ] = None,
    processes: Annotated[int, typer.Option(metavar="N", help="Handle items in so many processes instead.")] = 0,
    per_partition: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many at once of a partition.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Call the function with lists of up to so many items.")] = 0,
    handler_timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="An item may take so long.", show_default=False)] = None,
    lease_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="As the queue says unless given.", show_default=False)
    ] = None,
    rate: Annotated[float | None, typer.Option(metavar="N", help="Items a second, of each queue.", show_default=False)] = None,
    retry_delay: Annotated[str, typer.Option(metavar="DURATION", help="Before the second attempt; doubled each time.")] = "1s",
    retry_most: Annotated[str, typer.Option(metavar="DURATION", help="But never longer than this.")] = "10m",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Who works; host and process unless given.", show_default=False)] = None,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when nothing is left, scheduled items included.")] = False,
    traces: Annotated[bool, typer.Option("--traces", help="Show where a function failed, not only that it did.")] = False,
) -> None:
    """Handle items with a Python function, until a signal (Ctrl-C, SIGTERM) lets it drain; a second one stops it at once."""
    weights = option_values.parse_weights(queue, "--queue")
    policy = RetryPolicy(
        base=option_values.parse_duration(retry_delay, "--retry-delay"), most=option_values.parse_duration(retry_most, "--retry-most")
    )
    options: dict[str, Any] = {
        "concurrency": concurrency,
        "processes": processes,
        "per_partition": per_partition,
        "batch": batch,
        "handler_timeout": None if handler_timeout is None else option_values.parse_duration(handler_timeout, "--handler-timeout"),
        "lease_timeout": None if lease_timeout is None else option_values.parse_duration(lease_timeout, "--lease-timeout"),
        "rate": rate,
        "name": name,
        "retry": policy,
    }
    handler = import_function(target)
    with session.broker() as broker:
        queues: dict[AnyQueue, int] = {broker.queue(one): weight for one, weight in weights.items()}
        worker = Worker(queues, handler, **options)
        with ExitStack() as beside:
            beside.enter_context(_watched(session, worker))
            beside.enter_context(_told(session, traces))
            if session.as_json:
                beside.enter_context(_stdout_kept())
            if until_empty:
                beside.enter_context(_ended_when_empty(worker, [broker.queue(one) for one in weights]))
            worker.run()
    done = worker.stats()
    words = [(done.handled, "done"), (done.retried, "retried"), (done.buried, "buried"), (done.snoozed, "snoozed"), (done.late, "late")]
    told = ", ".join(f"{count:,} {word}" for count, word in words if count) or "nothing was done"
    session.print_answer(msgspec.to_builtins(done), told)


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
            raise CommandFailed(f"module {module_name!r} has no {path!r}; mend the name", NOT_FOUND)
    if not callable(found) or isinstance(found, Worker):
        raise CommandFailed(f"{target!r} is {type(found).__name__}; name a function of an item")
    return found  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise CommandFailed(f"there is no module {error.name!r} here; mend the name, or run this where it lies", NOT_FOUND) from None
        raise CommandFailed(f"module {name!r} cannot be imported: there is no module {error.name!r}; install it", NOT_FOUND) from None
    except Exception as error:
        raise CommandFailed(f"module {name!r} cannot be imported: {type(error).__name__}: {error}; mend it") from None


class StderrLogHandler(logging.Handler):
    """What the worker has to say, as notes of a line each; with the traces of what handlers raised, if they are wanted."""

    def __init__(self, session: CommandContext, traces: bool) -> None:
        super().__init__()
        self._session = session
        self._traces = logging.Formatter() if traces else None

    def emit(self, record: logging.LogRecord) -> None:
        self._session.print_note(text_output.printable(record.getMessage()))
        if self._traces is not None and record.exc_info:
            self._session.err.print(Text(self._traces.formatException(record.exc_info)))


# -- beside the worker -------------------------------------------------------------------------------


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """What handlers print goes to stderr, also what child processes do: stdout is for the one document."""
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
def _told(session: CommandContext, traces: bool) -> Iterator[None]:
    """Unless the program says itself where its log goes."""
    log, told = logging.getLogger("penstock"), StderrLogHandler(session, traces)
    if log.hasHandlers():
        yield
        return
    log.addHandler(told)
    try:
        yield
    finally:
        log.removeHandler(told)


@contextmanager
def _repeated(action: Callable[[], None]) -> Iterator[None]:
    """Do something every now and then while the worker works."""
    ended = Event()

    def run() -> None:
        while not ended.wait(LOOK):
            action()

    thread = Thread(target=run, daemon=True, name="penstock cli")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _watched(session: CommandContext, worker: Worker) -> Iterator[None]:
    """On a terminal, a line that says what was done so far."""
    if not session.err.is_terminal or session.as_json:
        yield
        return
    with session.err.status(Text("waiting for items; Ctrl-C ends")) as status, _repeated(lambda: status.update(_line(worker))):
        yield


def _line(worker: Worker) -> Text:
    done = worker.stats()
    return Text(f"{done.handled:,} done ({done.per_second:,.0f}/s), {done.failed:,} failed, {done.in_hand:,} in hand; Ctrl-C ends")


def _ended_when_empty(worker: Worker, queues: Sequence[Queue]) -> AbstractContextManager[None]:
    def look() -> None:
        try:
            if not any(queue.stats().depth for queue in queues):
                worker.stop()
        except PenstockError:  # the worker will say so
            pass

    return _repeated(look)
