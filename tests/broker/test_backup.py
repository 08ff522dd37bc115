"""Backups of a directory that is in use, and brokers that are restored from them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.errors import BrokerLocked, CorruptLog, InvalidRequest, LeaseLost
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.log import Durability
from tests.broker.backups import BusyProcess, copying_process, numbers_in
from tests.broker.broker_under_test import batch_of
from tests.broker.other_process import OtherProcess
from tests.broker.owner_process import BrokerProcess


def restored(backup: Path, directory: Path) -> penstock.Broker:
    penstock.restore(backup, directory)
    return penstock.open(directory)


def fill(directory: Path, items: int = 3) -> None:
    with penstock.open(directory) as broker:
        broker.create_queue("q", exist_ok=True).produce_many([str(n) for n in range(items)])


# -- what a restored broker has -----------------------------------------------------------------------


def test_a_restored_broker_has_what_was_answered_before_the_backup(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("dead")
        queue = broker.create_queue("orders", partitions=2, dead_queue="dead", max_attempts=1)
        items = [penstock.NewItem(str(n), key=f"k{n}", dedup=f"d{n}") for n in range(12)]
        queue.produce_many(items[:6])
        done, held = queue.lease(2), queue.lease(3)
        done.complete()
        queue.produce_many(items[6:])  # in both partitions: the records of the leases are synced with it
        with queue.cursor("audit") as cursor:
            read = {item.value for item in cursor.read(5)}
            cursor.commit()
        report = penstock.backup(tmp_path / "data", tmp_path / "backup")
        assert (report.logs, report.linked_bytes, report.writes) == (4, 0, 0)
        queue.produce("late")
        held.complete()
    assert penstock.restore(tmp_path / "backup", tmp_path / "new").returned == 3
    with penstock.open(tmp_path / "new") as copy:
        orders = copy.queue("orders")
        assert (orders.stats().completed, orders.stats().produced, orders.stats().leased) == (2, 12, 0)
        found = orders.lease(100)
        assert {lease.item.value for lease in found} == {str(n) for n in range(12)} - {lease.item.value for lease in done}
        assert {lease.item.attempts for lease in found} == {1}  # not counted: max_attempts=1 would have buried them
        with orders.cursor("audit") as cursor:
            rest = {item.value for item in cursor}
        assert read | rest == {str(n) for n in range(12)}
        assert not read & rest
        first = next(lease.item.id for lease in found if lease.item.value == "9")
        assert orders.produce("again", key="k9", dedup="d9") == first


def test_what_the_original_gave_after_the_backup_is_refused(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        queue.produce_many(["a", "b"])
        before = queue.lease(1)
        penstock.backup(broker, tmp_path / "backup")
        after = queue.lease(1)
        late = queue.produce_many(["c", "d", "e"])
    with restored(tmp_path / "backup", tmp_path / "new") as copy:
        again = copy.queue("q")
        new = again.produce_many(["x", "y", "z"])
        leases = again.lease(100)
        assert len(leases) == 5
        for token in (before[0].token, after[0].token):
            with pytest.raises(LeaseLost):
                again.complete(token)
        assert again.stats().leased == 5
        assert not {*late} & {*new}
        for lost in late:
            with pytest.raises(InvalidRequest, match="produced after the backup"):
                again.explain(lost)
        with pytest.raises(InvalidRequest, match="is not in the backup from which this broker was restored"):
            again.cursor("outside", start=late[1])
        with pytest.raises(InvalidRequest, match="is not in the backup from which this broker was restored"):
            again.seek(late[1])
        with again.cursor("at the end of the backup", start=late[0]) as cursor:
            assert [item.value for item in cursor] == ["x", "y", "z"]


def test_two_restores_of_one_backup_share_no_offset_and_no_token(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    penstock.backup(tmp_path / "data", tmp_path / "backup")
    with restored(tmp_path / "backup", tmp_path / "one") as one, restored(tmp_path / "backup", tmp_path / "two") as two:
        token = one.queue("q").lease(1)[0].token
        two.queue("q").lease(1)
        with pytest.raises(LeaseLost):
            two.queue("q").complete(token)


def test_partitions_that_are_added_later_begin_beyond_those_of_the_original(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        penstock.backup(broker, tmp_path / "backup")
        queue.resize(4)
        late = queue.produce_many([penstock.NewItem("x", key=f"k{n}") for n in range(50)])
    with restored(tmp_path / "backup", tmp_path / "new") as copy:
        copy.queue("q").resize(4)
        new = copy.queue("q").produce_many([penstock.NewItem("x", key=f"k{n}") for n in range(50)])
        assert len({item.partition("-")[0] for item in new}) == 4
        assert not {*late} & {*new}
        assert copy.queue("q").stats().produced == 50


def test_a_published_write_that_no_log_has_is_restored_and_adopted_once(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        queue.pause(produce=True)
        incarnation = int(queue.info().incarnation, 16)
        OtherProcess(SystemFiles(), str(tmp_path / "data")).publish(incarnation, batch_of("a", "b"))
        assert penstock.backup(broker, tmp_path / "backup").writes == 1
    with restored(tmp_path / "backup", tmp_path / "new") as copy:
        again = copy.queue("q")
        assert len(again.lease(10)) == 0
        again.resume()
        assert sorted(lease.item.payload for lease in again.lease(10, wait=20)) == [b"a", b"b"]
        assert again.stats().produced == 2


def test_several_storage_roots_before_and_after(tmp_path: Path) -> None:
    roots = [tmp_path / "more"]
    with penstock.open(tmp_path / "data", roots=roots) as broker:
        queue = broker.create_queue("q", partitions=4)
        queue.produce_many([penstock.NewItem(str(n), key=str(n)) for n in range(40)])
    penstock.backup(tmp_path / "data", tmp_path / "backup", roots=roots)
    penstock.restore(tmp_path / "backup", tmp_path / "one")
    penstock.restore(tmp_path / "backup", tmp_path / "first", roots=[tmp_path / "second"])
    for directory, others in (("one", None), ("first", [tmp_path / "second"])):
        with penstock.open(tmp_path / directory, roots=others) as copy:
            assert len(copy.queue("q").lease(100)) == 40
    assert any((tmp_path / "second" / "logs").rglob("*.log"))


def test_the_backup_of_a_restored_broker_is_restored(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    penstock.backup(tmp_path / "data", tmp_path / "b1")
    with restored(tmp_path / "b1", tmp_path / "second") as second:
        middle = second.queue("q").produce("later")
    penstock.backup(tmp_path / "second", tmp_path / "b2")
    with restored(tmp_path / "b2", tmp_path / "third") as third:
        assert [lease.item.value for lease in third.queue("q").lease(10)] == ["0", "1", "2", "later"]
        assert third.queue("q").explain(middle).state == "leased"
        assert third.queue("q").produce("new") > middle


# -- a directory in use -------------------------------------------------------------------------------


def test_backups_while_another_process_produces_moves_and_drops(tmp_path: Path) -> None:
    with BusyProcess(tmp_path / "data", tmp_path / "journal") as busy:
        for attempt in range(2):
            produced, completed = busy.noted("produced"), busy.noted("completed")
            backup = tmp_path / f"backup-{attempt}"
            previous = tmp_path / f"backup-{attempt - 1}" if attempt else None
            penstock.backup(tmp_path / "data", backup, previous=previous)
            completing = busy.noted("completing")
            with restored(backup, tmp_path / f"new-{attempt}") as copy:
                found = numbers_in(copy)
            assert len(found) == len(set(found)), "an item is there twice"
            assert produced - completing <= set(found), "an item is missing"
            assert not completed & set(found), "a completed item is there again"
    assert busy.noted("produced")


def test_a_backup_through_the_owner_and_as_the_owner(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as owner:
        owner.ask("broker.create_queue('q').produce('a')")
        penstock.backup(tmp_path / "data", tmp_path / "b1")
        owner.ask("broker.queue('q').produce('b')")
        owner.kill()
    penstock.backup(tmp_path / "data", tmp_path / "b2")  # nobody has it open: what the killed owner answered is there
    for name, values in (("b1", ["a"]), ("b2", ["a", "b"])):
        with restored(tmp_path / name, tmp_path / f"new-{name}") as copy:
            assert [lease.item.value for lease in copy.queue("q").lease(10)] == values


@pytest.mark.parametrize("durability", [pytest.param("interval", marks=pytest.mark.long), "os"])
def test_a_backup_without_fsync_has_what_was_answered(tmp_path: Path, durability: Durability) -> None:
    with penstock.open(tmp_path / "data", durability=durability) as broker:
        broker.create_queue("q").produce_many(["a", "b"])
        penstock.backup(broker, tmp_path / "backup")
    with restored(tmp_path / "backup", tmp_path / "new") as copy:
        assert len(copy.queue("q").lease(10)) == 2


def test_complete_segments_are_linked_to_the_previous_backup(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data", segment_bytes=2000) as broker:
        queue = broker.create_queue("q")
        for _ in range(20):
            queue.produce("x" * 300)
        penstock.backup(broker, tmp_path / "b1")
        queue.produce("y")
        report = penstock.backup(broker, tmp_path / "b2", previous=tmp_path / "b1")
    assert 0 < report.linked_bytes < report.size_bytes
    shutil.rmtree(tmp_path / "b1")
    with restored(tmp_path / "b2", tmp_path / "new") as copy:
        assert len(copy.queue("q").lease(100)) == 21


# -- cut off, damaged, refused ------------------------------------------------------------------------


def test_a_backup_that_is_killed_is_refused_and_begun_anew(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    process = copying_process("run_backup", str(tmp_path / "data"), str(tmp_path / "backup"))
    with process:
        with pytest.raises(BrokerLocked, match="another process is writing a backup"):
            penstock.backup(tmp_path / "data", tmp_path / "backup")
        process.kill()
    for use in (lambda: penstock.restore(tmp_path / "backup", tmp_path / "new"), lambda: penstock.open(tmp_path / "backup")):
        with pytest.raises(InvalidRequest, match=r"is an unfinished backup|is a backup"):
            use()
    assert not (tmp_path / "new").exists()
    fill(tmp_path / "data")  # the source is not affected
    penstock.backup(tmp_path / "data", tmp_path / "backup")
    with restored(tmp_path / "backup", tmp_path / "new") as copy:
        assert len(copy.queue("q").lease(10)) == 6


def test_a_restore_that_is_killed_is_refused_and_begun_anew(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    penstock.backup(tmp_path / "data", tmp_path / "backup")
    process = copying_process("run_restore", str(tmp_path / "backup"), str(tmp_path / "new"))
    with process:
        with pytest.raises(BrokerLocked):
            penstock.restore(tmp_path / "backup", tmp_path / "new")
        process.kill()
    with pytest.raises(InvalidRequest, match=r"being restored into .*, or its restore was cut off; restore it again"):
        penstock.open(tmp_path / "new")
    with restored(tmp_path / "backup", tmp_path / "new") as copy:
        assert len(copy.queue("q").lease(10)) == 3


KILLED_AT_RENAME = """
import os, sys
import penstock
left, rename = int(sys.argv[1]), os.rename

