"""Reports of a broker about its queues and items: plain data, the same from every kind of home.

Owns: the report types. Durations are seconds, as their names say. Reports that the API gives to its callers show times
as datetimes in UTC, by properties: they are sent as wall microseconds (fields that end in `_wall`), under the name of
the property. The times of `QueueDescription`, `ListedItemData`, `OwnerDescription` and `ClientDescription`, which the
API or the CLI converts, are wall microseconds.
"""

from datetime import datetime
from typing import Literal

import msgspec

from penstock.logs.store import LogPosition
from penstock.rules.catalog import QueueEntry, RestorePoint
from penstock.rules.options import Options
from penstock.rules.runs import RunSet
from penstock.words.batch import Batch
from penstock.words.values import timestamp


class QueueDescription(msgspec.Struct, frozen=True):
    """A queue as it is in the catalog."""

    name: str
    incarnation: int
    created_at: int
    options: Options
    partitions: int
    active: list[int]
    """Partitions that take items."""
    retired: list[int]
    """Partitions that take no new items: draining or drained."""
    read_only: list[int]
    restores: list[RestorePoint] = []
    """The restores of the queue from backups, the newest last."""
    marks: dict[int, dict[int, int]] = {}
    """Only if they were asked for: version of the slot map → partition → its next offset when that version took effect,
    for the last resizes. A partition that took no items then has no mark, except its last one in the oldest version."""


def describe_queue(entry: QueueEntry, marks: bool = False) -> QueueDescription:
    partitions = (len(entry.active), entry.active, entry.retired, entry.read_only)
    known = entry.marks if marks else {}
    return QueueDescription(entry.name, entry.incarnation, entry.created_at, entry.options, *partitions, entry.restores, known)


class PartitionStats(msgspec.Struct, frozen=True):
    """The exact counts of one partition."""

    partition: int
    status: str
    """"active", "draining", "drained", "slow", or "failing"."""
    ready: int = 0
    scheduled: int = 0
    leased: int = 0
    completed: int = 0
    buried: int = 0
    moving: int = 0
    cancelled: int = 0
    """Cancelled items that retention has not deleted yet."""
    produced: int = 0
    """Items ever produced."""
    busy_keys: int = 0
    """Keys that have a line: held, or with items waiting in it."""
    oldest_ready_seconds: float = 0.0
    size_bytes: int = 0
    paused_lease: bool = False
    paused_produce: bool = False
    lost: int = 0
    """Items lost to damage."""
    buried_dropped: int = 0
    """Buried items that retention has ever deleted here."""
    buried_to_drop: int = 0
    """Buried items that retention will delete soon."""
    buried_drop_seconds: float = 0.0
    """Time until it deletes the first of those."""
    error: str = ""
    notes: list[str] = []
    """Findings at opening: a torn tail that was cut, damage that was skipped."""


class FenceProgress(msgspec.Struct, frozen=True):
    """A fence of an unfinished resize: the keys of one partition that wait for another partition."""

    partition: int
    waits_for: int
    slots: int
    keys: int


class QueueStats(msgspec.Struct, frozen=True):
    """The present counts of a queue: totals, and each partition."""

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
    """Empty when no resize is unfinished."""
    transfers: int
    """Batches of items in the outboxes."""
    warnings: list[str]
    buried_dropped: int = 0
    """Buried items that retention has ever deleted."""
    holder: str = ""
    """The holder of the consumer right; "" for none."""
    cancelled: int = 0
    """Cancelled items that retention has not deleted yet."""

    @property
    def depth(self) -> int:
        """Items that are neither completed nor buried."""
        return self.ready + self.scheduled + self.leased + self.moving


class ItemExplanation(msgspec.Struct, frozen=True):
    """The state of an item, and why it is not running."""

    id: str
    queue: str
    """The queue in which it is now."""
    state: str
    why: str
    attempts: int = 0
    consumer: str = ""
    ready_in_seconds: float | None = None
    held_by: str = ""
    """The id of the item that holds the key."""
    reason: str = ""
    moved_to: tuple[int, int, int] | None = None
    """Its present position (incarnation, partition, offset), if it was moved and the query did not follow it."""


