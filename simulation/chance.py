"""Random choices of a simulation, all drawn from one generator.

Owns: `Chance`. Each seed has its own habits (how often a key, a schedule, a dedup id …), so that rare mixtures come up in some seeds.
"""

import random
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from penstock.rules import routing

T = TypeVar("T")


class Chance:
    """One generator, and the habits of its seed."""

    request_rate: ClassVar[float]
    """How many requests have an id, where the habit of a seed is to give one to all."""

    def __init__(self, rng: random.Random, habits: Sequence[str], keys: Sequence[bytes]) -> None:
        self.rng = rng
        self.habits = {name: rng.random() for name in habits}
        self.keys = keys[: rng.randint(1, len(keys))]
        """Those that this seed uses."""
        self._requests = 0

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, among: Sequence[T]) -> T:
        return self.rng.choice(among)

    def column(self, count: int, habit: str, value: Callable[[], T], rate: float = 1.0) -> list[T | None] | None:
        """One value for each item of a batch, or None: as often as the habit of this seed has it, and then not for every item."""
        if not self.happens(rate * self.habits[habit]):
            return None
        return [value() if self.happens(0.8) else None for _ in range(count)]

    def request_id(self) -> bytes | None:
        """A new request id, or None."""
        if not self.happens(self.request_rate * self.habits["request"]):
            return None
        self._requests += 1
        return routing.digest(b"request", b"%d" % self._requests)
