"""ManualClock."""

from copy import deepcopy
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from penstock.testing import ManualClock
from penstock.words.clock import DAY, MINUTE, Clock
from penstock.words.errors import InvalidRequest


def test_time_does_not_move_without_a_call() -> None:
    clock: Clock = ManualClock()
    assert clock.read() == clock.read() == ManualClock().read()


def test_it_begins_at_a_given_date() -> None:
    clock = ManualClock(datetime(2028, 2, 29, 23, 59, tzinfo=timezone(timedelta(hours=1))))
    clock.advance(60)
    assert clock.now() == datetime(2028, 2, 29, 23, tzinfo=UTC)
    with pytest.raises(InvalidRequest, match="start has no timezone"):
        ManualClock(datetime(2028, 2, 29))


def test_advance_moves_both_clocks() -> None:
    clock = ManualClock()
    before = clock.read()
    clock.advance(5)
    clock.advance(0.25)
    assert (clock.read().elapsed - before.elapsed, clock.read().wall - before.wall) == (5_250_000, 5_250_000)
    assert clock.now() == datetime(2026, 1, 1, 0, 0, 5, 250_000, UTC)
    with pytest.raises(ValueError, match="the duration is negative"):
        clock.advance(-1)


def test_durations_may_be_timedeltas() -> None:
    clock, same = ManualClock(), ManualClock()
    clock.advance(timedelta(seconds=5))
    clock.step_wall(timedelta(days=-1))
    clock.reboot(timedelta(minutes=2))
    same.advance(5)
    same.step_wall(-86_400)
    same.reboot(120)
    assert clock.read() == same.read()
    with pytest.raises(ValueError, match="the duration is negative"):
        clock.advance(timedelta(seconds=-5))


@pytest.mark.parametrize("given", [True, "5", None, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(given: Any) -> None:
    clock = ManualClock()
    before = clock.read()
    for move in (clock.advance, clock.step_wall, clock.reboot):
        with pytest.raises(ValueError, match="give seconds or a timedelta"):
            move(given)
    assert clock.read() == before


def test_a_step_moves_wall_time_only() -> None:
    clock = ManualClock()
    before = clock.read()
    clock.step_wall(timedelta(days=-1))
    assert (clock.read().elapsed, clock.read().wall) == (before.elapsed, before.wall - DAY)


def test_a_reboot_starts_elapsed_time_again() -> None:
    clock = ManualClock()
    before, boot = clock.read(), clock.boot
    clock.reboot(downtime=120)
    assert clock.boot != boot
    assert clock.read().elapsed < before.elapsed
    assert clock.read().wall == before.wall + 2 * MINUTE
    assert repr(clock).startswith("ManualClock(boot-2,")


def test_a_copy_of_a_clock_moves_alone() -> None:
    clock = ManualClock()
    moves: list[str] = []
    clock.watch(lambda: moves.append("moved"))
    clock.reboot()
    copy = deepcopy(clock)
    copy.advance(5)
    assert (copy.boot, copy.now()) == (clock.boot, clock.now() + timedelta(seconds=5))
    assert moves == ["moved"]
