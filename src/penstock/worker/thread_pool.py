"""The pool of threads in which handlers run.

Owns: `BaseThreadPool`, what the pools of threads and of child processes have in common (starting, sleeping, waking and ending their
threads), and `ThreadPool`, whose threads call handlers.

Sleeping: an idle thread puts a lock into `_idle` and waits for it. Whoever takes the lock out of `_idle` releases it. So each thread is
woken exactly once, and the thread that went idle last is woken first.
Waking: one thread for each new item, unless handlers are so quick that one thread handles all before a second one wakes. If a slow item
is among them, the fetcher sees that items wait while threads are idle, and wakes more (`spread`).

`_run_simple` is for a handler that takes only the item, without hooks and without a time limit: it costs a few steps an item. All others
go through `HandlerInvoker`.
With a `handler_timeout` one more thread watches the others. A thread cannot be stopped. So a thread whose handler runs too long is
abandoned: its items are retried, its later result is ignored, and another thread is started, up to as many as the pool has.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SECOND
from penstock.worker.buffer import ItemBuffer
from penstock.worker.context import Context
from penstock.worker.handlers import Dispatcher, HandlerInvoker, result_error
from penstock.worker.outcomes import RETURNED, Outcome
from penstock.worker.settings import Settings
from penstock.worker.wakeup import WakeUp

QUICK = 60.0
"""Microseconds. For handlers that take less, only one thread is woken."""
STRIDE = 64
"""Most items that a thread handles between two looks at the clock."""


class BaseThreadPool:
    """Threads that take items from the buffer."""

    stoppable = False
    """Whether `cancel` can end running handlers."""

    def __init__(self, most: int, buffer: ItemBuffer, request_more: Callable[[], None], on_ended: Callable[[], None]) -> None:
        self.max_threads = most
        self.buffer = buffer
        self.request_more = request_more
        """Called when a thread may need more items."""
        self._on_ended = on_ended
        """Called when the last thread has ended."""
        self.item_time = QUICK
        """About how many microseconds an item takes in one thread."""
        self.closing = False
        self._idle: deque[threading.Lock] = deque()
        self._changing = threading.Lock()
        self._started = 0
        self._over = False
        self._threads = 0
        self._to_start = 0
        self._step = 1

    # -- for fetchers ----------------------------------------------------------------------------------

    @property
    def free_handlers(self) -> int:
        return len(self._idle) + self.max_threads - self._started

    def wake(self, count: int) -> None:
        self._step = 1
        self._wake(1 if self.item_time < QUICK else count)

    def wake_more(self) -> None:
        self._step = min(2 * self._step, self.max_threads)
        self._wake(min(self._step, len(self.buffer)))

    def _wake(self, count: int) -> None:
        for woken in range(count):
            try:
                self._idle.pop().release()
            except IndexError:
                self._start(count - woken)
                return

    def _start(self, count: int) -> None:
        """Start so many threads, up to `most` in all. Each new thread starts two others, so that the caller starts only one."""
        with self._changing:
            count = 0 if self.closing else max(0, min(count, self.max_threads - self._started))
            self._started += count
            self._to_start += count
        self._start_one()

    def _start_one(self) -> None:
        with self._changing:
            if not self._to_start:
                return
            self._to_start -= 1
            self._threads += 1
            number = self._threads
        threading.Thread(target=self._thread_main, name=f"penstock handler {number}", daemon=True).start()

    def start(self) -> None:
        """Prepare before the first item comes, where that takes long."""

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more items. `on_ended` is called when the last thread has finished its items."""
        with self._changing:
            self.closing = True
        self._wake(self.max_threads)
        self._remove(0)

    def cancel(self) -> None:
        """Stop running handlers, if that is possible."""

    def _remove(self, gone: int) -> None:
        """So many threads have ended or were abandoned."""
        with self._changing:
            self._started -= gone
            over = self.closing and not self._started and not self._over
            self._over = self._over or over
        if over:
            self._on_ended()

    # -- in each thread --------------------------------------------------------------------------------

    def _thread_main(self) -> None:
        self._start_one()
        self._start_one()
        abandoned = False
        try:
            abandoned = self._work()
        finally:
            self._remove(0 if abandoned else 1)

    @abstractmethod
    def _work(self) -> bool:
        """Handle items until `_sleep` gives False. Gives True if the thread was abandoned, and so already removed from the count."""

    def _note(self, items: int, took: int) -> int:
        """Note that so many items took so long in one thread. Gives after how many items to look at the clock again."""
        sample = min(took / items, 8 * self.item_time + 100)
        self.item_time += (sample - self.item_time) / 8
        return STRIDE if self.item_time < QUICK / 4 else max(1, min(STRIDE, self.max_threads // 8))

    def _sleep(self) -> bool:
        """Wait until there may be items; False when the worker drains."""
        gate = threading.Lock()
        gate.acquire()
        self._idle.append(gate)
        self.request_more()
        if (self.closing or self.buffer.has_next) and self._leave_idle(gate):
            return not self.closing
        gate.acquire()
        return not self.closing

    def _leave_idle(self, gate: threading.Lock) -> bool:
        """Take the lock out of `_idle`; False if somebody else has, who will release it."""
        try:
            self._idle.remove(gate)
        except ValueError:
            return False
        return True


class _RunningCall:
    """The call that one thread is running."""

    __slots__ = ("abandoned", "context")

    def __init__(self) -> None:
        self.context: Context | None = None
        self.abandoned = False


class ThreadPool(BaseThreadPool):
    """Threads that call handlers."""

    def __init__(
        self,
        settings: Settings,
        buffer: ItemBuffer,
        caller: HandlerInvoker,
        dispatcher: Dispatcher,
        request_more: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        super().__init__(settings.concurrency, buffer, request_more, on_ended)
        self._settings = settings
        self._caller = caller
        self._dispatcher = dispatcher
        self._calls: set[_RunningCall] = set()
        self._abandoned = 0
        self._watch = WakeUp()
        if settings.handler_timeout:
            dispatcher.on_deadline_changed = lambda _: self._watch.set()
            threading.Thread(target=self._watch_timeouts, name="penstock watch", daemon=True).start()

    def close(self) -> None:
        super().close()
        self._watch.set()

    def _work(self) -> bool:
        handle = self._caller.bare_function
        if handle is not None:
            self._run_simple(handle)
            return False
        call = _RunningCall()
        self._calls.add(call)
        try:
            self._run_full(call)
        finally:
            self._calls.discard(call)
        return call.abandoned

    def _run_simple(self, handle: Callable[[Item], Any]) -> None:
        buffer, now = self.buffer, self._dispatcher.now
        take, finished = buffer.take, buffer.handler_ended if buffer.counts_handlers else None
        stride = left = 1
        since = now()
        while True:
            try:
                pair = take()
            except IndexError:
                if not self._sleep():
                    return
                stride = left = 1
                since = now()
                continue
            try:
                result = handle(pair[1])
                if result is not None and (error := result_error(result, False)) is not None:
                    raise error
            except BaseException as error:
                pair[0].settler.settle(pair, self._caller.record_failure(pair[1], error))
            else:
                settler = pair[0].settler
                settler.completed.append(pair)
                if not settler.wakeup.is_set:
                    settler.wakeup.set()
            if finished is not None:
                finished(pair)
            left -= 1
            if not left:
                at = now()
                left = stride = self._note(stride, at - since)
                since = at
                self.request_more()

    def _run_full(self, call: _RunningCall) -> None:
        now, batch = self._dispatcher.now, self._settings.batch or 1
        while not call.abandoned:
            try:
                pairs = self.buffer.take_many(batch)
            except IndexError:
                if not self._sleep():
                    return
                continue
            since = now()
            for handler, context in self._dispatcher.contexts(pairs):
                if call.abandoned:
                    self._dispatcher.settle(context, [RETURNED] * len(context.items))
                    continue
                call.context = context
                outcomes = self._caller.call(context, handler)
                call.context = None
                if outcomes is not None:
                    self._dispatcher.settle(context, outcomes)
            self._note(1, now() - since)
            self.request_more()
        with self._changing:
            self._abandoned -= 1

    # -- the watch -------------------------------------------------------------------------------------

    def _watch_timeouts(self) -> None:
        """Find calls that run too long, until the pool has ended."""
        while not (self.closing and self._over):
            now = self._dispatcher.now()
            ends = [now + self._settings.handler_timeout]
            for call in list(self._calls):
                context = call.context
                if context is None or not context.deadline or context.cancelled:
                    continue
                if context.deadline > now:
                    ends.append(context.deadline)
                elif (outcomes := self._caller.end(context, error=self._caller.timeout_error())) is not None:
                    self._abandon(call, context, outcomes)
            self._watch.wait((min(ends) - now) / SECOND)

    def _abandon(self, call: _RunningCall, context: Context, outcomes: list[Outcome]) -> None:
        with self._changing:
            replaced = self.closing or self._abandoned < self.max_threads
            if replaced:
                call.abandoned = True
                self._abandoned += 1
        self._dispatcher.settle(context, outcomes)
        if replaced:
            self._remove(1)
            self.request_more()
            self.wake_more()
