"""An operator's word: pause, clear, seek, redrive, configure."""

import pytest

from penstock.rules.item_states import Life
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, LeaseLost
from penstock.words.limits import Policy
from tests.partition_under_test import Bench, given


def one_in_each_state(bench: Bench) -> int:
    """Offsets 0 to 4: completed, buried, leased, ready, scheduled. Gives the lease of the leased one."""
    bench.produce("completed", "buried", "leased", "ready")
    bench.produce("scheduled", at=bench.after(100))
    bench.complete(bench.lease(1).lease)
    bench.bury(bench.lease(1).lease)
    return bench.lease(1).lease


# -- clear ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "offset"), [("buried", 1), ("leased", 2), ("ready", 3), ("scheduled", 4)])
def test_clear_resolves_one_state_and_leaves_the_others(bench: Bench, state: str, offset: int) -> None:
    one_in_each_state(bench)
    before = [bench.life(other) for other in range(5)]
    assert bench.clear(**{state: True}) == 1
    before[offset] = Life.COMPLETED
    bench.restart()
    assert [bench.life(other) for other in range(5)] == before


def test_clear_of_everything_leaves_nothing(bench: Bench) -> None:
    one_in_each_state(bench)
    assert bench.clear(ready=True, scheduled=True, leased=True, buried=True) == 4
    bench.advance(1_000)
    assert bench.counts == (0, 0, 0, 5, 0, 0)
    assert bench.clear(ready=True, scheduled=True, leased=True, buried=True) == 0


def test_a_cleared_lease_is_lost_to_its_holder(bench: Bench) -> None:
    lease = one_in_each_state(bench)
    bench.clear(leased=True)
    with pytest.raises(LeaseLost):
        bench.complete(lease)


def test_clearing_frees_held_keys(bench: Bench) -> None:
    bench.produce("a1", "a2", "b1", "b2", keys=["a", "a", "b", "b"])
    bench.retry(bench.lease().lease, [0], delay=100)
    assert bench.clear(leased=True, scheduled=True) == 2
    assert sorted(bench.take()) == ["a2", "b2"]


