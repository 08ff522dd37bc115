"""A broker closed or killed, and opened again: everything goes on where it was."""

import errno
import random
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedBroker
from penstock.operations import CreateQueue, FindQueue
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import BrokerLocked, CorruptLog, LeaseLost, OutcomeUnknown, StorageFailed
from tests.broker.broker_under_test import BrokerUnderTest, batch_of, ids_of, refusal
from tests.broker.crashes import crash_at_each_call, disk_after
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_restart_keeps_all_states(broker: BrokerUnderTest, how: str) -> None:
    queue = broker.create(partitions=3, dedup_window=500 * SECOND)
    queue.produce("scheduled", at=broker.after(100))
    queue.produce("retried")
    queue.lease().retry(delay=50)
    queue.produce("leased")
    held = queue.lease(timeout=30)
    first = queue.produce("deduped", dedups=["d"])
    batch = batch_of("named", "other", keys=["k", None])
    named = ids_of(queue.produce_batch(batch, "r"), 2)
    queue.pause(lease=True)
    counts = queue.counts()
    getattr(broker, how)()
    assert queue.counts() == counts == {"scheduled": 2, "leased": 1, "ready": 3}
    assert queue.lease().texts == [], "it is still paused"
    queue.pause(lease=False)
    assert queue.produce("again", dedups=["d"]) == first
    assert ids_of(queue.produce_batch(batch, "r"), 2) == named
    assert held.settle("extend", timeout=40) == 1, "a lease and its token survive"
    assert sorted(queue.drain()) == ["deduped", "named", "other"]
    broker.advance_in_steps(39.9)
    assert queue.lease().texts == []
    broker.advance_in_steps(0.1)
    again = queue.lease()
    assert again.texts == ["leased"]
    assert isinstance(refusal(queue.settle("complete", held.parts)[0]), LeaseLost)
    again.complete()
    broker.advance_in_steps(10)
    assert queue.drain() == ["retried"]
    broker.advance_in_steps(49.9)
    assert queue.lease().texts == []
    broker.advance_in_steps(0.1)
    assert queue.drain() == ["scheduled"]
    broker.advance_in_steps(500)
    assert queue.produce("again", dedups=["d"]) != first


