"""The outbox: items are transferred to another partition once, in order, and kept until they have arrived."""

import pytest

from penstock.rules import base
from penstock.rules.commands import Send
from penstock.rules.item_states import ItemState
from penstock.rules.leases import EPOCH_SHIFT
from penstock.rules.outbox import moved_to, pack_destination, unpack_destination
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import Retention
from tests.partition_under_test import ELSEWHERE, PartitionUnderTest, granted_offsets

OTHER = pack_destination(0xDEAD, 4)


def sequences(partition: PartitionUnderTest, to: bytes = ELSEWHERE) -> list[int]:
    """The sequences of the unconfirmed transfers, in order."""
    return [entry.sequence for entry in partition.wrapped.state.outbox.get(to, [])]


def on_their_way(partition: PartitionUnderTest, to: bytes = ELSEWHERE) -> list[list[int]]:
    """The runs of the unconfirmed transfers, in order."""
    return [entry.runs for entry in partition.wrapped.state.outbox.get(to, [])]


def refused(partition: PartitionUnderTest, *which: int) -> None:
    """Check that sending these items raises and changes nothing."""
    before = base.dump(partition.wrapped.state)
    with pytest.raises(InvalidRequest, match="cannot be sent; it must be buried or ready or scheduled"):
        partition.send(*which)
    assert base.dump(partition.wrapped.state) == before


# -- what can be sent ----------------------------------------------------------------------------------


