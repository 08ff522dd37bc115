"""Handlers: how the handler of an item is found and called, and how its outcome reaches the settler.

Owns: `Handler` and `Handlers` (the functions of a worker), `HandlerInvoker` (the steps before and after a call, with
hooks; the same for threads, tasks and processes), `Dispatcher` (makes contexts for leased items and passes their
outcomes to the settlers), `ProgressReporter`, and `PoolParts`.
A handler is a function of an item, or of a list of items. It also gets a Context if it has a second required parameter
or a parameter named `context`. An `async def` runs in an event loop.
`HandlerInvoker` raises no error of a handler or hook.
"""

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from penstock.api import arguments
from penstock.api.items import Item, NewItem
from penstock.api.traces import active_tracer
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError
from penstock.words.ids import Token, format_token
from penstock.words.logs import log_fields
from penstock.words.values import Value
from penstock.worker.buffer import ItemBuffer, LeasedItem, WorkerLease
from penstock.worker.context import Context
from penstock.worker.outcomes import (
    COMPLETED,
    RETURNED,
    Bury,
    Failed,
    Outcome,
    PlainReasonError,
    Retry,
    Snooze,
    batch_failures,
    expected_outcome,
    failure_reason,
    outcome_of,
)
from penstock.worker.settings import Settings
from penstock.worker.wakeup import WakeUp

HandlerFunction = Callable[..., Any]
_log = logging.getLogger("penstock.worker")


class Handler:
    """A function, and how its Context is passed."""

    __slots__ = ("_context_style", "function", "is_async")

    def __init__(self, function: HandlerFunction) -> None:
        if not callable(function):
            raise InvalidRequest(f"the handler is {type(function).__name__}; give a function of an item")
        self.function = function
        self.is_async = is_async(function)
        self._context_style = _context_style(function)

    @property
    def wants_context(self) -> bool:
        return self._context_style is not None

    def __call__(self, argument: Any, context: Any) -> Any:
        if self._context_style is None:
            return self.function(argument)
        return self.function(argument, context) if self._context_style == "position" else self.function(argument, context=context)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function by reference. After the decorator `worker`, its name refers to the worker instead."""
        module, name = getattr(self.function, "__module__", None), getattr(self.function, "__qualname__", "")
        named = getattr(sys.modules.get(module or ""), name, None)
        if named is not self.function and getattr(named, "handler", None) is self:
            return _handler_of, (module, name)
        return Handler, (self.function,)

    def __repr__(self) -> str:
        return f"Handler({getattr(self.function, '__qualname__', self.function)})"


def _handler_of(module: str, name: str) -> Handler:
    """The handler of a worker that was made by the decorator `worker`."""
    handler: Handler = getattr(import_module(module), name).handler
    return handler


class Handlers:
    """The handlers of a worker, by the kind of item."""

    def __init__(self, default: Handler | None = None) -> None:
        self.default = default
        """The handler of kinds without a handler of their own."""
        self.by_kind: dict[str, Handler] = {}

    def add(self, kinds: Sequence[str], function: HandlerFunction) -> None:
        if not kinds:
            raise InvalidRequest('there is no kind to handle; name one: @worker.on("invoice")')
        handler = Handler(function)
        for kind in kinds:
            if not isinstance(kind, str):
                raise InvalidRequest(f"a kind is {type(kind).__name__}; give a text")
            if kind in self.by_kind:
                raise InvalidRequest(f"kind {kind!r} has a handler already; name each once")
        self.by_kind.update(dict.fromkeys(kinds, handler))

    def find(self, kind: str | None) -> Handler | None:
        """The handler of a kind; None if this worker has none."""
        if kind is None:
            return self.default
        return self.by_kind.get(kind, self.default)

    @property
    def all(self) -> list[Handler]:
        return [*((self.default,) if self.default else ()), *self.by_kind.values()]

    @property
    def any_async(self) -> bool:
        return any(handler.is_async for handler in self.all)

    @property
    def only_handler(self) -> Handler | None:
        """The default handler, if there is no other handler and it takes no Context."""
        return self.default if self.default is not None and not self.by_kind and not self.default.wants_context else None

    def check(self) -> None:
        if not self.all:
            raise InvalidRequest("the worker has no handler; give it one, or register some with @worker.on(kind)")


def is_async(function: HandlerFunction) -> bool:
    """Whether a call of the function must be awaited."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _context_style(function: HandlerFunction) -> str | None:
    """How the function takes its Context: by "position", by "name", or not at all (None)."""
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in function without a signature
        return None
    ordered = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not ordered and not any(one.kind is one.VAR_POSITIONAL for one in given):
        raise InvalidRequest("the handler takes no item; give a function of an item, or of an item and a context")
    if len(needed := [one for one in ordered if one.default is one.empty]) > 2:
        sentence = f"the handler needs {len(needed)} arguments; give a function of an item, or of an item and a context"
        raise InvalidRequest(f"{sentence} (functools.partial fills the others)")
    if len(ordered) > 1 and (ordered[1].default is ordered[1].empty or ordered[1].name == "context"):
        return "position"
    return "name" if any(one.name == "context" and one not in ordered[:1] for one in given if one.kind is not one.VAR_KEYWORD) else None


