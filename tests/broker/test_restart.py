"""A broker closed or killed, and opened again: everything goes on where it was."""

import errno
import random
from pathlib import Path

import pytest

from penstock.broker.embedded import Embedded
from penstock.operations import CreateQueue, FindQueue
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import BrokerLocked, CorruptLog, LeaseLost, OutcomeUnknown, StorageFailed
from tests.broker.broker_under_test import Rig, batch_of, ids_of, refusal
from tests.broker.crashes import cut_off, prepared
from tests.broker.storages import PatchyFiles, Simulated


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_everything_goes_on_where_it_was(broker: Rig, how: str) -> None:
    desk = broker.create(partitions=3, dedup_window=500 * SECOND)
    desk.produce("scheduled", at=broker.after(100))
    desk.produce("retried")
    desk.lease().retry(delay=50)
    desk.produce("leased")
    held = desk.lease(timeout=30)
    first = desk.produce("deduped", dedups=["d"])
    batch = batch_of("named", "other", keys=["k", None])
    named = ids_of(desk.place(batch, "r"), 2)
    desk.pause(lease=True)
    counts = desk.counts()
    getattr(broker, how)()
    assert desk.counts() == counts == {"scheduled": 2, "leased": 1, "ready": 3}
    assert desk.lease().texts == [], "it is still paused"
    desk.pause(lease=False)
    assert desk.produce("again", dedups=["d"]) == first
    assert ids_of(desk.place(batch, "r"), 2) == named
    assert held.settle("extend", timeout=40) == 1, "a lease and its token survive"
    assert sorted(desk.drain()) == ["deduped", "named", "other"]
    broker.pass_by(39.9)
    assert desk.lease().texts == []
    broker.pass_by(0.1)
    again = desk.lease()
    assert again.texts == ["leased"]
    assert isinstance(refusal(desk.settle("complete", held.parts)[0]), LeaseLost)
    again.complete()
    broker.pass_by(10)
    assert desk.drain() == ["retried"]
    broker.pass_by(49.9)
    assert desk.lease().texts == []
    broker.pass_by(0.1)
    assert desk.drain() == ["scheduled"]
    broker.pass_by(500)
    assert desk.produce("again", dedups=["d"]) != first


def test_what_came_due_while_it_was_away_is_done_at_once(broker: Rig) -> None:
    desk = broker.create()
    desk.produce("scheduled", at=broker.after(100))
    desk.produce("leased")
    desk.lease()
    broker.broker.close()
    broker.clock.advance(3_600 * SECOND)
    broker.broker = broker.ground.open(clock=broker.clock, threaded=False)
    broker.turn()
    assert sorted(desk.lease().texts) == ["leased", "scheduled"]


@pytest.mark.parametrize("step", [DAY, -DAY], ids=["a day ahead", "a day back"])
def test_a_step_of_the_date_neither_doubles_nor_freezes_a_lease(broker: Rig, step: int) -> None:
    desk = broker.create()
    desk.produce("a")
    held = desk.lease(timeout=60)
    broker.clock.step_wall(step)
    broker.pass_by(59)
    assert desk.lease().texts == []
    assert held.settle("extend") == 1
    broker.pass_by(59)
    assert desk.lease().texts == []
    broker.pass_by(1)
    assert desk.lease().texts == ["a"]


def test_an_item_scheduled_by_date_follows_the_date(broker: Rig) -> None:
    desk = broker.create()
    desk.produce("tomorrow", at=broker.clock.read().wall + DAY)
    asked = desk.waiter(wait=600)
    broker.clock.step_wall(DAY)
    broker.pass_by(1.1)
    assert asked.held.texts == ["tomorrow"], "a stepped date is noticed within a second or so"


def test_after_a_reboot_a_lease_has_its_full_time_again(broker: Rig) -> None:
    desk = broker.create()
    desk.produce("a")
    held = desk.lease(timeout=60)
    broker.pass_by(50)
    broker.ground.kill()
    broker.clock.reboot(downtime=5 * SECOND)
    broker.kill()
    broker.pass_by(59)
    assert desk.lease().texts == []
    assert held.complete() == 1


# -- one at a time ------------------------------------------------------------------------------------------


def test_a_second_opener_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = Embedded.open(tmp_path)
    first.call(CreateQueue(name="q"))
    with pytest.raises(BrokerLocked, match="; "):
        Embedded.open(tmp_path)
    first.call(FindQueue(name="q"))
    first.close()
    second = Embedded.open(tmp_path)
    assert second.call(FindQueue(name="q")).name == "q"
    second.close()


def test_an_opening_that_fails_lets_go_of_everything() -> None:
    """Every call of an opening fails once: either the broker opens all the same, or the next attempt does."""

    def work(rig: Rig) -> None:
        rig.create(partitions=2).produce("x")

    files, clock = prepared(work)
    refused = 0
    for call in range(1, 200):
        copied = files.copy()
        copied.fail(copied.calls + call, errno.EIO)
        try:
            rig = Rig(Simulated(copied), clock=clock)
        except StorageFailed:
            refused += 1
            rig = Rig(Simulated(copied), clock=clock)  # not BrokerLocked
        copied.mend()
        rig.pass_by(10)
        assert rig.find().drain() == ["x"]
        rig.broker.close()
        if copied.calls < files.calls + call:
            break
    assert refused


def test_a_damaged_catalog_is_said_and_nothing_is_held() -> None:
    def work(rig: Rig) -> None:
        for name in ("first", "second", "third"):
            rig.create(name)

    files, clock = prepared(work)
    path = next(path for path in files.contents() if f"{0:016x}/00000/" in path and path.endswith(".log"))
    files.flip(path, 8 * files.content(path).index(b"second"))
    for _ in range(2):
        with pytest.raises(CorruptLog, match=r"the catalog is damaged .*; run verify, then repair"):
            Rig(Simulated(files), clock=clock)


# -- closing -------------------------------------------------------------------------------------------------


def test_closing_tells_of_what_could_not_be_written_and_lets_go_all_the_same() -> None:
    files = PatchyFiles(random.Random(1))
    rig = Rig(Simulated(files))
    desk = rig.create(partitions=2)
    desk.produce("a", "b")
    desk.lease(1)
    files.broken.add("/0000")
    with pytest.raises(OutcomeUnknown, match="Input/output error"):
        rig.broker.close()
    rig.broker.close()
    files.broken.clear()
    rig = Rig(Simulated(files), clock=rig.clock)
    rig.pass_by(61)
    assert sorted(rig.find().drain()) == ["a", "b"]
    rig.broker.close()


def test_closing_cut_off_anywhere_loses_nothing() -> None:
    def work(rig: Rig) -> None:
        rig.create(partitions=2)

    def use_and_close(rig: Rig) -> None:
        desk = rig.find()
        desk.produce("a", "b", "c", keys=["k1", "k2", "k3"], request="r")
        desk.lease(1).complete(request=b"c")
        rig.broker.close()

    for rig, done in cut_off(prepared(work), use_and_close, step=2):
        desk = rig.find()
        left = sorted(desk.drain())
        assert len(left) == 2 if done else len(left) in (0, 1, 2, 3)
        desk.produce("a", "b", "c", keys=["k1", "k2", "k3"], request="r")
        again = sorted(desk.drain())
        assert set(again).isdisjoint(left) and len(again) + len(left) in (2, 3)
