"""Cursors, as a user reads with them."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

import penstock
from penstock import Broker, Cursor, NewItem, Queue
from penstock.errors import BrokerClosed, InvalidRequest
from penstock.words.clock import MINUTE
from tests.api.both_apis import BrokerOpener


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders", partitions=2)


def fill(queue: Queue, count: int, first: int = 0) -> list[str]:
    return queue.produce_many([NewItem(b"%d" % n, key=str(n)) for n in range(first, first + count)])


def numbers(items: list[penstock.Item]) -> list[int]:
    return sorted(int(item.payload) for item in items)


def test_a_cursor_reads_everything_and_touches_nothing(queue: Queue) -> None:
    ids = fill(queue, 2_500)
    leased = queue.lease(10)
    leased[0].complete()
    leased[1].bury("bad")
    before = queue.stats()
    items = list(queue.cursor("audit"))
    assert sorted(item.id for item in items) == sorted(ids)
    assert numbers(items) == list(range(2_500))
    for partition in (0, 1):
        offsets = [item.offset for item in items if item.partition == partition]
        assert offsets == sorted(offsets)
    assert (queue.stats().ready, queue.stats().leased) == (before.ready, before.leased)


def test_a_cursor_goes_on_where_it_was_left(queue: Queue) -> None:
    fill(queue, 5)
    assert len(list(queue.cursor("audit"))) == 5
    assert list(queue.cursor("audit")) == []
    fill(queue, 3, 5)
    assert numbers(list(queue.cursor("audit"))) == [5, 6, 7]
    assert numbers(list(queue.cursor("other"))) == list(range(8))


def test_what_was_not_committed_is_read_again(queue: Queue) -> None:
    fill(queue, 6)
    cursor = queue.cursor("audit")
    first = [next(cursor), next(cursor)]
    cursor.commit()
    next(cursor)
    again = list(queue.cursor("audit"))
    assert numbers(first + again) == list(range(6))


def test_reading_by_hand_commits_by_hand(queue: Queue) -> None:
    fill(queue, 6)
    cursor = queue.cursor("audit")
    read = cursor.read(4)
    assert len(read) == 4
    assert len(queue.cursor("audit").read()) == 6
    cursor.commit()
    rest = queue.cursor("audit").read()
    assert numbers(read + rest) == list(range(6))
    assert len(cursor.read()) == 2
    assert cursor.read() == []
    assert cursor.position == queue.cursor("end", start="newest").position


def test_read_and_iteration_can_be_mixed(queue: Queue) -> None:
    fill(queue, 6)
    cursor = queue.cursor("audit")
    items = [next(cursor), *cursor.read(2), next(cursor), *cursor.read()]
    assert numbers(items) == list(range(6))


def test_history_can_be_read_as_arrow(queue: Queue) -> None:
    ids = fill(queue, 6)
    cursor = queue.cursor("audit")
    batches = [cursor.read_arrow(4), cursor.read_arrow(4), cursor.read_arrow(4)]
    assert [batch.num_rows for batch in batches] == [4, 2, 0]
    assert sorted(name for batch in batches for name in batch["id"].to_pylist()) == sorted(ids)


def test_a_new_cursor_begins_at_its_start_argument(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", partitions=2)
    fill(queue, 3)
    opener.clock.advance(5 * MINUTE)
    fill(queue, 3, 3)
    noon = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=2)
    assert numbers(list(queue.cursor("a", start="oldest"))) == list(range(6))
    assert numbers(list(queue.cursor("b", start=noon))) == [3, 4, 5]
    newest = queue.cursor("c", start="newest")
    fill(queue, 1, 6)
    assert numbers(list(newest)) == [6]
    assert list(queue.cursor("c", start="oldest")) == []  # it is not new any more


def test_a_cursor_can_be_moved(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    ids = fill(queue, 4)
    cursor = queue.cursor("audit")
    assert len(cursor.read()) == 4
    cursor.seek(ids[2])
    assert [item.id for item in queue.cursor("audit")] == ids[2:]
    cursor.seek("oldest")
    assert [item.id for item in cursor] == ids
    cursor.seek("newest")
    assert cursor.read() == []
    cursor.seek(datetime(2025, 1, 1, tzinfo=UTC))
    assert len(cursor.read()) == 4


def test_a_cursor_skips_forward(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    ids = fill(queue, 4)
    opener.clock.advance(5 * MINUTE)
    fill(queue, 3, 4)
    cursor = queue.cursor("audit")
    assert next(cursor).id == ids[0]
    cursor.seek(ids[2])
    assert numbers([next(cursor)]) == [2], "the page that was read before is given up"
    cursor.seek(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=2))
    assert numbers(list(queue.cursor("audit"))) == [4, 5, 6], "the position is committed"
    cursor.seek({0: 6})
    assert (cursor.position, numbers(cursor.read())) == ({0: 6}, [6])
    cursor.seek("oldest")
    cursor.seek("newest")
    fill(queue, 1, 7)
    assert numbers(cursor.read()) == [7]
    assert queue.stats().ready == 8, "the items are as they were"


def test_a_new_cursor_that_begins_at_an_item_holds_every_partition(queue: Queue) -> None:
    fill(queue, 20)
    assert queue.cursor("a", start="1-3").position == queue.cursor("b", start={1: 3}).position == {0: 0, 1: 3}
    assert queue.cursors() == {"a": {0: 0, 1: 3}, "b": {0: 0, 1: 3}}


def test_a_cursor_is_not_moved_beyond_the_end(queue: Queue) -> None:
    fill(queue, 4)
    cursor = queue.cursor("audit")
    ends = {partition.partition: partition.produced for partition in queue.stats().partitions}
    for target in ({0: 1_000, 1: 1_000}, "0-1000"):
        cursor.seek(target)
    assert cursor.position == queue.cursors()["audit"] == ends
    fill(queue, 3, 4)
    assert numbers(cursor.read()) == [4, 5, 6]
    for target in ("7-0", {0: 0, 7: 0}):
        with pytest.raises(InvalidRequest, match=r"queue 'orders' has no partition 7; give one of \[0, 1\]"):
            cursor.seek(target)
    assert numbers(cursor.read()) == [], "it was not moved"


def test_a_cursor_skips_forward_after_resizes(queue: Queue) -> None:
    """Also over items that wait behind the fences of a resize, and over those that it forwards."""
    later = datetime.now(UTC) + timedelta(hours=1)
    for number in range(20):
        queue.produce(str(number), key=f"k{number % 10}", at=later if number < 10 else None)
    held = queue.lease(3)  # their keys hold fences after the resize
    cursor = queue.cursor("audit")
    queue.resize(5)
    for number in range(20, 40):
        queue.produce(str(number), key=f"k{number % 10}")
    assert queue.stats().resizing
    cursor.seek("newest")
    assert cursor.position.keys() == {0, 1, 2, 3, 4}
    held.complete()
    queue.resize(2)
    fill(queue, 5, 40)
    assert numbers(list(queue.cursor("audit"))) == [40, 41, 42, 43, 44]
    cursor.seek("oldest")
    assert numbers(cursor.read()) == list(range(45)), "each item once"


def test_cursors_are_listed_and_released(queue: Queue) -> None:
    fill(queue, 2)
    cursor = queue.cursor("audit")
    assert queue.cursors() == {"audit": {0: 0, 1: 0}}
    list(cursor)
    assert sum(queue.cursors()["audit"].values()) == 2
    cursor.release()
    assert queue.cursors() == {}
    with pytest.raises(InvalidRequest, match="the cursor 'audit' is closed; ask the queue for it again"):
        cursor.read()


def test_a_cursor_survives_a_restart(opener: BrokerOpener) -> None:
    queue = opener.open().create_queue("orders")
    fill(queue, 3)
    cursor = queue.cursor("audit")
    next(cursor)
    cursor.commit()
    opener.close()
    assert numbers(list(opener.open().queue("orders").cursor("audit"))) == [1, 2]


def test_a_cursor_follows_a_resize(queue: Queue) -> None:
    fill(queue, 10)
    cursor = queue.cursor("audit")
    assert len(cursor.read()) == 10
    queue.resize(5)
    fill(queue, 40, 10)
    assert numbers(list(cursor)) == list(range(10, 50))


def test_a_closed_cursor_refuses_to_read(queue: Queue) -> None:
    fill(queue, 1)
    with queue.cursor("audit") as cursor:
        assert repr(cursor) == "Cursor('audit', open, position={0: 0, 1: 0})"
    assert repr(cursor).startswith("Cursor('audit', closed")
    for call in (cursor.read, cursor.commit, cursor.lag, lambda: cursor.seek("oldest")):
        with pytest.raises(InvalidRequest, match="the cursor 'audit' is closed; ask the queue for it again"):
            call()
    assert list(cursor) == []


WRONG: list[tuple[str, Callable[[Queue], object], str]] = [
    ("name", lambda q: q.cursor(""), "the cursor has no name; give one"),
    ("name type", lambda q: q.cursor(1), "a cursor's name is int; give a text"),  # type: ignore[arg-type]
    ("long name", lambda q: q.cursor("n" * 1025), "a cursor's name has 1025 bytes; give at most 1024"),
    (
        "start",
        lambda q: q.cursor("c", start="first"),
        "start is 'first'; give 'oldest', 'newest', a datetime, the id of an item or {partition: offset}",
    ),
    ("start date", lambda q: q.cursor("c", start=datetime(2026, 1, 1)), "start has no timezone; give one"),
    ("offsets", lambda q: q.cursor("c", start={0: -1}), "an offset of start is -1; give"),
    ("no offsets", lambda q: q.cursor("c", start={}), "start is an empty mapping; give {partition: offset}"),
    ("follow", lambda q: q.cursor("c", follow=1), "follow is int; give True or False"),  # type: ignore[arg-type]
    ("limit", lambda q: q.cursor("there").read(0), "limit is 0; give a whole number from 1 to 10000"),
    ("seek date", lambda q: q.cursor("there").seek(datetime(2026, 1, 1)), "to has no timezone; give one"),
    ("seek", lambda q: q.cursor("there").seek("end"), "to is 'end'; give 'oldest', 'newest', a datetime, the id"),
]


@pytest.mark.parametrize(("call", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments_are_refused_and_no_cursor_is_created(queue: Queue, call: Callable[[Queue], object], sentence: str) -> None:
    fill(queue, 3)
    queue.cursor("there")
    with pytest.raises(InvalidRequest) as caught:
        call(queue)
    assert str(caught.value).startswith(sentence)
    assert list(queue.cursors()) == ["there"]


# -- following ---------------------------------------------------------------------------------------


def test_a_cursor_that_follows_waits_for_new_items() -> None:
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders", partitions=2)
        cursor = queue.cursor("audit", follow=True)
        seen: list[int] = []
        reader = threading.Thread(target=follow, args=(cursor, seen, 30))
        reader.start()
        for first in range(0, 30, 10):
            fill(queue, 10, first)
        reader.join()
        assert sorted(seen) == list(range(30))


def test_a_cursor_that_waits_can_be_closed() -> None:
    with penstock.open("memory://") as broker:
        cursor = broker.create_queue("orders").cursor("audit", follow=True)
        reader = threading.Thread(target=follow, args=(cursor, [], 1))
        reader.start()
        cursor.close()
        reader.join()


def test_a_cursor_that_waits_ends_with_its_broker() -> None:
    broker = penstock.open("memory://")
    queue = broker.create_queue("orders")
    cursor = queue.cursor("audit", follow=True)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            next(cursor)
        except BrokerClosed as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    broker.close()
    reader.join()
    assert len(caught) == 1


def follow(cursor: Cursor, seen: list[int], count: int) -> None:
    for item in cursor:
        seen.append(int(item.payload))
        if len(seen) == count:
            return


def test_the_lag_of_a_cursor(broker: Broker) -> None:
    queue = broker.create_queue("lagging", partitions=2)
    queue.produce_many([penstock.NewItem(str(number), key=str(number)) for number in range(10)])
    cursor = queue.cursor("audit")
    assert cursor.lag() == 10
    cursor.read(4)
    assert cursor.lag() == 6
    cursor.seek("newest")
    assert cursor.lag() == 0
