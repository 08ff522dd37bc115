"""Deciding changes nothing, through whole lives of partitions and brokers."""

from collections.abc import Callable, Iterator

import pytest

from penstock.rules.keys import Keys, Line
from simulation.broker.simulation import BrokerSimulation
from simulation.partition.simulation import PartitionSimulation
from tests.purity import watch_decisions

SEEDS = 20


@pytest.fixture(autouse=True)
def decisions_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_decisions(monkeypatch)


@pytest.mark.parametrize("simulation", [PartitionSimulation, BrokerSimulation], ids=["partition", "broker"])
def test_deciding_changes_nothing(simulation: type[PartitionSimulation] | type[BrokerSimulation]) -> None:
    run_all(simulation)


def run_all(simulation: type[PartitionSimulation] | type[BrokerSimulation]) -> None:
    for seed in range(SEEDS):
        simulation(seed).run()


@pytest.mark.parametrize("change", [Keys.tidy, lambda keys: keys.line(7)], ids=["a heap is tidied", "a line is made"])
def test_a_decision_that_changes_something_is_seen(change: Callable[[Keys], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: Keys, lane: int) -> Iterator[tuple[tuple[int, int, int], Line]]:
        change(self)
        return right(self, lane)

    right = Keys.free
    monkeypatch.setattr(Keys, "tidy", lambda self: None)
    monkeypatch.setattr(Keys, "free", free)
    with pytest.raises(AssertionError, match="changed the state"):
        run_all(PartitionSimulation)