# -- calls -------------------------------------------------------------------------------------------


def random_fraction() -> float:
    """A random number from 0 to 1."""
    return os.urandom(1)[0] / 255


class HandlerTimeout(PlainReasonError, TimeoutError):
    """A handler ran longer than `handler_timeout`."""


class HandlerInvoker:
    """The steps of a call of a handler: `begin`, `call`, `end`."""

    def __init__(self, handlers: Handlers, settings: Settings, now: Callable[[], int]) -> None:
        self.handlers = handlers
        self.hooks = settings.hooks
        self._settings = settings
        self._now = now
        self._timed = settings.hooks.finished is not None or settings.handler_timeout > 0

    @property
    def calls_here(self) -> bool:
        """Whether handlers are called in this process. The spans of their calls are made there."""
        return not self._settings.processes

    @property
    def bare_function(self) -> Callable[[Item], Any] | None:
        """The function of the only handler, if it takes only the item and the call needs neither `begin` nor `end`."""
        settings = self._settings
        if settings.batch or settings.handler_timeout or settings.hooks.has_item_hooks or active_tracer() is not None:
            return None
        only = self.handlers.only_handler
        return None if only is None else only.function

    # -- one call ------------------------------------------------------------------------------------

    def begin(self, context: Context) -> None:
        """Set the deadline of a call, start its span and call the hook `started`."""
        if self.calls_here:
            self.begin_span(context)
        if self._timed:
            context.started = self._now()
            if self._settings.handler_timeout:
                context.times_out_at = context.started + self._settings.handler_timeout
        if self.hooks.started is not None:
            with context.current_span():
                for item in context.items:
                    self.call_hook(self.hooks.started, item.queue, item)

    def begin_span(self, context: Context, start: int | None = None) -> None:
        """Start the span of a call, in a traced process. start: when the call began, in nanoseconds since 1970."""
        tracer = active_tracer()
        if tracer is not None:
            settings = self._settings
            context.span = tracer.handle(context.queue, context.items, batch=bool(settings.batch), client=settings.name, start=start)

    def call(self, handler: Handler, context: Context) -> Any:
        """Call a handler with its item or list of items. Gives its result; of an async handler, a coroutine."""
        argument = list(context.items) if self._settings.batch else context.items[0]
        span = context.span
        if span is None:
            return handler(argument, context)
        return span.await_result(handler(argument, context)) if handler.is_async else span.run(handler, argument, context)

    def end(self, context: Context, result: object = None, error: BaseException | None = None) -> list[Outcome] | None:
        """The outcome of each item after a call that returned `result` or raised `error`; None if already decided."""
        if not context.claim():
            return None
        if error is None and result is not None:
            error = result_error(result, bool(self._settings.batch))
        with context.current_span():
            if error is None:
                outcomes = [COMPLETED] * len(context.items)
            elif isinstance(error, Failed):
                outcomes = self._batch_outcomes(context, error)
            else:
                outcomes = [self.record_failure(item, error) for item in context.items]
            self._call_finished(context, outcomes)
        if context.span is not None:
            names: set[str] = {expected_outcome(item, outcome) for item, outcome in zip(context.items, outcomes, strict=True)}
            context.span.end_call(error, names, failed=not isinstance(error, Snooze))
        return outcomes

    def end_with_outcomes(self, context: Context, outcomes: list[Outcome]) -> list[Outcome]:
        """As `end`, for a call in another process, whose outcomes are known."""
        context.claim()
        self._call_finished(context, outcomes)
        return outcomes

    def end_cancelled(self, context: Context) -> list[Outcome]:
        """As `end`, for a call that was cancelled because the worker stops."""
        context.claim()
        if context.span is not None:
            context.span.end_call(None, {RETURNED.name})
        return [RETURNED] * len(context.items)

    def _call_finished(self, context: Context, outcomes: list[Outcome]) -> None:
        if self.hooks.finished is not None:
            seconds = (self._now() - context.started) / SECOND
            for item, outcome in zip(context.items, outcomes, strict=True):
                self.call_hook(self.hooks.finished, item.queue, item, seconds, expected_outcome(item, outcome))

    def timeout_error(self) -> "HandlerTimeout":
        return HandlerTimeout(f"the handler ran longer than {self._settings.handler_timeout / SECOND:g} s")

    # -- outcomes ------------------------------------------------------------------------------------

    def record_failure(self, item: Item, error: BaseException) -> Outcome:
        """The outcome of an item whose handler raised this error. Logs the failure and calls the hook `failed`."""
        outcome = outcome_of(error, item.attempts, self._settings.retry, random_fraction)
        self.report_failure(item, outcome, error)
        return outcome

    def report_failure(self, item: Item, outcome: Outcome, error: BaseException) -> None:
        """Log a failure and call the hook `failed`."""
        requested = isinstance(error, Retry | Bury | Snooze)
        name = expected_outcome(item, outcome)
        last = ", its last," if name != outcome.name else ""
        delay = f" in {outcome.delay / SECOND:.1f} s" if outcome.delay and not last else ""
        text = "item %s of queue %r failed at attempt %d%s and is %s%s: %s"
        trace = None if requested or error.__traceback__ is None else error
        level = logging.DEBUG if requested else logging.WARNING
        about = log_fields(queue=item.queue, partition=item.partition, item_id=item.id, worker=self._settings.name)
        _log.log(level, text, item.id, item.queue, item.attempts, last, name, delay, outcome.reason, exc_info=trace, extra=about)
        if self.hooks.failed is not None:
            self.call_hook(self.hooks.failed, item.queue, item, error)

    def _batch_outcomes(self, context: Context, failed: Failed) -> list[Outcome]:
        items = context.items
        try:
            errors = batch_failures(failed, [item.id for item in items])
        except InvalidRequest as error:
            return [self.record_failure(item, error) for item in items]
        return [self.record_failure(item, errors[index]) if index in errors else COMPLETED for index, item in enumerate(items)]

    def call_hook(self, hook: Callable[..., object], queue: str, *args: object) -> None:
        """Call a hook; an error of it is logged, with the name of the queue."""
        try:
            hook(*args)
        except Exception:
            about = log_fields(queue=queue, worker=self._settings.name)
            _log.exception("a hook of the worker of queue %r failed; the worker continues", queue, extra=about)