class ItemLease(msgspec.Struct, frozen=True):
    """The lease that holds an item now."""

    partition: int
    offset: int
    state: str
    """Or "unknown" when there is no such item, "failing" when its partition is."""
    lease: int = 0
    """Its number; 0: no lease holds the item."""


class ItemTrace(msgspec.Struct, frozen=True):
    """The positions of an item before and after a move: (incarnation, partition, offset)."""

    came_from: tuple[int, int, int] | None
    went_to: tuple[int, int, int] | None


class ItemEvent(msgspec.Struct, frozen=True, rename={"at_wall": "at"}):
    """An event of an item, in the queue in which it was at that time."""

    event: str
    """"produced", "leased", "completed", …: the events of an item's life (docs/architecture.md)."""
    queue: str
    id: str
    at_wall: int
    attempt: int = 0
    reason: str = ""
    consumer: str = ""
    lease: int = 0
    """The number of the lease; 0 for none."""
    destination: str = ""
    """Where it was sent: "<queue>/<partition>"; after its arrival "<queue>/<id>"."""
    source: str = ""
    """Where a transfer came from: "<queue>/<partition>"."""

    @property
    def at(self) -> datetime:
        """When it happened."""
        return timestamp(self.at_wall)


class HeldKey(msgspec.Struct, frozen=True):
    """A key that is not free."""

    key: bytes
    partition: int
    why: str
    """"leased", "backing off", "parked", "fenced" or "waiting"."""
    item: str
    """The id of the item that holds the key, or else of the first in its line."""
    waiting: int
    """Items that wait in its line."""


class ListedItemData(msgspec.Struct, frozen=True):
    """A listed item and its state."""

    partition: int
    offset: int
    state: str
    batch: Batch
    index: int
    produced_at: int
    attempts: int
    reason: str
    lease_ends_at: int = 0
    """When the lease that holds it ends (wall); 0: it is not leased."""
    expires_at: int = 0
    """When its ttl, or the one that the queue has now, ends (wall); 0: never."""
    buried_at: int = 0
    """When it was buried in this queue (wall); 0: it is not buried."""


class FoundItems(msgspec.Struct, frozen=True):
    """What one step of a scan found."""

    items: list[ListedItemData]
    after: tuple[int, int] | None = None
    """The position (partition, offset) up to which the queue was scanned; None: the scan is finished."""


class ItemChange(msgspec.Struct, frozen=True):
    """What became of an item that was to be cancelled or rescheduled."""

    id: str
    """As it was given."""
    outcome: str
    """"cancelled" or "rescheduled" if it was; else why not: "leased", "completed", "already cancelled", "buried",
    "moving" (on its way to another queue or partition: try again), "moved" (to another queue), or "not found"."""

    @property
    def done(self) -> bool:
        return self.outcome in ("cancelled", "rescheduled")


class Latency(msgspec.Struct, frozen=True):
    """How long callers waited, in seconds."""

    count: int
    p50: float
    p95: float
    p99: float
    worst: float


class Durations(msgspec.Struct, frozen=True):
    """A histogram of durations."""

    bounds: list[float]
    """The upper bounds of the buckets in seconds, inclusive, ascending."""
    counts: list[int]
    """How many durations are in each bucket; the last number is of those above all bounds."""
    sum: float
    """The sum of all durations, in seconds."""


class PartitionMetrics(msgspec.Struct, frozen=True):
    """The present figures of a partition, and its counters since the broker was opened."""

    partition: int
    status: str
    """"active", "draining", "drained", "opening", "slow" or "failing"."""
    states: dict[str, int] = {}
    """State → items, without completed ones. Empty: not known, because the partition must be opened first."""
    oldest_ready_seconds: float = 0.0
    """How long the oldest ready item has waited that no key holds back."""
    held_keys: int = 0
    """Keys that are not free: held, or with items waiting in their line."""
    parked_keys: int = 0
    """Keys that buried items hold."""
    size_bytes: int = 0
    """The size of its log."""
    lost: int = 0
    """Items lost to damage."""
    paused_lease: bool = False
    paused_produce: bool = False
    items: dict[str, int] = {}
    """Counter (docs/metrics.md) → items; those that are 0 are left out."""
    failures: int = 0
    """How often its storage failed."""
    slow: int = 0
    """How often its storage did not answer in time."""
    written_bytes: int = 0
    freed_bytes: int = 0
    """Bytes that retention freed."""
    freed_segments: int = 0
    findings: int = 0
    """How many torn tails and damaged side files were found when it was opened."""


