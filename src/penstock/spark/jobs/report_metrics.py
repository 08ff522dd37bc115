"""What a report tells of a queue, as plain data.

Owns: `ReportMetrics` and its parts, and how keys and reasons are written in it. No Spark, no HTML.
Times are wall microseconds (`…_at`) or seconds where the name says so. Payloads are nowhere in it.
"""

import msgspec

STAGES = ("counting events", "times", "attempts and reasons", "keys", "backlog", "dead letters")
"""How the figures are computed, one after the other."""
TOP = 10
"""How many keys, reasons and slots are named; the rest are counted together."""
LONGEST_KEY = 80
AGES = (1, 10, 60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400)
"""Where one class of ages ends and the next begins, in seconds."""


class Percentiles(msgspec.Struct, frozen=True):
    """How long something took: percentiles in seconds, by nearest rank."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    worst: float = 0.0


class Bucket(msgspec.Struct, frozen=True):
    """What happened within one step of time."""

    at: int
    """When the step begins."""
    produced: int = 0
    leased: int = 0
    completed: int = 0
    failed: int = 0
    waiting: Percentiles = Percentiles()
    """Of the items leased in it: from ready to leased."""
    handling: Percentiles = Percentiles()
    """Of the items settled in it: from leased to settled."""


class AttemptCount(msgspec.Struct, frozen=True):
    """How many items were completed, and how many given up, in this attempt."""

    attempt: int
    completed: int = 0
    buried: int = 0


class ReasonCount(msgspec.Struct, frozen=True):
    """How often something was the reason."""

    reason: str
    """Empty when none was given."""
    count: int
    last_at: int = 0


class KeyLoad(msgspec.Struct, frozen=True):
    """What a key asked for."""

    key: str
    """As `key_text` writes it."""
    items: int
    """Produced in the time of the report."""
    handling_seconds: float
    """Spent on it in that time, all attempts together."""


class PartitionLoad(msgspec.Struct, frozen=True):
    """How many items were produced into a partition."""

    partition: int
    items: int
    active: bool = True
    """Whether it takes items now."""


class SlotLoad(msgspec.Struct, frozen=True):
    """How many items a slot's keys had."""

    slot: int
    partition: int
    """Where the newest of them lies."""
    items: int
    keys: int


class AgeBucket(msgspec.Struct, frozen=True):
    """How many ready items have been so for this long."""

    from_seconds: float
    to_seconds: float | None
    """None: or longer."""
    items: int


class ReportMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report tells."""

    queue: str
    made_at: int
    since: int | None = None
    """The time that was asked for; None: all that is known."""
    until: int | None = None
    first_at: int | None = None
    """The first and the last event of that time; None when there is none."""
    last_at: int | None = None

    produced: int = 0
    leased: int = 0
    completed: int = 0
    failed: int = 0
    """Attempts that ended otherwise: retried, given up, or their lease ran out."""
    leases_expired: int = 0
    buried: int = 0
    """Items given up, also those whose ttl ended."""
    items_before_log: int = 0
    """Items that were there before what is left of the log begins."""
    leases_without_wait: int = 0
    """Leases of the time whose beginning of waiting is not told any more."""

    bucket_seconds: float = 0.0
    buckets: list[Bucket] = []
    waiting: Percentiles = Percentiles()
    handling: Percentiles = Percentiles()
    attempts: list[AttemptCount] = []
    reasons: list[ReasonCount] = []
    """Why attempts failed, the most frequent first."""
    distinct_reasons: int = 0

    items: int = 0
    """Items of the time whose key can still be read; all that follows counts these."""
    keyed_items: int = 0
    keys: int = 0
    hot_keys: list[KeyLoad] = []
    """By items."""
    busy_keys: list[KeyLoad] = []
    """By the time spent on them."""
    keyed_handling_seconds: float = 0.0
    slots: list[SlotLoad] = []
    """The busiest."""
    slots_used: int = 0
    partitions: list[PartitionLoad] = []

    states: dict[str, int] = {}
    """Items that are not resolved, and buried ones, by state: now, whatever time was asked for."""
    ages: list[AgeBucket] = []
    age: Percentiles = Percentiles()
    """Of the ready items."""
    dead: list[ReasonCount] = []
    """Dead letters, now."""
    distinct_dead: int = 0
    dead_letters: int = 0

    @property
    def imbalance(self) -> float:
        """Items of the fullest active partition, as a multiple of their mean; 1 is even."""
        loads = [one.items for one in self.partitions if one.active]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @property
    def settled(self) -> int:
        """Attempts that ended."""
        return self.completed + self.failed

    @property
    def span_seconds(self) -> float:
        """How long the time is that the events cover."""
        return 0.0 if self.first_at is None or self.last_at is None else (self.last_at - self.first_at) / 1e6

    @property
    def ready(self) -> int:
        return self.states.get("ready", 0)


def key_text(key: bytes) -> str:
    """A key in one line: its text, or, where it is none, its bytes in hex."""
    try:
        text = printable(key.decode())
    except UnicodeDecodeError:
        text = f"0x{key.hex()}"
    return text if len(text) <= LONGEST_KEY else f"{text[: LONGEST_KEY - 1]}…"


def printable(text: str) -> str:
    """Text with everything escaped that is not a printable character."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
