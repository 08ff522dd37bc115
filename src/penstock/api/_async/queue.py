"""A queue, as producers and consumers use it.

Owns: `AsyncQueue`.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock.api import arguments as calls
from penstock.api._async import lease as leases
from penstock.api._async.cursor import AsyncCursor
from penstock.api._async.lease import AsyncLeaseBatch
from penstock.api._async.operating import AsyncOperations
from penstock.api.arguments import RequestId, Seconds, Start
from penstock.api.held import Chosen, Grant, Leases, Reason
from penstock.api.items import Items, to_single
from penstock.loop.requests import Handed, Lease, Produce
from penstock.words.batch import Batch, check_name
from penstock.words.limits import MAX_BATCH_ITEMS, within
from penstock.words.values import Headers, Value

if TYPE_CHECKING:
    import pyarrow as pa


class AsyncQueue(AsyncOperations):
    """A named queue. `broker.queue(name)` finds it, `broker.create_queue(name)` makes it.

    An object stands for the queue as it was created: once that is deleted it raises `QueueNotFound`, even if there is another of its name.
    """

    # -- producing -----------------------------------------------------------------------------------

    async def produce(
        self,
        value: Value,
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        kind: str | None = None,
        encoding: str | None = None,
        reference: str | None = None,
        priority: int | None = None,
        at: datetime | float | None = None,
        ttl: Seconds | None = None,
        dedup: str | bytes | None = None,
        request_id: RequestId | None = None,
        timeout: Seconds = 30,
    ) -> str:
        """Store an item; gives its id. When this returns the item is durable.

        value: bytes as they are, a str as text, anything else as JSON.
        key: items of one key are handled in order, one at a time.
        headers: a dict of str to str or bytes.
        kind, reference: texts of yours, by which items can be told apart and chosen.
        encoding: how the payload is to be read; derived from the value unless given.
        priority: 0 (first) to 9; 5 unless given.
        at: not before then: a datetime with a timezone, or seconds since 1970.
        ttl: given up when it has waited so long.
        dedup: a second item of the same key and dedup id adds nothing while the first is remembered; its id is the first one's.
        request_id: repeating a call with the same one adds nothing and gives the same id.
        timeout: how long to wait while the queue is full; then `QueueFull` is raised.
        """
        batch = to_single(value, key, headers, kind, encoding, reference, priority, at, ttl, dedup)
        return calls.stored_id(await self._produce(batch, calls.request_bytes(request_id), calls.patience(timeout)))

    async def produce_many(self, items: Items, *, request_id: RequestId | None = None, timeout: Seconds = 30) -> list[str]:
        """Store items, at most 10,000 and 64 MiB; gives their ids, in the same order.

        items: NewItem, or plain values as `produce` takes them.
        Each partition stores its part whole or not at all. When one refuses, its error is raised, with an attribute `results`: for
        each item its id or its error. Repeating the call with the same request id adds what is missing.
        """
        request, patience = calls.request_bytes(request_id), calls.patience(timeout)
        batch = calls.batch_of(items)
        if batch is None:
            return []
        return calls.stored_ids(await self._produce(batch, request, patience), len(batch.payloads))

    async def produce_arrow(self, data: "pa.Table | pa.RecordBatch", *, request_id: RequestId | None = None, timeout: Seconds = 30) -> int:
        """Store the rows of an Arrow table, of any length; gives their number. Needs penstock[arrow].

        The column `payload` is needed; key, headers, kind, encoding, reference, priority, at, ttl and dedup may be there.
        Rows are stored 10,000 at a time. If it fails half way, repeating it with the same request id adds what is missing.
        """
        from penstock.api.arrow import from_arrow

        request, patience = calls.request_bytes(request_id), calls.patience(timeout)
        rows = 0
        for number, batch in enumerate(from_arrow(data)):
            rows += len(calls.stored_ids(await self._produce(batch, calls.chunk_request(request, number), patience), len(batch)))
        return rows

    async def _produce(self, batch: Batch, request: bytes | None, patience: int) -> Any:
        port = self._port
        return await port.call(self._incarnation, Produce(batch, request, port.now() + patience))

    # -- consuming -----------------------------------------------------------------------------------

    async def lease(
        self,
        count: int = 1,
        *,
        wait: Seconds = 0,
        lease_timeout: Seconds | None = None,
        per_key: int = 1,
        consumer: str = "",
        request_id: RequestId | None = None,
    ) -> AsyncLeaseBatch:
        """Take up to `count` items to work on, the oldest first; nobody else gets them until they are settled or their lease ends.

        wait: how long to wait when there is nothing; what is there is given at once, without waiting for more.
        lease_timeout: how long the items are held; the queue's unless given.
        per_key: up to so many consecutive items of a key, to be settled in order.
        consumer: a name for who works on them, seen in `stats` and `explain`.
        request_id: repeating a call with the same one gives the same leases.
        """
        within("count", count, 1, MAX_BATCH_ITEMS)
        within("per_key", per_key, 1, MAX_BATCH_ITEMS)
        check_name("consumer", consumer)
        span, port = calls.patience(wait, "wait"), self._port
        deadline = port.now() + span if span else 0
        request = Lease(count, consumer, calls.lease_span(lease_timeout), per_key, calls.request_bytes(request_id), deadline)
        handed: list[Handed] = await port.call(self._incarnation, request)
        wall = port.wall()
        return AsyncLeaseBatch(port, [Grant(self._incarnation, one, wall) for one in handed])

    async def complete(self, leases_or_tokens: Leases, *, request_id: RequestId | None = None) -> None:
        """Items are done: a Lease, a LeaseBatch, the token of a lease, or several of those.

        When some of them are not held any more, `LeaseLost` is raised and names them in `.lost`; the others are completed.
        """
        await leases.complete(self._port, self._chosen("complete", leases_or_tokens), request_id=request_id)

    async def retry(
        self,
        leases_or_tokens: Leases,
        *,
        delay: Seconds = 0,
        reason: Reason = "",
        counted: bool = True,
        request_id: RequestId | None = None,
    ) -> None:
        """Items go back, to be leased again after `delay`. Takes and raises what `complete` does."""
        await leases.retry(self._port, self._chosen("retry", leases_or_tokens), delay, reason, counted, request_id)

    async def bury(self, leases_or_tokens: Leases, *, reason: Reason = "", request_id: RequestId | None = None) -> None:
        """Items are given up. Takes and raises what `complete` does."""
        await leases.bury(self._port, self._chosen("bury", leases_or_tokens), reason, request_id)

    async def extend(self, leases_or_tokens: Leases, *, timeout: Seconds | None = None, request_id: RequestId | None = None) -> None:
        """Leases end so long from now; None is as long as they were first given for. Takes and raises what `complete` does."""
        await leases.extend(self._port, self._chosen("extend", leases_or_tokens), timeout, request_id)

    def _chosen(self, verb: Any, given: Leases) -> Chosen:
        return Chosen(self._incarnation, verb).add(given)

    # -- reading -------------------------------------------------------------------------------------

    async def cursor(self, name: str, *, start: Start = "oldest", follow: bool = False) -> AsyncCursor:
        """Read what the queue holds and held, without leasing: a position of that name, found again or made.

        start: where a new one begins: "oldest", "newest", or a time.
        follow: at the end, wait for new items.
        """
        cursor = AsyncCursor(self._port, self._incarnation, calls.cursor_name(name), calls.flag("follow", follow))
        return await cursor._open(start)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"
