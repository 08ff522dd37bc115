"""Producing through the public API."""

import copy
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from penstock import Broker, NewItem, Queue
from penstock.errors import InvalidRequest, PenstockError, QueueFull, QueueHeld
from penstock.words.clock import SECOND
from penstock.words.limits import KIB, MAX_BATCH_ITEMS, MIB
from tests.api.both_apis import WAIT, BrokerOpener


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders")


def values(queue: Queue, count: int = 100) -> list[Any]:
    """The values of the ready items, which are leased."""
    with queue.lease(count) as batch:
        return [item.value for item in batch.items]


# -- one item ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"\xff\x00", "tūī", {"order": 1}, [1, 2.5, None], 7, True, b"x" * (16 * MIB)])
def test_a_value_is_returned_as_it_was_produced(queue: Queue, value: Any) -> None:
    item_id = queue.produce(value)
    item = queue.lease()[0].item
    assert (item.id, item.value) == (item_id, value)
    assert type(item.value) is type(value)


def test_an_item_carries_every_field(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    at = datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    given: dict[str, Any] = {"key": "a", "headers": {"trace": "t", "raw": b"\0"}, "kind": "invoice", "reference": "r-1", "priority": 3}
    queue.produce("text", **given, encoding="text", at=at, ttl=timedelta(hours=1))
    assert not queue.lease()
    opener.clock.advance(2 * SECOND)
    lease = queue.lease()[0]
    item = lease.item
    assert {name: getattr(item, name) for name in given} == given
    assert (item.value, item.encoding, item.at, item.ttl) == ("text", "text", at, 3600.0)
    assert item.produced_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert (item.attempts, lease.attempts, lease.id) == (1, 1, item.id)


def test_priority_comes_first_and_order_is_kept_within_it(queue: Queue) -> None:
    for priority in (9, 5, 0, 5):
        queue.produce({"p": priority}, priority=priority)
    assert [value["p"] for value in values(queue)] == [0, 5, 5, 9]


def test_an_item_that_waits_beyond_its_ttl_is_buried(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    queue.produce(b"short", ttl=10)
    queue.produce(b"long", ttl=20)
    opener.clock.advance(11 * SECOND)
    assert values(queue) == [b"long"]
    assert [(item.value, item.reason) for item in queue.items("buried")] == [(b"short", "expired")]


def test_an_item_may_have_a_dedup_window_of_its_own(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", dedup_window=60, partitions=2)
    items = [NewItem(name, dedup=name, dedup_window=window) for name, window in (("short", 10), ("usual", None), ("long", 3600))]
    first = queue.produce_many(items)
    assert queue.produce("again", dedup="short", dedup_window=3600) == first[0]  # not added, so its own window does not count
    opener.clock.advance(timedelta(seconds=11))
    assert [a == b for a, b in zip(queue.produce_many(items), first, strict=True)] == [False, True, True]
    queue.resize(3)  # remembered ids move with their windows
    opener.clock.advance(timedelta(seconds=50))
    assert [queue.produce("x", dedup=name) == id for name, id in zip(("usual", "long"), first[1:], strict=True)] == [False, True]
    opener.clock.advance(timedelta(hours=1))
    assert queue.produce("x", dedup="long") != first[2]


def test_an_item_with_a_dedup_window_can_be_buried_and_redriven(broker: Broker) -> None:
    broker.create_queue("dead")
    queue = broker.create_queue("orders", dead_queue="dead")
    queue.produce("x", dedup="d", dedup_window=10)
    queue.lease()[0].bury()
    (lease,) = broker.queue("dead").lease(wait=WAIT)
    assert lease.item.value == "x"


def test_dedup_returns_the_first_id_until_its_window_has_passed(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", dedup_window=60, partitions=4)
    first = queue.produce(b"1", dedup="d")
    again = queue.produce(b"2", dedup="d")
    assert again == first and (first.duplicate, again.duplicate) == (False, True)
    assert queue.produce(b"3", dedup="d", key="k") != first
    opener.clock.advance(61 * SECOND)
    later = queue.produce(b"4", dedup="d")
    assert later != first and not later.duplicate
    found = values(queue)
    while len(found) < 3:  # a lease does not wait for partitions that are just closed for being idle
        found += values(queue)
    assert sorted(found) == [b"1", b"3", b"4"]


@pytest.mark.parametrize("partitions", [1, 4])
def test_duplicates_of_a_batch_are_told(broker: Broker, partitions: int) -> None:
    queue = broker.create_queue("orders", partitions=partitions)
    plain = queue.produce_many([b"1", b"2"])
    assert (len(plain), plain.duplicates) == (2, [])
    batch = [NewItem(b"1", dedup="a"), NewItem(b"2"), NewItem(b"3", dedup="a"), NewItem(b"4", dedup="b"), NewItem(b"5", dedup="c")]
    first = queue.produce_many(batch, request_id="r")
    assert first.duplicates == [2] and first[2] == first[0] and len({*first}) == 4
    again = queue.produce_many(batch)
    assert again.duplicates == [0, 2, 3, 4] and [again[index] for index in again.duplicates] == [first[index] for index in again.duplicates]
    repeated = queue.produce_many(batch, request_id="r")
    assert (repeated, repeated.duplicates) == (first, [2]), "a repeated call gives its first answer"
    whole = queue.produce_many(batch[:1], request_id="all known")
    assert whole.duplicates == queue.produce_many(batch[:1], request_id="all known").duplicates == [0]
    assert queue.produce_many([]).duplicates == []
    assert queue.stats().ready == 7


def test_duplicate_rows_of_a_table_are_told(queue: Queue) -> None:
    table = pa.table({"payload": [b""] * 10_002, "dedup": ["a", *([None] * 10_000), "a"]})
    rows = queue.produce_arrow(table)
    assert (rows, rows.duplicates) == (10_002, [10_001])
    assert queue.stats().ready == 10_001


def test_an_id_is_a_text_that_can_be_stored(queue: Queue) -> None:
    first = queue.produce(b"first", dedup="d")
    ids = queue.produce_many([b"second"])
    queue.produce({"after": first, "also": ids}, key=first, headers={"after": first}, kind=first, reference=first, dedup=first)
    queue.produce_many([NewItem([first], kind=first, reference=first, headers={"after": first})])
    for item in [lease.item for lease in queue.lease(4)][2:]:
        assert (item.kind, item.reference, item.headers) == (first, first, {"after": first})
        assert item.value in ({"after": first, "also": ids}, [first])
    assert queue.explain(first).id == first
    again = queue.produce(b"", dedup="d")
    for copied in (pickle.loads(pickle.dumps(again)), copy.copy(again)):
        assert copied == first and copied.duplicate
    assert pickle.loads(pickle.dumps(queue.produce_many([NewItem(b"", dedup="d")]))).duplicates == [0]


def test_a_repeated_request_adds_nothing(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=4)
    first = queue.produce(b"1", request_id="r")
    many = queue.produce_many([b"2", NewItem(b"3", key="k"), b"4"], request_id=b"s")
    assert queue.produce(b"1", request_id="r") == first
    assert queue.produce_many([b"2", NewItem(b"3", key="k"), b"4"], request_id=b"s") == many
    assert sorted(values(queue)) == [b"1", b"2", b"3", b"4"]


# -- many --------------------------------------------------------------------------------------------


def test_many_items_get_their_ids_in_order(queue: Queue) -> None:
    ids = [queue.produce(b"first"), *queue.produce_many([b"%d" % n for n in range(2_500)])]
    assert ids == [f"0-{n}" for n in range(2_501)]
    batch = queue.lease(10_000)
    assert [item.id for item in batch.items] == ids
    assert [item.payload for item in batch.items[1:]] == [b"%d" % n for n in range(2_500)]


def test_a_batch_may_mix_everything(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=3)
    new: list[Any] = [b"bytes", "text", {"j": 1}, NewItem(b"keyed", key="a"), NewItem([1], key="b", priority=0), NewItem(b"again", key="a")]
    ids = queue.produce_many(new)
    found = {item.id: item.value for item in queue.lease(10, per_key=2).items}
    assert [found[one] for one in ids] == [b"bytes", "text", {"j": 1}, b"keyed", [1], b"again"]


def test_producing_no_items_sends_no_request(queue: Queue) -> None:
    assert queue.produce_many([]) == []
    assert queue.stats().produced == 0


def test_items_may_come_from_a_generator(queue: Queue) -> None:
    assert len(queue.produce_many(b"%d" % n for n in range(3))) == 3


def test_a_refused_part_raises_an_error_with_all_results(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    queue.pause(lease=False, partition=0)
    items = [NewItem(b"%d" % n, key=f"k{n}") for n in range(20)]
    with pytest.raises(QueueHeld, match="paused") as caught:
        queue.produce_many(items)
    results: list[str | PenstockError] = vars(caught.value)["results"]
    stored = [result for result in results if isinstance(result, str)]
    assert len(results) == 20 and 0 < len(stored) < 20
    assert all(isinstance(result, str | QueueHeld) for result in results)
    found = {item.id: item.value for item in queue.lease(100).items}
    assert found == {result: item.payload for result, item in zip(results, items, strict=True) if isinstance(result, str)}


# -- arrow -------------------------------------------------------------------------------------------


def test_a_table_is_produced_and_leased(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    table = pa.table({"payload": [b"1", b"2", b"3"], "key": ["a", None, "b"], "priority": [1, None, 9]})
    assert queue.produce_arrow(table) == 3
    batch = queue.lease(10)
    found = batch.to_arrow()
    assert sorted(zip(*(found[name].to_pylist() for name in ("payload", "key", "priority", "attempts")), strict=True)) == [
        (b"1", b"a", 1, 1),
        (b"2", None, 5, 1),
        (b"3", b"b", 9, 1),
    ]
    assert found["id"].to_pylist() == [lease.id for lease in batch]


def test_a_long_table_is_produced_in_chunks_and_repeated_without_doubling(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    table = pa.table({"payload": [b"%d" % n for n in range(MAX_BATCH_ITEMS + 5)]})
    assert queue.produce_arrow(table, request_id="load-7") == MAX_BATCH_ITEMS + 5
    assert queue.produce_arrow(table, request_id="load-7") == MAX_BATCH_ITEMS + 5
    assert queue.stats().ready == MAX_BATCH_ITEMS + 5
    assert queue.produce_arrow(table) == MAX_BATCH_ITEMS + 5
    assert queue.stats().ready == 2 * (MAX_BATCH_ITEMS + 5)


# -- a full queue ------------------------------------------------------------------------------------


def test_a_full_queue_refuses_after_the_timeout(broker: Broker) -> None:
    queue = broker.create_queue("orders", max_items=2)
    queue.produce_many([b"1", b"2"])
    with pytest.raises(QueueFull, match="is full; wait until items are resolved, or raise max_items"):
        queue.produce(b"3", timeout=0.05)
    queue.lease().complete()
    queue.produce(b"3", timeout=WAIT)
    assert queue.stats().ready == 2


def test_a_producer_that_does_not_wait_is_served_if_there_is_room(broker: Broker) -> None:
    queue = broker.create_queue("orders", max_items=1)
    queue.produce(b"1", timeout=0)
    with pytest.raises(QueueFull):
        queue.produce(b"2", timeout=0)


def test_a_paused_queue_refuses_at_once(queue: Queue) -> None:
    queue.pause(lease=False)
    with pytest.raises(QueueHeld, match="producing to queue 'orders' is paused; resume it"):
        queue.produce(b"1")
    queue.resume()
    queue.produce(b"1")


# -- what is refused ---------------------------------------------------------------------------------

WRONG: list[tuple[str, Callable[[Queue], object], str]] = [
    ("payload type", lambda q: q.produce(None), "the payload is NoneType; give bytes, str, or for JSON a dict"),  # type: ignore[arg-type]
    ("payload size", lambda q: q.produce(b"x" * (16 * MIB + 1)), "a payload has 16777217 bytes; give at most 16777216"),
    ("no item", lambda q: q.produce(NewItem(b"x")), "the payload is a NewItem; give what is in it"),
    ("key type", lambda q: q.produce(b"", key=7), "the key is int; give str or bytes"),  # type: ignore[arg-type]
    ("key size", lambda q: q.produce(b"", key="k" * 1025), "a key has 1025 bytes; give at most 1024"),
    ("headers", lambda q: q.produce(b"", headers={"a": 1}), "the header 'a' is int; give str or bytes"),  # type: ignore[dict-item]
    ("headers size", lambda q: q.produce(b"", headers={"a": "x" * 64 * KIB}), "headers have 65544 bytes; give at most 65536"),
    ("kind", lambda q: q.produce(b"", kind=1), "a kind is int; give a text"),  # type: ignore[arg-type]
    ("priority", lambda q: q.produce(b"", priority=10), "the priority is 10; give a whole number from 0 to 9"),
    ("at", lambda q: q.produce(b"", at=datetime(2026, 1, 1)), "at has no timezone; give one"),
    ("ttl", lambda q: q.produce(b"", ttl=0), "the ttl is 0; give more, or None for the queue's own"),
    ("window", lambda q: q.produce(b"", dedup_window=5), "an item has a dedup_window and no dedup id; give it one, or leave"),
    ("windows", lambda q: q.produce_many([NewItem(b"", dedup="d"), NewItem(b"", dedup_window=5)]), "an item has a dedup_window and no"),
    ("no window", lambda q: q.produce(b"", dedup="d", dedup_window=0), "the dedup_window is 0; give more, or None for the queue's own"),
    ("empty dedup", lambda q: q.produce(b"", dedup=""), "the dedup id is empty; give a text, or none at all"),
    ("empty dedups", lambda q: q.produce_many([b"", NewItem(b"", dedup=b"")]), "item 1: the dedup id is empty; give a text, or none"),
    ("dedup", lambda q: q.produce(b"", dedup="d" * 1025), "the dedup id has 1025 bytes; give at most 1024"),
    ("request id type", lambda q: q.produce(b"", request_id=1), "the request id is int; give str or bytes"),  # type: ignore[arg-type]
    ("request id size", lambda q: q.produce(b"", request_id="r" * 1025), "the request id has 1025 bytes; give 1 to 1024"),
    ("request id empty", lambda q: q.produce(b"", request_id=""), "the request id has 0 bytes; give 1 to 1024"),
    ("timeout", lambda q: q.produce(b"", timeout=901), "timeout is 901; give 0 to 900 seconds"),
    ("timeout below", lambda q: q.produce(b"", timeout=-1), "timeout is -1; give 0 to 900 seconds"),
    ("timeout type", lambda q: q.produce(b"", timeout="1"), "timeout is str; give seconds or a timedelta"),  # type: ignore[arg-type]
    ("items", lambda q: q.produce_many(b"abc"), "the items are bytes; give a list of them"),
    ("item", lambda q: q.produce_many([b"1", None]), "item 1: the payload is NoneType"),  # type: ignore[list-item]
    ("too many", lambda q: q.produce_many([b""] * 10_001), "the batch has 10001 items; give 1 to 10000"),
    ("too large", lambda q: q.produce_many([b"x" * (16 * MIB)] * 5), "the batch has 83886080 payload bytes; give at most 67108864"),
    ("its queue", lambda q: q.produce_many([NewItem(b"", queue="q")]), "item 0: the queue is 'q', but only a follow-up"),
    ("no table", lambda q: q.produce_arrow([1]), "the items are list; give a pyarrow Table or RecordBatch"),
    ("column", lambda q: q.produce_arrow(pa.table({"a": [1]})), "the column 'a' is not known; drop it"),
]


@pytest.mark.parametrize(("call", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments_are_refused_and_nothing_is_stored(queue: Queue, call: Callable[[Queue], object], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(queue)
    assert str(caught.value).startswith(sentence)
    assert "; " in str(caught.value)
    assert queue.stats().produced == 0
