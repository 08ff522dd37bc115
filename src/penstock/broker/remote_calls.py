"""Calls to a broker in another process, which may have to be sent several times.

Owns: `RemoteCall`, `Sessions` and `LeaseExtensions`, which the homes share that send operations elsewhere
(broker/remote.py, broker/http_client.py). Each operation that changes something is a call of a session, so it can be
sent again when a connection is lost, without being done twice: a session has one call at a time, and the logs remember
its newest call (rules/). Concurrent calls use several sessions. A session whose call ended without a known outcome is
not used again.
An *outcome* is an answer, or a PenstockError.
"""

import os
from typing import Any

import msgspec

from penstock.loop.requests import LeaseResult, SettlePart
from penstock.operations import (
    TIMEOUT,
    AwaitItems,
    ClearItems,
    CompactQueue,
    DeleteQueue,
    EnsureQueue,
    LeaseDoubt,
    LeaseItems,
    Operation,
    Query,
    ReadHistory,
    RedriveItems,
    ReleaseCursor,
    ResizeQueue,
    SeekItems,
    SettleItems,
)
from penstock.rules.commands import Call
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import AccessDenied, OutcomeUnknown, PenstockError, QueueBusy, Refused, StorageFailed, Unauthenticated

GRACE = 5 * SECOND
"""The owner answers a waiting lease at its deadline; its caller waits so much longer for that."""
SHORT_GRACE = SECOND
"""The same for other operations: at its deadline the owner says why it was not done (`QueueFull`, say)."""
PROMPT = 100 * MILLISECOND
"""A call that is sent within this time has its whole wait."""
REPEAT_SECONDS = 0.05
"""How long to wait before a repetition that the owner could not run yet is sent again."""
LONG = 10 * TIMEOUT
"""How long an operation may take that goes through a whole queue or its files."""
LONG_OPERATIONS = (ClearItems, CompactQueue, DeleteQueue, EnsureQueue, ReadHistory, RedriveItems, ReleaseCursor, ResizeQueue, SeekItems)
WAITING_OPERATIONS = (LeaseItems, AwaitItems)
"""Operations that wait for items."""
NOT_LOOKED_AT = (QueueBusy, AccessDenied, Unauthenticated, StorageFailed)
"""Errors of operations that were not given to their queue. (StorageFailed: the server cannot read its keys. The broker
itself answers a repetition that it cannot run with OutcomeUnknown.)"""
SESSION_BYTES = 16
NEVER = 1 << 62
EXTEND_AGAIN = 100 * MILLISECOND
"""When a failed extension of a lease is tried again."""


class RemoteCall:
    """One operation on its way, perhaps sent several times."""

    __slots__ = ("began", "call", "deadline", "is_passed_on", "operation", "sendings")

    def __init__(self, operation: Operation[Any], call: Call | None, now: int) -> None:
        self.operation = operation
        self.call = call
        self.is_passed_on = operation.call is not None
        """Whether it is a call of another client's session."""
        self.began = now
        wait: int = LONG if isinstance(operation, LONG_OPERATIONS) else getattr(operation, "wait", TIMEOUT)
        self.deadline = now + wait + (GRACE if isinstance(operation, WAITING_OPERATIONS) else SHORT_GRACE)
        self.sendings = 0
        """How often it was sent; the sender counts."""

    def prepared(self, now: int) -> Operation[Any]:
        """The operation to send: marked as a repetition if it was sent before, and with the rest of its wait."""
        changes: dict[str, Any] = {"call": self.call}
        if not self.sendings and now - self.began < PROMPT:
            return msgspec.structs.replace(self.operation, **changes)
        if self.call is not None and self.sendings:
            changes["call"] = Call(self.call.session, self.call.number, True, self.call.age + now - self.began)
        if hasattr(self.operation, "wait"):
            changes["wait"] = max(0, self.began + self.operation.wait - now)
        return msgspec.structs.replace(self.operation, **changes)

    def judged(self, outcome: Any) -> Any:
        """What an outcome means for the call. A repetition that was not even looked at (too many calls wait, the key
        was revoked meanwhile) says nothing about what became of the first sending.
        """
        if self.call is None or self.sendings < 2 or not isinstance(outcome, NOT_LOOKED_AT):
            return outcome
        return OutcomeUnknown(f"it is not known what became of this call: its repetition was refused ({outcome})")

    def may_be_repeated(self, outcome: Any, now: int) -> bool:
        """Whether the owner could not tell what became of a repetition, for now: it opens or waits for a partition."""
        return self.sendings > 1 and now < self.deadline and is_unknown(outcome)

    def no_answer_error(self, who: str, now: int) -> PenstockError:
        """The error at the deadline. who: the one that did not answer."""
        what = f"{who} has not answered for {(now - self.began) / SECOND:.1f} s"
        if self.call is None or not self.sendings:
            return QueueBusy(f"{what}; nothing was done, try again in a moment")
        return OutcomeUnknown(f"{what}; repeat with the same request id, or look what became of it")


