"""How a turn ends: partitions go out for their commits and land, and answers leave when what they rest on is durable.

Owns: `CommitTracker`: which partitions are out, the requests whose answers wait for them, and the answers themselves.
    _depart   write what was run; partitions that owe a sync go out (`departures`), what rests on no other is answered
    _land     take back those whose commit is over (`landed`), answer what waited for them
    _expire   answer those whose time is over although a partition has not landed
Who syncs, in which thread, is loop.py's business.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.loop import requests
from penstock.loop.item_cache import Items
from penstock.loop.lease import LeaseStep
from penstock.loop.partition_handle import GRACE_AFTER_SLOW, SLOW_AFTER, PartitionHandle, PendingAnswer
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
    """A queue's partitions between two turns, and those who wait for them."""

    def __init__(self, setup: QueueSetup, office: QueueRouter) -> None:
        super().__init__(setup)
        self.answered: list[Request] = []
        """By the last turn."""
        self.transfer_step = TransferStep(self, office)
        self.resize_step = ResizeStep(self, self.transfer_step)
        self.produce_step = ProduceStep(self)
        self.lease_step = LeaseStep(self, self.transfer_step, self.resize_step)
        self.settle_step = SettleStep(self, self.transfer_step)
        self.io_to_dispatch: list[PartitionHandle] = []
        """Partitions that went out and that nobody has seen to yet."""
        self.io_finished: deque[PartitionHandle] = deque()
        """Partitions whose commit or job is over, to be taken back by the next turn. Added to from any thread."""
        self._waits_for_commit: dict[int, PendingAnswer] = {}
        self._recovered: list[PartitionHandle] = []
        self._departing = False
        self._last_landing = 0
        """When a partition came back last."""
        self._next_visit: int | None = 0
        """When something is due in one of the partitions."""

    # -- out, and back -------------------------------------------------------------------------------

    def _depart(self) -> None:
        """Write what was run. Partitions that owe a sync go out; what rests on the others is answered at once."""
        pending = self.uncommitted_answers
        for place, (request, result) in enumerate(pending):
            if type(request) is requests.LeaseRequest:
                pending[place] = (request, self._collect(request, result))
        self._departing = True
        for member in self.touched:
            partition = member.partition
            if partition is None or not member.is_usable:
                continue
            if partition.begin_commit() or member.wants_publish or member.wants_retention or member.wants_close:
                self._leave(member)
            else:
                member.after_commit()
        self._answer_or_wait()

    def _leave(self, member: PartitionHandle) -> None:
        partition = member.usable_partition
        wants_close, member.wants_close = member.wants_close, False
        if wants_close and not member.wants_retention and member.may_close(self.now):  # nobody has used it in this turn either
            self._send_out(member, member.close)
        elif member.wants_publish:
            member.wants_publish = False
            self._send_out(member, partition.sync_and_publish)
        elif member.wants_retention:
            member.wants_retention = False
            self._send_out(member, partition.apply_due_retention)
        else:
            self._send_out(member, None if partition.can_sync else partition.commit)

    def _send_out(self, member: PartitionHandle, job: Callable[[], None] | None) -> None:
        """A member goes out. In this order: wherever an interrupt comes, one that is out is seen off by somebody."""
        self.io_to_dispatch.append(member)
        self.handles_in_io[member.number] = member
        member.start_io(job)
        self.closed.pop(member.number, None)

    def _answer_or_wait(self) -> None:
        """Answer what rests on nothing that is out; the rest is answered when that has landed."""
        while self.uncommitted_answers:
            request, result = self.uncommitted_answers[0]
            rests_on = {number for number in _rests_on(request, result) if number in self.handles_in_io} if self.handles_in_io else None
            if rests_on:
                waiting = PendingAnswer(request, result, rests_on, self._expires(request))
                for number in rests_on:
                    self.handles_in_io[number].pending_answers.append(waiting)
                self._waits_for_commit[id(waiting)] = waiting
            else:
                self._answer(request, result, NONE_FAILED)
            self.uncommitted_answers.popleft()

    def _expires(self, request: Request) -> int:
        """When it is answered although a partition has not landed. What was run is given the time that a sync may take."""
        until = request.deadline if isinstance(request, requests.LeaseRequest) else request.give_up_at
        return max(until, self.now + SLOW_AFTER) if until or isinstance(request, requests.LeaseRequest) else 0

    def _land(self) -> None:
        """Take back the partitions that have landed, and answer what waited for them."""
        failed = False
        while self.io_finished:  # at every step an interrupt may come: what is done is taken off the list behind it
            member = self.io_finished[0]
            self.touch(member)
            if member.in_io:
                member.finish_io(self.now)
            self._last_landing = self.now
            while member.pending_answers:
                waiting = member.pending_answers[0]
                waiting.rests_on.discard(member.number)
                if member.io_error is not None:
                    waiting.failed[member.number] = member.io_error
                if not waiting.rests_on:
                    self._waits_for_commit.pop(id(waiting), None)
                    self._answer(waiting.request, waiting.result, waiting.failed)
                member.pending_answers.popleft()
            self.handles_in_io.pop(member.number, None)
            if member.closed:
                self.closed[member.number] = member
            failed = failed or member.io_error is not None
            if member.recovered:
                self._recovered.append(member)
                self.wants_turn = True
            if member.was_opened and member.is_usable:  # what came due while it was closed is done before anything is leased
                member.next_run = self._next_visit = self.now
            if member.was_opened and self.map.version > 1:
                self.resize_step.note_opened(member)
                self.wants_turn = True
            member.was_opened = False
            self.io_finished.popleft()
        if failed:
            self.resize_step.invalidate()

    def _welcome(self) -> None:
        """Partitions that were failing or slow are in order again: they do as the others do."""
        for member in self._recovered:
            if member.is_usable:
                self.apply_queue_settings(member)
                if member.slow:
                    self._spare_leases(member)
                self.settle_step.give_back_owed(member)
                self.resize_step.restore_fences(member)
        self._recovered.clear()

    def _spare_leases(self, member: PartitionHandle) -> None:
        """None of the leases of a partition that was slow ends for a while: their holders could not settle or extend them."""
        end = member.usable_partition.now().elapsed + GRACE_AFTER_SLOW
        with suppress(PenstockError):  # the commit says what is wrong
            for grant in [*member.state.leases.live.values()]:
                if grant.deadline < end:
                    self.run(member, ExtendLease(grant.number, GRACE_AFTER_SLOW, after_deadline=True))

    def _expire(self) -> None:
        """Answer those whose time is over although a partition has not landed: nobody knows what becomes of that part."""
        for waiting in [*self._waits_for_commit.values()]:
            if waiting.expires and waiting.expires <= self.now and not waiting.request.done:
                del self._waits_for_commit[id(waiting)]
                for number in waiting.rests_on:
                    member = self.handles_in_io[number]
                    member.pending_answers.remove(waiting)
                    waiting.failed[number] = _unknown(member)
                    if isinstance(waiting.request, requests.LeaseRequest):
                        member.undelivered_leases += [granted.lease for one, granted, *_ in waiting.result if one is member]
                self._answer(waiting.request, waiting.result, waiting.failed)

    # -- answers -------------------------------------------------------------------------------------

    def _answer(self, request: Request, result: Any, failed: Mapping[int, PenstockError]) -> None:
        self.answered.append(request)
        if request.done:
            request.notify()  # an interrupt may have come in between
        try:
            if isinstance(request, requests.LeaseRequest):
                self._hand(request, result, failed)
            elif isinstance(request, requests.ProduceRequest):
                if failed:
                    result = [_refused(one, failed[one.partition]) if one.partition in failed else one for one in result]
                request.finish(result)
            elif isinstance(request, requests.SettleRequest):
                if failed:
                    result = [
                        Refused.of(failed[part.partition]) if part.partition in failed else one
                        for part, one in zip(request.parts, result, strict=True)
                    ]
                request.finish(result)
            elif isinstance(request, requests.DeliverRequest):
                member, taken = result
                request.finish(taken, failed.get(member.number))
            elif isinstance(request, requests.FunctionRequest):
                answer, used = result
                wrong = None if request.recorded_elsewhere else _partly(used, failed)
                request.finish(answer if wrong is None else None, wrong)
        except PenstockError as error:
            request.finish(error=error)

    def _collect(self, request: requests.LeaseRequest, parts: list[Any]) -> list[Any]:
        """The bytes of leased items, read before their partitions go out: (member, granted, items, when it ends, elapsed)."""
        found: list[Any] = []
        for member, granted in parts:
            try:
                partition = member.usable_partition
                items = [] if request.without_payloads else partition.items(granted.runs)
            except PenstockError as error:  # nobody gets it now, and asking again at once would not help; the others of the answer are good
                member.read_error = error
                member.undelivered_leases.append(granted.lease)
                continue
            granted = granted if request.without_payloads else _found(granted, items)
            if not granted.runs:  # damage took all of it: the lease has ended, and there may be other items
                request.lost_to_damage = True
                continue
            found.append((member, granted, items, granted.deadline - partition.now().elapsed + self.now))
        return found

    def _hand(self, request: requests.LeaseRequest, parts: list[Any], failed: Mapping[int, PenstockError]) -> None:
        """Give leased items out, with their bytes."""
        handed = [
            LeaseResult(member.number, granted, items, (until - self.now) / SECOND)
            for member, granted, items, until in parts
            if member.number not in failed
        ]
        ended = [one for one in handed if one.seconds <= 0]  # while the answer waited for another partition
        if ended:
            self.settle_step.give_back(ended)
            handed = [one for one in handed if one.seconds > 0]
        if handed:
            request.finish(handed)
            if request.cancelled:
                self.settle_step.give_back(handed)
        elif request.lost_to_damage or request.deadline > self.now:
            request.request = None  # what was remembered under its id was lost with the turn
            self.lease_step.add_waiting(request)
            self.wants_turn = self.wants_turn or request.lost_to_damage
            request.lost_to_damage = False
        else:
            request.finish([])


