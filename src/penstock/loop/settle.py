"""Complete, retry, bury and extend, for a whole queue: each part goes to the partition whose lease it presents.

Owns: `SettleStep`. Every part has its own result: good ones are done even when others are refused.
"""

from collections.abc import Sequence
from contextlib import suppress

from penstock.loop import requests
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.requests import LeaseResult, SettlePart
from penstock.loop.transfer import TransferStep
from penstock.rules import commands
from penstock.rules.commands import Settled
from penstock.rules.routing import digest
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueNotFound, Refused


class SettleStep:
    """The settling of a queue's leases."""

    def __init__(self, partitions: PartitionSet, carrying: TransferStep) -> None:
        self._partitions = partitions
        self._carrying = carrying

    def run(self, request: requests.SettleRequest) -> None:
        try:
            letters = self._carrying.follow_ups(request.then) if request.then else []
        except QueueNotFound as error:
            raise InvalidRequest(f"the queue of a follow-up is gone ({error}); nothing was completed") from error
        self._partitions.answer(request, [self._settle(request, part, letters) for part in request.parts])

    def _settle(self, request: requests.SettleRequest, part: SettlePart, letters: list[commands.FollowUpBatch]) -> Settled | Refused:
        member = self._partitions.handles.get(part.partition)
        if member is None:
            return Refused.of(LeaseLost(f"there is no partition {part.partition} in queue {self._partitions.name!r}; drop the work"))
        try:
            answer = self._partitions.run(member, _command(request, part, letters))
        except PenstockError as error:
            return Refused.of(error)
        assert isinstance(answer, Settled)
        return answer

    def give_back_owed(self, member: PartitionHandle) -> None:
        """Leases that a failing partition gave and nobody got."""
        owed, member.undelivered_leases = member.undelivered_leases, []
        for lease in owed:
            with suppress(PenstockError):  # it has ended meanwhile
                self._partitions.run(member, commands.RetryLeased(lease, counted=False))

    def give_back(self, handed: Sequence[LeaseResult]) -> None:
        """Nobody took these items: they go back in the next turn as if they had not been leased."""
        for one in handed:
            self._partitions.post(requests.SettleRequest("retry", [SettlePart(one.partition, one.granted.lease)], counted=False))
            self._partitions.wants_turn = True


def _command(request: requests.SettleRequest, part: SettlePart, letters: list[commands.FollowUpBatch]) -> commands.Command:
    name = None
    if request.request is not None:  # one id may settle several leases
        name = digest(request.action.encode(), request.request, part.lease.to_bytes(8, "big"))
    if request.action == "complete":
        return commands.CompleteLeased(part.lease, part.offsets, name, letters)
    if request.action == "retry":
        return commands.RetryLeased(part.lease, part.offsets, request.delay, request.reason, request.counted, name)
    if request.action == "bury":
        return commands.BuryLeased(part.lease, part.offsets, request.reason, name, request.alone)
    return commands.ExtendLease(part.lease, request.timeout, name)
