"""A queue, as producers, consumers and operators use it.

Owns: `AsyncQueue`.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

from penstock.api import arguments
from penstock.api._async import lease as leases
from penstock.api._async.cursor import AsyncCursor
from penstock.api._async.lease import AsyncLeaseBatch
from penstock.api.arguments import ListedItem, RequestId, Seconds, Start
from penstock.api.homes import AsyncHome, Home
from penstock.api.items import NewItems, single_item_batch
from penstock.api.leases import LeaseSelection, LeasesOrTokens, PartitionLease, Reason
from penstock.api.options import QueueInfo, QueueOptions, queue_info, to_catalog
from penstock.loop.requests import StoredPart
from penstock.loop.retention import RetentionResult
from penstock.operations import (
    ClearItems,
    CompactQueue,
    DeleteQueue,
    ExplainItem,
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
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    UpdateQueue,
)
from penstock.reports import HeldKey, ItemEvent, ItemExplanation, QueueStats
from penstock.words.batch import Batch, check_name
from penstock.words.errors import QueueNotFound
from penstock.words.ids import LAST_PARTITION, parse_id
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_PARTITIONS, check_range
from penstock.words.values import Headers, Value

if TYPE_CHECKING:
    import pyarrow as pa

Clearable: TypeAlias = Literal["ready", "scheduled", "leased", "buried", "all"]


class AsyncQueue:
    """A named queue. `broker.queue(name)` finds it, `broker.create_queue(name)` makes it.

    An object stands for the queue as it was created: once that is deleted it raises `QueueNotFound`, even if there is another of its name.
    """

    def __init__(self, home: AsyncHome, name: str, incarnation: int) -> None:
        self._home = home
        self._name = name
        self._incarnation = incarnation

    @property
    def name(self) -> str:
        return self._name

    @property
    def incarnation(self) -> int:
        """Given at creation: a queue that is deleted and created again has another."""
        return self._incarnation

    @property
    def home(self) -> Home:
        """Whoever answers for the queue: workers and tools ask it by operations (`penstock.operations`)."""
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
        batch = single_item_batch(value, key, headers, kind, encoding, reference, priority, at, ttl, dedup)
        return arguments.stored_id(await self._produce(batch, arguments.request_bytes(request_id), arguments.wait_timeout(timeout)))

    async def produce_many(self, items: NewItems, *, request_id: RequestId | None = None, timeout: Seconds = 30) -> list[str]:
        """Store items, at most 10,000 and 64 MiB; gives their ids, in the same order.

        items: NewItem, or plain values as `produce` takes them.
        Each partition stores its part whole or not at all. When one refuses, its error is raised, with an attribute `results`: for
        each item its id or its error. Repeating the call with the same request id adds what is missing.
        """
        request, patience = arguments.request_bytes(request_id), arguments.wait_timeout(timeout)
        batch = arguments.batch_of(items)
        if batch is None:
            return []
        return arguments.stored_ids(await self._produce(batch, request, patience), len(batch.payloads))

    async def produce_arrow(self, data: "pa.Table | pa.RecordBatch", *, request_id: RequestId | None = None, timeout: Seconds = 30) -> int:
        """Store the rows of an Arrow table, of any length; gives their number. Needs penstock[arrow].

        The column `payload` is needed; key, headers, kind, encoding, reference, priority, at, ttl and dedup may be there.
        Rows are stored 10,000 at a time. If it fails half way, repeating it with the same request id adds what is missing.
        """
        from penstock.api.arrow import from_arrow

        request, patience = arguments.request_bytes(request_id), arguments.wait_timeout(timeout)
        rows = 0
        for number, batch in enumerate(from_arrow(data)):
            rows += len(arguments.stored_ids(await self._produce(batch, arguments.chunk_request(request, number), patience), len(batch)))
        return rows

    async def _produce(self, batch: Batch, request: bytes | None, patience: int) -> list[StoredPart]:
        return await self._home.call(ProduceItems(queue=self._incarnation, batch=batch, wait=patience, request=request))

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
        handed = await self._home.call(operation)
        wall = self._home.clock.read().wall
        return AsyncLeaseBatch(self._home, [PartitionLease(self._incarnation, one, wall) for one in handed])

    async def complete(self, leases_or_tokens: LeasesOrTokens, *, request_id: RequestId | None = None) -> None:
        """Items are done: a Lease, a LeaseBatch, the token of a lease, or several of those.

        When some of them are not held any more, `LeaseLost` is raised and names them in `.lost`; the others are completed.
        """
        await leases.complete(self._home, self._chosen("complete", leases_or_tokens), request_id=request_id)

    async def retry(
        self,
        leases_or_tokens: LeasesOrTokens,
        *,
        delay: Seconds = 0,
        reason: Reason = "",
        counted: bool = True,
        request_id: RequestId | None = None,
    ) -> None:
        """Items go back, to be leased again after `delay`. Takes and raises what `complete` does."""
        await leases.retry(self._home, self._chosen("retry", leases_or_tokens), delay, reason, counted, request_id)

    async def bury(self, leases_or_tokens: LeasesOrTokens, *, reason: Reason = "", request_id: RequestId | None = None) -> None:
        """Items are given up. Takes and raises what `complete` does."""
        await leases.bury(self._home, self._chosen("bury", leases_or_tokens), reason, request_id)

    async def extend(
        self,
        leases_or_tokens: LeasesOrTokens,
        *,
        timeout: Seconds | None = None,
        request_id: RequestId | None = None,
    ) -> None:
        """Leases end so long from now; None is as long as they were first given for. Takes and raises what `complete` does."""
        await leases.extend(self._home, self._chosen("extend", leases_or_tokens), timeout, request_id)

    def _chosen(self, verb: Any, given: LeasesOrTokens) -> LeaseSelection:
        return LeaseSelection(self._incarnation, verb).add(given)

    # -- reading -------------------------------------------------------------------------------------

    async def cursor(self, name: str, *, start: Start = "oldest", follow: bool = False) -> AsyncCursor:
        """Read what the queue holds and held, without leasing: a position of that name, found again or made.

        start: where a new one begins: "oldest", "newest", or a time.
        follow: at the end, wait for new items.
        """
        cursor = AsyncCursor(self._home, self._incarnation, arguments.cursor_name(name), arguments.check_flag("follow", follow))
        return await cursor._open(start)

    # -- looking -------------------------------------------------------------------------------------

    async def info(self) -> QueueInfo:
        """The queue's partitions and options."""
        found = await self._home.call(FindQueue(name=self._name))
        if found.incarnation != self._incarnation:
            raise QueueNotFound(f"queue {self._name!r} was deleted and created anew; ask the broker for it by name")
        return queue_info(found)

    async def stats(self) -> QueueStats:
        """How many items are in which state, in all and by partition; who consumes; what needs attention."""
        return await self._home.call(ReadStats(queue=self._incarnation))

    async def explain(self, id: str) -> ItemExplanation:
        """Why is this item not running? Answers in one sentence (`.why`), and with the facts behind it. Finds items that were moved."""
        partition, offset = parse_id(id)
        return await self._home.call(ExplainItem(queue=self._incarnation, partition=partition, offset=offset))

    async def history(self, id: str) -> list[ItemEvent]:
        """Everything that happened to an item, in every queue it was in, as far back as retention keeps it. Takes any id it ever had.

        The log of its partition is read for this, beside the queue's work: the longer the log since the item came, the longer it takes.
        """
        partition, offset = parse_id(id)
        return await self._home.call(ReadHistory(queue=self._incarnation, partition=partition, offset=offset))

    async def items(self, state: str | Sequence[str] | None = None, after: str | None = None, limit: int = 100) -> list[ListedItem]:
        """Items in these states (None: any), by partition, oldest first. The next page comes with `after` the last id of this one."""
        states, place, limit = arguments.states_of(state), arguments.after_id(after), arguments.page_limit(limit)
        query = ListItems(queue=self._incarnation, states=states, after=place, limit=limit)
        return [ListedItem(found) for found in await self._home.call(query)]

    async def held_keys(self, limit: int = 100) -> list[HeldKey]:
        """Keys that are not free: what holds them, and how many items wait behind."""
        return await self._home.call(ListHeldKeys(queue=self._incarnation, limit=arguments.page_limit(limit)))

    async def cursors(self) -> dict[str, dict[int, int]]:
        """The cursors of the queue, and the offset at which each stands, by partition."""
        return await self._home.call(ListCursors(queue=self._incarnation))

    # -- items ---------------------------------------------------------------------------------------

    async def clear(self, state: Clearable = "ready", *, partition: int | None = None) -> int:
        """Resolve all items in a state, as if they had been completed; gives how many they were."""
        number = arguments.partition_number(partition)
        return await self._home.call(ClearItems(queue=self._incarnation, states=arguments.states_to_clear(state), partition=number))

    async def seek(self, id: str | None = None, *, at: datetime | float | None = None) -> int:
        """Completed items become ready again; gives how many.

        id: those of its partition, from this item on.
        at: those of all partitions that were produced at that time or later, as far as retention has kept them.
        """
        return await self._home.call(SeekItems(queue=self._incarnation, start=arguments.seek_start(id, at)))

    async def release(self, key: str | bytes) -> int:
        """A parked key goes on without the items it was parked for; gives how many are free to go on."""
        return await self._home.call(ReleaseKey(queue=self._incarnation, key=arguments.key_id_of(key)))

    # -- how it works --------------------------------------------------------------------------------

    async def pause(self, lease: bool = True, produce: bool = True, *, partition: int | None = None) -> None:
        """Nothing is leased, nothing is produced, or both, until `resume`. What is leased can be settled all the same."""
        sides, number = arguments.pause_changes(lease, produce, True), arguments.partition_number(partition)
        await self._home.call(PauseQueue(queue=self._incarnation, partition=number, **sides))

    async def resume(self, lease: bool = True, produce: bool = True, *, partition: int | None = None) -> None:
        """What was paused goes on."""
        sides, number = arguments.pause_changes(lease, produce, False), arguments.partition_number(partition)
        await self._home.call(PauseQueue(queue=self._incarnation, partition=number, **sides))

    async def update(self, **options: Unpack[QueueOptions]) -> QueueInfo:
        """Change options; those not given stay as they are. New times count for new leases and items, everything else at once."""
        return queue_info(await self._home.call(UpdateQueue(queue=self._incarnation, changes=to_catalog(options))))

    async def resize(self, partitions: int) -> QueueInfo:
        """Give the queue another number of partitions, while it works. The order within a key is kept."""
        check_range("partitions", partitions, 1, MAX_PARTITIONS)
        return queue_info(await self._home.call(ResizeQueue(queue=self._incarnation, partitions=partitions)))

    async def set_read_only(self, partition: int, read_only: bool = True) -> QueueInfo:
        """Drain a partition: it gives items but takes none; the others take its keys. False lets it take items again."""
        check_range("partition", partition, 0, LAST_PARTITION)
        arguments.check_flag("read_only", read_only)
        return queue_info(await self._home.call(SetReadOnly(queue=self._incarnation, partition=partition, read_only=read_only)))

    async def compact(self, *, partition: int | None = None) -> list[RetentionResult]:
        """Let go now of what retention allows; tells what was freed, by partition."""
        return await self._home.call(CompactQueue(queue=self._incarnation, partition=arguments.partition_number(partition)))

    async def delete(self, timeout: Seconds = 30) -> None:
        """Remove the queue with all its items, once nothing is on its way to or from it."""
        await self._home.call(DeleteQueue(queue=self._incarnation, wait=arguments.wait_timeout(timeout)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"
