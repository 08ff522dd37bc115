"""The history of an item, through the public API, also while the owner works."""

import threading
from datetime import UTC, timedelta
from pathlib import Path

import pytest

import penstock
from penstock import Broker, NewItem
from penstock.broker.snapshot import Snapshot
from penstock.errors import InvalidRequest, PenstockError
from penstock.operations import FindOffsets, FindQueue, ReadHistory, ReadStats
from penstock.words.clock import SECOND
from tests.api.both_apis import WAIT, BrokerOpener

TURNS = 150


@pytest.mark.parametrize("target", ["memory://", "files"])
def test_history_returns_all_events_of_an_item(opener: BrokerOpener, target: str) -> None:
    opener.target = opener.target if target == "files" else target
    queue = opener.open_with_manual_clock().create_queue("orders")
    name = queue.produce(b"x")
    began = opener.clock.now()
    opener.clock.advance(2 * SECOND)
    queue.lease(consumer="host-1")[0].bury("bad")
    found = queue.history(name)
    assert [(one.queue, one.id, one.event, one.consumer, one.reason, one.attempt) for one in found] == [
        ("orders", name, "produced", "", "", 0),
        ("orders", name, "leased", "host-1", "", 1),
        ("orders", name, "buried", "host-1", "bad", 1),
    ]
    assert [one.at - began for one in found] == [timedelta(), timedelta(seconds=2), timedelta(seconds=2)]
    assert all(one.at.tzinfo is UTC for one in found)
    with pytest.raises(InvalidRequest, match="is not the id of an item"):
        queue.history("x")
    with pytest.raises(InvalidRequest, match="there is no item 0-9; "):
        queue.history("0-9")


def test_a_lease_that_needs_no_sync_is_in_the_history(opener: BrokerOpener) -> None:
    """The owner publishes its records before the log is read."""
    queue = opener.open_with_manual_clock().create_queue("orders")
    name = queue.produce(b"x")
    queue.lease()
    assert [one.event for one in queue.history(name)] == ["produced", "leased"]


def test_history_and_cursors_read_while_the_owner_rotates_and_drops_segments(tmp_path: Path) -> None:
    """Segments are created, thinned out and dropped while a cursor follows and whole histories are read."""
    with penstock.open(tmp_path, durability="os", segment_bytes=4_000) as broker:
        queue = broker.create_queue("orders", partitions=2, retention={"max_segments": 1})
        done = threading.Event()
        worker = threading.Thread(target=toil, args=(broker, done))
        with Snapshot.open(tmp_path) as seen:
            incarnation = seen.call(FindQueue(name="orders")).incarnation
            worker.start()
            looks = produced = 0
            try:
                while not done.is_set():
                    seen.refresh()
                    stats = seen.call(ReadStats(queue=incarnation))
                    assert not any(one.error for one in stats.partitions)
                    assert stats.produced >= produced
                    assert stats.produced == stats.depth + stats.completed + stats.buried
                    looks, produced = looks + 1, stats.produced
                    for number, end in seen.call(FindOffsets(queue=incarnation, at="newest")).items():
                        told = seen.call(ReadHistory(queue=incarnation, partition=number, offset=end - 1)) if end else []
                        assert "lost" not in [one.event for one in told]
            finally:
                worker.join(WAIT)
            published = [broker._home.log(incarnation, number) for number in queue.info().active]
            for log in published:
                log.close()
            seen.refresh()
            mine, theirs = seen.call(ReadStats(queue=incarnation)), queue.stats()
            assert looks and mine.produced == theirs.produced == TURNS * 20
            assert [(one.ready, one.completed) for one in mine.partitions] == [(one.ready, one.completed) for one in theirs.partitions]


def toil(broker: Broker, done: threading.Event) -> None:
    """Produce, lease and complete, and compact now and then."""
    queue = broker.queue("orders")
    try:
        for turn in range(TURNS):
            queue.produce_many([NewItem(b"%d" % n * 20, key=f"k{turn * n % 13}") for n in range(20)])
            queue.lease(25).complete()
            if turn % 10 == 9:
                queue.compact()
    except PenstockError as error:
        raise AssertionError(f"the owner was disturbed: {error}") from error
    finally:
        done.set()
