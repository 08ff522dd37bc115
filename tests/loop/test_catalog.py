"""The catalog and its log: answered changes are stored, refused ones are not, and reopening restores them."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.repair import repair
from penstock.logs.log import Draft, Frame, FrameType, Log
from penstock.logs.memory import MemoryLog
from penstock.loop import catalog as loop_catalog
from penstock.loop.catalog import Catalog
from penstock.rules import catalog
from penstock.rules.catalog import Created, Deleted, QueueEntry
from penstock.rules.options import Options
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, QueueExists, QueueNotFound

FOLDER = f"/data/logs/{0:016x}/{0:05}"
Opener = Callable[[], Catalog]


def in_memory() -> Opener:
    kept: list[Frame] = []
    return lambda: Catalog(MemoryLog(0, 0, kept), MicrosecondClock())


def in_files(files: SimulatedFiles | None = None) -> Opener:
    disk = files or SimulatedFiles()
    return lambda: Catalog(FileLog(disk, FOLDER, 0, 0), MicrosecondClock())


@pytest.fixture(params=[in_memory, in_files])
def reopen(request: pytest.FixtureRequest) -> Opener:
    """Opens the same catalog each time it is called."""
    opener: Opener = request.param()
    return opener


def fill(found: Catalog, names: range) -> None:
    for number in names:
        found.create(f"queue-{number}", Options(), incarnation=number + 1, partitions=1 + number % 3)


def segments(files: SimulatedFiles) -> list[str]:
    return sorted(path for path in files.contents() if path.endswith(".log"))


def names(found: Catalog) -> list[str]:
    return [entry.name for entry in found.entries]


# -- what is told is there -----------------------------------------------------------------------------


def test_reopening_restores_every_answered_change(reopen: Opener) -> None:
    first = reopen()
    first.create("dead", Options(), incarnation=1)
    made = first.create("orders", Options(dead_queue="dead"), incarnation=2, partitions=2)
    first.update(made.incarnation, {"max_attempts": 3})
    shaped = first.reshape(2, [0, 1, 2], read_only=[], marks={0: 5}, keep_since=0)
    first.create("old", Options(), incarnation=3)
    gone = first.delete("old")
    first.close()
    again = reopen()
    assert names(again) == ["dead", "orders"]
    assert again.find("orders") == again.get(2) == shaped
    assert (shaped.options.policy.max_attempts, shaped.created_at) == (3, MicrosecondClock().read().wall)
    assert again.deleted == [gone.incarnation] == [3]
    again.record_removed(3)
    again.close()
    last = reopen()
    assert last.deleted == []
    assert catalog.dump(last.state) == catalog.dump(again.state)
    last.close()


def test_what_is_refused_leaves_nothing_in_the_log(reopen: Opener) -> None:
    found = reopen()
    entry = found.create("orders", Options(), incarnation=1)
    written = found._log.segment_bytes
    with pytest.raises(QueueExists):
        found.create("orders", Options(), incarnation=2)
    with pytest.raises(QueueNotFound):
        found.get(2)
    with pytest.raises(InvalidRequest):
        found.update(1, {"partitions": 2})
    assert found.create("orders", Options(), incarnation=2, exist_ok=True) is entry
    assert found.update(1, {}) is entry
    found.record_removed(9)
    assert found._log.segment_bytes == written


def test_records_of_one_run_are_stored_all_or_none(reopen: Opener) -> None:
    found = reopen()
    found.create("old", Options(), incarnation=1)
    found.run([Deleted(1), Created("new", 2, Options(), 1, 0)])
    kinds = [frame.count for frame in found._log.frames() if isinstance(frame, Frame)]
    assert kinds == [1, 2]
    found.close()
    assert names(reopen()) == ["new"]


def test_the_log_of_incarnation_0_has_a_directory_like_any_other(tmp_path: Path) -> None:
    for expected in ([], ["queue-0"]):
        directory = FileStore.open(tmp_path)
        found = Catalog(directory.log(loop_catalog.INCARNATION, loop_catalog.PARTITION), MicrosecondClock())
        assert names(found) == expected
        found.create("queue-0", Options(), incarnation=1, exist_ok=True)
        assert [tuple(owner) for owner in directory.logs()] == [(0, 0)]
        directory.close()


@pytest.mark.parametrize("durability", ["fsync", "interval", "os"])
def test_a_change_survives_a_power_cut_in_every_durability_mode(durability: str) -> None:
    files = SimulatedFiles()
    directory = FileStore.open("/data", files=files, durability=durability)  # type: ignore[arg-type]
    fill(Catalog(directory.log(0, 0), MicrosecondClock()), range(3))
    files.crash()
    assert names(in_files(files)()) == ["queue-0", "queue-1", "queue-2"]


# -- growing -------------------------------------------------------------------------------------------


def bases(log: Log) -> int:
    return sum(frame.type is FrameType.BASE for frame in log.frames() if isinstance(frame, Frame))


def test_a_large_segment_is_followed_by_one_that_begins_with_a_base(reopen: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_catalog, "SEGMENT_BYTES", 400)
    found = reopen()
    fill(found, range(1))
    assert bases(found._log) == 0
    for attempts in range(100):
        found.update(1, {"max_attempts": attempts})
        assert found._log.segment_bytes < 1_000
    assert len(found._log.segments()) == bases(found._log) == loop_catalog.KEPT_SEGMENTS
    dumped = catalog.dump(found.state)
    found.close()
    assert catalog.dump(reopen().state) == dumped


def test_a_large_catalog_is_not_written_anew_at_every_change(reopen: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_catalog, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(loop_catalog, "KEPT_SEGMENTS", 1_000)
    found = reopen()
    fill(found, range(200))
    assert 2 <= bases(found._log) < 20
    before = bases(found._log)
    for number in range(200, 205):  # how large the Base is must be known after opening, too
        found.close()
        found = reopen()
        fill(found, range(number, number + 1))
    assert bases(found._log) - before <= 1


# -- damage --------------------------------------------------------------------------------------------


def damaged(files: SimulatedFiles, name: str) -> None:
    """Damage the frame that created a queue."""
    path = next(path for path in segments(files) if name.encode() in files.content(path))
    files.flip_bit(path, 8 * files.content(path).index(name.encode()))


def test_a_damaged_catalog_does_not_open_until_it_is_repaired() -> None:
    files = SimulatedFiles()
    found = in_files(files)()
    fill(found, range(4))
    found.update(2, {"max_attempts": 3})
    found.close()
    damaged(files, "queue-1")
    directory = FileStore.open("/data", files=files)
    for log in (directory.log(0, 0), None):  # held here, but no longer open
        with pytest.raises(CorruptLog, match=r"the catalog is damaged at .*; run verify, then repair"):
            Catalog(log or directory.log(0, 0), MicrosecondClock())
    directory.close()
    assert repair(files, FOLDER, 0, 0, clock=MicrosecondClock()).opens
    again = in_files(files)()
    assert names(again) == ["queue-0", "queue-2", "queue-3"]
    assert [gap.repaired for gap in again.gaps] == [True]
    again.create("queue-1", Options(), incarnation=99)
    again.close()
    last = in_files(files)()
    assert names(last) == ["queue-0", "queue-1", "queue-2", "queue-3"]
    assert last.gaps == []


def test_a_damaged_base_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_catalog, "SEGMENT_BYTES", 300)
    files = SimulatedFiles()
    found = in_files(files)()
    fill(found, range(40))
    dumped = catalog.dump(found.state)
    found.close()
    newest = segments(files)[-1]
    assert segments(files)[:-1], "there is a segment before it"
    files.flip_bit(newest, 8 * 80)
    assert catalog.dump(in_files(files)().state) == dumped


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([[99, 1]]), msgspec.msgpack.encode([[4, "x"]])], ids=repr)
def test_a_record_of_a_newer_penstock_is_refused(body: bytes) -> None:
    log = MemoryLog(0, 0)
    list(log.recover())
    log.append([Draft(FrameType.STATE, 0, 1, 0, 0, 0, [body])])
    with pytest.raises(CorruptLog, match=r"frame 1 of the catalog is whole but cannot be understood .*; use a newer"):
        Catalog(MemoryLog(0, 0, log.kept), MicrosecondClock())


# -- the end -------------------------------------------------------------------------------------------


def test_a_closed_catalog_refuses_every_call(reopen: Opener) -> None:
    found = reopen()
    fill(found, range(1))
    assert repr(found) == "Catalog(open, 1 queues)"
    found.close()
    found.close()
    assert repr(found) == "Catalog(closed, 1 queues)"
    uses: list[Callable[[], QueueEntry | None]] = [
        lambda: found.create("queue-0", Options(), incarnation=2),
        lambda: found.update(1, {}),
        lambda: found.reshape(1, [0], read_only=[], marks={}, keep_since=0),
        lambda: found.delete("nobody"),
        lambda: found.record_removed(1),
        lambda: found.run([]),
        found.reopen,
    ]
    for use in uses:
        with pytest.raises(BrokerClosed, match="; open the broker again"):
            use()
