"""Another width while work goes on: keys keep their order, and nobody need know."""

import random

import pytest

from penstock.operations import ListHeldKeys, SeekItems, SetReadOnly
from penstock.reports import Fencing
from penstock.rules import slots
from penstock.rules.routing import SLOTS
from penstock.testing import SimulatedFiles
from penstock.words.errors import InvalidRequest, LeaseLost
from tests.broker.broker_under_test import Desk, Rig, keys_at, moving_key, refusal
from tests.broker.storages import Simulated
from tests.partition_under_test import slot

MONTH = 30 * 24 * 3_600


def home(desk: Desk, key: str) -> int:
    return desk.loop.turns.map.owners[slot(key)]


def moved(desk: Desk, key: str, item: str) -> bool:
    return item.partition("-")[0] != str(home(desk, key))


# -- the map ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(1, 4), (4, 5), (8, 9), (3, 7), (8, 3)])
def test_as_few_slots_move_as_possible(broker: Rig, old: int, new: int) -> None:
    desk = broker.create(partitions=old)
    before = desk.loop.turns.map
    desk.resize(new)
    moves = sum(len(move.slots) for move in slots.moves(before, desk.loop.turns.map))
    share = (new - old) / new if new > old else (old - new) / old
    assert moves == pytest.approx(SLOTS * share, abs=max(old, new))


def test_numbers_are_never_given_twice(broker: Rig) -> None:
    desk = broker.create(partitions=4)
    assert desk.resize(2).active == [0, 1]
    assert desk.resize(4).active == [0, 1, 4, 5]
    info = desk.resize(5)
    assert (info.active, info.retired) == ([0, 1, 4, 5, 6], [2, 3])
    broker.kill()
    assert (desk.info.active, desk.info.retired) == ([0, 1, 4, 5, 6], [2, 3])
    assert {one.partition: one.status for one in desk.stats().partitions} == {
        **dict.fromkeys([0, 1, 4, 5, 6], "active"),
        **dict.fromkeys([2, 3], "drained"),
    }


@pytest.mark.parametrize("partitions", [0, -1, 1_025])
def test_a_senseless_width_is_refused(broker: Rig, partitions: int) -> None:
    desk = broker.create(partitions=2)
    with pytest.raises(InvalidRequest, match=r"partitions is .*; give a whole number from 1 to 1024"):
        desk.resize(partitions)
    assert desk.info.partitions == 2


def test_the_same_width_is_no_change(broker: Rig) -> None:
    desk = broker.create(partitions=3)
    before = desk.loop.turns.map.version
    desk.resize(3)
    assert desk.loop.turns.map.version == before


# -- order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[1, 4], [4, 5], [8, 3], [3, 1], [2, 5, 2], [4, 1, 6, 3]], ids=str)
def test_every_key_keeps_its_order_across_widths(broker: Rig, widths: list[int]) -> None:
    """Items before and after each change, some leased, some retried with a delay, while it happens."""
    desk = broker.create(partitions=widths[0])
    keys = [f"key-{number}" for number in range(30)]
    number = 0
    for width in [*widths[1:], widths[-1]]:
        for _ in range(3):
            desk.produce(*[f"{key}:{number}" for key in keys], keys=keys)
            number += 1
        held = desk.lease(9)
        slow = desk.lease(7)
        slow.retry(delay=20)
        desk.resize(width)
        assert not set(desk.lease(100).keys) & (set(held.keys) | set(slow.keys)), "one of a key at a time"
        broker.pass_by(61)  # whatever is leased here comes back
        assert isinstance(refusal(desk.settle("complete", held.parts[:1])[0]), LeaseLost)
    order: dict[str, list[int]] = {}
    for text in desk.drain(11):
        key, _, at = text.partition(":")
        order.setdefault(key, []).append(int(at))
    assert order == {key: list(range(number)) for key in keys}
    assert desk.stats().resizing == []


def test_a_key_waits_for_its_items_in_the_old_partition_and_no_other_key_does(broker: Rig) -> None:
    desk = broker.create()
    slow, quick = moving_key(1, 2), moving_key(1, 2, 200)
    desk.produce("s1", "s2", "q1", keys=[slow, slow, quick])
    held = desk.lease(2)
    assert held.texts == ["s1", "q1"]
    desk.resize(2)
    desk.produce("s3", "q2", keys=[slow, quick])
    settled = desk.settle("complete", [held.part(held.ids[1])])
    assert settled[0].done == 1
    assert desk.lease().texts == ["q2"], "its key is done in the old partition; the other's is not"
    assert desk.stats().resizing == [Fencing(1, 0, 0, 1)]
    desk.settle("retry", [held.part(held.ids[0])], delay=3_600)
    assert desk.lease().texts == []
    broker.pass_by(3_600)
    served = desk.drain(1)
    assert [text for text in served if text != "q2"] == ["s1", "s2", "s3"] and len(served) == 4, "q2 was not settled, so it came back"
    assert desk.stats().resizing == []


