"""Leases and batches of leases, with the calls that settle them.

Owns: `AsyncLease`, `AsyncLeaseBatch`, and `settle`, which sends every settle request.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from penstock.api.arguments import RequestId, Seconds, bounded_duration, check_flag, follow_ups, lease_duration, request_bytes
from penstock.api.homes import AsyncHome
from penstock.api.items import NewItem
from penstock.api.leases import OPEN, LeaseBase, LeaseBatchBase, LeaseSelection, PartitionLease, Reason, reason_text
from penstock.api.traces import active_tracer
from penstock.loop.item_cache import LeasedItems
from penstock.loop.requests import SettleAction
from penstock.operations import FindQueue, SettleItems
from penstock.words.batch import Batch
from penstock.words.errors import PenstockError, QueueNotFound, reason_of
from penstock.words.values import Value


async def settle(home: AsyncHome, selection: LeaseSelection, **options: Any) -> None:
    """Settle the selected items. Raises if some were refused; the others are settled then."""
    parts = selection.parts
    if not parts:
        selection.apply_answers([])
        return
    operation = SettleItems(queue=selection.incarnation, action=selection.action, parts=parts, **options)
    tracer = active_tracer() if selection.action != "extend" else None
    if tracer is None:
        await _send(home, selection, operation)
        return
    with tracer.settle(selection.queue, selection.action, selection.traced_items()):
        await _send(home, selection, operation)


async def _send(home: AsyncHome, selection: LeaseSelection, operation: SettleItems) -> None:
    try:
        answers = await home.call(operation)
    except QueueNotFound:
        selection.mark_all_lost()
        return
    if selection.action == "extend":
        selection.remember_extensions(home.clock.read().wall, operation.timeout, answers)
    selection.apply_answers(answers)


async def complete(
    home: AsyncHome,
    selection: LeaseSelection,
    then: Sequence[tuple[int, Batch]] = (),
    request_id: RequestId | None = None,
) -> None:
    await settle(home, selection, then=then, request=request_bytes(request_id))


async def retry(
    home: AsyncHome,
    selection: LeaseSelection,
    delay: Seconds,
    reason: Reason,
    counted: bool = True,
    request_id: RequestId | None = None,
) -> None:
    options = {"delay": bounded_duration(delay, "delay"), "reason": reason_text(reason), "counted": check_flag("counted", counted)}
    await settle(home, selection, request=request_bytes(request_id), **options)


async def bury(home: AsyncHome, selection: LeaseSelection, reason: Reason, request_id: RequestId | None = None) -> None:
    await settle(home, selection, reason=reason_text(reason), request=request_bytes(request_id))


async def extend(home: AsyncHome, selection: LeaseSelection, timeout: Seconds | None, request_id: RequestId | None = None) -> None:
    await settle(home, selection, timeout=lease_duration(timeout, "timeout"), request=request_bytes(request_id))


class AsyncLease(LeaseBase):
    """The exclusive right to work on one item until a deadline. `queue.lease` returns them.

        async with lease:
            handle(lease.item)

    Settle the item with `complete`, `retry` or `bury`, or use a `with` block: it completes the item at its end, or
    retries it if an exception leaves the block. If the deadline passes first, the lease ends: the
    item returns to the queue for other consumers, the attempt counts, and every method here raises `LeaseLost`.
    """

    __slots__ = ()
    _home: AsyncHome

    async def complete(self, then: Sequence[NewItem | Value] = ()) -> None:
        """Mark the item as done. Completing it a second time succeeds; `LeaseLost` if the lease has ended.

        then: follow-ups: items that are produced, exactly once, if and only if this item is completed. Each goes to
            the queue that it names, as in `NewItem(b"…", queue="mails")`, or else to the queue of this item. For an
            item that was completed before they are not produced: that raises `InvalidRequest`.
        """
        await complete(self._home, self._select("complete"), await self._follow_ups(then) if then else ())

    async def retry(self, delay: Seconds = 0, reason: Reason = "", counted: bool = True) -> None:
        """Return the item to the queue; it can be leased again after `delay`.

        An item with a key keeps its position in the order of its key, and the key waits during the delay. An item
        without a key goes behind the items that are ready. If this was the last of its `max_attempts`, it is buried.

        delay: seconds or a timedelta.
        reason: why it failed: a text or an exception. Shown by `items`, `explain` and `history`.
        counted: False does not count this attempt.
        """
        await retry(self._home, self._select("retry"), delay, reason, counted)

    async def bury(self, reason: Reason = "") -> None:
        """Set the item aside as failed; it is not leased again.

        It moves to the queue's dead queue, if the queue has one. Otherwise it stays in this queue, in state "buried",
        until it is redriven or cleared, or retention drops it.

        reason: why: a text or an exception.
        """
        await bury(self._home, self._select("bury"), reason)

    async def extend(self, timeout: Seconds | None = None) -> None:
        """Move the deadline to `timeout` from now. None is the duration for which the item was leased.

        Items that one call leased from one partition share a deadline, so it moves for all of them.
        """
        await extend(self._home, self._select("extend"), timeout)

    def _select(self, action: SettleAction) -> LeaseSelection:
        held = self._partition_lease
        return LeaseSelection(held.incarnation, action, held.queue).add(self)

    async def _follow_ups(self, then: Sequence[NewItem | Value]) -> list[tuple[int, Batch]]:
        found = []
        tracer = active_tracer()
        for name, batch in follow_ups(then).items():
            if tracer is not None:
                batch = tracer.follow_up_batch(batch, self.item)
            incarnation = self._partition_lease.incarnation
            if name is not None:
                incarnation = (await self._home.call(FindQueue(name=name))).incarnation
            found.append((incarnation, batch))
        return found

    async def __aenter__(self) -> "AsyncLease":
        self._begin_handling()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._end_handling(error):
            if self.state != OPEN:
                return
            if error is None:
                await self.complete()
            else:
                with suppress(PenstockError):  # the error of the block is raised, not that of the retry
                    await self.retry(reason=reason_of(error))


class AsyncLeaseBatch(LeaseBatchBase[AsyncLease]):
    """The leases that one call of `queue.lease` returned: a sequence, empty if no item was ready in time.

        async with await queue.lease(100, wait=5) as batch:
            for item in batch.items:
                handle(item)

    `complete`, `retry`, `bury` and `extend` apply to all leases of the batch that are not settled yet, in one request.
    If some of them have ended, the others are settled and `LeaseLost` is raised; its `.lost` has the ids of the items
    whose leases have ended.
    A `with` block completes the unsettled items at its end, or retries them if an exception leaves the block.
    """

    _home: AsyncHome

    async def complete(self) -> None:
        """Mark all unsettled items as done."""
        await complete(self._home, self._select("complete"))

    async def retry(self, delay: Seconds = 0, reason: Reason = "") -> None:
        """Return all unsettled items to the queue; they can be leased again after `delay`. See `AsyncLease.retry`."""
        await retry(self._home, self._select("retry"), delay, reason)

    async def bury(self, reason: Reason = "") -> None:
        """Set all unsettled items aside as failed. See `AsyncLease.bury`."""
        await bury(self._home, self._select("bury"), reason)

    async def extend(self, timeout: Seconds | None = None) -> None:
        """Move the deadline of all unsettled leases to `timeout` from now. None is the duration first given."""
        await extend(self._home, self._select("extend"), timeout)

    def _select(self, action: SettleAction) -> LeaseSelection:
        leases = self._partition_leases
        return LeaseSelection(leases[0].incarnation if leases else 0, action, leases[0].queue if leases else "").add_open(leases)

    @staticmethod
    def _lease(home: Any, partition_lease: PartitionLease, items: LeasedItems, index: int, offset: int) -> AsyncLease:
        return AsyncLease(home, partition_lease, items, index, offset)

    async def __aenter__(self) -> "AsyncLeaseBatch":
        self._begin_handling()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._end_handling(error):
            if error is None:
                await self.complete()
            else:
                with suppress(PenstockError):  # the error of the block is raised, not that of the retry
                    await self.retry(reason=reason_of(error))
