"""The simulated disk: power cuts, faults and limits; without faults it behaves as the system's files do."""

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.logs.files.filesystem import Files, SystemFiles
from penstock.testing import Fault, Halt, SimulatedFiles

SEEDS = range(200)


def disk(seed: int = 0) -> SimulatedFiles:
    files = SimulatedFiles(random.Random(seed))
    files.put_file("/d/old", b"old")
    return files


def written(files: SimulatedFiles, path: str, data: bytes, *, sync: bool = False, name: bool = False) -> int:
    handle = files.open(path, "append")
    files.write(handle, [data])
    if sync:
        files.sync(handle)
    if name:
        files.sync_directory("/d")
    return handle


def conversation(files: Files, top: str) -> list[object]:
    """Make every kind of call, and return all results; an OSError as its number."""
    heard: list[object] = []

    def ask(call: str, *arguments: object) -> object:
        try:
            heard.append(getattr(files, call)(*arguments))
        except OSError as problem:
            heard.append(problem.errno)
        return heard[-1]

    files.make_directory(f"{top}/a/b")
    files.make_directory(f"{top}/a/b")
    log, side = files.open(f"{top}/a/log", "append"), files.open(f"{top}/a/side", "update")
    ask("write", log, [b"one", bytearray(b"two"), memoryview(b"three")])
    ask("pwrite", side, b"xyz", 4)
    ask("pread", side, 10, 0)
    ask("pread", log, 5, 3)
    ask("pread", log, 5, 300)
    ask("truncate", log, 4)
    ask("write", log, [b"end"])
    ask("truncate", side, 9)
    ask("size", side)
    for handle in (log, side):
        files.sync(handle)
    ask("pread", files.open(f"{top}/a/log", "read"), 100, 0)
    ask("pread", files.open(f"{top}/a/side", "read"), 100, 0)
    ask("list", f"{top}/a")
    ask("rename", f"{top}/a/side", f"{top}/a/log")
    ask("list", f"{top}/a")
    ask("pread", log, 100, 0)
    ask("remove", f"{top}/a/log")
    ask("exists", f"{top}/a/log")
    for call in ("list", "remove", "sync_directory"):
        ask(call, f"{top}/missing")
    ask("open", f"{top}/missing", "read")
    ask("open", f"{top}/missing/log", "append")
    ask("rename", f"{top}/missing", f"{top}/other")
    ask("list", f"{top}/a/b")
    for path in ("d", "d/empty", "d/full", "d/moved"):
        files.make_directory(f"{top}/{path}")
    kept = files.open(f"{top}/d/moved/log", "append")
    ask("write", kept, [b"kept"])
    files.close(files.open(f"{top}/d/full/log", "append"))
    files.close(files.open(f"{top}/d/file", "append"))
    for target in ("full", "file", "moved", "empty", "again"):
        ask("rename", f"{top}/d/{'moved' if target != 'again' else 'empty'}", f"{top}/d/{target}")
        ask("list", f"{top}/d")
    ask("rename", f"{top}/d/file", f"{top}/d/again")
    ask("pread", files.open(f"{top}/d/again/log", "read"), 9, 0)
    ask("write", kept, [b" open"])
    ask("pread", kept, 9, 0)
    first = files.lock(f"{top}/LOCK")
    assert first is not None
    ask("lock", f"{top}/LOCK")
    files.close(first)
    assert files.lock(f"{top}/LOCK") is not None
    ask("pread", 9_999, 1, 0)
    return heard


def test_results_and_errors_are_those_of_the_system(tmp_path: Path) -> None:
    files = SimulatedFiles()
    assert conversation(files, "/top") == conversation(SystemFiles(), str(tmp_path))


def test_synced_files_with_synced_names_survive_every_power_cut() -> None:
    for seed in SEEDS:
        files = disk(seed)
        handle = written(files, "/d/log", b"safe", sync=True, name=True)
        files.write(handle, [b"maybe" * 400])
        files.crash()
        assert files.content("/d/log")[:4] == b"safe"
        assert files.content("/d/old") == b"old"


def test_unsynced_data_is_kept_lost_and_torn() -> None:
    data, ends = bytes(range(1, 256)) * 8, set()
    for seed in SEEDS:
        files = disk(seed)
        written(files, "/d/log", b"", sync=True, name=True)
        written(files, "/d/log", data)
        files.crash()
        left = files.content("/d/log")
        assert all(byte in (0, data[place]) for place, byte in enumerate(left))
        ends.add("kept" if left == data else "lost" if not left else "torn" if data.startswith(left) else "holes")
    assert ends == {"kept", "lost", "torn", "holes"}


