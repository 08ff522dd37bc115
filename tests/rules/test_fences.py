"""Fences and MovedSlots; versions of the slot map and dedup ids in AddFences."""

import pytest

from penstock.rules import base, routing
from penstock.rules.commands import AddFences, ItemCount
from penstock.rules.fences import ENDLESS, Fences, MovedSlots, pack_slots, unpack_slots
from penstock.rules.records import FenceSpec
from penstock.words import ids
from penstock.words.clock import SECOND
from tests.partition_under_test import PartitionUnderTest, items, key_id, slot

# -- versions, and dedup ids ---------------------------------------------------------------------------


def test_a_version_of_the_slot_map_is_applied_once(partition: PartitionUnderTest) -> None:
    specs = [FenceSpec(0, 3, 10, 0, pack_slots([1])), FenceSpec(0, 4, 20, 0, pack_slots([2, 3]))]
    assert partition.wrapped.run(AddFences(5, specs)) == ItemCount(2)
    assert partition.wrapped.run(AddFences(6, [])) == ItemCount(0)
    partition.wrapped.commit()
    partition.kill()
    before = base.dump(partition.wrapped.state)
    for version in (4, 5, 6):
        assert partition.wrapped.run(AddFences(version, specs, [(bytes(16), SECOND, 1)])) == ItemCount(0)
    assert base.dump(partition.wrapped.state) == before
    fences = list(partition.wrapped.state.keys.fences)
    assert [(one.number, one.source, one.mark, one.since) for one in fences] == [(1, 3, 10, 0), (2, 4, 20, 0)]
    assert (partition.wrapped.state.fence_version, partition.fence("a", version=7)) == (6, 3)


def adopt(partition: PartitionUnderTest, name: str, left: float, item: int) -> None:
    digest = routing.digest(name.encode())
    partition.wrapped.run(AddFences(0, [], [(digest, int(left * SECOND), item)]))
    partition.wrapped.commit()


def test_dedup_ids_without_fences_have_version_0(partition: PartitionUnderTest) -> None:
    fence = partition.fence("a", version=4)
    adopt(partition, "x", 10, ids.foreign_number(3, 7))
    partition.kill()
    assert (partition.wrapped.state.fence_version, [one.number for one in partition.wrapped.state.keys.fences]) == (4, [fence])


@pytest.mark.parametrize("number", [0, 3, ids.LAST_PARTITION])
def test_moved_dedup_ids_give_the_item_of_the_other_partition_until_their_window_ends(partition: PartitionUnderTest, number: int) -> None:
    foreign = ids.foreign_number(number, ids.FIRST_FOREIGN_NUMBER - 1)
    adopt(partition, "x", 10, foreign)
    partition.clock.advance(9 * SECOND)
    partition.kill()
    stored = partition.store(items(["again", "new"], dedups=["x", None]))
    assert list(stored.offsets) == [foreign, 0]
    partition.restart()
    partition.clock.advance(1 * SECOND)
    assert list(partition.store(items(["over"], dedups=["x"])).offsets) == [1]
    assert partition.drain() == ["new", "over"]


def test_an_own_dedup_id_is_not_replaced_by_a_moved_one(partition: PartitionUnderTest) -> None:
    partition.produce("first", dedups=["x"])
    adopt(partition, "x", 100, ids.foreign_number(3, 7))
    for _ in range(2):
        assert list(partition.store(items(["again"], dedups=["x"])).offsets) == [0]
        partition.restart()


# -- the fences themselves -----------------------------------------------------------------------------


def test_slots_are_packed_in_order_two_bytes_each() -> None:
    assert unpack_slots(pack_slots({16_383, 0, 256})) == [0, 256, 16_383]
    assert len(pack_slots({16_383, 0, 256})) == 6


def test_without_fences_nothing_waits() -> None:
    fences = Fences()
    fences.add(FenceSpec(1, 0, 0, 0, b""))
    assert not fences
    assert fences.waits_from(key_id("a")) == ENDLESS


def test_items_of_a_moved_slot_are_strays_except_the_backlog() -> None:
    owners = bytearray(routing.SLOTS)
    owners[slot("a")] = owners[slot("b")] = 1
    departed = MovedSlots(owners, 0, {slot("a"): 10})
    assert [departed.strays_from(key_id(key)) for key in ("a", "b", "c")] == [10, 0, ENDLESS]
    assert departed.moved_any([routing.NO_KEY, key_id("c"), key_id("b")])
    assert not departed.moved_any([routing.NO_KEY, key_id("c")])


def test_items_of_a_partition_that_cannot_be_opened_are_no_strays() -> None:
    owners = bytearray(routing.SLOTS)
    owners[slot("a")], owners[slot("b")] = 1, 2
    departed = MovedSlots(owners, 0, {}, {2})
    assert [departed.strays_from(key_id(key)) for key in ("a", "b", "c")] == [0, ENDLESS, ENDLESS]
