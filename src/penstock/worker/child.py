"""A child process of a worker: it runs handlers on what it is sent, until nothing is sent any more.

Owns: `main`. A child has no broker: it leases nothing and settles nothing. It leaves signals that end a worker to its parent, and does not
outlive it: where the system can see to that (Linux) at once, elsewhere as soon as the interpreter lets a thread look.
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
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SystemClock
from penstock.words.ids import Token, format_token
from penstock.worker.calling import Caller
from penstock.worker.context import Context
from penstock.worker.handlers import Handler, Handlers
from penstock.worker.settings import Settings
from penstock.worker.verdicts import DONE, Bury, Retry, Snooze, Verdict
from penstock.worker.wire import Cell, Message, Parcel, Ready, Said, Through, Told

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(link: Connection, cell: Cell, handlers: bytes, settings: Settings) -> None:
    """Run handlers until the parent closes the link."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    found: Handlers = pickle.loads(handlers)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        link.send(Ready())
        Child(link, cell, found, settings).work()


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    threading.Thread(target=_follow, args=(parent.sentinel,), name="penstock parent", daemon=True).start()


def _follow(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class Child:
    """Makes the calls that it is sent."""

    def __init__(self, link: Connection, cell: Cell, handlers: Handlers, settings: Settings) -> None:
        clock = SystemClock()
        self._link = link
        self._cell = cell
        self._handlers = handlers
        self._batch = bool(settings.batch)
        self._caller = _ChildCaller(handlers, settings, lambda: clock.read().elapsed)
        self._line = _ChildLine(self, lambda: clock.read().elapsed)
        self._runner: asyncio.Runner | None = None
        self._number = 0
        self._sending = threading.Lock()  # a handler may have threads of its own

    def work(self) -> None:
        while True:
            number, parcels = self._link.recv()
            for context in self._contexts(parcels):
                self._call(number, context)
                number += 1
            self._send(Through(number))

    def _contexts(self, parcels: list[Parcel]) -> list[Context]:
        given = [(parcel, item) for parcel in parcels for item in parcel.items()]
        if self._batch:
            return [Context(self._line, given[0][0].queue, given[0][0].token, [item for _, item in given])]
        return [Context(self._line, parcel.queue, parcel.token, [item]) for parcel, item in given]

    def _call(self, number: int, context: Context) -> None:
        handler = self._handlers.find(context.item.kind)
        assert handler is not None
        self._number = number
        self._caller.errors = {}
        self._caller.begin(context)
        self._cell.begin(number, context.deadline)
        try:
            result = handler(self._caller.given(context), context)
            if handler.is_async:
                result = self._wait_for(result)
        except BaseException as error:
            verdicts = self._caller.end(context, error=error)
        else:
            verdicts = self._caller.end(context, result)
        assert verdicts is not None
        if context.follow_ups or any(verdict is not DONE for verdict in verdicts):
            self._send(Told(number, verdicts, self._caller.errors, context.follow_ups))

    def _wait_for(self, coroutine: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _send(self, message: Message) -> None:
        with self._sending:
            self._link.send(message)

    def say(self, text: str) -> None:
        self._send(Said(self._number, text))

    def extend(self, deadline: int) -> None:
        self._cell.extend(deadline)


class _ChildLine:
    """The line of handlers in a child."""

    stopping = False

    def __init__(self, child: Child, now: Callable[[], int]) -> None:
        self._child = child
        self.now = now

    def report(self, context: Context, text: str) -> None:
        self._child.say(text)

    def extended(self, context: Context) -> None:
        self._child.extend(context.deadline)

    def check_queue(self, context: Context, name: str) -> None:
        """Only the parent can tell; it retries the item if there is none."""

    def token(self, context: Context) -> str:
        token: Token = context.tag
        return format_token(token._replace(offset=context.item.offset))


class _ChildCaller(Caller):
    """Leaves it to the parent to tell of failures."""

    errors: dict[str, str]

    def call(self, context: Context, handler: Handler) -> list[Verdict] | None:
        raise NotImplementedError

    def failed(self, item: Item, verdict: Verdict, error: BaseException) -> None:
        meant = isinstance(error, Retry | Bury | Snooze)
        self.errors[item.id] = "" if meant else "".join(traceback.format_exception(error))
