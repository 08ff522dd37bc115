"""What callers of a simulated broker might ask next, drawn from one generator.

Owns: `Chance`. Each seed has its own habits (how often a key, a schedule, a dedup id …), so that rare mixtures come up somewhere.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.rules import routing
from penstock.words.batch import Batch
from penstock.words.clock import HOUR, MINUTE, SECOND
from simulation.broker.items import Tag

T = TypeVar("T")
KEYS = [b"a", b"b", b"customer-42", b"", b"e", b"zz"]
DEDUPS = [b"one", b"two", b"three"]


class Chance:
    """Where the next request comes from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.habits = {name: rng.random() for name in ("keyed", "priority", "at", "ttl", "dedup", "request", "big", "retention", "limit")}
        self._keys = KEYS[: rng.randint(1, len(KEYS))]
        self._items = 0
        self._requests = 0

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, among: Sequence[T]) -> T:
        return self.rng.choice(among)

    def options(self) -> dict[str, object]:
        return {
            "lease_timeout": self.pick([5, 30]) * SECOND,
            "max_attempts": self.pick([0, 1, 2, 3]),
            "dedup_window": self.pick([20 * SECOND, 10 * MINUTE]),
            "on_bury": self.pick(["release", "park"]),
        }

    def habitual(self) -> dict[str, object]:
        """Options that all queues of a seed share, and that never change."""
        retention = (
            {"max_age": 1 * MINUTE, "max_bytes": 1_500, "max_segments": 2}
            if self.habits["retention"] < 0.25
            else {"max_age": 0, "max_bytes": 0}
        )
        return {"retention": retention, "max_items": 12 if self.habits["limit"] < 0.15 else 0}

    def batch(self, incarnation: int, count: int, wall: int, *, plain: bool = False) -> tuple[Batch, list[Tag]]:
        """Items that nobody has produced before."""
        keys = self._column(count, "keyed", lambda: self.pick(self._keys))
        priorities = self._column(count, "priority", lambda: self.rng.randrange(10), rare=0.3) if not plain else None
        ats = self._column(count, "at", lambda: wall + self.pick([50_000, 2 * SECOND, 40 * SECOND, 1 * HOUR]), rare=0.3)
        ttls = self._column(count, "ttl", lambda: self.pick([5, 60]) * SECOND, rare=0.3)
        dedups = self._column(count, "dedup", lambda: self.pick(DEDUPS), rare=0.4) if not plain else None
        tags = [self._tag(incarnation) for _ in range(count)]
        for index, tag in enumerate(tags):
            tag.key = keys[index] if keys else None
            tag.priority = _or(priorities, index, 5)
            tag.mortal = _or(ttls, index, 0) > 0
            tag.dedup = dedups[index] if dedups else None
            at = _or(ats, index, 0)
            tag.at, tag.scheduled = (at if at > wall + 100_000 else 0), at > 0
            tag.due = tag.at
        named = [None if tag.dedup is None else routing.dedup_digest(tag.key, tag.dedup) for tag in tags]
        return Batch(
            [tag.payload for tag in tags],
            keys,
            routing.key_ids(keys) if keys else None,
            priorities=bytes(tag.priority for tag in tags) if priorities else None,
            ats=[_or(ats, index, 0) for index in range(count)] if ats else None,
            ttls=[_or(ttls, index, 0) for index in range(count)] if ttls else None,
            dedups=named if dedups else None,
        ), tags

    def key(self) -> bytes:
        return self.pick(self._keys)

    def some_keys(self) -> list[tuple[bytes | None, bytes | None]]:
        """Some of the keys that this seed uses, each without a dedup id."""
        return [(key, None) for key in self.rng.sample(self._keys, self.rng.randint(1, len(self._keys)))]

    def keyed(self, incarnation: int, names: Sequence[tuple[bytes | None, bytes | None]]) -> tuple[Batch, list[Tag]]:
        """New items with these keys and dedup ids, ready at once and without any other option."""
        tags = [self._tag(incarnation) for _ in names]
        for tag, (key, dedup) in zip(tags, names, strict=True):
            tag.key, tag.dedup = key, dedup
        keys = [tag.key for tag in tags]
        named = [None if tag.dedup is None else routing.dedup_digest(tag.key, tag.dedup) for tag in tags]
        return Batch([tag.payload for tag in tags], keys, routing.key_ids(keys), dedups=named if any(named) else None), tags

    def _tag(self, incarnation: int) -> Tag:
        self._items += 1
        padding = self.rng.randrange(300) if self.happens(0.2 * self.habits["big"]) else 3
        return Tag(b"%d:" % self._items + b"." * padding, incarnation)

    def _column(self, count: int, habit: str, value: Callable[[], T], rare: float = 1.0) -> list[T | None] | None:
        """A column, or None: as often as the habit of this seed has it, and then not for every item."""
        if not self.happens(rare * self.habits[habit]):
            return None
        return [value() if self.happens(0.8) else None for _ in range(count)]

    def request_id(self) -> bytes | None:
        if not self.happens(0.7 * self.habits["request"]):
            return None
        self._requests += 1
        return routing.digest(b"request", b"%d" % self._requests)

    def duration(self) -> int:
        return self.pick([1, 50_000, 1 * SECOND, 3 * SECOND, 6 * SECOND, 20 * SECOND, 70 * SECOND, 20 * MINUTE])


def _or(column: Sequence[T | None] | None, index: int, otherwise: T) -> T:
    value = column[index] if column else None
    return otherwise if value is None else value