class QueueMetrics(msgspec.Struct, frozen=True):
    """Counters and latencies of a queue since the broker was opened, and its present figures."""

    name: str
    turns: int
    requests: dict[str, int]
    """Verb → requests."""
    errors: dict[str, int]
    """Code → requests, and parts of requests, that were refused."""
    items: dict[str, int]
    """The counters of all partitions, and "buried", the sum of the three causes."""
    latencies: dict[str, Latency]
    incarnation: int = 0
    partitions: list[PartitionMetrics] = []
    waiting_leases: int = 0
    """Calls that wait for items to lease."""
    waiting_produces: int = 0
    """Calls that wait for room."""
    waiting_reads: int = 0
    """Calls that wait for new items to read."""
    pending_requests: int = 0
    """Requests that no turn has taken yet."""
    request_durations: dict[str, Durations] = {}
    """Verb → time from the arrival of a request to its answer. A lease includes the wait for items."""
    lease_durations: dict[str, Durations] = {}
    """Outcome → time from the lease of an item to "completed", "retried", "returned", "buried" or "expired"."""
    turn_durations: Durations | None = None
    sync_durations: Durations | None = None
    """Of the syncs for which answers wait."""
    writes_waiting: int = 0
    """Published writes that are not adopted yet."""
    writes_refused: int = 0
    """Those of them that cannot be adopted: an operator must look at them."""
    writes_adopted: int = 0


class BrokerMetrics(msgspec.Struct, frozen=True, rename={"opened_wall": "opened_at"}):
    """The metrics of every queue, by name."""

    queues: dict[str, QueueMetrics]
    opened_wall: int = 0
    """`opened_at` in microseconds since 1970."""
    clients: int = 0
    """Processes that use the broker through its owner."""
    free_bytes: dict[int, int] = {}
    """Number of a storage root, from 0 on → its free space; without those that cannot be asked."""
    min_free_bytes: int = 0
    """With less free space, produce is refused."""

    @property
    def opened_at(self) -> datetime:
        """When the broker was opened: the counters begin there."""
        return timestamp(self.opened_wall)


class GrantFailure(msgspec.Struct):
    """Items of a grant that failed, and what to do with them."""

    action: Literal["retry", "bury"]
    delay: int
    reason: str
    items: dict[int, list[int]]
    """partition → runs"""


class StreamGrant(msgspec.Struct):
    """The leases that a consuming stream received at one time."""

    leases: list[tuple[int, int, list[int]]]
    """(partition, lease, runs)"""
    failed: list[GrantFailure] = []
    completed: bool = False
    """Whether the items that did not fail are completed."""

    @property
    def items(self) -> int:
        return sum(RunSet(runs).total for _, _, runs in self.leases)


class GrantAnswer(msgspec.Struct):
    """The number of the newest grant, and its items. With no new items it is the committed grant, and `items` is 0."""

    grant: int
    items: int
    ready: int
    """Items that are ready and in no grant."""
    oldest_seconds: float = 0.0
    """How long the oldest of these has been ready."""


# -- the owner of a directory ------------------------------------------------------------------------


class ClientDescription(msgspec.Struct):
    """A process that uses the broker through its owner."""

    pid: int
    name: str
    """Its program."""
    since: int
    """When it connected (wall)."""
    calls: int
    """How many of its calls wait for their answers."""


class OwnerDescription(msgspec.Struct):
    """The process that owns a broker, and those that use it through that process."""

    pid: int
    host: str
    since: int
    """When it became the owner (wall)."""
    clients: list[ClientDescription] = []


class BackupPoint(msgspec.Struct, frozen=True):
    """The end of every log of a broker at one instant."""

    at: int
    """That instant (wall)."""
    roots: list[str]
    logs: list[LogPosition]
    writes: list[str]
    """The published writes that are in the inbox, whole or in part in no log yet."""