def test_a_sector_is_overwritten_whole_or_not_at_all() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        files.put_file("/d/side", b"a" * 1_024)
        files.pwrite(files.open("/d/side", "update"), b"b" * 1_000, 12)
        files.crash()
        ends.add(files.content("/d/side"))
    first, second = b"a" * 12 + b"b" * 500, b"b" * 500 + b"a" * 12
    assert ends == {one + other for one in (b"a" * 512, first) for other in (b"a" * 512, second)}


def test_a_later_write_may_survive_an_earlier_one() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        handle = written(files, "/d/log", b"", sync=True, name=True)
        files.write(handle, [b"first"])
        files.write(handle, [b"second"])
        files.crash()
        ends.add(files.content("/d/log"))
    assert {b"", b"first", b"firstsecond", bytes(5) + b"second"} <= ends


def test_a_name_needs_its_directory_synced() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        written(files, "/d/log", b"data", sync=True)
        files.crash()
        ends.add(files.contents().get("/d/log"))
    assert ends == {None, b"data"}


def test_unsynced_renames_and_removes_are_kept_or_undone() -> None:
    ends: set[tuple[object, bytes]] = set()
    for seed in SEEDS:
        files = disk(seed)
        written(files, "/d/new", b"new", sync=True, name=True)
        files.rename("/d/new", "/d/old")
        files.crash()
        ends.add((files.contents().get("/d/new"), files.content("/d/old")))
        files.remove("/d/old")
        files.crash()
        ends.add((files.exists("/d/old"), b""))
    assert ends == {(b"new", b"old"), (None, b"new"), (True, b""), (False, b"")}


def test_after_a_power_cut_a_renamed_directory_has_its_old_or_its_new_name() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        files.make_directory("/d/first")
        written(files, "/d/first/log", b"data", sync=True, name=True)
        files.sync_directory("/d/first")
        files.sync_directory("/d")
        files.rename("/d/first", "/d/second")
        files.rename("/d/second", "/d/third")
        if seed % 3 == 0:
            files.sync_directory("/d")
        files.crash()
        (name,) = [name for name in ("first", "second", "third") if files.exists(f"/d/{name}")]
        assert files.content(f"/d/{name}/log") == b"data"
        assert name == "third" or seed % 3
        ends.add(name)
    assert ends == {"first", "second", "third"}


def test_a_renamed_directory_keeps_only_what_was_synced() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        files.make_directory("/d/in")
        written(files, "/d/in/log", b"data", sync=True)
        files.rename("/d/in", "/d/out")
        files.sync_directory("/d")
        files.crash()
        ends.add((files.exists("/d/in"), files.contents().get("/d/out/log")))
    assert ends == {(False, None), (False, b"data")}


def test_the_files_of_a_lost_directory_are_lost() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        files.make_directory("/d/in")
        written(files, "/d/in/log", b"data", sync=True)
        files.sync_directory("/d/in")
        files.crash()
        ends.add((files.exists("/d/in"), files.exists("/d/in/log")))
    assert ends == {(False, False), (True, True)}


def test_a_kill_keeps_everything_written_and_frees_locks() -> None:
    files = disk()
    handle = written(files, "/d/log", b"data")
    assert files.lock("/d/LOCK") is not None
    files.kill()
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.write(handle, [b"late"])
    assert files.content("/d/log") == b"data"
    assert files.lock("/d/LOCK") is not None


def test_the_same_seed_gives_the_same_power_cut() -> None:
    def after(seed: int) -> dict[str, bytes]:
        files = disk(seed)
        for name in "abc":
            written(files, f"/d/{name}", name.encode() * 2_000)
        files.crash()
        return files.contents()

    assert all(after(seed) == after(seed) for seed in SEEDS)
    assert len({repr(after(seed)) for seed in SEEDS}) > 50


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_call_chosen_to_fail_fails_once_and_does_nothing(number: int) -> None:
    files = disk()
    handle = written(files, "/d/log", b"data")
    files.fail(files.calls + 2, number)
    files.write(handle, [b"more"])
    with pytest.raises(OSError) as caught:  # noqa: PT011
        files.write(handle, [b"lost"])
    files.write(handle, [b"end"])
    assert (caught.value.errno, files.content("/d/log")) == (number, b"datamoreend")
    assert f"write /d/log 4 bytes at 8 [{number}]" in files.trace[-2]
    with pytest.raises(ValueError, match="made already"):
        files.fail(files.calls, errno.EIO)
    files.fail(files.calls + 1, number)
    files.clear_faults()
    assert files.write(handle, [b"mended"]) == 6


