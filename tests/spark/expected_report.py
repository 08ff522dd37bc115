"""A queue with a history, and the metrics of its report computed without Spark.

Owns: `make_reported_queue`, whose history has every kind of event that a report counts, and `ExpectedReport`, which
goes through the events of the log one by one, as a `Snapshot` gives them, and computes what the report should say.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import penstock
from penstock import NewItem
from penstock.operations import FindQueue
from penstock.rules.events import RETURNED, Event
from penstock.rules.routing import slot
from penstock.spark.jobs.report_metrics import Bucket, KeyLoad, Percentiles, ReasonCount, SlotLoad, key_text
from penstock.words.clock import SECOND
from penstock.words.values import timestamp
from tests.broker.directory_broker import DirectoryBroker

QUEUE, DEAD = "orders", "orders.dead"
HOSTILE = "<script>alert('key')</script>"
HOSTILE_REASON = "<img src=x onerror=alert(1)> & more"
BINARY = b"\xff\xfe\x00key"
KEYS: list[str | bytes | None] = [*["big"] * 12, *(f"customer-{number}" for number in range(8)), HOSTILE, BINARY, None, None]
RETRY_DELAY_SECONDS = 4
FAILED = {"retried", "delayed", "lease expired", "buried"}
MAKES_READY = {"produced", "due", "retried", "lease expired", "sought", "redriven"}


class ReportedQueue(NamedTuple):
    """A broker with a history, and for every produced item its key and the time of production."""

    yard: DirectoryBroker
    items: dict[str, tuple[bytes | None, int]]

    def produce(self, *items: NewItem) -> None:
        at = self.yard.clock.read().wall
        for name, item in zip(self.yard.broker.queue(QUEUE).produce_many(items), items, strict=True):
            self.items[name] = (item.key.encode() if isinstance(item.key, str) else item.key, at)


def make_reported_queue(path: Path, rounds: int = 12) -> ReportedQueue:
    """Produce and handle items, with failures of every kind; some items are left in every state."""
    yard, chance = DirectoryBroker(path), random.Random(11)
    story = ReportedQueue(yard, {})
    yard.broker.create_queue(DEAD)
    orders = yard.broker.create_queue(QUEUE, partitions=4, dead_queue=DEAD, max_attempts=3, lease_timeout=20)
    for number in range(rounds):
        story.produce(*(NewItem(b"secret payload", key=chance.choice(KEYS)) for _ in range(20)))
        story.produce(NewItem(b"secret payload", at=yard.clock.now() + timedelta(seconds=7)))
        if number % 4 == 0:
            story.produce(NewItem(b"secret payload", ttl=0.05, priority=9))
        for _ in range(3):
            yard.clock.advance(chance.randrange(100_000, 3 * SECOND))
            yard.run_and_publish()
            handle(yard, orders, chance)
        if number % 5 == 4:
            orders.lease(3, per_key=2)  # and never settled
            yard.clock.advance(21 * SECOND)
            yard.run_and_publish()
    story.produce(*(NewItem(b"secret payload", at=yard.clock.now() + timedelta(seconds=wait)) for wait in (30, 30, 700, 90_000)))
    orders.lease(5, consumer="slow")
    yard.clock.advance(SECOND)
    yard.run_and_publish()
    return story


def handle(yard: DirectoryBroker, orders: penstock.Queue, chance: random.Random) -> None:
    """Lease a few items and settle each after a random time."""
    for lease in orders.lease(9, per_key=chance.choice((1, 1, 3)), consumer="worker"):
        yard.clock.advance(chance.randrange(1_000, SECOND // 2))
        luck = chance.random()
        try:
            if luck < 0.70:
                lease.complete()
            elif luck < 0.80:
                lease.retry(reason="HTTP 503 for order 1234567\nwith details")
            elif luck < 0.90:
                lease.retry(delay=RETRY_DELAY_SECONDS, reason=HOSTILE_REASON)
            elif luck < 0.95:
                lease.retry(reason="")
            else:
                lease.bury(reason=f"no such customer {chance.randrange(1 << 60):016x}")
        except penstock.errors.LeaseLost:  # returned with an earlier item of its key
            continue
    yard.run_and_publish()


def class_of(reason: str) -> str:
    """The class under which the report counts a reason of this history."""
    return re.sub(r"503|1234567|[0-9a-f]{16}|(?<=alert\()1", "…", reason.split("\n")[0]).strip()


class ExpectedReport:
    """The expected metrics of a queue, computed the obvious way."""

    def __init__(self, story: ReportedQueue, since: int | None = None, until: int | None = None) -> None:
        yard = story.yard
        self.now = yard.clock.read().wall
        self._since, self._until = since or 0, until or 1 << 62
        with yard.open_snapshot() as seen:
            info = seen.call(FindQueue(name=QUEUE))
            self.active = info.active
            self.logs = {number: [*seen.events(info.incarnation, number)] for number in sorted([*info.active, *info.retired])}
        self.keys = {name: key for name, (key, _) in story.items.items() if key is not None}
        self.produced_at = {name: at for name, (_, at) in story.items.items()}
        self.items = [name for name, at in self.produced_at.items() if self.asked(at)]
        self.stats = yard.broker.queue(QUEUE).stats()
        self.ready = [one.id for one in pages(yard.broker.queue(QUEUE), "ready")]
        self.dead = [one.origin for one in pages(yard.broker.queue(DEAD), None) if one.origin is not None]
        self.waits: list[tuple[int, int]] = []
        self.handlings: list[tuple[str, int, int]] = []
        self.leases_without_wait = 0
        self.ready_since: dict[str, int] = {}
        self.delayed: dict[str, datetime] = {}
        for number, events in self.logs.items():
            self._walk(number, events)
        scheduled = [*pages(yard.broker.queue(QUEUE), "scheduled")]
        self.upcoming = sorted(self.delayed.get(one.id) or one.at or timestamp(0) for one in scheduled)

    def asked(self, at: int) -> bool:
        return self._since <= at < self._until

    def _walk(self, number: int, events: list[Event]) -> None:
        ready: dict[int, Event] = {}
        held: dict[int, int] = {}
        for event in events:
            name = f"{number}-{event.offset}"
            if event.event == "leased":
                since = ready.get(event.offset)
                if since is None or since.attempt < event.attempt - 1:
                    self.leases_without_wait += self.asked(event.at)
                elif self.asked(event.at):
                    self.waits.append((event.at, event.at - since.at))
                held[event.offset] = event.at
            elif event.event in ("completed", *FAILED) and event.lease:
                begun = held.pop(event.offset, None)
                by_holder = event.event != "lease expired" and event.reason not in (RETURNED, "attempts spent: lease expired", "expired")
                if begun is not None and by_holder and self.asked(event.at):
                    self.handlings.append((name, event.at, event.at - begun))
            if event.event == "delayed":
                self.delayed[name] = timestamp(event.at) + timedelta(seconds=RETRY_DELAY_SECONDS)
            if event.event in MAKES_READY:
                ready[event.offset] = event
                self.ready_since[name] = event.at

    # -- metrics -------------------------------------------------------------------------------------

    def events(self, *kinds: str) -> Iterator[Event]:
        """The events in the time of the report, of these kinds or all."""
        return (one for events in self.logs.values() for one in events if self.asked(one.at) and (one.event in kinds or not kinds))

    def failures(self) -> list[Event]:
        return [one for one in self.events(*FAILED) if one.lease and one.reason != RETURNED]

    def count(self, *kinds: str) -> int:
        return sum(1 for _ in self.events(*kinds))

    def items_before_log(self) -> int:
        arrived = {number: sum(1 for one in log if one.event in ("produced", "scheduled")) for number, log in self.logs.items()}
        return sum(max(one.offset for one in log) + 1 - arrived[number] for number, log in self.logs.items() if log)

    def buckets(self, width: int) -> list[Bucket]:
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        for one in self.events():
            name = "produced" if one.event == "scheduled" else one.event
            counts[one.at // width][name] += 1
        for one in self.failures():
            counts[one.at // width]["failed"] += 1
        waits, handlings = grouped(self.waits, width), grouped([(at, micros) for _, at, micros in self.handlings], width)
        names = ("produced", "leased", "completed", "failed")
        return [
            Bucket(
                timestamp(at * width),
                **{name: counts[at][name] for name in names},
                waiting=spread(waits[at]),
                handling=spread(handlings[at]),
            )
            for at in range(min(counts), max(counts) + 1)
        ]

    def attempts(self) -> list[tuple[int, int, int]]:
        completed = Counter(one.attempt for one in self.events("completed"))
        buried = Counter(one.attempt for one in self.events("buried", "expired"))
        return [(number, completed[number], buried[number]) for number in sorted(completed | buried)]

    def reasons(self) -> list[ReasonCount]:
        return counted((re.sub("^attempts spent(: |$)", "", one.reason), one.at) for one in self.failures())

    def loads(self) -> dict[bytes, KeyLoad]:
        """The loads by key, of the keys with items or handling time."""
        items = Counter(self.keys[name] for name in self.items if name in self.keys)
        spent: Counter[bytes] = Counter()
        for name, _, micros in self.handlings:
            if name in self.keys:
                spent[self.keys[name]] += micros
        return {key: KeyLoad(key_text(key), items[key], spent[key] / SECOND) for key in items | spent}

    def hot(self, by: str) -> list[KeyLoad]:
        ranked = sorted(self.loads().items(), key=lambda one: (-getattr(one[1], by), one[0]))
        return [load for _, load in ranked if getattr(load, by)][:10]

    def slots(self) -> list[SlotLoad]:
        partitions = {
            slot(self.keys[name]): int(name.split("-")[0]) for name in self.items if name in self.keys
        }  # keys stay: no resize here
        items: Counter[int] = Counter()
        keys: Counter[int] = Counter()
        for key, load in self.loads().items():
            items[slot(key)] += load.items
            keys[slot(key)] += load.items > 0
        ranked = sorted(items, key=lambda one: (-items[one], one))
        return [SlotLoad(one, partitions[one], items[one], keys[one]) for one in ranked if items[one]]

    def ages(self) -> list[int]:
        return [self.now - self.ready_since.get(name, self.produced_at[name]) for name in self.ready]


def pages(queue: penstock.Queue, state: str | None) -> Iterator[penstock.ListedItem]:
    """All listed items in a state."""
    after = None
    while found := queue.items(state, after, 100):
        yield from found
        after = found[-1].id


def grouped(times: Iterable[tuple[int, int]], width: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for at, micros in times:
        found[at // width].append(micros)
    return found


def spread(micros: Iterable[int]) -> Percentiles:
    """Percentiles by nearest rank."""
    ranked = sorted(micros)
    if not ranked:
        return Percentiles()
    p50, p90, p99 = (ranked[math.ceil(rank * len(ranked)) - 1] / SECOND for rank in (0.5, 0.9, 0.99))
    return Percentiles(len(ranked), p50, p90, p99, ranked[-1] / SECOND)


def counted(reasons: Iterable[tuple[str, int]]) -> list[ReasonCount]:
    """The classes of reasons with their times, the most frequent first."""
    number: Counter[str] = Counter()
    last: dict[str, tuple[int, str]] = {}
    for reason, at in reasons:
        name, line = class_of(reason), reason.split("\n")[0]
        number[name] += 1
        last[name] = max((at, line), last.get(name, (0, "")))
    ranked = sorted(number, key=lambda one: (-number[one], one))
    return [ReasonCount(name, number[name], timestamp(last[name][0]), last[name][1]) for name in ranked]
