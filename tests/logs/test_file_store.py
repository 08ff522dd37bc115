"""Storage roots: in which root a new partition is created, how it is found again, and which process may use it."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.snapshot import Snapshot
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import SystemFiles, filesystem_in, filesystem_in_mount
from penstock.logs.files.root import Root
from penstock.logs.files.segment import LogId
from penstock.logs.store import CATALOG
from penstock.operations import CreateQueue, FindQueue
from penstock.testing import SimulatedFiles
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, StorageFailed
from tests.logs.backends import draft


def spread(directory: FileStore) -> Counter[str]:
    roots = [directory.root_of(*owner) for owner in directory.logs()]
    return Counter(root.path for root in roots if root is not None)


def test_partitions_are_spread_by_weight_and_found_again() -> None:
    files = SimulatedFiles()
    directory = FileStore.open(["/a", ("/b", 3.0)], files=files)
    for partition in range(8):
        directory.log(1, partition)
    assert spread(directory) == {"/a": 2, "/b": 6}
    where = {owner: directory.root_of(*owner) for owner in directory.logs()}
    directory.close()
    again = FileStore.open(["/a", ("/b", 3.0)], files=files)
    assert {owner: again.root_of(*owner) for owner in again.logs()} == where
    assert again.broker_id == directory.broker_id


def test_a_read_only_root_takes_no_new_partitions_but_serves_old_ones() -> None:
    files = SimulatedFiles()
    directory = FileStore.open(["/a"], files=files)
    old = directory.log(1, 0)
    list(old.recover())
    old.close()
    directory.close()
    directory = FileStore.open([Root("/a", read_only=True), "/b"], files=files)
    for partition in (1, 2):
        directory.log(1, partition)
    assert spread(directory) == {"/a": 1, "/b": 2}
    old = directory.log(1, 0)
    list(old.recover())
    old.append([draft(0, 1, b"still served")])
    old.close()
    directory.close()
    with pytest.raises(StorageFailed, match="read-only; add"):
        FileStore.open([Root("/a", read_only=True)], files=files).log(1, 9)


def test_a_lost_marker_is_written_again_with_the_id_of_another_root() -> None:
    files = SimulatedFiles()
    directory = FileStore.open(["/a", "/b"], files=files)
    directory.log(1, 0)
    directory.close()
    files.remove("/a/penstock.json")
    again = FileStore.open(["/a", "/b"], files=files)
    assert again.broker_id == directory.broker_id == json.loads(files.content("/a/penstock.json"))["broker"]
    assert again.logs() == [LogId(1, 0)]


# -- the first root ----------------------------------------------------------------------------------


def open_broker(*roots: str | Root, files: SimulatedFiles) -> EmbeddedBroker:
    return EmbeddedBroker.open([*roots], files=files, threaded=False)


def broker_with_a_queue(files: SimulatedFiles, *roots: str | Root) -> None:
    broker = open_broker(*roots, files=files)
    broker.call(CreateQueue(name="orders", partitions=2))
    broker.close()


def has_catalog(files: SimulatedFiles, root: str) -> bool:
    return files.exists(f"{root}/logs/{CATALOG:016x}")


@pytest.mark.parametrize("first", ["/a", Root("/a", weight=0.1), Root("/a", read_only=True)])
def test_the_catalog_is_always_in_the_first_root(first: str | Root) -> None:
    files = SimulatedFiles()
    broker_with_a_queue(files, first, Root("/b", weight=9))
    assert has_catalog(files, "/a") and not has_catalog(files, "/b")


def test_the_first_root_must_be_given_first() -> None:
    files = SimulatedFiles()
    broker_with_a_queue(files, "/a", "/b", "/c")
    before = files.contents()
    for read_only in (False, True):
        with pytest.raises(InvalidRequest, match=r"^/a is the first storage root of its broker; give it first, and /b among the further"):
            FileStore.open(["/b", "/a"], files=files, read_only=read_only)
        with pytest.raises(
            InvalidRequest, match=r"^/b is a further storage root of a broker whose first root, last open at /a, is missing; "
        ):
            FileStore.open(["/b", "/c"], files=files, read_only=read_only)
    with pytest.raises(InvalidRequest, match=r"^/a is the first storage root of its broker; give it first, and /new among"):
        FileStore.open(["/new", "/a"], files=files)
    assert files.contents() == before, "nothing was changed"
    assert open_broker("/a", "/c", "/b", files=files).call(FindQueue(name="orders")).partitions == 2, "the others have no order"


def test_a_first_root_without_the_catalog_gets_no_new_one() -> None:
    """An earlier version put the catalog into the root with the largest weight."""
    files = SimulatedFiles()
    broker_with_a_queue(files, "/a", "/b")
    old, new = (f"{root}/logs/{CATALOG:016x}/00000" for root in ("/a", "/b"))
    files.make_directory(new)
    for name in files.list(old):
        files.put_file(f"{new}/{name}", files.content(f"{old}/{name}"))
        files.remove(f"{old}/{name}")
    files.remove_directory(old)
    broker = open_broker("/a", "/b", files=files)
    assert broker.call(FindQueue(name="orders")).partitions == 2, "it is used where it is found"
    broker.close()
    with pytest.raises(InvalidRequest, match=r"the catalog of the broker in /a is in a storage root that was not given; .* it also had /b"):
        open_broker("/a", files=files)
    assert not files.exists(old)
    with pytest.raises(CorruptLog, match=r"the catalog has no log in /a; add the storage root that holds it \(the broker also had /b\)"):
        Snapshot.open(["/a"], files=files)


def test_partitions_without_a_catalog_and_without_a_marker() -> None:
    files = SimulatedFiles()
    broker_with_a_queue(files, "/a", "/b")
    files.remove("/b/penstock.json")
    with pytest.raises(InvalidRequest, match=r"/b holds partitions of a broker without its catalog; .* give all of them, the first"):
        open_broker("/b", files=files)


def test_a_root_that_was_moved_is_known_by_its_id() -> None:
    files = SimulatedFiles()
    broker_with_a_queue(files, "/a", "/b")
    files.rename("/b", "/moved")
    broker = open_broker("/a", "/moved", files=files)
    assert isinstance(broker.store, FileStore) and broker.store.absent_roots == []
    broker.close()
    alone = FileStore.open(["/a"], files=files, read_only=True)
    assert alone.absent_roots == ["/moved"]


def test_a_marker_of_an_earlier_version_is_completed() -> None:
    files = SimulatedFiles()
    broker_with_a_queue(files, "/a", "/b")
    for root in ("/a", "/b"):
        old = {name: value for name, value in json.loads(files.content(f"{root}/penstock.json")).items() if not name.startswith("root")}
        files.put_file(f"{root}/penstock.json", json.dumps(old).encode())
    files.set_free_bytes(0)
    FileStore.open(["/a", "/b"], files=files).close()  # a full disk does not matter
    files.set_free_bytes(None)
    FileStore.open(["/a", "/b"], files=files).close()
    with pytest.raises(InvalidRequest, match=r"^/a is the first storage root"):
        FileStore.open(["/b", "/a"], files=files)


# -- other roots -------------------------------------------------------------------------------------


def test_a_partition_in_two_roots_is_refused() -> None:
    files = SimulatedFiles()
    directory = FileStore.open(["/a", "/b"], files=files)
    directory.log(1, 0)
    directory.close()
    files.make_directory(f"/b/logs/{1:016x}/{0:05}")
    with pytest.raises(CorruptLog, match="both /a and /b"):
        FileStore.open(["/a", "/b"], files=files)
    FileStore.open(["/a"], files=files)  # and no lock was left behind


def test_a_missing_log_is_named() -> None:
    directory = FileStore.open(["/a"], files=SimulatedFiles())
    with pytest.raises(CorruptLog, match="partition 4 of incarnation 00000000000000ff has no log"):
        directory.log(255, 4, create=False)


@pytest.mark.parametrize("roots", [[], ["/a", "/a/"], [("/a", 0.0)], [("/a", -1.0)]])
def test_roots_that_make_no_sense(roots: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="; give"):
        FileStore.open(roots, files=SimulatedFiles())


def test_reading_only_needs_a_directory_and_writes_nothing() -> None:
    files = SimulatedFiles()
    with pytest.raises(InvalidRequest, match="does not exist"):
        FileStore.open(["/a"], files=files, read_only=True)
    assert files.contents() == SimulatedFiles().contents()
    FileStore.open(["/a"], files=files).close()
    directory = FileStore.open(["/a"], files=files, read_only=True)
    with pytest.raises(InvalidRequest, match="read-only"):
        directory.log(1, 0)
    with pytest.raises(CorruptLog, match="no log"):
        directory.reader(1, 0)


def test_closed_is_closed_and_the_lock_is_free() -> None:
    files = SimulatedFiles()
    directory = FileStore.open(["/a"], files=files)
    directory.close()
    directory.close()
    with pytest.raises(BrokerClosed, match="open it again"):
        directory.log(1, 0)
    FileStore.open(["/a"], files=files)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_appends_nor_keeps_the_lock(tmp_path: Path) -> None:
    directory = FileStore.open(tmp_path / "data")
    log = directory.log(1, 0)
    list(log.recover())
    told_reading, told_writing = os.pipe()
    wait_reading, wait_writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            log.append([draft(0, 1, b"from the child")])
        except BrokerClosed:
            os.write(told_writing, b"refused")
        finally:
            os.write(told_writing, b".")
            os.close(wait_writing)
            os.read(wait_reading, 1)
            os._exit(0)
    os.close(told_writing)
    with open(told_reading, "rb") as pipe:
        assert pipe.read(8) == b"refused."
        log.append([draft(0, 1, b"from the parent")])
        log.close()
        directory.close()
        FileStore.open(tmp_path / "data").close()  # while the child lives
        os.close(wait_writing)
        os.waitpid(child, 0)
    os.close(wait_reading)


MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /mnt/far\\040away rw - nfs4 server:/x rw
41 22 0:36 / /mnt rw - xfs /dev/vdb rw
42 22 0:37 / /mnt/later rw - tmpfs none rw
43 22 0:38 / /mnt/later rw - fuse.sshfs host:/ rw
"""
MOUNT = """\
/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse)
//me@server/share on /Volumes/on the (far) side (smbfs, nodev, nosuid, mounted by me)
"""


def test_the_file_system_of_a_path_on_linux() -> None:
    kinds = {"/data": "ext4", "/mnt/a": "xfs", "/mnt/far away/q": "nfs4", "/mnt/far": "xfs", "/mnt/later": "fuse.sshfs", "/mntx": "ext4"}
    assert {path: filesystem_in(MOUNTINFO, path) for path in kinds} == kinds
    assert filesystem_in("nonsense", "/data") == ""


def test_the_file_system_of_a_path_on_macos() -> None:
    kinds = {"/data": "apfs", "/System/Volumes/Data/q": "apfs", "/Volumes/on the (far) side/q": "smbfs"}
    assert {path: filesystem_in_mount(MOUNT, path) for path in kinds} == kinds


def test_this_machine_knows_its_file_system(tmp_path: Path) -> None:
    assert SystemFiles().filesystem(str(tmp_path)) != ""
