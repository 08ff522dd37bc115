"""The rate limit, and the delay of items without a handler."""

from penstock.api.items import Item, ItemSource, items_of
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.worker.fetcher import MAX_REMEMBERED, RateLimit, UnhandledItems


def items(count: int, first: int = 0) -> list[Item]:
    return items_of(ItemSource("orders"), 0, range(first, first + count), Batch([b""] * count), 0, {})


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


def test_the_delay_of_an_item_without_a_handler_doubles_up_to_a_minute() -> None:
    unhandled, now, delays = UnhandledItems(lambda: 1.0), SECOND, []
    for _ in range(9):
        ((delay, _),) = unhandled.by_delay(items(3), now)
        delays.append(delay // SECOND)
        now += delay + 1
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    (new, old) = sorted(unhandled.by_delay(items(5), now))
    assert (new[0], [item.offset for item in new[1]], old[0]) == (SECOND, [3, 4], 60 * SECOND), "each item has its own"


def test_many_items_without_a_handler_are_delayed_longer() -> None:
    unhandled = UnhandledItems(lambda: 1.0)
    assert unhandled.by_delay(items(5), SECOND)[0][0] == SECOND
    for at in range(2, 40):
        ((delay, _),) = unhandled.by_delay(items(1_000, first=1_000 * at), at * SECOND + 1)
    assert SECOND < delay <= 60 * SECOND
    assert unhandled.by_delay(items(1, 99_998), 200 * SECOND)[0][0] >= SECOND
    assert unhandled.by_delay(items(1, 99_999), 400 * SECOND)[0][0] == SECOND
    assert UnhandledItems(lambda: 0.0).by_delay(items(1), SECOND)[0][0] == SECOND / 4


def test_only_so_many_items_without_a_handler_are_remembered() -> None:
    unhandled = UnhandledItems(lambda: 1.0)
    unhandled.by_delay(items(1), SECOND)
    unhandled.by_delay(items(MAX_REMEMBERED, first=1), SECOND)
    assert len(unhandled._returns) == MAX_REMEMBERED
