"""The history of items through all their queues, from an owner and from a snapshot."""

from datetime import timedelta

import pytest

from penstock import NewItem
from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.snapshot import Snapshot
from penstock.errors import InvalidRequest
from penstock.operations import ExplainItem, FindQueue, ReadHistory
from penstock.reports import ItemEvent
from penstock.words.clock import SECOND
from penstock.words.ids import parse_id
from tests.api.both_apis import run_all_turns
from tests.broker.directory_broker import DirectoryBroker, fill


def history_of(source: EmbeddedBroker | Snapshot, queue: str, name: str) -> list[ItemEvent]:
    partition, offset = parse_id(name)
    incarnation = source.call(FindQueue(name=queue)).incarnation
    return source.call(ReadHistory(queue=incarnation, partition=partition, offset=offset))


def told(found: list[ItemEvent]) -> list[tuple[str, str, str]]:
    return [(event.queue, event.id, event.event) for event in found]


def test_an_item_is_followed_through_queues(directory_broker: DirectoryBroker) -> None:
    directory_broker.broker.create_queue("dead")
    orders = directory_broker.broker.create_queue("orders", dead_queue="dead")
    fill(orders, 3)
    orders.lease(3, consumer="c")[1].bury("bad")
    run_all_turns(directory_broker.broker)
    directory_broker.broker.redrive("dead", to="orders")
    run_all_turns(directory_broker.broker)
    orders.lease(1, consumer="d").complete()
    directory_broker.run_and_publish()
    wanted = [
        *[("orders", "0-1", event) for event in ("produced", "leased", "buried", "sent", "delivered")],
        *[("dead", "0-0", event) for event in ("produced", "sent", "delivered")],
        *[("orders", "0-3", event) for event in ("produced", "leased", "completed")],
    ]
    with directory_broker.open_snapshot() as seen:
        for source in (directory_broker.embedded, seen):
            for queue, name in (("orders", "0-1"), ("dead", "0-0"), ("orders", "0-3")):  # it answers to every id it had
                assert told(history_of(source, queue, name)) == wanted
        found = history_of(seen, "orders", "0-1")
        assert seen.call(ReadHistory(queue=directory_broker.incarnation("orders"), partition=0, offset=1)) == found
    assert [event.destination for event in found if event.destination] == ["dead/0", "dead/0-0", "orders/0", "orders/0-3"]
    assert [event.source for event in found if event.source] == ["orders/0", "dead/0"]
    buried = found[2]
    assert (buried.reason, buried.consumer, buried.attempt) == ("bad", "c", 1) and buried.at.tzinfo is not None


def test_an_item_whose_queue_is_gone_keeps_what_is_left_of_its_history(directory_broker: DirectoryBroker) -> None:
    directory_broker.broker.create_queue("a").produce(b"x")
    directory_broker.broker.create_queue("b")
    incarnation = directory_broker.incarnation("b")
    directory_broker.broker.redrive("a", to="b")
    run_all_turns(directory_broker.broker)
    directory_broker.broker.queue("b").lease(1)[0].complete()
    directory_broker.broker.queue("a").delete()
    directory_broker.run_and_publish()
    with directory_broker.open_snapshot() as seen:
        for source in (directory_broker.embedded, seen):
            found = history_of(source, "b", "0-0")
            assert told(found) == [("b", "0-0", "produced"), ("b", "0-0", "leased"), ("b", "0-0", "completed")]
            assert found[0].source.endswith("/0") and len(found[0].source) == 18  # nobody knows the name any more
            explained = source.call(ExplainItem(queue=incarnation, partition=0, offset=0))
            assert explained.state == "completed"


def test_an_item_that_went_to_a_deleted_queue(directory_broker: DirectoryBroker) -> None:
    directory_broker.broker.create_queue("a").produce(b"x")
    directory_broker.broker.create_queue("b")
    directory_broker.broker.redrive("a", to="b")
    run_all_turns(directory_broker.broker)
    directory_broker.broker.queue("b").delete()
    directory_broker.run_and_publish()
    with directory_broker.open_snapshot() as seen:
        for source in (directory_broker.embedded, seen):
            assert told(history_of(source, "a", "0-0")) == [("a", "0-0", event) for event in ("produced", "sent", "delivered")]
            assert (
                source.call(ExplainItem(queue=directory_broker.incarnation("a"), partition=0, offset=0)).why
                == "moved to a queue that was deleted"
            )


def test_a_resized_item_is_followed_to_its_new_partition(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders", partitions=1)
    names = queue.produce_many([NewItem(b"%d" % n, key=f"k{n}", at=directory_broker.clock.now() + timedelta(seconds=5)) for n in range(8)])
    queue.resize(4)
    directory_broker.clock.advance(5 * SECOND)
    run_all_turns(directory_broker.broker)
    queue.lease(8).complete()
    run_all_turns(directory_broker.broker)
    queue.lease(8).complete()
    directory_broker.run_and_publish()
    moved = 0
    with directory_broker.open_snapshot() as seen:
        for name in names:
            found = history_of(seen, "orders", name)
            assert found == history_of(directory_broker.embedded, "orders", name)
            assert told(found)[:2] == [("orders", name, "scheduled"), ("orders", name, "due")]
            assert found[-1].event == "completed"
            moved += found[-1].id != name
    assert moved


def test_events_of_a_partition(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("orders")
    fill(queue, 3)
    queue.lease(2).complete()
    incarnation = directory_broker.incarnation("orders")
    with directory_broker.open_snapshot() as seen:
        found = list(seen.events(incarnation, 0))
        assert [(event.event, event.offset) for event in found] == [
            *[("produced", offset) for offset in range(3)],
            *[(event, offset) for event in ("leased", "completed") for offset in range(2)],
        ]
        queue.produce(b"new")
        assert list(seen.events(incarnation, 0)) == found  # it stands still
        with pytest.raises(InvalidRequest, match=r"queue 'orders' has no partition 7; it has \[0\]"):
            list(seen.events(incarnation, 7))
        with pytest.raises(InvalidRequest, match="there is no item 0-3; "):
            seen.call(ReadHistory(queue=incarnation, partition=0, offset=3))
        with pytest.raises(InvalidRequest, match="has no partition 7"):
            seen.call(ReadHistory(queue=incarnation, partition=7, offset=0))
