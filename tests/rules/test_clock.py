"""Clocks: wall time may be stepped and machines reboot; leases, delays and ttl neither double nor freeze."""

import pytest

from penstock.rules.commands import Produce
from penstock.rules.item_states import Life
from penstock.words.clock import DAY, HOUR, SECOND
from tests.partition_under_test import Bench, items

STEPS = pytest.mark.parametrize("step", [-DAY, DAY])


@STEPS
def test_a_stepped_wall_neither_ends_nor_freezes_a_lease(bench: Bench, step: int) -> None:
    bench.produce("a")
    bench.lease(timeout=10)
    bench.clock.step_wall(step)
    bench.advance(9)
    assert bench.life(0) is Life.LEASED
    bench.advance(1)
    assert bench.life(0) is Life.READY


@STEPS
def test_nor_does_it_over_a_restart(bench: Bench, step: int) -> None:
    bench.produce("a")
    bench.lease(timeout=10)
    bench.clock.step_wall(step)
    bench.kill()
    bench.advance(9)
    assert bench.life(0) is Life.LEASED
    bench.advance(1)
    assert bench.life(0) is Life.READY


@STEPS
def test_delays_ttls_and_dedup_windows_do_not_follow_the_wall(bench: Bench, step: int) -> None:
    bench.configure(dedup_window=10 * SECOND)
    bench.produce("delayed", dedups=["id"])
    bench.retry(bench.lease().lease, delay=10)
    bench.produce("mortal", ttl=10)
    bench.clock.step_wall(step)
    bench.advance(9)
    assert [bench.life(0), bench.life(1)] == [Life.SCHEDULED, Life.READY]
    assert bench.produce("again", dedups=["id"]) == [0]
    bench.advance(1)
    assert [bench.life(0), bench.life(1)] == [Life.READY, Life.BURIED]
    assert bench.produce("again", dedups=["id"]) == [2]


def test_at_follows_the_wall(bench: Bench) -> None:
    bench.produce("a", at=bench.after(3600))
    bench.clock.step_wall(HOUR)
    bench.settle()
    assert bench.take() == ["a"]


def test_a_reboot_gives_every_lease_its_full_timeout_again(bench: Bench) -> None:
    bench.produce("a")
    granted = bench.lease(timeout=10)
    bench.advance(9)
    bench.clock.reboot(downtime=DAY)
    bench.kill()
    bench.advance(9)
    assert bench.life(0) is Life.LEASED
    assert bench.complete(granted.lease).done == 1


def test_a_lease_ends_after_a_reboot_too(bench: Bench) -> None:
    bench.produce("a")
    bench.lease(timeout=10)
    bench.clock.reboot()
    bench.kill()
    bench.advance(10)
    assert bench.life(0) is Life.READY


def test_delays_go_on_through_a_reboot_by_the_wall(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease, delay=60)
    bench.clock.reboot(downtime=50 * SECOND)
    bench.kill()
    bench.advance(9)
    assert bench.life(0) is Life.SCHEDULED
    bench.advance(1)
    assert bench.life(0) is Life.READY


@pytest.mark.parametrize("step", [-DAY, 0, DAY])
def test_elapsed_time_never_runs_backwards(bench: Bench, step: int) -> None:
    seen = []
    for _ in range(3):
        bench.produce("a")
        seen.append(bench.partition.state.moment.elapsed)
        bench.clock.step_wall(step)
        bench.clock.reboot()
        bench.kill()
    assert seen == sorted(seen)


def test_everything_of_a_turn_has_one_time(bench: Bench) -> None:
    bench.partition.run(Produce(items("a")))
    before = bench.partition.now()
    bench.clock.advance(SECOND)
    assert bench.partition.now() == before
    bench.partition.commit()
    assert bench.partition.now().elapsed == before.elapsed + SECOND
