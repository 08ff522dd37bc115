"""Finding, cancelling and rescheduling items that wait, with the sync and the async API."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import Broker, NewItem, Queue
from penstock.broker import queries
from penstock.errors import InvalidRequest
from penstock.words.values import timestamp
from tests.api.both_apis import BrokerOpener


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders", partitions=3)


def test_items_are_found_by_key_and_reference(queue: Queue) -> None:
    ids = queue.produce_many([NewItem(b"%d" % n, key=f"k{n % 2}", reference=f"r{n % 3}") for n in range(12)])
    assert {item.id for item in queue.find(key="k1")} == set(ids[1::2])
    assert {item.id for item in queue.find(reference="r2")} == set(ids[2::3])
    (first, second) = queue.find(key=b"k0", reference="r0")
    assert {first.id, second.id} == {ids[0], ids[6]} and (first.state, first.reference) == ("ready", "r0")
    assert queue.find(key="nobody") == [] and queue.find(key="nobody").after is None


def test_pages_continue_where_the_page_before_ended(queue: Queue) -> None:
    ids = queue.produce_many([NewItem(b"", key=f"k{n}", reference="same") for n in range(20)])
    found, after = [], None
    while True:
        page = queue.find(reference="same", limit=3, after=after)
        assert len(page) <= 3
        found += [item.id for item in page]
        after = page.after
        if after is None:
            break
    assert sorted(found) == sorted(ids) and len(found) == 20


def test_a_call_scans_a_bounded_number_of_items(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "FIND_ITEMS", 5)
    queue.produce_many([NewItem(b"", key="a") for _ in range(12)])
    last = queue.produce("needle", key="a", reference="needle")
    pages = [queue.find(reference="needle")]
    while pages[-1].after is not None:
        pages.append(queue.find(reference="needle", after=pages[-1].after))
    assert [[item.id for item in page] for page in pages] == [[], [], [last]]


def test_only_items_in_the_given_states_are_found(queue: Queue) -> None:
    first, second = queue.produce_many([NewItem(b"1", key="k"), NewItem(b"2", key="k")])
    queue.lease()
    assert [item.id for item in queue.find(key="k", state="leased")] == [first]
    assert [item.id for item in queue.find(key="k", state=("ready", "scheduled"))] == [second]


def test_what_is_found_can_be_cancelled(queue: Queue) -> None:
    queue.produce_many([NewItem(b"", key=f"k{n}", reference="order-17") for n in range(5)])
    (leased,) = queue.lease()
    changes = queue.cancel(*queue.find(reference="order-17"))
    assert sorted(change.outcome for change in changes) == ["cancelled"] * 4 + ["leased"]
    assert [change.id for change in changes if not change.done] == [leased.id]
    leased.complete()
    assert not queue.lease()
    assert (queue.stats().cancelled, queue.stats().completed) == (4, 1)
    assert [event.event for event in queue.history(changes[0].id)][-1] in ("cancelled", "completed")


def test_items_are_rescheduled_by_time_and_by_delay(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    first, second, third = (queue.produce(text) for text in ("first", "second", "third"))
    at = timestamp(opener.clock.read().wall) + timedelta(hours=1)
    assert queue.reschedule(first, at=at)[0].outcome == "rescheduled"
    assert queue.reschedule(second, delay=timedelta(minutes=30))[0].done
    assert [lease.item.value for lease in queue.lease(3)] == ["third"]
    assert queue.explain(second).ready_in_seconds == 1800
    assert [change.outcome for change in queue.reschedule(first, third, delay=0)] == ["rescheduled", "leased"]
    assert [lease.item.value for lease in queue.lease(3)] == ["first"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a time or a delay"),
        ({"at": datetime(2999, 1, 1, tzinfo=UTC), "delay": 1}, "either a time or a delay"),
        ({"delay": -1}, "delay is -1"),
    ],
)
def test_a_reschedule_needs_a_valid_time(queue: Queue, arguments: dict[str, Any], message: str) -> None:
    item = queue.produce("a")
    with pytest.raises(InvalidRequest, match=message):
        queue.reschedule(item, **arguments)
    assert queue.stats().ready == 1


def test_a_page_without_items_can_be_cancelled_and_rescheduled(queue: Queue) -> None:
    page = queue.find(reference="nobody's")
    assert queue.cancel(*page) == []
    assert queue.reschedule(*page, delay=60) == []
    with pytest.raises(InvalidRequest, match="either a time or a delay"):
        queue.reschedule(*page)


def test_bad_arguments_are_refused(queue: Queue) -> None:
    with pytest.raises(InvalidRequest, match="the number of items is 10001"):
        queue.cancel(*["0-0"] * 10_001)
    with pytest.raises(InvalidRequest, match="an item is given as list; give the items one by one"):
        queue.cancel(["0-0"])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is not the id of an item"):
        queue.cancel("nonsense")
    with pytest.raises(InvalidRequest, match="neither a key nor a reference"):
        queue.find()
    with pytest.raises(InvalidRequest, match="there is no state"):
        queue.find(key="k", state="waiting")
