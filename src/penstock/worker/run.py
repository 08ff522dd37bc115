"""One run of a worker, from its first lease to its last settled item.

Owns: `WorkerRun`, which connects the parts and ends them in the right order.

    queue → Fetcher → buffer → handler pool (threads, tasks or child processes) → Settler → queue

Draining: the fetchers stop leasing, the items in the buffer are returned without counting an attempt, the pool finishes
its running calls, the settlers settle them, and the run ends. After `drain_timeout` it stops at once.
Stopping at once: running handlers are not waited for. Tasks are cancelled and child processes killed, and their items
are returned. A thread cannot be stopped, so its lease is left to expire: if its items were returned, two handlers could
work on one item at the same time.
All events of a run go through one queue, which the thread in `execute` reads.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal

from penstock.api.items import Item
from penstock.words.clock import SECOND, watch_clock
from penstock.words.logs import log_fields
from penstock.worker.buffer import ItemBuffer, PlainBuffer, SharedBuffer, SourceQueue, WorkerLease
from penstock.worker.empty_watch import EmptyWatch
from penstock.worker.fetcher import Fetcher, RateLimit
from penstock.worker.handlers import Dispatcher, HandlerInvoker, Handlers, PoolParts
from penstock.worker.outcomes import RETURNED
from penstock.worker.process_pool import ProcessPool
from penstock.worker.settings import Settings, UntilEmpty
from penstock.worker.settler import Settler
from penstock.worker.stats import WorkerCounters
from penstock.worker.task_pool import TaskPool
from penstock.worker.thread_pool import ThreadPool

RunEvent = Literal["drain", "stop", "ended", "settled"]
SIGNAL_SECONDS = 1.0
GRACE_SECONDS = 2.0
"""When stopping at once: how long to wait for cancelled handlers, and for the last requests to the queues."""
_log = logging.getLogger("penstock.worker")


class WorkerRun:
    """The state of a running worker."""

    def __init__(
        self,
        weights: Mapping[SourceQueue, int],
        rates: Mapping[SourceQueue, float],
        handlers: Handlers,
        settings: Settings,
        counters: WorkerCounters,
        loop: asyncio.AbstractEventLoop | None = None,
        until_empty: UntilEmpty | None = None,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._queues = ", ".join(source.name for source in weights)
        self._events: SimpleQueue[RunEvent] = SimpleQueue()
        self._stop_requests = 0
        self._error: Exception | None = None
        self._draining = False
        self._drain_deadline: int | None = None
        self._stopping = False
        limit = settings.per_partition * (settings.batch or 1)
        self._buffer: ItemBuffer = SharedBuffer(weights, limit) if limit or len(weights) > 1 else PlainBuffer()
        self._now = now = next(iter(weights)).now
        self._dispatcher = Dispatcher(next(iter(weights)).home.clock, self._buffer, handlers)
        self._invoker = HandlerInvoker(handlers, settings, now)
        self._pool = self._make_pool(handlers, loop)
        self._settlers = {source: Settler(source, counters, self.fail, self.report_late, self.lease_lost) for source in weights}
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
        self._empty_watch: EmptyWatch | None = None
        if until_empty is not None:
            self._empty_watch = EmptyWatch([*weights], counters, until_empty.idle_timeout, self._is_idle, self.drain)

    def _make_pool(self, handlers: Handlers, loop: asyncio.AbstractEventLoop | None) -> ThreadPool | TaskPool | ProcessPool:
        on_ended = partial(self._events.put, "ended")
        parts = PoolParts(self._settings, self._buffer, self._invoker, self._dispatcher, self._request_more, on_ended)
        if self._settings.processes:
            return ProcessPool(parts, handlers, self.fail)
        if handlers.any_async:
            return TaskPool(parts, loop)
        return ThreadPool(parts)

    # -- called in any thread ----------------------------------------------------------------------------

    def drain(self) -> None:
        """Start no more handlers and finish the running ones."""
        self._lease_no_more()
        self._events.put("drain")

    def drain_or_stop(self) -> None:
        """Drain at the first call, stop at once at the second. Safe in a signal handler."""
        self._stop_requests += 1
        self._lease_no_more()
        self._events.put("drain" if self._stop_requests == 1 else "stop")

    def stop(self) -> None:
        """Stop at once."""
        self._stop_requests += 1
        self._lease_no_more()
        self._events.put("stop")

    def fail(self, error: Exception) -> None:
        """Drain because of an error, which `execute` raises at the end."""
        self._error = self._error or error
        self._events.put("drain")

    def report_late(self, lease: WorkerLease, items: list[Item]) -> None:
        """Log that the lease ended before these items were settled, and call the hook `late`."""
        for item in items:
            queue = lease.source.name
            about = log_fields(queue=queue, partition=lease.partition, item_id=item.id, worker=self._settings.name)
            _log.warning("item %s of queue %r was late: its lease had ended", item.id, queue, extra=about)
            if self._settings.hooks.late is not None:
                self._invoker.call_hook(self._settings.hooks.late, queue, item)

    def lease_lost(self, lease: WorkerLease) -> None:
        """Return the items of a lease that has ended, or may have, which wait in the buffer."""
        found = self._buffer.remove(lease)
        for pair in found:
            self._settlers[lease.source].settle(pair, RETURNED)
        if self._buffer.has_next:
            self._pool.wake_more()  # a handler may have found the buffer empty meanwhile
        if found:
            text = "%d leased items of queue %r are returned unhandled: their lease has ended, or could not be extended in time"
            about = log_fields(queue=lease.source.name, partition=lease.partition, worker=self._settings.name)
            _log.warning(text, len(found), lease.source.name, extra=about)

    def _is_idle(self) -> bool:
        """Whether no item is in hand, and the queues gave none when they were last asked."""
        return all(fetcher.is_dry for fetcher in self._fetchers) and not any(settler.leases for settler in self._settlers.values())

    def _request_more(self) -> None:
        """Wake the fetchers whose queue has few or no items in the buffer."""
        for fetcher in self._fetchers:
            if self._buffer.count(fetcher.source) <= fetcher.refill_threshold:
                fetcher.wake()

    # -- the thread of the run ---------------------------------------------------------------------------

    def execute(self) -> None:
        """Run until the worker drains or stops. Raises the error that ended the run, such as BrokerClosed."""
        self._log(logging.INFO, f"starts, with {self._settings.concurrency} handlers at once")
        unwatch = [watch_clock(fetcher.source.home.clock, self._clock_moved) for fetcher in self._fetchers]
        for settler in self._settlers.values():
            settler.start()
        for fetcher in self._fetchers:
            fetcher.start()
        self._pool.start()
        if self._empty_watch is not None:
            self._empty_watch.start()
        try:
            self._wait_for_pool()
        except BaseException:  # this thread was interrupted
            if not self._draining:
                self._drain()
            self._stop()
            raise
        finally:
            self._finish()
            for end in unwatch:
                end()
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

    def _clock_moved(self) -> None:
        """A test has moved the clock: have everybody look again who waits for a time."""
        for fetcher in self._fetchers:
            fetcher.wake()
        for settler in self._settlers.values():
            settler.wakeup.set()
        if self._dispatcher.on_clock_moved is not None:
            self._dispatcher.on_clock_moved()

    def _next_event(self) -> RunEvent:
        """Wait for an event. Wakes each second, because Python handles a signal only when the main thread runs."""
        while True:
            left = SIGNAL_SECONDS if self._drain_deadline is None else (self._drain_deadline - self._now()) / SECOND
            try:
                return self._events.get(timeout=max(0.0, min(SIGNAL_SECONDS, left)))
            except Empty:
                if self._drains_too_long():
                    return "stop"

    def _drains_too_long(self) -> bool:
        if self._drain_deadline is None or self._now() < self._drain_deadline:
            return False
        self._drain_deadline = None
        self._log(logging.WARNING, "has drained for the whole drain_timeout: it stops now and does not wait for running handlers")
        return True

    def _lease_no_more(self) -> None:
        """Close the fetchers. Called before the event is read too, so that nothing is leased in between."""
        for fetcher in self._fetchers:
            fetcher.close()

    def _drain(self) -> None:
        self._draining = True
        handled = max(0, self._counters.in_hand - len(self._buffer))
        if self._settings.hooks.draining is not None:
            self._invoker.call_hook(self._settings.hooks.draining, self._queues, handled)
        if self._settings.drain_timeout is not None:
            self._drain_deadline = self._now() + self._settings.drain_timeout
        if self._empty_watch is not None:
            self._empty_watch.close()
        self._lease_no_more()
        for fetcher in self._fetchers:
            fetcher.join()
        self._return_buffered()
        self._log(logging.INFO, f"drains: {handled} items are being handled; it starts no more handlers and waits for those that run")
        self._pool.close()

    def _log(self, level: int, what: str) -> None:
        about = log_fields(queue=self._queues, worker=self._settings.name)
        _log.log(level, "the worker of queue %r %s", self._queues, what, extra=about)

    def _stop(self) -> None:
        self._stopping = self._dispatcher.stopping = True
        self._pool.cancel()
        for settler in self._settlers.values():
            settler.stop_repeating()

    def _return_buffered(self) -> None:
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
        self._return_buffered()
        self._dispatcher.reporter.close()
        for settler in self._settlers.values():
            while not settler.close(GRACE_SECONDS if self._stopping else 0.1) and not self._stopping:
                if self._wait_for("stop", 0) or self._drains_too_long():
                    self._stop()
        for settler in self._settlers.values():
            settler.stop_extending()
        self._log(logging.INFO, "was stopped" if self._stopping else "has drained: all its items are settled")
        if self._settings.hooks.drained is not None and not self._stopping:
            self._invoker.call_hook(self._settings.hooks.drained, self._queues)
