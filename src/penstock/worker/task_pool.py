"""The pool of asyncio tasks in which async handlers run.

Owns: `TaskPool`. Each task handles one item after the other, so that an item costs no new task. The event loop is that
of the caller (`arun`), or a new one in a separate thread. Plain functions run in threads; a task waits for them.
The methods for fetchers may be called in any thread; all others run in the thread of the event loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SECOND
from penstock.worker.context import Context
from penstock.worker.handlers import Handler, PoolParts
from penstock.worker.outcomes import COMPLETED, RETURNED, Outcome

YIELD_AFTER = 32
"""After this many items a task yields to the event loop, even if its handler never waits."""


class TaskPool:
    """Tasks that call handlers."""

    stoppable = True

    def __init__(self, parts: PoolParts, loop: asyncio.AbstractEventLoop | None) -> None:
        self._settings, self._buffer, self._invoker, self._dispatcher, self._request_more, self._on_ended = parts
        self._closing = False
        self._idle: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timeouts: dict[Context, asyncio.Timeout] = {}
        self._threads: _CallThreads | None = None
        self._owns_loop = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._dispatcher.on_deadline_changed = self._deadline_changed
        self._dispatcher.on_clock_moved = lambda: self._call_in_loop(self._reschedule_all)
        if self._owns_loop:
            threading.Thread(target=self._run_loop, name="penstock loop", daemon=True).start()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    # -- called in any thread ----------------------------------------------------------------------------

    @property
    def free_handlers(self) -> int:
        return len(self._idle) + self._settings.concurrency - len(self._tasks)

    def wake(self, count: int) -> None:
        self._call_in_loop(self._wake, count)

    def wake_more(self) -> None:
        self._call_in_loop(self._wake, len(self._buffer))

    def start(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Take no more items. `on_ended` is called when the last task has finished its items."""
        self._call_in_loop(self._close)

    def cancel(self) -> None:
        """Stop handlers at their next await; their items are returned."""
        self._call_in_loop(self._cancel)

    def _call_in_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, so no handler runs any more
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
                task.add_done_callback(self._remove)
            else:
                return

    def _close(self) -> None:
        self._closing = True
        self._wake(len(self._idle))
        self._remove()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _remove(self, task: "asyncio.Task[None] | None" = None) -> None:
        if task is not None:
            self._tasks.discard(task)
        if self._closing and not self._tasks:
            self._on_ended()
            if self._threads is not None:
                self._threads.close()
            if self._owns_loop:
                self._loop.stop()

    def _deadline_changed(self, context: Context) -> None:
        """Called by a handler, which may run in a thread."""
        self._call_in_loop(self._reschedule, context)

    def _reschedule(self, context: Context) -> None:
        timeout = self._timeouts.get(context)
        if timeout is not None and not timeout.expired():
            timeout.reschedule(self._loop.time() + (context.times_out_at - self._dispatcher.now()) / SECOND)

    def _reschedule_all(self) -> None:
        for context in [*self._timeouts]:
            self._reschedule(context)

    # -- in each task ------------------------------------------------------------------------------------

    async def _task_main(self) -> None:
        handle = self._invoker.bare_function
        await (self._run_full() if handle is None else self._run_simple(handle))

    async def _run_simple(self, handle: Callable[[Item], Any]) -> None:
        buffer, request_more = self._buffer, self._request_more
        take, handler_ended = buffer.take, buffer.handler_ended
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
                handler_ended(pair)
                if _task_cancelled(error):
                    pair[0].settler.settle(pair, RETURNED)
                    return
                pair[0].settler.settle(pair, self._invoker.record_failure(pair[1], error))
            else:
                handler_ended(pair)
                pair[0].settler.settle(pair, COMPLETED)
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
            for handler, context in self._dispatcher.contexts(pairs):
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
        self._invoker.begin(context)
        try:
            outcomes = self._invoker.end(context, await self._timed(handler, context))
        except BaseException as error:
            outcomes = self._invoker.end_cancelled(context) if _task_cancelled(error) else self._invoker.end(context, error=error)
        if outcomes is not None:
            self._dispatcher.settle(context, outcomes)

    async def _timed(self, handler: Handler, context: Context) -> Any:
        """Run a handler; raises HandlerTimeout if it takes longer than `handler_timeout`."""
        if not self._settings.handler_timeout:
            return await self._run(handler, context)
        try:
            async with asyncio.timeout(self._settings.handler_timeout / SECOND) as timeout:
                self._timeouts[context] = timeout
                return await self._run(handler, context)
        except TimeoutError:
            if timeout.expired():
                raise self._invoker.timeout_error() from None
            raise
        finally:
            self._timeouts.pop(context, None)

    async def _run(self, handler: Handler, context: Context) -> Any:
        if handler.is_async:
            return await self._invoker.call(handler, context)
        if self._threads is None:
            self._threads = _CallThreads(self._loop)
        return await self._threads.run(self._invoker.call, handler, context)

    async def _sleep(self) -> bool:
        """Wait until the buffer may have items; False when the worker drains."""
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


def _task_cancelled(error: BaseException) -> bool:
    """Whether the error comes from a cancellation of this task, not of something that its handler awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class _CallThreads:
    """Threads for plain functions in a worker with async handlers. A new thread is started when all others are busy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None] = SimpleQueue()
        self._idle = 0
        self._count = 0

    def run(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._idle:
            self._idle -= 1
        else:
            self._count += 1
            threading.Thread(target=self._thread_main, name=f"penstock handler {self._count}", daemon=True).start()
        self._work.put((function, args, future))
        return future

    def _thread_main(self) -> None:
        while (work := self._work.get()) is not None:
            function, args, future = work
            try:
                result: tuple[Any, BaseException | None] = function(*args), None
            except BaseException as error:
                result = None, error
            try:
                self._loop.call_soon_threadsafe(self._resolve, future, *result)
            except RuntimeError:  # the loop is closed
                return

    def _resolve(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._idle += 1
        if future.done():  # the task that waited for it was cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error if not isinstance(error, StopIteration) else RuntimeError("the handler raised StopIteration"))

    def close(self) -> None:
        for _ in range(self._count):
            self._work.put(None)
