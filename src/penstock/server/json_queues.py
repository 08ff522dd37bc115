"""The JSON shapes of queues: create, update, list, describe and count them.

Owns: these shapes, and their conversion to the options of the catalog and from reports. Field names are those of
Querator's API where the idea is the same (docs/http.md). The docstrings of fields are the descriptions in the OpenAPI
document.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType, field

from penstock.reports import PartitionStats, QueueDescription, QueueStats
from penstock.rules.options import MOST
from penstock.server.json_values import (
    DurationText,
    LeaseTime,
    Lifetime,
    Limit,
    PartitionCount,
    QueueName,
    QueueNameOrNone,
    ReplyShape,
    RequestShape,
    Span,
    Wait,
    format_duration,
    lease_microseconds,
    to_microseconds,
)
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import (
    MAX_ATTEMPTS,
    MAX_COMPRESSION_LEVEL,
    MAX_COMPRESSION_MIN_BYTES,
    MAX_SEGMENT_AGE,
    MAX_SEGMENT_BYTES,
    MAX_SYNC_INTERVAL,
    MIN_SEGMENT_AGE,
    MIN_SEGMENT_BYTES,
    MIN_SYNC_INTERVAL,
)

OnBury = Literal["release", "park"]
Durability = Literal["fsync", "interval", "os"]
SyncInterval: TypeAlias = DurationText | Annotated[float, Meta(ge=MIN_SYNC_INTERVAL / SECOND, le=MAX_SYNC_INTERVAL / SECOND)]
SegmentAge: TypeAlias = DurationText | Annotated[float, Meta(ge=MIN_SEGMENT_AGE / SECOND, le=MAX_SEGMENT_AGE / SECOND)]
SegmentSize: TypeAlias = Annotated[int, Meta(ge=MIN_SEGMENT_BYTES, le=MAX_SEGMENT_BYTES)]
CompressionLevel: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COMPRESSION_LEVEL)]
CompressedSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COMPRESSION_MIN_BYTES)]
Amount = Annotated[int, Meta(ge=0, le=MOST)]

# -- queues ------------------------------------------------------------------------------------------


class QueueBody(RequestShape):
    """A queue by its name."""

    queue_name: QueueName


class RetentionBody(RequestShape):
    """How long completed and buried items are kept. The limit that is reached first counts; 0 is no limit."""

    max_age: Span | UnsetType = UNSET
    """Since the item was produced."""
    max_bytes: Amount | UnsetType = UNSET
    """The size of each partition's log."""
    max_segments: Annotated[int, Meta(ge=0, le=1 << 30)] | UnsetType = UNSET
    """The number of log files of each partition."""
    min_segments: Annotated[int, Meta(ge=1, le=1 << 30)] | UnsetType = UNSET
    """The newest log files of each partition, which are kept whatever the limits say."""


class OptionsBody(QueueBody):
    """A queue and its options. An option that is left out has its default, or does not change."""

    requested_partitions: PartitionCount | UnsetType = UNSET
    reference: Annotated[str, Meta(extra_json_schema={"maxLength": 0})] = ""
    """Always empty: a queue of Penstock has none."""
    dead_queue: QueueNameOrNone | UnsetType | None = UNSET
    """The queue to which buried items move; none for null or an empty text."""
    lease_timeout: LeaseTime | UnsetType = UNSET
    """How long a lease lasts unless it is extended."""
    expire_timeout: Span | UnsetType | None = UNSET
    """An item that still waits this long after it was produced is buried; never for null or 0."""
    max_attempts: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] | UnsetType = UNSET
    """How often an item may be attempted before it is buried; 0 is no limit."""
    priority_aging: Span | UnsetType | None = UNSET
    """After each such duration a waiting item counts as one priority higher; never for null or 0."""
    dedup_window: Lifetime | UnsetType = UNSET
    """How long a dedup id is remembered."""
    on_bury: OnBury | UnsetType = UNSET
    """Whether the later items of the key of a buried item can be leased, or wait."""
    retention: RetentionBody | UnsetType = UNSET
    max_items: Amount | UnsetType | None = UNSET
    """With this many items that are neither completed nor buried, produce waits for room; no limit for null or 0."""
    max_bytes: Amount | UnsetType | None = UNSET
    """As `max_items`, but for the size of those items."""
    durability: Durability | UnsetType | None = UNSET
    """When a write counts as stored; as the broker for null. It cannot be changed later."""
    sync_interval: SyncInterval | UnsetType | None = UNSET
    """With durability `interval`, the longest time until what was answered is on disk; 200ms for null."""
    segment_bytes: SegmentSize | UnsetType | None = UNSET
    """The size at which a log file is closed and the next one begun; as the broker for null."""
    segment_age: SegmentAge | UnsetType | None = UNSET
    """The age at which a log file is closed; 1 day for null."""
    compression: bool | UnsetType | None = UNSET
    """Whether items are compressed where that saves space; as the broker for null."""
    compression_level: CompressionLevel | UnsetType | None = UNSET
    """The level of zstd: 1 is the quickest, 19 makes the smallest files; 1 for null."""
    compression_min_bytes: CompressedSize | UnsetType | None = UNSET
    """Items that are written together are compressed if they have so many bytes; 512 for null."""