def test_progress_is_visible_and_ends(broker: Rig) -> None:
    desk = broker.create()
    keys = [moving_key(1, 2, start) for start in range(0, 500, 50)]
    desk.produce(*keys, keys=keys)
    desk.resize(2)
    (fence,) = desk.stats().resizing
    assert (fence.partition, fence.waits_for, fence.keys) == (1, 0, 0)
    assert fence.slots == SLOTS // 2, "whole slots while the backlog drains"
    left = len(keys)
    while held := desk.lease(1):
        progress = desk.stats().resizing
        left -= 1
        assert not progress or progress[0].slots or progress[0].keys <= left + 1
        held.complete()
    assert desk.stats().resizing == []


def test_a_restart_in_the_middle_resumes(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    keys = [f"key-{number}" for number in range(40)]
    desk.produce(*[f"{key}:1" for key in keys], keys=keys)
    held = desk.lease(8)
    desk.resize(5)
    desk.produce(*[f"{key}:2" for key in keys], keys=keys)
    before = desk.stats().resizing
    assert before
    broker.kill()
    assert desk.stats().resizing == before
    held.retry(delay=1)
    desk.resize(3)
    desk.produce(*[f"{key}:3" for key in keys], keys=keys)
    broker.restart()
    broker.pass_by(2)
    served = desk.drain(5)
    assert len(served) == 120
    assert all(served.index(f"{key}:1") < served.index(f"{key}:2") < served.index(f"{key}:3") for key in keys)
    assert desk.stats().resizing == []


def test_items_without_a_key_are_not_held_up(broker: Rig) -> None:
    desk = broker.create()
    desk.produce("old")
    desk.lease()
    desk.resize(3)
    desk.produce("new-1")
    desk.produce("new-2")
    assert sorted(desk.lease().texts) == ["new-1", "new-2"]
    assert desk.stats().resizing == []


def test_a_shrunk_partition_drains(broker: Rig) -> None:
    desk = broker.create(partitions=3)
    for number in range(6):
        desk.produce(f"item-{number}")
    held = desk.lease(1)
    desk.resize(1)
    assert [one.status for one in desk.stats().partitions] == ["active", "draining", "draining"]
    desk.produce("new")
    assert [one.produced for one in desk.stats().partitions] == [3, 2, 2]
    assert len(desk.drain(1)) == 6
    held.complete()
    assert [one.status for one in desk.stats().partitions] == ["active", "drained", "drained"]
    broker.kill()
    assert [one.status for one in desk.stats().partitions] == ["active", "drained", "drained"]


def test_read_only_drains_and_takes_nothing(broker: Rig) -> None:
    desk = broker.create(partitions=3)
    keys = [f"key-{number}" for number in range(40)]
    desk.produce(*[f"{key}:1" for key in keys], keys=keys)
    before = desk.stats().partitions[1].produced
    assert before
    info = broker.broker.call(SetReadOnly(queue=desk.incarnation, partition=1))
    assert (info.active, info.retired, info.read_only) == ([0, 2], [1], [1])
    desk.produce(*[f"{key}:2" for key in keys], keys=keys)
    desk.produce("unkeyed")
    assert desk.stats().partitions[1].produced == before
    broker.kill()
    served = desk.drain(7)
    assert len(served) == 81
    assert all(served.index(f"{key}:1") < served.index(f"{key}:2") for key in keys)
    assert desk.stats().partitions[1].status == "drained"
    info = broker.broker.call(SetReadOnly(queue=desk.incarnation, partition=1, read_only=False))
    assert (info.active, info.read_only) == ([0, 1, 2], [])
    desk.produce(*[f"{key}:3" for key in keys], keys=keys)
    assert desk.stats().partitions[1].produced > before
    assert len(desk.drain()) == 40


def test_the_last_partition_may_be_drained_too(broker: Rig) -> None:
    desk = broker.create()
    desk.produce("old", key="k")
    assert broker.broker.call(SetReadOnly(queue=desk.incarnation, partition=0)).active == [1]
    desk.produce("new", key="k")
    assert desk.drain(1) == ["old", "new"]
    with pytest.raises(InvalidRequest, match="partition 7 takes no items; those that do are"):
        broker.broker.call(SetReadOnly(queue=desk.incarnation, partition=7))


def test_a_power_cut_does_not_let_a_key_overtake_itself() -> None:
    """What a fence was lowered for must be as durable as its lowering: a lease may be forgotten with the power."""
    for seed in range(20):
        files = SimulatedFiles(random.Random(seed))
        rig = Rig(Simulated(files))
        desk = rig.create()
        key = moving_key(1, 2)
        desk.produce("first", key=key)
        desk.resize(2)
        desk.produce("second", key=key)
        desk.lease(1)
        rig.turn()
        files.crash()
        rig.kill()
        assert "second" not in desk.lease().texts, f"seed {seed}"
        rig.pass_by(61)
        assert desk.drain(1) == ["first", "second"], f"seed {seed}"


# -- what goes along ----------------------------------------------------------------------------------------------


def test_an_item_scheduled_far_ahead_holds_nothing_and_is_handled_in_its_new_home(broker: Rig) -> None:
    desk = broker.create()
    key = moving_key(1, 4)
    (item,) = desk.produce("next month", key=key, at=broker.after(MONTH))
    desk.resize(4)
    assert desk.stats().resizing == [], "it does not hold the resize"
    desk.produce("today", key=key)
    assert desk.drain() == ["today"], "nor its key"
    broker.advance(MONTH)
    assert desk.drain() == ["next month"]
    found = desk.explain(item)
    assert found.state == "completed" and found.id.startswith(f"{home(desk, key)}-"), "its old id leads to its new home"
    broker.kill()
    assert desk.explain(item) == found


def test_an_item_due_before_another_was_produced_is_handled_before_it(broker: Rig) -> None:
    desk = broker.create()
    key = moving_key(1, 4)
    desk.produce("scheduled", key=key, at=broker.after(10))
    desk.resize(4)
    broker.pass_by(3_600)
    desk.produce("later", key=key)
    assert desk.drain(1) == ["scheduled", "later"]


@pytest.mark.parametrize("kill", [False, True], ids=["", "killed"])
def test_a_parked_key_stays_parked(broker: Rig, kill: bool) -> None:
    desk = broker.create(on_bury="park")
    key = moving_key(1, 3)
    desk.produce("poison", "second", key=key)
    desk.lease().bury(reason="bad")
    desk.resize(3)
    desk.produce("third", key=key)
    if kill:
        broker.kill()
    assert desk.lease().texts == []
    (held,) = desk.call(ListHeldKeys(limit=10))[:1]
    assert held.key == key.encode() and held.why in ("parked", "fenced")
    assert desk.redrive_buried() == 1
    assert desk.drain(1) == ["poison", "second", "third"]


@pytest.mark.parametrize("widths", [[3], [3, 1], [2, 5, 3]], ids=str)
def test_dedup_windows_go_along(broker: Rig, widths: list[int]) -> None:
    desk = broker.create(dedup_window=600_000_000)
    keys = [f"key-{number}" for number in range(20)]
    ids = desk.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys])
    plain = [desk.produce(f"plain-{number}", dedups=[f"plain-{number}"])[0] for number in range(20)]
    for width in widths:
        desk.resize(width)
        broker.turn()
        assert any(moved(desk, key, item) for key, item in zip(keys, ids, strict=True)) or width == 1
        assert desk.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys]) == ids
        assert [desk.produce("again", dedups=[f"plain-{number}"])[0] for number in range(20)] == plain
    broker.kill()
    assert desk.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys]) == ids
    assert len(desk.drain()) == 40
    broker.pass_by(600)
    assert not set(desk.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys])) & set(ids), "the window is over everywhere"


