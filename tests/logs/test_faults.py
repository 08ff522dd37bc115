"""Each file call of a log fails once: with an error, a short write, a kill or a power cut.

In each case synced groups are in the log, refused groups are not, groups are whole, and the log can be appended to.
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
def calls_of_the_script() -> int:
    """How many file calls the script makes if none fails."""
    files = SimulatedFiles()
    owner = ScriptedOwner(files)
    owner.run()
    assert owner.failures == []
    check_survivors(files.copy(), owner.synced, owner.unsynced)
    return files.calls


def owner_with_fault(call: int, how: Fault, seed: int = 0) -> ScriptedOwner:
    """An owner whose file call number `call` failed."""
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
    for call in range(1, calls_of_the_script() + 1):
        owner = owner_with_fault(call, FAULTS[how])
        seen.update(owner.failures)
        check_survivors(owner.files.copy(), owner.synced, owner.unsynced)
        owner.files.crash()
        check_survivors(owner.files, owner.synced, owner.unsynced)
    if how in ("EIO", "ENOSPC"):
        assert len(seen) > 1
        assert all("; " in message for message in seen), "an error says what is wrong; and what to do"


@pytest.mark.parametrize("seed", range(6))
def test_the_power_may_be_cut_at_any_call(seed: int) -> None:
    for call in range(1, calls_of_the_script() + 1):
        owner = owner_with_fault(call, "halt", seed)
        owner.files.crash()
        check_survivors(owner.files, owner.synced, owner.unsynced)


def test_the_process_may_be_killed_at_any_call() -> None:
    for call in range(1, calls_of_the_script() + 1):
        owner = owner_with_fault(call, "halt", seed=call)
        check_survivors(owner.files, owner.synced, owner.unsynced)


@pytest.mark.parametrize("ahead", range(1, 13))
def test_frames_recovered_after_a_failure_and_a_kill_survive_a_power_cut(ahead: int) -> None:
    """A kill at any call of a reset; the next process recovers the log; then a power cut undoes what was not synced."""
    for call in range(1, calls_of_the_script() + 1):
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


def test_after_a_failed_sync_its_frames_are_gone_and_a_new_segment_begins() -> None:
    """The system may drop the data of a failed sync and report success for the next, on which the log must not rely."""
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
def test_many_power_cuts(seed: int) -> None:
    test_the_power_may_be_cut_at_any_call(seed)