class CreateBody(OptionsBody):
    """A queue to create."""

    exist_ok: bool = False
    """Whether an existing queue of that name is fine, if it has every option that is given here. It may have another
    number of partitions."""


class EnsureBody(OptionsBody):
    """A queue to create, or to change if it exists."""

    resize: bool = False
    """Whether an existing queue gets `requested_partitions`; otherwise it keeps the partitions that it has."""


class ListBody(RequestShape):
    """Which queues to list."""

    pivot: str = ""
    """The name of the first queue to list, or a text that would come before it."""
    limit: Limit = 100
    prefix: str = ""
    """Only queues whose names begin with it."""


class DeleteBody(QueueBody):
    """A queue to delete, with its items and files."""

    force: bool = False
    """Delete it even if it has items that are not completed."""
    request_timeout: Wait = 30.0
    """How long to wait until no item is on its way to or from the queue."""


class PartitionReply(ReplyShape):
    partition: int
    state: Literal["active", "retired", "read_only"]
    """A retired or read-only partition takes no new items; those that it has are still handled."""


class RetentionReply(ReplyShape):
    max_age: str
    max_bytes: int
    max_segments: int
    min_segments: int


class QueueReply(ReplyShape, kw_only=True):
    """A queue and its options."""

    queue_name: str
    incarnation: str
    """A random number that the queue got when it was created, in hexadecimal digits."""
    created_at: datetime
    requested_partitions: int
    partitions: list[PartitionReply]
    dead_queue: str | None = None
    lease_timeout: str
    expire_timeout: str | None = None
    max_attempts: int
    priority_aging: str | None = None
    dedup_window: str
    on_bury: OnBury
    retention: RetentionReply
    max_items: int | None = None
    max_bytes: int | None = None
    durability: Durability | None = None
    sync_interval: str | None = None
    segment_bytes: int | None = None
    segment_age: str | None = None
    compression: bool | None = None
    compression_level: int | None = None
    compression_min_bytes: int | None = None


class QueuesReply(ReplyShape):
    """A page of queues, by name."""

    items: list[QueueReply]
    next_pivot: str | None = None
    """The pivot of the next page. The last page has no queues and no pivot."""


def to_options(body: OptionsBody) -> dict[str, Any]:
    """The options that are given, as the catalog takes them; the number of partitions is not one of them."""
    found: dict[str, Any] = {}
    if body.reference:
        raise InvalidRequest("a queue has no reference here; leave it out")
    if body.lease_timeout is not UNSET:
        found["lease_timeout"] = lease_microseconds(body.lease_timeout)
    if body.dedup_window is not UNSET:
        found["dedup_window"] = to_microseconds(body.dedup_window, "dedup_window", low=1)
    if body.expire_timeout is not UNSET:
        found["ttl"] = to_microseconds(0.0 if body.expire_timeout is None else body.expire_timeout, "expire_timeout")
    if body.priority_aging is not UNSET:
        found["priority_aging"] = to_microseconds(0.0 if body.priority_aging is None else body.priority_aging, "priority_aging")
    if body.retention is not UNSET:
        kept = {name: given for name in RetentionBody.__struct_fields__ if (given := getattr(body.retention, name)) is not UNSET}
        found["retention"] = {name: to_microseconds(given, name) if name == "max_age" else given for name, given in kept.items()}
    for name, missing in (("dead_queue", ""), ("max_items", 0), ("max_bytes", 0), ("durability", "")):
        if (given := getattr(body, name)) is not UNSET:
            found[name] = given or missing
    for name, low, high in (
        ("sync_interval", MIN_SYNC_INTERVAL, MAX_SYNC_INTERVAL),
        ("segment_age", MIN_SEGMENT_AGE, MAX_SEGMENT_AGE),
    ):
        if (given := getattr(body, name)) is not UNSET:
            found[name] = 0 if given is None else to_microseconds(given, name, low, high)
    if body.compression is not UNSET:
        found["compression"] = "" if body.compression is None else "on" if body.compression else "off"
    for name in ("segment_bytes", "compression_level", "compression_min_bytes"):
        if (given := getattr(body, name)) is not UNSET:
            found[name] = given or 0
    for name in ("max_attempts", "on_bury"):
        if (given := getattr(body, name)) is not UNSET:
            found[name] = given
    return found