def result_error(result: object, batch: bool) -> BaseException | None:
    """The error in the result of a handler, or None: a Failed of a batch handler, or a result that was not awaited."""
    if isinstance(result, Failed) and batch:
        return result
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        return InvalidRequest("the handler returned an awaitable, which is not awaited; declare the handler with async def")
    return None


# -- between handlers and queues ---------------------------------------------------------------------


class ProgressReporter:
    """Writes progress reports to the queue in a separate thread, so that no handler and no settler waits for them.

    Only the latest report of an item is written.
    """

    def __init__(self) -> None:
        self._wakeup = WakeUp()
        self._reports: dict[LeasedItem, tuple[Context, str]] = {}
        self._closing = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def report(self, context: Context, text: str) -> None:
        for pair in context.lease_data:
            self._reports[pair] = context, text
        if self._thread is None:
            self._start()
        self._wakeup.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="penstock progress", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._wakeup.wait()
            while self._reports and not self._closing:
                pair, report = self._reports.popitem()
                self._write(pair, *report)

    def _write(self, pair: LeasedItem, context: Context, text: str) -> None:
        lease, item = pair
        try:
            lease.source.report_progress(lease.partition, lease.number, item.offset, text)
        except LeaseLost:
            context.lease_lost = True  # also if the item has just been settled; then the flag has no effect
        except PenstockError as error:
            about = log_fields(queue=lease.source.name, partition=lease.partition, item_id=item.id)
            _log.warning("the progress of item %s of queue %r could not be written: %s", item.id, item.queue, error, extra=about)

    def close(self) -> None:
        with self._starting:
            self._closing = True
        self._wakeup.set()


