"""How a turn ends: partitions go out for their commits and land, and answers leave when what they rest on is durable.

Owns: `Commits`: which partitions are out, the requests whose answers wait for them, and the answers themselves.
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
        self.carrying = TransferStep(self, office)
        self.resizing = ResizeStep(self, self.carrying)
        self.producing = ProduceStep(self)
        self.leasing = LeaseStep(self, self.carrying, self.resizing)
        self.settling = SettleStep(self, self.carrying)
        self.departures: list[PartitionHandle] = []
        """Partitions that went out and that nobody has seen to yet."""
        self.landed: deque[PartitionHandle] = deque()
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
        pending = self.pending
        for place, (request, result) in enumerate(pending):
            if type(request) is requests.LeaseRequest:
                pending[place] = (request, self._collect(request, result))
        self._departing = True
        for member in self.touched:
            partition = member.partition
            if partition is None or not member.healthy:
                continue
            if partition.prepare() or member.wants_rest or member.wants_retention or member.wants_close:
                self._leave(member)
            else:
                member.note_rest()
        self._answer_or_wait()

    def _leave(self, member: PartitionHandle) -> None:
        partition = member.open
        wants_close, member.wants_close = member.wants_close, False
        if wants_close and not member.wants_retention and member.may_close(self.now):  # nobody has used it in this turn either
            self._send_out(member, member.close)
        elif member.wants_rest:
            member.wants_rest = False
            self._send_out(member, partition.rest)
        elif member.wants_retention:
            member.wants_retention = False
            self._send_out(member, partition.upkeep)
        else:
            self._send_out(member, None if partition.is_writable else partition.commit)

    def _send_out(self, member: PartitionHandle, job: Callable[[], None] | None) -> None:
        """A member goes out. In this order: wherever an interrupt comes, one that is out is seen off by somebody."""
        self.departures.append(member)
        self.outs[member.number] = member
        member.leave(job)
        self.closed.pop(member.number, None)

    def _answer_or_wait(self) -> None:
        """Answer what rests on nothing that is out; the rest is answered when that has landed."""
        while self.pending:
            request, result = self.pending[0]
            rests_on = {number for number in _rests_on(request, result) if number in self.outs} if self.outs else None
            if rests_on:
                waiting = PendingAnswer(request, result, rests_on, self._expires(request))
                for number in rests_on:
                    self.outs[number].unanswered.append(waiting)
                self._waits_for_commit[id(waiting)] = waiting
            else:
                self._answer(request, result, NONE_FAILED)
            self.pending.popleft()

    def _expires(self, request: Request) -> int:
        """When it is answered although a partition has not landed. What was run is given the time that a sync may take."""
        until = request.deadline if isinstance(request, requests.LeaseRequest) else request.give_up_at
        return max(until, self.now + SLOW_AFTER) if until or isinstance(request, requests.LeaseRequest) else 0

    def _land(self) -> None:
        """Take back the partitions that have landed, and answer what waited for them."""
        failed = False
        while self.landed:  # at every step an interrupt may come: what is done is taken off the list behind it
            member = self.landed[0]
            self.touch(member)
            if member.out:
                member.land(self.now)
            self._last_landing = self.now
            while member.unanswered:
                waiting = member.unanswered[0]
                waiting.rests_on.discard(member.number)
                if member.outcome is not None:
                    waiting.failed[member.number] = member.outcome
                if not waiting.rests_on:
                    self._waits_for_commit.pop(id(waiting), None)
                    self._answer(waiting.request, waiting.result, waiting.failed)
                member.unanswered.popleft()
            self.outs.pop(member.number, None)
            if member.closed:
                self.closed[member.number] = member
            failed = failed or member.outcome is not None
            if member.recovered:
                self._recovered.append(member)
                self.again = True
            if member.was_opened and member.healthy:  # what came due while it was closed is done before anything is leased
                member.next_run = self._next_visit = self.now
            if member.was_opened and self.map.version > 1:
                self.resizing.note_opened(member)
                self.again = True
            member.was_opened = False
            self.landed.popleft()
        if failed:
            self.resizing.start_over()

    def _welcome(self) -> None:
        """Partitions that were failing or slow are in order again: they do as the others do."""
        for member in self._recovered:
            if member.healthy:
                self.catch_up(member)
                if member.slow:
                    self._spare_leases(member)
                self.settling.give_back_owed(member)
                self.resizing.check(member)
        self._recovered.clear()

    def _spare_leases(self, member: PartitionHandle) -> None:
        """None of the leases of a partition that was slow ends for a while: their holders could not settle or extend them."""
        end = member.open.now().elapsed + GRACE_AFTER_SLOW
        with suppress(PenstockError):  # the commit says what is wrong
            for grant in [*member.state.leases.live.values()]:
                if grant.deadline < end:
                    self.run(member, ExtendLease(grant.number, GRACE_AFTER_SLOW, late=True))

    def _expire(self) -> None:
        """Answer those whose time is over although a partition has not landed: nobody knows what becomes of that part."""
        for waiting in [*self._waits_for_commit.values()]:
            if waiting.expires and waiting.expires <= self.now and not waiting.request.done:
                del self._waits_for_commit[id(waiting)]
                for number in waiting.rests_on:
                    member = self.outs[number]
                    member.unanswered.remove(waiting)
                    waiting.failed[number] = _unknown(member)
                    if isinstance(waiting.request, requests.LeaseRequest):
                        member.owed += [granted.lease for one, granted, *_ in waiting.result if one is member]
                self._answer(waiting.request, waiting.result, waiting.failed)

    # -- answers -------------------------------------------------------------------------------------

    def _answer(self, request: Request, result: Any, failed: Mapping[int, PenstockError]) -> None:
        self.answered.append(request)
        if request.done:
            request.tell()  # an interrupt may have come in between
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
                wrong = None if request.firm else _partly(used, failed)
                request.finish(answer if wrong is None else None, wrong)
        except PenstockError as error:
            request.finish(error=error)

    def _collect(self, request: requests.LeaseRequest, parts: list[Any]) -> list[Any]:
        """The bytes of leased items, read before their partitions go out: (member, granted, items, when it ends, elapsed)."""
        found: list[Any] = []
        for member, granted in parts:
            try:
                partition = member.open
                items = [] if request.bare else partition.items(granted.runs)
            except PenstockError as error:  # nobody gets it now, and asking again at once would not help; the others of the answer are good
                member.unreadable = error
                member.owed.append(granted.lease)
                continue
            granted = granted if request.bare else _found(granted, items)
            if not granted.runs:  # damage took all of it: the lease has ended, and there may be other items
                request.lost = True
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
            self.settling.give_back(ended)
            handed = [one for one in handed if one.seconds > 0]
        if handed:
            request.finish(handed)
            if request.gone:
                self.settling.give_back(handed)
        elif request.lost or request.deadline > self.now:
            request.request = None  # what was remembered under its id was lost with the turn
            self.leasing.put_back(request)
            self.again = self.again or request.lost
            request.lost = False
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
