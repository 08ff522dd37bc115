"""The JSON shapes of items: produce, lease, settle, lists of items, and reading the log.

Owns: these shapes, their conversion to the columns and parts that operations take, and the shapes of answers. Field
names are those of Querator's API where the idea is the same (docs/http.md). The docstrings of fields are the
descriptions in the OpenAPI document.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, field

from penstock.api.items import convert_column, dedup_digests
from penstock.loop.item_cache import Items
from penstock.loop.requests import LeaseResult, StoredPart
from penstock.operations import Offsets, StateName
from penstock.reports import FoundItems, ListedItemData
from penstock.rules.routing import key_ids
from penstock.server.json_values import (
    Base64,
    IdOrToken,
    ItemId,
    Key,
    LeaseTime,
    Lifetime,
    Limit,
    LogPosition,
    Name,
    PartitionNumber,
    PartitionOffsets,
    QueueName,
    ReplyShape,
    RequestName,
    RequestShape,
    Span,
    Time,
    TokenText,
    Wait,
    format_duration,
    key_bytes_of,
    one_given,
    text_or_bytes,
    time_or_none,
    to_microseconds,
)
from penstock.server.served_request import Problem
from penstock.words import origin, values
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.ids import Token, format_id, format_ids, format_token
from penstock.words.limits import DEFAULT_PRIORITY, LAST_PRIORITY, MAX_BATCH_ITEMS

I = TypeVar("I", bound="ItemReply")  # noqa: E741

# -- produce -----------------------------------------------------------------------------------------


class ItemBody(RequestShape, gc=False, kw_only=True):
    """An item to be produced. Without `bytes` and `utf8` its payload is empty."""

    schema_rules: ClassVar[dict[str, Any]] = {"anyOf": [*one_given("dedup_id"), {"properties": {"dedup_window": {"type": "null"}}}]}
    bytes: Base64 | None = None
    """The payload. Counts when `utf8` is given too, unless it is empty."""
    utf8: str | None = None
    """The payload as text. Without `encoding`, its encoding is then "text"."""
    encoding: Name | None = None
    """How consumers decode the payload, such as "json"."""
    kind: Name | None = None
    """A word for the sort of item it is."""
    reference: Name | None = None
    """Any text of the producer."""
    key: Key | None = None
    """Items of one key are handled in order, one at a time."""
    key_bytes: Base64 | None = None
    """The key, when it is not text."""
    headers: dict[str, str] | None = None
    headers_bytes: dict[str, Base64] | None = None
    """Headers whose values are not text."""
    priority: Annotated[int, Meta(ge=0, le=LAST_PRIORITY)] | None = None
    """0 is handled first, 9 last; 5 when it is not given."""
    enqueue_at: Time | None = None
    """Not leased before this time."""
    ttl: Lifetime | None = None
    """Buried when it has waited this long."""
    dedup_id: RequestName | None = None
    """A later item with the same key and id is not added while the queue remembers the first."""
    dedup_window: Lifetime | None = None
    """How long the queue remembers the dedup_id, if not for its own window. Only with a dedup_id."""


ItemBodies = Annotated[list[ItemBody], Meta(min_length=1, max_length=MAX_BATCH_ITEMS)]


class ProduceBody(RequestShape):
    """Items for a queue."""

    queue_name: QueueName
    items: ItemBodies
    request_timeout: Wait = 30.0
    """How long to wait for room in a full queue."""
    request_id: RequestName | None = None
    """A repetition with the same id adds nothing. The header Idempotency-Key does the same."""


class ItemResult(ReplyShape):
    """What became of one item of a request."""

    id: str | None = None
    """Its id. An item that was not stored has none."""
    duplicate: bool = False
    """Whether nothing was added, because the queue knew the dedup_id: the id is that of the earlier item."""
    error: Problem | None = None
    """Why it was not stored or settled."""


class ProduceReply(ReplyShape):
    """A result for each item, in their order. At least one item was stored."""

    items: list[ItemResult]


def to_batch(items: Sequence[ItemBody]) -> Batch:
    """The items as columns; InvalidRequest, which names the item, when one cannot be stored."""
    if len(items) == 1:
        return _single_item(items[0])
    payloads = [item.bytes or (b"" if item.utf8 is None else item.utf8.encode()) for item in items]
    keys = convert_column(_key, items) if any(item.key is not None or item.key_bytes is not None for item in items) else None
    return Batch(
        payloads,
        keys,
        None if keys is None else key_ids(keys),
        _column(items, "headers", "headers_bytes", convert=_headers),
        _texts([item.kind for item in items]),
        _texts([item.encoding or (values.TEXT if item.utf8 is not None and not item.bytes else None) for item in items]),
        _texts([item.reference for item in items]),
        _priorities([item.priority for item in items]),
        convert_column(_instant, [item.enqueue_at for item in items], 0),
        convert_column(_ttl, [item.ttl for item in items], 0),
        dedup_digests(keys, convert_column(_dedup, [item.dedup_id for item in items])),
        dedup_windows=convert_column(_dedup_window, [item.dedup_window for item in items], 0),
    )


def _single_item(item: ItemBody) -> Batch:
    """A batch of one item. The same as the general way, and faster, because it is the most common one."""
    key = _key(item)
    encoding = item.encoding or (values.TEXT if item.utf8 is not None and not item.bytes else None)
    headers = _headers(item) if item.headers or item.headers_bytes else None
    return Batch(
        [item.bytes or (b"" if item.utf8 is None else item.utf8.encode())],
        None if key is None else [key],
        None if key is None else key_ids([key]),
        None if headers is None else [headers],
        [item.kind] if item.kind else None,
        [encoding] if encoding else None,
        [item.reference] if item.reference else None,
        None if item.priority is None else bytes([item.priority]),
        None if item.enqueue_at is None else [_instant(item.enqueue_at)],
        None if item.ttl is None else [_ttl(item.ttl)],
        None if item.dedup_id is None else dedup_digests([key], [_dedup(item.dedup_id)]),
        dedup_windows=None if item.dedup_window is None else [_dedup_window(item.dedup_window)],
    )


def _column(items: Sequence[ItemBody], *names: str, convert: Callable[[ItemBody], Any]) -> Any:
    """A column that is made of several fields; None if no item has any of them."""
    if all(getattr(item, name) is None for item in items for name in names):
        return None
    return convert_column(convert, items)


def _key(item: ItemBody) -> bytes | None:
    return key_bytes_of(item.key, item.key_bytes)


def _headers(item: ItemBody) -> bytes | None:
    return values.encode_headers({**(item.headers or {}), **(item.headers_bytes or {})})


def _texts(column: list[str | None]) -> list[str | None] | None:
    return [text or None for text in column] if any(column) else None


def _priorities(column: list[int | None]) -> bytes | None:
    if column.count(None) == len(column):
        return None
    return bytes([DEFAULT_PRIORITY if priority is None else priority for priority in column])


def _instant(at: datetime) -> int:
    return values.instant(at, "enqueue_at")


def _ttl(ttl: str | float) -> int:
    span = to_microseconds(ttl, "the ttl")
    if not span:
        raise InvalidRequest("the ttl is 0; give more, or leave it out")
    return span


def _dedup(name: str) -> bytes:
    return values.encode_dedup_id(name, "dedup_id")


def _dedup_window(window: str | float) -> int:
    return to_microseconds(window, "the dedup_window", low=1)


def problem_of(error: PenstockError) -> Problem:
    return Problem(error.code, str(error))


def produce_results(parts: Sequence[StoredPart], count: int) -> tuple[list[ItemResult], PenstockError | None]:
    """The results of a produce of `count` items, and the first error if none of them was stored."""
    results = [ItemResult()] * count
    failed: PenstockError | None = None
    any_stored = False
    for partition, chosen, stored, refused in parts:
        indexes = range(count) if chosen is None else chosen
        if stored is not None:
            any_stored = True
            for index, item_id in zip(indexes, format_ids(partition, stored.offsets), strict=True):
                results[index] = ItemResult(id=item_id)
            for index in stored.duplicates:
                results[indexes[index]].duplicate = True
        elif refused is not None:
            failed = failed or refused.error()
            for index in indexes:
                results[index] = ItemResult(error=Problem(refused.code, refused.message))
    return results, None if any_stored else failed


# -- items in replies --------------------------------------------------------------------------------


class OriginReply(ReplyShape):
    """The item from which a dead letter, a redriven item or a follow-up was made."""

    queue_name: str
    id: str
    attempts: int = 0
    reason: str = ""
    produced_at: datetime | None = None
    first_failed_at: datetime | None = None
    last_failed_at: datetime | None = None
    buried_at: datetime | None = None


class ItemReply(ReplyShape, kw_only=True):
    """The fields of an item that all replies have."""

    id: str
    partition: int
    bytes: Base64
    """The payload."""
    utf8: str | None = None
    """The payload as text, if the encoding is "text" or "json" and it is UTF-8."""
    encoding: str | None = None
    kind: str | None = None
    reference: str | None = None
    key: str | None = None
    key_bytes: Base64 | None = None
    """The key, when it is not text."""
    headers: dict[str, str] | None = None
    headers_bytes: dict[str, Base64] | None = None
    """The headers whose values are not text."""
    priority: int
    enqueue_at: datetime | None = None
    ttl: str | None = None
    origin: OriginReply | None = None


class LeasedItem(ItemReply, kw_only=True):
    """An item that the client may work on until the deadline."""

    lease_token: str
    """Names the lease. Whoever completes the item with it is refused if the item was leased to someone else since."""
    lease_deadline: datetime
    attempts: int
    """How often it was leased, including this time."""
    produced_at: datetime


class ListedItemReply(ItemReply, kw_only=True):
    """An item and its state."""

    state: StateName
    is_leased: bool
    attempts: int
    created_at: datetime
    lease_deadline: datetime | None = None
    expire_deadline: datetime | None = None
    """When its ttl, or the one that the queue has now, ends."""
    reason: str | None = None
    """Why it was buried or last retried."""


class LogItem(ItemReply, kw_only=True):
    """An item of the log, in whatever state it is."""

    produced_at: datetime


def _item(kind: type[I], partition: int, offset: int, batch: Batch, index: int, **more: Any) -> I:
    payload, encoding = batch.payloads[index], _of(batch.encodings, index)
    found: dict[str, Any] = {"id": format_id(partition, offset), "partition": partition, "bytes": payload, "encoding": encoding, **more}
    if encoding == values.TEXT or encoding == values.JSON:
        found["utf8"] = text_or_bytes(payload)[0]
    priorities = batch.priorities
    found["priority"] = DEFAULT_PRIORITY if priorities is None else priorities[index]
    if batch.kinds is not None:
        found["kind"] = batch.kinds[index]
    if batch.references is not None:
        found["reference"] = batch.references[index]
    if batch.keys is not None and (key := batch.keys[index]) is not None:
        found["key"], found["key_bytes"] = text_or_bytes(key)
    if batch.headers is not None and (packed := batch.headers[index]) is not None:
        headers = values.decode_headers(packed)
        found["headers"] = {name: value for name, value in headers.items() if isinstance(value, str)} or None
        found["headers_bytes"] = {name: value for name, value in headers.items() if not isinstance(value, str)} or None
    if batch.ats is not None:
        found["enqueue_at"] = time_or_none(batch.ats[index])
    if batch.ttls is not None and (ttl := batch.ttls[index]):
        found["ttl"] = format_duration(ttl)
    if batch.origins is not None and (packed := batch.origins[index]) is not None:
        found["origin"] = _origin(packed)
    return kind(**found)


def _of(column: Sequence[Any] | None, index: int) -> Any:
    return None if column is None else column[index]


def _origin(packed: bytes) -> OriginReply:
    found = origin.decode(packed)
    return OriginReply(
        queue_name=found.queue,
        id=found.id,
        attempts=found.attempts,
        reason=found.reason,
        produced_at=time_or_none(found.produced_at),
        first_failed_at=time_or_none(found.first_failed_at),
        last_failed_at=time_or_none(found.last_failed_at),
        buried_at=time_or_none(found.buried_at),
    )


# -- lease -------------------------------------------------------------------------------------------


class LeaseBody(RequestShape):
    """A request for items to work on."""

    queue_name: QueueName
    client_id: Name = ""
    """A name for the consumer, shown by stats and explain."""
    batch_size: Limit = 1
    """The most items to lease."""
    request_timeout: Wait = 0.0
    """How long to wait until an item is ready."""
    lease_timeout: LeaseTime | None = None
    """How long the leases last; by default the lease timeout of the queue."""
    per_key: Limit = 1
    """How many consecutive items of one key may be leased together. They must be settled in order."""
    request_id: RequestName | None = None
    """A repetition with the same id gets the same leases. The header Idempotency-Key does the same."""


class LeaseReply(ReplyShape, kw_only=True):
    """The leased items; none when no item was ready in time."""

    queue_name: str
    items: list[LeasedItem]
    partition: int | None = None
    """The partition of the items, if all are of one."""


def leased_items(incarnation: int, results: Sequence[LeaseResult], wall: int) -> list[LeasedItem]:
    """The items of a lease that was answered at this wall time."""
    found: list[LeasedItem] = []
    for partition, granted, blocks, seconds in results:
        deadline = values.timestamp(wall + round(seconds * SECOND))
        for block in blocks:
            batch, produced = block.batch, values.timestamp(block.produced_at)
            for index, offset in enumerate(block.offsets):
                found.append(
                    _item(
                        LeasedItem,
                        partition,
                        offset,
                        batch,
                        index,
                        lease_token=format_token(Token(incarnation, partition, granted.lease, offset)),
                        lease_deadline=deadline,
                        attempts=granted.attempts.get(offset, 1),
                        produced_at=produced,
                    )
                )
    return found


def lease_reply(name: str, incarnation: int, results: Sequence[LeaseResult], wall: int) -> LeaseReply:
    partitions = {result.partition for result in results}
    return LeaseReply(
        queue_name=name,
        items=leased_items(incarnation, results, wall),
        partition=partitions.pop() if len(partitions) == 1 else None,
    )


# -- settle ------------------------------------------------------------------------------------------


class SettleBody(RequestShape):
    """Leased items to settle. A lease token is refused when its lease has ended; an id means the lease that holds the
    item now, whoever has it.
    """

    queue_name: QueueName
    ids: Annotated[list[IdOrToken], Meta(max_length=MAX_BATCH_ITEMS)] = field(default_factory=list)
    """Ids of items, or lease tokens."""
    lease_tokens: Annotated[list[TokenText], Meta(max_length=MAX_BATCH_ITEMS)] = field(default_factory=list)
    partition: PartitionNumber | None = None
    """Not needed, because ids and tokens name the partition; accepted for clients that send it."""
    request_timeout: Wait = 30.0
    request_id: RequestName | None = None
    """A repetition with the same id changes nothing and gets the same answer. Or the header Idempotency-Key."""


class FollowUpBody(RequestShape):
    """Items that are produced, exactly once, if and only if the items are completed."""

    queue_name: QueueName
    items: ItemBodies


class CompleteBody(SettleBody):
    """Items that are done. Completing an item again by its id or token succeeds."""

    then: list[FollowUpBody] = field(default_factory=list)
    """Follow-ups. All items must be of one lease then."""


class BuryBody(SettleBody):
    """Items that have failed for good. They go to the dead queue of the queue, or stay in it as buried."""

    reason: str = ""


class ExtendBody(SettleBody):
    """Items whose leases shall last longer."""

    lease_timeout: LeaseTime | None = None
    """From now; by default the duration for which they were leased."""


class RetryItemBody(RequestShape):
    """A leased item that failed. Give its lease token or its id."""

    schema_rules: ClassVar[dict[str, Any]] = {"anyOf": one_given("id", "lease_token")}
    id: IdOrToken | None = None
    lease_token: TokenText | None = None
    """Counts when the id is given too."""
    retry_at: Time | None = None
    """Not leased again before this time. A time in the past is now."""
    dead: bool = False
    """Bury it, however many attempts it has left."""


class RetryBody(RequestShape):
    """Items that failed and shall be leased again."""

    queue_name: QueueName
    items: Annotated[list[RetryItemBody], Meta(max_length=MAX_BATCH_ITEMS)]
    delay: Span = 0.0
    """How long items without `retry_at` wait before they can be leased again."""
    reason: str = ""
    counted: bool = True
    """Whether the attempt counts."""
    partition: PartitionNumber | None = None
    """Not needed, because ids and tokens name the partition; accepted for clients that send it."""
    request_timeout: Wait = 30.0
    request_id: RequestName | None = None
    """A repetition with the same id changes nothing and gets the same answer. Or the header Idempotency-Key."""


class ProgressBody(RequestShape, kw_only=True):
    """The progress of a leased item, which `explain` shows. Give its lease token or its id."""

    schema_rules: ClassVar[dict[str, Any]] = {"anyOf": one_given("id", "lease_token")}
    queue_name: QueueName
    id: IdOrToken | None = None
    lease_token: TokenText | None = None
    """Counts when the id is given too."""
    text: Name


class SettleReply(ReplyShape):
    """A result for each item, in their order: first those of `ids`. At least one item was settled, or none given."""

    items: list[ItemResult]


class ItemsProblem(Problem):
    """The body of an error that every item of the request met."""

    items: list[ItemResult] = field(default_factory=list)
    """The result of each item."""


# -- lists, and the log ------------------------------------------------------------------------------


class ItemsListBody(RequestShape):
    """Which items to list."""

    queue_name: QueueName
    partition: PartitionNumber | None = None
    """Only items of this partition."""
    pivot: ItemId | None = None
    """The id of the first item to list, or of one that would come before it."""
    limit: Limit = 100
    states: list[StateName] = field(default_factory=list)
    """Only items in these states; none for all."""


class ItemsListReply(ReplyShape):
    """A page of items, by partition and offset."""

    items: list[ListedItemReply]
    next_pivot: str | None = None
    """The pivot of the next page. The last page has no items and no pivot."""


class FindBody(RequestShape):
    """Which items to find. Give a key, a reference or both."""

    schema_rules: ClassVar[dict[str, Any]] = {"anyOf": one_given("key", "key_bytes", "reference")}
    queue_name: QueueName
    key: Key | None = None
    key_bytes: Base64 | None = None
    """The key in base64. Counts when `key` is given too."""
    reference: str | None = None
    pivot: ItemId | None = None
    """Where to go on: `next_pivot` of the reply before."""
    limit: Limit = 100
    states: list[StateName] = field(default_factory=list)
    """Only items in these states; none for all."""


class FindReply(ReplyShape):
    """The items that one step of the scan found, by partition and offset."""

    items: list[ListedItemReply]
    next_pivot: str | None = None
    """The pivot of the next step, also if this one found no items. The last one has none."""


def find_reply(found: FoundItems) -> FindReply:
    after = None if found.after is None else format_id(found.after[0], found.after[1] + 1)
    return FindReply(items=[listed_item(item) for item in found.items], next_pivot=after)


def listed_item(found: ListedItemData) -> ListedItemReply:
    return _item(
        ListedItemReply,
        found.partition,
        found.offset,
        found.batch,
        found.index,
        state=found.state,
        is_leased=found.state == "leased",
        attempts=found.attempts,
        created_at=values.timestamp(found.produced_at),
        lease_deadline=time_or_none(found.lease_ends_at),
        expire_deadline=time_or_none(found.expires_at),
        reason=found.reason or None,
    )


def items_list_reply(found: Sequence[ListedItemData]) -> ItemsListReply:
    after = format_id(found[-1].partition, found[-1].offset + 1) if found else None
    return ItemsListReply(items=[listed_item(item) for item in found], next_pivot=after)


class LogReadBody(RequestShape):
    """Where to read the log. Reading leases nothing and changes no item."""

    queue_name: QueueName
    offsets: PartitionOffsets = field(default_factory=dict)
    """The first offset to read, by partition; partitions that are left out are read from their oldest item on."""
    limit: Limit = 1_000
    wait: Wait = 0.0
    """How long to wait for items when there are none."""


class LogReadReply(ReplyShape):
    """Items in whatever state, each partition's in order, and where to read on."""

    items: list[LogItem]
    next_offsets: PartitionOffsets
    """By partition; give them as `offsets`."""


def log_read_reply(items: Sequence[tuple[int, Items]], next_offsets: Offsets) -> LogReadReply:
    found = [
        _item(LogItem, partition, start + index, batch, index, produced_at=values.timestamp(produced_at))
        for partition, (start, batch, produced_at) in items
        for index in range(len(batch))
    ]
    return LogReadReply(items=found, next_offsets=next_offsets)


class LogOffsetsBody(RequestShape):
    """A place in the log."""

    queue_name: QueueName
    at: LogPosition
    """`oldest` for the oldest retained items, `newest` for the end, or a time for the first items since then."""


class LogOffsetsReply(ReplyShape):
    offsets: PartitionOffsets
    """By partition."""
