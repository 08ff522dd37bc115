"""A directory that cannot be used is refused with a message that says what to do, and is not changed."""

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedBroker
from penstock.logs.files import root
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.root import FORMAT
from penstock.testing import Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import BrokerClosed, BrokerLocked, CorruptLog, InvalidRequest, PenstockError, StorageFailed
from tests.logs.backends import draft
from tests.logs.scripted_owner import ROOT, ScriptedOwner, open_log

MARKER = f"{ROOT}/penstock.json"


def ours() -> SimulatedFiles:
    """A disk with a broker's directory that no process has open."""
    owner = ScriptedOwner(SimulatedFiles())
    owner.run()
    owner.log.close()
    owner.files.kill()
    return owner.files


def check_refused(files: SimulatedFiles, error: type[PenstockError], *says: str) -> None:
    before = files.contents()
    with pytest.raises(error) as caught:
        FileStore.open([ROOT], files=files)
    assert files.contents() == before
    check_sentence(str(caught.value), *says)


def check_sentence(message: str, *says: str) -> None:
    assert "; " in message, "an error says what is wrong; and what to do"
    for word in says:
        assert word in message


def test_a_directory_that_is_not_ours() -> None:
    files = SimulatedFiles()
    files.put_file(f"{ROOT}/holiday.jpg", b"a beach")
    check_refused(files, InvalidRequest, ROOT, "not")


def test_a_file_where_the_directory_should_be() -> None:
    files = SimulatedFiles()
    files.put_file(ROOT, b"a file")
    check_refused(files, InvalidRequest, ROOT, "directory")


def test_a_newer_format() -> None:
    files = ours()
    marker = json.loads(files.content(MARKER))
    (field,) = [name for name, value in marker.items() if value == FORMAT]
    files.put_file(MARKER, json.dumps({**marker, field: FORMAT + 1}).encode())
    check_refused(files, CorruptLog, "newer", "upgrade")


def test_an_older_process_refuses_a_directory_of_this_format(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ours()
    monkeypatch.setattr(root, "FORMAT", FORMAT - 1)
    check_refused(files, CorruptLog, f"newer format {FORMAT}", "upgrade")


def test_the_format_of_an_older_directory_is_raised_before_anything_else_is_written() -> None:
    """Opening it is cut off at every file call, by a power cut."""
    old = SimulatedFiles()
    EmbeddedBroker.open(ROOT, files=old, threaded=False, clock=MicrosecondClock()).close()
    old.crash()  # so that nothing is left to be lost
    marker = json.loads(old.content(MARKER))
    old.put_file(MARKER, json.dumps({**marker, "format": FORMAT - 1}).encode())
    before = {path: data for path, data in old.contents().items() if "/logs/" in path}
    seen, call, done = set(), 0, False
    while not done:
        call += 1
        files = old.copy()
        files.fail(files.calls + call, "halt")
        try:
            EmbeddedBroker.open(ROOT, files=files, threaded=False, clock=MicrosecondClock()).close()
            done = True
        except Halt:
            pass
        files.clear_faults()
        files.crash()
        now = json.loads(files.content(MARKER))
        seen.add(now["format"])
        assert {**now, "format": 0} == {**marker, "format": 0}
        changed = {path: data for path, data in files.contents().items() if "/logs/" in path} != before
        assert now["format"] == FORMAT or not changed, f"cut off at call {call}"
    assert seen == {FORMAT - 1, FORMAT}


def test_reading_an_older_directory_does_not_change_its_format() -> None:
    files = ours()
    marker = json.loads(files.content(MARKER))
    files.put_file(MARKER, json.dumps({**marker, "format": FORMAT - 1}).encode())
    FileStore.open([ROOT], files=files, read_only=True).close()
    assert json.loads(files.content(MARKER))["format"] == FORMAT - 1


def test_a_root_of_another_broker() -> None:
    files = SimulatedFiles()
    FileStore.open([ROOT], files=files).close()
    FileStore.open(["/other"], files=files).close()
    before = files.contents()
    with pytest.raises(InvalidRequest) as caught:
        FileStore.open([ROOT, "/other"], files=files)
    assert files.contents() == before
    check_sentence(str(caught.value), "/other", "another broker")


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "ceph", "glusterfs", "lustre", "afs"])
def test_a_network_file_system(kind: str) -> None:
    check_refused(SimulatedFiles(filesystem_type=kind), InvalidRequest, kind, "local")


