"""What a broker tells of itself: plain data, the same from every kind of broker.

Owns: the report types. Times are wall microseconds (`…_at`) or seconds where the name says so.
"""

from datetime import datetime
from typing import Literal

import msgspec

from penstock.rules.catalog import QueueEntry
from penstock.rules.options import Options
from penstock.rules.runs import RunSet
from penstock.words.batch import Batch
from penstock.words.values import timestamp


class QueueDescription(msgspec.Struct, frozen=True):
    """A queue as the catalog knows it."""

    name: str
    incarnation: int
    created_at: int
    options: Options
    partitions: int
    active: list[int]
    """Partitions that take items."""
    retired: list[int]
    """Partitions that only drain, or are drained."""
    read_only: list[int]


def describe_queue(entry: QueueEntry) -> QueueDescription:
    """What the catalog tells of a queue."""
    return QueueDescription(
        entry.name, entry.incarnation, entry.created_at, entry.options, len(entry.active), entry.active, entry.retired, entry.read_only
    )


class PartitionStats(msgspec.Struct, frozen=True):
    """One partition, counted exactly."""

    partition: int
    status: str
    """"active", "draining", "drained", "slow", or "failing"."""
    ready: int = 0
    scheduled: int = 0
    leased: int = 0
    completed: int = 0
    buried: int = 0
    moving: int = 0
    produced: int = 0
    """Items ever produced: the next offset."""
    busy_keys: int = 0
    """Keys that something holds or that items wait behind."""
    oldest_ready_seconds: float = 0.0
    size_bytes: int = 0
    paused_lease: bool = False
    paused_produce: bool = False
    lost: int = 0
    """Items that damage took."""
    buried_dropped: int = 0
    """Items that were buried here and that retention took, ever."""
    buried_to_drop: int = 0
    """Buried items that retention is to take before long."""
    buried_drop_seconds: float = 0.0
    """Until it takes the first of those."""
    error: str = ""
    notes: list[str] = []
    """What opening found: a torn tail cut, damage passed over."""


class FenceProgress(msgspec.Struct, frozen=True):
    """What a resize still waits for."""

    partition: int
    waits_for: int
    slots: int
    keys: int


class QueueStats(msgspec.Struct, frozen=True):
    """A queue now: totals, and each partition."""

    name: str
    ready: int
    scheduled: int
    leased: int
    completed: int
    buried: int
    moving: int
    produced: int
    partitions: list[PartitionStats]
    waiting_consumers: int
    waiting_producers: int
    consumers: dict[str, int]
    """Name → items leased to it now."""
    resizing: list[FenceProgress]
    """Empty when no resize is under way."""
    transfers: int
    """Batches of items on their way out."""
    warnings: list[str]
    buried_dropped: int = 0
    """Items that were buried and that retention took, ever."""
    holder: str = ""
    """The consumer that has the right to lease from it, alone, if any has."""

    @property
    def depth(self) -> int:
        """Items that are not resolved."""
        return self.ready + self.scheduled + self.leased + self.moving


class ItemExplanation(msgspec.Struct, frozen=True):
    """What an item is doing, and why it is not running."""

    id: str
    queue: str
    """The queue in which it is now: it may have been moved."""
    state: str
    why: str
    attempts: int = 0
    consumer: str = ""
    ready_in_seconds: float | None = None
    held_by: str = ""
    """The id of the item of the same key that is in the way."""
    reason: str = ""
    moved_to: tuple[int, int, int] | None = None
    """Where it is now (incarnation, partition, offset), if it was moved and was not followed."""


class ItemTrace(msgspec.Struct, frozen=True):
    """The same item in other places, each an incarnation, a partition and an offset."""

    came_from: tuple[int, int, int] | None
    went_to: tuple[int, int, int] | None


class ItemEvent(msgspec.Struct, frozen=True):
    """Something that happened to an item, in whichever queue it was then."""

    event: str
    """"produced", "leased", "completed", …: the events of an item's life (docs/architecture.md)."""
    queue: str
    id: str
    at: int
    """Wall microseconds."""
    attempt: int = 0
    reason: str = ""
    consumer: str = ""
    lease: int = 0
    """The number of the lease under which it happened; 0 for none."""
    destination: str = ""
    """Where it left for: "<queue>/<partition>", or, once it arrived, "<queue>/<id>"."""
    source: str = ""
    """Where a transfer came from: "<queue>/<partition>"."""

    @property
    def time(self) -> datetime:
        return timestamp(self.at)


class HeldKey(msgspec.Struct, frozen=True):
    """A key that is not free."""

    key: bytes
    partition: int
    why: str
    """"leased", "backing off", "parked", "fenced" or "waiting"."""
    item: str
    """The id of the item that holds it, or that waits first."""
    waiting: int
    """Items that wait behind."""


class ListedItemData(msgspec.Struct, frozen=True):
    """An item on a list, with what became of it."""

    partition: int
    offset: int
    state: str
    batch: Batch
    index: int
    produced_at: int
    attempts: int
    reason: str


class Latency(msgspec.Struct, frozen=True):
    """How long callers waited, in seconds."""

    count: int
    p50: float
    p95: float
    p99: float
    worst: float


class QueueMetrics(msgspec.Struct, frozen=True):
    """What a queue did since the broker was opened."""

    name: str
    turns: int
    requests: dict[str, int]
    errors: dict[str, int]
    items: dict[str, int]
    latencies: dict[str, Latency]


class BrokerMetrics(msgspec.Struct, frozen=True):
    """All queues."""

    queues: dict[str, QueueMetrics]


class GrantFailure(msgspec.Struct):
    """What is to become of some items of a grant."""

    action: Literal["retry", "bury"]
    delay: int
    reason: str
    items: dict[int, list[int]]
    """partition → runs"""


class StreamGrant(msgspec.Struct):
    """What a consuming stream was given at one time."""

    leases: list[tuple[int, int, list[int]]]
    """(partition, lease, runs)"""
    failed: list[GrantFailure] = []
    completed: bool = False
    """Those that did not fail are."""

    @property
    def items(self) -> int:
        return sum(RunSet(runs).total for _, _, runs in self.leases)


class GrantAnswer(msgspec.Struct):
    """The newest grant, which may be the one before when there is nothing, and how many items are in it."""

    grant: int
    items: int
    ready: int
    """Items that are ready and not granted."""
