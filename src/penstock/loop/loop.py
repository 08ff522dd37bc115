"""The loop: who runs a queue's turns, and how callers reach them.

Owns: `Loop`. Group commit by flat combining: a caller puts its request into the inbox and, if nobody runs a turn, runs one itself, with
everything that waits; else it sleeps until its answer is there or it is woken to lead the next turn. So a lone caller never changes
threads, and many share one sync. Runner threads, shared by all queues (runners.py), run turns when something comes due, for those who
cannot run one themselves (`submit`: async callers, other queues) and for those who wait.
No turn waits for a disk: partitions that owe a sync go out, the turn is released, and a caller syncs its own partition itself, while
threads of the storage root sync the others. When a partition has landed its answers leave (commits.py).
Every request ends: by its answer, by its deadline, when its caller is gone, or at shutdown.
Without threads (`threaded=False`) nothing runs by itself: whoever holds the loop calls `turn`, which is how simulations drive it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from penstock.logs.disk_threads import DiskThreads, sync
from penstock.loop.meter import Meter
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.requests import AwaitRequest, LeaseRequest, PendingRequests, Request, queue_closed_error
from penstock.loop.runners import Runners
from penstock.loop.turn import QueueEngine
from penstock.words.clock import SECOND
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueBusy, StorageFailed

TAKE = 1_000
"""Requests of one turn."""
GRACE = 5 * SECOND
"""A waiting request is answered by the turn in which its deadline passes; after this its caller gives up on that."""
IDLE_SECONDS = 60.0
CLOSE_SECONDS = 1.0
GATHER_SECONDS = 0.0001
"""How long a turn waits for a crowd to gather, when it will sync: a part of what that takes."""
_log = logging.getLogger("penstock")


class Loop:
    """One queue at work."""

    def __init__(self, turns: QueueEngine, disk: DiskThreads, runners: Runners, *, threaded: bool = True) -> None:
        self.engine = turns
        self._runners = runners
        self._disk = disk
        self.meter = Meter()
        self._inbox = PendingRequests(turns.name)
        self._turning = threading.RLock()  # never taken twice: it can say who has it
        self._threaded = threaded
        self.woken = False
        self.wakes_at: int | None = None
        self._crowd = 0  # requests in the last turn
        self._syncs = False  # whether the last turn made a partition go out
        self.manual_io: list[PartitionHandle] = []
        """Without threads: partitions that are out."""
        self.stays_in_io: Callable[[PartitionHandle], bool] = lambda member: False
        """Without threads: whether a partition stays out for now. Set by simulations."""
        self._ending: SimpleQueue[None] | None = None
        self._gathering: SimpleQueue[None] = SimpleQueue()  # always empty: waiting for it lets others run
        self._closed = False
        turns.post = self._post
        turns.requeue = self._inbox.requeue

    # -- for callers ---------------------------------------------------------------------------------

    def call(self, request: Request) -> Any:
        """Put a request and wait for its answer; the calling thread runs the turn if nobody else does."""
        if self._leads():
            raise QueueBusy("called in the middle of a turn (from a signal handler?); try again when it has returned")
        request.make_wakeup()
        self._enter(request)
        try:
            while not request.done:
                if not self.engine.all_in_io and self._turning.acquire(blocking=False):
                    try:
                        mine = self._lead(request)
                    finally:
                        self._turning.release()
                    self._pass_on()
                    if mine is not None:
                        self._commit([mine], mine)
                    if request.done:
                        break
                self._sleep(request)
        except BaseException:
            while self._leads():  # an interrupt may come between taking the turn and the `try`
                self._turning.release()
            self._finish_others()
            self.cancel(request)
            self.wake()  # it may have been this one's turn to lead
            raise
        return request.result()

    def submit(self, request: Request) -> None:
        """Put a request; `request.on_done` is called with its answer, by whichever thread has it."""
        self._enter(request)
        self.wake()

    def cancel(self, request: Request) -> None:
        """The caller is gone: its place is free, and what a turn has leased to it meanwhile goes back."""
        request.cancelled = True
        if not request.claim() and request.done and isinstance(request, LeaseRequest) and request.answer:
            with suppress(BrokerClosed):
                self.engine.settle_step.give_back(request.answer)
        self.engine.lease_step.has_cancelled = self.engine.wants_turn = True  # the next turn frees its place
        self.wake()

    def _enter(self, request: Request) -> None:
        if self._closed:
            raise queue_closed_error(self.engine.name)
        request.check()
        turns = self.engine
        request.entered_at = now = turns.clock.read().elapsed
        if request.deadline:  # a late lease still gets what is there; and everybody is given the time for one turn
            request.give_up_at = (
                request.deadline + GRACE if isinstance(request, LeaseRequest | AwaitRequest) else max(request.deadline, now + SECOND)
            )
        held = len(turns.lease_step.waiting) + len(turns.produce_step.waiting) + len(turns.waiting_for_items)
        self._inbox.enter(request, held)

    def _post(self, request: Request) -> None:
        """A message of the queue's own, or of another queue: never refused while the loop is open."""
        if self._closed:
            raise queue_closed_error(self.engine.name)
        request.entered_at = self.engine.clock.read().elapsed
        self._inbox.post(request)
        self.wake()

    post = _post

    def _sleep(self, request: Request) -> None:
        """Until there is an answer, or it is time to lead, or to give up."""
        if self.manual_io:  # without threads: there is nobody else who could let them land
            for member in [*self.manual_io]:
                self.run_io(member)
            return
        if not request.give_up_at:
            request.sleep(IDLE_SECONDS)
            return
        left = request.give_up_at - self.engine.clock.read().elapsed
        if left > 0:
            request.sleep(left / SECOND)
        elif request.claim():
            request.cancelled = True
            request.finish(error=not_reached_error(self.engine.name))
            self.wake()  # it may have been this one's turn to lead
        elif left > -GRACE:  # the turn that has it will answer
            request.sleep((left + GRACE) / SECOND)
        else:
            request.cancelled = True
            request.finish(error=OutcomeUnknown("the answer did not come in time; repeat with the same request id"))

    # -- turns ---------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Run one turn by hand, and what its commits take; whether there is more to do at once."""
        with self._turning:
            self._turn()
            self._see_off()
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether a turn now would find something to do."""
        turns = self.engine
        by_hand = any(not self.stays_in_io(member) for member in self.manual_io)
        return turns.wants_turn or len(self._inbox) > 0 or bool(turns.io_finished) or bool(turns.io_to_dispatch) or by_hand

    def _lead(self, request: Request) -> PartitionHandle | None:
        """Run turns until this caller's request is answered or has to wait; gives the partition whose disk it waits for itself."""
        while True:
            self._turn()
            mine = self._see_off(request)
            if mine is not None or request.done or (request.taken and not self.engine.wants_turn):
                return mine

    def _leads(self) -> bool:
        """Whether this thread has the turn."""
        owned: bool = getattr(self._turning, "_is_owned")()  # noqa: B009 (not in the type stubs)
        return owned

    def _turn(self) -> None:
        taken: list[Request] = []
        try:
            self._take_and_turn(taken)
        except BaseException as error:
            self.engine.requeue_undone(taken, error)
            raise

    def _take_and_turn(self, taken: list[Request]) -> None:
        turns = self.engine
        if self._crowd > 2 and len(self._inbox) < self._crowd and self._syncs:
            with suppress(Empty):  # those who were just answered are about to ask again: one sync for all of them
                self._gathering.get(timeout=GATHER_SECONDS)
        self._inbox.take(TAKE, taken)
        self._crowd = len(taken)
        now = turns.clock.read().elapsed
        for request in taken:
            if request.give_up_at and now > request.give_up_at and not isinstance(request, LeaseRequest | AwaitRequest):
                request.finish(error=not_reached_error(turns.name))
        before = turns.produced
        turns.turn([request for request in taken if not request.done] if taken else taken, now)
        self._syncs = bool(turns.io_to_dispatch)
        if taken or turns.answered:
            self.meter.turn(taken, turns.answered, turns.clock.read().elapsed, turns.produced - before)

    # -- commits -------------------------------------------------------------------------------------

    def _see_off(self, request: Request | None = None) -> PartitionHandle | None:
        """Have other threads commit the partitions that went out, but for one that the caller of a request waits for itself."""
        departures = self.engine.io_to_dispatch
        if not departures and not self.manual_io:
            return None
        mine = None
        if request is not None and self._threaded:
            mine = next((one for one in departures if one.job is None and not one.avoid_until and _waits_for(one, request)), None)
        others = [member for member in departures if member is not mine and member.in_io]
        if mine is not None:
            mine.waiting_thread = threading.get_ident()
        self._commit(others, None)
        departures.clear()
        return mine

    def _commit(self, members: Sequence[PartitionHandle], mine: PartitionHandle | None) -> None:
        """Have members committed that are out: the one that is `mine` by this thread."""
        if not self._threaded:
            self._commit_by_hand(members)
            return
        by_log = {id(member.log): member for member in members if member.job is None}
        for member in members:
            if member.job is not None:
                self._disk.run_job(self.engine.incarnation, member.number, partial(self._claim_and_work, member))
        logs = [member.log for member in by_log.values()]
        if logs:
            self._disk.commit(
                logs,
                lambda log: by_log[id(log)].claim(),
                lambda log, failure: self._synced(by_log[id(log)], failure),
                mine.log if mine is not None else None,
            )

    def _commit_by_hand(self, members: Sequence[PartitionHandle]) -> None:
        for member in members:
            if member not in self.manual_io:
                member.io_began_at = max(1, member.io_since)
                self.manual_io.append(member)
        for member in [*self.manual_io]:
            if not self.stays_in_io(member):
                self.run_io(member)

    def run_io(self, member: PartitionHandle) -> None:
        """Without threads: do what a member is out for, and take it back."""
        try:
            if member.job is not None:
                member.run_job()
            else:
                sync(member.log, lambda log, failure: member.after_sync(failure))
        except KeyboardInterrupt:
            member.set_recovery_job()
            raise
        self.manual_io.remove(member)
        self._land(member)

    def _synced(self, member: PartitionHandle, failure: StorageFailed | None) -> None:
        member.after_sync(failure)
        self._land(member)

    def _claim_and_work(self, member: PartitionHandle) -> None:
        if member.claim():
            self._work(member)

    def _work(self, member: PartitionHandle) -> None:
        """A job of a member, in a thread of its disk."""
        try:
            member.run_job()
        except Exception as error:  # a mistake of ours: the partition is opened anew, and those who wait for it are told
            _log.exception("a commit of queue %r went wrong", self.engine.name)
            member.io_error = OutcomeUnknown(f"it went wrong ({type(error).__name__}: {error}); please report this")
            if member.partition is not None:
                member.partition.failed = True
        self._land(member)

    def _land(self, member: PartitionHandle) -> None:
        """Take a member back whose commit or job is over, and let somebody go on."""
        turns = self.engine
        member.waiting_thread = 0
        turns.io_finished.append(member)
        with self._turning:
            if turns.io_finished:
                turns.finish_io(turns.clock.read().elapsed)
                if turns.answered:
                    self.meter.turn((), turns.answered, turns.clock.read().elapsed, 0)
        self._pass_on()
        if self._ending is not None:
            self._ending.put(None)

    def _finish_others(self) -> None:
        """An interrupt came: commits that this thread was to wait for are brought to their end by others."""
        if not self._threaded:
            return  # the next turn sees to them
        me = threading.get_ident()
        with self._turning:
            orphans = [
                member
                for member in self.engine.handles_in_io.values()
                if member.waiting_thread == me or member in self.engine.io_to_dispatch
            ]
            self.engine.io_to_dispatch.clear()
            for member in orphans:
                was_mine, member.waiting_thread = member.waiting_thread == me, 0
                if not member.in_io:
                    self.engine.handles_in_io.pop(member.number, None)
                elif member not in self.engine.io_finished and (member.claim() or was_mine):
                    member.set_recovery_job()
                    self._disk.run_job(self.engine.incarnation, member.number, partial(self._work, member))

    def _pass_on(self) -> None:
        """After a turn: somebody must lead the next one, if there is a reason for it, now or later."""
        if self._inbox and self._inbox.wake_one():
            return
        if self.engine.wants_turn and any(request.wake() for request in self.engine.deferred):
            return
        if self.busy:
            self.wake()
            return
        next_run = self.engine.next_run
        if next_run is not None and (self.wakes_at is None or next_run < self.wakes_at) and self._runs_by_itself:
            self._runners.plan(self, next_run)

    # -- turns that nobody calls for -----------------------------------------------------------------

    @property
    def _runs_by_itself(self) -> bool:
        return self._threaded and not self._closed

    def wake(self) -> None:
        """Let a runner look what there is to do."""
        if self._runs_by_itself:
            self._runners.wake(self)

    def run(self) -> None:
        """A turn, in a runner's thread."""
        try:
            with self._turning:
                if self._closed:
                    return
                try:
                    self._turn()
                finally:
                    self._see_off()
        except Exception:  # the turn has told its callers and set its partitions aside; the next one may do better
            _log.exception("a turn of queue %r went wrong", self.engine.name)
        self._pass_on()

    # -- the end -------------------------------------------------------------------------------------

    def run_between_turns(self, look: Callable[[QueueEngine], Any]) -> Any:
        """Run a function between two turns, without one."""
        with self._turning:
            return look(self.engine)

    def close(self, error: PenstockError | None = None) -> None:
        """Answer everyone, make everything durable, let go. Who still waits gets `error`."""
        if self._closed:
            return
        self._inbox.closed = True
        self._ending = SimpleQueue()
        while not self._close_unless_out(error):
            with suppress(Empty):
                self._ending.get(timeout=CLOSE_SECONDS)

    def _close_unless_out(self, error: PenstockError | None) -> bool:
        """Serve who came before the end, if that can be done at once, and close; but not while a commit is under way."""
        turns = self.engine
        with self._turning:
            if self._closed:
                return True
            while self._inbox or turns.io_finished or (turns.deferred and not turns.handles_in_io):
                with suppress(PenstockError):
                    self._turn()
                    self._see_off()
            for member in [*self.manual_io]:
                self.run_io(member)
            if turns.handles_in_io:
                return False
            self._closed = True
            try:
                turns.refuse_all(error or queue_closed_error(turns.name))
            finally:
                turns.close()
            return True

    def abandon(self) -> None:
        """In a forked child: this loop is its parent's."""
        self._closed = True
        self._inbox.closed = True

    def __repr__(self) -> str:
        return f"Loop({self.engine.name!r}, {len(self.engine.handles)} partitions{', closed' if self._closed else ''})"


def _waits_for(member: PartitionHandle, request: Request) -> bool:
    return any(waiting.request is request for waiting in member.pending_answers)


def not_reached_error(name: str) -> QueueBusy:
    return QueueBusy(f"queue {name!r} did not get to the request in time; nothing was done, try again in a moment")
