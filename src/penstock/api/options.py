"""The options of a queue as callers give and get them: durations in seconds, None for "none".

Owns: `QueueOptions` and `RetentionOptions` (arguments), `QueueInfo` (result), and their conversion to and from the
options of the catalog, which are microseconds and 0. An option that is left out is not sent: a new queue uses its
default, an existing one keeps it.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal, TypedDict

import msgspec

from penstock import reports
from penstock.api.arguments import NamedQueue, Seconds, bounded_duration, check_flag, queue_name
from penstock.rules.options import OPTION_NAMES
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import (
    MAX_COMPRESSION_LEVEL,
    MAX_COMPRESSION_MIN_BYTES,
    MAX_DELAY,
    MAX_LEASE_TIMEOUT,
    MAX_SEGMENT_AGE,
    MAX_SEGMENT_BYTES,
    MAX_SYNC_INTERVAL,
    MIN_LEASE_TIMEOUT,
    MIN_SEGMENT_AGE,
    MIN_SEGMENT_BYTES,
    MIN_SYNC_INTERVAL,
    Retention,
    check_range,
)


class RetentionOptions(TypedDict, total=False):
    """How long completed and buried items are kept. The limit that is reached first applies; 0 is no limit."""

    max_age: Seconds
    """Since the item was produced. Default: 1 day."""
    max_bytes: int
    """The size of each partition's log. Default: 1 GiB."""
    max_segments: int
    """The number of log files of each partition. Default: 0."""
    min_segments: int
    """The newest log files of each partition that are kept whatever the limits say. Default: 1."""


class QueueOptions(TypedDict, total=False):
    """The options of a queue, for `broker.create_queue` and `queue.update`. Durations are seconds or a timedelta."""

    lease_timeout: Seconds
    """How long a lease lasts unless it is extended, 1 second to 12 hours. Default: 60 seconds."""
    max_attempts: int
    """How many times an item may be attempted before it is buried; 0 is no limit. Default: 10."""
    ttl: Seconds | None
    """An item that still waits this long after it was produced is buried. Default: None, no limit."""
    priority_aging: Seconds | None
    """After each such duration, a waiting item counts as one priority higher. None: never. Default: 60 seconds."""
    dedup_window: Seconds
    """How long a dedup id is remembered. Default: 300 seconds."""
    on_bury: Literal["release", "park"]
    """What happens to the later items of a key when an item of it is buried. "release" (default): they can be leased.
    "park": they wait until the buried item is redriven or cleared, or `queue.release` is called with the key."""
    retention: "RetentionOptions | Seconds"
    """How long completed and buried items are kept, see `RetentionOptions`. A single duration sets `max_age`."""
    dead_queue: str | NamedQueue | None
    """The queue, by name or as a Queue, to which buried items move. Default: None, they stay in this queue."""
    max_items: int | None
    """With this many items that are neither completed nor buried, `produce` waits for room. Default: None, no limit."""
    max_bytes: int | None
    """Like `max_items`, but for the size of those items. It is measured by log file, so it is approximate."""
    durability: Literal["fsync", "interval", "os"] | None
    """When a write counts as stored, see `penstock.open`. Default: None, as the broker. Cannot be changed later."""
    sync_interval: Seconds | None
    """In durability mode "interval", the longest time until what was answered is on disk, 1 millisecond to 1 hour: a
    power cut may lose so much. None (default): 0.2 seconds. It has no effect in the other modes."""
    segment_bytes: int | None
    """The size at which a log file is closed and the next one begun, 4 KiB to 1 TiB. Default: None, as the broker."""
    segment_age: Seconds | None
    """The age at which a log file with items is closed, 1 second to 365 days; earlier if `retention` needs it.
    None (default): 1 day."""
    compression: bool | None
    """Whether items are compressed where that saves space. Default: None, as the broker."""
    compression_level: int | None
    """The level of zstd: 1 is the quickest, 19 makes the smallest files. None (default): 1."""
    compression_min_bytes: int | None
    """The items that are written together are compressed if they have at least so many bytes. None (default): 512."""


class QueueInfo(msgspec.Struct, frozen=True):
    """A queue's partitions, and its options as `create_queue` takes them. Durations are seconds."""

    name: str
    incarnation: str
    """A random number given to the queue at its creation, in hexadecimal digits."""
    created_at: datetime
    partitions: int
    active: list[int]
    """Partitions that take new items."""
    retired: list[int]
    """Partitions that take no new items, because of a resize or `set_read_only`. Their items are still handled."""
    read_only: list[int]
    """The retired partitions that `set_read_only` retired."""
    lease_timeout: float
    max_attempts: int
    ttl: float | None
    priority_aging: float | None
    dedup_window: float
    on_bury: str
    retention: RetentionOptions
    dead_queue: str | None
    max_items: int | None
    max_bytes: int | None
    durability: str | None
    sync_interval: float | None = None
    segment_bytes: int | None = None
    segment_age: float | None = None
    compression: bool | None = None
    compression_level: int | None = None
    compression_min_bytes: int | None = None