@pytest.mark.parametrize("how", ["short", "torn"])
def test_a_short_write_returns_how_much_it_wrote(how: Fault) -> None:
    files = disk()
    handle = files.open("/d/log", "append")
    files.fail(files.calls + 1, how)
    size = files.write(handle, [b"0123456789"])
    assert 0 < size < 10
    assert files.content("/d/log") == b"0123456789"[:size]
    if how == "torn":
        with pytest.raises(OSError, match="No space"):
            files.write(handle, [b"rest"])
    assert files.write(handle, [b"rest"]) == 4


def test_a_later_sync_does_not_write_what_a_failed_sync_lost() -> None:
    for seed in SEEDS:
        files = disk(seed)
        handle = written(files, "/d/log", b"safe", sync=True, name=True)
        files.write(handle, [b"gone"])
        files.fail(files.calls + 1, errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            files.sync(handle)
        files.write(handle, [b"late"])
        files.sync(handle)
        assert files.content("/d/log") == b"safegonelate"
        files.crash()
        assert files.content("/d/log") == b"safe\0\0\0\0late"


def test_every_call_after_a_halt_raises() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        handle = files.open("/d/log", "append")
        files.fail(files.calls + 1, "halt")
        with pytest.raises(Halt):
            files.write(handle, [b"0123"])
        with pytest.raises(Halt):
            files.sync(handle)
        files.close(handle)
        files.kill()
        ends.add(files.content("/d/log"))
    assert ends == {b"", b"0", b"01", b"012", b"0123"}


def test_a_halted_change_of_names_has_its_effect_or_not() -> None:
    ends = set()
    for seed in SEEDS:
        files = disk(seed)
        files.fail(files.calls + 1, "halt")
        with pytest.raises(Halt):
            files.rename("/d/old", "/d/new")
        files.kill()
        ends.add(tuple(files.list("/d")))
    assert ends == {("old",), ("new",)}


def test_a_full_disk_writes_what_fits() -> None:
    files = disk()
    handle = written(files, "/d/log", b"data")
    files.set_free_bytes(3)
    assert files.write(handle, [b"12345"]) == 3
    with pytest.raises(OSError, match="No space"):
        files.write(handle, [b"45"])
    with pytest.raises(OSError, match="No space"):
        files.open("/d/other", "append")
    assert files.pwrite(files.open("/d/old", "update"), b"new", 0) == 3
    assert (files.free_bytes("/d"), "full" in repr(files)) == (0, True)
    files.truncate(handle, 2)
    assert files.free_bytes("/d") == 5
    files.set_free_bytes(None)
    assert files.write(handle, [bytes(10_000)]) == 10_000


def test_a_read_only_disk_refuses_every_change_and_serves_reads() -> None:
    files = disk()
    handle = files.open("/d/old", "update")
    before = files.contents()
    files.set_read_only()
    changes: list[Callable[[], object]] = [
        lambda: files.open("/d/new", "append"),
        lambda: files.pwrite(handle, b"x", 0),
        lambda: files.truncate(handle, 0),
        lambda: files.make_directory("/d/in"),
        lambda: files.rename("/d/old", "/d/new"),
        lambda: files.remove("/d/old"),
        lambda: files.lock("/d/LOCK"),
    ]
    for change in changes:
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    files.make_directory("/d")
    assert files.pread(files.open("/d/old", "read"), 9, 0) == b"old"
    assert files.contents() == before
    files.set_read_only(False)
    files.remove("/d/old")


def test_a_flipped_bit_survives_a_power_cut() -> None:
    files = disk()
    files.flip_bit("/d/old", 8)
    assert files.content("/d/old") == b"omd"
    files.crash()
    assert files.content("/d/old") == b"omd"


def test_a_copy_is_independent() -> None:
    files = disk()
    handle = written(files, "/d/log", b"data")
    twin = files.copy()
    twin.write(handle, [b"more"])
    twin.fail(twin.calls + 1, errno.EIO)
    assert (files.content("/d/log"), twin.content("/d/log")) == (b"data", b"datamore")
    files.sync(handle)
    assert (files.copy().calls, repr(files)) == (files.calls, repr(files.copy()))


def test_the_repr_shows_the_state() -> None:
    files = disk()
    written(files, "/d/log", b"data")
    assert repr(files) == "SimulatedFiles(2 files, 7 bytes, 4 unsynced, 1 open, 2 calls)"
