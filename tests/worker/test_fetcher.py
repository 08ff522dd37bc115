"""The rate limit, and the delay of items without a handler."""

from penstock.words.clock import SECOND
from penstock.worker.fetcher import RateLimit, UnhandledKindDelay


def test_a_rate_allows_so_many_a_second() -> None:
    limit = RateLimit(100)
    taken, now = 0, SECOND
    while now < 11 * SECOND:
        given, wait = limit.take(1_000, now)
        taken += given
        now += wait or 1_000
    assert 1_000 <= taken <= 1_011  # the initial burst is added


def test_a_slow_rate_gives_one_at_a_time() -> None:
    limit = RateLimit(0.5)
    assert limit.take(10, SECOND) == (1, 0)
    given, wait = limit.take(10, SECOND)
    assert (given, 1.99 * SECOND < wait < 2.01 * SECOND) == (0, True)
    assert limit.take(10, SECOND + wait) == (1, 0)


def test_items_put_back_can_be_taken_later() -> None:
    limit = RateLimit(100)
    assert limit.take(10, SECOND) == (10, 0)
    limit.put_back(4)
    assert limit.take(10, SECOND) == (4, 0)
    assert limit.take(10, SECOND)[0] == 0


def test_many_items_without_a_handler_are_delayed_longer() -> None:
    unhandled = UnhandledKindDelay(lambda: 1.0)
    assert unhandled.delay(5, SECOND) == SECOND
    for at in range(2, 40):
        delay = unhandled.delay(1_000, at * SECOND + 1)
    assert SECOND < delay <= 60 * SECOND
    assert unhandled.delay(1, 200 * SECOND) >= SECOND
    assert unhandled.delay(1, 400 * SECOND) == SECOND
    assert UnhandledKindDelay(lambda: 0.0).delay(1, SECOND) == SECOND / 4
