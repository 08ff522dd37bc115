"""Leases that can be settled.

Owns: `AsyncLease`, `AsyncLeaseBatch`, and `settle`, through which every settling goes.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from penstock.api.arguments import TIMEOUT, RequestId, Seconds, flag, follow_ups, lease_span, request_bytes, span
from penstock.api.held import OPEN, Chosen, Grant, HeldBatch, HeldLease, Reason, reason_text
from penstock.api.items import NewItem
from penstock.api.ports import AsyncPort
from penstock.loop.blocks import Items
from penstock.loop.requests import Settle
from penstock.words.batch import Batch
from penstock.words.errors import PenstockError, QueueNotFound, reason_of
from penstock.words.values import Value


async def settle(port: AsyncPort, chosen: Chosen, **options: Any) -> None:
    """Settle what was chosen; raises when some of it was refused, after the rest is done."""
    parts = chosen.parts
    if not parts:
        chosen.judge([])
        return
    request = Settle(chosen.verb, parts, deadline=port.now() + TIMEOUT, **options)
    try:
        answer = await port.call(chosen.incarnation, request)
    except QueueNotFound:
        chosen.lose_all()
        return
    if chosen.verb == "extend":
        chosen.extended(port.wall(), request.timeout, answer)
    chosen.judge(answer)


async def complete(port: AsyncPort, chosen: Chosen, then: Sequence[tuple[int, Batch]] = (), request_id: RequestId | None = None) -> None:
    await settle(port, chosen, then=then, request=request_bytes(request_id))


async def retry(
    port: AsyncPort,
    chosen: Chosen,
    delay: Seconds,
    reason: Reason,
    counted: bool = True,
    request_id: RequestId | None = None,
) -> None:
    options = {"delay": span(delay, "delay"), "reason": reason_text(reason), "counted": flag("counted", counted)}
    await settle(port, chosen, request=request_bytes(request_id), **options)


async def bury(port: AsyncPort, chosen: Chosen, reason: Reason, request_id: RequestId | None = None) -> None:
    await settle(port, chosen, reason=reason_text(reason), request=request_bytes(request_id))


async def extend(port: AsyncPort, chosen: Chosen, timeout: Seconds | None, request_id: RequestId | None = None) -> None:
    await settle(port, chosen, timeout=lease_span(timeout, "timeout"), request=request_bytes(request_id))


class AsyncLease(HeldLease):
    """One item, and the right to work on it until the deadline.

    Settle it with `complete`, `retry` or `bury`, or let a `with` block do so: it completes the item at its end, and retries it when
    an exception leaves the block.

        async with lease:
            handle(lease.item)
    """

    __slots__ = ()
    _port: AsyncPort

    async def complete(self, then: Sequence[NewItem | Value] = ()) -> None:
        """The item is done. Completing it again succeeds; when the lease was lost meanwhile, `LeaseLost` is raised.

        then: items to produce exactly if the item is completed, each into the queue it names (`NewItem(…, queue="mails")`), or else
        into the same queue.
        """
        await complete(self._port, self._chosen("complete"), await self._follow_ups(then) if then else ())

    async def retry(self, delay: Seconds = 0, reason: Reason = "", counted: bool = True) -> None:
        """The item goes back, to be leased again after `delay`; when its attempts are spent it is given up.

        counted: False gives the attempt back, as if the item had not been leased.
        """
        await retry(self._port, self._chosen("retry"), delay, reason, counted)

    async def bury(self, reason: Reason = "") -> None:
        """The item is given up: it goes to the dead queue if there is one, else it is kept here until it is redriven or cleared."""
        await bury(self._port, self._chosen("bury"), reason)

    async def extend(self, timeout: Seconds | None = None) -> None:
        """The lease ends so long from now; None is as long as it was first given for.

        Items that one call leased from one partition share a deadline, so this moves theirs too.
        """
        await extend(self._port, self._chosen("extend"), timeout)

    def _chosen(self, verb: Any) -> Chosen:
        return Chosen(self._grant.incarnation, verb).add(self)

    async def _follow_ups(self, then: Sequence[NewItem | Value]) -> list[tuple[int, Batch]]:
        found = []
        for name, batch in follow_ups(then).items():
            incarnation = self._grant.incarnation
            if name is not None:
                incarnation = (await self._port.run(self._port.broker.find, name)).incarnation
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


class AsyncLeaseBatch(HeldBatch[AsyncLease]):
    """What one call leased: a sequence of leases, empty when there was nothing.

    Its verbs settle what is still open, all at once; `LeaseLost` names in `.lost` the ids that were refused, the others are done.
    A `with` block completes what is still open at its end, and retries it when an exception leaves the block.

        async with await queue.lease(100, wait=5) as batch:
            for item in batch.items:
                handle(item)
    """

    _port: AsyncPort

    async def complete(self) -> None:
        """All items that are still open are done."""
        await complete(self._port, self._chosen("complete"))

    async def retry(self, delay: Seconds = 0, reason: Reason = "") -> None:
        """All items that are still open go back, to be leased again after `delay`."""
        await retry(self._port, self._chosen("retry"), delay, reason)

    async def bury(self, reason: Reason = "") -> None:
        """All items that are still open are given up."""
        await bury(self._port, self._chosen("bury"), reason)

    async def extend(self, timeout: Seconds | None = None) -> None:
        """All leases that are still open end so long from now; None is as long as they were first given for."""
        await extend(self._port, self._chosen("extend"), timeout)

    def _chosen(self, verb: Any) -> Chosen:
        return Chosen(self._grants[0].incarnation if self._grants else 0, verb).add_open(self._grants)

    @staticmethod
    def _lease(port: Any, grant: Grant, items: Items, index: int) -> AsyncLease:
        return AsyncLease(port, grant, items, index)

    async def __aenter__(self) -> "AsyncLeaseBatch":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.complete()
        else:
            with suppress(PenstockError):  # what went wrong first is what matters
                await self.retry(reason=reason_of(error))
