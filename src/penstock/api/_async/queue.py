"""The public class of a queue, for producers, consumers and operators.

Owns: `AsyncQueue`.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack

from penstock.api import arguments
from penstock.api._async import lease as leases
from penstock.api._async.cursor import AsyncCursor
from penstock.api._async.lease import AsyncLeaseBatch
from penstock.api.arguments import FoundPage, ListedItem, RequestId, Seconds, Start
from penstock.api.homes import AsyncHome, Home
from penstock.api.items import Item, ItemSource, NewItems, single_item_batch, to_batch
from penstock.api.leases import LeaseSelection, LeasesOrTokens, PartitionLease, Reason
from penstock.api.options import QueueInfo, QueueOptions, queue_info, to_catalog
from penstock.api.produced import ProducedId, ProducedIds, ProducedRows, stored_id, stored_ids
from penstock.api.traces import active_tracer
from penstock.loop.requests import LeaseResult, SettleAction, StoredPart
from penstock.loop.retention import RetentionResult
from penstock.operations import (
    CancelItems,
    ClearItems,
    CompactQueue,
    DeleteQueue,
    ExplainItem,
    FindItems,
    FindQueue,
    LeaseItems,
    ListCursors,
    ListHeldKeys,
    ListItems,
    PauseQueue,
    ProduceItems,
    ReadHistory,
    ReadStats,
    ReleaseKey,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    UpdateQueue,
)
from penstock.reports import HeldKey, ItemChange, ItemEvent, ItemExplanation, QueueStats
from penstock.words.batch import Batch, check_name
from penstock.words.errors import QueueNotFound
from penstock.words.ids import LAST_PARTITION, parse_id
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_PARTITIONS, check_range
from penstock.words.values import Headers, Value

if TYPE_CHECKING:
    import pyarrow as pa

Clearable: TypeAlias = Literal["ready", "scheduled", "leased", "buried", "all"]


class AsyncQueue:
    """A named, durable queue of items. `broker.create_queue(name)` creates one, `broker.queue(name)` finds one.

        await queue.produce({"order": 1}, key="customer-42")
        for lease in await queue.lease(10, wait=5):
            async with lease:
                print(lease.item.value)

    Producers call `produce`, consumers `lease` and the methods of the leases that it returns. `stats`, `items`,
    `explain` and `history` show what is in the queue and why.

    After the queue was deleted, methods raise `QueueNotFound`, even if a new queue has the same name; settling an item
    raises `LeaseLost`.
    Durations are seconds or a timedelta. Times are datetimes with a timezone; those returned are in UTC.
    """

    def __init__(self, home: AsyncHome, name: str, incarnation: int) -> None:
        self._home = home
        self._name = name
        self._incarnation = incarnation

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._name

    @property
    def incarnation(self) -> int:
        """A random number given to the queue at its creation. A new queue of the same name has another one."""
        return self._incarnation

    @property
    def home(self) -> Home:
        """The object that answers the queue's operations (`penstock.operations`), for workers and tools."""
        return self._home.home

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
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup: str | bytes | None = None,
        dedup_window: Seconds | None = None,
        request_id: RequestId | None = None,
        timeout: Seconds = 30,
    ) -> ProducedId:
        """Add an item to the queue and return its id. When this returns, the item is as durable as the broker promises.

        The id is a str. Its attribute `duplicate` is True if no item was added because of its dedup id.

        value: the payload. bytes are stored unchanged, a str as text; a dict, list, tuple, number, bool, dataclass or
            msgspec Struct as JSON.
        key: items of the same key are handled one at a time, in the order in which they were produced.
        headers: a dict from str to str or bytes.
        kind: the type of the item, such as "invoice". Workers choose a handler by it.
        encoding: how `item.value` decodes the payload. Default: derived from the type of `value`.
        reference: a text for the caller's own use, such as the id of a related record.
        priority: 0 (leased first) to 9 (last). Default: 5.
        at: the item is not leased before this time.
        ttl: an item that still waits this long after it was produced is buried. An item that is leased at that time is
            buried if it returns to the queue. Default: the `ttl` of the queue.
        dedup: a dedup id. If an item with the same key and dedup id was produced within its `dedup_window`, no item is
            added, and the id of that earlier item is returned, with `duplicate` set. It must not be empty.
        dedup_window: how long the dedup id of this item is remembered. Default: the `dedup_window` of the queue.
        request_id: makes the call repeatable. A second call with the same request id adds nothing and returns the
            same id. Remembered for at least 15 minutes.
        timeout: how long to wait while the queue is full. Then `QueueFull` is raised.
        """
        batch = single_item_batch(value, key, headers, kind, encoding, reference, priority, at, ttl, dedup, dedup_window)
        return stored_id(await self._produce(batch, arguments.request_bytes(request_id), arguments.wait_timeout(timeout)))

    async def produce_many(self, items: NewItems, *, request_id: RequestId | None = None, timeout: Seconds = 30) -> ProducedIds:
        """Add up to 10,000 items (64 MiB) in one request and return their ids, in the order of the items.

        items: `NewItem` objects, or plain values as `produce` takes them.
        request_id, timeout: as for `produce`.

        The attribute `duplicates` of the returned list has the indexes of items that were not added because of their
        dedup ids.
        The items of one partition are stored all or none. If a partition refuses its items, its error is raised; the
        attribute `results` of the error has the id or the error of every item. Repeating the call with the same
        request id adds only the items that are missing.
        """
        request, wait = arguments.request_bytes(request_id), arguments.wait_timeout(timeout)
        batch = to_batch(items)
        if not batch.payloads:
            return ProducedIds()
        return stored_ids(await self._produce(batch, request, wait), len(batch.payloads))

    async def produce_arrow(
        self, data: "pa.Table | pa.RecordBatch", *, request_id: RequestId | None = None, timeout: Seconds = 30
    ) -> ProducedRows:
        """Add the rows of an Arrow table of any length and return their number. Needs penstock[arrow].

        The number is an int. Its attribute `duplicates` has the numbers of rows that were not added because of their
        dedup ids.

        data: a Table or RecordBatch with the column `payload`, and any of key, headers, kind, encoding, reference,
            priority, at, ttl, dedup and dedup_window. A dedup_window counts only in rows with a dedup id.
        request_id, timeout: as for `produce`; the timeout is for each request.

        The whole table is checked before the first row is stored. Rows are then stored in requests of up to 10,000.
        If one of them fails, repeating the call with the same request id adds only the rows that are missing.
        """
        from penstock.api.arrow import from_arrow

        request, wait = arguments.request_bytes(request_id), arguments.wait_timeout(timeout)
        rows, duplicates = 0, []
        for number, batch in enumerate(from_arrow(data)):
            stored = stored_ids(await self._produce(batch, arguments.chunk_request(request, number), wait), len(batch))
            duplicates += [rows + index for index in stored.duplicates]
            rows += len(stored)
        return ProducedRows(rows, duplicates)

    async def _produce(self, batch: Batch, request: bytes | None, wait: int) -> list[StoredPart]:
        tracer = active_tracer()
        if tracer is None:
            return await self._home.call(ProduceItems(queue=self._incarnation, batch=batch, wait=wait, request=request))
        with tracer.produce(self._name, batch) as span:
            parts = await self._home.call(ProduceItems(queue=self._incarnation, batch=span.batch, wait=wait, request=request))
            span.record_answer(parts)
        return parts

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
        """Lease up to `count` ready items, by priority, then oldest first.

        No other consumer gets these items until they are settled or their lease ends.

        wait: how long to wait if no item is ready. As soon as some are, they are returned, even if fewer than
            `count`. If none comes, the batch is empty.
        lease_timeout: how long the leases last, 1 second to 12 hours. Default: that of the queue.
        per_key: how many consecutive items of one key may be leased together. They must be settled in order.
        consumer: a name for the consumer, shown by `stats` and `explain`.
        request_id: a second call with the same request id returns the same leases.
        """
        check_range("count", count, 1, MAX_BATCH_ITEMS)
        check_range("per_key", per_key, 1, MAX_BATCH_ITEMS)
        check_name("consumer", consumer)
        operation = LeaseItems(
            queue=self._incarnation,
            count=count,
            wait=arguments.wait_timeout(wait, "wait"),
            consumer=consumer,
            timeout=arguments.lease_duration(lease_timeout),
            per_key=per_key,
            request=arguments.request_bytes(request_id),
        )
        results = await self._lease(operation)
        wall = self._home.clock.read().wall
        return AsyncLeaseBatch(self._home, [PartitionLease(self._incarnation, result, wall, self._name) for result in results])

    async def _lease(self, operation: LeaseItems) -> list[LeaseResult]:
        tracer = active_tracer()
        if tracer is None:
            return await self._home.call(operation)
        with tracer.lease(self._name, operation.consumer) as span:
            results = await self._home.call(operation)
            span.record_answer(results)
        return results

    async def complete(self, leases_or_tokens: LeasesOrTokens, *, request_id: RequestId | None = None) -> None:
        """Mark leased items as done.

        leases_or_tokens: a Lease, a LeaseBatch, the token of a lease (`lease.token`), or an iterable of those.
        request_id: a second call with the same request id changes nothing and gives the same answer.

        If some of the leases have ended, the other items are completed and `LeaseLost` is raised; its `.lost` has the
        ids of the items whose leases have ended.
        """
        await leases.complete(self._home, self._select("complete", leases_or_tokens), request_id=request_id)

    async def retry(
        self,
        leases_or_tokens: LeasesOrTokens,
        *,
        delay: Seconds = 0,
        reason: Reason = "",
        counted: bool = True,
        request_id: RequestId | None = None,
    ) -> None:
        """Return leased items to the queue; they can be leased again after `delay`. See `AsyncLease.retry`.

        Takes the same leases as `complete`, and raises `LeaseLost` in the same way.
        """
        await leases.retry(self._home, self._select("retry", leases_or_tokens), delay, reason, counted, request_id)

    async def bury(self, leases_or_tokens: LeasesOrTokens, *, reason: Reason = "", request_id: RequestId | None = None) -> None:
        """Set leased items aside as failed. See `AsyncLease.bury`.

        Takes the same leases as `complete`, and raises `LeaseLost` in the same way.
        """
        await leases.bury(self._home, self._select("bury", leases_or_tokens), reason, request_id)

    async def extend(
        self,
        leases_or_tokens: LeasesOrTokens,
        *,
        timeout: Seconds | None = None,
        request_id: RequestId | None = None,
    ) -> None:
        """Move the deadline of leases to `timeout` from now. None is the duration for which they were first given.

        Takes the same leases as `complete`, and raises `LeaseLost` in the same way.
        """
        await leases.extend(self._home, self._select("extend", leases_or_tokens), timeout, request_id)

    def _select(self, action: SettleAction, given: LeasesOrTokens) -> LeaseSelection:
        return LeaseSelection(self._incarnation, action, self._name).add(given)

    # -- reading -------------------------------------------------------------------------------------

    async def cursor(self, name: str, *, start: Start = "oldest", follow: bool = False) -> AsyncCursor:
        """Return the cursor of that name: a durable position for reading the items without leasing them.

        It is created if it does not exist; otherwise reading continues where it was committed.

        start: where a new cursor begins: "oldest", "newest", a time, the id of an item, or {partition: offset}. In
            partitions that an id or offsets do not name, it begins with the oldest items.
        follow: at the end of the queue, wait for new items instead of stopping.
        """
        cursor = AsyncCursor(self._home, self._name, self._incarnation, arguments.cursor_name(name), arguments.check_flag("follow", follow))
        return await cursor._open(start)

    # -- inspecting ----------------------------------------------------------------------------------

    async def info(self) -> QueueInfo:
        """Return the queue's partitions and options."""
        found = await self._home.call(FindQueue(name=self._name))
        if found.incarnation != self._incarnation:
            raise QueueNotFound(f"queue {self._name!r} was deleted and created anew; ask the broker for it by name")
        return queue_info(found)

    async def stats(self) -> QueueStats:
        """Return the number of items in each state, in total and by partition, the consumers, and warnings.

        The numbers are exact.
        """
        return await self._home.call(ReadStats(queue=self._incarnation))

    async def explain(self, id: str) -> ItemExplanation:
        """Return the state of an item, and in `.why` one sentence that says why it is not being handled.

        If the item was moved to another queue or partition, the answer is about the item there.
        """
        partition, offset = parse_id(id)
        return await self._home.call(ExplainItem(queue=self._incarnation, partition=partition, offset=offset))

    async def history(self, id: str) -> list[ItemEvent]:
        """Return everything that happened to an item, oldest first, in all queues that it was in.

        id: any id that the item had. Events that retention has deleted are missing.

        This reads the log of the partition from the item on, without blocking the queue. A long log takes long.
        """
        partition, offset = parse_id(id)
        return await self._home.call(ReadHistory(queue=self._incarnation, partition=partition, offset=offset))

    async def items(self, state: str | Sequence[str] | None = None, after: str | None = None, limit: int = 100) -> list[ListedItem]:
        """Return items, by partition, oldest first, at most `limit` of them.

        state: a state or several: "ready", "scheduled", "leased", "completed", "buried", "moving",
            "cancelled". None is all.
        after: an item id; return only items after it. For the next page, give the last id of this page.
        """
        states, start, limit = arguments.states_of(state), None if after is None else parse_id(after), arguments.page_limit(limit)
        query = ListItems(queue=self._incarnation, states=states, after=start, limit=limit)
        source = ItemSource(self._name)
        return [ListedItem(source, found) for found in await self._home.call(query)]

    async def find(
        self,
        *,
        key: str | bytes | None = None,
        reference: str | None = None,
        state: str | Sequence[str] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> FoundPage:
        """Return items with a key, a reference or both, by partition, oldest first, at most `limit` of them.

        state: as for `items`. To find what can still be cancelled, give ("ready", "scheduled").
        after: where to go on: the attribute `after` of the page before.

        There is no index of keys and references: this is a scan. A call reads about 10,000 items or 8 MiB, those in the
        given states, and the queue does nothing else meanwhile. So a page may be empty although there are items further
        on: the end is reached when the attribute `after` of the page is None.
        """
        name, text = arguments.key_and_reference(key, reference)
        states, start, limit = arguments.states_of(state), None if after is None else parse_id(after), arguments.page_limit(limit)
        query = FindItems(queue=self._incarnation, key=name, reference=text, states=states, after=start, limit=limit)
        return arguments.found_page(ItemSource(self._name), await self._home.call(query))

    async def held_keys(self, limit: int = 100) -> list[HeldKey]:
        """Return the keys that are not free, those with the most waiting items first, and why (`.why`)."""
        return await self._home.call(ListHeldKeys(queue=self._incarnation, limit=arguments.page_limit(limit)))

    async def cursors(self) -> dict[str, dict[int, int]]:
        """Return the committed position of every cursor: name to partition to offset."""
        return await self._home.call(ListCursors(queue=self._incarnation))

    # -- items ---------------------------------------------------------------------------------------

    async def clear(self, state: Clearable = "ready", *, partition: int | None = None) -> int:
        """Complete all items in a state without handling them, and return their number.

        state: "ready", "scheduled", "leased", "buried" or "all". Leases of cleared items end. Clearing buried items
            releases the keys that are parked for them.
        partition: only this partition. Default: all.
        """
        number = arguments.partition_number(partition)
        return await self._home.call(ClearItems(queue=self._incarnation, states=arguments.states_to_clear(state), partition=number))

    async def seek(self, id: str | None = None, *, at: datetime | None = None, skip: bool = False) -> int:
        """Make completed items ready again, and return their number. Only items that retention has kept can return.

        id: the completed items of this item's partition, from this item on.
        at: the completed items of all partitions that were produced at this time or later.
        skip: go forward instead. The items before that point that are ready or scheduled are completed without being
            handled, and their number is returned. Leased and buried items stay. A seek back makes them ready again.
        """
        return await self._home.call(SeekItems(queue=self._incarnation, start=arguments.seek_start(id, at), skip=skip))

    async def release(self, key: str | bytes) -> int:
        """Let the other items of a parked key be leased, although items of the key are buried.

        Returns the number of buried items that the key was parked for; they stay buried.
        """
        return await self._home.call(ReleaseKey(queue=self._incarnation, key=arguments.key_id_of(key)))

    async def cancel(self, *items: str | Item) -> list[ItemChange]:
        """Remove items that wait, for good, and return what became of each, in their order.

        items: ids, or items as `find` and `items` return them, at most 10,000; without any, nothing is done.

        Ready and scheduled items are cancelled, also those that a key holds back. Leased items are not, nor are those
        that are completed, buried or on their way to another queue: the attribute `outcome` of each result says so. A
        cancelled item is never leased, not even after a seek; its dedup id can be used again.
        """
        positions = arguments.positions_of(items)
        return await self._home.call(CancelItems(queue=self._incarnation, items=positions)) if positions else []

    async def reschedule(self, *items: str | Item, at: datetime | None = None, delay: Seconds | None = None) -> list[ItemChange]:
        """Give items that wait another time, and return what became of each, in their order.

        items: as for `cancel`; the same items are refused.
        at: the items are not leased before this time. A time in the past is now.
        delay: the same as a duration from now; 0 is now.

        A rescheduled item gives up its place in the order of its key and holds nothing: other items of the key go on,
        and it takes the last place when its time comes. An item that backs off after a retry also gives up its place,
        unless it is rescheduled to now: then its back-off ends, and it is the first of its key. A ready item that is
        rescheduled to now keeps its place. The ttl of an item does not change.
        """
        when, wait = arguments.new_time(at, delay)
        positions = arguments.positions_of(items)
        operation = RescheduleItems(queue=self._incarnation, items=positions, at=when, delay=wait)
        return await self._home.call(operation) if positions else []

    # -- administration ------------------------------------------------------------------------------

    async def pause(self, lease: bool = True, produce: bool = True, *, partition: int | None = None) -> None:
        """Stop leasing, producing or both, until `resume`. Leased items can still be settled.

        lease: stop leasing: `lease` finds no items.
        produce: stop producing: `produce` raises `QueueHeld`.
        partition: only this partition. Default: all.
        """
        sides, number = arguments.pause_changes(lease, produce, True), arguments.partition_number(partition)
        await self._home.call(PauseQueue(queue=self._incarnation, partition=number, lease=sides["lease"], produce=sides["produce"]))

    async def resume(self, lease: bool = True, produce: bool = True, *, partition: int | None = None) -> None:
        """End a pause of leasing, producing or both, in one partition or in all."""
        sides, number = arguments.pause_changes(lease, produce, False), arguments.partition_number(partition)
        await self._home.call(PauseQueue(queue=self._incarnation, partition=number, lease=sides["lease"], produce=sides["produce"]))

    async def update(self, **options: Unpack[QueueOptions]) -> QueueInfo:
        """Change options and return the queue's new options. Options left out do not change.

        New durations apply to new leases and new items; all other changes apply at once.
        """
        return queue_info(await self._home.call(UpdateQueue(queue=self._incarnation, changes=to_catalog(options))))

    async def resize(self, partitions: int) -> QueueInfo:
        """Change the number of partitions while the queue is in use. The order of the items of each key is kept.

        Returns before all items have moved: `stats().resizing` shows what is left.
        """
        check_range("partitions", partitions, 1, MAX_PARTITIONS)
        return queue_info(await self._home.call(ResizeQueue(queue=self._incarnation, partitions=partitions)))

    async def set_read_only(self, partition: int, read_only: bool = True) -> QueueInfo:
        """Stop or allow new items in one partition. A read-only partition is drained: its items can still be leased.

        The other partitions take over its keys. `read_only=False` lets it take new items again.
        """
        check_range("partition", partition, 0, LAST_PARTITION)
        arguments.check_flag("read_only", read_only)
        return queue_info(await self._home.call(SetReadOnly(queue=self._incarnation, partition=partition, read_only=read_only)))

    async def compact(self, *, partition: int | None = None) -> list[RetentionResult]:
        """Delete now everything that retention allows, and return what was freed in each partition."""
        return await self._home.call(CompactQueue(queue=self._incarnation, partition=arguments.partition_number(partition)))

    async def delete(self, timeout: Seconds = 30) -> None:
        """Delete the queue, its items and its files. See `AsyncBroker.delete_queue`."""
        await self._home.call(DeleteQueue(queue=self._incarnation, wait=arguments.wait_timeout(timeout)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"
