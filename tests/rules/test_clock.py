"""Clocks: leases, delays and ttls keep their length when wall time is stepped or the machine reboots."""

import pytest

from penstock.rules.commands import Produce
from penstock.rules.item_states import ItemState
from penstock.words.clock import DAY, HOUR, SECOND
from tests.partition_under_test import PartitionUnderTest, items

STEPS = pytest.mark.parametrize("step", [-DAY, DAY])


@STEPS
def test_a_stepped_wall_neither_ends_nor_freezes_a_lease(partition: PartitionUnderTest, step: int) -> None:
    partition.produce("a")
    partition.lease(timeout=10)
    partition.clock.step_wall(step)
    partition.advance(9)
    assert partition.state_of(0) is ItemState.LEASED
    partition.advance(1)
    assert partition.state_of(0) is ItemState.READY


@STEPS
def test_a_stepped_wall_over_a_restart_neither_ends_nor_freezes_a_lease(partition: PartitionUnderTest, step: int) -> None:
    partition.produce("a")
    partition.lease(timeout=10)
    partition.clock.step_wall(step)
    partition.kill()
    partition.advance(9)
    assert partition.state_of(0) is ItemState.LEASED
    partition.advance(1)
    assert partition.state_of(0) is ItemState.READY


@STEPS
def test_delays_ttls_and_dedup_windows_do_not_follow_the_wall(partition: PartitionUnderTest, step: int) -> None:
    partition.configure(dedup_window=10 * SECOND)
    partition.produce("delayed", dedups=["id"])
    partition.retry(partition.lease().lease, delay=10)
    partition.produce("mortal", ttl=10)
    partition.clock.step_wall(step)
    partition.advance(9)
    assert [partition.state_of(0), partition.state_of(1)] == [ItemState.SCHEDULED, ItemState.READY]
    assert partition.produce("again", dedups=["id"]) == [0]
    partition.advance(1)
    assert [partition.state_of(0), partition.state_of(1)] == [ItemState.READY, ItemState.BURIED]
    assert partition.produce("again", dedups=["id"]) == [2]


def test_a_schedule_by_at_follows_the_wall(partition: PartitionUnderTest) -> None:
    partition.produce("a", at=partition.after(3600))
    partition.clock.step_wall(HOUR)
    partition.run_due()
    assert partition.lease_texts() == ["a"]


def test_a_reboot_gives_every_lease_its_full_timeout_again(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    granted = partition.lease(timeout=10)
    partition.advance(9)
    partition.clock.reboot(downtime=DAY)
    partition.kill()
    partition.advance(9)
    assert partition.state_of(0) is ItemState.LEASED
    assert partition.complete(granted.lease).done == 1


def test_a_lease_ends_after_a_reboot_too(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.lease(timeout=10)
    partition.clock.reboot()
    partition.kill()
    partition.advance(10)
    assert partition.state_of(0) is ItemState.READY


def test_delays_go_on_through_a_reboot_by_the_wall(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease, delay=60)
    partition.clock.reboot(downtime=50 * SECOND)
    partition.kill()
    partition.advance(9)
    assert partition.state_of(0) is ItemState.SCHEDULED
    partition.advance(1)
    assert partition.state_of(0) is ItemState.READY


@pytest.mark.parametrize("step", [-DAY, 0, DAY])
def test_elapsed_time_never_runs_backwards(partition: PartitionUnderTest, step: int) -> None:
    seen = []
    for _ in range(3):
        partition.produce("a")
        seen.append(partition.wrapped.state.moment.elapsed)
        partition.clock.step_wall(step)
        partition.clock.reboot()
        partition.kill()
    assert seen == sorted(seen)


def test_all_records_of_a_turn_have_the_same_time(partition: PartitionUnderTest) -> None:
    partition.wrapped.run(Produce(items("a")))
    before = partition.wrapped.now()
    partition.clock.advance(SECOND)
    assert partition.wrapped.now() == before
    partition.wrapped.commit()
    assert partition.wrapped.now().elapsed == before.elapsed + SECOND
