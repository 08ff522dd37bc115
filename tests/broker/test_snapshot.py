"""A directory looked at without owning it: the same answers as its owner's, and nothing touched."""

from pathlib import Path
from typing import Any

import pytest

from penstock.broker import snapshot
from penstock.broker.queries import QUERIES
from penstock.broker.snapshot import Snapshot
from penstock.errors import InvalidRequest
from penstock.logs.files.filesystem import Mode, SystemFiles
from penstock.operations import (
    OPERATIONS,
    ClearItems,
    CompactQueue,
    CreateQueue,
    DeleteQueue,
    EndStream,
    FailGranted,
    FindQueue,
    LeaseItems,
    ListQueues,
    MoveCursor,
    NoteProgress,
    Operation,
    PauseQueue,
    ProduceItems,
    PublishWrite,
    Query,
    ReadHistory,
    ReadMetrics,
    ReadStats,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    RenewStream,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    SettleItems,
    TakeGrant,
    UpdateQueue,
)
from penstock.words.clock import SECOND
from penstock.words.ids import parse_id
from tests.broker.broker_under_test import batch_of
from tests.broker.directory_broker import Yard, asked, fill, work

# -- the same answers ----------------------------------------------------------------------------------


def test_it_answers_as_the_owner_does(yard: Yard) -> None:
    work(yard)
    yard.rest()
    with yard.look() as seen:
        assert seen.call(ListQueues()) == yard.owner.call(ListQueues())
        assert (
            seen.call(ListQueues(prefix="o", after="a", limit=1))
            == yard.owner.call(ListQueues(prefix="o", after="a", limit=1))
            == [seen.call(FindQueue(name="orders"))]
        )
        for name in ("orders", "dead"):
            incarnation = yard.incarnation(name)
            assert asked(seen, incarnation) == asked(yard.owner, incarnation)
        stats = seen.call(ReadStats(queue=yard.incarnation("orders")))
        assert stats.leased and stats.scheduled and stats.completed and stats.consumers and stats.resizing and len(stats.partitions) == 5


def test_every_query_is_answered() -> None:
    """What an owner answers and a snapshot does not must be what changes something, but for what only an owner counts."""
    answered = {*snapshot._OWN, *QUERIES}
    assert {kind for kind in OPERATIONS if issubclass(kind, Query)} == {*answered}


def test_it_stands_still_until_it_is_refreshed(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders", partitions=2)
    fill(queue, 3)
    with yard.look() as seen:
        incarnation = yard.incarnation("orders")
        before = seen.call(ReadStats(queue=incarnation))
        first, *_ = fill(queue, 4)
        queue.lease(2)[0].complete()
        yard.rest()
        still = seen.call(ReadStats(queue=incarnation))
        assert (still.produced, still.ready, still.leased) == (before.produced, before.ready, before.leased) == (3, 3, 0)
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)) == yard.owner.call(ReadStats(queue=incarnation)) != before
        partition, offset = parse_id(first)
        assert seen.call(ReadHistory(queue=incarnation, partition=partition, offset=offset))


def test_it_follows_an_owner_step_by_step(yard: Yard) -> None:
    """Queues come and go, partitions are added, segments rotate and are dropped."""
    queue = yard.broker.create_queue("orders", partitions=1, retention={"max_segments": 1})
    with yard.look() as seen:
        for step in range(12):
            fill(queue, 20, key=f"k{step}")
            queue.lease(15).complete()
            if step % 3 == 0:
                queue.compact()
            if step == 5:
                queue.resize(3)
            if step == 7:
                yard.broker.create_queue("late").produce(b"x")
            if step == 9:
                yard.broker.queue("late").delete()
            yard.rest()
            seen.refresh()
            assert seen.call(ListQueues()) == yard.owner.call(ListQueues())
            for info in seen.call(ListQueues()):
                assert seen.call(ReadStats(queue=info.incarnation)) == yard.owner.call(ReadStats(queue=info.incarnation))


def test_it_outlives_its_owner(yard: Yard) -> None:
    work(yard)
    yard.rest()
    incarnation = yard.incarnation("orders")
    with yard.look() as seen:
        before = seen.call(ReadStats(queue=incarnation))
        yard.broker.close()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)).ready == before.ready
        yard.reopen()
        yard.broker.queue("orders").produce(b"more")
        yard.rest()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)) == yard.owner.call(ReadStats(queue=incarnation))


