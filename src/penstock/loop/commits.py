"""The end of a turn: partitions are committed, and requests are answered when the partitions they used are durable.

Owns: `CommitTracker`: the partitions in I/O, the requests whose answers wait for them, and the answers.
    _commit   append what was run; partitions that need a sync start I/O (`io_to_dispatch`); answer the other requests
    _end_io   take back partitions whose I/O is over (`io_finished`), and answer the requests that waited for them
    _expire   answer requests at their deadline although a partition is still in I/O
Which thread does the I/O is decided in loop.py.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock.loop import requests
from penstock.loop.item_cache import LeasedItems, leased_items
from penstock.loop.lease import LeaseStep
from penstock.loop.notices import QueueNotices
from penstock.loop.partition_handle import GRACE_AFTER_SLOW, PROMPT, SLOW_AFTER, PartitionHandle, PendingAnswer
from penstock.loop.partition_set import PartitionSet, QueueSetup
from penstock.loop.produce import ProduceStep
from penstock.loop.requests import LeaseResult, Request, StoredPart
from penstock.loop.resize import ResizeStep
from penstock.loop.settle import SettleStep
from penstock.loop.transfer import QueueRouter, TransferStep
from penstock.rules.commands import ExtendLease, LeaseAnswer
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown, PenstockError, Refused, StorageFailed

_log = logging.getLogger("penstock")
NONE_FAILED: Mapping[int, PenstockError] = {}


class CommitTracker(PartitionSet):
    """A queue's partitions, their commits, and the answers that wait for commits."""

    def __init__(self, setup: QueueSetup, router: QueueRouter) -> None:
        super().__init__(setup)
        self.notices = QueueNotices(setup.name)
        self.transfer_step = TransferStep(self, router)
        self.resize_step = ResizeStep(self, self.transfer_step)
        self.produce_step = ProduceStep(self)
        self.lease_step = LeaseStep(self, self.transfer_step, self.resize_step)
        self.settle_step = SettleStep(self, self.transfer_step)
        self.io_to_dispatch: list[PartitionHandle] = []
        """Partitions that started I/O and that no thread has been given yet."""
        self.io_finished: deque[PartitionHandle] = deque()
        """Partitions whose I/O is over; the next turn takes them back. Any thread appends."""
        self._waits_for_commit: dict[int, PendingAnswer] = {}
        self._recovered: list[PartitionHandle] = []
        self._committing = False
        self._last_io_end = 0
        """When a partition last finished I/O."""
        self._next_visit: int | None = 0
        """When the next partition wants to be visited."""

    @property
    def is_dead_queue(self) -> bool:
        return self.transfer_step.is_dead_queue

    @property
    def all_in_io(self) -> bool:
        """Whether every partition is in I/O, and none is slow or to be taken back, so that a turn could do nothing."""
        return (
            bool(self.handles_in_io)
            and len(self.handles_in_io) == len(self.handles)
            and not self.io_finished
            and all(handle.is_worth_waiting_for for handle in list(self.handles_in_io.values()))
        )

    # -- I/O -----------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Append what was run. Partitions that need a sync start I/O; requests that used only others are answered."""
        pending = self.uncommitted_answers
        for index, (request, result) in enumerate(pending):
            if type(request) is requests.LeaseRequest:
                pending[index] = (request, self._collect(request, result))
        self._committing = True
        for handle in self.touched:
            partition = handle.partition
            if partition is None or handle.error is not None or handle.in_io:
                continue
            if partition.begin_commit() or handle.wants_publish or handle.wants_retention or handle.wants_close:
                self._start_commit_io(handle)
            else:
                handle.after_commit()
        self._answer_or_wait()

    def _start_commit_io(self, handle: PartitionHandle) -> None:
        partition = handle.usable_partition
        wants_close, handle.wants_close = handle.wants_close, False
        if wants_close and not handle.wants_retention and handle.may_close(self.now):  # this turn did not use it
            self._start_io(handle, handle.close)
        elif handle.wants_publish:
            self._start_io(handle, handle.take_publish_job())
        elif handle.wants_retention:
            handle.wants_retention = False
            self._start_io(handle, partition.apply_due_retention)
        else:
            self._start_io(handle, None if partition.can_sync else partition.commit)

    def _start_io(self, handle: PartitionHandle, job: Callable[[], None] | None) -> None:
        """Start I/O of a partition. In this order, so that after an interrupt it is still dispatched."""
        self.io_to_dispatch.append(handle)
        self.handles_in_io[handle.number] = handle
        handle.start_io(job)
        self.closed.pop(handle.number, None)

    def _answer_or_wait(self) -> None:
        """Answer requests that need no partition in I/O; the others are answered when that I/O is over."""
        pending, in_io = self.uncommitted_answers, self.handles_in_io
        while pending:
            request, result = pending[0]
            rests_on = {number: in_io[number] for number in _rests_on(request, result) if number in in_io} if in_io else None
            if rests_on:
                waiting = PendingAnswer(request, result, rests_on, self._expires(request))
                for handle in rests_on.values():
                    handle.pending_answers.append(waiting)
                self._waits_for_commit[id(waiting)] = waiting
            else:
                self._answer(request, result, NONE_FAILED)
            pending.popleft()

    def _expires(self, request: Request) -> int:
        """When a request is answered although a partition is in I/O: at its deadline, but not before SLOW_AFTER from
        now; 0: never.
        """
        until = request.deadline if isinstance(request, requests.LeaseRequest) else request.give_up_at
        return max(until, self.now + SLOW_AFTER) if until or isinstance(request, requests.LeaseRequest) else 0

    def _end_io(self) -> None:
        """Take back partitions whose I/O is over, and answer the requests that waited for them."""
        failed = False
        while self.io_finished:  # an interrupt may come anywhere, so an entry is removed last
            handle = self.io_finished[0]
            self.touch(handle)
            if handle.in_io:
                handle.finish_io(self.now)
            self._last_io_end = self.now
            while handle.pending_answers:
                waiting = handle.pending_answers[0]
                waiting.rests_on.pop(handle.number, None)
                if handle.io_error is not None:
                    waiting.failed[handle.number] = handle.io_error
                if not waiting.rests_on:
                    self._waits_for_commit.pop(id(waiting), None)
                    self._answer(waiting.request, waiting.result, waiting.failed)
                handle.pending_answers.popleft()
            self.handles_in_io.pop(handle.number, None)
            if handle.closed:
                self.closed[handle.number] = handle
            failed = failed or handle.io_error is not None
            if handle.recovered or handle.undelivered_leases:
                self._recovered.append(handle)
                self.wants_turn = True
            if handle.was_opened and handle.is_usable:  # timers that expired while it was closed run before a lease
                handle.next_run = self._next_visit = self.now
            if handle.was_opened and self.map.version > 1:
                self.resize_step.note_opened(handle)
                self.wants_turn = True
            handle.was_opened = False
            self.io_finished.popleft()
        if failed:
            self.resize_step.invalidate()

    def _update_recovered(self) -> None:
        """Give recovered partitions the settings, returned leases and fences that they missed."""
        for handle in self._recovered:
            if handle.is_usable:
                self.apply_queue_settings(handle)
                self._extend_leases(handle)
                self.settle_step.return_undelivered(handle)
                self.resize_step.restore_fences(handle)
        self._recovered.clear()

    def _extend_leases(self, handle: PartitionHandle) -> None:
        """Extend the leases of a partition that was slow or failing: their holders could not settle or extend them.

        The record of an opening extends them too. But a partition that was reopened at once, when its turn was undone,
        is failing until its back-off is over, and a part of that time has passed then.
        """
        now = handle.usable_partition.now().elapsed
        if now - handle.usable_partition.opened_at <= PROMPT:
            return
        end = now + GRACE_AFTER_SLOW
        with suppress(PenstockError):  # the commit reports the error
            for live in [*handle.state.leases.live.values()]:
                if live.deadline < end:
                    self.run(handle, ExtendLease(live.number, GRACE_AFTER_SLOW, after_deadline=True))

    def _expire(self) -> None:
        """Answer requests at their deadline although a partition is in I/O; the outcome of that part is unknown."""
        for waiting in [*self._waits_for_commit.values()]:
            if waiting.expires and waiting.expires <= self.now and not waiting.request.done:
                del self._waits_for_commit[id(waiting)]
                for number, handle in waiting.rests_on.items():
                    handle.pending_answers.remove(waiting)
                    waiting.failed[number] = _no_answer_error(handle)
                    if isinstance(waiting.request, requests.LeaseRequest):
                        handle.undelivered_leases += [granted.lease for one, granted, *_ in waiting.result if one is handle]
                self._answer(waiting.request, waiting.result, waiting.failed)

    # -- answers -------------------------------------------------------------------------------------

    def _answer(self, request: Request, result: Any, failed: Mapping[int, PenstockError]) -> None:
        if request.done:
            request.notify()  # an interrupt may have prevented it
        else:
            self.answered.append(request)
        try:
            if type(request) is requests.ProduceRequest:
                if failed:
                    result = [_refused(one, failed[one.partition]) if one.partition in failed else one for one in result]
                request.finish(result)
            elif type(request) is requests.LeaseRequest:
                self._answer_lease(request, result, failed)
            elif type(request) is requests.SettleRequest:
                if failed:
                    result = [
                        Refused.of(failed[part.partition]) if part.partition in failed else one
                        for part, one in zip(request.parts, result, strict=True)
                    ]
                request.finish(result)
            elif isinstance(request, requests.DeliverRequest):
                handle, taken = result
                request.finish(taken, failed.get(handle.number))
            elif isinstance(request, requests.FunctionRequest):
                answer, used = result
                wrong = None if request.recorded_elsewhere else _partial_failure(used, failed)
                if wrong is None and request.log_line is not None and not request.done:
                    self.notices.note(logging.INFO, "%s", request.log_line(answer))
                request.finish(answer if wrong is None else None, wrong)
        except PenstockError as error:
            request.finish(error=error)

    def _collect(self, request: requests.LeaseRequest, parts: list[Any]) -> list[Any]:
        """Read leased items before I/O starts. Gives (handle, granted, items, elapsed deadline) of each part."""
        found: list[Any] = []
        for handle, granted in parts:
            try:
                partition = handle.usable_partition
                items = [] if request.without_payloads else leased_items(partition.read(granted.runs))
            except PenstockError as error:  # this part is not delivered; the others are
                handle.read_error = error
                handle.undelivered_leases.append(granted.lease)
                if request.found_again:
                    self.answer_now(request, error=request.outcome_after(error))
                continue
            granted = granted if request.without_payloads else _without_lost(granted, items)
            if not granted.runs:  # damage took all items: the lease has ended, and others may be ready
                request.lost_to_damage = True
                continue
            found.append((handle, granted, items, granted.deadline - partition.now().elapsed + self.now))
        return found

    def _answer_lease(self, request: requests.LeaseRequest, parts: list[Any], failed: Mapping[int, PenstockError]) -> None:
        """Answer with the leased items, or let the request wait again when there are none.

        A repetition never waits for other items: it gets the leases of the earlier sending, or an error.
        """
        given: list[LeaseResult] = []
        ended: list[LeaseResult] = []  # while the answer waited for another partition
        for handle, granted, items, until in parts:
            if handle.number not in failed:
                (given if until > self.now else ended).append(LeaseResult(handle.number, granted, items, (until - self.now) / SECOND))
        if request.found_again:
            whole = not failed or (bool(given) and request.without_payloads)
            request.finish(given if whole else None, None if whole else request.outcome_after(next(iter(failed.values()))))
            return
        if ended:
            self.settle_step.return_items(ended)
        if given:
            request.finish(given)
            if request.cancelled:
                self.settle_step.return_items(given)
        elif request.lost_to_damage or request.deadline > self.now or failed or not parts:
            # Also without a wait: an empty answer would say that nothing is ready. The partitions that gave these items
            # are failing or slow now; the next turn asks the others, and answers with an error when there are none.
            self.lease_step.waiting.add(request)
            self.wants_turn = self.wants_turn or request.lost_to_damage or bool(failed) or not parts
            request.lost_to_damage = False
        else:
            request.finish([])