class Sessions:
    """The sessions of a client. Threads may share it."""

    def __init__(self) -> None:
        self._free: list[Call] = []
        """The last call of each session that no call uses now."""

    def take(self, operation: Operation[Any]) -> Call | None:
        """The next call of a session that is free, or the first of a new one; None for a query.

        A server passes on the operations of its clients: these are calls of the client's sessions already.
        """
        if isinstance(operation, Query) or operation.call is not None:
            return operation.call
        try:
            last = self._free.pop()
        except IndexError:
            return Call(os.urandom(SESSION_BYTES), 1)
        return Call(last.session, last.number + 1)

    def give_back(self, remote: RemoteCall, outcome: Any) -> None:
        """The call has ended."""
        if remote.call is not None and not remote.is_passed_on and not is_unknown(outcome):
            self._free.append(remote.call)


def is_unknown(outcome: Any) -> bool:
    """Whether a call, or a part of it, ended without a known outcome."""
    if isinstance(outcome, PenstockError):
        return isinstance(outcome, OutcomeUnknown)
    parts = outcome if isinstance(outcome, list) else ()
    refusals = (part if isinstance(part, Refused) else getattr(part, "refused", None) for part in parts)
    return any(isinstance(one, Refused) and one.code == OutcomeUnknown.code for one in refusals)


def items_to_return(queue: int, leased: list[LeaseResult]) -> SettleItems:
    """The operation that returns items which were leased for a call that nobody waits for any more."""
    parts = [SettlePart(one.partition, one.granted.lease) for one in leased]
    return SettleItems(queue=queue, action="retry", parts=parts, counted=False)


class ExtendedLease:
    """A lease that a client extends."""

    __slots__ = ("asked_at", "doubt", "next_at", "safe_until", "seconds")

    def __init__(self, seconds: float, now: int, doubt: LeaseDoubt | None) -> None:
        self.seconds = seconds
        self.doubt = doubt
        self.safe_until = NEVER if doubt is None else doubt.safe_until
        """Before then no other consumer can have its items. NEVER: nobody is to be told, or was told already."""
        self.asked_at = 0
        """When the extension that is under way was asked for."""
        self.next_at = now + int(seconds * SECOND / 3)
        """When to extend it next; NEVER while that is under way."""

    def extended(self, now: int) -> None:
        self.next_at = now + int(self.seconds * SECOND / 3)
        if self.doubt is not None:
            self.safe_until = self.asked_at + int(self.seconds * SECOND)

    def tell(self) -> None:
        """Tell the holder that the lease has ended or may have, unless that was told since the last extension."""
        if self.doubt is not None and self.safe_until != NEVER:
            self.safe_until = NEVER
            self.doubt.tell()


class LeaseExtensions:
    """The leases that a client extends until it is told to stop, each at a third of its time. Threads may share it."""

    def __init__(self) -> None:
        self._extended: dict[tuple[int, int, int], ExtendedLease] = {}
        """By queue, partition and lease."""

    def __bool__(self) -> bool:
        return bool(self._extended)

    def add(self, lease: tuple[int, int, int], seconds: float, now: int, doubt: LeaseDoubt | None = None) -> None:
        self._extended[lease] = ExtendedLease(seconds, now, doubt)

    def remove(self, lease: tuple[int, int, int]) -> None:
        self._extended.pop(lease, None)

    def next_time(self) -> int | None:
        """When a lease is to be extended, or its end is to be told, next; None when there is nothing to do."""
        when = min((min(one.next_at, one.safe_until) for one in [*self._extended.values()]), default=NEVER)
        return None if when == NEVER else when

    def due(self, now: int) -> list[tuple[SettleItems, list[tuple[int, int, int]]]]:
        """For each queue, the operation that extends the leases which are due, and these. `answered` must follow."""
        self.report_doubts(now)
        leases = []
        for lease, known in [*self._extended.items()]:
            if known.next_at <= now:
                leases.append(lease)
                known.next_at, known.asked_at = NEVER, now
        found = []
        for queue in {lease[0] for lease in leases}:
            chosen = [lease for lease in leases if lease[0] == queue]
            parts = [SettlePart(partition, lease) for _, partition, lease in chosen]
            found.append((SettleItems(queue=queue, action="extend", parts=parts), chosen))
        return found

    def report_doubts(self, now: int) -> None:
        """Tell the holders of leases that were not extended in time."""
        for known in [*self._extended.values()]:
            if known.safe_until <= now:
                known.tell()

    def answered(self, leases: list[tuple[int, int, int]], outcome: Any, now: int) -> None:
        """Take the outcome of an extension of these leases."""
        for index, lease in enumerate(leases):
            known = self._extended.get(lease)
            if known is None:
                continue
            if isinstance(outcome, PenstockError) or (isinstance(outcome[index], Refused) and outcome[index].error().retryable):
                known.next_at = now + EXTEND_AGAIN
            elif isinstance(outcome[index], Refused):
                self._extended.pop(lease, None)
                known.tell()
            else:
                known.extended(now)
