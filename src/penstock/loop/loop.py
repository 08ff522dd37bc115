"""The loop of a queue: takes requests from callers and decides which thread runs a turn.

Owns: `Loop`. Group commit by flat combining: a caller adds its request to the pending ones and, if no thread runs a
turn, runs one with all of them; else it sleeps until it has its answer or is woken to run the next turn. So a single
caller needs no other thread, and many callers share one sync. Runner threads, shared by all queues (runners.py), run
turns for timers, for waiting requests, and for requests that came by `submit` (async callers, other queues).
No turn waits for a disk: partitions that need a sync start I/O and the turn ends. A caller syncs the partition of its
own request; threads of the storage root sync the others. Then the requests are answered (commits.py).
Every request ends: by its answer, at its deadline, when its caller cancels it, or when the loop is closed. Without
threads (`threaded=False`) turns run only in `call` and `turn`; tests and simulations use that. A call that must wait
then runs the turns of the other queues. If its clock only moves when a test moves it, no time passes while it waits, so
it does not wait: it is answered as at its deadline.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from penstock.logs.disk_threads import DiskThreads, sync
from penstock.loop.meter import Meter
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.requests import (
    AnsweredCallers,
    LeaseRequest,
    PendingRequests,
    Request,
    ResizeRequest,
    not_reached_error,
    queue_closed_error,
)
from penstock.loop.runners import Runners
from penstock.loop.turn import QueueEngine
from penstock.words.clock import MILLISECOND, SECOND, WatchedClock
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueBusy, StorageFailed, caused_by_bug
from penstock.words.logs import log_fields

MAX_REQUESTS = 1_000
"""Most requests of one turn."""
GRACE = 5 * SECOND
"""A turn answers a waiting request at its deadline; its caller waits so much longer for that."""
IDLE_SECONDS = 60.0
CLOSE_SECONDS = 1.0
GATHER_SECONDS = 0.0001
"""How long a turn that will sync waits for another request: a small part of the time of a sync."""
MAX_GATHERINGS = 8
"""How often it waits so, while requests come."""
_log = logging.getLogger("penstock")


class Loop:
    """Runs the turns of one queue."""

    def __init__(
        self, engine: QueueEngine, disk: DiskThreads, runners: Runners, queues: "Callable[[], Sequence[Loop]]", *, threaded: bool = True
    ) -> None:
        self.engine = engine
        self._queues = queues
        self._time_passes = threaded or not isinstance(engine.clock, WatchedClock)
        """Whether time passes while a call waits."""
        self._runners = runners
        self._disk = disk
        self.meter = Meter()
        self._pending = PendingRequests(engine.name)
        self._turning = threading.RLock()  # reentrant only because it knows its owner
        self._has_turn: Callable[[], bool] = self._turning._is_owned  # type: ignore[attr-defined]  # not in the stubs
        """Whether this thread runs a turn."""
        self._threaded = threaded
        self.woken = False
        self.wakes_at: int | None = None
        self._last_count = 0  # requests in the last turn
        self._syncs = False  # whether the last turn started I/O
        self.manual_io: list[PartitionHandle] = []
        """Without threads: partitions in I/O."""
        self.stays_in_io: Callable[[PartitionHandle], bool] = lambda handle: False
        """Without threads: whether a partition stays in I/O. Set by simulations."""
        self._ending: SimpleQueue[None] | None = None
        self._gathering: SimpleQueue[None] | None = None  # gets an entry when as many requests are pending as the last turn had
        self._answered = AnsweredCallers()
        self._closed = False
        engine.post = self.post
        engine.requeue = self._pending.requeue

    # -- for callers ---------------------------------------------------------------------------------

    def call(self, request: Request) -> Any:
        """Run a request and give its answer. This thread runs the turn unless another one does."""
        if self._has_turn():
            raise QueueBusy("called in the middle of a turn (from a signal handler?); try again when it has returned")
        request.wait_in_thread(self._answered)
        self.enter(request)
        try:
            first = request.entered_at
            while not request.done:
                if not self.engine.all_in_io and self._turning.acquire(blocking=False):
                    try:
                        own = self._run_turns(request, first)
                    finally:
                        self._turning.release()
                    self._start_next()
                    if own is not None:
                        if self._answered:
                            self._answered.wake_next()
                        self._commit([own], own)
                    if request.done:
                        break
                first = 0
                if self._answered:
                    self._answered.wake_next()
                self._sleep(request)
            if self._answered:
                self._answered.wake_next()
        except BaseException:
            self._recover_after_interrupt()
            self.cancel(request)
            raise
        return request.result()

    def _recover_after_interrupt(self) -> None:
        """Leave to other threads what this thread had to do: it will not finish it."""
        while self._has_turn():  # an interrupt may come between `acquire` and `try`
            self._turning.release()
        self._answered.wake_all()
        self._hand_over_io()
        self.wake()  # this thread may have been woken to run the next turn

    def submit(self, request: Request) -> None:
        """Add a request without waiting. The thread that answers it calls `request.on_done`."""
        self.enter(request)
        self.wake()

    def run_submitted(self) -> None:
        """Run a turn in this thread for requests that were added, or have another thread run it."""
        waits = self._records_in_catalog()
        if waits or self.engine.all_in_io or not self._uses_runners or not self._turning.acquire(blocking=False):
            self.wake()
            return
        try:
            try:
                self._run_logging_bugs()
            finally:
                self._turning.release()
            self._answered.wake_next()
            self._start_next()
        except BaseException:  # an interrupt
            self._recover_after_interrupt()
            raise

    def _records_in_catalog(self) -> bool:
        """Whether the next turn may record a resize, which waits for the catalog's disk."""
        return self._pending.resizes > 0 or any(isinstance(request, ResizeRequest) for request in self.engine.deferred)

    def cancel(self, request: Request) -> None:
        """Stop waiting for a request. Items that were leased for it are returned."""
        request.cancelled = True
        if not request.claim() and request.done and isinstance(request, LeaseRequest) and request.answer:
            with suppress(BrokerClosed):
                self.engine.settle_step.return_items(request.answer)
        if isinstance(request, LeaseRequest):
            self.engine.lease_step.waiting.note_cancelled(request)
        self.engine.wants_turn = True  # the next turn removes it
        self.wake()

    def enter(self, request: Request) -> None:
        """Add a request without waiting; `wake` or `run_submitted` must follow."""
        if self._closed:
            raise queue_closed_error(self.engine.name)
        request.check()
        engine = self.engine
        if not request.entered_at:
            request.entered(engine.clock.read().elapsed)
        if request.deadline:  # every request is given the time for one turn; a late lease still gets ready items
            request.give_up_at = (
                request.deadline + GRACE if request.gets_late_answer else max(request.deadline, request.entered_at + SECOND)
            )
        try:
            self._pending.enter(request, engine.held_requests)
        except QueueBusy as error:
            self.meter.rejected(error)
            raise
        gathering = self._gathering
        if gathering is not None and len(self._pending) >= self._last_count:
            gathering.put(None)

    def post(self, request: Request) -> None:
        """Add a message of this queue or another one; never refused while the loop is open."""
        if self._closed:
            raise queue_closed_error(self.engine.name)
        request.entered_at = self.engine.clock.read().elapsed
        self._pending.post(request)
        self.wake()

    def _sleep(self, request: Request) -> None:
        """Sleep until the request has its answer or is woken to run a turn; give up at its deadline."""
        if self.manual_io:  # without threads: no other thread does the I/O
            for handle in [*self.manual_io]:
                self.run_io(handle)
            return
        if not self._threaded and (self._run_queues() or request.done):
            return
        if not request.give_up_at:
            request.sleep(IDLE_SECONDS)
            return
        now = self.engine.clock.read().elapsed
        if not self._time_passes and self._end_wait(request, now):
            return
        left = request.give_up_at - now
        if left > 0:
            request.sleep((left if self._threaded else self._until_next_turn(left, now)) / SECOND)
        elif request.claim():
            request.cancelled = True
            error = request.outcome_after(not_reached_error(self.engine.name))
            self.meter.rejected(error)
            request.finish(error=error)
            self.wake()  # this thread may have been woken to run the next turn
        elif left > -GRACE:  # the turn that took it will answer
            request.sleep((left + GRACE) / SECOND)
        else:
            request.cancelled = True
            request.finish(error=OutcomeUnknown("the answer did not come in time; repeat with the same request id"))

    # -- waiting without threads ---------------------------------------------------------------------

    def _run_queues(self) -> bool:
        """Run a turn of every queue that has something to do now; whether one was busy. Transfers move on by this."""
        queues, now = self._queues(), self.engine.clock.read().elapsed
        for loop in queues:
            if loop is not self and loop.engine.next_run is not None and loop.engine.next_run <= now:
                loop.turn()
        busy = [loop for loop in queues if loop.busy]
        for loop in busy:
            loop.turn()
        return bool(busy)

    def _end_wait(self, request: Request, now: int) -> bool:
        """Let the next turn answer a waiting request as at its deadline; False if a turn could not, so that it ends."""
        if request.deadline <= now:
            request.give_up_at = now - GRACE
            return False
        request.deadline = now
        if isinstance(request, LeaseRequest):
            self.engine.lease_step.waiting.deadline_changed(request)
        return True

    def _until_next_turn(self, left: int, now: int) -> int:
        """How long to sleep until a queue has something to do, at most `left`."""
        planned = [loop.engine.next_run - now for loop in self._queues() if loop.engine.next_run is not None]
        return max(MILLISECOND, min([left, *planned]))

    # -- turns ---------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Run one turn and its I/O, without threads; whether another turn has something to do."""
        with self._turning:
            self._turn()
            self._dispatch_io()
        self._answered.wake_next()
        self.engine.notices.flush()
        return self.busy

    @property
    def pending(self) -> int:
        """How many requests no turn has taken yet."""
        return len(self._pending)

    @property
    def busy(self) -> bool:
        """Whether a turn now would find something to do."""
        engine = self.engine
        return bool(
            engine.wants_turn
            or self._pending
            or engine.io_finished
            or engine.io_to_dispatch
            or (self.manual_io and any(not self.stays_in_io(handle) for handle in self.manual_io))
        )

    def _run_turns(self, request: Request, now: int) -> PartitionHandle | None:
        """Run turns until this request is answered or waits. Gives the partition that this thread syncs, if any.

        now: the time, if it was just read; else 0.
        """
        while True:
            self._turn(now)
            now = 0
            own = self._dispatch_io(request) if self.engine.io_to_dispatch or self.manual_io else None
            if own is not None or request.done or (request.taken and not self.engine.wants_turn):
                return own

    def _turn(self, now: int = 0) -> None:
        taken: list[Request] = []
        try:
            engine = self.engine
            if self._last_count > 2 and self._syncs and len(self._pending) < self._last_count:
                self._gather()
            self._pending.take(MAX_REQUESTS, taken)
            self._last_count = len(taken)
            if not now:
                now = engine.clock.read().elapsed
            elif now < engine.now:
                now = engine.now
            late: list[Request] = []
            for request in taken:
                if request.give_up_at and now > request.give_up_at and not request.gets_late_answer:
                    late.append(request)
                    request.finish(error=request.outcome_after(not_reached_error(engine.name)))
            engine.turn([request for request in taken if not request.done] if late else taken, now)
            self._syncs = bool(engine.io_to_dispatch)
            self.meter.turn(taken, [*late, *engine.answered] if late else engine.answered, now, engine.clock.read().elapsed)
        except BaseException as error:
            self.engine.requeue_undone(taken, error)
            raise

    def _gather(self) -> None:
        """Let callers that were just answered send their next requests: one sync for all. Ends when no more come."""
        try:
            for _ in range(MAX_GATHERINGS):
                before = len(self._pending)
                self._gathering = gathering = SimpleQueue[None]()
                if before >= self._last_count:
                    return
                with suppress(Empty):
                    gathering.get(timeout=GATHER_SECONDS)
                if len(self._pending) == before:
                    return
        finally:
            self._gathering = None

    # -- commits -------------------------------------------------------------------------------------

    def _dispatch_io(self, request: Request | None = None) -> PartitionHandle | None:
        """Give the I/O of a turn to other threads, except the sync for `request`, which its caller does."""
        to_dispatch = self.engine.io_to_dispatch
        if not to_dispatch and not self.manual_io:
            return None
        own = None
        if request is not None and self._threaded:
            own = next((one for one in to_dispatch if one.job is None and not one.avoid_until and _waits_for(one, request)), None)
        others = [handle for handle in to_dispatch if handle is not own and handle.in_io]
        for handle in others:
            handle.waiting_thread = 0  # the thread of another turn that was to sync it was interrupted: it must not recover it too
        if own is not None:
            own.waiting_thread = threading.get_ident()
        self._commit(others, None)
        to_dispatch.clear()
        return own

    def _commit(self, handles: Sequence[PartitionHandle], own: PartitionHandle | None) -> None:
        """Have the I/O of partitions done: that of `own` by this thread, the others by disk threads."""
        if not self._threaded:
            self._run_io_by_hand(handles)
            return
        by_log = {id(handle.log): handle for handle in handles if handle.job is None}
        for handle in handles:
            if handle.is_opening:
                self._disk.run_opening(
                    self.engine.incarnation, handle.number, partial(self._claim_and_open, handle), partial(getattr, handle, "wanted")
                )
            elif handle.job is not None:
                self._disk.run_job(self.engine.incarnation, handle.number, partial(self._claim_and_run, handle))
        logs = [handle.log for handle in by_log.values()]
        if logs:
            self._disk.commit(
                logs,
                lambda log: by_log[id(log)].claim(),
                lambda log, failure: self._synced(by_log[id(log)], failure),
                own.log if own is not None else None,
            )

    def _run_io_by_hand(self, handles: Sequence[PartitionHandle]) -> None:
        for handle in handles:
            if handle not in self.manual_io:
                handle.io_began_at = max(1, handle.io_since)
                self.manual_io.append(handle)
        for handle in [*self.manual_io]:
            if not self.stays_in_io(handle):
                self.run_io(handle)

    def run_io(self, handle: PartitionHandle) -> None:
        """Without threads: do the I/O of a partition, and answer the requests that waited for it."""
        try:
            if handle.job is not None:
                handle.run_job()
            else:
                sync(handle.log, lambda log, failure: handle.after_sync(failure))
        except KeyboardInterrupt:
            handle.set_recovery_job()
            raise
        self.manual_io.remove(handle)
        self._end_io(handle)

    def _synced(self, handle: PartitionHandle, failure: StorageFailed | None) -> None:
        handle.after_sync(failure)
        self._end_io(handle)

    def _claim_and_open(self, handle: PartitionHandle, replayed: Callable[[], None]) -> None:
        handle.on_replayed = replayed
        self._claim_and_run(handle)

    def _claim_and_run(self, handle: PartitionHandle) -> None:
        if handle.claim():
            self._run_job(handle)

    def _run_job(self, handle: PartitionHandle) -> None:
        """Run the job of a partition, in a disk thread."""
        try:
            handle.run_job()
        except Exception as error:  # a bug: the partition is reopened, and waiting requests fail
            about = log_fields(queue=self.engine.name, partition=handle.number)
            _log.exception("a commit of queue %r went wrong", self.engine.name, extra=about)
            handle.io_error = caused_by_bug(error)
            if handle.partition is not None:
                handle.partition.failed = True
        self._end_io(handle)

    def _end_io(self, handle: PartitionHandle) -> None:
        """Take a partition back whose I/O is over, and have the next turn run if there is one to run."""
        engine = self.engine
        by_caller = handle.waiting_thread != 0
        if not engine.note_io_over(handle) and not self._pending and self._ending is None:
            return  # a caller that sends a request from now on runs a turn, which takes it back
        with self._turning:
            if engine.io_finished:
                engine.finish_io(engine.clock.read().elapsed)
                if engine.answered:
                    self.meter.answered(engine.answered, engine.clock.read().elapsed)
        if not by_caller:  # a caller does it when it leaves
            self._answered.wake_next()
        self._start_next(here=not by_caller)
        if self._ending is not None:
            self._ending.put(None)

    def _hand_over_io(self) -> None:
        """After an interrupt of this thread: have other threads finish the I/O that it had to do or dispatch."""
        if not self._threaded:
            return  # the next turn does it
        me = threading.get_ident()
        with self._turning:
            unfinished = [
                handle
                for handle in self.engine.handles_in_io.values()
                if handle.waiting_thread == me or handle in self.engine.io_to_dispatch
            ]
            self.engine.io_to_dispatch.clear()
            for handle in unfinished:
                was_own, handle.waiting_thread = handle.waiting_thread == me, 0
                if not handle.in_io:
                    self.engine.handles_in_io.pop(handle.number, None)
                elif handle not in self.engine.io_finished and (handle.claim() or was_own):
                    handle.set_recovery_job()
                    self._disk.run_job(self.engine.incarnation, handle.number, partial(self._run_job, handle))

    def _start_next(self, here: bool = False) -> None:
        """After a turn: wake a thread that runs the next one, or plan it, if one is needed.

        here: this is a disk thread, which runs it itself if no caller's thread does (requests of other processes).
        """
        engine = self.engine
        if engine.notices.lines:
            engine.notices.flush()
        if self._pending and self._pending.wake_one():
            return
        if engine.wants_turn and any(request.wake() for request in engine.deferred):
            return
        if self.busy:
            if here:
                self.run_submitted()
            else:
                self.wake()
            return
        next_run = engine.next_run
        if next_run is not None and (self.wakes_at is None or next_run < self.wakes_at) and self._uses_runners:
            self._runners.plan(self, next_run)

    # -- turns of runners ----------------------------------------------------------------------------

    @property
    def _uses_runners(self) -> bool:
        return self._threaded and not self._closed

    def wake(self) -> None:
        """Have a runner run a turn."""
        if self._uses_runners:
            self._runners.wake(self)

    def run(self) -> None:
        """Run a turn in a runner's thread. Does not raise."""
        with self._turning:
            if self._closed:
                return
            self._run_logging_bugs()
        self._answered.wake_next()
        self._start_next()

    def _run_logging_bugs(self) -> None:
        """Run a turn for callers in other threads. A bug is logged: no caller here could handle it."""
        try:
            try:
                self._turn()
            finally:
                self._dispatch_io()
        except Exception:  # the turn was undone and its callers were answered or wait for the next one
            _log.exception("a turn of queue %r went wrong", self.engine.name, extra=log_fields(queue=self.engine.name))

    # -- closing -------------------------------------------------------------------------------------

    def run_between_turns(self, function: Callable[[QueueEngine], Any]) -> Any:
        """Run a function while no turn runs."""
        try:
            with self._turning:
                return function(self.engine)
        finally:
            self._start_next()  # callers that came meanwhile sleep

    @contextmanager
    def without_turns(self, seconds: float) -> Iterator[None]:
        """Inside this context no turn runs. QueueBusy if one runs for so long that this cannot begin."""
        if self._has_turn() or not self._turning.acquire(timeout=seconds):
            raise QueueBusy(f"a turn of queue {self.engine.name!r} takes long; try again in a moment")
        try:
            yield
        finally:
            self._turning.release()
            self._start_next()  # callers that came meanwhile sleep

    def check_not_in_call(self) -> None:
        """QueueBusy when this thread is in the middle of a call: closing would wait for it for ever."""
        me = threading.get_ident()
        if self._has_turn() or any(
            handle.waiting_thread == me and not handle.io_is_over for handle in list(self.engine.handles_in_io.values())
        ):
            raise QueueBusy(
                "closed in the middle of a call of this thread (from a signal handler?); let the handler raise an exception, "
                "for example by sys.exit, and close the broker where that arrives"
            )

    def close(self, error: PenstockError | None = None) -> None:
        """Run the pending requests, make everything durable and close the partitions. Waiting requests get `error`."""
        if self._closed:
            return
        self._pending.closed = True
        self._ending = SimpleQueue()
        while not self._try_close(error):
            self._answered.wake_next()
            with suppress(Empty):
                self._ending.get(timeout=CLOSE_SECONDS)
        self._answered.wake_all()
        self.engine.notices.flush()

    def _try_close(self, error: PenstockError | None) -> bool:
        """Run the pending requests and close, unless a partition is in I/O; whether it is closed."""
        engine = self.engine
        with self._turning:
            if self._closed:
                return True
            while self._pending or engine.io_finished or (engine.deferred and not engine.handles_in_io):
                with suppress(PenstockError):
                    self._turn()
                    self._dispatch_io()
            for handle in [*self.manual_io]:
                self.run_io(handle)
            if engine.handles_in_io:
                return False
            self._closed = True
            try:
                engine.refuse_all(error or queue_closed_error(engine.name))
            finally:
                engine.close()
            return True

    def abandon(self) -> None:
        """Close without I/O in a forked child: the partitions are its parent's."""
        self._closed = True
        self._pending.closed = True

    def __repr__(self) -> str:
        return f"Loop({self.engine.name!r}, {len(self.engine.handles)} partitions{', closed' if self._closed else ''})"


def _waits_for(handle: PartitionHandle, request: Request) -> bool:
    return any(waiting.request is request for waiting in handle.pending_answers)
