"""The system's clock."""

from penstock.words.clock import SystemClock


def test_both_clocks_go_forward_in_microseconds() -> None:
    clock = SystemClock()
    first, second = clock.read(), clock.read()
    assert second.elapsed >= first.elapsed
    assert 1_700_000_000_000_000 < first.wall < 10_000_000_000_000_000


def test_the_boot_id_is_not_empty() -> None:
    assert SystemClock().boot
