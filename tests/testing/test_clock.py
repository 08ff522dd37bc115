"""ManualClock."""

from datetime import timedelta

import pytest

from penstock.testing import ManualClock
from penstock.words.clock import DAY, MINUTE, SECOND, Clock


def test_time_does_not_move_without_a_call() -> None:
    clock: Clock = ManualClock()
    assert clock.read() == clock.read() == ManualClock().read()


def test_advance_moves_both_clocks() -> None:
    clock = ManualClock()
    before = clock.read()
    clock.advance(5 * SECOND)
    assert (clock.read().elapsed - before.elapsed, clock.read().wall - before.wall) == (5 * SECOND, 5 * SECOND)
    with pytest.raises(ValueError, match="the duration is negative"):
        clock.advance(-1)


def test_durations_may_be_timedeltas() -> None:
    clock, same = ManualClock(), ManualClock()
    clock.advance(timedelta(seconds=5))
    clock.step_wall(timedelta(days=-1))
    clock.reboot(timedelta(minutes=2))
    same.advance(5 * SECOND)
    same.step_wall(-DAY)
    same.reboot(2 * MINUTE)
    assert clock.read() == same.read()
    with pytest.raises(ValueError, match="the duration is negative"):
        clock.advance(timedelta(seconds=-5))


def test_a_step_moves_wall_time_only() -> None:
    clock = ManualClock()
    before = clock.read()
    clock.step_wall(-DAY)
    assert (clock.read().elapsed, clock.read().wall) == (before.elapsed, before.wall - DAY)


def test_a_reboot_starts_elapsed_time_again() -> None:
    clock = ManualClock()
    before, boot = clock.read(), clock.boot
    clock.reboot(downtime=2 * MINUTE)
    assert clock.boot != boot
    assert clock.read().elapsed < before.elapsed
    assert clock.read().wall == before.wall + 2 * MINUTE
    assert repr(clock).startswith("ManualClock(boot-2,")
