"""Bugs that tests plant into the source, one at a time, to prove that a simulation catches them.

Owns: `PlantedBugs`, the bugs of one simulation and how each is run. A bug that needs more than `SHORT_RUN` seeds is run
by `make test-long` only. How many seeds each bug took is printed (`pytest -s`): many mean that the simulation rarely
gets there.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from penstock.words.errors import PenstockError
from simulation.simulation import Simulation

SHORT_RUN = 40
Patch: TypeAlias = pytest.MonkeyPatch
Plant: TypeAlias = Callable[[Patch], None]


class PlantedBugs:
    """The bugs that one simulation must catch."""

    def __init__(self, simulation: type[Simulation]) -> None:
        self._simulation = simulation
        self._bugs: list[tuple[Plant, int]] = []

    def caught_within(self, most_seeds: int) -> Callable[[Plant], Plant]:
        """Register a bug that one of the seeds below `most_seeds` catches."""

        def register(plant: Plant) -> Plant:
            self._bugs.append((plant, most_seeds))
            return plant

        return register

    def cases(self) -> list[Any]:
        """The parameters (plant, most seeds) of a test, those with many seeds marked `long`."""
        return [pytest.param(plant, most, marks=[pytest.mark.long] * (most > SHORT_RUN), id=plant.__name__) for plant, most in self._bugs]

    def check_plantable(self) -> None:
        """Plant every bug without running it: a patch of a name that was changed fails here, also that of a long
        case."""
        for plant, _ in self._bugs:
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)

    def check_caught(self, plant: Plant, most_seeds: int, patch: Patch) -> None:
        """Plant a bug and run seeds until one fails, as it must."""
        plant(patch)
        for seed in range(most_seeds):
            failure = self._failure(seed)
            if failure is not None:
                print(f"\n{plant.__name__}: {seed + 1} seeds: {failure.splitlines()[0][:120]}")
                return
        pytest.fail(f"{plant.__name__} was not caught by {most_seeds} seeds")

    def _failure(self, seed: int) -> str | None:
        """How a seed fails. Other errors than a failed check or a Penstock error mean that the patch no longer fits:
        they prove nothing."""
        try:
            self._simulation(seed).run()
        except AssertionError as caught:
            if not isinstance(caught.__cause__, AssertionError | PenstockError):
                raise
            return str(caught)
        return None
