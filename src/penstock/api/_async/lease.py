"""Leases that can be settled.

Owns: `AsyncLease`, `AsyncLeaseBatch`, and `settle`, through which every settling goes.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from penstock.api.arguments import RequestId, Seconds, bounded_duration, check_flag, follow_ups, lease_duration, request_bytes
from penstock.api.homes import AsyncHome
from penstock.api.items import NewItem
from penstock.api.leases import OPEN, LeaseBase, LeaseBatchBase, LeaseSelection, PartitionLease, Reason, reason_text
from penstock.loop.item_cache import Items
from penstock.operations import FindQueue, SettleItems
from penstock.words.batch import Batch
from penstock.words.errors import PenstockError, QueueNotFound, reason_of
from penstock.words.values import Value


async def settle(home: AsyncHome, chosen: LeaseSelection, **options: Any) -> None:
    """Settle what was chosen; raises when some of it was refused, after the rest is done."""
    parts = chosen.parts
    if not parts:
        chosen.apply_answers([])
        return
    operation = SettleItems(queue=chosen.incarnation, action=chosen.verb, parts=parts, **options)
    try:
        answer = await home.call(operation)
    except QueueNotFound:
        chosen.mark_all_lost()
        return
    if chosen.verb == "extend":
        chosen.extended(home.clock.read().wall, operation.timeout, answer)
    chosen.apply_answers(answer)


async def complete(
    home: AsyncHome,
    chosen: LeaseSelection,
    then: Sequence[tuple[int, Batch]] = (),
    request_id: RequestId | None = None,
) -> None:
    await settle(home, chosen, then=then, request=request_bytes(request_id))


async def retry(
    home: AsyncHome,
    chosen: LeaseSelection,
    delay: Seconds,
    reason: Reason,
    counted: bool = True,
    request_id: RequestId | None = None,
) -> None:
    options = {"delay": bounded_duration(delay, "delay"), "reason": reason_text(reason), "counted": check_flag("counted", counted)}
    await settle(home, chosen, request=request_bytes(request_id), **options)


async def bury(home: AsyncHome, chosen: LeaseSelection, reason: Reason, request_id: RequestId | None = None) -> None:
    await settle(home, chosen, reason=reason_text(reason), request=request_bytes(request_id))


async def extend(home: AsyncHome, chosen: LeaseSelection, timeout: Seconds | None, request_id: RequestId | None = None) -> None:
    await settle(home, chosen, timeout=lease_duration(timeout, "timeout"), request=request_bytes(request_id))


class AsyncLease(LeaseBase):
    """One item, and the right to work on it until the deadline.

    Settle it with `complete`, `retry` or `bury`, or let a `with` block do so: it completes the item at its end, and retries it when
    an exception leaves the block.

        async with lease:
            handle(lease.item)
    """

    __slots__ = ()
    _home: AsyncHome

    async def complete(self, then: Sequence[NewItem | Value] = ()) -> None:
        """The item is done. Completing it again succeeds; when the lease was lost meanwhile, `LeaseLost` is raised.

        then: items to produce exactly if the item is completed, each into the queue it names (`NewItem(…, queue="mails")`), or else
        into the same queue.
        """
        await complete(self._home, self._chosen("complete"), await self._follow_ups(then) if then else ())

    async def retry(self, delay: Seconds = 0, reason: Reason = "", counted: bool = True) -> None:
        """The item goes back, to be leased again after `delay`; when its attempts are spent it is given up.

        counted: False gives the attempt back, as if the item had not been leased.
        """
        await retry(self._home, self._chosen("retry"), delay, reason, counted)

    async def bury(self, reason: Reason = "") -> None:
        """The item is given up: it goes to the dead queue if there is one, else it is kept here until it is redriven or cleared."""
        await bury(self._home, self._chosen("bury"), reason)

    async def extend(self, timeout: Seconds | None = None) -> None:
        """The lease ends so long from now; None is as long as it was first given for.

        Items that one call leased from one partition share a deadline, so this moves theirs too.
        """
        await extend(self._home, self._chosen("extend"), timeout)

    def _chosen(self, verb: Any) -> LeaseSelection:
        return LeaseSelection(self._partition_lease.incarnation, verb).add(self)

    async def _follow_ups(self, then: Sequence[NewItem | Value]) -> list[tuple[int, Batch]]:
        found = []
        for name, batch in follow_ups(then).items():
            incarnation = self._partition_lease.incarnation
            if name is not None:
                incarnation = (await self._home.call(FindQueue(name=name))).incarnation
            found.append((incarnation, batch))
        return found

    async def __aenter__(self) -> "AsyncLease":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.state != OPEN:
            return
        if error is None:
            await self.complete()
        else:
            with suppress(PenstockError):  # what went wrong first is what matters
                await self.retry(reason=reason_of(error))


class AsyncLeaseBatch(LeaseBatchBase[AsyncLease]):
    """What one call leased: a sequence of leases, empty when there was nothing.

    Its verbs settle what is still open, all at once; `LeaseLost` names in `.lost` the ids that were refused, the others are done.
    A `with` block completes what is still open at its end, and retries it when an exception leaves the block.

        async with await queue.lease(100, wait=5) as batch:
            for item in batch.items:
                handle(item)
    """

    _home: AsyncHome

    async def complete(self) -> None:
        """All items that are still open are done."""
        await complete(self._home, self._chosen("complete"))

    async def retry(self, delay: Seconds = 0, reason: Reason = "") -> None:
        """All items that are still open go back, to be leased again after `delay`."""
        await retry(self._home, self._chosen("retry"), delay, reason)

    async def bury(self, reason: Reason = "") -> None:
        """All items that are still open are given up."""
        await bury(self._home, self._chosen("bury"), reason)

    async def extend(self, timeout: Seconds | None = None) -> None:
        """All leases that are still open end so long from now; None is as long as they were first given for."""
        await extend(self._home, self._chosen("extend"), timeout)

    def _chosen(self, verb: Any) -> LeaseSelection:
        return LeaseSelection(self._grants[0].incarnation if self._grants else 0, verb).add_open(self._grants)

    @staticmethod
    def _lease(home: Any, grant: PartitionLease, items: Items, index: int) -> AsyncLease:
        return AsyncLease(home, grant, items, index)

    async def __aenter__(self) -> "AsyncLeaseBatch":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.complete()
        else:
            with suppress(PenstockError):  # what went wrong first is what matters
                await self.retry(reason=reason_of(error))