def _unknown(member: PartitionHandle) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"partition {member.number} has not answered in time ({member.error or 'its disk is busy'}); repeat with the same request id"
    )


def _rests_on(request: Request, result: Any) -> Collection[int]:
    """The partitions whose commit an answer waits for."""
    if isinstance(request, requests.ProduceRequest):
        return [one.partition for one in result if one.stored is not None]
    if isinstance(request, requests.SettleRequest):
        parts = zip(request.parts, result, strict=True)  # one that was slow, and so refused, is not waited for
        return [part.partition for part, one in parts if not (isinstance(one, Refused) and one.code == StorageFailed.code)]
    if isinstance(request, requests.LeaseRequest):
        return [part[0].number for part in result]
    if isinstance(request, requests.DeliverRequest):
        return [result[0].number]
    return result[1] if isinstance(request, requests.FunctionRequest) else ()


def _found(granted: LeaseAnswer, items: Sequence[Items]) -> LeaseAnswer:
    """A lease without the items that damage was found to have taken."""
    if sum(len(part.batch) for part in items) == granted.count:
        return granted
    return LeaseAnswer(
        granted.lease, granted.deadline, [edge for part in items for edge in (part.start, part.start + len(part.batch))], granted.attempts
    )


def _refused(part: StoredPart, error: PenstockError) -> StoredPart:
    return part._replace(stored=None, refused=Refused.of(error))


def _partly(used: set[int], failed: Mapping[int, PenstockError]) -> PenstockError | None:
    """What to tell an operator whose word reached several partitions, of which some failed."""
    hurt = [number for number in used if number in failed]
    if not hurt:
        return None
    if len(hurt) == len(used):
        return failed[hurt[0]]
    return OutcomeUnknown(f"it was done in some partitions and not in {hurt} ({failed[hurt[0]]}); do it again")
