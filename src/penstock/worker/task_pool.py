"""The pool of asyncio tasks in which async handlers run.

Owns: `TaskPool`. Each task handles items as long as there are any, so that a quick handler costs no task of its own. The event loop is
the caller's (`arun`), or one in a thread of its own. If some handlers are plain functions, they run in threads; the task waits for them.
All methods but those for fetchers run in the loop's thread.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SECOND
from penstock.worker.buffer import ItemBuffer
from penstock.worker.context import Context
from penstock.worker.handlers import Dispatcher, Handler, HandlerInvoker
from penstock.worker.outcomes import RETURNED, Outcome
from penstock.worker.settings import Settings

YIELD_AFTER = 32
"""After so many items a task lets the others run, however quick its handler is."""


class TaskPool:
    """Tasks that call handlers."""

    stoppable = True

    def __init__(
        self,
        settings: Settings,
        buffer: ItemBuffer,
        caller: HandlerInvoker,
        dispatcher: Dispatcher,
        request_more: Callable[[], None],
        on_ended: Callable[[], None],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._caller = caller
        self._dispatcher = dispatcher
        self._request_more = request_more
        self._on_ended = on_ended
        self._closing = False
        self._idle: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scopes: dict[Context, asyncio.Timeout] = {}
        self._threads: _CallThreads | None = None
        self._own = loop is None
        self._loop = loop or asyncio.new_event_loop()
        dispatcher.on_deadline_changed = self._extended
        if self._own:
            threading.Thread(target=self._run_loop, name="penstock loop", daemon=True).start()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    # -- for fetchers -----------------------------------------------------------------------------------

    @property
    def free_handlers(self) -> int:
        return len(self._idle) + self._settings.concurrency - len(self._tasks)

    def wake(self, count: int) -> None:
        self._soon(self._wake, count)

    def wake_more(self) -> None:
        self._soon(self._wake, len(self._buffer))

    def start(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Take no more items. `on_ended` is called when the last task has finished its items."""
        self._soon(self._close)

    def cancel(self) -> None:
        """Stop handlers at their next await; their items are returned."""
        self._soon(self._cancel)

    def _soon(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: no handler runs in it any more
            self._on_ended()

    # -- in the loop -------------------------------------------------------------------------------------

    def _wake(self, count: int) -> None:
        for _ in range(count):
            if self._idle:
                waiter = self._idle.pop()
                if not waiter.done():
                    waiter.set_result(None)
            elif len(self._tasks) < self._settings.concurrency and not self._closing:
                task = self._loop.create_task(self._task_main())
                self._tasks.add(task)
                task.add_done_callback(self._gone)
            else:
                return

    def _close(self) -> None:
        self._closing = True
        self._wake(len(self._idle))
        self._gone()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _gone(self, task: "asyncio.Task[None] | None" = None) -> None:
        if task is not None:
            self._tasks.discard(task)
        if self._closing and not self._tasks:
            self._on_ended()
            if self._threads is not None:
                self._threads.close()
            if self._own:
                self._loop.stop()

    def _extended(self, context: Context) -> None:
        """A handler wants more time; it may be in a thread."""
        self._soon(self._reschedule, context)

    def _reschedule(self, context: Context) -> None:
        scope = self._scopes.get(context)
        if scope is not None and not scope.expired():
            scope.reschedule(self._loop.time() + (context.deadline - self._dispatcher.now()) / SECOND)

    # -- in each task ------------------------------------------------------------------------------------

    async def _task_main(self) -> None:
        handle = self._caller.bare_function
        if handle is not None and self._caller.handlers.any_async:
            await self._run_simple(handle)
        else:
            await self._run_full()

    async def _run_simple(self, handle: Callable[[Item], Any]) -> None:
        buffer, request_more = self._buffer, self._request_more
        take, finished = buffer.take, buffer.handler_ended
        left = YIELD_AFTER
        while True:
            try:
                pair = take()
            except IndexError:
                if not await self._sleep():
                    return
                continue
            try:
                await handle(pair[1])
            except BaseException as error:
                finished(pair)
                if _stopped(error):
                    pair[0].settler.settle(pair, RETURNED)
                    return
                pair[0].settler.settle(pair, self._caller.record_failure(pair[1], error))
            else:
                finished(pair)
                pair[0].settler.complete(pair)
            left -= 1
            if not left & 3:
                request_more()
                if not left:
                    left = YIELD_AFTER
                    await asyncio.sleep(0)

    async def _run_full(self) -> None:
        batch, left = self._settings.batch or 1, YIELD_AFTER
        while True:
            try:
                pairs = self._buffer.take_many(batch)
            except IndexError:
                if not await self._sleep():
                    return
                continue
            calls = self._dispatcher.contexts(pairs)
            for handler, context in calls:
                if self._dispatcher.stopping:
                    self._dispatcher.settle(context, [RETURNED] * len(context.items))
                else:
                    await self._call(handler, context)
            self._request_more()
            left -= 1
            if not left:
                left = YIELD_AFTER
                await asyncio.sleep(0)

    async def _call(self, handler: Handler, context: Context) -> None:
        """Run one handler and settle its items."""
        outcomes: list[Outcome] | None
        self._caller.begin(context)
        try:
            outcomes = self._caller.end(context, await self._timed(handler, context))
        except BaseException as error:
            if _stopped(error):
                context.claim()
                outcomes = [RETURNED] * len(context.items)
            else:
                outcomes = self._caller.end(context, error=error)
        if outcomes is not None:
            self._dispatcher.settle(context, outcomes)

    async def _timed(self, handler: Handler, context: Context) -> Any:
        """Run a handler within `handler_timeout`; raises HandlerTimeout when it takes longer."""
        if not self._settings.handler_timeout:
            return await self._run(handler, context)
        try:
            async with asyncio.timeout(self._settings.handler_timeout / SECOND) as scope:
                self._scopes[context] = scope
                return await self._run(handler, context)
        except TimeoutError:
            if scope.expired():
                raise self._caller.timeout_error() from None
            raise
        finally:
            self._scopes.pop(context, None)

    async def _run(self, handler: Handler, context: Context) -> Any:
        given = self._caller.handler_argument(context)
        if handler.is_async:
            return await handler(given, context)
        if self._threads is None:
            self._threads = _CallThreads(self._loop)
        return await self._threads.run(handler, given, context)

    async def _sleep(self) -> bool:
        """Wait until there may be items; False when the worker drains."""
        if self._closing:
            return False
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(waiter)
        self._request_more()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._idle:
                self._idle.remove(waiter)
            return False
        return True


def _stopped(error: BaseException) -> bool:
    """Whether the task was cancelled, and not only something inside its handler."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class _CallThreads:
    """Threads for handlers that are plain functions, in a worker whose other handlers are async: as many as run at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None] = SimpleQueue()
        self._idle = 0
        self._count = 0

    def run(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self._idle:
            self._idle -= 1
        else:
            self._count += 1
            threading.Thread(target=self._thread_main, name=f"penstock handler {self._count}", daemon=True).start()
        self._work.put((function, args, answer))
        return answer

    def _thread_main(self) -> None:
        while (given := self._work.get()) is not None:
            function, args, answer = given
            try:
                told: tuple[Any, BaseException | None] = function(*args), None
            except BaseException as error:
                told = None, error
            try:
                self._loop.call_soon_threadsafe(self._tell, answer, *told)
            except RuntimeError:  # the loop is closed
                return

    def _tell(self, answer: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._idle += 1
        if answer.done():  # it is not waited for any more
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error if not isinstance(error, StopIteration) else RuntimeError("the handler raised StopIteration"))

    def close(self) -> None:
        for _ in range(self._count):
            self._work.put(None)
