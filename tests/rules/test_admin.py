"""Administrative operations: pause, clear, seek, redrive, configure."""

import pytest

from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, LeaseLost
from penstock.words.limits import Policy
from tests.partition_under_test import PartitionUnderTest, granted_offsets


def one_in_each_state(partition: PartitionUnderTest) -> int:
    """Offsets 0 to 4: completed, buried, leased, ready, scheduled. Returns the lease of the leased one."""
    partition.produce("completed", "buried", "leased", "ready")
    partition.produce("scheduled", at=partition.after(100))
    partition.complete(partition.lease(1).lease)
    partition.bury(partition.lease(1).lease)
    return partition.lease(1).lease


# -- clear ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "offset"), [("buried", 1), ("leased", 2), ("ready", 3), ("scheduled", 4)])
def test_clear_resolves_one_state_and_leaves_the_others(partition: PartitionUnderTest, state: str, offset: int) -> None:
    one_in_each_state(partition)
    before = [partition.state_of(other) for other in range(5)]
    assert partition.clear(**{state: True}) == 1
    before[offset] = ItemState.COMPLETED
    partition.restart()
    assert [partition.state_of(other) for other in range(5)] == before


def test_clear_of_everything_leaves_nothing(partition: PartitionUnderTest) -> None:
    one_in_each_state(partition)
    assert partition.clear(ready=True, scheduled=True, leased=True, buried=True) == 4
    partition.advance(1_000)
    assert partition.counts == (0, 0, 0, 5, 0, 0, 0)
    assert partition.clear(ready=True, scheduled=True, leased=True, buried=True) == 0


def test_a_cleared_lease_is_lost_to_its_holder(partition: PartitionUnderTest) -> None:
    lease = one_in_each_state(partition)
    partition.clear(leased=True)
    with pytest.raises(LeaseLost):
        partition.complete(lease)


def test_clearing_frees_held_keys(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "b1", "b2", keys=["a", "a", "b", "b"])
    partition.retry(partition.lease().lease, [0], delay=100)
    assert partition.clear(leased=True, scheduled=True) == 2
    assert sorted(partition.lease_texts()) == ["a2", "b2"]


