"""A directory looked at without owning it: the same answers as its owner's, and nothing touched."""

from pathlib import Path
from typing import Any

import pytest

from penstock.broker import admin, snapshot
from penstock.broker.snapshot import Snapshot
from penstock.errors import InvalidRequest
from penstock.logs.files.system import Mode, SystemFiles
from penstock.reports import QueueStats
from penstock.words.ids import parse_id
from tests.broker.yard import Yard, asked, fill, work

# -- the same answers ----------------------------------------------------------------------------------


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
        *("pause", "clear", "seek", "redrive", "send", "release", "compact", "note", "move_cursor", "release_cursor", "publish", "consume"),
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
