"""Between handlers and the rest of the worker: what a context asks for, and where a call's results go.

Owns: `RunLine`, the `Line` of handlers in this process, and `Reporter`, which writes down what they say of their progress. Reports are
written by a thread of their own, the latest of each item, so that neither a handler nor a settling waits for them.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from penstock.api import arguments as calls
from penstock.api.items import Item, NewItem
from penstock.words.clock import SECOND
from penstock.words.errors import LeaseLost, PenstockError
from penstock.words.ids import Token, format_token
from penstock.words.values import Value
from penstock.worker.bell import Bell
from penstock.worker.context import Context
from penstock.worker.handlers import Handler, Handlers
from penstock.worker.holding import Hold, Pair
from penstock.worker.shelf import Waiting
from penstock.worker.verdicts import DONE, Verdict, reason_of

_log = logging.getLogger("penstock.worker")


class Reporter:
    """Writes progress reports."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._said: dict[Pair, tuple[Context, str]] = {}
        self._closing = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def say(self, context: Context, text: str) -> None:
        for pair in context.tag:
            self._said[pair] = context, text
        if self._thread is None:
            self._start()
        self._bell.ring()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="penstock progress", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._bell.wait()
            while self._said and not self._closing:
                pair, said = self._said.popitem()
                self._write(pair, *said)

    def _write(self, pair: Pair, context: Context, text: str) -> None:
        hold, item = pair
        try:
            hold.source.note(hold.partition, hold.lease, item.offset, text)
        except LeaseLost:
            context.lost = True  # or the item is settled by now; then nobody looks
        except PenstockError as error:
            _log.warning("the progress of item %s was not written: %s", item.id, error)

    def close(self) -> None:
        with self._starting:
            self._closing = True
        self._bell.ring()


class RunLine:
    """The line of handlers that run in this process."""

    def __init__(self, now: Callable[[], int], shelf: Waiting, handlers: Handlers) -> None:
        self.now = now
        self.stopping = False
        self.on_extended: Callable[[Context], None] | None = None
        self.reporter = Reporter()
        self._shelf = shelf
        self._handlers = handlers

    # -- for contexts ------------------------------------------------------------------------------------

    def report(self, context: Context, text: str) -> None:
        self.reporter.say(context, text)

    def extended(self, context: Context) -> None:
        if self.on_extended is not None:
            self.on_extended(context)

    def check_queue(self, context: Context, name: str) -> None:
        context.tag[0][0].source.find(name)

    def token(self, context: Context) -> str:
        hold, item = context.tag[0]
        return format_token(Token(hold.source.incarnation, hold.partition, hold.lease, item.offset))

    # -- for places --------------------------------------------------------------------------------------

    def contexts(self, pairs: Sequence[Pair]) -> list[tuple[Handler, Context]]:
        """The calls to make for items of one queue: one for each handler."""
        if len(pairs) == 1:
            return [(self._handler(pairs[0][1]), Context(self, pairs[0][0].source.name, pairs, [pairs[0][1]]))]
        groups: dict[Handler, list[Pair]] = {}
        for pair in pairs:
            groups.setdefault(self._handler(pair[1]), []).append(pair)
        return [(handler, Context(self, some[0][0].source.name, some, [item for _, item in some])) for handler, some in groups.items()]

    def _handler(self, item: Item) -> Handler:
        handler = self._handlers.find(item.kind)
        assert handler is not None  # the feeder has given the others back
        return handler

    def settle(self, context: Context, verdicts: Sequence[Verdict]) -> None:
        """A call has ended: this becomes of its items, and its place is free."""
        for pair, verdict in zip(context.tag, verdicts, strict=True):
            if verdict is DONE and context.follow_ups:
                verdict = follow_ups(pair[0], context.follow_ups)
            self._shelf.finished(pair)
            pair[0].settler.settle(pair, verdict)


def follow_ups(hold: Hold, items: Sequence[NewItem | Value]) -> Verdict:
    """An item is completed and others are produced; retried if it turns out that these cannot be."""
    source = hold.source
    try:
        batches = calls.follow_ups(items)
        then = [(source.incarnation if name is None else source.find(name), batch) for name, batch in batches.items()]
    except PenstockError as error:
        return Verdict("retried", SECOND, f"its follow-ups could not be made: {reason_of(error)}")
    return Verdict("completed", then=then)
