"""Queues of the settings, beside those of a broker."""

from collections.abc import Iterator
from typing import Any

import pytest

import penstock
from penstock.server.declared_queues import Comparison, DeclaredQueue, apply, compare, read_queues
from penstock.words.errors import InvalidRequest


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory://") as broker:
        yield broker


def declared(name: str, partitions: int | None = None, *, resize: bool = False, **options: Any) -> DeclaredQueue:
    return DeclaredQueue(name, partitions, options, resize)


def found(comparison: Comparison) -> list[str]:
    assert comparison.problems == []
    return [str(difference) for difference in comparison.differences]


def test_a_missing_queue_is_created_with_its_options(broker: penstock.Broker) -> None:
    wanted = [declared("orders", 3, lease_timeout=30, dead_queue="orders.dead"), declared("orders.dead")]
    comparison = compare(broker.home, wanted)
    assert found(comparison) == ["queue orders.dead: is created, with 1 partition", "queue orders: is created, with 3 partitions"]
    assert broker.queues() == []  # compare changes nothing
    apply(broker.home, comparison)
    info = broker.queue("orders").info()
    assert (info.partitions, info.lease_timeout, info.dead_queue) == (3, 30, "orders.dead")
    assert found(compare(broker.home, wanted)) == []


def test_what_is_not_declared_is_left_alone(broker: penstock.Broker) -> None:
    broker.create_queue("orders", partitions=2, max_attempts=3, ttl=60)
    broker.create_queue("mail")
    comparison = compare(broker.home, [declared("orders", max_attempts=5)])
    assert found(comparison) == ["queue orders: max_attempts 3 → 5"]
    apply(broker.home, comparison)
    info = broker.queue("orders").info()
    assert (info.partitions, info.max_attempts, info.ttl) == (2, 5, 60)


def test_the_text_of_differences(broker: penstock.Broker) -> None:
    broker.create_queue("orders.dead")
    broker.create_queue("orders", ttl=60, retention={"max_age": 60})
    options: dict[str, Any] = {
        "ttl": None,
        "lease_timeout": 90.5,
        "dead_queue": "orders.dead",
        "retention": {"max_age": 120, "max_segments": 4},
    }
    assert found(compare(broker.home, [declared("orders", **options)])) == [
        "queue orders: lease_timeout 60s → 90.5s, ttl 60s → none, dead_queue none → orders.dead, "
        "retention.max_age 60s → 120s, retention.max_segments 0 → 4"
    ]


def test_the_options_of_files_are_declared_as_text_and_compared(broker: penstock.Broker) -> None:
    table = {"sync_interval": "50ms", "segment_bytes": "8MiB", "segment_age": "1h", "compression": False, "compression_level": 3}
    queues, problems = read_queues({"orders": {**table, "compression_min_bytes": "1KiB", "durability": "interval"}})
    assert problems == []
    apply(broker.home, compare(broker.home, queues))
    assert broker.queue("orders").info().segment_bytes == 8 << 20
    assert found(compare(broker.home, queues)) == []
    queues, _ = read_queues({"orders": {"sync_interval": "none", "segment_age": "2h", "compression": "none"}})
    changes = "sync_interval 0.05s → none, segment_age 3600s → 7200s, compression off → none"
    assert found(compare(broker.home, queues)) == [f"queue orders: {changes}"]


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_queue_is_resized_if_its_table_says_so(broker: penstock.Broker, partitions: int) -> None:
    broker.create_queue("orders", partitions=2)
    comparison = compare(broker.home, [declared("orders", partitions, resize=True, max_attempts=5)])
    assert found(comparison) == ["queue orders: max_attempts 10 → 5", f"queue orders: 2 partitions → {partitions}"]
    apply(broker.home, comparison)
    info = broker.queue("orders").info()
    assert (info.partitions, info.max_attempts) == (partitions, 5)


@pytest.mark.parametrize("partitions", [2, 8])
def test_a_queue_keeps_its_partitions(broker: penstock.Broker, partitions: int, caplog: pytest.LogCaptureFixture) -> None:
    broker.create_queue("orders", partitions=4)
    comparison = compare(broker.home, [declared("orders", partitions)])
    assert [difference.change for difference in comparison.differences] == ["keep"]
    caplog.clear()
    apply(broker.home, comparison)
    assert broker.queue("orders").info().partitions == 4
    (said,) = [record.getMessage() for record in caplog.records]
    advice = f"to change it: resize = true in its table, or: penstock queue resize orders {partitions}"
    assert said == f"queue orders: 4 partitions → {partitions} is left as it is; {advice}"


def test_the_entry_resize_of_a_table() -> None:
    queues, problems = read_queues({"a": {"partitions": 2, "resize": True}, "b": {"resize": True}, "c": {"resize": 1, "partitions": 2}})
    assert queues == [declared("a", 2, resize=True)]
    assert problems == [
        "queues.b: resize is true, and partitions is not given; give the number of partitions",
        "queues.c: resize is int; give True or False",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dead_queue": "nowhere"}, "queues.orders: there is no queue 'nowhere' to be its dead queue; declare it too"),
        ({"dead_queue": "orders"}, "queues.orders: it cannot be its own dead queue; name another"),
        ({"dead_queue": "mail"}, "queues.orders: queue 'mail' has a dead queue of its own, so it cannot be one; choose another"),
        ({"durability": "os"}, "queues.orders: durability is os, and that of the queue, none, cannot be changed; leave it out"),
    ],
)
def test_what_cannot_be_made_is_a_problem(broker: penstock.Broker, options: dict[str, Any], said: str) -> None:
    broker.create_queue("mail.dead")
    broker.create_queue("mail", dead_queue="mail.dead")
    broker.create_queue("orders")
    comparison = compare(broker.home, [declared("orders", **options)])
    (problem,) = comparison.problems
    assert problem.startswith(said)


def test_a_dead_queue_may_change_its_role(broker: penstock.Broker) -> None:
    """mail gives up its dead queue and becomes that of orders, in one start."""
    broker.create_queue("mail.dead")
    broker.create_queue("mail", dead_queue="mail.dead")
    wanted = [declared("orders", dead_queue="mail"), declared("mail", dead_queue=None)]
    apply(broker.home, compare(broker.home, wanted))
    assert (broker.queue("orders").info().dead_queue, broker.queue("mail").info().dead_queue) == ("mail", None)


def test_a_broker_that_does_not_exist_has_no_queues() -> None:
    comparison = compare(None, [declared("orders", dead_queue="gone")])
    assert [difference.change for difference in comparison.differences] == ["create"]
    assert comparison.problems == ["queues.orders: there is no queue 'gone' to be its dead queue; declare it too"]


def test_a_change_that_is_refused_for_good_is_an_error(broker: penstock.Broker) -> None:
    broker.create_queue("orders")
    broker.create_queue("orders.dead")
    comparison = compare(broker.home, [declared("orders", dead_queue="orders.dead")])
    broker.delete_queue("orders.dead")
    with pytest.raises(penstock.errors.QueueNotFound):
        apply(broker.home, comparison)


def test_wrong_options_are_refused_before_anything_is_compared(broker: penstock.Broker) -> None:
    with pytest.raises(InvalidRequest, match="lease_timeout"):
        compare(broker.home, [declared("orders", lease_timeout=-1)])
