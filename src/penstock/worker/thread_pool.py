"""The pool of threads in which handlers run.

Owns: `BaseThreadPool`, the base of the pools of threads and of child processes (it starts, wakes and ends threads), and
`ThreadPool`, whose threads call handlers.

Sleeping: an idle thread puts a lock into `_idle` and waits for it. The thread that takes the lock out of `_idle`
releases it. So each thread is woken exactly once, and the thread that went idle last is woken first.
Waking: one thread for each new item, unless handlers are so quick that one thread handles all items before a second one
wakes. If a slow item is among them, the fetcher finds items waiting while threads are idle, and calls `wake_more`.

`_run_simple` is for a handler that takes only the item, without hooks and without a timeout: it costs a few steps per
item. All other handlers go through `HandlerInvoker`.
With a `handler_timeout` one more thread watches the calls. A thread cannot be stopped, so a thread whose handler runs
too long is abandoned: its items are retried, its later result is ignored, and another thread is started. At most
`concurrency` threads are abandoned at a time.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SECOND
from penstock.worker.context import Context
from penstock.worker.handlers import Handler, PoolParts, result_error
from penstock.worker.outcomes import RETURNED, Outcome
from penstock.worker.wakeup import WakeUp

QUICK = 60.0
"""Microseconds. For handlers that take less, only one thread is woken."""
STRIDE = 64
"""The most items that a thread handles between two readings of the clock."""


class BaseThreadPool:
    """Threads that take items from the buffer."""

    stoppable = False
    """Whether `cancel` can end running handlers."""

    def __init__(self, max_threads: int, parts: PoolParts) -> None:
        self.max_threads = max_threads
        self._settings, self.buffer, self._invoker, self._dispatcher, self.request_more, self._on_ended = parts
        self.item_time = QUICK
        """About how many microseconds an item takes in one thread."""
        self.closing = False
        self._idle: deque[threading.Lock] = deque()
        self._changing = threading.Lock()
        self._started = 0
        """Threads that run or will be started, without the abandoned ones."""
        self._ended = False
        self._threads = 0
        """How many threads were ever started; the number in their names."""
        self._to_start = 0
        self._step = 1
        """How many threads `wake_more` wakes."""

    # -- called by fetchers ----------------------------------------------------------------------------

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
        """Start threads, up to `max_threads` in all. Each new thread starts two more; the caller starts only one."""
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
        """Start threads before the first item comes, if starting takes long."""

    # -- end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more items. `on_ended` is called when the last thread has finished its items."""
        with self._changing:
            self.closing = True
        self._wake(self.max_threads)
        self._remove(0)

    def cancel(self) -> None:
        """Stop running handlers, if that is possible."""

    def _remove(self, count: int) -> None:
        """Count threads that have ended or were abandoned; call `on_ended` after the last one."""
        with self._changing:
            self._started -= count
            ended_now = self.closing and not self._started and not self._ended
            self._ended = self._ended or ended_now
        if ended_now:
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
        """Handle items until `_sleep` gives False. Gives True if the thread was abandoned (it is not counted then)."""

    def _record_time(self, items: int, duration: int) -> int:
        """Update `item_time` from so many items in one thread. Gives after how many items to read the clock again."""
        sample = min(duration / items, 8 * self.item_time + 100)
        self.item_time += (sample - self.item_time) / 8
        return STRIDE if self.item_time < QUICK / 4 else max(1, min(STRIDE, self.max_threads // 8))

    def _sleep(self) -> bool:
        """Wait until the buffer may have items; False when the worker drains."""
        gate = threading.Lock()
        gate.acquire()
        self._idle.append(gate)
        self.request_more()
        if (self.closing or self.buffer.has_next) and self._leave_idle(gate):
            return not self.closing
        gate.acquire()
        return not self.closing

    def _leave_idle(self, gate: threading.Lock) -> bool:
        """Take the lock out of `_idle`; False if another thread has taken it, which will release it."""
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

    def __init__(self, parts: PoolParts) -> None:
        super().__init__(parts.settings.concurrency, parts)
        self._calls: set[_RunningCall] = set()
        self._abandoned = 0
        """Abandoned threads whose handler has not ended."""
        self._watch_wakeup = WakeUp()
        if self._settings.handler_timeout:
            self._dispatcher.on_deadline_changed = lambda _: self._watch_wakeup.set()
            self._dispatcher.on_clock_moved = self._watch_wakeup.set
            threading.Thread(target=self._watch_timeouts, name="penstock watch", daemon=True).start()

    def close(self) -> None:
        super().close()
        self._watch_wakeup.set()

    def _work(self) -> bool:
        handle = self._invoker.bare_function
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
        take, handler_ended = buffer.take, buffer.handler_ended if buffer.counts_handlers else None
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
                pair[0].settler.settle(pair, self._invoker.record_failure(pair[1], error))
            else:  # Settler.settle, written out because this is the fastest path
                settler = pair[0].settler
                settler.completed.append(pair)
                if not settler.wakeup.is_set:
                    settler.wakeup.set()
            if handler_ended is not None:
                handler_ended(pair)
            left -= 1
            if not left:
                at = now()
                left = stride = self._record_time(stride, at - since)
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
                outcomes = self._call(context, handler)
                call.context = None
                if outcomes is not None:
                    self._dispatcher.settle(context, outcomes)
            self._record_time(1, now() - since)
            self.request_more()
        with self._changing:
            self._abandoned -= 1

    def _call(self, context: Context, handler: Handler) -> list[Outcome] | None:
        """Run a handler. Gives the outcome of each item, or None if the timeout has decided the outcomes."""
        self._invoker.begin(context)
        try:
            result = self._invoker.call(handler, context)
        except BaseException as error:
            return self._invoker.end(context, error=error)
        return self._invoker.end(context, result)

    # -- timeouts --------------------------------------------------------------------------------------

    def _watch_timeouts(self) -> None:
        """Find calls that run too long, until the pool has ended."""
        while not (self.closing and self._ended):
            now = self._dispatcher.now()
            times = [now + self._settings.handler_timeout]
            for call in list(self._calls):
                context = call.context
                if context is None or not context.times_out_at or self._dispatcher.stopping:
                    continue
                if context.times_out_at > now:
                    times.append(context.times_out_at)
                elif (outcomes := self._invoker.end(context, error=self._invoker.timeout_error())) is not None:
                    self._abandon(call, context, outcomes)
            self._watch_wakeup.wait((min(times) - now) / SECOND)

    def _abandon(self, call: _RunningCall, context: Context, outcomes: list[Outcome]) -> None:
        """Settle the items of a call that runs too long. Replace its thread, unless too many threads are abandoned."""
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
