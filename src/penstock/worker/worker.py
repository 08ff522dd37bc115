"""The public API of workers.

Owns: `Worker`, the decorator `worker`, and the signals that end a worker: SIGTERM and SIGINT are handled while the
worker runs, and their former handlers are restored afterwards. This works in the main thread only.
"""

import asyncio
import atexit
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import msgspec

from penstock.api._async.queue import AsyncQueue
from penstock.api._sync.queue import Queue
from penstock.api.arguments import Seconds, bounded_duration
from penstock.words import forks
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.logs import log_fields
from penstock.worker.buffer import SourceQueue
from penstock.worker.handlers import Handler, HandlerFunction, Handlers
from penstock.worker.outcomes import RetryPolicy
from penstock.worker.process_pool import pickle_handlers
from penstock.worker.run import WorkerRun
from penstock.worker.settings import Hooks, checked_settings, checked_until_empty, default_worker_name, queue_rates, queue_weights
from penstock.worker.stats import WorkerCounters, WorkerStats

AnyQueue: TypeAlias = Queue | AsyncQueue
Queues: TypeAlias = AnyQueue | Sequence[AnyQueue] | Mapping[AnyQueue, int]
_log = logging.getLogger("penstock.worker")
F = TypeVar("F", bound=HandlerFunction)


