"""A directory looked at without owning it: the same answers as its owner's, and nothing touched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker, NewItem, Queue
from penstock.errors import BrokerClosed, CorruptLog, InvalidRequest, QueueNotFound, StorageFailed
from penstock.logs.directory import Root
from penstock.logs.files import Mode, SystemFiles
from penstock.service import admin, snapshot
from penstock.service.embedded import Embedded
from penstock.service.reports import ItemEvent, QueueStats
from penstock.service.snapshot import Snapshot
from penstock.testing import ManualClock
from penstock.words.clock import SECOND
from penstock.words.ids import parse_id
from tests.service.api import work_off


class Yard:
    """A broker at work, in a directory, and whoever looks over its fence. Time stands still; nothing happens but in `rest`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.broker: Broker = penstock.open(path, clock=self.clock, threaded=False)

    @property
    def owner(self) -> Embedded:
        found = self.broker._port.broker
        assert isinstance(found, Embedded)
        return found

    def look(self) -> Snapshot:
        return Snapshot.open(self.path, clock=self.clock)

    def rest(self) -> None:
        """Nothing more is to be done, and all that was done is published."""
        work_off(self.broker)
        for info in self.owner.list():
            self.owner.ask(info.incarnation, "publish")

    def incarnation(self, name: str) -> int:
        return self.owner.find(name).incarnation

    def reopen(self) -> None:
        self.broker.close()
        self.broker = penstock.open(self.path, clock=self.clock, threaded=False)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path / "data")
    yield yard
    yard.broker.close()


def fill(queue: Queue, count: int, **options: Any) -> list[str]:
    return queue.produce_many([NewItem(b"%d" % n, **options) for n in range(count)])


def work(yard: Yard) -> None:
    """A bit of everything."""
    yard.broker.create_queue("dead")
    orders = yard.broker.create_queue("orders", partitions=3, dead_queue="dead", max_attempts=2)
    orders.produce_many([NewItem(b"%d" % n, key=f"k{n % 7}") for n in range(40)])
    fill(orders, 5, priority=1)
    orders.produce(b"later", at=yard.clock.read().wall / SECOND + 60)
    batch = orders.lease(12, consumer="c")
    batch[0].complete()
    batch[1].bury("bad")
    batch[2].retry(reason="no")
    batch[3].retry(delay=30, reason="wait")
    orders.lease(9, consumer="d")
    orders.cursor("audit").read(4)
    orders.resize(5)
    orders.produce_many([NewItem(b"new %d" % n, key=f"k{n % 7}") for n in range(10)])
    work_off(yard.broker)


# -- the same answers ----------------------------------------------------------------------------------


def asked(source: Embedded | Snapshot, incarnation: int) -> dict[str, Any]:
    """Every answer to be had by looking at a queue, as plain data."""
    ends: dict[int, int] = source.ask(incarnation, "ends")
    places = [(number, offset) for number, end in ends.items() for offset in range(end)]
    parts, after = source.ask(incarnation, "read", offsets={}, limit=30)
    lists = {name: source.ask(incarnation, name, **args) for name, args in LISTS.items()}
    return {
        "ends": ends,
        "stats": source.ask(incarnation, "stats"),
        "explain": [source.ask(incarnation, "explain", partition=number, offset=offset) for number, offset in places],
        "trace": [source.ask(incarnation, "trace", partition=number, offset=offset) for number, offset in places],
        "history": [source.ask(incarnation, "history", partition=number, offset=offset) for number, offset in places[::5]],
        "keys": source.ask(incarnation, "keys", limit=5),
        "cursor": source.ask(incarnation, "cursor", name="audit"),
        "cursors": source.ask(incarnation, "cursors"),
        "starts": source.ask(incarnation, "starts"),
        "offsets_at": [source.ask(incarnation, "offsets_at", at=at) for at in (0, 1 << 60)],
        "read": ([(number, part.start, list(part.batch.payloads)) for number, part in parts], after),
        **{name: [(one.partition, one.offset, one.state, one.attempts, one.reason) for one in found] for name, found in lists.items()},
    }


LISTS: dict[str, dict[str, Any]] = {
    "listed": {"states": ["ready", "leased", "scheduled"], "after": (0, 2), "limit": 20},
    "redrivable": {"after": None, "limit": 50},
}


def test_it_answers_as_the_owner_does(yard: Yard) -> None:
    work(yard)
    yard.rest()
    with yard.look() as seen:
        assert seen.list() == yard.owner.list()
        assert seen.list("o", "a", 1) == yard.owner.list("o", "a", 1) == [seen.find("orders")]
        for name in ("orders", "dead"):
            incarnation = yard.incarnation(name)
            assert asked(seen, incarnation) == asked(yard.owner, incarnation)
        stats: QueueStats = seen.ask(yard.incarnation("orders"), "stats")
        assert stats.leased and stats.scheduled and stats.completed and stats.consumers and stats.resizing and len(stats.partitions) == 5


