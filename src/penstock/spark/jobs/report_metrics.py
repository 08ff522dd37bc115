"""The metrics of a report, as plain data.

Owns: `ReportMetrics` and its parts, and how keys are written as text. No Spark, no HTML, no payloads.
Times are datetimes in UTC; durations are seconds.
"""

from datetime import datetime

import msgspec

STAGES = ("counting events", "times", "attempts and reasons", "keys", "backlog", "dead letters")
"""The steps in which the metrics are computed, in their order."""
TOP = 10
"""How many keys, reasons and slots are listed; the rest are only counted."""
LONGEST_KEY = 80
AGES = (1, 10, 60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400)
"""The limits between the spans of ages and of times to come, in seconds."""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of durations, in seconds, by nearest rank."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    worst: float = 0.0


class Bucket(msgspec.Struct, frozen=True):
    """What happened in one time step."""

    at: datetime
    """The beginning of the step."""
    produced: int = 0
    leased: int = 0
    completed: int = 0
    failed: int = 0
    waiting: Percentiles = Percentiles()
    """From ready to leased, of the items leased in the step."""
    handling: Percentiles = Percentiles()
    """From leased to settled, of the items settled in the step."""


class AttemptCount(msgspec.Struct, frozen=True):
    """How many items were completed, and how many buried, in this attempt."""

    attempt: int
    completed: int = 0
    buried: int = 0


class ReasonCount(msgspec.Struct, frozen=True):
    """How often a reason was given, whatever its numbers and ids."""

    reason: str
    """Without numbers and ids; empty if no reason was given."""
    count: int
    last_at: datetime | None = None
    """None if it is not known when."""
    example: str = ""
    """The last of these reasons, as it was given."""


class KeyLoad(msgspec.Struct, frozen=True):
    """The load of one key."""

    key: str
    """As `key_text` writes it."""
    items: int
    """Items produced in the time of the report."""
    handling_seconds: float
    """Handling time of its items in that time, all attempts together."""


class PartitionLoad(msgspec.Struct, frozen=True):
    """How many items were produced into a partition."""

    partition: int
    items: int
    active: bool = True
    """Whether it is not retired."""


class SlotLoad(msgspec.Struct, frozen=True):
    """How many items and keys a slot has."""

    slot: int
    partition: int
    """The partition of the newest item."""
    items: int
    keys: int


class SpanCount(msgspec.Struct, frozen=True):
    """How many items have been ready for a time in this span, or become ready within it."""

    from_seconds: float
    to_seconds: float | None
    """None: no upper limit."""
    items: int


class ReportMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of a report."""

    queue: str
    made_at: datetime
    since: datetime | None = None
    """The time of the report, as requested; None: no limit."""
    until: datetime | None = None
    first_at: datetime | None = None
    """The first and the last event in that time; None if there is none."""
    last_at: datetime | None = None

    produced: int = 0
    leased: int = 0
    completed: int = 0
    failed: int = 0
    """Attempts that ended without completing the item: retried, buried, or the lease expired."""
    leases_expired: int = 0
    buried: int = 0
    """Items buried, including those whose ttl ended."""
    items_before_log: int = 0
    """Items produced before the first retained event of the log."""
    leases_without_wait: int = 0
    """Leases in that time whose item became ready before the first retained event."""

    bucket_seconds: float = 0.0
    buckets: list[Bucket] = []
    waiting: Percentiles = Percentiles()
    handling: Percentiles = Percentiles()
    attempts: list[AttemptCount] = []
    reasons: list[ReasonCount] = []
    """Why attempts failed, the most frequent first."""
    distinct_reasons: int = 0

    items: int = 0
    """Items of that time that are still readable; the metrics of keys and slots count these."""
    keyed_items: int = 0
    keys: int = 0
    hot_keys: list[KeyLoad] = []
    """The keys with most items."""
    busy_keys: list[KeyLoad] = []
    """The keys with most handling time."""
    keyed_handling_seconds: float = 0.0
    slots: list[SlotLoad] = []
    """The slots with most items."""
    slots_used: int = 0
    partitions: list[PartitionLoad] = []

    states: dict[str, int] = {}
    """Items that are not completed, by state: now, whatever the time of the report."""
    ages: list[SpanCount] = []
    age: Percentiles = Percentiles()
    """How long the ready items have been ready."""
    upcoming: list[SpanCount] = []
    """When the scheduled items become ready, in seconds from now; one whose time has come is in the first span."""
    next_ready_at: datetime | None = None
    """When the first and the last of them become ready; None if none is scheduled."""
    last_ready_at: datetime | None = None
    dead: list[ReasonCount] = []
    """The reasons of the dead letters, now."""
    distinct_dead: int = 0
    dead_letters: int = 0

    @property
    def imbalance(self) -> float:
        """Items of the fullest active partition, divided by the mean of the active partitions; 1 is even."""
        loads = [one.items for one in self.partitions if one.active]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @property
    def settled(self) -> int:
        """How many attempts ended."""
        return self.completed + self.failed

    @property
    def span_seconds(self) -> float:
        """The time between the first and the last event."""
        return 0.0 if self.first_at is None or self.last_at is None else (self.last_at - self.first_at).total_seconds()

    @property
    def ready(self) -> int:
        return self.states.get("ready", 0)

    @property
    def scheduled(self) -> int:
        return self.states.get("scheduled", 0)


def key_text(key: bytes) -> str:
    """A key as one line of text; in hexadecimal if it is not UTF-8."""
    try:
        text = printable(key.decode())
    except UnicodeDecodeError:
        text = f"0x{key.hex()}"
    return text if len(text) <= LONGEST_KEY else f"{text[: LONGEST_KEY - 1]}…"


def printable(text: str) -> str:
    """Text with escapes for characters that are not printable."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
