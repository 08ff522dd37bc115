"""The common base of both simulations: it runs random steps from one seed, and a failure says how to repeat it.

Owns: `Simulation` (the loop over the steps, the command line), `RandomDraws` (all random choices) and `StepPrinter`
(prints each step).
A failure is an AssertionError whose last line is the command that repeats it: `python -m simulation.partition --seed
1234`, run from the repository root.
"""

import argparse
import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar, TypeVar

from penstock.rules import routing
from penstock.testing.disk import Halt

T = TypeVar("T")


class StepPrinter:
    """Passes lines to a listener, if there is one. Lines are formatted only then, as in logging: `say("%d items",
    count)`."""

    def __init__(self, listener: Callable[[str], None] | None) -> None:
        self._listener = listener

    def __call__(self, line: str, *values: object) -> None:
        if self._listener is not None:
            self._listener(line % values if values else line)


class RandomDraws:
    """Random choices, all drawn from one generator.

    Each seed first draws how often it uses a key, a schedule, a dedup id and so on, so that rare mixtures occur in some
    seeds.
    """

    request_rate: ClassVar[float]
    """The share of requests with an id in a seed whose own rate is 1."""

    def __init__(self, rng: random.Random, habits: Sequence[str], keys: Sequence[bytes]) -> None:
        self.rng = rng
        self.rates = {name: rng.random() for name in habits}
        self.keys = keys[: rng.randint(1, len(keys))]
        """The keys that this seed uses."""
        self._requests = 0

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, among: Sequence[T]) -> T:
        return self.rng.choice(among)

    def column(self, count: int, habit: str, value: Callable[[], T], rate: float = 1.0) -> list[T | None] | None:
        """A column of a batch: None, or a value for about 80 % of the items. How often it is None depends on this
        seed's habit."""
        if not self.happens(rate * self.rates[habit]):
            return None
        return [value() if self.happens(0.8) else None for _ in range(count)]

    def request_id(self) -> bytes | None:
        """A new request id, or None."""
        if not self.happens(self.request_rate * self.rates["request"]):
            return None
        self._requests += 1
        return routing.digest(b"request", b"%d" % self._requests)


class Simulation(ABC):
    """The run of one seed. A subclass sets `chance` and calls `set_steps` in its constructor."""

    name: ClassVar[str]
    """The name of the package, for the command that repeats a failure."""
    default_steps: ClassVar[int]
    damage_rate: ClassVar[float]
    """The probability, after each step, that a copy of the disk is damaged and checked."""
    chance: RandomDraws

    def __init__(self, seed: int, steps: int | None = None, say: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.steps = self.default_steps if steps is None else steps
        self.say = StepPrinter(say)
        self._damage_rng = random.Random(f"damage {seed}")
        """Separate, as is that of each damage, so that the other steps are the same with and without damage."""

    def set_steps(self, weights: Mapping[str, int], *actors: object) -> None:
        """Set the steps: each name is a method of the first of the actors that has one."""
        self._kinds = list(weights)
        self._weights = list(accumulate(weights.values()))
        self._actions: dict[str, Callable[[], None]] = {
            kind: next(getattr(actor, kind) for actor in actors if hasattr(actor, kind)) for kind in weights
        }

    def run(self) -> None:
        """Take all steps; raises AssertionError when a check fails."""
        with _rare_collections():
            try:
                self.begin()
                for number in range(self.steps):
                    kind = self.chance.rng.choices(self._kinds, cum_weights=self._weights)[0]
                    self.say("-- %d %s", number, kind)
                    self.step(self._actions[kind])
                    if self._damage_rng.random() < self.damage_rate:
                        self.say("   damage to a copy")
                        self.damage_a_copy(random.Random(f"damage {self.seed} {number}"))
                self.finish()
            except Exception as error:
                what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                steps = "" if self.steps == self.default_steps else f" --steps {self.steps}"
                raise AssertionError(f"{what}\npython -m simulation.{self.name} --seed {self.seed}{steps}") from error

    def step(self, action: Callable[[], None]) -> None:
        """Take one step. When a file call halts the simulated process, a new process opens the disk."""
        try:
            action()
        except Halt:
            self.crash_and_reopen(power=self.chance.happens(0.5))

    @abstractmethod
    def begin(self) -> None:
        """Prepare the first step."""

    @abstractmethod
    def finish(self) -> None:
        """Consume all remaining items; fail if one is not delivered."""

    @abstractmethod
    def crash_and_reopen(self, power: bool) -> None:
        """End the process, by a kill or a power cut, and start a new one."""

    @abstractmethod
    def damage_a_copy(self, rng: random.Random) -> None:
        """Damage a copy of the disk and check what it still serves."""

    @classmethod
    def main(cls) -> None:
        """Run one seed and print every step of it."""
        parser = argparse.ArgumentParser(
            prog=f"python -m simulation.{cls.name}", description=f"Run one simulated {cls.name} and print each step."
        )
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--steps", type=int, default=cls.default_steps)
        given = parser.parse_args()
        cls(given.seed, given.steps, say=print).run()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage once per run, which is faster; one seed leaves little garbage."""
    enabled = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
