"""Each file call of a catalog fails once: reopening finds the catalog before or after a change, never in between."""

import contextlib
import errno
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.memory import MemoryLog
from penstock.loop import catalog as loop_catalog
from penstock.loop.catalog import Catalog
from penstock.rules import catalog
from penstock.rules.catalog import Created, Deleted
from penstock.rules.options import Options
from penstock.testing import Fault, Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import CorruptLog, OutcomeUnknown, StorageFailed
from penstock.words.limits import Policy

FAULTS: dict[str, Fault] = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "short": "short", "torn": "torn"}
STEPS: list[Callable[[Catalog], object]] = [
    lambda found: found.create("dead", Options(), incarnation=1),
    lambda found: found.create("orders", Options(Policy(max_attempts=7), "dead"), incarnation=2, partitions=3),
    lambda found: found.update(2, {"ttl": 5, "max_items": 9}),
    lambda found: found.reshape(2, [0, 1, 2, 3], read_only=[], marks={0: 4, 2: 8}, keep_since=0),
    lambda found: found.create("old", Options(), incarnation=3),
    lambda found: found.run([Deleted(3), Created("new", 4, Options(), 2, 77)]),
    lambda found: found.record_removed(3),
    lambda found: found.reshape(2, [1, 3], read_only=[0], marks={1: 9}, keep_since=0),
    lambda found: found.update(2, {"dead_queue": ""}),
    lambda found: found.delete("dead"),
    lambda found: found.begin_adoption(2, "drop"),
    lambda found: found.set_consumer_right(2, "somebody", 60),
    lambda found: found.end_adoption(2, "drop", "source", 3),
    lambda found: found.set_consumer_right(2, "", 0),
]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments, so that rotations and deletions happen."""
    monkeypatch.setattr(loop_catalog, "SEGMENT_BYTES", 500)


@cache
def expected_dumps() -> list[bytes]:
    """The catalog before the first step and after each step."""
    found = Catalog(MemoryLog(0, 0), MicrosecondClock())
    dumps = [catalog.dump(found.state)]
    for step in STEPS:
        step(found)
        dumps.append(catalog.dump(found.state))
    assert len(set(dumps)) == len(STEPS) + 1
    return dumps


def place(files: SimulatedFiles) -> FileStore:
    return FileStore.open("/data", files=files, clock=MicrosecondClock(), entropy=bytes)


def reopened(files: SimulatedFiles) -> bytes:
    """What a new process finds; opened twice, to check that opening changes nothing."""
    dumps = []
    for _ in range(2):
        files.kill()
        dumps.append(catalog.dump(Catalog(place(files).log(0, 0), MicrosecondClock()).state))
    assert dumps[0] == dumps[1]
    return dumps[0]


class CatalogRun:
    """Take every step, and repeat a step that failed."""

    def __init__(self, files: SimulatedFiles) -> None:
        self.files = files
        self.done = 0
        self.refusals: list[str] = []
        self._directory = place(files)
        self.begun = files.calls

    def run(self) -> None:
        found = self._open()
        while self.done < len(STEPS):
            try:
                STEPS[self.done](found)
                self.done += 1
            except StorageFailed as error:
                self._refused(found, error)
            except OutcomeUnknown:
                found.reopen()
                self.done = expected_dumps().index(catalog.dump(found.state), self.done, self.done + 2)
            assert catalog.dump(found.state) == expected_dumps()[self.done]
        with contextlib.suppress(StorageFailed):
            found.close()

    def _open(self) -> Catalog:
        for _ in range(2):
            with contextlib.suppress(StorageFailed):  # a failed opening lets go of the log
                return Catalog(self._directory.log(0, 0), MicrosecondClock())
        return Catalog(self._directory.log(0, 0), MicrosecondClock())

    def _refused(self, found: Catalog, error: StorageFailed) -> None:
        self.refusals.append(str(error))
        after = self.files.copy()
        after.crash()
        assert reopened(after) == expected_dumps()[self.done], "a refused change is not there after a power cut"
        if "failed before" in str(error):  # it was tidying up that failed, twice
            found.reopen()


@cache
def calls_of_a_life() -> range:
    life = CatalogRun(SimulatedFiles())
    life.run()
    assert life.refusals == []
    assert any(" remove " in call and call.endswith(".log") for call in life.files.trace), "segments are dropped"
    return range(life.begun + 1, life.files.calls + 1)


def lives(how: Fault, seed: int = 0) -> Iterator[CatalogRun]:
    """One run for each file call, in which that call fails."""
    for call in calls_of_a_life():
        life = CatalogRun(SimulatedFiles(random.Random(seed)))
        life.files.fail(call, how)
        try:
            life.run()
        except Halt:
            assert how == "halt"
        yield life


@pytest.mark.parametrize("how", FAULTS)
def test_a_failed_file_call_leaves_the_catalog_before_or_after_the_change(how: str) -> None:
    refusals = set()
    for life in lives(FAULTS[how]):
        assert life.done == len(STEPS)
        refusals.update(life.refusals)
        life.files.crash()
        assert reopened(life.files) == expected_dumps()[-1]
    assert all("; " in sentence for sentence in refusals)
    assert how == "short" or len(refusals) > 1


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_at_any_call_leaves_the_catalog_before_or_after_the_change(seed: int) -> None:
    found = set()
    for life in lives("halt", seed):
        life.files.crash()
        step = expected_dumps().index(reopened(life.files))
        assert step in (life.done, life.done + 1)
        found.add(step - life.done)
    assert found == {0, 1}


def test_a_kill_at_any_call_leaves_the_catalog_before_or_after_the_change() -> None:
    for life in lives("halt", 9):
        assert expected_dumps().index(reopened(life.files)) in (life.done, life.done + 1)


def begun(step: int) -> tuple[SimulatedFiles, Catalog]:
    """A catalog after the steps before the given one."""
    files = SimulatedFiles()
    found = Catalog(place(files).log(0, 0), MicrosecondClock())
    for earlier in STEPS[:step]:
        earlier(found)
    return files, found


def calls_of(step: int) -> int:
    files, found = begun(step)
    start = files.calls
    STEPS[step](found)
    return files.calls - start


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_while_the_disk_fails_the_catalog_refuses_changes(step: int) -> None:
    unknown = 0
    for ahead in range(1, calls_of(step) + 1):
        files, found = begun(step)
        for call in range(files.calls + ahead, files.calls + 200):
            files.fail(call, errno.EIO)
        try:
            STEPS[step](found)
            possible = expected_dumps()[step + 1 : step + 2]  # it was stored, and tidying up failed
        except OutcomeUnknown:
            possible = expected_dumps()[step : step + 2]
            unknown += 1
        for use in (STEPS[step], lambda found: found.delete("nobody"), lambda found: found.run([])):
            with pytest.raises(StorageFailed, match="failed before; reopen it"):
                use(found)
        with pytest.raises(StorageFailed):
            found.reopen()
        files.clear_faults()
        crashed = files.copy()
        crashed.crash()
        assert reopened(crashed) in possible
        found.reopen()
        assert catalog.dump(found.state) in possible
        if catalog.dump(found.state) == expected_dumps()[step]:
            STEPS[step](found)
        assert reopened(files) == expected_dumps()[step + 1]
    assert unknown


def test_an_interrupt_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between log and state: the catalog refuses changes until it is reopened."""
    files = SimulatedFiles()
    log = place(files).log(0, 0)
    found = Catalog(log, MicrosecondClock())
    STEPS[0](found)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log, "force_sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            STEPS[1](found)
    with pytest.raises(StorageFailed, match="reopen it"):
        STEPS[1](found)
    found.reopen()
    assert catalog.dump(found.state) == expected_dumps()[1]
    STEPS[1](found)
    assert reopened(files) == expected_dumps()[2]


def test_damage_found_while_reopening_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_catalog, "SEGMENT_BYTES", 1 << 20)
    files = SimulatedFiles()
    found = Catalog(place(files).log(0, 0), MicrosecondClock())
    STEPS[0](found)
    STEPS[1](found)
    path = next(path for path in files.contents() if path.endswith(".log"))
    files.flip_bit(path, 8 * files.content(path).index(b"dead"))
    files.fail(files.calls + 1, errno.EIO)
    with pytest.raises(OutcomeUnknown, match=r"not rolled back \(the catalog is damaged .*\); open the broker again") as caught:
        STEPS[2](found)
    assert isinstance(caught.value.__cause__, CorruptLog)