def queue_reply(found: QueueDescription) -> QueueReply:
    options, policy, storage = found.options, found.options.policy, found.options.storage
    kept = policy.retention
    states = {**dict.fromkeys(found.active, "active"), **dict.fromkeys(found.retired, "retired")}
    states |= dict.fromkeys(found.read_only, "read_only")
    return QueueReply(
        queue_name=found.name,
        incarnation=f"{found.incarnation:016x}",
        created_at=values.timestamp(found.created_at),
        requested_partitions=found.partitions,
        partitions=[PartitionReply(number, states[number]) for number in sorted(states)],  # type: ignore[arg-type]
        dead_queue=options.dead_queue or None,
        lease_timeout=format_duration(policy.lease_timeout),
        expire_timeout=format_duration(policy.ttl) if policy.ttl else None,
        max_attempts=policy.max_attempts,
        priority_aging=format_duration(policy.priority_aging) if policy.priority_aging else None,
        dedup_window=format_duration(policy.dedup_window),
        on_bury=policy.on_bury,
        retention=RetentionReply(format_duration(kept.max_age), kept.max_bytes, kept.max_segments, kept.min_segments),
        max_items=options.max_items or None,
        max_bytes=options.max_bytes or None,
        durability=options.durability or None,
        sync_interval=format_duration(options.sync_interval) if options.sync_interval else None,
        segment_bytes=storage.segment_bytes,
        segment_age=format_duration(options.segment_age) if options.segment_age else None,
        compression=storage.compression,
        compression_level=storage.compression_level,
        compression_min_bytes=storage.compression_min_bytes,
    )


def before_name(pivot: str) -> str:
    """A text after which the first queue name is `pivot` or, if there is no such queue, the next one."""
    if not pivot.isascii() or not pivot.isprintable():  # it is no name
        return pivot
    return pivot and pivot[:-1] + chr(ord(pivot[-1]) - 1) + "\x7f"  # no name has this character


def queues_reply(found: list[QueueDescription]) -> QueuesReply:
    after = f"{found[-1].name}-" if found else None  # of the characters in names, "-" is the first
    return QueuesReply([queue_reply(one) for one in found], after)


# -- counts ------------------------------------------------------------------------------------------


class PartitionStatsReply(ReplyShape):
    """The counts of one partition."""

    partition: int
    status: str
    """`active`, `draining`, `drained`, `slow` or `failing`."""
    total: int
    """Items that are not completed."""
    total_leased: int
    ready: int
    scheduled: int
    """Items that wait for their time, or for their next attempt."""
    buried: int
    moving: int
    """Items on their way to another partition or queue."""
    completed: int
    produced: int
    """Items ever produced."""
    oldest_ready_seconds: float
    busy_keys: int
    size_bytes: int
    paused_lease: bool
    paused_produce: bool
    lost: int = 0
    """Items lost to damage."""
    buried_dropped: int = 0
    """Buried items that retention has ever deleted."""
    buried_to_drop: int = 0
    """Buried items that retention will delete soon."""
    buried_drop_seconds: float = 0.0
    """Time until it deletes the first of those."""
    cancelled: int = 0
    """Cancelled items that retention has not deleted yet."""
    error: str = ""
    notes: list[str] = field(default_factory=list)


class LogicalQueueReply(ReplyShape):
    """All partitions. A queue of Penstock is one logical queue."""

    produce_waiting: int
    """Producers that wait for room."""
    lease_waiting: int
    """Consumers that wait for items."""
    partitions: list[PartitionStatsReply]


class FenceReply(ReplyShape):
    """A part of an unfinished resize: keys of one partition that wait for another partition."""

    partition: int
    waits_for: int
    slots: int
    keys: int


class StatsReply(ReplyShape):
    """The present counts of a queue."""

    queue_name: str
    ready: int
    scheduled: int
    leased: int
    completed: int
    buried: int
    moving: int
    produced: int
    consumers: dict[str, int]
    """How many items are leased by each consumer."""
    logical_queues: list[LogicalQueueReply]
    resizing: list[FenceReply] = field(default_factory=list)
    transfers: int = 0
    """Batches of items on their way to other partitions or queues."""
    buried_dropped: int = 0
    """Buried items that retention has ever deleted."""
    holder: str = ""
    """The consumer that alone may lease from the queue."""
    cancelled: int = 0
    """Cancelled items that retention has not deleted yet."""
    warnings: list[str] = field(default_factory=list)


def _partition_stats(found: PartitionStats) -> PartitionStatsReply:
    same = {name: getattr(found, name) for name in PartitionStatsReply.__struct_fields__ if hasattr(found, name)}
    unresolved = found.ready + found.scheduled + found.leased + found.moving
    return PartitionStatsReply(total=unresolved + found.buried, total_leased=found.leased, **same)


def stats_reply(found: QueueStats) -> StatsReply:
    return StatsReply(
        found.name,
        found.ready,
        found.scheduled,
        found.leased,
        found.completed,
        found.buried,
        found.moving,
        found.produced,
        found.consumers,
        [LogicalQueueReply(found.waiting_producers, found.waiting_consumers, [_partition_stats(one) for one in found.partitions])],
        [FenceReply(one.partition, one.waits_for, one.slots, one.keys) for one in found.resizing],
        found.transfers,
        found.buried_dropped,
        found.holder,
        found.cancelled,
        found.warnings,
    )
