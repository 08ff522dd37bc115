"""Finding, cancelling and rescheduling items in a queue with several partitions."""

import logging

import pytest

from penstock.operations import CancelItems, FindItems, ReadMetrics, RescheduleItems
from penstock.rules.commands import Call
from penstock.words.clock import SECOND
from penstock.words.errors import StorageFailed
from penstock.words.ids import parse_id
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest
from tests.broker.crashes import crash_at_each_call, disk_after

CALL = Call(bytes(range(16)), 3)
AGAIN = Call(bytes(range(16)), 3, again=True, age=1 * SECOND)
KEYS = [f"key-{number}" for number in range(8)]


def positions(ids: list[str]) -> list[tuple[int, int]]:
    return [parse_id(item) for item in ids]


def cancel(queue: QueueUnderTest, ids: list[str], call: Call | None = None) -> list[str]:
    return [one.outcome for one in queue.call(CancelItems(items=positions(ids), call=call))]


@pytest.mark.parametrize("restart", [False, True], ids=["", "killed"])
def test_a_repeated_cancel_gives_the_first_answer_and_changes_nothing(file_broker: BrokerUnderTest, restart: bool) -> None:
    queue = file_broker.create(partitions=3)
    ids = queue.produce(*KEYS, keys=KEYS)
    held = queue.lease(1)
    first = cancel(queue, [*ids, "2-99"], CALL)
    assert sorted(first) == ["cancelled"] * 7 + ["leased", "not found"]
    if restart:
        file_broker.kill()
        file_broker.turn()
    held.retry()
    assert cancel(queue, [*ids, "2-99"], AGAIN) == first
    assert queue.counts() == {"cancelled": 7, "ready": 1}


def test_a_cancel_cut_off_anywhere_is_finished_by_its_repetition() -> None:
    def prepare(broker: BrokerUnderTest) -> None:
        broker.create(partitions=3).produce(*KEYS, keys=KEYS)

    def ids(queue: QueueUnderTest) -> list[str]:
        return [f"{number}-{offset}" for number in range(3) for offset in range(8)]

    answers = set()
    for broker, _ in crash_at_each_call(
        disk_after(prepare), lambda broker: _ignore(cancel(broker.find(), ids(broker.find()), CALL)), step=2
    ):
        queue = broker.find()
        answers.add(tuple(cancel(queue, ids(queue), AGAIN)))
        assert queue.counts() == {"cancelled": 8}
    assert len(answers) == 1 and answers.pop().count("cancelled") == 8


def _ignore(found: object) -> None:
    """A piece of work has no result."""


def test_an_item_that_a_resize_moved_answers_to_its_old_id(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=1)
    later = queue.produce(*KEYS, keys=KEYS, at=broker.clock.read().wall + 60 * SECOND)
    queue.resize(4)
    for _ in range(5):
        broker.turn()
    broker.advance(61)
    for _ in range(10):
        broker.turn()
        queue.call(FindItems(key=b"none"))
    held = queue.lease(1)
    outcomes = cancel(queue, later)
    assert sorted(outcomes) == ["cancelled"] * 7 + ["leased"]
    held.complete()
    assert not queue.lease(10)


def test_a_scheduled_item_of_a_moved_slot_is_forwarded_when_it_is_rescheduled_to_now(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=1)
    ids = queue.produce(*KEYS, keys=KEYS, at=broker.clock.read().wall + 3_600 * SECOND)
    queue.resize(4)
    broker.turn()
    queue.produce("new", keys=[KEYS[0]])
    changes = queue.call(RescheduleItems(items=positions(ids)))
    assert all(one.outcome == "rescheduled" for one in changes)
    for _ in range(10):
        broker.turn()
    assert sorted(queue.drain()) == sorted([*KEYS, "new"])


def test_rescheduling_the_backlog_of_a_moved_slot_lets_later_items_of_its_keys_go(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=1)
    ids = queue.produce(*KEYS, keys=KEYS)
    queue.resize(4)
    broker.turn()
    queue.produce(*(f"new {key}" for key in KEYS), keys=KEYS)
    queue.call(RescheduleItems(items=positions(ids), delay=3_600 * SECOND))
    for _ in range(5):
        broker.turn()
    assert sorted(queue.drain()) == sorted(f"new {key}" for key in KEYS)


def test_a_scan_says_when_a_partition_cannot_be_read(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce("a", key="k")
    broken = queue.loop.engine.handles[1]
    broken.fail(StorageFailed("no disk; mend it"))
    with pytest.raises(StorageFailed, match="partition 1 is failing and cannot be searched"):
        queue.call(FindItems(key=b"k"))


def test_changes_of_waiting_items_are_counted_and_logged(broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    queue = broker.create()
    ids = queue.produce("a", "b", "c")
    with caplog.at_level(logging.INFO, "penstock"):
        cancel(queue, [ids[0], "0-9"])
        queue.call(RescheduleItems(items=positions(ids[1:]), delay=60 * SECOND))
    assert "1 of 2 items of queue 'q' were cancelled" in caplog.text
    assert "2 of 2 items of queue 'q' were rescheduled" in caplog.text
    found = broker.embedded.call(ReadMetrics()).queues["q"].items
    assert (found["cancelled"], found["rescheduled"]) == (1, 2)