def _no_answer_error(handle: PartitionHandle) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"partition {handle.number} has not answered in time ({handle.error or 'its disk is busy'}); repeat with the same request id"
    )


def _rests_on(request: Request, result: Any) -> Collection[int]:
    """The partitions whose commit an answer waits for."""
    if isinstance(request, requests.ProduceRequest):
        return [one.partition for one in result if one.stored is not None]
    if isinstance(request, requests.SettleRequest):
        parts = zip(request.parts, result, strict=True)  # a part refused because of a slow partition does not wait
        return [part.partition for part, one in parts if not (isinstance(one, Refused) and one.code == StorageFailed.code)]
    if isinstance(request, requests.LeaseRequest):
        return [part[0].number for part in result]
    if isinstance(request, requests.DeliverRequest):
        return [result[0].number]
    return result[1] if isinstance(request, requests.FunctionRequest) else ()


def _without_lost(granted: LeaseAnswer, items: Sequence[LeasedItems]) -> LeaseAnswer:
    """The lease without the items that were found damaged."""
    left = granted.count
    for part in items:
        left -= len(part.batch.payloads)
    if not left:
        return granted
    return msgspec.structs.replace(granted, runs=[edge for part in items for edge in part.runs])


def _refused(part: StoredPart, error: PenstockError) -> StoredPart:
    return part._replace(stored=None, refused=Refused.of(error))


def _partial_failure(used: set[int], failed: Mapping[int, PenstockError]) -> PenstockError | None:
    """The error of an administrative operation that failed in some of the partitions it used; None when it did not."""
    broken = [number for number in used if number in failed]
    if not broken:
        return None
    if len(broken) == len(used):
        return failed[broken[0]]
    return OutcomeUnknown(f"it was done in some partitions and not in {broken} ({failed[broken[0]]}); do it again")
