"""Handlers in child processes, for work that needs a processor.

Owns: `ChildPlaces`: a thread for each child, which sends it items and hears what became of them. The parent leases, extends and settles.
Quick items are sent several at a time, and while a child works on some it has the next already, so that it need not wait for the parent.
A child that dies costs the call it was at one attempt; what it had done counts, what it had not begun is sent to another. One that runs
over `handler_timeout` is killed, and so dies. Another takes its place.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import KIB
from penstock.worker import child
from penstock.worker.calling import Caller
from penstock.worker.context import Context
from penstock.worker.handlers import Handlers
from penstock.worker.holding import Pair
from penstock.worker.line import RunLine
from penstock.worker.places import Places
from penstock.worker.settings import Hooks, Settings
from penstock.worker.shelf import Waiting
from penstock.worker.verdicts import DONE, RETURNED, Bury, Retry, Snooze, Verdict, Worded
from penstock.worker.wire import Cell, Message, Said, Through, Told, pack

CHUNK = 2 * MILLISECOND
"""How long a child should have to work on what it is sent at once."""
MOST = 64
"""Items, at most."""
AHEAD_BYTES = 16 * KIB
LONG = 20 * MILLISECOND
"""Handlers that take longer are not sent anything ahead."""
STARTS = 3
"""A child that dies so often before it has begun, one after the other, will not begin."""
GRACE_SECONDS = 1.0
BIRTH_SECONDS = 0.1
T = TypeVar("T")
_context = get_context("spawn")


class Died(Worded):
    """A child process ended while it was at work."""


class ChildError(Exception):
    """What a handler raised in a child process, as the text of its traceback."""


class Child:
    """A process, as its parent sees it."""

    def __init__(self, handlers: bytes, settings: Settings) -> None:
        self.link: Connection
        self.link, theirs = _context.Pipe()
        self.cell = Cell(_context)
        self._process = _context.Process(target=child.main, args=(theirs, self.cell, handlers, settings), name="penstock handler")
        self._process.start()
        theirs.close()
        self.ready = False
        self.ran_over = False
        self.since = 0
        """When it was last heard of, or given something to do."""
        self.calls: dict[int, Context] = {}
        """Those it was sent and has not said to be through, in order."""
        self.told: dict[int, Told] = {}
        self._next = 0

    def send(self, contexts: list[Context]) -> None:
        number = self._next
        self._next += len(contexts)
        self.calls.update(enumerate(contexts, number))
        self.link.send((number, pack([pair for context in contexts for pair in context.tag])))

    def overdue(self, now: int) -> bool:
        """Whether it runs over with one of its calls."""
        at, deadline = self.cell.at, self.cell.deadline
        return at in self.calls and 0 < deadline <= now and self.cell.at == at

    def kill(self) -> None:
        with suppress(ValueError):  # it is over already
            self._process.kill()

    def end(self) -> str:
        """Let it end, or make it; how it did."""
        self.link.close()
        self._process.join(GRACE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        self._process.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class ChildPlaces(Places):
    """Threads with a child process each."""

    stoppable = True

    def __init__(
        self,
        settings: Settings,
        shelf: Waiting,
        caller: Caller,
        line: RunLine,
        hungry: Callable[[], None],
        ended: Callable[[], None],
        handlers: Handlers,
        fail: Callable[[Exception], None],
    ) -> None:
        super().__init__(settings.processes, shelf, hungry, ended)
        self.each = float(CHUNK)
        self._settings = settings
        self._caller = caller
        self._line = line
        self._fail = fail
        self._handlers = packed(handlers)
        self._childs_settings = msgspec.structs.replace(settings, hooks=Hooks())
        self._large = False
        """Items are too large to be sent ahead: the link could not take them, and nobody would look after the child meanwhile."""
        self._one_by_one = settings.hooks.any_per_item
        self._children: set[Child] = set()
        self._failures = 0

    def start(self) -> None:
        self._start(self.most)

    def wake(self, count: int) -> None:
        self._wake(count)

    def cancel(self) -> None:
        for one in list(self._children):
            one.kill()

    # -- in each thread --------------------------------------------------------------------------------

    def _work(self) -> bool:
        while not self.closing:
            one = Child(self._handlers, self._childs_settings)
            self._children.add(one)
            if self._line.stopping:
                one.kill()
            with suppress(EOFError, OSError):  # the link broke: the child is no more
                self._serve(one)
            self._children.discard(one)
            self._mourn(one)
        return False

    def _serve(self, one: Child) -> None:
        """Keep a child busy until the worker drains."""
        while True:
            self._feed(one)
            if one.calls or not (one.ready or self.closing):
                self._hear(one)
            elif not self._sleep():
                return

    def _feed(self, one: Child) -> None:
        """Send it something to do, and, of quick items, something for afterwards."""
        if self.closing or not one.ready:
            return
        portion = self._portion(one)
        if not portion:
            return
        try:
            pairs = self.shelf.take_many(portion)
        except IndexError:
            return
        if one.calls and sum(len(item.payload) for _, item in pairs) > AHEAD_BYTES:
            self._large = True
            self.shelf.put_back(pairs)
            return
        if not one.calls:
            one.since = self._line.now()
        contexts = [context for some in ([pairs] if self._settings.batch else _singly(pairs)) for _, context in self._line.contexts(some)]
        for context in contexts:
            self._caller.begin(context)
        for message in _singly(contexts) if self._settings.batch else [contexts]:
            one.send(message)
        self.hungry()

    def _portion(self, one: Child) -> int:
        """How many items to send now; 0 is none."""
        size = max(1, min(MOST, int(CHUNK / max(1.0, self.each))))
        waiting = len(self.shelf)
        if one.calls and (self._one_by_one or self._large or self.each > LONG or waiting < self.most or len(one.calls) > size):
            return 0
        return self._settings.batch or min(size, max(1, waiting // self.most))

    # -- what a child says -----------------------------------------------------------------------------

    def _hear(self, one: Child) -> None:
        """Wait for a message, as long as the call it is at may take."""
        if one.link.poll(self._patience(one)):
            self._take(one, one.link.recv())
        elif not one.ran_over and one.overdue(self._line.now()):
            one.ran_over = True
            one.kill()

    def _patience(self, one: Child) -> float | None:
        if not one.ready:
            return BIRTH_SECONDS
        if not self._settings.handler_timeout:
            return None
        deadline, now = one.cell.deadline, self._line.now()
        return max(0.001, (deadline - now) / SECOND) if deadline > now else min(0.05, self._settings.handler_timeout / SECOND)

    def _take(self, one: Child, message: Message) -> None:
        if isinstance(message, Through):
            done = [number for number in one.calls if number < message.number]
            now = self._line.now()
            self._note(max(1, len(done)), now - one.since)
            one.since = now
            for number in done:
                self._finish(one, number)
        elif isinstance(message, Told):
            one.told[message.number] = message
        elif isinstance(message, Said):
            if message.number in one.calls:
                self._line.report(one.calls[message.number], message.text)
        else:
            one.ready = True
            self._failures = 0

    def _finish(self, one: Child, number: int) -> None:
        """A call was made: what the child told of it, or, if nothing, success."""
        context = one.calls.pop(number)
        verdicts = [DONE] * len(context.items)
        if (told := one.told.pop(number, None)) is not None:
            context.follow_ups = told.follow_ups
            verdicts = [DONE if verdict == DONE else verdict for verdict in told.verdicts]
            for item, verdict in zip(context.items, verdicts, strict=True):
                if verdict is not DONE:
                    self._caller.failed(item, verdict, _error(verdict, told.errors.get(item.id, "")))
        self._line.settle(context, self._caller.over(context, verdicts))

    def _mourn(self, one: Child) -> None:
        """A child is no more: what it had done counts, what it was at has failed, what it had not begun is for another."""
        with suppress(EOFError, OSError):
            while one.link.poll(0):
                self._take(one, one.link.recv())
        how = one.end()
        error = self._caller.ran_over() if one.ran_over else Died(f"the worker process died ({how})")
        back: list[Pair] = []
        for number, context in list(one.calls.items()):
            if number in one.told or number < one.cell.at:
                self._finish(one, number)
            elif number > one.cell.at:
                back += context.tag
            elif self._line.stopping:
                self._line.settle(context, [RETURNED] * len(context.items))
            elif (verdicts := self._caller.end(context, error=error)) is not None:
                self._line.settle(context, verdicts)
        if back:
            self.shelf.put_back(back)
            self._wake(len(back))
        if not one.ready and not self.closing:
            self._stillborn(how)

    def _stillborn(self, how: str) -> None:
        with self._changing:
            self._failures += 1
        if self._failures >= STARTS:
            text = f"the worker's processes end before they can begin ({how}); look at what they write to stderr, and let the handler's "
            self._fail(InvalidRequest(f"{text}module be imported without side effects"))


def packed(handlers: Handlers) -> bytes:
    """The handlers as a child gets them."""
    try:
        return pickle.dumps(handlers)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"a handler cannot be sent to another process ({error}); define it at the top of a module") from None


def _singly(things: Sequence[T]) -> list[list[T]]:
    return [[thing] for thing in things]


def _error(verdict: Verdict, trace: str) -> Exception:
    """What a handler raised, as far as it can be told here."""
    if trace:
        return ChildError(trace)
    if verdict.outcome == "buried":
        return Bury(verdict.reason)
    return Snooze(0, verdict.reason) if verdict.outcome == "snoozed" else Retry(reason=verdict.reason)
