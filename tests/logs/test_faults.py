"""Every file call of a log's life goes wrong once: with an error, a short write, the end of the process, the end of the power.

In each case: what was promised is there, what was refused is not, groups are whole, and the log goes on.
"""

import errno
import random
from contextlib import suppress
from functools import cache

import pytest

from penstock.testing import Fault, Halt, SimulatedFiles
from penstock.words.errors import StorageFailed
from tests.logs.backends import base_draft, comparable, draft, expected
from tests.logs.scripted_owner import ScriptedOwner, check_survivors, open_log

FAULTS: dict[str, Fault] = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "short": "short", "torn": "torn"}


@cache
def calls_of_a_life() -> int:
    """How many file calls the history makes when nothing goes wrong."""
    files = SimulatedFiles()
    owner = ScriptedOwner(files)
    owner.run()
    assert owner.failures == []
    check_survivors(files.copy(), owner.synced, owner.unsynced)
    return files.calls


def lived_until(call: int, how: Fault, seed: int = 0) -> ScriptedOwner:
    """An owner whose n-th file call went wrong."""
    files = SimulatedFiles(random.Random(seed))
    files.fail(call, how)
    owner = ScriptedOwner(files)
    try:
        owner.run()
    except Halt:
        assert how == "halt"
    return owner


@pytest.mark.parametrize("how", FAULTS)
def test_any_call_may_fail(how: str) -> None:
    seen = set()
    for call in range(1, calls_of_a_life() + 1):
        owner = lived_until(call, FAULTS[how])
        seen.update(owner.failures)
        check_survivors(owner.files.copy(), owner.synced, owner.unsynced)
        owner.files.crash()
        check_survivors(owner.files, owner.synced, owner.unsynced)
    if how in ("EIO", "ENOSPC"):
        assert len(seen) > 1
        assert all("; " in message for message in seen), "an error says what is wrong; and what to do"


@pytest.mark.parametrize("seed", range(6))
def test_the_power_may_be_cut_at_any_call(seed: int) -> None:
    for call in range(1, calls_of_a_life() + 1):
        owner = lived_until(call, "halt", seed)
        owner.files.crash()
        check_survivors(owner.files, owner.synced, owner.unsynced)


def test_the_process_may_be_killed_at_any_call() -> None:
    for call in range(1, calls_of_a_life() + 1):
        owner = lived_until(call, "halt", seed=call)
        check_survivors(owner.files, owner.synced, owner.unsynced)


@pytest.mark.parametrize("ahead", range(1, 13))
def test_what_was_found_after_a_failure_and_a_kill_is_found_again_after_a_power_cut(ahead: int) -> None:
    """Going back is cut off anywhere; the next process makes do with what it finds; a power cut then undoes what was not synced."""
    for call in range(1, calls_of_a_life() + 1):
        files = SimulatedFiles(random.Random(call))
        files.fail(call, errno.EIO)
        files.fail(call + ahead, "halt")
        with suppress(Halt):
            ScriptedOwner(files).run()
        files.clear_faults()
        log = open_log(files)
        list(log.recover())
        found = comparable(log.frames())
        files.crash()
        log = open_log(files)
        list(log.recover())
        assert comparable(log.frames()) == found, f"call {call}"


def test_a_failed_sync_is_never_taken_back() -> None:
    """The system drops what a failed sync should have written and says yes to the next one: so the log must not ask again."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    log.append([draft(0, 1, b"safe")])
    log.sync()
    log.append([draft(1, 1, b"lost")])
    files.fail(files.calls + 1, errno.EIO)
    with pytest.raises(StorageFailed, match="Input/output error"):
        log.sync()
    assert " sync " in files.trace[-1]
    for refused in (lambda: log.append([draft(2, 1, b"no")]), log.sync, lambda: log.rotate(base_draft(1))):
        with pytest.raises(StorageFailed, match="reset"):
            refused()
    log.reset()
    assert comparable(log.recover()) == expected([draft(0, 1, b"safe")])
    assert log.wants_base, "the file that failed is not written to again"
    log.rotate(base_draft(1))
    log.append([draft(1, 1, b"instead")])
    log.sync()
    files.crash()
    log = open_log(files)
    list(log.recover())
    assert comparable(log.frames()) == expected([draft(0, 1, b"safe"), base_draft(1), draft(1, 1, b"instead")])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300))
def test_power_cuts_by_the_hundred(seed: int) -> None:
    test_the_power_may_be_cut_at_any_call(seed)
