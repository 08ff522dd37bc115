"""Runs of both simulations, one per seed; and a failing run can be repeated."""

import re
import subprocess
import sys

import pytest

from penstock.rules import settle
from simulation.broker.simulation import BrokerSimulation
from simulation.partition.simulation import PartitionSimulation
from simulation.simulation import Simulation

both = pytest.mark.parametrize("simulation", [PartitionSimulation, BrokerSimulation], ids=lambda simulation: simulation.name)


def test_the_partition_agrees_with_its_model(seeds: range) -> None:
    for seed in seeds:
        PartitionSimulation(seed).run()


def test_the_broker_agrees_with_its_model(seeds: range) -> None:
    for seed in seeds:
        BrokerSimulation(seed).run()


@both
def test_a_seed_takes_the_same_steps_every_time(simulation: type[Simulation]) -> None:
    assert printed_lines(simulation, 12) == printed_lines(simulation, 12) != printed_lines(simulation, 13)


def printed_lines(simulation: type[Simulation], seed: int) -> list[str]:
    lines: list[str] = []
    simulation(seed, say=lines.append).run()
    return lines


@both
def test_a_failure_ends_with_the_command_that_repeats_it(simulation: type[Simulation], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "add_failure", lambda *_: None)
    with pytest.raises(AssertionError) as caught:
        run_all(simulation, range(40), steps=50)
    assert re.fullmatch(rf"python -m simulation\.{simulation.name} --seed \d+ --steps 50", str(caught.value).splitlines()[-1])


def run_all(simulation: type[Simulation], seeds: range, steps: int) -> None:
    for seed in seeds:
        simulation(seed, steps).run()


@both
def test_the_command_runs_the_seed_and_prints_each_step(simulation: type[Simulation]) -> None:
    command = [sys.executable, "-m", f"simulation.{simulation.name}", "--seed", "5", "--steps", "12"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    last = {"partition": "drain", "broker": "finish"}[simulation.name]
    assert [line.split()[1] for line in output.splitlines() if line.startswith("--")] == [*map(str, range(12)), last]
