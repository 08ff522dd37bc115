"""The pool of child processes in which handlers run, for work that needs a processor.

Owns: `ProcessPool`: one thread for each child, which sends it items and receives their outcomes. The parent leases, extends and settles.
Quick items are sent several at a time and ahead, so that a child does not wait for its parent between calls.
When a child dies, the call that it was running has failed, finished calls count, and calls that it had not begun are sent to another
child. A child that runs longer than `handler_timeout` is killed. Each dead child is replaced.
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
from penstock.words.ids import Token
from penstock.words.limits import KIB
from penstock.worker import child_main
from penstock.worker.buffer import ItemBuffer, LeasedItem
from penstock.worker.child_main import CallItems, CallProgress, CallResult, CallsDone, ChildMessage, CurrentCall
from penstock.worker.context import Context
from penstock.worker.handlers import Dispatcher, HandlerInvoker, Handlers
from penstock.worker.outcomes import COMPLETED, RETURNED, Bury, Outcome, PlainReasonError, Retry, Snooze
from penstock.worker.settings import Hooks, Settings
from penstock.worker.thread_pool import BaseThreadPool

CHUNK = 2 * MILLISECOND
"""How long the items of one message should take a child."""
MAX_PORTION = 64
"""Most items of one message."""
AHEAD_BYTES = 16 * KIB
"""Most bytes of payloads that are sent ahead."""
LONG = 20 * MILLISECOND
"""If an item takes longer than this, nothing is sent ahead."""
MAX_FAILED_STARTS = 3
"""When so many children in a row have died before they were ready, the worker ends with an error."""
GRACE_SECONDS = 1.0
"""How long a child may take to end before it is killed."""
START_POLL_SECONDS = 0.1
T = TypeVar("T")
_context = get_context("spawn")


class ChildProcessExited(PlainReasonError):
    """A child process died while it ran a handler."""


class ChildError(Exception):
    """What a handler raised in a child process, as the text of its traceback."""


class ChildProcess:
    """A child process and the calls that it was sent."""

    def __init__(self, handlers: bytes, settings: Settings) -> None:
        self.link: Connection
        self.link, theirs = _context.Pipe()
        self.current = CurrentCall(_context)
        self._process = _context.Process(target=child_main.main, args=(theirs, self.current, handlers, settings), name="penstock handler")
        self._process.start()
        theirs.close()
        self.ready = False
        self.timed_out = False
        self.since = 0
        """When its last message came, or when it was last sent items while idle."""
        self.calls: dict[int, Context] = {}
        """Calls that it was sent and that are not finished, in order, by number."""
        self.results: dict[int, CallResult] = {}
        """Results of calls that are not finished yet here."""
        self._next = 0

    def send(self, contexts: list[Context]) -> None:
        number = self._next
        self._next += len(contexts)
        self.calls.update(enumerate(contexts, number))
        self.link.send((number, _pack([pair for context in contexts for pair in context.lease_data])))

    def overdue(self, now: int) -> bool:
        """Whether its current call runs longer than `handler_timeout`."""
        at, deadline = self.current.number, self.current.deadline
        return at in self.calls and 0 < deadline <= now and self.current.number == at

    def kill(self) -> None:
        with suppress(ValueError):  # it is over already
            self._process.kill()

    def wait_for_exit(self) -> str:
        """Wait for its end, and kill it if that takes long; gives how it ended."""
        self.link.close()
        self._process.join(GRACE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        self._process.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class ProcessPool(BaseThreadPool):
    """Threads with a child process each."""

    stoppable = True

    def __init__(
        self,
        settings: Settings,
        buffer: ItemBuffer,
        caller: HandlerInvoker,
        dispatcher: Dispatcher,
        request_more: Callable[[], None],
        on_ended: Callable[[], None],
        handlers: Handlers,
        fail: Callable[[Exception], None],
    ) -> None:
        super().__init__(settings.processes, buffer, request_more, on_ended)
        self.item_time = float(CHUNK)
        self._settings = settings
        self._caller = caller
        self._dispatcher = dispatcher
        self._fail = fail
        self._handlers = pickle_handlers(handlers)
        self._child_settings = msgspec.structs.replace(settings, hooks=Hooks())
        self._large = False
        """Items are too large to be sent ahead: sending could block on a full pipe, and this thread could not watch its child meanwhile."""
        self._one_by_one = settings.hooks.has_item_hooks
        self._children: set[ChildProcess] = set()
        self._failures = 0

    def start(self) -> None:
        self._start(self.max_threads)

    def wake(self, count: int) -> None:
        self._wake(count)

    def cancel(self) -> None:
        for child in list(self._children):
            child.kill()

    # -- in each thread --------------------------------------------------------------------------------

    def _work(self) -> bool:
        while not self.closing:
            child = ChildProcess(self._handlers, self._child_settings)
            self._children.add(child)
            if self._dispatcher.stopping:
                child.kill()
            with suppress(EOFError, OSError):  # the link broke: the child is no more
                self._serve(child)
            self._children.discard(child)
            self._handle_exit(child)
        return False

    def _serve(self, child: ChildProcess) -> None:
        """Keep a child busy until the worker drains."""
        while True:
            self._send_items(child)
            if child.calls or not (child.ready or self.closing):
                self._receive(child)
            elif not self._sleep():
                return

    def _send_items(self, child: ChildProcess) -> None:
        """Send items to a child: when it is idle, and, of quick items, some ahead."""
        if self.closing or not child.ready:
            return
        portion = self._portion_size(child)
        if not portion:
            return
        try:
            pairs = self.buffer.take_many(portion)
        except IndexError:
            return
        if child.calls and sum(len(item.payload) for _, item in pairs) > AHEAD_BYTES:
            self._large = True
            self.buffer.put_back(pairs)
            return
        if not child.calls:
            child.since = self._dispatcher.now()
        contexts = [
            context for some in ([pairs] if self._settings.batch else _singly(pairs)) for _, context in self._dispatcher.contexts(some)
        ]
        for context in contexts:
            self._caller.begin(context)
        for message in _singly(contexts) if self._settings.batch else [contexts]:
            child.send(message)
        self.request_more()

    def _portion_size(self, child: ChildProcess) -> int:
        """How many items to send now; 0 is none."""
        size = max(1, min(MAX_PORTION, int(CHUNK / max(1.0, self.item_time))))
        waiting = len(self.buffer)
        if child.calls and (
            self._one_by_one or self._large or self.item_time > LONG or waiting < self.max_threads or len(child.calls) > size
        ):
            return 0
        return self._settings.batch or min(size, max(1, waiting // self.max_threads))

    # -- messages from a child -------------------------------------------------------------------------

    def _receive(self, child: ChildProcess) -> None:
        """Wait for a message, but no longer than the current call may take; kill the child when that runs too long."""
        if child.link.poll(self._poll_seconds(child)):
            self._handle_message(child, child.link.recv())
        elif not child.timed_out and child.overdue(self._dispatcher.now()):
            child.timed_out = True
            child.kill()

    def _poll_seconds(self, child: ChildProcess) -> float | None:
        if not child.ready:
            return START_POLL_SECONDS
        if not self._settings.handler_timeout:
            return None
        deadline, now = child.current.deadline, self._dispatcher.now()
        return max(0.001, (deadline - now) / SECOND) if deadline > now else min(0.05, self._settings.handler_timeout / SECOND)

    def _handle_message(self, child: ChildProcess, message: ChildMessage) -> None:
        if isinstance(message, CallsDone):
            done = [number for number in child.calls if number < message.number]
            now = self._dispatcher.now()
            self._note(max(1, len(done)), now - child.since)
            child.since = now
            for number in done:
                self._finish(child, number)
        elif isinstance(message, CallResult):
            child.results[message.number] = message
        elif isinstance(message, CallProgress):
            if message.number in child.calls:
                self._dispatcher.report_progress(child.calls[message.number], message.text)
        else:
            child.ready = True
            self._failures = 0

    def _finish(self, child: ChildProcess, number: int) -> None:
        """A call has ended: settle its items as its result says, or as completed if there is no result."""
        context = child.calls.pop(number)
        outcomes = [COMPLETED] * len(context.items)
        if (results := child.results.pop(number, None)) is not None:
            context.follow_ups = results.follow_ups
            outcomes = [COMPLETED if outcome == COMPLETED else outcome for outcome in results.outcomes]
            for item, outcome in zip(context.items, outcomes, strict=True):
                if outcome is not COMPLETED:
                    self._caller.report_failure(item, outcome, _error(outcome, results.errors.get(item.id, "")))
        self._dispatcher.settle(context, self._caller.end_with_outcomes(context, outcomes))

    def _handle_exit(self, child: ChildProcess) -> None:
        """A child has ended: settle its finished calls, fail the one that was running, put the items of the others back."""
        with suppress(EOFError, OSError):
            while child.link.poll(0):
                self._handle_message(child, child.link.recv())
        how = child.wait_for_exit()
        error = self._caller.timeout_error() if child.timed_out else ChildProcessExited(f"the worker process died ({how})")
        back: list[LeasedItem] = []
        for number, context in list(child.calls.items()):
            if number in child.results or number < child.current.number:
                self._finish(child, number)
            elif number > child.current.number:
                back += context.lease_data
            elif self._dispatcher.stopping:
                self._dispatcher.settle(context, [RETURNED] * len(context.items))
            elif (outcomes := self._caller.end(context, error=error)) is not None:
                self._dispatcher.settle(context, outcomes)
        if back:
            self.buffer.put_back(back)
            self._wake(len(back))
        if not child.ready and not self.closing:
            self._count_failed_start(how)

    def _count_failed_start(self, how: str) -> None:
        with self._changing:
            self._failures += 1
        if self._failures >= MAX_FAILED_STARTS:
            text = f"the worker's processes end before they can begin ({how}); look at what they write to stderr, and let the handler's "
            self._fail(InvalidRequest(f"{text}module be imported without side effects"))


def pickle_handlers(handlers: Handlers) -> bytes:
    """The handlers, to be sent to a child; InvalidRequest if that is not possible."""
    try:
        return pickle.dumps(handlers)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"a handler cannot be sent to another process ({error}); define it at the top of a module") from None


def _pack(pairs: Sequence[LeasedItem]) -> list[CallItems]:
    packed = []
    start = 0
    for stop in range(1, len(pairs) + 1):
        if stop == len(pairs) or not _neighbours(pairs[stop - 1], pairs[stop]):
            packed.append(_call_items(pairs[start:stop]))
            start = stop
    return packed


def _neighbours(one: LeasedItem, other: LeasedItem) -> bool:
    return one[0] is other[0] and one[1]._batch is other[1]._batch and one[1]._index + 1 == other[1]._index


def _call_items(pairs: Sequence[LeasedItem]) -> CallItems:
    lease, first = pairs[0]
    token = Token(lease.source.incarnation, lease.partition, lease.number, first.offset)
    batch = first._batch.slice(first._index, first._index + len(pairs))
    return CallItems(lease.source.name, token, batch, first._produced_at, [item.attempts for _, item in pairs])


def _singly(things: Sequence[T]) -> list[list[T]]:
    return [[thing] for thing in things]


def _error(outcome: Outcome, trace: str) -> Exception:
    """What a handler raised in a child, as far as it is known here."""
    if trace:
        return ChildError(trace)
    if outcome.name == "buried":
        return Bury(outcome.reason)
    return Snooze(0, outcome.reason) if outcome.name == "snoozed" else Retry(reason=outcome.reason)