def counted(source, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    rename(source, target)

os.rename = counted
penstock.restore(sys.argv[2], sys.argv[3], roots=[sys.argv[4]])
"""


@pytest.mark.parametrize(
    "renames",
    [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)],
)
def test_a_restore_that_is_killed_while_it_becomes_a_broker(tmp_path: Path, renames: int) -> None:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q", partitions=3).produce_many([penstock.NewItem(str(n), key=str(n)) for n in range(30)])
        penstock.backup(broker, tmp_path / "backup")
    paths = [tmp_path / "backup", tmp_path / "new", tmp_path / "more"]
    run = subprocess.run([sys.executable, "-c", KILLED_AT_RENAME, str(renames), *map(str, paths)], check=False)
    assert run.returncode == -9
    with pytest.raises(InvalidRequest, match="its restore was cut off"):
        penstock.open(tmp_path / "new", roots=[tmp_path / "more"])
    penstock.restore(tmp_path / "backup", tmp_path / "new", roots=[tmp_path / "more"])
    with penstock.open(tmp_path / "new", roots=[tmp_path / "more"]) as copy:
        assert len(copy.queue("q").lease(100)) == 30


def test_a_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    penstock.backup(tmp_path / "data", tmp_path / "backup")
    (segment, *_) = [path for path in (tmp_path / "backup").rglob("*.log") if path.stat().st_size]
    whole = segment.read_bytes()
    for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
        segment.write_bytes(damaged)
        with pytest.raises(CorruptLog, match=f"{segment.name} is not what the backup wrote; use another backup"):
            penstock.restore(tmp_path / "backup", tmp_path / "new")
        assert [*(tmp_path / "new").iterdir()] == []
    segment.unlink()
    with pytest.raises(CorruptLog, match="is missing"):
        penstock.restore(tmp_path / "backup", tmp_path / "new")
    manifest = tmp_path / "backup" / "backup.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"size":', b'"size": ', 1))
    with pytest.raises(CorruptLog, match=r"the manifest of the backup .* is damaged"):
        penstock.restore(tmp_path / "backup", tmp_path / "new")


def test_targets_that_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "data")
    penstock.backup(tmp_path / "data", tmp_path / "backup")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for wrong, why in (("full", "is not empty"), ("backup", "holds a backup"), ("full/file", "is a file"), ("data/inside", "is inside")):
        with pytest.raises(InvalidRequest, match=why):
            penstock.backup(tmp_path / "data", tmp_path / wrong)
    assert not (tmp_path / "data" / "inside").exists()
    for wrong, why in (("full", "is not empty"), ("backup", "is not empty"), ("data", "holds a broker")):
        with pytest.raises(InvalidRequest, match=why):
            penstock.restore(tmp_path / "backup", tmp_path / wrong)
    for source, why in (("memory://", "has no files here"), ("http://host", "has no files here"), (tmp_path / "no", "does not exist")):
        with pytest.raises(InvalidRequest, match=why):
            penstock.backup(source, tmp_path / "b2")
    with penstock.open("memory://") as broker, pytest.raises(InvalidRequest, match="in memory has no files"):
        penstock.backup(broker, tmp_path / "b2")
    with pytest.raises(InvalidRequest, match="is no backup"):
        penstock.restore(tmp_path / "data", tmp_path / "new")
    assert not os.path.exists(tmp_path / "b2")
