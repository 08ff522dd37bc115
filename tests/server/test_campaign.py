"""Processes produce and work over HTTP, while the server is killed, ended and frozen again and again.

What they did is judged by the checker of tests/processes: nothing that was acknowledged is lost, nothing is done twice,
a key has one holder, order is kept, and every call ends in time.
"""

from pathlib import Path

import pytest

from tests.server.campaign import FEW_ROLES, MIXED_ROLES, ROLES, run_server_campaign

SHOWN = 30


def run(folder: Path, seed: int, kills: int, roles: list[str], *, owner: bool = False, quick: bool = False) -> None:
    problems, done = run_server_campaign(folder, seed, kills, roles, owner=owner, quick=quick)
    print(done)
    if problems:
        pytest.fail("\n".join([*problems[:SHOWN], f"{len(problems) - 1} problems", done]), pytrace=False)


@pytest.mark.parametrize("seed", [1])
def test_five_kills_of_the_server(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 5, FEW_ROLES, quick=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", [100])
def test_a_hundred_kills_of_the_server(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 100, ROLES)


@pytest.mark.long
@pytest.mark.parametrize("seed", [200])
def test_fifty_kills_of_a_server_that_is_a_client_of_the_owner(tmp_path: Path, seed: int) -> None:
    """Some processes use the directory itself; the owner is killed as well, and any of them takes over."""
    run(tmp_path, seed, 50, MIXED_ROLES, owner=True)
