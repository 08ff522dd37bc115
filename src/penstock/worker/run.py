"""One run of a worker, from its first lease to its last settled item.

Owns: `WorkerRun`, which connects the parts and ends them in order.

    queue → Fetcher → buffer → handler pool (threads, tasks or child processes) → Settler → queue

Draining: the fetchers stop leasing, the items in the buffer are returned without counting an attempt, the pool finishes its running calls,
the settlers settle them, and the run ends.
Stopping at once: running handlers are not waited for. Tasks are cancelled and processes killed, and their items are returned. A thread
cannot be stopped, so its lease is left to expire: returning its items could have two handlers work on one item.
All events of a run come through one queue, which the thread in `execute` reads.
"""

import asyncio
import logging
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Literal

from penstock.api.items import Item
from penstock.worker.buffer import ItemBuffer, PlainBuffer, SharedBuffer, SourceQueue, WorkerLease
from penstock.worker.fetcher import Fetcher, RateLimit
from penstock.worker.handlers import Dispatcher, HandlerInvoker, Handlers
from penstock.worker.outcomes import RETURNED
from penstock.worker.process_pool import ProcessPool
from penstock.worker.settings import Settings
from penstock.worker.settler import Settler
from penstock.worker.stats import WorkerCounters
from penstock.worker.task_pool import TaskPool
from penstock.worker.thread_pool import ThreadPool

RunEvent = Literal["drain", "stop", "ended", "settled"]
SIGNAL_SECONDS = 1.0
GRACE_SECONDS = 2.0
"""How long to wait for handlers that were stopped, and for the last requests to the queues."""
_log = logging.getLogger("penstock.worker")


class WorkerRun:
    """A worker while it runs."""

    def __init__(
        self,
        weights: Mapping[SourceQueue, int],
        rates: Mapping[SourceQueue, float],
        handlers: Handlers,
        settings: Settings,
        counters: WorkerCounters,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._settings = settings
        self._events: SimpleQueue[RunEvent] = SimpleQueue()
        self._asked = 0
        self._error: Exception | None = None
        self._draining = False
        self._stopping = False
        limit = settings.per_partition * (settings.batch or 1)
        self._buffer: ItemBuffer = SharedBuffer(weights, limit) if limit or len(weights) > 1 else PlainBuffer()
        now = next(iter(weights)).now
        self._dispatcher = Dispatcher(now, self._buffer, handlers)
        caller = HandlerInvoker(handlers, settings, now)
        self._caller = caller
        self._pool = self._make_pool(caller, handlers, loop)
        self._settlers = {source: Settler(source, counters, self) for source in weights}
        total = sum(weights.values())
        self._fetchers = [
            Fetcher(
                source,
                max(1, settings.concurrency * weight // total) if len(weights) > 1 else 0,
                settings,
                handlers,
                self._buffer,
                self._pool,
                self._settlers[source],
                counters,
                self.fail,
                RateLimit(rates[source]) if source in rates else None,
            )
            for source, weight in weights.items()
        ]

    def _make_pool(
        self, caller: HandlerInvoker, handlers: Handlers, loop: asyncio.AbstractEventLoop | None
    ) -> ThreadPool | TaskPool | ProcessPool:
        parts = self._settings, self._buffer, caller, self._dispatcher, self._request_more, lambda: self._events.put("ended")
        if self._settings.processes:
            return ProcessPool(*parts, handlers, self.fail)
        if handlers.any_async:
            return TaskPool(*parts, loop)
        return ThreadPool(*parts)

    # -- from any thread ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Start no more handlers and finish the running ones."""
        self._lease_no_more()
        self._events.put("drain")

    def drain_or_stop(self) -> None:
        """Drain; asked once more, stop at once. Safe in a signal handler."""
        self._asked += 1
        self._lease_no_more()
        self._events.put("drain" if self._asked == 1 else "stop")

    def stop(self) -> None:
        """Stop at once."""
        self._asked += 1
        self._lease_no_more()
        self._events.put("stop")

    def fail(self, error: Exception) -> None:
        """End the run; `execute` raises the error."""
        self._error = self._error or error
        self._events.put("drain")

    def report_late(self, lease: WorkerLease, items: list[Item]) -> None:
        for item in items:
            _log.warning("item %s of queue %r was late: its lease had ended", item.id, lease.source.name)
            if self._settings.hooks.late is not None:
                self._caller.call_hook(self._settings.hooks.late, item)

    def lease_lost(self, lease: WorkerLease) -> None:
        """A lease was lost: drop its items from the buffer."""
        for pair in self._buffer.remove(lease):
            self._settlers[lease.source].settle(pair, RETURNED)

    def _request_more(self) -> None:
        """A handler finds few or no items in the buffer: wake the fetchers that should lease more."""
        for fetcher in self._fetchers:
            if self._buffer.count(fetcher.source) <= fetcher.refill_threshold:
                fetcher.wake()

    # -- from the beginning to the end -------------------------------------------------------------------

    def execute(self) -> None:
        """Work until it is asked to end; raises if a queue can no longer be reached."""
        for settler in self._settlers.values():
            settler.start()
        for fetcher in self._fetchers:
            fetcher.start()
        self._pool.start()
        try:
            self._wait_for_pool()
        except BaseException:  # this thread was interrupted
            if not self._draining:
                self._drain()
            self._stop()
            raise
        finally:
            self._finish()
        if self._error is not None:
            raise self._error

    def _wait_for_pool(self) -> None:
        while not self._stopping:
            event = self._next_event()
            if event == "ended":
                return
            if not self._draining:
                self._drain()
            if event == "stop":
                self._stop()
        self._wait_for("ended", GRACE_SECONDS if self._pool.stoppable else 0)

    def _next_event(self) -> RunEvent:
        """Wait for an event, in slices: a signal that the system gives to another thread is handled only when this one wakes."""
        while True:
            try:
                return self._events.get(timeout=SIGNAL_SECONDS)
            except Empty:
                continue

    def _lease_no_more(self) -> None:
        """Called at once and not by the thread in `execute`, so that a handler that becomes free in between finds no new items."""
        for fetcher in self._fetchers:
            fetcher.close()

    def _drain(self) -> None:
        self._draining = True
        self._lease_no_more()
        for fetcher in self._fetchers:
            fetcher.join()
        self._give_back()
        _log.info("the worker drains: it starts no more handlers and waits for those that run")
        self._pool.close()

    def _stop(self) -> None:
        self._stopping = self._dispatcher.stopping = True
        self._pool.cancel()
        for settler in self._settlers.values():
            settler.stop_repeating()

    def _give_back(self) -> None:
        for pair in self._buffer.clear():
            pair[0].settler.settle(pair, RETURNED)

    def _wait_for(self, wanted: RunEvent, seconds: float) -> bool:
        try:
            while self._events.get(timeout=seconds) != wanted:
                pass
        except Empty:
            return False
        return True

    def _finish(self) -> None:
        self._give_back()
        self._dispatcher.reporter.close()
        for settler in self._settlers.values():
            while not settler.close(GRACE_SECONDS if self._stopping else 0.1) and not self._stopping:
                if self._wait_for("stop", 0):
                    self._stop()
        for settler in self._settlers.values():
            settler.let_go()
        if self._settings.hooks.drained is not None and not self._stopping:
            self._caller.call_hook(self._settings.hooks.drained)