def test_clearing_ready_items_also_clears_key_lines(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", key="a")
    first = partition.lease()
    assert partition.lease_texts() == []
    assert partition.clear(ready=True) == 1
    partition.complete(first.lease)
    partition.produce("a3", key="a")
    assert partition.drain() == ["a3"]


# -- seek ----------------------------------------------------------------------------------------------


def test_seek_makes_completed_items_from_the_offset_on_ready_again(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcde")
    partition.drain()
    assert partition.seek(2) == 3
    partition.restart()
    assert partition.drain() == ["c", "d", "e"]


def test_seek_before_the_first_and_after_the_last(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    partition.drain()
    assert partition.seek(100) == 0
    assert partition.seek(0) == 3
    with pytest.raises(InvalidRequest, match="; give"):
        partition.seek(-1)


def test_seek_touches_only_the_completed(partition: PartitionUnderTest) -> None:
    one_in_each_state(partition)
    assert partition.seek(0) == 1
    assert [partition.state_of(offset) for offset in range(5)] == [
        ItemState.READY,
        ItemState.BURIED,
        ItemState.LEASED,
        ItemState.READY,
        ItemState.SCHEDULED,
    ]


def test_sought_items_come_in_log_order_before_newer_ones(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    partition.drain()
    partition.produce("d")
    partition.seek(0)
    assert partition.drain() == ["a", "b", "c", "d"]


def test_sought_keys_are_in_order_also_with_what_still_waits(partition: PartitionUnderTest) -> None:
    partition.produce("a1", "a2", "a3", "a4", key="a")
    partition.complete(partition.lease(per_key=2).lease)
    held = partition.lease()
    partition.seek(0)
    assert partition.lease_texts() == []
    partition.complete(held.lease)
    assert partition.drain() == ["a1", "a2", "a4"]


def test_sought_items_without_a_key_are_leased_together_before_keys_that_still_wait(partition: PartitionUnderTest) -> None:
    partition.produce("x", "y", "a1", "b1", "a2", "b2", keys=[None, None, "a", "b", "a", "b"])
    partition.complete(partition.lease().lease)  # a2 and b2 wait in lines, which are free now
    partition.seek(0)
    first = partition.lease()  # it stops at a1, which goes to the front of its line first
    assert partition.texts(first) == ["x", "y"]
    partition.complete(first.lease, [0])
    partition.complete(first.lease, [1])
    assert partition.drain() == ["a1", "b1", "a2", "b2"]
    partition.produce("z")
    assert partition.drain() == ["z"]


def test_sought_items_begin_anew_without_attempts_or_ttl(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=5)
    partition.retry(partition.lease().lease)
    partition.drain()
    partition.seek(0)
    partition.advance(10)
    granted = partition.lease()
    assert (granted_offsets(granted), granted.attempts) == ([0], {})


def test_an_item_cleared_without_a_lease_is_sought_once(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=1)
    partition.produce("b")
    partition.advance(1)
    partition.clear(buried=True)
    partition.seek(0)
    assert granted_offsets(partition.lease()) == [0, 1]


# -- redrive -------------------------------------------------------------------------------------------


def test_redrive_puts_all_or_the_given_items_at_the_tail(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcd")
    partition.bury(partition.lease(3).lease)
    assert partition.redrive(1) == 1
    assert partition.drain() == ["d", "b"]
    assert partition.redrive() == 2
    assert partition.drain() == ["a", "c"]
    assert partition.redrive() == 0


def test_a_redriven_item_has_all_its_attempts_again(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=2)
    partition.produce("a")
    for _ in range(2):
        partition.retry(partition.lease().lease)
    partition.redrive()
    partition.restart()
    assert partition.lease(timeout=1).attempts == {}
    partition.advance(1)
    assert partition.lease().attempts == {0: 2}


def test_redrive_of_items_that_are_not_buried_is_refused_and_changes_nothing(partition: PartitionUnderTest) -> None:
    one_in_each_state(partition)
    with pytest.raises(InvalidRequest, match="that is ready cannot be redriven; it must be buried"):
        partition.redrive(1, 3)
    with pytest.raises(InvalidRequest, match="that is not there cannot be redriven"):
        partition.redrive(99)
    assert partition.state_of(1) is ItemState.BURIED


def test_redrive_keeps_the_priority(partition: PartitionUnderTest) -> None:
    partition.produce("urgent", priority=0)
    partition.bury(partition.lease().lease)
    partition.produce("usual")
    partition.redrive()
    assert partition.drain() == ["urgent", "usual"]


def test_an_item_whose_ttl_ended_is_redriven_once_and_to_the_tail(partition: PartitionUnderTest) -> None:
    partition.produce("a", ttl=1)
    partition.produce("b", "c")
    partition.advance(1)
    partition.redrive()
    assert granted_offsets(partition.lease()) == [1, 2, 0]


# -- configure -----------------------------------------------------------------------------------------


def test_lowering_max_attempts_buries_waiting_items_with_that_many_attempts(partition: PartitionUnderTest) -> None:
    partition.produce("never", "once", "once, delayed")
    granted = partition.lease()
    partition.retry(granted.lease, [0], counted=False)
    partition.retry(granted.lease, [1])
    partition.retry(granted.lease, [2], delay=100)
    assert partition.configure(max_attempts=1) == 2
    assert [partition.state_of(offset) for offset in range(3)] == [ItemState.READY, ItemState.BURIED, ItemState.BURIED]
    assert partition.wrapped.state.burials[1].reason == "attempts spent"


def test_lowering_max_attempts_leaves_a_holder_its_lease(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease)
    granted = partition.lease()
    assert partition.configure(max_attempts=1) == 0
    assert partition.state_of(0) is ItemState.LEASED
    partition.retry(granted.lease)
    assert partition.state_of(0) is ItemState.BURIED


def test_raising_max_attempts_gives_waiting_items_more(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=2)
    partition.produce("a")
    partition.retry(partition.lease().lease)
    partition.configure(max_attempts=3)
    partition.retry(partition.lease().lease)
    assert partition.lease().attempts == {0: 3}


def test_a_new_lease_timeout_holds_for_new_leases(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.lease(1)
    partition.configure(lease_timeout=600 * SECOND)
    partition.lease(1)
    partition.advance(60)
    assert [partition.state_of(0), partition.state_of(1)] == [ItemState.READY, ItemState.LEASED]


def test_a_policy_survives_a_restart_and_an_equal_policy_writes_nothing(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=3, on_bury="park", ttl=SECOND)
    partition.restart()
    assert partition.wrapped.state.policy == Policy(max_attempts=3, on_bury="park", ttl=SECOND)
    before = len(list(partition.wrapped.log.frames()))
    partition.configure(max_attempts=3)
    assert len(list(partition.wrapped.log.frames())) == before


def test_a_wrong_policy_changes_nothing(partition: PartitionUnderTest) -> None:
    with pytest.raises(InvalidRequest):
        partition.configure(max_attempts=-1)
    assert partition.wrapped.state.policy == Policy()


def test_leasing_and_producing_are_paused_and_resumed_separately(partition: PartitionUnderTest) -> None:
    partition.pause(lease=True)
    partition.pause(produce=True)
    partition.restart()
    state = partition.wrapped.state
    assert (state.paused_lease, state.paused_produce) == (True, True)
    partition.pause(lease=False)
    assert (partition.wrapped.state.paused_lease, partition.wrapped.state.paused_produce) == (False, True)