class Worker:
    """Runs a handler on the items of one or more queues.

        def handle(item):
            print(item.value)

        penstock.Worker(orders, handle, concurrency=16).run()

    An item is completed when its handler returns. When the handler raises, the item is retried by the retry policy; a
    handler may also raise `Retry(delay)`, `Bury(reason)` or `Snooze(delay)`. The worker extends the lease of an item as
    long as its handler runs. A handler may be `async def`, and may take a `Context` as a second parameter.

    queues: a Queue, a list of queues, or a dict from queues to weights. While all queues have items, each queue gets
        handlers in proportion to its weight.
    handler: the handler of every item. Without it, register handlers by kind: `@worker.on("invoice")`. Items of kinds
        without a handler are returned to the queue for other workers, with a delay that doubles up to a minute.
    concurrency: how many handlers run at once: in threads, or in tasks if they are async. The default is 1.
    per_partition: how many handlers work on items of one partition at once.
    processes: run handlers in this many child processes, for CPU-bound work. The handlers must be defined at the top
        level of a module.
    batch: call the handler with a list of up to this many items. All items are completed when it returns, all failed
        when it raises, and some failed when it raises `Failed({id: reason})`.
    per_key: with `batch`: the most items of one key in one call, in their order. When one of them fails, the later ones
        of its key fail with it, without an attempt. By default the worker chooses: as many as fill a batch with the
        keys that are free. Without `batch` it is 1.
    retry: how long an item waits for its next attempt; see `RetryPolicy`.
    handler_timeout: a handler that runs longer than this has failed. A child process is killed and a task is cancelled.
        A thread cannot be stopped: its result is ignored, and `context.cancelled` becomes true.
    lease_timeout: how soon other consumers get the items if this process dies. The default is the queue's.
    rate: the most items per second of each queue, or a dict from queues to such limits.
    name: the consumer's name in `stats` and `explain`. The default is host name and process id.
    hooks: functions that the worker calls when something happens; see `Hooks`.
    drain_timeout: how long to wait for running handlers when the worker drains; then it stops at once. The default is
        no limit.

    `with worker:` runs it in a thread during the block, and drains it at the end.
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
        per_key: int | None = None,
        retry: RetryPolicy | None = None,
        handler_timeout: Seconds | None = None,
        lease_timeout: Seconds | None = None,
        rate: float | Mapping[AnyQueue, float] | None = None,
        name: str | None = None,
        hooks: Hooks | None = None,
        drain_timeout: Seconds | None = None,
    ) -> None:
        weights = queue_weights(queues)
        rates = queue_rates(rate, weights)
        self._settings = checked_settings(
            concurrency=concurrency,
            per_partition=per_partition,
            processes=processes,
            batch=batch,
            per_key=per_key,
            retry=retry,
            handler_timeout=handler_timeout,
            lease_timeout=lease_timeout,
            name=name,
            hooks=hooks,
            drain_timeout=drain_timeout,
        )
        if handler is None and self._settings.per_key > 1:
            raise InvalidRequest("per_key needs one handler for all items; give a handler, or leave per_key out")
        self._handlers = Handlers(None if handler is None else Handler(handler))
        if processes and handler is not None:
            pickle_handlers(self._handlers)  # raises if it cannot be sent to a child process
        sources = {queue: SourceQueue(queue) for queue in weights}
        self._weights = {source: weights[queue] for queue, source in sources.items()}
        self._rates = {sources[queue]: limit for queue, limit in rates.items()}
        self._counters = WorkerCounters()
        self._has_default_name = name is None
        self._starting = threading.Lock()
        self._run: WorkerRun | None = None
        self._thread: threading.Thread | None = None
        """The thread of the last run that `start` began."""
        self._thread_error: BaseException | None = None
        self._fork = forks.count

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

    # -- running -------------------------------------------------------------------------------------

    def run(self, *, signals: bool = True, until_empty: bool | Seconds = False) -> None:
        """Run until SIGTERM, SIGINT or `stop`. Then drain: start no more handlers, wait for the running ones, settle
        their items, return the other leased items to the queue. A second signal stops at once.

        signals: whether to handle these signals; this works in the main thread only.
        until_empty: True: also end when no unresolved item is left in the queues, scheduled items and those of other
            consumers included. A number of seconds: also end when no item came for so long.
        Raises an error that ended the run: `BrokerClosed`, `QueueNotFound`.
        """
        run = self._begin(None, until_empty)
        try:
            with _signals_handled(run.drain_or_stop, signals):
                run.execute()
        finally:
            self._run = None

    def start(self, *, until_empty: bool | Seconds = False) -> "Worker":
        """As `run`, in a thread: returns at once. End it with `stop` and `join`; signals are not handled.

        When the program ends, the worker is drained first.
        """
        run = self._begin(None, until_empty)
        self._thread_error = None
        self._thread = threading.Thread(target=self._run_in_thread, args=(run,), name="penstock worker", daemon=True)
        atexit.register(self._drain_at_exit)
        try:
            self._thread.start()
        except BaseException:
            self._run = self._thread = None
            atexit.unregister(self._drain_at_exit)
            raise
        return self

    def join(self, timeout: Seconds | None = None) -> bool:
        """Wait until the run that `start` began has ended; gives whether it has.

        Raises an error that ended the run, as `run` does.
        """
        thread = self._thread if self._fork == forks.count else None
        if thread is not None:
            thread.join(None if timeout is None else bounded_duration(timeout, "timeout") / SECOND)
            if thread.is_alive():
                return False
            if self._thread_error is not None:
                raise self._thread_error
        return True

    def _run_in_thread(self, run: WorkerRun) -> None:
        try:
            run.execute()
        except BaseException as error:
            self._thread_error = error
        self._run = None
        atexit.unregister(self._drain_at_exit)
        if self._thread_error is not None:
            names = ", ".join(source.name for source in self._weights)
            about = log_fields(queue=names, worker=self._settings.name)
            _log.error("the worker of queue %r has ended: %s", names, self._thread_error, extra=about)

    def _drain_at_exit(self) -> None:
        if self._fork == forks.count:
            self.stop()
            with suppress(Exception):  # it was logged
                self.join()

    def __enter__(self) -> "Worker":
        return self if self._run is not None and self._fork == forks.count else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self.join()

    async def arun(self, *, signals: bool = True, until_empty: bool | Seconds = False) -> None:
        """As `run`, with async handlers in the caller's event loop. Cancelling drains, cancelling again stops."""
        loop = asyncio.get_running_loop()
        run = self._begin(loop, until_empty)
        ended: asyncio.Future[None] = loop.create_future()

        def execute() -> None:
            error: BaseException | None = None
            try:
                run.execute()
            except BaseException as caught:
                error = caught
            with suppress(RuntimeError):  # the loop is closed: no task waits for the end
                loop.call_soon_threadsafe(_resolve, ended, error)

        try:
            with _signals_handled(run.drain_or_stop, signals):
                threading.Thread(target=execute, name="penstock worker", daemon=True).start()
                await _wait_for_end(ended, run)
        finally:
            self._run = None

    def _begin(self, loop: asyncio.AbstractEventLoop | None, until_empty: bool | Seconds) -> WorkerRun:
        if self._fork != forks.count:
            self._start_anew_after_fork()
        with self._starting:
            if self._run is not None:
                raise InvalidRequest("the worker is running already; make another worker, or raise its concurrency")
            self._handlers.check()
            until = checked_until_empty(until_empty)
            self._run = WorkerRun(self._weights, self._rates, self._handlers, self._settings, self._counters, loop, until)
            return self._run

    def _start_anew_after_fork(self) -> None:
        """In a forked child: a run that goes on in the parent is not a run of this process."""
        self._fork, self._run, self._starting, self._counters = forks.count, None, threading.Lock(), WorkerCounters()
        self._thread = None
        if self._has_default_name:
            self._settings = msgspec.structs.replace(self._settings, name=default_worker_name())

    def stop(self, *, at_once: bool = False) -> None:
        """Make the worker drain, or stop at once. Safe in any thread. Does not wait; no effect if it does not run."""
        run = self._run
        if run is not None and at_once:
            run.stop()
        elif run is not None:
            run.drain()

    # -- other ---------------------------------------------------------------------------------------

    def stats(self) -> WorkerStats:
        """The counts since the worker was made."""
        return self._counters.stats(next(iter(self._weights)).now())

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the handler directly, as in a test."""
        if self._handlers.default is None:
            raise InvalidRequest("the worker has no handler for every kind; call the function itself")
        return self._handlers.default.function(*args, **named)

    def __repr__(self) -> str:
        names = ", ".join(repr(source.name) for source in self._weights)
        size = f"processes={self._settings.processes}" if self._settings.processes else f"concurrency={self._settings.concurrency}"
        return f"Worker({names}, {size}{', running' if self._run is not None else ''})"


def worker(queues: Queues, **options: Any) -> Callable[[HandlerFunction], Worker]:
    """A decorator that makes a worker of a function. It takes the options of `Worker`.

        @penstock.worker(orders, concurrency=4)
        def handle(item):
            print(item.value)

        handle.run()

    The worker can still be called as the function.
    """

    def make(function: HandlerFunction) -> Worker:
        made = Worker(queues, **options)
        made._handlers = Handlers(Handler(function))
        return made

    return make


def _resolve(ended: "asyncio.Future[None]", error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


async def _wait_for_end(ended: "asyncio.Future[None]", run: WorkerRun) -> None:
    """Wait for the end of a run. A cancellation makes the run drain or stop, and is raised when the run has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            cancelled = error
            run.drain_or_stop()
    if cancelled is not None:
        raise cancelled
    ended.result()


SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def _signals_handled(action: Callable[[], None], wanted: bool = True) -> Iterator[None]:
    """Call `action` at each of the signals while the block runs. No effect outside the main thread."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        action()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
