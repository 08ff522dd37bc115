"""Whole lives of a partition, one per seed, and that a failing one can be repeated."""

import re
import subprocess
import sys

import pytest

from penstock.rules import settle
from simulation.partition.simulation import Simulation


def test_the_partition_is_what_the_model_says_through_everything(seeds: range) -> None:
    for seed in seeds:
        Simulation(seed).run()


def test_a_seed_tells_the_same_story_every_time() -> None:
    assert told(12) == told(12) != told(13)


def told(seed: int) -> list[str]:
    lines: list[str] = []
    Simulation(seed, say=lines.append).run()
    return lines


def test_a_failure_ends_in_the_line_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "note_failure", lambda *_: None)
    with pytest.raises(AssertionError) as caught:
        run_all(range(100), steps=40)
    assert re.fullmatch(r"python -m simulation\.partition\.simulation --seed \d+ --steps 40", str(caught.value).splitlines()[-1])


def run_all(seeds: range, steps: int) -> None:
    for seed in seeds:
        Simulation(seed, steps).run()


def test_the_line_runs_the_seed_and_tells_each_step() -> None:
    command = [sys.executable, "-m", "simulation.partition.simulation", "--seed", "5", "--steps", "12"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in output.splitlines() if line.startswith("--")] == [*map(str, range(12)), "drain"]