@pytest.mark.parametrize("kind", ["proc", "sysfs", "cgroup2"])
def test_a_file_system_of_the_kernel(kind: str) -> None:
    files = SimulatedFiles(filesystem_type=kind)
    files.set_free_bytes(0)  # as they say
    check_refused(files, InvalidRequest, kind, "stores no files")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "apfs", "tmpfs", "overlay", ""])
def test_a_local_file_system_is_fine(kind: str) -> None:
    FileStore.open([ROOT], files=SimulatedFiles(filesystem_type=kind)).close()


@pytest.mark.parametrize("make", [SimulatedFiles, ours], ids=["empty", "ours"])
def test_a_read_only_disk(make: Callable[[], SimulatedFiles]) -> None:
    files = make()
    files.set_read_only()
    check_refused(files, StorageFailed, "read-only")


@pytest.mark.parametrize("free_bytes", [0, 1, 30])
def test_a_full_disk(free_bytes: int) -> None:
    files = SimulatedFiles()
    files.make_directory(ROOT)
    files.set_free_bytes(free_bytes)
    check_refused(files, StorageFailed, "full")


def test_a_disk_that_fills_up_while_in_use() -> None:
    files = ours()
    log = open_log(files)
    list(log.recover())
    files.set_free_bytes(50)
    with pytest.raises(StorageFailed) as caught:
        log.append([draft(100, 1, bytes(range(256)))])
    check_sentence(str(caught.value), "full")
    files.set_free_bytes(None)
    log.reset()
    list(log.recover())
    log.append([draft(100, 1, b"there is room again")])
    log.sync()


def test_a_directory_in_use() -> None:
    files = SimulatedFiles()
    held = FileStore.open([ROOT], files=files)
    check_refused(files, BrokerLocked, ROOT, "this very process")
    held.close()
    FileStore.open([ROOT], files=files).close()


def hold(path: str, line: Connection) -> None:
    """Hold a directory until a message arrives."""
    with contextlib.closing(FileStore.open([path])):
        line.send(os.getpid())
        line.recv()


@contextlib.contextmanager
def holder(path: str) -> Iterator[int]:
    """Another process that holds a directory; its process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(path, theirs))
    process.start()
    theirs.close()  # so that a holder that dies ends the wait below
    try:
        yield ours.recv()
        ours.send("stop")
    finally:
        process.join()
        ours.close()


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_directory_in_use_by_another_process(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with holder(str(root)) as pid:
        before = contents(root)
        with pytest.raises(BrokerLocked) as caught:
            FileStore.open([str(root)], files=SystemFiles())
        assert contents(root) == before
        check_sentence(str(caught.value), str(root), str(pid))
    FileStore.open([str(root)]).close()


def test_readers_of_a_directory_in_use_write_nothing() -> None:
    files = ours()
    holder = FileStore.open([ROOT], files=files)
    before, calls = files.contents(), files.calls
    reader = FileStore.open([ROOT], files=files, read_only=True)
    log = reader.reader(*reader.logs()[0])
    assert list(log.recover()) != []
    log.close()
    reader.close()
    assert files.contents() == before
    verbs = {line.split()[1] for line in list(files.trace)[calls - files.calls :]}
    assert verbs <= {"open", "pread", "list"}
    holder.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_cannot_use_its_parents_directory(tmp_path: Path) -> None:
    stuck = [stuck_directory() for _ in range(20)]  # closing these fails; the others must be closed nevertheless
    directory = FileStore.open([str(tmp_path / "data")])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            directory.log(1, 0)
        except BrokerClosed as refused:
            os.write(writing, str(refused).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        check_sentence(pipe.read().decode(), "open")
    os.waitpid(child, 0)
    directory.close()
    assert len(stuck) == 20


def stuck_directory() -> FileStore:
    """A store whose handles cannot be closed."""
    files = SimulatedFiles()
    directory = FileStore.open([ROOT], files=files)
    files.kill()
    return directory
