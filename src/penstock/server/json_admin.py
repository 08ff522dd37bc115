"""The JSON shapes of administration: single items, pause, clear, redrive, keys, cursors, and the broker itself.

Owns: these shapes, and the shapes of reports. Field names are those of Querator's API where the idea is the same
(docs/http.md). The docstrings of fields are the descriptions in the OpenAPI document.
"""

from datetime import datetime
from typing import Any, ClassVar, Literal

from msgspec import UNSET, UnsetType, field

from penstock.loop.retention import RetentionResult
from penstock.reports import HeldKey, ItemChange, ItemEvent, ItemExplanation, OwnerDescription
from penstock.server.json_queues import QueueBody
from penstock.server.json_values import (
    Base64,
    CursorName,
    ItemId,
    ItemIds,
    Key,
    Limit,
    PartitionCount,
    PartitionNumber,
    PartitionOffsets,
    QueueName,
    ReplyShape,
    RequestShape,
    Span,
    Time,
    one_given,
    one_true,
    text_or_bytes,
)
from penstock.words import values
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_BATCH_ITEMS

# -- one item ----------------------------------------------------------------------------------------


class ItemIdBody(QueueBody):
    """An item by its id."""

    id: ItemId


class ExplainReply(ReplyShape):
    """The state of an item, and why it is not being handled."""

    id: str
    queue_name: str
    """The queue in which it is now."""
    state: str
    why: str
    attempts: int = 0
    client_id: str = ""
    """The consumer that has leased it."""
    ready_in_seconds: float | None = None
    held_by: str = ""
    """The id of the item that holds its key."""
    reason: str = ""
    """Why it was buried or last retried."""


def explain_reply(found: ItemExplanation) -> ExplainReply:
    return ExplainReply(
        found.id,
        found.queue,
        found.state,
        found.why,
        found.attempts,
        found.consumer,
        found.ready_in_seconds,
        found.held_by,
        found.reason,
    )


class EventReply(ReplyShape):
    """Something that happened to an item, in the queue in which it was then."""

    event: str
    """`produced`, `leased`, `completed`, …"""
    queue_name: str
    id: str
    at: datetime
    attempt: int = 0
    reason: str = ""
    client_id: str = ""
    destination: str = ""
    """Where it was sent: `<queue>/<partition>`; after its arrival `<queue>/<id>`."""
    source: str = ""
    """Where it came from: `<queue>/<partition>`."""


class HistoryReply(ReplyShape):
    """All events of an item that retention has kept, oldest first."""

    events: list[EventReply]


def history_reply(found: list[ItemEvent]) -> HistoryReply:
    return HistoryReply(
        [
            EventReply(one.event, one.queue, one.id, one.at, one.attempt, one.reason, one.consumer, one.destination, one.source)
            for one in found
        ]
    )


# -- administration ----------------------------------------------------------------------------------


class EmptyReply(ReplyShape):
    """It is done."""


class CountReply(ReplyShape):
    """How many items were changed."""

    items: int


class PauseBody(QueueBody):
    """What to pause or resume: at least one of the two."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "not": {"required": ["lease", "produce"], "properties": {"lease": {"const": False}, "produce": {"const": False}}}
    }
    lease: bool = True
    """Leasing."""
    produce: bool = True
    """Producing."""
    partition: PartitionNumber | None = None
    """Only this partition."""


class ResizeBody(QueueBody):
    """A new number of partitions."""

    requested_partitions: PartitionCount


class ReadOnlyBody(QueueBody):
    """A partition that shall take no new items, or take them again."""

    partition: PartitionNumber
    read_only: bool = True


class PartitionBody(QueueBody):
    """A queue, or one of its partitions."""

    partition: PartitionNumber | None = None
    """Only this partition."""


class ClearBody(PartitionBody):
    """Which items to complete without handling them. Name at least one state."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "anyOf": one_true("queue", "scheduled", "buried"),
        "not": {
            "required": ["retry"],
            "properties": {"retry": {"const": True}, "scheduled": {"not": {"const": True}}},
        },
    }
    queue: bool = False
    """Items that are ready."""
    scheduled: bool = False
    """Items that wait for their time or for their next attempt."""
    retry: bool = False
    """Items that wait for their next attempt. They can only be cleared together with all scheduled ones."""
    buried: bool = False
    destructive: bool = False
    """With `queue`: leased items too; their leases end."""


