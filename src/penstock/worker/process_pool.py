"""The pool of child processes in which handlers run, for CPU-bound work.

Owns: `ProcessPool`: one thread for each child, which sends it items and receives their outcomes. The parent leases,
extends and settles. Quick items are sent several at a time and ahead, so that a child does not wait for its parent
between calls.
When a child exits, its finished calls count, the call that it was running has failed, and the calls that it had not
started are sent to another child. A child whose call runs longer than `handler_timeout` is killed. Each child that
exits is replaced.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from penstock.api.traces import active_tracer
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.ids import Token
from penstock.words.limits import KIB
from penstock.worker import child_main
from penstock.worker.buffer import LeasedItem
from penstock.worker.child_main import CallItems, CallProgress, CallResult, CallsDone, ChildMessage, CurrentCall
from penstock.worker.context import Context
from penstock.worker.handlers import Handlers, PoolParts
from penstock.worker.outcomes import COMPLETED, RETURNED, Bury, Outcome, PlainReasonError, Retry, Snooze
from penstock.worker.settings import Hooks, Settings
from penstock.worker.thread_pool import BaseThreadPool

CHUNK = 2 * MILLISECOND
"""How long a child should need for the items of one message."""
MAX_PORTION = 64
"""The most items of one message."""
AHEAD_BYTES = 16 * KIB
"""The most bytes of payloads that are sent ahead."""
LONG = 20 * MILLISECOND
"""If an item takes longer than this, nothing is sent ahead."""
MAX_FAILED_STARTS = 3
"""When this many children in a row exit before they are ready, the worker ends with an error."""
GRACE_SECONDS = 1.0
"""How long a child may take to end before it is killed."""
START_POLL_SECONDS = 0.1
T = TypeVar("T")
_context = get_context("spawn")


class ChildProcessExited(PlainReasonError):
    """A child process exited while it ran a handler."""


class ChildError(Exception):
    """An exception of a handler in a child process, as the text of its traceback."""


class ChildProcess:
    """A child process and the calls that it was sent."""

    def __init__(self, handlers: bytes, settings: Settings) -> None:
        self.link: Connection
        self.link, child_link = _context.Pipe()
        self.current = CurrentCall(_context)
        args = (child_link, self.current, handlers, settings)
        self._process = _context.Process(target=child_main.main, args=args, name="penstock handler")
        self._process.start()
        child_link.close()
        self.ready = False
        self.timed_out = False
        self.since = 0
        """When its last message came, or when it was last sent items while idle."""
        self.calls: dict[int, Context] = {}
        """Number → call that was sent and whose end was not yet reported, in sending order."""
        self.results: dict[int, CallResult] = {}
        """Number → result that came before the end of its call was reported."""
        self._next = 0

    def send(self, contexts: list[Context]) -> None:
        number = self._next
        self._next += len(contexts)
        self.calls.update(enumerate(contexts, number))
        self.link.send((number, _pack([pair for context in contexts for pair in context.lease_data])))

    def overdue(self, now: int) -> bool:
        """Whether its current call runs longer than `handler_timeout`."""
        number, deadline = self.current.number, self.current.deadline
        return number in self.calls and 0 < deadline <= now and self.current.number == number

    def kill(self) -> None:
        with suppress(ValueError):  # the process object is closed
            self._process.kill()

    def wait_for_exit(self) -> str:
        """Wait until the process has exited; kill it if that takes long. Gives its signal or exit code as text."""
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

    def __init__(self, parts: PoolParts, handlers: Handlers, fail: Callable[[Exception], None]) -> None:
        super().__init__(parts.settings.processes, parts)
        self.item_time = float(CHUNK)
        self._fail = fail
        self._handlers = pickle_handlers(handlers)
        self._child_settings = msgspec.structs.replace(self._settings, hooks=Hooks())
        self._large = False
        """Items are too large to send ahead: a full pipe would block the thread, which must watch its child."""
        self._one_by_one = self._settings.hooks.has_item_hooks
        self._children: set[ChildProcess] = set()
        self._failed_starts = 0

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
            with suppress(EOFError, OSError):  # the link is broken: the child has exited
                self._serve(child)
            self._children.discard(child)
            self._handle_exit(child)
        return False

    def _serve(self, child: ChildProcess) -> None:
        """Send items to a child and receive its messages until the worker drains."""
        while True:
            self._send_items(child)
            if child.calls or not (child.ready or self.closing):
                self._receive(child)
            elif not self._sleep():
                return

    def _send_items(self, child: ChildProcess) -> None:
        """Send items to a child if it is idle; send quick items also ahead."""
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
        groups = [pairs] if self._settings.batch else _singly(pairs)
        contexts = [context for group in groups for _, context in self._dispatcher.contexts(group)]
        for context in contexts:
            self._invoker.begin(context)
        for message in _singly(contexts) if self._settings.batch else [contexts]:
            child.send(message)
        self.request_more()

    def _portion_size(self, child: ChildProcess) -> int:
        """How many items to send now; may be 0."""
        size = max(1, min(MAX_PORTION, int(CHUNK / max(1.0, self.item_time))))
        waiting = len(self.buffer)
        if child.calls and (
            self._one_by_one or self._large or self.item_time > LONG or waiting < self.max_threads or len(child.calls) > size
        ):
            return 0
        return self._settings.batch or min(size, max(1, waiting // self.max_threads))

    # -- messages from a child -------------------------------------------------------------------------

    def _receive(self, child: ChildProcess) -> None:
        """Wait for a message, at most as long as the current call may take. Kill the child if the call takes longer."""
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
            self._record_time(max(1, len(done)), now - child.since)
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
            self._failed_starts = 0

    def _finish(self, child: ChildProcess, number: int) -> None:
        """Settle the items of an ended call by its result, or as completed if there is no result."""
        context = child.calls.pop(number)
        outcomes = [COMPLETED] * len(context.items)
        if (results := child.results.pop(number, None)) is not None:
            context.follow_ups = results.follow_ups
            if results.span and (tracer := active_tracer()) is not None:
                context.span = tracer.handled_elsewhere(results.span)
            outcomes = [COMPLETED if outcome == COMPLETED else outcome for outcome in results.outcomes]
            with context.current_span():
                for item, outcome in zip(context.items, outcomes, strict=True):
                    if outcome is not COMPLETED:
                        self._invoker.report_failure(item, outcome, _error(outcome, results.errors.get(item.id, "")))
        self._dispatcher.settle(context, self._invoker.end_with_outcomes(context, outcomes))

    def _handle_exit(self, child: ChildProcess) -> None:
        """After the exit of a child: settle its finished calls, fail the running one, put all other items back."""
        with suppress(EOFError, OSError):
            while child.link.poll(0):
                self._handle_message(child, child.link.recv())
        how = child.wait_for_exit()
        error = self._invoker.timeout_error() if child.timed_out else ChildProcessExited(f"the worker process died ({how})")
        not_started: list[LeasedItem] = []
        for number, context in list(child.calls.items()):
            if number in child.results or number < child.current.number:
                self._finish(child, number)
            elif number > child.current.number:
                not_started += context.lease_data
            elif self._dispatcher.stopping:
                self._dispatcher.settle(context, [RETURNED] * len(context.items))
            else:
                self._fail_running_call(child, context, error)
        if not_started:
            self.buffer.put_back(not_started)
            self._wake(len(not_started))
        if not child.ready and not self.closing:
            self._count_failed_start(how)

    def _fail_running_call(self, child: ChildProcess, context: Context, error: PlainReasonError) -> None:
        """Settle the items of the call that a child was running when it exited. Its span was lost with the child."""
        moment = context.lease_data[0][0].source.home.clock.read()
        self._invoker.begin_span(context, (moment.wall - (moment.elapsed - child.since)) * 1_000)
        if (outcomes := self._invoker.end(context, error=error)) is not None:
            self._dispatcher.settle(context, outcomes)

    def _count_failed_start(self, how: str) -> None:
        with self._changing:
            self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            text = f"the worker's processes exit before they are ready ({how}); see what they write to stderr, and make sure that the "
            self._fail(InvalidRequest(f"{text}handler's module can be imported without side effects"))


def pickle_handlers(handlers: Handlers) -> bytes:
    """Pickle the handlers for a child process; InvalidRequest if that is not possible."""
    try:
        return pickle.dumps(handlers)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"a handler cannot be sent to another process ({error}); define it at the top level of a module") from None


def _pack(pairs: Sequence[LeasedItem]) -> list[CallItems]:
    """Put neighbouring items of a lease and a batch together."""
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
    offsets, attempts = [item.offset for _, item in pairs], [item.attempts for _, item in pairs]
    return CallItems(first._source, token, offsets, batch, first._produced_at, attempts)


def _singly(things: Sequence[T]) -> list[list[T]]:
    return [[thing] for thing in things]


def _error(outcome: Outcome, trace: str) -> Exception:
    """The exception of a handler in a child, rebuilt from its outcome and its traceback."""
    if trace:
        return ChildError(trace)
    if outcome.name == "buried":
        return Bury(outcome.reason)
    return Snooze(0, outcome.reason) if outcome.name == "snoozed" else Retry(reason=outcome.reason)
