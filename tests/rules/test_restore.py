"""A partition that is restored from a backup: offsets and lease numbers that no other copy has."""

import pytest

from penstock.rules import base
from penstock.rules.item_states import ItemState
from penstock.rules.leases import EPOCH_SHIFT
from penstock.rules.restore import LEAST_FIRST_LEASE, LEAST_HOLE, OFFSETS_PER_SECOND, SINCE, draw_first_lease
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import InvalidRequest, LeaseLost
from tests.partition_under_test import PartitionUnderTest


def test_new_offsets_are_beyond_all_that_a_copy_could_have_given(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    seconds = partition.clock.read().wall // SECOND
    partition.restore()
    (first,) = partition.produce("d")
    assert first == max((seconds - SINCE) * OFFSETS_PER_SECOND, 3 + LEAST_HOLE)
    partition.advance(DAY / SECOND * 30)
    partition.restore(LEAST_FIRST_LEASE + 8)
    (second,) = partition.produce("e")
    assert second == (seconds + 30 * DAY // SECOND - SINCE) * OFFSETS_PER_SECOND > first


def test_offsets_go_on_beyond_the_backup_if_the_clock_is_wrong(partition: PartitionUnderTest) -> None:
    partition.clock.step_wall(-partition.clock.read().wall)
    partition.produce(*"abc")
    partition.restore()
    assert partition.produce("d") == [3 + LEAST_HOLE]


def test_the_hole_counts_as_nothing(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    done = partition.lease(1)
    partition.complete(done.lease)
    partition.restore()
    partition.produce("d")
    state = partition.wrapped.state
    assert (state.counts.ready, state.counts.completed, state.counts.leased, state.produced) == (3, 1, 0, 4)
    assert state.state_of(3) is None
    assert state.runs_in(ItemState.READY)[:2] == [1, 3]


def test_leases_return_uncounted_and_their_tokens_are_refused(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=1)
    partition.produce("a", "b", keys=["k", None])
    before = partition.lease()
    assert partition.restore() == 2
    with pytest.raises(LeaseLost):
        partition.complete(before.lease)
    after = partition.lease()
    assert after.count == 2
    assert after.attempts == {}  # the first attempt again: with max_attempts=1 a counted one would have buried them


def test_lease_numbers_of_every_opening_differ_from_those_of_the_original(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcd")
    partition.lease(1)
    original = partition.wrapped.state.leases_given
    partition.restore()
    for _ in range(2):
        number = partition.lease(1).lease & ((1 << EPOCH_SHIFT) - 1)
        assert number > LEAST_FIRST_LEASE > original
        partition.restart()


def test_a_position_after_the_backup_is_refused(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    partition.restore()
    (new,) = partition.produce("d")
    partition.move_cursor("at the end of the backup", 3)
    partition.move_cursor("new", new)
    for offset in (4, new - 1):
        with pytest.raises(InvalidRequest, match="not in the backup"):
            partition.move_cursor("late", offset)
        with pytest.raises(InvalidRequest, match="not in the backup"):
            partition.seek(offset)
        with pytest.raises(InvalidRequest, match="produced after the backup"):
            partition.wrapped.explain(offset)


def test_a_restore_is_applied_once_and_survives_a_base(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    partition.restore()
    state = partition.wrapped.state
    partition.restore()
    assert partition.wrapped.state.next_offset == state.next_offset
    loaded = base.load(base.dump(state))
    assert (loaded.holes.runs, loaded.first_lease, loaded.counts) == (state.holes.runs, state.first_lease, state.counts)
    partition.restart()
    assert partition.wrapped.state.holes.runs == state.holes.runs


def test_first_leases_are_random_and_in_range() -> None:
    assert draw_first_lease(lambda size: bytes(size)) == LEAST_FIRST_LEASE
    assert LEAST_FIRST_LEASE < draw_first_lease(lambda size: b"\xff" * size) < 2 * LEAST_FIRST_LEASE