def test_every_looking_verb_is_there() -> None:
    """What an owner answers and a snapshot does not must be what changes something."""
    assert set(admin.VERBS) - set(snapshot.VERBS) == {
        *("pause", "clear", "seek", "redrive", "send", "release", "compact", "note", "move_cursor", "release_cursor", "publish"),
    }


def test_it_stands_still_until_it_is_refreshed(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders", partitions=2)
    fill(queue, 3)
    with yard.look() as seen:
        incarnation = yard.incarnation("orders")
        before = seen.ask(incarnation, "stats")
        first, *_ = fill(queue, 4)
        queue.lease(2)[0].complete()
        yard.rest()
        still = seen.ask(incarnation, "stats")
        assert (still.produced, still.ready, still.leased) == (before.produced, before.ready, before.leased) == (3, 3, 0)
        seen.refresh()
        assert seen.ask(incarnation, "stats") == yard.owner.ask(incarnation, "stats") != before
        partition, offset = parse_id(first)
        assert seen.ask(incarnation, "history", partition=partition, offset=offset)


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
            assert seen.list() == yard.owner.list()
            for info in seen.list():
                assert seen.ask(info.incarnation, "stats") == yard.owner.ask(info.incarnation, "stats")


def test_it_outlives_its_owner(yard: Yard) -> None:
    work(yard)
    yard.rest()
    incarnation = yard.incarnation("orders")
    with yard.look() as seen:
        before = seen.ask(incarnation, "stats")
        yard.broker.close()
        seen.refresh()
        assert seen.ask(incarnation, "stats").ready == before.ready
        yard.reopen()
        yard.broker.queue("orders").produce(b"more")
        yard.rest()
        seen.refresh()
        assert seen.ask(incarnation, "stats") == yard.owner.ask(incarnation, "stats")


def test_leases_that_nobody_synced_are_not_seen_yet(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    fill(queue, 3)
    queue.lease(2)
    with yard.look() as seen:
        incarnation = yard.incarnation("orders")
        assert seen.ask(incarnation, "stats").leased == 0
        yard.rest()
        seen.refresh()
        assert seen.ask(incarnation, "stats").leased == 2


# -- nothing is touched --------------------------------------------------------------------------------


def on_disk(path: Path) -> dict[str, tuple[int, bytes]]:
    files = [found for found in path.rglob("*") if found.is_file()]
    folders = {str(found): (found.stat().st_mtime_ns, b"") for found in path.rglob("*") if found.is_dir()}
    return folders | {str(found): (found.stat().st_mtime_ns, found.read_bytes()) for found in files}


@pytest.mark.parametrize("owned", [True, False])
def test_nothing_on_disk_changes(yard: Yard, owned: bool) -> None:
    work(yard)
    yard.rest()
    infos = yard.owner.list()
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


def test_nothing_is_changed_through_it(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    fill(queue, 2)
    incarnation = yard.incarnation("orders")
    before = on_disk(yard.path)
    with yard.look() as seen:
        for verb in set(admin.VERBS) - set(snapshot.VERBS):
            with pytest.raises(InvalidRequest, match=f"^read-only; {verb} is for the owner"):
                seen.ask(incarnation, verb)
        with pytest.raises(InvalidRequest, match="there is no verb 'dance'; there are cursor, "):
            seen.ask(incarnation, "dance")
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
        assert seen.ask(incarnation, "stats") == yard.owner.ask(incarnation, "stats")


# -- what happened -------------------------------------------------------------------------------------


def history_of(source: Embedded | Snapshot, queue: str, name: str) -> list[ItemEvent]:
    partition, offset = parse_id(name)
    found: list[ItemEvent] = source.ask(source.find(queue).incarnation, "history", partition=partition, offset=offset)
    return found


def told(found: list[ItemEvent]) -> list[tuple[str, str, str]]:
    return [(event.queue, event.id, event.event) for event in found]


def test_an_item_is_followed_through_queues(yard: Yard) -> None:
    yard.broker.create_queue("dead")
    orders = yard.broker.create_queue("orders", dead_queue="dead")
    fill(orders, 3)
    orders.lease(3, consumer="c")[1].bury("bad")
    work_off(yard.broker)
    yard.broker.redrive("dead", to="orders")
    work_off(yard.broker)
    orders.lease(1, consumer="d").complete()
    yard.rest()
    wanted = [
        *[("orders", "0-1", event) for event in ("produced", "leased", "buried", "sent", "delivered")],
        *[("dead", "0-0", event) for event in ("produced", "sent", "delivered")],
        *[("orders", "0-3", event) for event in ("produced", "leased", "completed")],
    ]
    with yard.look() as seen:
        for source in (yard.owner, seen):
            for queue, name in (("orders", "0-1"), ("dead", "0-0"), ("orders", "0-3")):  # it answers to every id it had
                assert told(history_of(source, queue, name)) == wanted
        found = history_of(seen, "orders", "0-1")
        assert seen.item_history(yard.incarnation("orders"), 0, 1) == found
    assert [event.destination for event in found if event.destination] == ["dead/0", "dead/0-0", "orders/0", "orders/0-3"]
    assert [event.source for event in found if event.source] == ["orders/0", "dead/0"]
    buried = found[2]
    assert (buried.reason, buried.consumer, buried.attempt) == ("bad", "c", 1) and buried.time.tzinfo is not None


def test_an_item_whose_queue_is_gone_keeps_what_is_left_of_its_history(yard: Yard) -> None:
    yard.broker.create_queue("a").produce(b"x")
    yard.broker.create_queue("b")
    incarnation = yard.incarnation("b")
    yard.broker.redrive("a", to="b")
    work_off(yard.broker)
    yard.broker.queue("b").lease(1)[0].complete()
    yard.broker.queue("a").delete()
    yard.rest()
    with yard.look() as seen:
        for source in (yard.owner, seen):
            found = history_of(source, "b", "0-0")
            assert told(found) == [("b", "0-0", "produced"), ("b", "0-0", "leased"), ("b", "0-0", "completed")]
            assert found[0].source.endswith("/0") and len(found[0].source) == 18  # nobody knows the name any more
            explained = source.ask(incarnation, "explain", partition=0, offset=0)
            assert explained.state == "completed"


def test_an_item_that_went_to_a_deleted_queue(yard: Yard) -> None:
    yard.broker.create_queue("a").produce(b"x")
    yard.broker.create_queue("b")
    yard.broker.redrive("a", to="b")
    work_off(yard.broker)
    yard.broker.queue("b").delete()
    yard.rest()
    with yard.look() as seen:
        for source in (yard.owner, seen):
            assert told(history_of(source, "a", "0-0")) == [("a", "0-0", event) for event in ("produced", "sent", "delivered")]
            assert source.ask(yard.incarnation("a"), "explain", partition=0, offset=0).why == "moved to a queue that is no more"


def test_a_resized_item_is_followed_to_its_new_partition(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders", partitions=1)
    names = queue.produce_many([NewItem(b"%d" % n, key=f"k{n}", at=yard.clock.read().wall / SECOND + 5) for n in range(8)])
    queue.resize(4)
    yard.clock.advance(5 * SECOND)
    work_off(yard.broker)
    queue.lease(8).complete()
    work_off(yard.broker)
    queue.lease(8).complete()
    yard.rest()
    moved = 0
    with yard.look() as seen:
        for name in names:
            found = history_of(seen, "orders", name)
            assert found == history_of(yard.owner, "orders", name)
            assert told(found)[:2] == [("orders", name, "scheduled"), ("orders", name, "due")]
            assert found[-1].event == "completed"
            moved += found[-1].id != name
    assert moved


def test_events_of_a_partition(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    fill(queue, 3)
    queue.lease(2).complete()
    incarnation = yard.incarnation("orders")
    with yard.look() as seen:
        found = list(seen.events(incarnation, 0))
        assert [(event.event, event.offset) for event in found] == [
            *[("produced", offset) for offset in range(3)],
            *[(event, offset) for event in ("leased", "completed") for offset in range(2)],
        ]
        queue.produce(b"new")
        assert list(seen.events(incarnation, 0)) == found  # it stands still
        with pytest.raises(InvalidRequest, match=r"queue 'orders' has no partition 7; it has \[0\]"):
            list(seen.events(incarnation, 7))
        with pytest.raises(InvalidRequest, match="there is no item at offset 3"):
            seen.item_history(incarnation, 0, 3)
        with pytest.raises(InvalidRequest, match="has no partition 7"):
            seen.item_history(incarnation, 7, 0)


# -- what is wrong -------------------------------------------------------------------------------------


def log_folder(yard: Yard, incarnation: int, partition: int) -> Path:
    return yard.path / "logs" / f"{incarnation:016x}" / f"{partition:05d}"


def test_a_missing_log_is_reported_and_the_others_are_seen(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders", partitions=2)
    queue.produce_many([NewItem(b"", key=f"k{n}") for n in range(20)])
    incarnation = yard.incarnation("orders")
    yard.broker.close()
    folder = log_folder(yard, incarnation, 0)
    folder.rename(yard.path / "aside")
    with yard.look() as seen:
        stats = seen.ask(incarnation, "stats")
        assert [one.status for one in stats.partitions] == ["failing", "active"]
        assert "has no log in" in stats.partitions[0].error and len(stats.warnings) == 2
        assert seen.ask(incarnation, "ends").keys() == {1}
        assert seen.ask(incarnation, "explain", partition=0, offset=0).state == "unknown"
        for verb in ("history", "trace"):
            with pytest.raises(CorruptLog, match=r"partition 0 cannot be read \(.*\); the others can"):
                seen.ask(incarnation, verb, partition=0, offset=0)
        (yard.path / "aside").rename(folder)
        seen.refresh()
        assert [one.status for one in seen.ask(incarnation, "stats").partitions] == ["active", "active"]


def test_a_damaged_log_is_reported_and_its_other_items_are_seen(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    for number in range(3):
        queue.produce(b"%d" % number * 40)
    incarnation = yard.incarnation("orders")
    yard.broker.close()
    (path,) = log_folder(yard, incarnation, 0).glob("*.log")
    for name in ("checkpoint",):
        (path.parent / name).unlink(missing_ok=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"1" * 40)] ^= 1
    path.write_bytes(data)
    with yard.look() as seen:
        stats = seen.ask(incarnation, "stats")
        assert (stats.ready, stats.completed) == (2, 1)
        assert any("damage: " in warning and "run verify" in warning for warning in stats.warnings)
        assert [event.event for event in seen.item_history(incarnation, 0, 1)] == ["lost"]
        assert [one.offset for one in seen.ask(incarnation, "listed", states=[])] == [0, 2]


def test_a_log_without_a_readable_base_is_reported(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders", retention={"max_segments": 1})
    fill(queue, 2)
    queue.lease(2).complete()
    for _ in range(3):
        queue.compact()
    incarnation = yard.incarnation("orders")
    yard.broker.close()
    for path in log_folder(yard, incarnation, 0).iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    with yard.look() as seen:
        (one,) = seen.ask(incarnation, "stats").partitions
        assert one.status == "failing" and "run verify" in one.error


def test_a_damaged_catalog_is_refused(yard: Yard) -> None:
    yard.broker.create_queue("orders")
    yard.broker.create_queue("others")
    yard.broker.close()
    (path,) = log_folder(yard, 0, 0).glob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(b"orders")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptLog, match=r"the catalog is damaged at .*; run verify, then repair"):
        yard.look()


def test_what_is_no_brokers_directory_is_refused(tmp_path: Path) -> None:
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
        assert seen.ask(seen.find("orders").incarnation, "stats").ready == 20
    with Snapshot.open(one) as seen:  # the half of it
        stats = seen.ask(seen.find("orders").incarnation, "stats")
        assert {one.status for one in stats.partitions} == {"active", "failing"}


def test_what_is_gone_is_told(yard: Yard) -> None:
    queue = yard.broker.create_queue("orders")
    incarnation = yard.incarnation("orders")
    seen = yard.look()
    seen.ask(incarnation, "stats")
    queue.delete()
    seen.refresh()
    with pytest.raises(QueueNotFound, match="the queue was deleted"):
        seen.ask(incarnation, "stats")
    with pytest.raises(QueueNotFound, match="there is no queue 'orders'"):
        seen.find("orders")
    assert repr(seen) == f"Snapshot({str(yard.path)!r}, 0 queues)"
    seen.close()
    for ask in (seen.list, seen.refresh, lambda: seen.ask(incarnation, "stats")):
        with pytest.raises(BrokerClosed, match="the snapshot is closed; open it again"):
            ask()


def test_a_partition_that_cannot_be_read_right_now(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(yard.broker.create_queue("orders"), 2)
    incarnation = yard.incarnation("orders")
    with yard.look() as seen:
        seen.ask(incarnation, "stats")
        reader = seen._queues[incarnation].members[0].open
        monkeypatch.setattr(reader, "refresh", lambda: (_ for _ in ()).throw(StorageFailed("no; try again")))
        seen.refresh()
        assert seen.ask(incarnation, "stats").partitions[0].error == "no; try again"
        with pytest.raises(StorageFailed, match=r"partition 0 cannot be read \(no; try again\)"):
            list(seen.events(incarnation, 0))
        monkeypatch.undo()
        seen.refresh()
        assert seen.ask(incarnation, "stats").ready == 2
