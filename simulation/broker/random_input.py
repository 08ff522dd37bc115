"""Random input for a simulated broker: batches, options, durations.

Owns: `RandomInput`.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

from penstock.rules import routing
from penstock.words.batch import Batch
from penstock.words.clock import HOUR, MINUTE, SECOND
from simulation.broker.items import TrackedItem
from simulation.simulation import RandomDraws

T = TypeVar("T")
KEYS = [b"a", b"b", b"customer-42", b"", b"e", b"zz"]
DEDUPS = [b"one", b"two", b"three"]


HABITS = ("keyed", "priority", "at", "ttl", "dedup", "request", "big", "retention", "limit")


class RandomInput(RandomDraws):
    """Draws batches, options and durations."""

    request_rate = 0.7

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, HABITS, KEYS)
        self._items = 0

    def options(self) -> dict[str, object]:
        return {
            "lease_timeout": self.pick([5, 30]) * SECOND,
            "max_attempts": self.pick([0, 1, 2, 3]),
            "dedup_window": self.pick([20 * SECOND, 10 * MINUTE]),
            "on_bury": self.pick(["release", "park"]),
        }

    def habitual(self) -> dict[str, object]:
        """Options that all queues of a seed share and that never change."""
        retention = (
            {"max_age": 1 * MINUTE, "max_bytes": 1_500, "max_segments": 2}
            if self.rates["retention"] < 0.25
            else {"max_age": 0, "max_bytes": 0}
        )
        return {"retention": retention, "max_items": 12 if self.rates["limit"] < 0.15 else 0}

    def batch(self, incarnation: int, count: int, wall: int, *, plain: bool = False) -> tuple[Batch, list[TrackedItem]]:
        """New items."""
        keys = self.column(count, "keyed", lambda: self.pick(self.keys))
        priorities = self.column(count, "priority", lambda: self.rng.randrange(10), rate=0.3) if not plain else None
        ats = self.column(count, "at", lambda: wall + self.pick([50_000, 2 * SECOND, 40 * SECOND, 1 * HOUR]), rate=0.3)
        ttls = self.column(count, "ttl", lambda: self.pick([5, 60]) * SECOND, rate=0.3)
        dedups = self.column(count, "dedup", lambda: self.pick(DEDUPS), rate=0.4) if not plain else None
        items = [self._new_item(incarnation) for _ in range(count)]
        for index, item in enumerate(items):
            item.key = keys[index] if keys else None
            item.priority = _or(priorities, index, 5)
            item.has_ttl = _or(ttls, index, 0) > 0
            item.dedup = dedups[index] if dedups else None
            at = _or(ats, index, 0)
            item.at, item.scheduled = (at if at > wall + 100_000 else 0), at > 0
            item.due = item.at
        named = [None if item.dedup is None else routing.dedup_digest(item.key, item.dedup) for item in items]
        return Batch(
            [item.payload for item in items],
            keys,
            routing.key_ids(keys) if keys else None,
            priorities=bytes(item.priority for item in items) if priorities else None,
            ats=[_or(ats, index, 0) for index in range(count)] if ats else None,
            ttls=[_or(ttls, index, 0) for index in range(count)] if ttls else None,
            dedups=named if dedups else None,
        ), items

    def some_keys(self) -> list[tuple[bytes | None, bytes | None]]:
        """Some of the keys that this seed uses, each without a dedup id."""
        return [(key, None) for key in self.rng.sample(self.keys, self.rng.randint(1, len(self.keys)))]

    def keyed(self, incarnation: int, names: Sequence[tuple[bytes | None, bytes | None]]) -> tuple[Batch, list[TrackedItem]]:
        """New items with these keys and dedup ids, ready at once, without other options."""
        items = [self._new_item(incarnation) for _ in names]
        for item, (key, dedup) in zip(items, names, strict=True):
            item.key, item.dedup = key, dedup
        keys = [item.key for item in items]
        named = [None if item.dedup is None else routing.dedup_digest(item.key, item.dedup) for item in items]
        return Batch([item.payload for item in items], keys, routing.key_ids(keys), dedups=named if any(named) else None), items

    def _new_item(self, incarnation: int) -> TrackedItem:
        self._items += 1
        padding = self.rng.randrange(300) if self.happens(0.2 * self.rates["big"]) else 3
        return TrackedItem(b"%d:" % self._items + b"." * padding, incarnation)

    def duration(self) -> int:
        return self.pick([1, 50_000, 1 * SECOND, 3 * SECOND, 6 * SECOND, 20 * SECOND, 70 * SECOND, 20 * MINUTE])


def _or(column: Sequence[T | None] | None, index: int, otherwise: T) -> T:
    value = column[index] if column else None
    return otherwise if value is None else value
