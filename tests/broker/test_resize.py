"""Another width while work goes on: keys keep their order, and nobody need know."""

import random

import pytest

from penstock.operations import ListHeldKeys, SeekItems, SetReadOnly
from penstock.reports import FenceProgress
from penstock.rules import slots
from penstock.rules.routing import SLOTS
from penstock.testing import SimulatedFiles
from penstock.words.errors import InvalidRequest, LeaseLost
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, key_that_moves, keys_at, refusal
from tests.broker.storages import SimulatedStorage
from tests.partition_under_test import slot

MONTH = 30 * 24 * 3_600


def home(queue: QueueUnderTest, key: str) -> int:
    return queue.loop.engine.map.owners[slot(key)]


def moved(queue: QueueUnderTest, key: str, item: str) -> bool:
    return item.partition("-")[0] != str(home(queue, key))


# -- the map ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(1, 4), (4, 5), (8, 9), (3, 7), (8, 3)])
def test_as_few_slots_move_as_possible(broker: BrokerUnderTest, old: int, new: int) -> None:
    queue = broker.create(partitions=old)
    before = queue.loop.engine.map
    queue.resize(new)
    moves = sum(len(move.slots) for move in slots.slot_moves(before, queue.loop.engine.map))
    share = (new - old) / new if new > old else (old - new) / old
    assert moves == pytest.approx(SLOTS * share, abs=max(old, new))


