"""Each file call of a repair fails once: the log can be opened, or repaired again, and nothing more is lost."""

import contextlib
import errno
from functools import cache
from typing import NamedTuple

import pytest

from penstock.logs.files.verify import verify
from penstock.testing import Fault, Halt, SimulatedFiles
from penstock.words.errors import StorageFailed
from tests.logs.backends import INCARNATION, PARTITION, ComparableFrame
from tests.logs.damaged_logs import (
    check_append_works,
    check_second_repair,
    damaged,
    listed,
    lost,
    opened,
    run_repair,
)
from tests.logs.file_calls import FileCalls, calls_of
from tests.logs.scripted_owner import FOLDER

STEPWISE = ["two segments", "the end", "the newest whole", "everything", "the synced position too"]


@cache
def calls(name: str) -> FileCalls:
    files = damaged(name)
    return calls_of(files, lambda: run_repair(files))


class DamageReport(NamedTuple):
    """A damaged log before its repair."""

    frames: list[ComparableFrame]
    state: list[ComparableFrame]
    missed: tuple[set[int], set[int]]
    """By recovery."""
    lost: tuple[set[int], set[int]]


@cache
def before_repair(name: str) -> DamageReport:
    files = damaged(name)
    state, gaps = opened(files.copy())
    return DamageReport(listed(files)[0], state, lost(gaps), lost(verify(files, FOLDER, INCARNATION, PARTITION).damage))


def check_survives(files: SimulatedFiles, name: str) -> None:
    """A half-repaired log can be opened, and can be repaired, and neither loses more."""
    before = before_repair(name)
    state, gaps = opened(files.copy())
    assert state == before.state
    assert lost(gaps) == before.missed
    assert run_repair(files).opens
    frames, gaps = listed(files)
    assert frames == before.frames
    assert lost(gaps) == before.lost
    check_append_works(files.copy())
    check_second_repair(files)


@pytest.mark.parametrize("name", STEPWISE)
def test_killed_at_any_call(name: str) -> None:
    for number in calls(name).changing:
        check_survives(ended_at(name, number, seed=number % 3), name)


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("seed", range(3))
def test_the_power_cut_at_any_call(name: str, seed: int) -> None:
    for number in calls(name).changing:
        files = ended_at(name, number, seed)
        files.crash()
        check_survives(files, name)


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC, "torn"], ids=["EIO", "ENOSPC", "torn"])
def test_any_call_may_fail(name: str, how: Fault) -> None:
    for number in calls(name).all if how == errno.EIO else calls(name).changing:
        files = damaged(name)
        files.fail(files.calls + number, how)
        with contextlib.suppress(StorageFailed):
            run_repair(files)
        files.clear_faults()
        check_survives(files, name)


def ended_at(name: str, number: int, seed: int) -> SimulatedFiles:
    files = damaged(name, seed)
    files.fail(files.calls + number, "halt")
    with pytest.raises(Halt):
        run_repair(files)
    files.kill()
    return files