def test_leases_that_nobody_synced_are_not_seen_yet(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    fill(queue, 3)
    queue.lease(2)
    with yard.look() as seen:
        incarnation = yard.incarnation("orders")
        assert seen.call(ReadStats(queue=incarnation)).leased == 0
        yard.rest()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)).leased == 2


# -- nothing is touched --------------------------------------------------------------------------------


def on_disk(path: Path) -> dict[str, tuple[int, bytes]]:
    files = [found for found in path.rglob("*") if found.is_file()]
    folders = {str(found): (found.stat().st_mtime_ns, b"") for found in path.rglob("*") if found.is_dir()}
    return folders | {str(found): (found.stat().st_mtime_ns, found.read_bytes()) for found in files}


@pytest.mark.parametrize("owned", [True, False])
def test_nothing_on_disk_changes(yard: Yard, owned: bool) -> None:
    work(yard)
    yard.rest()
    infos = yard.owner.call(ListQueues())
    if not owned:
        yard.broker.close()
        for path in yard.path.rglob("*"):  # what can be rebuilt is not rebuilt by one who only looks
            if path.suffix == ".idx" or path.name in ("checkpoint", "synced"):
                path.unlink()
    before = on_disk(yard.path)
    with yard.look() as seen:
        for info in infos:
            asked(seen, info.incarnation)
            for partition in range(info.partitions):
                list(seen.events(info.incarnation, partition))
        seen.refresh()
    assert on_disk(yard.path) == before


CHANGES: list[Operation[Any]] = [
    ReadMetrics(),
    ProduceItems(batch=batch_of("x")),
    LeaseItems(),
    SettleItems(action="complete", parts=[]),
    NoteProgress(partition=0, lease=1, offset=0, text="half"),
    CreateQueue(name="new"),
    UpdateQueue(changes={}),
    ResizeQueue(partitions=2),
    SetReadOnly(partition=0),
    DeleteQueue(),
    PauseQueue(lease=True),
    CompactQueue(),
    ClearItems(states=["ready"]),
    SeekItems(start=0),
    RedriveItems(items={0: [0]}, to=1),
    ReleaseKey(key=1),
    MoveCursor(name="c", to={0: 1}),
    ReleaseCursor(name="c"),
    TakeGrant(stream="s", run="", done=0, want=1, per_key=1, timeout=SECOND),
    RenewStream(stream="s", run="", timeout=SECOND),
    EndStream(stream="s", run=""),
    FailGranted(action="bury", lots=[]),
    PublishWrite(write="w", source="s", number=1, parts=[]),
]


def test_nothing_is_changed_through_it(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    fill(queue, 2)
    incarnation = yard.incarnation("orders")
    before = on_disk(yard.path)
    with yard.look() as seen:
        assert {type(change) for change in CHANGES} == {kind for kind in OPERATIONS if not issubclass(kind, Query)}
        for change in CHANGES:
            change.queue = incarnation
            with pytest.raises(InvalidRequest, match=f"^read-only; {type(change).__name__} is for the owner"):
                seen.call(change)
    assert on_disk(yard.path) == before


class Glass(SystemFiles):
    """Files behind glass: whoever wants more than to read them is told so."""

    def open(self, path: str, mode: Mode) -> int:
        assert mode == "read", f"{path} was opened to {mode}"
        return super().open(path, mode)

    def _touched(self, *call: Any) -> Any:
        raise AssertionError(f"something was touched: {call}")

    write = pwrite = truncate = rename = remove = remove_directory = make_directory = lock = sync = sync_directory = _touched  # type: ignore[assignment]


def test_files_are_read_and_nothing_else(yard: Yard) -> None:
    work(yard)
    yard.rest()
    with Snapshot.open(yard.path, files=Glass(), clock=yard.clock) as seen:
        incarnation = yard.incarnation("orders")
        assert asked(seen, incarnation) == asked(yard.owner, incarnation)
        yard.broker.queue("orders").compact()
        seen.refresh()
        assert seen.call(ReadStats(queue=incarnation)) == yard.owner.call(ReadStats(queue=incarnation))