def test_clearing_the_ready_also_clears_lines(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a")
    first = bench.lease()
    assert bench.take() == []
    assert bench.clear(ready=True) == 1
    bench.complete(first.lease)
    bench.produce("a3", key="a")
    assert bench.drain() == ["a3"]


# -- seek ----------------------------------------------------------------------------------------------


def test_seek_brings_completed_items_again_from_there_on(bench: Bench) -> None:
    bench.produce(*"abcde")
    bench.drain()
    assert bench.seek(2) == 3
    bench.restart()
    assert bench.drain() == ["c", "d", "e"]


def test_seek_before_the_first_and_after_the_last(bench: Bench) -> None:
    bench.produce(*"abc")
    bench.drain()
    assert bench.seek(100) == 0
    assert bench.seek(0) == 3
    with pytest.raises(InvalidRequest, match="; give"):
        bench.seek(-1)


def test_seek_touches_only_the_completed(bench: Bench) -> None:
    one_in_each_state(bench)
    assert bench.seek(0) == 1
    assert [bench.life(offset) for offset in range(5)] == [Life.READY, Life.BURIED, Life.LEASED, Life.READY, Life.SCHEDULED]


def test_sought_items_come_in_log_order_before_newer_ones(bench: Bench) -> None:
    bench.produce(*"abc")
    bench.drain()
    bench.produce("d")
    bench.seek(0)
    assert bench.drain() == ["a", "b", "c", "d"]


def test_sought_keys_are_in_order_also_with_what_still_waits(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", "a4", key="a")
    bench.complete(bench.lease(per_key=2).lease)
    held = bench.lease()
    bench.seek(0)
    assert bench.take() == []
    bench.complete(held.lease)
    assert bench.drain() == ["a1", "a2", "a4"]


def test_sought_items_begin_anew_without_attempts_or_ttl(bench: Bench) -> None:
    bench.produce("a", ttl=5)
    bench.retry(bench.lease().lease)
    bench.drain()
    bench.seek(0)
    bench.advance(10)
    granted = bench.lease()
    assert (given(granted), granted.attempts) == ([0], {})


def test_an_item_cleared_where_it_stood_comes_back_once(bench: Bench) -> None:
    bench.produce("a", ttl=1)
    bench.produce("b")
    bench.advance(1)
    bench.clear(buried=True)
    bench.seek(0)
    assert given(bench.lease()) == [0, 1]


# -- redrive -------------------------------------------------------------------------------------------


def test_redrive_brings_all_or_the_named_to_the_tail(bench: Bench) -> None:
    bench.produce(*"abcd")
    bench.bury(bench.lease(3).lease)
    assert bench.redrive(1) == 1
    assert bench.drain() == ["d", "b"]
    assert bench.redrive() == 2
    assert bench.drain() == ["a", "c"]
    assert bench.redrive() == 0


def test_a_redriven_item_has_all_its_attempts_again(bench: Bench) -> None:
    bench.configure(max_attempts=2)
    bench.produce("a")
    for _ in range(2):
        bench.retry(bench.lease().lease)
    bench.redrive()
    bench.restart()
    assert bench.lease(timeout=1).attempts == {}
    bench.advance(1)
    assert bench.lease().attempts == {0: 2}


def test_redrive_names_what_is_not_buried_and_moves_nothing(bench: Bench) -> None:
    one_in_each_state(bench)
    with pytest.raises(InvalidRequest, match="that is ready cannot be redriven; it must be buried"):
        bench.redrive(1, 3)
    with pytest.raises(InvalidRequest, match="that is not there cannot be redriven"):
        bench.redrive(99)
    assert bench.life(1) is Life.BURIED


def test_redrive_keeps_the_priority(bench: Bench) -> None:
    bench.produce("urgent", priority=0)
    bench.bury(bench.lease().lease)
    bench.produce("usual")
    bench.redrive()
    assert bench.drain() == ["urgent", "usual"]


def test_an_item_that_expired_where_it_stood_is_redriven_once_and_to_the_tail(bench: Bench) -> None:
    bench.produce("a", ttl=1)
    bench.produce("b", "c")
    bench.advance(1)
    bench.redrive()
    assert given(bench.lease()) == [1, 2, 0]


# -- configure -----------------------------------------------------------------------------------------


def test_lowering_max_attempts_buries_what_waits_with_as_many(bench: Bench) -> None:
    bench.produce("never", "once", "once, delayed")
    granted = bench.lease()
    bench.retry(granted.lease, [0], counted=False)
    bench.retry(granted.lease, [1])
    bench.retry(granted.lease, [2], delay=100)
    assert bench.configure(max_attempts=1) == 2
    assert [bench.life(offset) for offset in range(3)] == [Life.READY, Life.BURIED, Life.BURIED]
    assert bench.partition.state.buried[1].reason == "attempts spent"


def test_lowering_max_attempts_leaves_a_holder_its_lease(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease)
    granted = bench.lease()
    assert bench.configure(max_attempts=1) == 0
    assert bench.life(0) is Life.LEASED
    bench.retry(granted.lease)
    assert bench.life(0) is Life.BURIED


def test_raising_max_attempts_gives_waiting_items_more(bench: Bench) -> None:
    bench.configure(max_attempts=2)
    bench.produce("a")
    bench.retry(bench.lease().lease)
    bench.configure(max_attempts=3)
    bench.retry(bench.lease().lease)
    assert bench.lease().attempts == {0: 3}


def test_a_new_lease_timeout_holds_for_new_leases(bench: Bench) -> None:
    bench.produce("a", "b")
    bench.lease(1)
    bench.configure(lease_timeout=600 * SECOND)
    bench.lease(1)
    bench.advance(60)
    assert [bench.life(0), bench.life(1)] == [Life.READY, Life.LEASED]


def test_a_policy_survives_a_restart_and_the_same_again_writes_nothing(bench: Bench) -> None:
    bench.configure(max_attempts=3, on_bury="park", ttl=SECOND)
    bench.restart()
    assert bench.partition.state.policy == Policy(max_attempts=3, on_bury="park", ttl=SECOND)
    before = len(list(bench.partition.log.frames()))
    bench.configure(max_attempts=3)
    assert len(list(bench.partition.log.frames())) == before


def test_a_wrong_policy_changes_nothing(bench: Bench) -> None:
    with pytest.raises(InvalidRequest):
        bench.configure(max_attempts=-1)
    assert bench.partition.state.policy == Policy()


def test_pause_and_resume_are_each_their_own(bench: Bench) -> None:
    bench.pause(lease=True)
    bench.pause(produce=True)
    bench.restart()
    state = bench.partition.state
    assert (state.paused_lease, state.paused_produce) == (True, True)
    bench.pause(lease=False)
    assert (bench.partition.state.paused_lease, bench.partition.state.paused_produce) == (False, True)