def states_to_clear(body: ClearBody) -> list[Literal["ready", "scheduled", "leased", "buried"]]:
    found: list[Literal["ready", "scheduled", "leased", "buried"]] = []
    if body.queue:
        found.append("ready")
        if body.destructive:
            found.append("leased")
    if body.scheduled:
        found.append("scheduled")
    elif body.retry:
        raise InvalidRequest("items that wait for a retry cannot be cleared without the other scheduled ones; give scheduled as well")
    if body.buried:
        found.append("buried")
    if not found:
        raise InvalidRequest("there is nothing to clear; give queue, scheduled or buried as true")
    return found


class SeekBody(QueueBody):
    """Completed items that shall be ready again, or waiting ones to skip. Give an id or a time."""

    schema_rules: ClassVar[dict[str, Any]] = {"oneOf": one_given("id", "at")}
    id: ItemId | None = None
    """The items of this item's partition, from this item on."""
    at: Time | None = None
    """The items of all partitions that were produced at this time or later."""
    skip: bool = False
    """Complete the ready and scheduled items before that point instead, without handling them."""


class RedriveFilter(RequestShape):
    """What an item must have to be moved; null: that it has no such value."""

    kind: str | UnsetType | None = UNSET
    key: str | UnsetType | None = UNSET
    reference: str | UnsetType | None = UNSET
    encoding: str | UnsetType | None = UNSET
    reason: str | UnsetType = UNSET
    """Why it was buried or last retried."""
    state: Literal["ready", "scheduled", "buried"] | UnsetType = UNSET
    origin_queue: str | UnsetType | None = UNSET
    headers: dict[str, str | None] = field(default_factory=dict)

    def conditions(self) -> dict[str, Any]:
        """The argument `where` of `broker.redrive`."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name != "headers"}
        found = {name: value for name, value in given.items() if value is not UNSET}
        return found | {f"headers.{name}": value for name, value in self.headers.items()}


class RedriveBody(QueueBody):
    """Ready, scheduled and buried items to move to another queue; or buried ones to make ready in the same queue."""

    to: QueueName
    where: RedriveFilter | None = None
    """Which items; by default all."""
    limit: Limit = MAX_BATCH_ITEMS
    """The most items to move; repeat the call for more."""
    preview: bool = False
    """Move nothing; tell how many items would be moved, and describe the first 100 of them."""


class RedriveSampleReply(ReplyShape):
    """An item that a redrive would move."""

    id: ItemId
    state: Literal["ready", "scheduled", "buried"]
    attempts: int
    """How often it was tried, in the queue where it was buried."""
    produced_at: datetime
    size_bytes: int
    """The size of its payload."""
    payload: str
    """The first 200 characters of its payload if that is text, else "0x" and the first 100 bytes in hexadecimal."""
    key: str | None = None
    kind: str | None = None
    reason: str = ""
    """Why it was buried or last retried, in this queue or in the one that it came from."""
    origin_queue: str | None = None
    """The queue that it came from."""
    buried_at: datetime | None = None


class RedriveReply(ReplyShape):
    items: int
    """How many were moved, or would be. Fewer than there are ids, if some were leased or completed meanwhile."""
    ids: list[str]
    """The items that were chosen; in a preview those of `sample`."""
    sample: list[RedriveSampleReply] = field(default_factory=list)
    """In a preview: the first items that would be moved."""


class CompactReply(ReplyShape):
    """What was deleted and rewritten."""

    segments: int
    """Deleted log files."""
    rewritten: int
    items: int
    """Deleted items, all of them completed or buried."""
    size_bytes: int
    """How much was freed."""
    buried: int


def compact_reply(found: list[RetentionResult]) -> CompactReply:
    totals: list[int] = [sum(column) for column in zip(*found, strict=True)]
    return CompactReply(*totals)


# -- waiting items -----------------------------------------------------------------------------------


class CancelBody(QueueBody):
    """Items that shall not be handled, by their ids."""

    ids: ItemIds


class RescheduleBody(QueueBody):
    """Items that shall be handled at another time, by their ids. Give `at` or `delay`."""

    schema_rules: ClassVar[dict[str, Any]] = {"oneOf": one_given("at", "delay")}
    ids: ItemIds
    at: Time | None = None
    """They are not leased before this time. A time in the past is now."""
    delay: Span | None = None
    """The same as a duration from now; 0 is now."""


class ItemChangeReply(ReplyShape):
    """What became of one item."""

    id: str
    outcome: str
    """`cancelled` or `rescheduled` if it was; else why not: `leased`, `completed`, `already cancelled`, `buried`,
    `moving` (on its way to another queue or partition: try again), `moved` (to another queue), or `not found`."""


class ItemChangesReply(ReplyShape):
    """What became of each item, in the order of the ids."""

    items: list[ItemChangeReply]


def item_changes_reply(found: list[ItemChange]) -> ItemChangesReply:
    return ItemChangesReply([ItemChangeReply(one.id, one.outcome) for one in found])


# -- keys and cursors --------------------------------------------------------------------------------


class HeldKeysBody(QueueBody):
    """How many keys to list."""

    limit: Limit = 100


class HeldKeyReply(ReplyShape, kw_only=True):
    """A key that is not free."""

    key: str | None = None
    key_bytes: Base64 | None = None
    """The key, when it is not text."""
    partition: int
    why: str
    """`leased`, `backing off`, `parked`, `fenced` or `waiting`."""
    item: str
    """The id of the item that holds the key, or else of the first that waits."""
    waiting: int


class HeldKeysReply(ReplyShape):
    keys: list[HeldKeyReply]


def held_keys_reply(found: list[HeldKey]) -> HeldKeysReply:
    keys = [(*text_or_bytes(one.key), one) for one in found]
    return HeldKeysReply(
        [
            HeldKeyReply(key=text, key_bytes=raw, partition=one.partition, why=one.why, item=one.item, waiting=one.waiting)
            for text, raw, one in keys
        ]
    )


class KeyBody(QueueBody):
    """A parked key. Give it as text or in base64."""

    schema_rules: ClassVar[dict[str, Any]] = {"anyOf": one_given("key", "key_bytes")}
    key: Key | None = None
    key_bytes: Base64 | None = None


class CursorReply(ReplyShape):
    name: str
    offsets: PartitionOffsets
    """The next offset to read, by partition."""
    lag: int
    """Items that are kept and that it has not read."""


class CursorsReply(ReplyShape):
    cursors: list[CursorReply]


class MoveCursorBody(QueueBody):
    """A reading position to save. Retention keeps the items that a cursor has not read."""

    name: CursorName
    offsets: PartitionOffsets
    """The next offset to read, by partition; partitions that are left out do not change."""
    forward_only: bool = False
    """Whether a cursor that is further already stays where it is."""


class CursorBody(QueueBody):
    """A cursor to delete."""

    name: CursorName


# -- the broker --------------------------------------------------------------------------------------


class NothingBody(RequestShape):
    """No fields."""


class ClientReply(ReplyShape):
    """A process that uses the broker through its owner."""

    pid: int
    name: str
    since: datetime
    calls: int
    """How many of its calls wait for their answers."""


class BrokerReply(ReplyShape):
    """The process that owns the broker."""

    pid: int
    host: str
    since: datetime
    clients: list[ClientReply]


def broker_reply(found: OwnerDescription) -> BrokerReply:
    clients = [ClientReply(one.pid, one.name, values.timestamp(one.since), one.calls) for one in found.clients]
    return BrokerReply(found.pid, found.host, values.timestamp(found.since), clients)
