"""The step of a turn that completes, retries, buries and extends leased items.

Owns: `SettleStep`. Each part of a request goes to the partition of its lease and has its own result: a refused part
does not stop the others.
"""

from collections.abc import Sequence
from contextlib import suppress

from penstock.loop import requests
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.requests import LeaseResult, SettlePart
from penstock.loop.transfer import TransferStep
from penstock.rules import commands
from penstock.rules.calls import settle_part
from penstock.rules.commands import Settled
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, QueueNotFound, Refused


class SettleStep:
    """Settles items of a queue's leases."""

    def __init__(self, partitions: PartitionSet, transfer_step: TransferStep) -> None:
        self._partitions = partitions
        self._transfer_step = transfer_step

    def run(self, request: requests.SettleRequest) -> None:
        if request.then and len(request.parts) > 1:  # each part is recorded by itself, with all follow-ups
            raise InvalidRequest("follow-ups can be made only with items of one lease; complete the items of each lease by themselves")
        try:
            follow_ups = self._transfer_step.follow_ups(request.then) if request.then else []
        except QueueNotFound as error:
            raise InvalidRequest(f"the queue of a follow-up does not exist ({error}); nothing was completed") from error
        self._partitions.answer(request, [self._settle(request, part, follow_ups) for part in request.parts])

    def _settle(self, request: requests.SettleRequest, part: SettlePart, follow_ups: list[commands.FollowUpBatch]) -> Settled | Refused:
        handle = self._partitions.handles.get(part.partition)
        if handle is None:
            return Refused.of(LeaseLost(f"there is no partition {part.partition} in queue {self._partitions.name!r}; drop the work"))
        if request.undelivered and part.lease in handle.leases_found_again:
            return Settled(0)
        try:
            if request.first_sent is not None:
                self._partitions.remembered(handle, request)  # raises when it is not known
            answer = self._partitions.run(handle, _command(request, part, follow_ups))
        except PenstockError as error:
            return Refused.of(error)
        assert isinstance(answer, Settled)
        return answer

    def return_undelivered(self, handle: PartitionHandle) -> None:
        """Return the items of leases that a failing partition granted and that never reached their callers."""
        leases, handle.undelivered_leases = handle.undelivered_leases, []
        for lease in leases:
            if lease in handle.leases_found_again:
                continue
            with suppress(PenstockError):  # the lease has ended
                self._partitions.run(handle, commands.RetryLeased(lease, counted=False))

    def return_items(self, results: Sequence[LeaseResult]) -> None:
        """Return items whose caller left before the answer; the next turn does it and counts no attempt.

        Unless a repetition was given the same lease meanwhile.
        """
        for one in results:
            request = requests.SettleRequest("retry", [SettlePart(one.partition, one.granted.lease)], counted=False)
            request.undelivered = True
            self._partitions.post(request)
            self._partitions.wants_turn = True


def _command(request: requests.SettleRequest, part: SettlePart, follow_ups: list[commands.FollowUpBatch]) -> commands.Command:
    calls = request.calls
    number = settle_part(part.lease, part.offsets) if calls else 0
    if request.action == "complete":
        return commands.CompleteLeased(part.lease, part.offsets, calls, follow_ups, number)
    if request.action == "retry":
        return commands.RetryLeased(part.lease, part.offsets, request.delay, request.reason, request.counted, calls, number)
    if request.action == "bury":
        return commands.BuryLeased(part.lease, part.offsets, request.reason, calls, request.alone, number)
    return commands.ExtendLease(part.lease, request.timeout, calls, part=number)
