"""The child process of a worker: it runs handlers on the items that it receives, until its parent closes the link.

Owns: `main`, the messages between parent and child, and `CurrentCall`: two numbers in shared memory that tell the
parent which call the child is running, even after the child exited. Calls of handlers are numbered; a child runs them
in ascending order.

    parent → child:  (number of the first call, list of CallItems): each item is one call; a batch is one call
    child → parent:  ChildReady once; CallResult if a call failed, made follow-ups or has a span; CallProgress;
                     CallsDone after the last call of a message

A child has no broker: it leases and settles nothing. It ignores SIGINT and SIGTERM, which are for its parent. It does
not outlive its parent: on Linux the system kills it, elsewhere a thread ends it as soon as the interpreter runs that
thread.
"""

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_longlong
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

from penstock.api.items import Item, ItemSource, NewItem
from penstock.api.traces import current_span_ids
from penstock.words.batch import Batch
from penstock.words.clock import Moment, SystemClock
from penstock.words.ids import Token, format_token
from penstock.words.logs import log_of_child
from penstock.words.values import Value
from penstock.worker.context import Context
from penstock.worker.handlers import HandlerInvoker, Handlers
from penstock.worker.outcomes import COMPLETED, Bury, Outcome, Retry, Snooze
from penstock.worker.settings import Settings

_PR_SET_PDEATHSIG = 1


# -- messages ----------------------------------------------------------------------------------------


class CallItems(NamedTuple):
    """Items of one lease and one batch."""

    source: ItemSource
    token: Token
    """The token of the first item; those of the others differ in the offset."""
    offsets: list[int]
    batch: Batch
    produced_at: int
    attempts: list[int]

    def items(self) -> list[Item]:
        numbered = enumerate(zip(self.offsets, self.attempts, strict=True))
        return [
            Item(self.source, self.token.partition, offset, self.batch, index, self.produced_at, attempts)
            for index, (offset, attempts) in numbered
        ]


class ChildReady(NamedTuple):
    """The child has loaded its handlers and waits for items."""


class CallResult(NamedTuple):
    """The outcomes of the items of a call."""

    number: int
    outcomes: list[Outcome]
    errors: dict[str, str]
    """Id of a failed item → its traceback, or "" if the handler raised Retry, Bury or Snooze."""
    follow_ups: list[NewItem | Value]
    span: str
    """The header that names the span of the call; "" if the child is not traced."""


class CallProgress(NamedTuple):
    """A progress report of a handler."""

    number: int
    text: str


class CallsDone(NamedTuple):
    """All calls before this number have ended."""

    number: int


ChildMessage = ChildReady | CallResult | CallProgress | CallsDone


class CurrentCall:
    """The call that a child is running. The child writes it, its parent reads it."""

    def __init__(self, context: SpawnContext) -> None:
        self._numbers: Any = context.RawArray(c_longlong, 2)
        self._numbers[0] = -1

    @property
    def number(self) -> int:
        """The number of the call that started last; -1 before the first call."""
        number: int = self._numbers[0]
        return number

    @property
    def deadline(self) -> int:
        """When that call has run too long; 0 is never."""
        number: int = self._numbers[1]
        return number

    def begin(self, number: int, deadline: int) -> None:
        self._numbers[1] = 0
        self._numbers[0] = number
        self._numbers[1] = deadline

    def extend(self, deadline: int) -> None:
        self._numbers[1] = deadline


# -- the process -------------------------------------------------------------------------------------


def main(link: Connection, current: CurrentCall, handlers: bytes, settings: Settings) -> None:
    """Run handlers until the parent closes the link."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    loaded: Handlers = pickle.loads(handlers)
    with log_of_child(sys.stderr, current_span_ids), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        link.send(ChildReady())
        ChildExecutor(link, current, loaded, settings).work()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), name="penstock parent", daemon=True).start()


def _exit_with_parent(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class ChildExecutor:
    """Runs the calls that the parent sends."""

    def __init__(self, link: Connection, current: CurrentCall, handlers: Handlers, settings: Settings) -> None:
        clock = SystemClock()
        self._link = link
        self._current = current
        self._handlers = handlers
        self._batch = bool(settings.batch)
        self._invoker = _ChildInvoker(handlers, settings, lambda: clock.read().elapsed)
        self._backend = _ChildBackend(self, clock.read)
        self._runner: asyncio.Runner | None = None
        self._number = 0
        self._sending = threading.Lock()  # a handler may report progress from several threads

    def work(self) -> None:
        while True:
            number, message = self._link.recv()
            for context in self._contexts(message):
                self._call(number, context)
                number += 1
            self._send(CallsDone(number))

    def _contexts(self, message: list[CallItems]) -> list[Context]:
        pairs = [(items, item) for items in message for item in items.items()]
        if self._batch:
            return [Context(self._backend, pairs[0][0].source.queue, pairs[0][0].token, [item for _, item in pairs])]
        return [Context(self._backend, items.source.queue, items.token, [item]) for items, item in pairs]

    def _call(self, number: int, context: Context) -> None:
        handler = self._handlers.find(context.item.kind)
        assert handler is not None
        self._number = number
        self._invoker.errors = {}
        self._invoker.begin(context)
        self._current.begin(number, context.times_out_at)
        try:
            result = self._invoker.call(handler, context)
            if handler.is_async:
                result = self._wait_for(result)
        except BaseException as error:
            outcomes = self._invoker.end(context, error=error)
        else:
            outcomes = self._invoker.end(context, result)
        assert outcomes is not None
        if context.follow_ups or context.span is not None or any(outcome is not COMPLETED for outcome in outcomes):
            span = "" if context.span is None else context.span.header
            self._send(CallResult(number, outcomes, self._invoker.errors, context.follow_ups, span))

    def _wait_for(self, coroutine: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _send(self, message: ChildMessage) -> None:
        with self._sending:
            self._link.send(message)

    def report(self, text: str) -> None:
        self._send(CallProgress(self._number, text))

    def extend(self, deadline: int) -> None:
        self._current.extend(deadline)


class _ChildBackend:
    """The backend of contexts in a child."""

    stopping = False

    def __init__(self, child: ChildExecutor, moment: Callable[[], Moment]) -> None:
        self._child = child
        self.moment = moment

    def report_progress(self, context: Context, text: str) -> None:
        self._child.report(text)

    def deadline_changed(self, context: Context) -> None:
        self._child.extend(context.times_out_at)

    def check_queue(self, context: Context, name: str) -> None:
        """Does nothing. The parent checks the queue, and retries the item if there is no such queue."""

    def token(self, context: Context) -> str:
        token: Token = context.lease_data
        return format_token(token._replace(offset=context.item.offset))


class _ChildInvoker(HandlerInvoker):
    """Keeps the tracebacks of failures for the parent, which logs them and calls the hooks."""

    errors: dict[str, str]
    calls_here = True

    def report_failure(self, item: Item, outcome: Outcome, error: BaseException) -> None:
        requested = isinstance(error, Retry | Bury | Snooze)
        self.errors[item.id] = "" if requested else "".join(traceback.format_exception(error))
