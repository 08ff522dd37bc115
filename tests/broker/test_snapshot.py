"""A snapshot of a directory gives the same answers as the owner, and changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from penstock.broker import snapshot
from penstock.broker.queries import QUERY_HANDLERS
from penstock.broker.snapshot import Snapshot
from penstock.errors import InvalidRequest
from penstock.logs.files.filesystem import Mode, SystemFiles
from penstock.operations import (
    OPERATIONS,
    CancelItems,
    ClearItems,
    CompactQueue,
    CreateQueue,
    CutLogs,
    DeleteQueue,
    EndStream,
    EnsureQueue,
    ExplainItem,
    FailGranted,
    FindQueue,
    ImportItems,
    LeaseItems,
    ListQueues,
    MoveCursor,
    Operation,
    PauseQueue,
    ProduceItems,
    PublishLog,
    PublishWrite,
    Query,
    ReadHistory,
    ReadMetrics,
    ReadStats,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    RenewStream,
    ReportProgress,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    SettleItems,
    TakeGrant,
    UpdateQueue,
)
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.ids import parse_id
from tests.broker.broker_under_test import batch_of
from tests.broker.directory_broker import DirectoryBroker, all_answers, fill, run_sample_workload

# -- the same answers ----------------------------------------------------------------------------------


def test_a_snapshot_answers_as_the_owner_does(directory_broker: DirectoryBroker) -> None:
    run_sample_workload(directory_broker)
    directory_broker.run_and_publish()
    with directory_broker.open_snapshot() as seen:
        assert seen.call(ListQueues()) == directory_broker.embedded.call(ListQueues())
        assert (
            seen.call(ListQueues(prefix="o", after="a", limit=1))
            == directory_broker.embedded.call(ListQueues(prefix="o", after="a", limit=1))
            == [seen.call(FindQueue(name="orders"))]
        )
        for name in ("orders", "dead"):
            incarnation = directory_broker.incarnation(name)
            assert all_answers(seen, incarnation) == all_answers(directory_broker.embedded, incarnation)
        stats = seen.call(ReadStats(queue=directory_broker.incarnation("orders")))
        assert stats.leased and stats.scheduled and stats.completed and stats.consumers and stats.resizing and len(stats.partitions) == 5


def test_every_query_is_answered() -> None:
    """A snapshot answers every `Query`."""
    answered = {*snapshot._SNAPSHOT_HANDLERS, *QUERY_HANDLERS}
    assert {kind for kind in OPERATIONS if issubclass(kind, Query)} == {*answered}


def test_a_snapshot_does_not_change_until_it_is_refreshed(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders", partitions=2)
    fill(queue, 3)
    with directory_broker.open_snapshot() as seen:
        incarnation = directory_broker.incarnation("orders")
        before = seen.call(ReadStats(queue=incarnation))
        first, *_ = fill(queue, 4)
        queue.lease(2)[0].complete()
        directory_broker.run_and_publish()
        still = seen.call(ReadStats(queue=incarnation))
        assert (still.produced, still.ready, still.leased) == (before.produced, before.ready, before.leased) == (3, 3, 0)
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)) == directory_broker.embedded.call(ReadStats(queue=incarnation)) != before
        partition, offset = parse_id(first)
        assert seen.call(ReadHistory(queue=incarnation, partition=partition, offset=offset))


def test_a_snapshot_follows_an_owner_step_by_step(directory_broker: DirectoryBroker) -> None:
    """Queues are created and deleted, partitions are added, segments rotate and are deleted."""
    queue = directory_broker.broker.create_queue("orders", partitions=1, retention={"max_segments": 1})
    with directory_broker.open_snapshot() as seen:
        for step in range(12):
            fill(queue, 20, key=f"k{step}")
            queue.lease(15).complete()
            if step % 3 == 0:
                queue.compact()
            if step == 5:
                queue.resize(3)
            if step == 7:
                directory_broker.broker.create_queue("late").produce(b"x")
            if step == 9:
                directory_broker.broker.queue("late").delete()
            directory_broker.run_and_publish()
            seen.refresh()
            assert seen.call(ListQueues()) == directory_broker.embedded.call(ListQueues())
            for info in seen.call(ListQueues()):
                assert seen.call(ReadStats(queue=info.incarnation)) == directory_broker.embedded.call(ReadStats(queue=info.incarnation))


def test_a_snapshot_works_after_its_owner_closed(directory_broker: DirectoryBroker) -> None:
    run_sample_workload(directory_broker)
    directory_broker.run_and_publish()
    incarnation = directory_broker.incarnation("orders")
    with directory_broker.open_snapshot() as seen:
        before = seen.call(ReadStats(queue=incarnation))
        directory_broker.broker.close()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)).ready == before.ready
        directory_broker.reopen()
        directory_broker.broker.queue("orders").produce(b"more")
        directory_broker.run_and_publish()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)) == directory_broker.embedded.call(ReadStats(queue=incarnation))


def test_an_item_whose_ttl_ended_while_nobody_owned_the_directory(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders")
    queue.produce(b"brief", ttl=5)
    queue.produce(b"lasting", ttl=50)
    directory_broker.run_and_publish()
    incarnation = directory_broker.incarnation("orders")
    directory_broker.broker.close()
    directory_broker.clock.advance(10 * SECOND)
    with directory_broker.open_snapshot() as seen:
        brief, lasting = (seen.call(ExplainItem(queue=incarnation, partition=0, offset=offset)) for offset in (0, 1))
    assert (brief.state, brief.why) == ("ready", "ready, but its ttl is over: it is buried when the queue is next used")
    assert lasting.why == "ready: the next lease that reaches it gets it"
    directory_broker.reopen()


def test_leases_that_are_not_synced_are_not_seen(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders")
    fill(queue, 3)
    queue.lease(2)
    with directory_broker.open_snapshot() as seen:
        incarnation = directory_broker.incarnation("orders")
        assert seen.call(ReadStats(queue=incarnation)).leased == 0
        directory_broker.run_and_publish()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)).leased == 2


# -- nothing is touched --------------------------------------------------------------------------------


def on_disk(path: Path) -> dict[str, tuple[int, bytes]]:
    files = [found for found in path.rglob("*") if found.is_file()]
    folders = {str(found): (found.stat().st_mtime_ns, b"") for found in path.rglob("*") if found.is_dir()}
    return folders | {str(found): (found.stat().st_mtime_ns, found.read_bytes()) for found in files}


@pytest.mark.parametrize("owned", [True, False])
def test_nothing_on_disk_changes(directory_broker: DirectoryBroker, owned: bool) -> None:
    run_sample_workload(directory_broker)
    directory_broker.run_and_publish()
    infos = directory_broker.embedded.call(ListQueues())
    if not owned:
        directory_broker.broker.close()
        for path in directory_broker.path.rglob("*"):  # what can be rebuilt is not rebuilt by one who only looks
            if path.suffix == ".idx" or path.name in ("checkpoint", "synced"):
                path.unlink()
    before = on_disk(directory_broker.path)
    with directory_broker.open_snapshot() as seen:
        for info in infos:
            all_answers(seen, info.incarnation)
            for partition in range(info.partitions):
                list(seen.events(info.incarnation, partition))
        seen.refresh()
    assert on_disk(directory_broker.path) == before


CHANGES: list[Operation[Any]] = [
    ReadMetrics(),
    ProduceItems(batch=batch_of("x")),
    LeaseItems(),
    SettleItems(action="complete", parts=[]),
    ReportProgress(partition=0, lease=1, offset=0, text="half"),
    CreateQueue(name="new"),
    EnsureQueue(name="new"),
    CutLogs(),
    UpdateQueue(changes={}),
    ResizeQueue(partitions=2),
    SetReadOnly(partition=0),
    DeleteQueue(),
    PauseQueue(lease=True),
    CompactQueue(),
    ClearItems(states=["ready"]),
    SeekItems(start=0),
    CancelItems(items=[(0, 0)]),
    RescheduleItems(items=[(0, 0)], delay=1),
    RedriveItems(items={0: [0]}, to=1),
    ReleaseKey(key=1),
    MoveCursor(name="c", to={0: 1}),
    ReleaseCursor(name="c"),
    TakeGrant(stream="s", run="", done=0, want=1, per_key=1, timeout=SECOND),
    RenewStream(stream="s", run="", timeout=SECOND),
    EndStream(stream="s", run=""),
    FailGranted(action="bury", groups=[]),
    PublishLog(partition=0),
    PublishWrite(write="w", source="s", number=1, parts=[]),
    ImportItems(source="s", after=0, number=1, batch=Batch([b""])),
]


def test_a_snapshot_refuses_changes(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders")
    fill(queue, 2)
    incarnation = directory_broker.incarnation("orders")
    before = on_disk(directory_broker.path)
    with directory_broker.open_snapshot() as seen:
        assert {type(change) for change in CHANGES} == {kind for kind in OPERATIONS if not issubclass(kind, Query)}
        for change in CHANGES:
            change.queue = incarnation
            with pytest.raises(InvalidRequest, match=f"is open read-only here, and {type(change).__name__} is no query"):
                seen.call(change)
    assert on_disk(directory_broker.path) == before


class ReadOnlyFiles(SystemFiles):
    """Files that can only be read: any other call fails."""

    def open(self, path: str, mode: Mode) -> int:
        assert mode == "read", f"{path} was opened to {mode}"
        return super().open(path, mode)

    def _touched(self, *call: Any) -> Any:
        raise AssertionError(f"something was touched: {call}")

    write = pwrite = truncate = rename = remove = remove_directory = make_directory = lock = sync = sync_directory = _touched  # type: ignore[assignment]


def test_files_are_read_and_nothing_else(directory_broker: DirectoryBroker) -> None:
    run_sample_workload(directory_broker)
    directory_broker.run_and_publish()
    with Snapshot.open(directory_broker.path, files=ReadOnlyFiles(), clock=directory_broker.clock) as seen:
        incarnation = directory_broker.incarnation("orders")
        assert all_answers(seen, incarnation) == all_answers(directory_broker.embedded, incarnation)
        directory_broker.broker.queue("orders").compact()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)) == directory_broker.embedded.call(ReadStats(queue=incarnation))