def queue_info(found: reports.QueueDescription) -> QueueInfo:
    """The `QueueInfo` of a queue that the catalog describes."""
    options, policy, storage = found.options, found.options.policy, found.options.storage
    kept = policy.retention
    return QueueInfo(
        name=found.name,
        incarnation=f"{found.incarnation:016x}",
        created_at=values.timestamp(found.created_at),
        partitions=found.partitions,
        active=list(found.active),
        retired=list(found.retired),
        read_only=list(found.read_only),
        lease_timeout=policy.lease_timeout / SECOND,
        max_attempts=policy.max_attempts,
        ttl=policy.ttl / SECOND or None,
        priority_aging=policy.priority_aging / SECOND or None,
        dedup_window=policy.dedup_window / SECOND,
        on_bury=policy.on_bury,
        retention=RetentionOptions(
            max_age=kept.max_age / SECOND, max_bytes=kept.max_bytes, max_segments=kept.max_segments, min_segments=kept.min_segments
        ),
        dead_queue=options.dead_queue or None,
        max_items=options.max_items or None,
        max_bytes=options.max_bytes or None,
        durability=options.durability or None,
        sync_interval=options.sync_interval / SECOND or None,
        segment_bytes=storage.segment_bytes,
        segment_age=options.segment_age / SECOND or None,
        compression=storage.compression,
        compression_level=storage.compression_level,
        compression_min_bytes=storage.compression_min_bytes,
    )


def to_catalog(given: Mapping[str, Any]) -> dict[str, object]:
    """The options as the catalog takes them: microseconds, and 0 or "" for None."""
    unknown = [name for name in given if name not in OPTION_NAMES]
    if "partitions" in unknown:
        raise InvalidRequest("partitions is not changed by update; use resize")
    if unknown:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; the options are {', '.join(OPTION_NAMES)}")
    return {name: _READ[name](value) if name in _READ else value for name, value in given.items()}


def _lease_timeout(given: Seconds) -> int:
    return bounded_duration(given, "lease_timeout", MIN_LEASE_TIMEOUT, MAX_LEASE_TIMEOUT)


def _dedup_window(given: Seconds) -> int:
    found = bounded_duration(given, "dedup_window")
    if not found:
        raise InvalidRequest("dedup_window is 0; give more, or leave it out")
    return found


def _retention(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {"max_age": bounded_duration(given, "retention")}
    names = Retention.__struct_fields__
    unknown = [name for name in given if name not in names]
    if unknown:
        raise InvalidRequest(f"retention has no {unknown[0]!r}; give any of {', '.join(names)}")
    return {name: bounded_duration(value, "max_age") if name == "max_age" else value for name, value in given.items()}


def _or_none(name: str, low: int = 0, high: int = MAX_DELAY) -> Callable[[Seconds | None], int]:
    return lambda given: 0 if given is None else bounded_duration(given, name, low, high)


def _number_or_none(name: str, low: int, high: int) -> Callable[[int | None], int]:
    return lambda given: 0 if given is None else check_range(name, given, low, high)


def _compression(given: bool | None) -> str:
    return "" if given is None else "on" if check_flag("compression", given) else "off"


_READ: dict[str, Callable[[Any], Any]] = {
    "lease_timeout": _lease_timeout,
    "ttl": _or_none("ttl"),
    "priority_aging": _or_none("priority_aging"),
    "dedup_window": _dedup_window,
    "retention": _retention,
    "dead_queue": lambda given: "" if given is None else queue_name(given),
    "max_items": lambda given: 0 if given is None else given,
    "max_bytes": lambda given: 0 if given is None else given,
    "durability": lambda given: "" if given is None else given,
    "sync_interval": _or_none("sync_interval", MIN_SYNC_INTERVAL, MAX_SYNC_INTERVAL),
    "segment_bytes": _number_or_none("segment_bytes", MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES),
    "segment_age": _or_none("segment_age", MIN_SEGMENT_AGE, MAX_SEGMENT_AGE),
    "compression": _compression,
    "compression_level": _number_or_none("compression_level", 1, MAX_COMPRESSION_LEVEL),
    "compression_min_bytes": _number_or_none("compression_min_bytes", 1, MAX_COMPRESSION_MIN_BYTES),
}
