"""A snapshot of a damaged directory reports the damage and shows the rest."""

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import NewItem
from penstock.broker.snapshot import Snapshot
from penstock.errors import BrokerClosed, CorruptLog, InvalidRequest, QueueNotFound, StorageFailed
from penstock.logs.files.root import Root
from penstock.operations import ExplainItem, FindOffsets, FindQueue, ListItems, ListQueues, Operation, ReadHistory, ReadStats, TraceItem
from tests.broker.directory_broker import DirectoryBroker, fill


def log_folder(directory_broker: DirectoryBroker, incarnation: int, partition: int) -> Path:
    return directory_broker.path / "logs" / f"{incarnation:016x}" / f"{partition:05d}"


def test_a_missing_log_is_reported_and_the_others_are_seen(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders", partitions=2)
    queue.produce_many([NewItem(b"", key=f"k{n}") for n in range(20)])
    incarnation = directory_broker.incarnation("orders")
    directory_broker.broker.close()
    folder = log_folder(directory_broker, incarnation, 0)
    folder.rename(directory_broker.path / "aside")
    with directory_broker.open_snapshot() as seen:
        stats = seen.call(ReadStats(queue=incarnation))
        assert [one.status for one in stats.partitions] == ["failing", "active"]
        assert "has no log in" in stats.partitions[0].error and len(stats.warnings) == 2
        assert seen.call(FindOffsets(queue=incarnation, at="newest")).keys() == {1}
        assert seen.call(ExplainItem(queue=incarnation, partition=0, offset=0)).state == "unknown"
        unread: list[Operation[Any]] = [
            ReadHistory(queue=incarnation, partition=0, offset=0),
            TraceItem(queue=incarnation, partition=0, offset=0),
        ]
        for operation in unread:
            with pytest.raises(CorruptLog, match=r"partition 0 cannot be read \(.*\); the others can"):
                seen.call(operation)
        (directory_broker.path / "aside").rename(folder)
        seen.refresh()
        assert [one.status for one in seen.call(ReadStats(queue=incarnation)).partitions] == ["active", "active"]


def test_a_damaged_log_is_reported_and_its_other_items_are_seen(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders")
    for number in range(3):
        queue.produce(b"%d" % number * 40)
    incarnation = directory_broker.incarnation("orders")
    directory_broker.broker.close()
    (path,) = log_folder(directory_broker, incarnation, 0).glob("*.log")
    for name in ("checkpoint",):
        (path.parent / name).unlink(missing_ok=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"1" * 40)] ^= 1
    path.write_bytes(data)
    with directory_broker.open_snapshot() as seen:
        stats = seen.call(ReadStats(queue=incarnation))
        assert (stats.ready, stats.completed, stats.partitions[0].lost) == (2, 0, 1)
        assert any("damage: " in warning and "run verify" in warning for warning in stats.warnings)
        assert [event.event for event in seen.call(ReadHistory(queue=incarnation, partition=0, offset=1))] == ["lost"]
        assert [one.offset for one in seen.call(ListItems(queue=incarnation))] == [0, 2]


def test_a_log_without_a_readable_base_is_reported(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders", retention={"max_segments": 1})
    fill(queue, 2)
    queue.lease(2).complete()
    for _ in range(3):
        queue.compact()
    incarnation = directory_broker.incarnation("orders")
    directory_broker.broker.close()
    for path in log_folder(directory_broker, incarnation, 0).iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    with directory_broker.open_snapshot() as seen:
        (one,) = seen.call(ReadStats(queue=incarnation)).partitions
        assert one.status == "failing" and "run verify" in one.error


def test_a_damaged_catalog_is_refused(directory_broker: DirectoryBroker) -> None:
    directory_broker.broker.create_queue("orders")
    directory_broker.broker.create_queue("others")
    directory_broker.broker.close()
    (path,) = log_folder(directory_broker, 0, 0).glob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(b"orders")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLog, match=r"the catalog is damaged at .*; run verify, then repair"):
        directory_broker.open_snapshot()


def test_a_directory_without_a_broker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is no broker's directory; "):
        Snapshot.open(tmp_path)
    with pytest.raises(InvalidRequest, match="does not exist"):
        Snapshot.open(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_several_roots_are_one_broker(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with penstock.open(one, roots=[two]) as broker:
        broker.create_queue("orders", partitions=4).produce_many([NewItem(b"", key=f"k{n}") for n in range(20)])
    with Snapshot.open([one, Root(two)]) as seen:
        assert seen.call(ReadStats(queue=seen.call(FindQueue(name="orders")).incarnation)).ready == 20
    with Snapshot.open(one) as seen:  # the half of it
        stats = seen.call(ReadStats(queue=seen.call(FindQueue(name="orders")).incarnation))
        assert {one.status for one in stats.partitions} == {"active", "failing"}


def test_deleted_queues_and_unknown_items_are_refused(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders")
    incarnation = directory_broker.incarnation("orders")
    seen = directory_broker.open_snapshot()
    seen.call(ReadStats(queue=incarnation))
    queue.delete()
    seen.refresh()
    with pytest.raises(QueueNotFound, match="the queue was deleted"):
        seen.call(ReadStats(queue=incarnation))
    with pytest.raises(QueueNotFound, match="there is no queue 'orders'"):
        seen.call(FindQueue(name="orders"))
    assert repr(seen) == f"Snapshot({str(directory_broker.path)!r}, 0 queues)"
    seen.close()
    for ask in (lambda: seen.call(ListQueues()), seen.refresh, lambda: seen.call(ReadStats(queue=incarnation))):
        with pytest.raises(BrokerClosed, match="the snapshot is closed; open it again"):
            ask()


def test_a_partition_that_cannot_be_read_right_now(directory_broker: DirectoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(directory_broker.broker.create_queue("orders"), 2)
    incarnation = directory_broker.incarnation("orders")
    with directory_broker.open_snapshot() as seen:
        seen.call(ReadStats(queue=incarnation))
        reader = seen._queues[incarnation].handles[0].usable_partition
        monkeypatch.setattr(reader, "refresh", lambda: (_ for _ in ()).throw(StorageFailed("no; try again")))
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)).partitions[0].error == "no; try again"
        with pytest.raises(StorageFailed, match=r"partition 0 cannot be read \(no; try again\)"):
            list(seen.events(incarnation, 0))
        monkeypatch.undo()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)).ready == 2
