"""Eight processes produce and work on one directory, while its owner is killed and frozen again and again.

What they did is judged by the checker (tests/processes/checker.py): nothing that was acknowledged is lost, nothing is
done twice, a key has one holder, order is kept, and every call ends in time.
"""

from pathlib import Path

import pytest

from tests.processes.campaign import run_campaign

SHOWN = 30


def run(folder: Path, seed: int, takeovers: int) -> None:
    problems, done = run_campaign(folder, seed, takeovers)
    print(done)
    if problems:
        pytest.fail("\n".join([*problems[:SHOWN], f"{len(problems) - 1} problems", done]), pytrace=False)


@pytest.mark.parametrize("seed", [1])
def test_five_takeovers(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 5)


@pytest.mark.long
@pytest.mark.parametrize("seed", [100, 101])
def test_a_hundred_takeovers(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 100)