def test_an_item_sought_or_redriven_in_its_old_partition_is_handled_in_its_new_one(broker: Rig) -> None:
    desk = broker.create()
    key = moving_key(1, 2)
    desk.produce("done", "buried", key=key)
    desk.lease().complete()
    desk.lease().bury()
    desk.resize(2)
    assert desk.redrive_buried() == 1
    assert desk.call(SeekItems(start={0: 0})) == 1
    assert sorted(desk.drain()) == ["buried", "done"]
    assert desk.stats().partitions[1].completed == 2


def test_a_lease_from_before_is_settled_after(broker: Rig) -> None:
    desk = broker.create(partitions=4)
    keys = [f"key-{number}" for number in range(20)]
    desk.produce(*keys, keys=keys)
    held = desk.lease()
    desk.resize(2)
    desk.resize(7)
    broker.kill()
    assert held.settle("extend", timeout=100) == 20
    assert held.complete() == 20
    assert desk.counts() == {"completed": 20}
    assert desk.stats().resizing == []


def test_a_partition_that_takes_no_items_any_more_is_closed_once_it_is_drained(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    key = keys_at(desk, 1)[0]
    desk.produce("left", key=key)
    held = desk.lease(1)
    desk.resize(1)
    broker.pass_by(5)
    assert not desk.loop.turns.members[1].closed, "somebody works on an item of it"
    held.complete()
    broker.pass_by(5)
    assert desk.loop.turns.members[1].closed and not desk.loop.turns.members[0].closed
    assert desk.stats().completed == 1
