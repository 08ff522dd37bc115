"""Workers, as a user makes them.

Owns: `Worker`, the decorator `worker`, and the signals that end a worker: SIGTERM and SIGINT are handled while it runs, and their former
handlers are restored afterwards. Only the main thread can do that.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

from penstock.api._async.queue import AsyncQueue
from penstock.api._sync.queue import Queue
from penstock.api.arguments import Seconds
from penstock.words.errors import InvalidRequest
from penstock.worker.buffer import SourceQueue
from penstock.worker.handlers import Handler, HandlerFunction, Handlers
from penstock.worker.outcomes import RetryPolicy
from penstock.worker.process_pool import pickle_handlers
from penstock.worker.run import WorkerRun
from penstock.worker.settings import Hooks, checked_settings, queue_rates, queue_weights
from penstock.worker.stats import WorkerCounters, WorkerStats

AnyQueue: TypeAlias = Queue | AsyncQueue
Queues: TypeAlias = AnyQueue | Sequence[AnyQueue] | Mapping[AnyQueue, int]
F = TypeVar("F", bound=HandlerFunction)


class Worker:
    """Runs a handler on the items of a queue, or of several.

        def handle(item):
            print(item.value)

        penstock.Worker(orders, handle, concurrency=16).run()

    An item is completed when its handler returns, and retried as the policy says when it raises. A handler may raise `Retry(delay)`,
    `Bury(reason)` or `Snooze(delay)`. While it works its lease is kept from ending, whatever it does. It may be `async def`, and may take
    a second parameter: a `Context`.

    queues: a Queue, or several; as a dict, with weights: while all have items, each has handlers in proportion to its weight.
    handler: for every item; or leave it out, and register handlers by kind: `@worker.on("invoice")`. Items of kinds without a handler are
        left to other workers.
    concurrency: handlers at once: threads, or tasks if it is async. 1 unless given.
    per_partition: of those, for one partition of a queue.
    processes: run handlers in so many child processes, for work that needs a processor. They must be defined at the top of a module.
    batch: call the handler with a list of up to so many items. It returns when all are done, raises when all failed, and raises
        `Failed({id: reason})` when some did.
    retry: how long to wait before the next attempt; see `RetryPolicy`.
    handler_timeout: a handler that runs longer has failed. A child process is killed, a task is cancelled; a thread cannot be stopped: what
        it does from then on is not looked at (`context.cancelled` tells it).
    lease_timeout: how soon others get the items if this process dies; the queue's unless given.
    rate: items a second at most, for each queue, or a dict of queues to that.
    name: who works on an item, seen in `stats` and `explain`; machine and process unless given.
    hooks: functions to be called as the work goes; see `Hooks`.
    """

    def __init__(
        self,
        queues: Queues,
        handler: HandlerFunction | None = None,
        *,
        concurrency: int | None = None,
        per_partition: int | None = None,
        processes: int = 0,
        batch: int = 0,
        retry: RetryPolicy | None = None,
        handler_timeout: Seconds | None = None,
        lease_timeout: Seconds | None = None,
        rate: float | Mapping[AnyQueue, float] | None = None,
        name: str | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        weights = queue_weights(queues)
        rates = queue_rates(rate, weights)
        self._settings = checked_settings(
            concurrency=concurrency,
            per_partition=per_partition,
            processes=processes,
            batch=batch,
            retry=retry,
            handler_timeout=handler_timeout,
            lease_timeout=lease_timeout,
            name=name,
            hooks=hooks,
        )
        self._handlers = Handlers(None if handler is None else Handler(handler))
        if processes and handler is not None:
            pickle_handlers(self._handlers)  # or why it cannot be
        sources = {queue: SourceQueue(queue) for queue in weights}
        self._weights = {source: weights[queue] for queue, source in sources.items()}
        self._rates = {sources[queue]: limit for queue, limit in rates.items()}
        self._counters = WorkerCounters()
        self._starting = threading.Lock()
        self._run: WorkerRun | None = None

    @property
    def handler(self) -> Handler | None:
        """The handler for every item, if there is one."""
        return self._handlers.default

    def on(self, *kinds: str) -> Callable[[F], F]:
        """Register a handler for items of these kinds: `@worker.on("invoice")`."""

        def register(function: F) -> F:
            self._handlers.add(kinds, function)
            return function

        return register

    # -- working -------------------------------------------------------------------------------------

    def run(self, *, signals: bool = True) -> None:
        """Work until it is asked to end: by SIGTERM or SIGINT, or by `stop`. Then it drains: it begins nothing more, finishes and
        settles what it has begun, gives the rest back, and returns. Asked a second time it stops at once.

        signals: whether it takes these signals; it can only in the main thread.
        Raises what ended it if it was not asked: `BrokerClosed`, `QueueNotFound`.
        """
        run = self._begin(None)
        try:
            with _signals_handled(run.drain_or_stop, signals):
                run.execute()
        finally:
            self._run = None

    async def arun(self, *, signals: bool = True) -> None:
        """As `run`, in an async program: async handlers run in its event loop. Cancelling it drains it, a second time stops it at once."""
        loop = asyncio.get_running_loop()
        run = self._begin(loop)
        over: asyncio.Future[None] = loop.create_future()

        def execute() -> None:
            error: BaseException | None = None
            try:
                run.execute()
            except BaseException as caught:
                error = caught
            with suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(_resolve, over, error)

        try:
            with _signals_handled(run.drain_or_stop, signals):
                threading.Thread(target=execute, name="penstock worker", daemon=True).start()
                await _wait_for_end(over, run)
        finally:
            self._run = None

    def _begin(self, loop: asyncio.AbstractEventLoop | None) -> WorkerRun:
        with self._starting:
            if self._run is not None:
                raise InvalidRequest("the worker is running already; make another one, or raise its concurrency")
            self._handlers.check()
            self._run = WorkerRun(self._weights, self._rates, self._handlers, self._settings, self._counters, loop)
            return self._run

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to end, from anywhere: drain, or stop at once. This does not wait; if the worker does not run, nothing happens."""
        run = self._run
        if run is not None and at_once:
            run.stop()
        elif run is not None:
            run.drain()

    # -- looking -------------------------------------------------------------------------------------

    def stats(self) -> WorkerStats:
        """What it has done since it was made."""
        return self._counters.stats(next(iter(self._weights)).now())

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the handler by itself, as a test may want to."""
        if self._handlers.default is None:
            raise InvalidRequest("the worker has no handler for every kind; call the function itself")
        return self._handlers.default.function(*given, **named)

    def __repr__(self) -> str:
        names = ", ".join(repr(source.name) for source in self._weights)
        many = f"processes={self._settings.processes}" if self._settings.processes else f"concurrency={self._settings.concurrency}"
        return f"Worker({names}, {many}{', running' if self._run is not None else ''})"


def worker(queues: Queues, **options: Any) -> Callable[[HandlerFunction], Worker]:
    """Make a function a worker; it takes the options of `Worker`.

        @penstock.worker(orders, concurrency=4)
        def handle(item):
            print(item.value)

        handle.run()

    It can still be called as the function that it was.
    """

    def make(function: HandlerFunction) -> Worker:
        made = Worker(queues, **options)
        made._handlers = Handlers(Handler(function))
        return made

    return make


def _resolve(over: "asyncio.Future[None]", error: BaseException | None) -> None:
    if over.done():
        return
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)


async def _wait_for_end(over: "asyncio.Future[None]", run: WorkerRun) -> None:
    """Wait for the end of a run. A cancellation asks the run to end, and is raised when it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError as error:
            cancelled = error
            run.drain_or_stop()
    if cancelled is not None:
        raise cancelled
    over.result()


SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def _signals_handled(ask: Callable[[], None], wanted: bool = True) -> Iterator[None]:
    """Within this, each of the signals calls `ask`; in a thread other than the main thread nothing changes."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        ask()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