class Dispatcher:
    """Makes the contexts of leased items, is their backend, and passes the outcomes to the settlers."""

    def __init__(self, clock: Clock, buffer: ItemBuffer, handlers: Handlers) -> None:
        self.moment = clock.read
        self.stopping = False
        self.on_deadline_changed: Callable[[Context], None] | None = None
        self.on_clock_moved: Callable[[], None] | None = None
        """Called when a test has moved the clock: handlers may have run too long."""
        self.reporter = ProgressReporter()
        self._buffer = buffer
        self._handlers = handlers

    def now(self) -> int:
        return self.moment().elapsed

    # -- for contexts ------------------------------------------------------------------------------------

    def report_progress(self, context: Context, text: str) -> None:
        self.reporter.report(context, text)

    def deadline_changed(self, context: Context) -> None:
        if self.on_deadline_changed is not None:
            self.on_deadline_changed(context)

    def check_queue(self, context: Context, name: str) -> None:
        context.lease_data[0][0].source.find_incarnation(name)

    def token(self, context: Context) -> str:
        lease, item = context.lease_data[0]
        return format_token(Token(lease.source.incarnation, lease.partition, lease.number, item.offset))

    # -- for pools ---------------------------------------------------------------------------------------

    def contexts(self, pairs: Sequence[LeasedItem]) -> list[tuple[Handler, Context]]:
        """The calls to make for items of one queue: one call for each handler."""
        if len(pairs) == 1:
            return [(self._handler(pairs[0][1]), Context(self, pairs[0][0].source.name, pairs, [pairs[0][1]]))]
        groups: dict[Handler, list[LeasedItem]] = {}
        for pair in pairs:
            groups.setdefault(self._handler(pair[1]), []).append(pair)
        return [(handler, Context(self, group[0][0].source.name, group, [item for _, item in group])) for handler, group in groups.items()]

    def _handler(self, item: Item) -> Handler:
        handler = self._handlers.find(item.kind)
        assert handler is not None  # the fetcher returned items without a handler to the queue
        return handler

    def settle(self, context: Context, outcomes: Sequence[Outcome]) -> None:
        """Pass the outcomes of an ended call to the settlers of its items."""
        ended: list[tuple[LeasedItem, Outcome, Sequence[Item]]] = []
        failed: dict[tuple[WorkerLease, bytes], list[Item]] = {}
        """(lease, key) → the later items of the unit, of units with a failed item."""
        for pair, outcome in zip(context.lease_data, outcomes, strict=True):
            later: Sequence[Item] = ()
            key = pair[1].key_bytes if pair[0].has_units else None
            if key is not None:
                if (pair[0], key) in failed:  # the queue returns it together with the failed one
                    failed[pair[0], key].append(pair[1])
                    self._buffer.handler_ended(pair)
                    continue
                if outcome.name != "completed":
                    later = failed[pair[0], key] = []
            if outcome is COMPLETED and context.follow_ups:
                outcome = _with_follow_ups(pair[0], context.follow_ups)
            self._buffer.handler_ended(pair)
            if context.span is not None:
                pair[0].handle_spans[pair[1].offset] = context.span.span_context
            ended.append((pair, outcome, later))
        for pair, outcome, later in ended:
            pair[0].settler.settle(pair, outcome, later)


class PoolParts(NamedTuple):
    """The arguments that the three handler pools have in common."""

    settings: Settings
    buffer: ItemBuffer
    invoker: HandlerInvoker
    dispatcher: Dispatcher
    request_more: Callable[[], None]
    """Called when a handler may need more items."""
    on_ended: Callable[[], None]
    """Called when the last handler has ended after `close`."""


def _with_follow_ups(lease: WorkerLease, items: Sequence[NewItem | Value]) -> Outcome:
    """The outcome that completes an item and produces its follow-ups; a retry if they cannot be produced."""
    source = lease.source
    try:
        batches = arguments.follow_ups(items)
        ready = [(source.incarnation if name is None else source.find_incarnation(name), batch) for name, batch in batches.items()]
    except PenstockError as error:
        return Outcome("retried", SECOND, f"its follow-ups could not be made: {failure_reason(error)}")
    return Outcome("completed", follow_ups=ready)
