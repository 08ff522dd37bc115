"""`decide` changes neither the state nor the command, in whole runs of both simulations."""

from collections.abc import Callable, Iterator

import pytest

from penstock.rules.keys import KeyLine, KeyLines
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


@pytest.mark.parametrize(
    "change", [KeyLines.drop_stale_heads, lambda keys: keys.line(7)], ids=["stale heads are dropped", "a line is created"]
)
def test_a_decision_that_changes_something_is_seen(change: Callable[[KeyLines], object], monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: KeyLines, lane: int, want: int = 1) -> Iterator[tuple[tuple[int, int, int], KeyLine]]:
        change(self)
        return right(self, lane, want)

    right = KeyLines.free_lines
    monkeypatch.setattr(KeyLines, "drop_stale_heads", lambda self: None)
    monkeypatch.setattr(KeyLines, "free_lines", free)
    with pytest.raises(AssertionError, match="changed the state"):
        run_all(PartitionSimulation)