def test_deadlines_that_passed_while_closed_are_handled_at_opening(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("scheduled", at=broker.after(100))
    queue.produce("leased")
    queue.lease()
    broker.embedded.close()
    broker.clock.advance(3_600 * SECOND)
    broker.embedded = broker.storage.open(clock=broker.clock, threaded=False)
    broker.turn()
    assert queue.lease(timeout=3_600).texts == ["scheduled"]
    broker.advance(1.999)
    assert queue.lease().texts == [], "its holder could not extend it while nobody owned the directory"
    broker.advance(0.001)
    assert queue.lease().texts == ["leased"]


@pytest.mark.parametrize("step", [DAY, -DAY], ids=["a day ahead", "a day back"])
def test_a_step_of_the_date_neither_doubles_nor_freezes_a_lease(broker: BrokerUnderTest, step: int) -> None:
    queue = broker.create()
    queue.produce("a")
    held = queue.lease(timeout=60)
    broker.clock.step_wall(step)
    broker.advance_in_steps(59)
    assert queue.lease().texts == []
    assert held.settle("extend") == 1
    broker.advance_in_steps(59)
    assert queue.lease().texts == []
    broker.advance_in_steps(1)
    assert queue.lease().texts == ["a"]


def test_an_item_scheduled_by_date_follows_the_date(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("tomorrow", at=broker.clock.read().wall + DAY)
    asked = queue.submit_lease(wait=600)
    broker.clock.step_wall(DAY)
    broker.advance_in_steps(1.1)
    assert asked.leased.texts == ["tomorrow"], "a stepped date is noticed within a second or so"


def test_after_a_reboot_a_lease_has_its_full_time_again(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a")
    held = queue.lease(timeout=60)
    broker.advance_in_steps(50)
    broker.storage.kill()
    broker.clock.reboot(downtime=5 * SECOND)
    broker.kill()
    broker.advance_in_steps(59)
    assert queue.lease().texts == []
    assert held.complete() == 1


# -- one at a time ------------------------------------------------------------------------------------------


def test_a_second_opener_is_refused_and_the_first_keeps_working(tmp_path: Path) -> None:
    first = EmbeddedBroker.open(tmp_path)
    first.call(CreateQueue(name="q"))
    with pytest.raises(BrokerLocked, match="; "):
        EmbeddedBroker.open(tmp_path)
    first.call(FindQueue(name="q"))
    first.close()
    second = EmbeddedBroker.open(tmp_path)
    assert second.call(FindQueue(name="q")).name == "q"
    second.close()


def test_an_opening_that_fails_releases_everything() -> None:
    """Every call of an opening fails once: either the broker opens all the same, or the next attempt does."""

    def work(broker: BrokerUnderTest) -> None:
        broker.create(partitions=2).produce("x")

    files, clock = disk_after(work)
    refused = 0
    for call in range(1, 200):
        copied = files.copy()
        copied.fail(copied.calls + call, errno.EIO)
        try:
            broker = BrokerUnderTest(SimulatedStorage(copied), clock=clock)
        except StorageFailed:
            refused += 1
            broker = BrokerUnderTest(SimulatedStorage(copied), clock=clock)  # not BrokerLocked
        copied.clear_faults()
        broker.advance_in_steps(10)
        assert broker.find().drain() == ["x"]
        broker.embedded.close()
        if copied.calls < files.calls + call:
            break
    assert refused


def test_a_damaged_catalog_is_reported_and_the_directory_is_released() -> None:
    def work(broker: BrokerUnderTest) -> None:
        for name in ("first", "second", "third"):
            broker.create(name)

    files, clock = disk_after(work)
    path = next(path for path in files.contents() if f"{0:016x}/00000/" in path and path.endswith(".log"))
    files.flip_bit(path, 8 * files.content(path).index(b"second"))
    for _ in range(2):
        with pytest.raises(CorruptLog, match=r"the catalog is damaged .*; run verify, then repair"):
            BrokerUnderTest(SimulatedStorage(files), clock=clock)


# -- closing -------------------------------------------------------------------------------------------------


def test_closing_reports_failed_writes_and_releases_the_directory() -> None:
    files = PartlyFailingFiles(random.Random(1))
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create(partitions=2)
    queue.produce("a", "b")
    queue.lease(1)
    files.failing_paths.add("/0000")
    with pytest.raises(OutcomeUnknown, match="Input/output error"):
        broker.embedded.close()
    broker.embedded.close()
    files.failing_paths.clear()
    broker = BrokerUnderTest(SimulatedStorage(files), clock=broker.clock)
    broker.advance_in_steps(61)
    assert sorted(broker.find().drain()) == ["a", "b"]
    broker.embedded.close()


def test_closing_cut_off_anywhere_loses_nothing() -> None:
    def work(broker: BrokerUnderTest) -> None:
        broker.create(partitions=2)

    def use_and_close(broker: BrokerUnderTest) -> None:
        queue = broker.find()
        queue.produce("a", "b", "c", keys=["k1", "k2", "k3"], request="r")
        queue.lease(1).complete(request=b"c")
        broker.embedded.close()

    for broker, done in crash_at_each_call(disk_after(work), use_and_close, step=2):
        queue = broker.find()
        left = sorted(queue.drain())
        assert len(left) == 2 if done else len(left) in (0, 1, 2, 3)
        queue.produce("a", "b", "c", keys=["k1", "k2", "k3"], request="r")
        again = sorted(queue.drain())
        assert set(again).isdisjoint(left) and len(again) + len(left) in (2, 3)
