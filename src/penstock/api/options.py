"""A queue's options as callers name them: in seconds, with None for "none".

Owns: `QueueOptions` and `RetentionOptions` (what may be given), `QueueInfo` (what is told), and the way between them and the catalog's
numbers. What is not given is not passed on: a new queue has the default, an old one stays as it is.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal, TypedDict

import msgspec

from penstock import reports
from penstock.api.arguments import NamedQueue, Seconds, bounded_duration, queue_name
from penstock.rules.options import OPTION_NAMES
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_LEASE_TIMEOUT, MIN_LEASE_TIMEOUT, Retention


class RetentionOptions(TypedDict, total=False):
    """How long completed items are kept; whichever limit is reached first counts, and 0 is no limit."""

    max_age: Seconds
    max_bytes: int
    """Of a partition's log."""
    max_segments: int
    min_segments: int
    """So many of the newest segment files stay whatever the limits say."""


class QueueOptions(TypedDict, total=False):
    """What may be chosen for a queue. Times are seconds or a timedelta."""

    lease_timeout: Seconds
    """How long a consumer may work on an item before it is given to another: 60 s unless given, 1 s to 12 h."""
    max_attempts: int
    """How often an item is leased before it is given up: 10 unless given, 0 is endless."""
    ttl: Seconds | None
    """How long an item may wait before it is given up; None is for ever."""
    priority_aging: Seconds | None
    """An item that has waited so long counts as one priority step higher: 60 s unless given; None switches it off."""
    dedup_window: Seconds
    """How long dedup ids are remembered: 300 s unless given."""
    on_bury: Literal["release", "park"]
    """What becomes of the key of an item that is given up: it goes on, or is parked until the item is redriven or cleared."""
    retention: "RetentionOptions | Seconds"
    """How long completed items are kept to be read again: a day and at most 1 GiB a partition unless given; a time alone is max_age."""
    dead_queue: str | NamedQueue | None
    """Where items go that are given up: the name of a queue, or the Queue; None keeps them here, buried."""
    max_items: int | None
    """A queue with so many unresolved items makes `produce` wait; None is no limit."""
    max_bytes: int | None
    durability: Literal["fsync", "interval", "os"] | None
    """When a produce counts as stored; None is as the broker was opened. Cannot be changed later."""


class QueueInfo(msgspec.Struct, frozen=True):
    """A queue: its partitions, and its options as `create_queue` takes them. Times are seconds."""

    name: str
    incarnation: str
    """Given at creation: a queue that is deleted and created again has another."""
    created_at: datetime
    partitions: int
    active: list[int]
    """The partitions that take items."""
    retired: list[int]
    """Those that only drain, or are drained."""
    read_only: list[int]
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


def queue_info(found: reports.QueueDescription) -> QueueInfo:
    """What the catalog says, in a caller's terms."""
    options, policy = found.options, found.options.policy
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
    )


def to_catalog(given: Mapping[str, Any]) -> dict[str, object]:
    """Options as the catalog takes them: microseconds, and 0 or "" for none."""
    unknown = [name for name in given if name not in OPTION_NAMES]
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


def _or_none(name: str) -> Callable[[Seconds | None], int]:
    return lambda given: 0 if given is None else bounded_duration(given, name)


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
}