def test_a_ready_item_is_sent_and_the_others_are_served(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c")
    assert partition.send(1) == 1
    assert (partition.state_of(1), partition.counts.moving) == (ItemState.MOVING, 1)
    assert partition.drain(10) == ["a", "c"]


def test_a_sent_item_does_not_hold_its_key(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "b1", "a2", keys=["a", "b", "a"])
    partition.send(0)
    assert partition.drain(10) == ["b1", "a2"]


@pytest.mark.parametrize(("sent", "rest"), [(1, ["a3", "a4"]), (2, ["a2", "a4"]), (3, ["a2", "a3"])])
def test_after_a_waiting_item_of_a_held_key_is_sent_the_rest_is_in_order(partition: PartitionUnderTest, sent: int, rest: list[str]) -> None:
    partition.produce("a1", "a2", "a3", "a4", key="a")
    held = partition.lease()
    assert partition.lease_texts() == []
    partition.send(sent)
    assert partition.lease_texts() == []
    partition.complete(held.lease)
    assert partition.drain() == rest


def test_after_the_head_of_a_free_line_is_sent_the_next_item_is_the_head(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", key="a")
    partition.complete(partition.lease().lease)
    partition.retry(partition.lease().lease)  # first in line, and free
    partition.send(1)
    assert partition.drain() == ["a3"]


def test_a_key_whose_whole_line_is_sent_is_free(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", key="a")
    held = partition.lease()
    assert partition.lease_texts() == []
    partition.send(1, 2)
    partition.complete(held.lease)
    assert not partition.wrapped.state.keys.by_key
    partition.produce("a4", key="a")
    assert partition.drain() == ["a4"]


def test_a_sent_buried_item_keeps_its_burial(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.bury(partition.lease(1).lease, reason="no such customer")
    partition.send(0)
    partition.restart()
    assert (partition.state_of(0), partition.counts.buried) == (ItemState.MOVING, 0)
    assert (partition.wrapped.state.burials[0].reason, partition.wrapped.state.burials[0].attempts) == ("no such customer", 1)
    assert partition.redrive() == 0
    partition.deliver(5)
    assert partition.wrapped.state.burials == {}


def test_clearing_buried_items_keeps_the_burials_of_moving_items(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.bury(partition.lease().lease, reason="no")
    partition.send(0)
    assert partition.clear(buried=True) == 1
    assert [(offset, burial.reason) for offset, burial in partition.wrapped.state.burials.items()] == [(0, "no")]


def test_only_ready_or_buried_items_can_be_sent(partition: PartitionUnderTest) -> None:
    partition.produce("completed", "leased", "moving", "ready")
    partition.complete(partition.lease(1).lease)
    partition.lease(1)
    partition.send(2)
    for which in ((0,), (1,), (2,), (99,), (3, 1), (3, 2)):
        refused(partition, *which)
    partition.deliver()
    refused(partition, 2)


def test_a_scheduled_item_is_sent_and_never_comes_due_here(partition: PartitionUnderTest) -> None:
    partition.produce("ready")
    partition.produce("later", "too", at=partition.after(100), ttl=200)
    partition.send(1)
    partition.kill()
    assert partition.counts == (1, 1, 0, 0, 0, 1, 0)
    partition.deliver()
    partition.advance(100)
    assert partition.drain() == ["ready", "too"]
    partition.advance(200)
    assert partition.state_of(1) is ItemState.COMPLETED


def test_an_item_that_backs_off_is_sent_and_frees_its_key(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a")
    partition.retry(partition.lease(1).lease, [0], delay=10)
    partition.send(0)
    assert partition.drain() == ["a2"]
    partition.restart()
    partition.deliver()
    partition.advance(10)
    assert partition.drain() == [] and partition.counts == (0, 0, 0, 2, 0, 0, 0)


def test_an_item_without_a_key_that_backs_off_is_sent(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.retry(partition.lease(1).lease, delay=10, reason="bad")
    partition.send(0)
    partition.deliver()
    partition.advance(10)
    assert partition.drain() == ["b"]


@pytest.mark.parametrize("to", [b"", b"elsewhere", ELSEWHERE + b"\0", "elsewhere"])
def test_an_invalid_destination_is_refused(partition: PartitionUnderTest, to: bytes) -> None:
    partition.produce("a")
    with pytest.raises(InvalidRequest, match="; make it with"):
        partition.send(0, to=to)
    assert partition.state_of(0) is ItemState.READY


def test_sending_no_item_or_an_item_twice(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    assert (partition.send(), sequences(partition)) == (0, [])
    assert partition.send(1, 1, 0, 1) == 2
    assert on_their_way(partition) == [[0, 2]]


def test_a_destination_is_an_incarnation_and_a_partition() -> None:
    assert unpack_destination(pack_destination((1 << 64) - 1, (1 << 32) - 1)) == ((1 << 64) - 1, (1 << 32) - 1)
    assert unpack_destination(ELSEWHERE) == (0xDEAD, 3)


# -- on its way ----------------------------------------------------------------------------------------


def test_no_operation_changes_a_moving_item(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "a1", keys=[None, None, "a"], ttl=10)
    partition.send(0, 2)
    partition.advance(11)
    assert [partition.state_of(offset) for offset in range(3)] == [ItemState.MOVING, ItemState.BURIED, ItemState.MOVING]
    assert partition.lease_texts() == []
    assert partition.clear(ready=True, scheduled=True, leased=True, buried=True) == 1
    assert partition.seek(0) == 1
    assert partition.redrive() == 0
    with pytest.raises(InvalidRequest, match="moving cannot be redriven"):
        partition.redrive(0)
    partition.restart()
    assert partition.counts == (1, 0, 0, 0, 0, 2, 0)


def test_lowering_max_attempts_does_not_bury_moving_items(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.retry(partition.lease().lease)
    partition.send(0)
    assert partition.configure(max_attempts=1) == 1
    assert (partition.state_of(0), partition.wrapped.state.failures) == (ItemState.MOVING, {})


def test_the_bytes_of_a_moving_item_are_kept_until_it_arrives(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c", "d")
    partition.send(1, 2)
    partition.drain(10)
    for runs in ((0, 4), (1, 2), (2, 3)):
        with pytest.raises(InvalidRequest, match=r"item [12] is not resolved"):
            partition.drop(*runs)
    assert partition.drop(0, 1) == 1
    assert partition.wrapped.payloads([1, 3]) == [b"b", b"c"]
    partition.deliver(70)
    assert partition.drop(0, 4) == 3


def test_retention_keeps_a_moving_item_until_it_arrives(partition: PartitionUnderTest) -> None:
    partition.configure(retention=Retention(max_age=1))
    partition.produce(*"abcd")
    partition.send(2)
    partition.drain(10)
    partition.clock.advance(1 * SECOND)
    partition.wrapped.compact()
    partition.wrapped.compact()
    assert partition.wrapped.state.dropped.runs == [0, 2, 3, 4]
    partition.kill()
    assert partition.wrapped.payloads([2, 3]) == [b"c"]
    partition.deliver(70)
    partition.wrapped.compact()
    assert (partition.wrapped.state.dropped.runs, partition.wrapped.state.moved) == ([0, 4], {})


# -- sequences -----------------------------------------------------------------------------------------


def test_two_sends_to_one_destination_keep_their_order(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcd")
    for which in ((2,), (0, 3), (1,)):
        partition.send(*which)
    assert on_their_way(partition) == [[2, 3], [0, 1, 3, 4], [1, 2]]
    first, second, third = sequences(partition)
    assert first < second < third
    assert (partition.confirm(second), partition.confirm(third)) == (0, 0)  # not their turn
    assert partition.counts.moving == 4
    assert [partition.confirm(sequence) for sequence in (first, second, third)] == [1, 1, 1]
    assert (partition.wrapped.state.outbox, partition.counts.completed) == ({}, 4)


def test_each_destination_has_its_own_sequences(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcd")
    partition.send(0)
    partition.send(1, to=OTHER)
    partition.send(2)
    [first, second], [other] = sequences(partition), sequences(partition, OTHER)
    assert (first, second) == (other, other + 1)
    assert partition.confirm(second, to=OTHER) == 0
    assert partition.confirm(other, to=OTHER) == 1
    assert sequences(partition) == [first, second]


@pytest.mark.parametrize("delivered", [False, True])
def test_sequences_grow_over_a_kill_right_after_a_send(partition: PartitionUnderTest, delivered: bool) -> None:
    partition.produce(*"abc")
    seen = []
    for offset in range(3):
        partition.send(offset)
        seen.append(sequences(partition)[-1])
        if delivered:
            partition.deliver()
        partition.kill()
        assert partition.state_of(offset) is (ItemState.COMPLETED if delivered else ItemState.MOVING)
    assert sorted(set(seen)) == seen
    epochs = [sequence >> EPOCH_SHIFT for sequence in seen]
    assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]


def test_a_sequence_whose_record_was_lost_with_the_machine_is_not_given_again(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.wrapped.run(Send([0], ELSEWHERE))  # never written
    [lost] = sequences(partition)
    partition.kill()
    assert (sequences(partition), partition.state_of(0)) == ([], ItemState.READY)
    partition.send(0)
    assert sequences(partition)[0] > lost


# -- it has arrived ------------------------------------------------------------------------------------


def test_a_delivered_item_is_completed_and_its_new_id_is_known(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcdef")
    partition.send(1, 2, 4)
    assert partition.why(4) == "on its way to partition 3 of its destination"
    partition.deliver(70)
    partition.restart()
    places = [moved_to(partition.wrapped.state, offset) for offset in range(6)]
    assert places == [None, (0xDEAD, 3, 70), (0xDEAD, 3, 71), None, (0xDEAD, 3, 72), None]
    found = partition.wrapped.explain(4)
    assert (found.state, found.why, found.moved_to) == (ItemState.COMPLETED, "moved to another partition", (0xDEAD, 3, 72))
    assert partition.drain(10) == ["a", "d", "f"]
    assert partition.why(3) == "completed"


def test_explain_gives_the_burial_of_a_moving_item(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.bury(partition.lease().lease, reason="no")
    partition.send(0, to=OTHER)
    found = partition.wrapped.explain(0)
    assert (found.state, found.reason) == (ItemState.MOVING, "no")
    assert found.why == "on its way to partition 4 of its destination, buried because: no"


def test_a_delivery_to_an_unknown_offset(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.send(0)
    partition.deliver()
    assert (partition.state_of(0), partition.why(0)) == (ItemState.COMPLETED, "completed")


def test_a_wrong_or_repeated_confirmation_changes_nothing(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    assert partition.confirm(1, 70) == 0
    partition.send(0)
    [sequence] = sequences(partition)
    before = base.dump(partition.wrapped.state)
    assert [partition.confirm(wrong, 70) for wrong in (sequence - 1, sequence + 1, 0)] == [0, 0, 0]
    assert partition.confirm(sequence, 70, to=OTHER) == 0
    assert base.dump(partition.wrapped.state) == before
    assert partition.confirm(sequence, 70) == 1
    before = base.dump(partition.wrapped.state)
    assert partition.confirm(sequence, 80) == 0
    assert base.dump(partition.wrapped.state) == before


def test_a_delivered_item_is_not_sought(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcd")
    partition.send(1, 2)
    partition.deliver(70)
    partition.drain(10)
    assert partition.seek(0) == 2
    assert partition.drain(10) == ["a", "d"]


def test_retention_forgets_where_dropped_items_went(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcdef")
    partition.send(0, 1, 2, 3)
    partition.send(5)
    partition.deliver(70)
    partition.deliver(90)
    partition.drop(0, 2)
    partition.restart()
    places = [moved_to(partition.wrapped.state, offset) for offset in range(6)]
    assert places == [None, None, (0xDEAD, 3, 72), (0xDEAD, 3, 73), None, (0xDEAD, 3, 90)]
    assert partition.why(1) == "resolved, and deleted by retention"
    partition.drop(3, 4)
    assert [moved_to(partition.wrapped.state, offset) for offset in (2, 3)] == [(0xDEAD, 3, 72), None]
    partition.drain()
    partition.drop(2, 6)
    assert partition.wrapped.state.moved == {}


# -- parked keys ---------------------------------------------------------------------------------------


def parked(partition: PartitionUnderTest) -> None:
    """Item 0 of key a is buried and parks it; a2 and a3 wait."""
    partition.configure(on_bury="park")
    partition.produce("a1", "a2", "a3", key="a")
    partition.bury(partition.lease().lease, reason="no")
    partition.send(0)


@pytest.mark.parametrize("freed_by", ["release", "clear"])
@pytest.mark.parametrize("delivered", [False, True])
def test_a_key_stays_parked_until_it_is_released_or_cleared(partition: PartitionUnderTest, delivered: bool, freed_by: str) -> None:
    parked(partition)
    assert partition.lease_texts() == []
    if delivered:
        partition.deliver(70)
    for _ in range(2):
        partition.restart()
        assert partition.lease_texts() == []
    assert partition.why(1) == "its key is parked: item 7-0 was buried; redrive or clear it"
    if freed_by == "release":
        assert (partition.release("b"), partition.release("a"), partition.release("a")) == (0, 1, 0)
    else:
        assert partition.clear(buried=True) == 0
    partition.kill()
    assert partition.drain() == ["a2", "a3"]
    assert partition.state_of(0) is (ItemState.COMPLETED if delivered else ItemState.MOVING)


def test_the_bytes_of_an_item_that_parks_its_key_are_kept(partition: PartitionUnderTest) -> None:
    parked(partition)
    partition.deliver(70)
    with pytest.raises(InvalidRequest, match="item 0 is not resolved"):
        partition.drop(0, 1)
    partition.release("a")
    assert partition.drop(0, 1) == 1


def test_clearing_buried_items_frees_keys_parked_by_items_here_and_by_sent_ones(partition: PartitionUnderTest) -> None:
    parked(partition)
    partition.produce("b1", "b2", key="b")
    partition.bury(partition.lease().lease, reason="no")
    assert partition.clear(buried=True) == 1
    assert partition.drain() == ["a2", "a3", "b2"]


def test_a_released_key_is_served_and_its_buried_items_stay_buried(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park", lease_timeout=5 * SECOND)
    partition.produce("a1", "a2", "a3", key="a")
    partition.bury(partition.lease().lease)
    assert partition.release("a") == 1
    held = partition.lease()
    assert granted_offsets(held) == [1]
    partition.bury(held.lease)
    assert partition.release("a") == 1
    assert (partition.drain(), partition.counts.buried) == (["a3"], 2)
    assert partition.redrive() == 2
    assert partition.drain() == ["a1", "a2"]
