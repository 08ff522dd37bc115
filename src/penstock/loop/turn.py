"""The turn: runs a batch of requests on a queue's partitions.

Owns: `QueueEngine`. The steps of a turn:
    resize → fences → timers → settle → transfers → produce → administrative operations → lease → commits → answers
A request is answered after the commit of every partition that it used. A partition that fails fails only its part of an
answer. An interrupt in the thread that runs a turn undoes the turn, and the next turn runs its requests again; if the
commits had begun, they are finished instead. So one caller's Ctrl-C does not affect other callers.
One thread runs a turn at a time; which one is decided in loop.py.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from penstock.loop import requests
from penstock.loop.commits import CommitTracker
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import QueueSetup
from penstock.loop.requests import PartitionsNotOpen, Request, not_reached_error
from penstock.loop.transfer import QueueRouter
from penstock.rules.commands import ExtendLease
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown, PenstockError, StorageFailed, caused_by_bug
from penstock.words.logs import log_fields

_log = logging.getLogger("penstock")
MAX_RERUNS = 3
"""How often a request is run again after its turn was undone. If it is undone more often, there is a bug: it fails."""

_USUAL = frozenset({requests.ProduceRequest, requests.LeaseRequest, requests.SettleRequest})


class QueueEngine(CommitTracker):
    """A queue's partitions, and the code that runs a turn."""

    def __init__(self, setup: QueueSetup, router: QueueRouter) -> None:
        super().__init__(setup, router)
        self.next_run: int | None = None
        """When the queue needs a turn even without a request."""
        self.waiting_for_items: list[requests.AwaitRequest] = []
        """Requests that are answered when there are new items. (Waiting leases are in `lease_step.waiting`.)"""
        self.apply_recorded_shape: Callable[[], None] = lambda: None
        """Applies a resize that is recorded in the catalog but was interrupted before it was applied."""
        self.auto_extended_leases: dict[tuple[int, int], None] = {}
        """(partition, lease) of items that this process works on. Changed from any thread."""
        self.requeue: Callable[[Sequence[Request]], None] = lambda requests: None
        """Puts the requests of an undone turn back to the pending requests."""
        self.deferred: list[Request] = []
        """Requests that wait for a partition in I/O."""
        self._running: Sequence[Request] = []
        """Requests that this turn runs, deferred ones among them."""
        self._quiet = False
        """Whether the last turn left nothing to do: a turn with one usual request need not look for anything else."""
        self.running_function: requests.FunctionRequest | None = None
        """The administrative operation that runs now: what it does is remembered for its call."""
        self._resizing = False
        """Whether a resize was unfinished after the last turn."""
        self.held_requests = 0
        """How many requests waited for items or room after the last turn. Any thread may ask."""
        self._leasing_blocked = False
        """Whether a deferred request needs all partitions: nothing is leased meanwhile."""
        self._steps: dict[type[Request], Callable[[Any], None]] = {
            requests.ResizeRequest: self._run_function,
            requests.SettleRequest: self.settle_step.run,
            requests.ConfirmRequest: self.transfer_step.confirm,
            requests.DeliverRequest: self.transfer_step.deliver,
            requests.ProduceRequest: self.produce_step.run,
            requests.FunctionRequest: self._run_function,
            requests.LeaseRequest: self.lease_step.run,
            requests.AwaitRequest: self.waiting_for_items.append,
        }
        self._order = {kind: rank for rank, kind in enumerate(self._steps)}

    # -- the turn ------------------------------------------------------------------------------------

    def turn(self, taken: Sequence[Request], now: int) -> None:
        """Run one turn. Then each request of `taken` is answered, or waits for items, room, a partition or a commit."""
        self.now = now
        self.wants_turn = False
        self.answered = []
        self._committing = False
        self._running = []
        usual = len(taken) == 1 and type(taken[0]) in _USUAL and taken[0].first_sent is None
        due = self._next_visit is not None and now >= self._next_visit
        self.alone = alone = usual and self._quiet and not due and not self.io_finished
        self._quiet = False  # until `_plan` has looked: an interrupt may come before it
        if not alone:
            for request in taken:
                if request.first_sent is not None:
                    self._cancel_original(request, taken)
                    taken = [other for other in taken if not other.done]
        requests_now = taken
        try:
            if not alone:
                requests_now = self._prepare(taken)
                if self._next_visit is not None and now >= self._next_visit:  # an opening may have made it due
                    self._visit()
            for request in requests_now:
                self.attempt(request, self._steps[type(request)])
            if self.produce_step.waiting and not self.resize_step.putting_up_fences:
                self.produce_step.retry(now)
            if self.lease_step.waiting and not self._leasing_blocked:
                if self.closed:
                    self._open([number for number, handle in self.closed.items() if handle.has_ready_items])
                if not any(handle.is_worth_waiting_for and handle.has_ready_items for handle in self.handles_in_io.values()):
                    self.lease_step.assign(now)
            if self.transfer_step.dead:
                self.transfer_step.send_buried()
            if self.touched or self.uncommitted_answers:
                self._commit()
        except BaseException as error:
            self._abort([*self._running, *taken, *requests_now], error)  # those that were deferred came before `taken`
            raise
        self._end()

    def _prepare(self, taken: Sequence[Request]) -> Sequence[Request]:
        """Take back partitions from I/O, open those that are wanted, resize. Gives the requests that can run now."""
        if self.io_finished:
            self._end_io()
        if self._recovered:
            self._update_recovered()
        if self.to_open:
            self._open()
        if self._next_visit is not None and self.now >= self._next_visit:
            self._open_due()
        if self.handles_in_io:
            self._mark_slow()
        found = self._runnable(taken) if self.handles_in_io or self.deferred or self.closed else self._in_order(taken)
        if self.partitions_to_add and not any(isinstance(one, requests.ResizeRequest) for one in (*found, *self.deferred)):
            self._remove_unwanted()
        if any(type(request) is requests.ResizeRequest for request in found):
            found = self._run_resize(found)
        self.apply_recorded_shape()
        if self.resize_step.in_progress:
            self.resize_step.advance_fences()  # first: it reads only committed states
            if self.resize_step.putting_up_fences:
                found = self._without_produces(found)
        return found

    def note_io_over(self, handle: PartitionHandle) -> bool:
        """Note in any thread that the I/O of a partition is over; whether it must be taken back at once.

        It may wait when nobody but answers wait for it, and each of them for another sync, too: the last of these takes
        all of them back. So a turn of 64 partitions ends once, not 64 times. A turn that runs before takes it back.
        """
        handle.io_is_over = True
        self.io_finished.append(handle)
        return not (
            handle.job is None
            and handle.io_error is None
            and not (self.deferred or self.lease_step.waiting or self.produce_step.waiting or self.waiting_for_items)
            and not self.resize_step.in_progress
            and handle.answers_wait_for_others
        )

    def finish_io(self, now: int) -> None:
        """Take back partitions whose I/O is over and answer waiting requests; deferred ones run in the next turn."""
        self.now = now
        self.answered = []
        self._end_io()
        if self.deferred or self.lease_step.waiting or self.produce_step.waiting or self.resize_step.in_progress:
            self.wants_turn = True
        self._end()

    def _end(self) -> None:
        if self.transfer_step.note_senders():
            self.transfer_step.send_outboxes(self.now)
        if self.waiting_for_items:
            self._answer_awaiting()
        if self._waits_for_commit:
            self._expire()
        self._plan()

    def _cancel_original(self, repetition: Request, taken: Sequence[Request]) -> None:
        """End earlier sendings of a repeated call that still wait: only the repetition looks what was done before."""
        session = repetition.calls[0].session
        for waiting_list in (taken, self.deferred, self.lease_step.waiting, self.produce_step.waiting):
            for other in waiting_list:
                same = other.calls and other.calls[0].session == session and other is not repetition
                if same and other.entered_at <= repetition.entered_at:
                    other.cancelled = True
                    self.answer_now(other, error=OutcomeUnknown("this call was repeated; its repetition gives the answer"))

    def _in_order(self, taken: Sequence[Request]) -> Sequence[Request]:
        return sorted(taken, key=self._rank) if len(taken) > 1 else taken

    def _rank(self, request: Request) -> int:
        return self._order[type(request)]

    # -- requests that wait --------------------------------------------------------------------------

    def _runnable(self, taken: Sequence[Request]) -> Sequence[Request]:
        """The requests that can run now, sorted by step; within a step the deferred ones first, oldest first.

        A request that needs a partition in I/O is deferred, and later requests that share a partition with it wait too,
        so that a request for many partitions is not passed for ever. A deferred request whose partitions are all in I/O
        stays deferred. A new request that needs a slow partition runs, and that partition refuses it.
        """
        found: list[Request] = []
        deferred: list[Request] = []
        whole: list[Request] = []  # of `found`, those that need all partitions
        reserved: set[int] = set()
        self._leasing_blocked = False
        for request in (*self.deferred, *self._in_order(taken)):
            if request.done or request.cancelled:
                continue
            known = self._needs(request)
            needs = self.handles.keys() if known is None else known
            if self.closed and (known is not None or request.needs_all_open):
                self._open(number for number in needs if number in self.closed)
            awaited = any(number in self.handles_in_io and self.handles_in_io[number].is_worth_waiting_for for number in needs)
            if not awaited and reserved.isdisjoint(needs) and not (request.deferred and self._only_slow(known)):
                found.append(request)
                if known is None:
                    whole.append(request)
            elif request.give_up_at and request.give_up_at <= self.now:
                self.answer_now(request, error=request.outcome_after(self._not_reached(needs)))
            else:
                request.deferred = True
                deferred.append(request)
                if awaited:
                    for number in needs:
                        self.handles[number].wanted = True
                    reserved.update(needs)
                    self._leasing_blocked = self._leasing_blocked or known is None
        if self.to_open:
            self._open()
        if whole and self.any_worth_waiting_for:  # a request further on in this loop opens a partition that these need
            for request in whole:
                request.deferred = True
            found = [request for request in found if request not in whole]
            deferred = [*whole, *deferred]
        self._running = found  # before `deferred` changes: after an interrupt every request is in one of the two
        self.deferred = deferred
        return self._in_order(found)  # a resize comes first

    def _needs(self, request: Request) -> Collection[int] | None:
        """Numbers of the partitions that a request needs; None is all."""
        kind = type(request)
        if kind is requests.SettleRequest:
            return {part.partition for part in request.parts}  # type: ignore[attr-defined]
        if kind is requests.ProduceRequest:
            return self.produce_step.needs(request)  # type: ignore[arg-type]
        if kind is requests.DeliverRequest or kind is requests.ConfirmRequest:
            return (request.partition,)  # type: ignore[attr-defined]
        if kind is requests.ResizeRequest:  # while its new partitions are being opened, it reserves no others
            return (
                self.partitions_to_add
                if any(self.handles[number].in_io for number in self.partitions_to_add)
                else {*self.active, *self.partitions_to_add}
            )
        if kind is requests.LeaseRequest:
            return self.partitions_to_ask(request) if request.may_be_known else ()
        return () if kind is requests.AwaitRequest else None

    def _open(self, numbers: Iterable[int] | None = None) -> None:
        """Start opening closed partitions; None is those in `to_open`."""
        for number in [*self.to_open] if numbers is None else [*numbers]:
            handle = self.closed.get(number)
            self.to_open.pop(number, None)
            if handle is not None and not handle.in_io:
                self.touch(handle)
                self._start_io(handle, handle.reopen)

    def _only_slow(self, needs: Collection[int] | None) -> bool:
        """Whether all needed partitions are in I/O. The caller knows that none is worth waiting for: all are slow."""
        return bool(needs) and all(number in self.handles_in_io for number in needs or ())

    def _not_reached(self, needs: Collection[int]) -> PenstockError:
        return not_reached_error(self.name, next((number for number in needs if number in self.handles_in_io), None))

    def _mark_slow(self) -> None:
        for handle in self.handles_in_io.values():
            if handle.is_worth_waiting_for:
                handle.mark_slow_if_due(self.now, self._last_io_end)
                if handle.slow:
                    self.notices.look(handle, self.now)

    # -- steps ---------------------------------------------------------------------------------------

    def _run_resize(self, taken: Sequence[Request]) -> Sequence[Request]:
        """Run the first resize, unless something is uncommitted, and defer the others. Gives the remaining requests."""
        found = [request for request in taken if isinstance(request, requests.ResizeRequest)]
        waiting = found
        if not self.resize_step.putting_up_fences and all(handle.usable_partition.is_committed for handle in self.usable()):
            try:
                self.attempt(found[0], self._run_function)
                waiting = found[1:]
            except PartitionsNotOpen:  # a turn follows when the last new partition is open
                self._open()
                self.deferred += waiting
                waiting = []
        self._defer(waiting)
        return [request for request in taken if type(request) is not requests.ResizeRequest]

    def _remove_unwanted(self) -> None:
        """Remove new partitions whose resize request has ended."""
        for number in [*self.partitions_to_add]:
            if not self.handles[number].in_io:
                self.remove(self.handles[number])

    def _without_produces(self, taken: Sequence[Request]) -> Sequence[Request]:
        """Defer produces to partitions that lack their fences: they may not take moved keys. Gives the others."""
        waiting = [one for one in taken if isinstance(one, requests.ProduceRequest) and self._needs_unfenced(one)]
        for one in waiting:
            self.resize_step.wanted.update(self.produce_step.needs(one) or ())
        self._defer(waiting)
        return [request for request in taken if request not in waiting] if waiting else taken

    def _needs_unfenced(self, request: requests.ProduceRequest) -> bool:
        numbers = self.produce_step.needs(request) or self.active
        return any(not self.handles[number].fences_ready for number in numbers)

    def _defer(self, waiting: Sequence[Request]) -> None:
        """Let requests wait for the next turn. Ask for one at once, unless the end of some I/O causes one anyway."""
        if waiting:
            self.deferred += waiting
            self.wants_turn = self.wants_turn or not self.any_worth_waiting_for

    def _visit(self) -> None:
        """Run the timers of partitions that want a visit, and plan their publishing, retention and closing."""
        now = self.now
        for handle in list(self.handles.values()):
            if handle.next_run is None or handle.next_run > now or handle.in_io:
                continue
            if handle.error is not None or handle.closed:
                continue
            self.touch(handle)
            if handle.may_close(now):
                if self._is_needed_open(handle):
                    handle.stay_open(now)
                else:
                    handle.wants_close = True
            if not handle.fences_ready:
                self.resize_step.restore_fences(handle)
            handle.plan_due_publish(now)
            handle.wants_retention = not handle.wants_publish and handle.is_due_for_retention()
            try:
                self._extend_held(handle)
                if handle.usable_partition.due():
                    self.wants_turn = True  # there may be more
                    if handle.usable_partition.became_ready:
                        self.resize_step.forward(handle, handle.usable_partition.became_ready)
            except PenstockError:
                continue  # the commit reports the error

    def _open_due(self) -> None:
        """Start reopening partitions whose back-off is over, and closed ones with a timer that expired."""
        for handle in list(self.handles.values()):
            if handle.next_run is not None and handle.next_run <= self.now and not handle.in_io:
                if handle.is_due_for_retry(self.now) or (handle.closed and handle.is_due):
                    self.touch(handle)
                    self._start_io(handle, handle.reopen)
                elif handle.closed or handle.error is not None:
                    self.touch(handle)  # so that it plans its next visit

    def _is_needed_open(self, handle: PartitionHandle) -> bool:
        """Whether an idle partition must stay open: for fences, or because a caller waits for items."""
        return not handle.fences_ready or self.resize_step.is_source(handle.number) or bool(self.lease_step.waiting and handle.state.ready)

    def _extend_held(self, handle: PartitionHandle) -> None:
        """Extend leases that this process works on, so that they do not expire while the interpreter is busy."""
        for number, lease in [pair for pair in list(self.auto_extended_leases) if pair[0] == handle.number]:
            live = handle.state.leases.live.get(lease)
            if live is None:
                self.auto_extended_leases.pop((number, lease), None)
            elif live.deadline <= handle.usable_partition.now().elapsed + SECOND // 4:  # before `due` ends it
                self.run(handle, ExtendLease(lease, after_deadline=True))

    def _run_function(self, request: requests.FunctionRequest) -> None:
        self.used.clear()
        self.running_function = request
        try:
            result = request.function(self)
        except StorageFailed as error:
            raise request.outcome_after(error) from error
        except (PenstockError, PartitionsNotOpen):
            raise
        except Exception as error:  # a bug in one operation must not fail the turn
            _log.exception("an administrative operation on queue %r went wrong", self.name, extra=log_fields(queue=self.name))
            raise caused_by_bug(error) from error
        self.answer(request, (result, set(self.used)))

    def _answer_awaiting(self) -> None:
        """Answer requests that wait for new items: True when there are some, False at their deadline."""
        still = []
        for request in self.waiting_for_items:
            if request.cancelled:
                continue
            if any(handle.next_offset > request.offsets.get(handle.number, 0) for handle in self.handles.values()):
                self.answer_now(request, True)
            elif request.deadline <= self.now:
                self.answer_now(request, False)
            else:
                still.append(request)
        self.waiting_for_items[:] = still

    def _abort(self, taken: Sequence[Request], error: BaseException) -> None:
        """After an interrupt or an error: finish the commits if they had begun, else undo the turn and run it again."""
        if self._committing:
            for handle in self.touched:
                if handle.is_usable and handle.partition is not None and not handle.partition.is_committed:
                    self._start_io(handle, None)
                    handle.set_recovery_job()
            self._answer_or_wait()
        else:
            pending, self.uncommitted_answers = self.uncommitted_answers, deque()
            for handle in self.touched:
                if not handle.in_io:
                    handle.undo(_interrupted(error))
            self.requeue_undone([*taken, *(request for request, _ in pending)], error)
            self.resize_step.invalidate()
        for handle in [handle for handle in self.io_to_dispatch if not handle.in_io]:  # interrupted before I/O
            self.io_to_dispatch.remove(handle)
            self.handles_in_io.pop(handle.number, None)
        self.transfer_step.note_senders()  # the next turn sends their outboxes
        self._plan()
        self._quiet = False

    def requeue_undone(self, taken: Sequence[Request], error: BaseException) -> None:
        """Run the requests of an undone turn again; lease requests wait for items again."""
        again: list[Request] = []
        committing = [waiting.request for waiting in self._waits_for_commit.values()]  # their commit has begun and is not undone
        waiting_lists = (self.lease_step.waiting, self.produce_step.waiting, self.waiting_for_items, self.deferred, committing, again)
        for request in taken:
            if request.done:
                request.notify()  # the interrupt may have prevented it
                continue
            if not request.taken or any(request in waiting_list for waiting_list in waiting_lists):
                continue
            request.undo_count += 1
            if request.undo_count > MAX_RERUNS:
                request.finish(error=_interrupted(error))
            elif isinstance(request, requests.LeaseRequest) and not request.may_be_known:
                self.lease_step.waiting.add(request)  # its lease was undone
            else:
                again.append(request)
        self.requeue(again)
        self.wants_turn = True

    def _plan(self) -> None:
        """Set `next_run`, when the queue needs a turn even without a request."""
        visit, now, resizing = self._next_visit, self.now, self.resize_step.in_progress
        unknown = visit is None or visit <= now or self.visits_changed  # else it is exact, or early, which does no harm
        if self.touched:
            for handle in self.touched:
                partition = None if handle.in_io else handle.partition
                if partition is not None and handle.error is None and partition.state.ready:
                    self.with_ready_items.add(handle.number)
                else:
                    self.with_ready_items.discard(handle.number)
                if resizing and partition is not None and handle.changed():
                    self.wants_turn = True
                self.notices.look(handle, now)
                handle.plan(now)
                handle.touched = False
                if visit is not None and handle.next_run is not None and handle.next_run < visit:
                    visit = handle.next_run
            self.touched.clear()
        if unknown:
            visit = min([handle.next_run for handle in self.handles.values() if handle.next_run is not None], default=None)
            self.visits_changed = False
        self._next_visit = self.next_run = visit
        if self._resizing is not resizing:
            self._resizing = resizing
            if not resizing:
                self.notices.note(logging.INFO, "the resize of queue %r is finished: no key waits for another partition", self.name)
        self.held_requests = 0
        if self.lease_step.waiting or self.produce_step.waiting or self.waiting_for_items or self.handles_in_io:
            self.held_requests = len(self.lease_step.waiting) + len(self.produce_step.waiting) + len(self.waiting_for_items)
            waiting_lists: tuple[Sequence[Request], ...] = (self.produce_step.waiting, self.waiting_for_items)
            ends = [request.deadline for waiting_list in waiting_lists for request in waiting_list if request.deadline]
            ends += [request.give_up_at for request in self.deferred if request.give_up_at]
            ends += [waiting.expires for waiting in self._waits_for_commit.values() if waiting.expires and not waiting.request.done]
            ends += [handle.slow_at(self._last_io_end) for handle in self.handles_in_io.values() if handle.is_worth_waiting_for]
            earliest = self.lease_step.waiting.earliest
            if earliest is not None and earliest <= self.now and self.any_worth_waiting_for:
                earliest = None  # it is answered when the partitions in I/O are done or count as slow
            ends += [when for when in (self._next_visit, earliest) if when is not None]
            self.next_run = min(ends, default=None)
        else:
            self._quiet = self._has_no_work()

    def _has_no_work(self) -> bool:
        """Whether nothing waits and every partition is open, so that a turn with one request has only that to do."""
        return not (
            self.wants_turn
            or self.deferred
            or self.closed
            or self.to_open
            or self.io_to_dispatch
            or self.partitions_to_add
            or self._recovered
            or self._waits_for_commit
            or self.resize_step.in_progress
            or self.transfer_step.busy
            or self.transfer_step.dead
        )

    # -- closing -------------------------------------------------------------------------------------

    def refuse_all(self, error: PenstockError) -> None:
        """Answer every waiting request with an error."""
        for waiting_list in (self.lease_step.waiting, self.produce_step.waiting, self.waiting_for_items, self.deferred):
            for request in waiting_list:
                request.finish(error=error)
            waiting_list.clear()

    def close(self) -> None:
        """Close every partition; raises the first error at the end."""
        first: PenstockError | None = None
        for handle in self.handles.values():
            try:
                if handle.partition is not None:
                    handle.partition.close()
            except PenstockError as error:
                first = first or error
        if first is not None:
            raise first


def _interrupted(error: BaseException) -> OutcomeUnknown:
    return OutcomeUnknown(f"the turn was interrupted ({type(error).__name__}: {error}); repeat with the same request id")