def test_partition_numbers_are_never_reused(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    assert queue.resize(2).active == [0, 1]
    assert queue.resize(4).active == [0, 1, 4, 5]
    info = queue.resize(5)
    assert (info.active, info.retired) == ([0, 1, 4, 5, 6], [2, 3])
    broker.kill()
    assert (queue.info.active, queue.info.retired) == ([0, 1, 4, 5, 6], [2, 3])
    assert {one.partition: one.status for one in queue.stats().partitions} == {
        **dict.fromkeys([0, 1, 4, 5, 6], "active"),
        **dict.fromkeys([2, 3], "drained"),
    }


@pytest.mark.parametrize("partitions", [0, -1, 1_025])
def test_an_invalid_number_of_partitions_is_refused(broker: BrokerUnderTest, partitions: int) -> None:
    queue = broker.create(partitions=2)
    with pytest.raises(InvalidRequest, match=r"partitions is .*; give a whole number from 1 to 1024"):
        queue.resize(partitions)
    assert queue.info.partitions == 2


def test_a_resize_to_the_same_number_changes_nothing(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    before = queue.loop.engine.map.version
    queue.resize(3)
    assert queue.loop.engine.map.version == before


# -- order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[1, 4], [4, 5], [8, 3], [3, 1], [2, 5, 2], [4, 1, 6, 3]], ids=str)
def test_every_key_keeps_its_order_across_resizes(broker: BrokerUnderTest, widths: list[int]) -> None:
    """Items before and after each change, some leased, some retried with a delay, while it happens."""
    queue = broker.create(partitions=widths[0])
    keys = [f"key-{number}" for number in range(30)]
    number = 0
    for width in [*widths[1:], widths[-1]]:
        for _ in range(3):
            queue.produce(*[f"{key}:{number}" for key in keys], keys=keys)
            number += 1
        held = queue.lease(9)
        slow = queue.lease(7)
        slow.retry(delay=20)
        queue.resize(width)
        assert not set(queue.lease(100).keys) & (set(held.keys) | set(slow.keys)), "one of a key at a time"
        broker.advance_in_steps(61)  # whatever is leased here comes back
        assert isinstance(refusal(queue.settle("complete", held.parts[:1])[0]), LeaseLost)
    order: dict[str, list[int]] = {}
    for text in queue.drain(11):
        key, _, at = text.partition(":")
        order.setdefault(key, []).append(int(at))
    assert order == {key: list(range(number)) for key in keys}
    assert queue.stats().resizing == []


def test_a_key_waits_for_its_items_in_the_old_partition_and_no_other_key_does(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    slow, quick = key_that_moves(1, 2), key_that_moves(1, 2, 200)
    queue.produce("s1", "s2", "q1", keys=[slow, slow, quick])
    held = queue.lease(2)
    assert held.texts == ["s1", "q1"]
    queue.resize(2)
    queue.produce("s3", "q2", keys=[slow, quick])
    settled = queue.settle("complete", [held.part(held.ids[1])])
    assert settled[0].done == 1
    assert queue.lease().texts == ["q2"], "its key is done in the old partition; the other's is not"
    assert queue.stats().resizing == [FenceProgress(1, 0, 0, 1)]
    queue.settle("retry", [held.part(held.ids[0])], delay=3_600)
    assert queue.lease().texts == []
    broker.advance_in_steps(3_600)
    served = queue.drain(1)
    assert [text for text in served if text != "q2"] == ["s1", "s2", "s3"] and len(served) == 4, "q2 was not settled, so it came back"
    assert queue.stats().resizing == []


def test_the_progress_of_a_resize_is_visible_and_ends(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    keys = [key_that_moves(1, 2, start) for start in range(0, 500, 50)]
    queue.produce(*keys, keys=keys)
    queue.resize(2)
    (fence,) = queue.stats().resizing
    assert (fence.partition, fence.waits_for, fence.keys) == (1, 0, 0)
    assert fence.slots == SLOTS // 2, "whole slots while the backlog drains"
    left = len(keys)
    while held := queue.lease(1):
        progress = queue.stats().resizing
        left -= 1
        assert not progress or progress[0].slots or progress[0].keys <= left + 1
        held.complete()
    assert queue.stats().resizing == []


def test_a_restart_during_a_resize_resumes_it(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    keys = [f"key-{number}" for number in range(40)]
    queue.produce(*[f"{key}:1" for key in keys], keys=keys)
    held = queue.lease(8)
    queue.resize(5)
    queue.produce(*[f"{key}:2" for key in keys], keys=keys)
    before = queue.stats().resizing
    assert before
    broker.kill()
    assert queue.stats().resizing == before
    held.retry(delay=1)
    queue.resize(3)
    queue.produce(*[f"{key}:3" for key in keys], keys=keys)
    broker.restart()
    broker.advance_in_steps(2)
    served = queue.drain(5)
    assert len(served) == 120
    assert all(served.index(f"{key}:1") < served.index(f"{key}:2") < served.index(f"{key}:3") for key in keys)
    assert queue.stats().resizing == []


def test_items_without_a_key_are_not_held_up(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("old")
    queue.lease()
    queue.resize(3)
    queue.produce("new-1")
    queue.produce("new-2")
    assert sorted(queue.lease().texts) == ["new-1", "new-2"]
    assert queue.stats().resizing == []


def test_a_shrunk_partition_drains(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    for number in range(6):
        queue.produce(f"item-{number}")
    held = queue.lease(1)
    queue.resize(1)
    assert [one.status for one in queue.stats().partitions] == ["active", "draining", "draining"]
    queue.produce("new")
    assert [one.produced for one in queue.stats().partitions] == [3, 2, 2]
    assert len(queue.drain(1)) == 6
    held.complete()
    assert [one.status for one in queue.stats().partitions] == ["active", "drained", "drained"]
    broker.kill()
    assert [one.status for one in queue.stats().partitions] == ["active", "drained", "drained"]


def test_read_only_drains_and_takes_nothing(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    keys = [f"key-{number}" for number in range(40)]
    queue.produce(*[f"{key}:1" for key in keys], keys=keys)
    before = queue.stats().partitions[1].produced
    assert before
    info = broker.embedded.call(SetReadOnly(queue=queue.incarnation, partition=1))
    assert (info.active, info.retired, info.read_only) == ([0, 2], [1], [1])
    queue.produce(*[f"{key}:2" for key in keys], keys=keys)
    queue.produce("unkeyed")
    assert queue.stats().partitions[1].produced == before
    broker.kill()
    served = queue.drain(7)
    assert len(served) == 81
    assert all(served.index(f"{key}:1") < served.index(f"{key}:2") for key in keys)
    assert queue.stats().partitions[1].status == "drained"
    info = broker.embedded.call(SetReadOnly(queue=queue.incarnation, partition=1, read_only=False))
    assert (info.active, info.read_only) == ([0, 1, 2], [])
    queue.produce(*[f"{key}:3" for key in keys], keys=keys)
    assert queue.stats().partitions[1].produced > before
    assert len(queue.drain()) == 40


def test_the_last_partition_may_be_drained_too(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("old", key="k")
    assert broker.embedded.call(SetReadOnly(queue=queue.incarnation, partition=0)).active == [1]
    queue.produce("new", key="k")
    assert queue.drain(1) == ["old", "new"]
    with pytest.raises(InvalidRequest, match="queue 'q' has no partition 7; those that take items are"):
        broker.embedded.call(SetReadOnly(queue=queue.incarnation, partition=7))


def test_a_power_cut_during_a_resize_keeps_the_order_of_keys() -> None:
    """What a fence was lowered for must be as durable as its lowering: a lease may be forgotten with the power."""
    for seed in range(20):
        files = SimulatedFiles(random.Random(seed))
        broker = BrokerUnderTest(SimulatedStorage(files))
        queue = broker.create()
        key = key_that_moves(1, 2)
        queue.produce("first", key=key)
        queue.resize(2)
        queue.produce("second", key=key)
        queue.lease(1)
        broker.turn()
        files.crash()
        broker.kill()
        assert "second" not in queue.lease().texts, f"seed {seed}"
        broker.advance_in_steps(61)
        assert queue.drain(1) == ["first", "second"], f"seed {seed}"


# -- what goes along ----------------------------------------------------------------------------------------------


def test_an_item_scheduled_far_ahead_is_handled_in_its_new_partition(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    key = key_that_moves(1, 4)
    (item,) = queue.produce("next month", key=key, at=broker.after(MONTH))
    queue.resize(4)
    assert queue.stats().resizing == [], "it does not hold the resize"
    queue.produce("today", key=key)
    assert queue.drain() == ["today"], "nor its key"
    broker.advance(MONTH)
    assert queue.drain() == ["next month"]
    found = queue.explain(item)
    assert found.state == "completed" and found.id.startswith(f"{home(queue, key)}-"), "its old id leads to its new home"
    broker.kill()
    assert queue.explain(item) == found


def test_an_item_due_before_another_was_produced_is_handled_before_it(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    key = key_that_moves(1, 4)
    queue.produce("scheduled", key=key, at=broker.after(10))
    queue.resize(4)
    broker.advance_in_steps(3_600)
    queue.produce("later", key=key)
    assert queue.drain(1) == ["scheduled", "later"]


@pytest.mark.parametrize("kill", [False, True], ids=["", "killed"])
def test_a_parked_key_stays_parked(broker: BrokerUnderTest, kill: bool) -> None:
    queue = broker.create(on_bury="park")
    key = key_that_moves(1, 3)
    queue.produce("poison", "second", key=key)
    queue.lease().bury(reason="bad")
    queue.resize(3)
    queue.produce("third", key=key)
    if kill:
        broker.kill()
    assert queue.lease().texts == []
    (held,) = queue.call(ListHeldKeys(limit=10))[:1]
    assert held.key == key.encode() and held.why in ("parked", "fenced")
    assert queue.redrive_buried() == 1
    assert queue.drain(1) == ["poison", "second", "third"]


@pytest.mark.parametrize("widths", [[3], [3, 1], [2, 5, 3]], ids=str)
def test_dedup_ids_move_with_their_slots(broker: BrokerUnderTest, widths: list[int]) -> None:
    queue = broker.create(dedup_window=600_000_000)
    keys = [f"key-{number}" for number in range(20)]
    ids = queue.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys])
    plain = [queue.produce(f"plain-{number}", dedups=[f"plain-{number}"])[0] for number in range(20)]
    for width in widths:
        queue.resize(width)
        broker.turn()
        assert any(moved(queue, key, item) for key, item in zip(keys, ids, strict=True)) or width == 1
        assert queue.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys]) == ids
        assert [queue.produce("again", dedups=[f"plain-{number}"])[0] for number in range(20)] == plain
    broker.kill()
    assert queue.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys]) == ids
    assert len(queue.drain()) == 40
    broker.advance_in_steps(600)
    assert not set(queue.produce(*keys, keys=keys, dedups=[f"d{key}" for key in keys])) & set(ids), "the window is over everywhere"


def test_an_item_sought_or_redriven_in_its_old_partition_is_handled_in_its_new_one(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    key = key_that_moves(1, 2)
    queue.produce("done", "buried", key=key)
    queue.lease().complete()
    queue.lease().bury()
    queue.resize(2)
    assert queue.redrive_buried() == 1
    assert queue.call(SeekItems(start={0: 0})) == 1
    assert sorted(queue.drain()) == ["buried", "done"]
    assert queue.stats().partitions[1].completed == 2


def test_a_lease_from_before_a_resize_is_settled_after_it(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    keys = [f"key-{number}" for number in range(20)]
    queue.produce(*keys, keys=keys)
    held = queue.lease()
    queue.resize(2)
    queue.resize(7)
    broker.kill()
    assert held.settle("extend", timeout=100) == 20
    assert held.complete() == 20
    assert queue.counts() == {"completed": 20}
    assert queue.stats().resizing == []


def test_a_partition_that_takes_no_items_any_more_is_closed_once_it_is_drained(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    key = keys_at(queue, 1)[0]
    queue.produce("left", key=key)
    held = queue.lease(1)
    queue.resize(1)
    broker.advance_in_steps(5)
    assert not queue.loop.engine.handles[1].closed, "somebody works on an item of it"
    held.complete()
    broker.advance_in_steps(5)
    assert queue.loop.engine.handles[1].closed and not queue.loop.engine.handles[0].closed
    assert queue.stats().completed == 1
    assert queue.loop.engine.handles[1].closed, "statistics are read from the summary"
