"""Retention of a whole queue as time passes: idle or at a trickle, with buried items, restarts, and a disk that fails."""

import logging
import random
from typing import Any

import pytest

from penstock.operations import ReadMetrics, RedriveItems
from penstock.testing import SimulatedFiles
from penstock.words.clock import DAY, HOUR, SECOND
from tests.broker.broker_under_test import Desk, Rig, keys_at
from tests.broker.storages import PatchyFiles, Simulated

RETENTION = {"max_age": DAY, "max_bytes": 0}
A_DAY, SLACK = DAY / SECOND, DAY / 10 / SECOND
"""Seconds; the second is what the documentation promises: a tenth of `max_age`."""


def filled(rig: Rig, partitions: int = 3, **options: Any) -> Desk:
    """A queue with a completed item in every partition."""
    desk = rig.create(partitions=partitions, retention=RETENTION, **options)
    for number in range(partitions):
        desk.produce("done", key=keys_at(desk, number)[0])
    assert desk.drain() == ["done"] * partitions
    return desk


def kept(desk: Desk) -> list[int]:
    """Of each partition how many items retention has not taken."""
    desk.open_all()
    members = desk.loop.turns.members.values()
    return [member.state.next_offset - member.state.dropped.total for member in members if member.healthy]


def test_an_idle_queue_lets_go_of_what_is_old_and_then_rests(broker: Rig) -> None:
    desk = filled(broker)
    broker.pass_by(A_DAY - 1)
    assert kept(desk) == [1, 1, 1]
    broker.pass_by(SLACK)
    assert kept(desk) == [0, 0, 0]
    broker.pass_by(120)
    assert desk.loop.turns.next_run is None, "every partition is closed, and nothing comes due in any"
    turns = desk.loop.meter.turns
    broker.pass_by(30 * A_DAY)
    assert desk.loop.meter.turns == turns


def test_a_trickle_keeps_the_disk_bounded(broker: Rig) -> None:
    desk = broker.create(partitions=2, retention={"max_age": HOUR, "max_bytes": 0})
    sizes = []
    for minute in range(24 * 60 // 5):
        desk.produce(random.Random(minute).randbytes(4_000), key=keys_at(desk, minute % 2)[0])
        desk.lease().complete()
        broker.pass_by(300)
        sizes.append(sum(one.size_bytes for one in desk.stats().partitions))
    assert max(sizes[24:]) < 2 * max(sizes[12:24]), "of a day no more is kept than of two hours"
    assert sum(kept(desk)) <= 15, "of an hour and a tenth, one every five minutes"


def test_an_old_unresolved_item_stays_and_is_served(broker: Rig) -> None:
    desk = filled(broker, partitions=2)
    (late,) = desk.produce("late", key=keys_at(desk, 0)[0])
    desk.lease().retry(delay=3 * A_DAY)
    broker.pass_by(3 * A_DAY)
    assert kept(desk) == [1, 0]
    assert desk.lease().ids == [late]


def test_restarts_in_between_change_nothing(broker: Rig) -> None:
    filled(broker)
    for _ in range(8):
        broker.pass_by(A_DAY / 8 - 1)
        assert kept(broker.find()) == [1, 1, 1]
        broker.restart()
    broker.pass_by(SLACK)
    assert kept(broker.find()) == [0, 0, 0]


def test_buried_items_are_told_of_before_and_after_they_are_taken(broker: Rig, caplog: pytest.LogCaptureFixture) -> None:
    desk = filled(broker, partitions=2)
    ids = [item for number in (0, 1, 1) for item in desk.produce("bad", key=keys_at(desk, number)[0])]
    for _ in range(2):
        desk.lease().bury(reason="no use")
    broker.pass_by(0.8 * A_DAY)
    assert (desk.stats().warnings, desk.stats().buried) == ([], 3)
    broker.pass_by(0.2 * A_DAY - 60)
    (warning,) = desk.stats().warnings
    assert warning.startswith("retention is to drop 3 buried items, the first in ")
    assert warning.endswith(" minutes; redrive or clear them, or keep items for longer")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        broker.pass_by(SLACK)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"retention of queue 'q' dropped 1 buried items of partition 0 ({ids[0]} to {ids[0]}): nobody redrove or cleared them in time",
        f"retention of queue 'q' dropped 2 buried items of partition 1 ({ids[1]} to {ids[2]}): nobody redrove or cleared them in time",
    ]
    stats = desk.stats()
    assert (stats.buried, stats.buried_dropped, [one.buried_dropped for one in stats.partitions], stats.warnings) == (0, 3, [1, 2], [])
    assert broker.broker.call(ReadMetrics()).queues["q"].items["buried_dropped"] == 3
    broker.restart()
    assert broker.find().stats().buried_dropped == 3


def test_buried_items_that_were_redriven_in_time_stay(broker: Rig) -> None:
    desk = filled(broker, partitions=1)
    (bad,) = desk.produce("bad")
    desk.lease().bury()
    broker.pass_by(A_DAY - 60)
    assert desk.stats().partitions[0].buried_to_drop == 1
    desk.call(RedriveItems(items={0: [1]}, to=desk.incarnation))
    broker.pass_by(A_DAY)
    assert (desk.stats().buried_dropped, desk.lease().ids) == (0, [bad])


def test_a_partition_whose_disk_fails_is_left_alone_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk = filled(rig)
    keys = [keys_at(desk, number)[0] for number in range(3)]
    desk.produce(*keys, keys=keys)
    rig.pass_by(A_DAY / 20 - 1)
    desk.open_all()
    files.break_partition(1)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        rig.pass_by(600)
    assert any("keeping the files of partition 1 of queue 'q' in order failed" in one.getMessage() for one in caplog.records)
    assert [one.status for one in desk.stats().partitions] == ["active", "failing", "active"]
    files.broken.clear()
    rig.pass_by(A_DAY + SLACK)
    assert kept(desk) == [1, 1, 1]
    assert sorted(desk.drain()) == sorted(keys)
    rig.check()
    rig.broker.close()


def test_closing_waits_for_a_partition_that_is_out_for_retention() -> None:
    files = SimulatedFiles()
    rig = Rig(Simulated(files))
    desk = filled(rig, partitions=2)
    rig.pass_by(A_DAY)
    loop = desk.loop
    loop.is_slow = lambda member: member.number == 1
    rig.pass_by(SLACK)
    (out,) = loop.waiting_for_disk
    assert (out.number, out.job is not None) == (1, True)
    desk.produce("meanwhile", key=keys_at(desk, 0)[0])
    rig.restart()
    rig.pass_by(60)
    desk = rig.find()
    assert kept(desk) == [1, 0]
    assert desk.drain() == ["meanwhile"]
    rig.broker.close()


def test_a_shorter_time_counts_at_once(broker: Rig) -> None:
    desk = filled(broker)
    broker.pass_by(A_DAY / 2)
    desk.update(retention={"max_age": HOUR})
    broker.pass_by(HOUR / SECOND)
    assert kept(desk) == [0, 0, 0]
