"""Retention of a whole queue as time passes: idle or at a trickle, with buried items, restarts, and a disk that
fails.
"""

import logging
import random
from typing import Any

import pytest

from penstock.operations import ReadMetrics, RedriveItems
from penstock.testing import SimulatedFiles
from penstock.words.clock import DAY, HOUR, SECOND
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, keys_at
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

RETENTION = {"max_age": DAY, "max_bytes": 0}
A_DAY, SLACK = DAY / SECOND, DAY / 10 / SECOND
"""Seconds; the second is what the documentation promises: a tenth of `max_age`."""


def filled(broker: BrokerUnderTest, partitions: int = 3, **options: Any) -> QueueUnderTest:
    """A queue with a completed item in every partition."""
    queue = broker.create(partitions=partitions, retention=RETENTION, **options)
    for number in range(partitions):
        queue.produce("done", key=keys_at(queue, number)[0])
    assert queue.drain() == ["done"] * partitions
    return queue


def kept(queue: QueueUnderTest) -> list[int]:
    """Of each partition how many items retention has not taken."""
    queue.open_all()
    handles = queue.loop.engine.handles.values()
    return [handle.state.next_offset - handle.state.dropped.total for handle in handles if handle.is_usable]


def test_an_idle_queue_deletes_old_items_and_then_runs_no_turns(broker: BrokerUnderTest) -> None:
    queue = filled(broker)
    broker.advance_in_steps(A_DAY - 1)
    assert kept(queue) == [1, 1, 1]
    broker.advance_in_steps(SLACK)
    assert kept(queue) == [0, 0, 0]
    broker.advance_in_steps(120)
    assert queue.loop.engine.next_run is None, "every partition is closed, and nothing comes due in any"
    turns = queue.loop.meter.turns
    broker.advance_in_steps(30 * A_DAY)
    assert queue.loop.meter.turns == turns


def test_a_trickle_keeps_the_disk_bounded(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2, retention={"max_age": HOUR, "max_bytes": 0})
    sizes = []
    for minute in range(24 * 60 // 5):
        queue.produce(random.Random(minute).randbytes(4_000), key=keys_at(queue, minute % 2)[0])
        queue.lease().complete()
        broker.advance_in_steps(300)
        sizes.append(sum(one.size_bytes for one in queue.stats().partitions))
    assert max(sizes[24:]) < 2 * max(sizes[12:24]), "of a day no more is kept than of two hours"
    assert sum(kept(queue)) <= 15, "of an hour and a tenth, one every five minutes"


def test_an_old_unresolved_item_stays_and_is_served(broker: BrokerUnderTest) -> None:
    queue = filled(broker, partitions=2)
    (late,) = queue.produce("late", key=keys_at(queue, 0)[0])
    queue.lease().retry(delay=3 * A_DAY)
    broker.advance_in_steps(3 * A_DAY)
    assert kept(queue) == [1, 0]
    assert queue.lease().ids == [late]


def test_restarts_in_between_change_nothing(broker: BrokerUnderTest) -> None:
    filled(broker)
    for _ in range(8):
        broker.advance_in_steps(A_DAY / 8 - 1)
        assert kept(broker.find()) == [1, 1, 1]
        broker.restart()
    broker.advance_in_steps(SLACK)
    assert kept(broker.find()) == [0, 0, 0]


def test_a_warning_comes_before_and_after_buried_items_are_deleted(broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    queue = filled(broker, partitions=2)
    ids = [item for number in (0, 1, 1) for item in queue.produce("bad", key=keys_at(queue, number)[0])]
    for _ in range(2):
        queue.lease().bury(reason="no use")
    broker.advance_in_steps(0.8 * A_DAY)
    buried = "3 items are buried here; list them, then redrive or clear them"
    assert (queue.stats().warnings, queue.stats().buried) == ([buried], 3)
    broker.advance_in_steps(0.2 * A_DAY - 60)
    warning = next(one for one in queue.stats().warnings if one != buried)
    assert warning.startswith("retention will drop 3 buried items, the first in ")
    assert warning.endswith(" minutes; redrive or clear them, or keep items for longer")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        broker.advance_in_steps(SLACK)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"retention of queue 'q' dropped 1 buried items of partition 0 ({ids[0]} to {ids[0]}): they were not redriven or cleared in time",
        f"retention of queue 'q' dropped 2 buried items of partition 1 ({ids[1]} to {ids[2]}): they were not redriven or cleared in time",
    ]
    stats = queue.stats()
    assert (stats.buried, stats.buried_dropped, [one.buried_dropped for one in stats.partitions], stats.warnings) == (0, 3, [1, 2], [])
    assert broker.embedded.call(ReadMetrics()).queues["q"].items["buried_dropped"] == 3
    broker.restart()
    assert broker.find().stats().buried_dropped == 3


def test_buried_items_that_were_redriven_in_time_stay(broker: BrokerUnderTest) -> None:
    queue = filled(broker, partitions=1)
    (bad,) = queue.produce("bad")
    queue.lease().bury()
    broker.advance_in_steps(A_DAY - 60)
    assert queue.stats().partitions[0].buried_to_drop == 1
    queue.call(RedriveItems(items={0: [1]}, to=queue.incarnation))
    broker.advance_in_steps(A_DAY)
    assert (queue.stats().buried_dropped, queue.lease().ids) == (0, [bad])


def test_a_partition_whose_disk_fails_is_left_alone_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = filled(broker)
    keys = [keys_at(queue, number)[0] for number in range(3)]
    queue.produce(*keys, keys=keys)
    broker.advance_in_steps(A_DAY / 20 - 1)
    queue.open_all()
    files.break_partition(1)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        broker.advance_in_steps(600)
    assert any("maintenance of the files of partition 1 of queue 'q' failed" in one.getMessage() for one in caplog.records)
    assert [one.status for one in queue.stats().partitions] == ["active", "failing", "active"]
    files.failing_paths.clear()
    broker.advance_in_steps(A_DAY + SLACK)
    assert kept(queue) == [1, 1, 1]
    assert sorted(queue.drain()) == sorted(keys)
    broker.check()
    broker.embedded.close()


def test_closing_waits_for_a_partition_in_io_for_retention() -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = filled(broker, partitions=2)
    broker.advance_in_steps(A_DAY)
    loop = queue.loop
    loop.stays_in_io = lambda handle: handle.number == 1
    broker.advance_in_steps(SLACK)
    (out,) = loop.manual_io
    assert (out.number, out.job is not None) == (1, True)
    queue.produce("meanwhile", key=keys_at(queue, 0)[0])
    broker.restart()
    broker.advance_in_steps(60)
    queue = broker.find()
    assert kept(queue) == [1, 0]
    assert queue.drain() == ["meanwhile"]
    broker.embedded.close()


def test_a_shorter_max_age_applies_at_once(broker: BrokerUnderTest) -> None:
    queue = filled(broker)
    broker.advance_in_steps(A_DAY / 2)
    queue.update(retention={"max_age": HOUR})
    broker.advance_in_steps(HOUR / SECOND)
    assert kept(queue) == [0, 0, 0]
