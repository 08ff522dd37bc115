"""Who gets what: shares among those who wait, one consumer over many partitions, items over partitions."""

import random
from typing import Any

import pytest

from penstock.loop.lease import shares
from penstock.loop.requests import LeaseRequest, ProduceRequest
from penstock.words.errors import InvalidRequest
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, SubmittedRequest, batch_of, keys_at
from tests.partition_under_test import slot


def words(number: int, prefix: str = "item") -> list[str]:
    return [f"{prefix}-{index}" for index in range(number)]


def line_up(queue: QueueUnderTest, *wants: int) -> list[SubmittedRequest]:
    """Leases that wait, in this order."""
    return [queue.submit_lease(want) for want in wants]


def sizes(line: list[SubmittedRequest]) -> list[int]:
    return [len(asked.leased) if asked.done else 0 for asked in line]


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_items_are_dealt_round_robin_to_waiting_leases(broker: BrokerUnderTest, partitions: int) -> None:
    queue = broker.create(partitions=partitions)
    line = line_up(queue, 20, 6, 1)
    for batch in (words(10, "a"), words(9, "b"), words(4, "c")):  # three callers, one turn
        queue.submit(ProduceRequest(batch_of(*batch)))
    broker.turn()
    assert sizes(line) == [16, 6, 1]
    texts = [text for asked in line for text in asked.leased.texts]
    assert sorted(texts) == sorted(words(10, "a") + words(9, "b") + words(4, "c"))


@pytest.mark.parametrize("partitions", [1, 3])
def test_waiting_leases_get_exactly_what_they_want_when_there_is_enough(broker: BrokerUnderTest, partitions: int) -> None:
    queue = broker.create(partitions=partitions)
    line = line_up(queue, 5, 10, 20)
    for number in range(5):
        queue.submit(ProduceRequest(batch_of(*words(8, f"{number}"))))
    broker.turn()
    assert sizes(line) == [5, 10, 20]
    assert queue.counts() == {"ready": 5, "leased": 35}


def test_five_waiting_leases_share_ten_items_of_five_partitions(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=5)
    line = line_up(queue, *[10] * 5)
    for number in range(5):
        queue.submit(ProduceRequest(batch_of(*words(2, f"{number}"))))
    broker.turn()
    assert sizes(line) == [2] * 5
    assert [one.produced for one in queue.stats().partitions] == [2] * 5


def test_shares_are_fair_for_any_wants_and_partitions(broker: BrokerUnderTest) -> None:
    rng = random.Random(3)
    for number in range(60):
        queue = broker.create(f"q{number}", partitions=rng.randint(1, 4))
        wants = [rng.choice((1, 2, 3, 7, 30)) for _ in range(rng.randint(1, 6))]
        line = line_up(queue, *wants)
        there = 0
        for batch in range(rng.randint(1, 4)):
            size = rng.randint(1, 15)
            queue.submit(ProduceRequest(batch_of(*words(size, str(batch)))))
            there += size
        broker.turn()
        assert sizes(line) == shares(wants, there), f"{wants} with {there} items"


def test_items_of_few_keys_are_shared_too(broker: BrokerUnderTest) -> None:
    """Forty items are ready, but only eight can be leased: one of each key."""
    queue = broker.create(partitions=3)
    line = line_up(queue, 10, 10, 10, 10)
    keys = words(8, "key")
    queue.produce(*words(40), keys=[keys[index % 8] for index in range(40)])
    assert sizes(line) == [2, 2, 2, 2]
    given = [key for asked in line for key in asked.leased.keys]
    assert sorted(given) == sorted(keys)
    assert queue.counts() == {"ready": 32, "leased": 8}


def test_too_few_items_go_to_the_leases_that_came_first(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    line = line_up(queue, 4, 4, 4)
    queue.produce("only")
    assert sizes(line) == [1, 0, 0]
    queue.produce("second", "third")
    assert sizes(line) == [1, 1, 1]
    assert [asked.leased.texts for asked in line] == [["only"], ["second"], ["third"]]


def test_an_answer_never_waits_to_fill_up(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    (asked,) = line_up(queue, 100)
    queue.produce("one")
    assert asked.leased.texts == ["one"]


def test_one_answer_may_mix_partitions(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    for number in range(3):
        queue.produce(f"item-{number}")
    held = queue.lease(3)
    assert sorted(one.partition for one in held.parts_granted) == [0, 1, 2]
    assert sorted(held.texts) == words(3)
    assert held.complete() == 3


def test_an_empty_queue_answers_at_the_deadline_and_not_before(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    asked = queue.submit_lease(wait=5)
    broker.advance_in_steps(4.999_999)
    assert not asked.done
    broker.advance_in_steps(0.000_001)
    assert asked.leased.texts == []
    assert queue.stats().waiting_consumers == 0
    assert queue.lease().texts == [], "without a wait it answers at once"


def test_each_waiting_lease_has_its_own_deadline(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    line = [queue.submit_lease(wait=wait) for wait in (3, 1, 2)]
    for done in ([False, True, False], [False, True, True], [True, True, True]):
        broker.advance_in_steps(1)
        assert [asked.done for asked in line] == done
    queue.produce("for nobody")
    assert queue.counts() == {"ready": 1}


def test_one_consumer_drains_ten_partitions(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=10)
    for number in range(50):
        queue.produce(*words(2, f"{number}"))
    assert [one.ready for one in queue.stats().partitions] == [10] * 10
    leased: list[str] = []
    partitions: set[int] = set()
    while held := queue.lease(7):
        assert len(held) == 7 or len(leased) + len(held) == 100, "what one partition lacks comes from the next"
        partitions |= {one.partition for one in held.parts_granted}
        leased += held.texts
        held.complete()
    assert sorted(leased) == sorted(word for number in range(50) for word in words(2, f"{number}"))
    assert partitions == set(range(10))


def test_no_partition_is_left_behind(broker: BrokerUnderTest) -> None:
    """A consumer that takes little at a time comes round to every partition, though the first never runs empty."""
    queue = broker.create(partitions=5)
    for number in range(5):
        queue.produce(*words(40, f"{number}"))
    seen = [queue.lease(1).parts_granted[0].partition for _ in range(10)]
    assert sorted(seen) == sorted([0, 1, 2, 3, 4] * 2)


def test_unkeyed_batches_go_where_there_is_least(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    for number in range(5):
        queue.produce(*words(10, f"{number}"))
    assert [one.ready for one in queue.stats().partitions] == [30, 20]


def test_a_batch_without_keys_stays_together_and_in_order(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    found = queue.produce(*words(9))
    assert len({item.partition("-")[0] for item in found}) == 1
    assert queue.drain(4) == words(9)


def test_ten_then_the_next_ten_of_ten_thousand(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce(*words(10_000))
    first, second = queue.lease(10), queue.lease(10)
    assert first.texts == words(10_000)[:10]
    assert second.texts == words(10_000)[10:20]


def test_a_lease_repeated_with_its_id_answers_the_same(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    for number in range(4):
        queue.produce(*words(2, f"{number}"))
    first = queue.lease(5, request=b"once")
    again = queue.lease(5, request=b"once")
    assert sorted(again.ids) == sorted(first.ids) and len(first) == 5
    assert {part.lease for part in again.parts} == {part.lease for part in first.parts}
    other = queue.lease(5, request=b"another")
    assert len(other) == 3 and not set(other.ids) & set(first.ids)
    assert first.complete() == 5


def test_a_lease_with_a_request_id_gets_its_fair_share(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    line = [queue.submit_lease(4), queue.submit_lease(4, request=b"named"), queue.submit_lease(4)]
    for number in range(3):
        queue.submit(ProduceRequest(batch_of(*words(2, f"{number}"))))
    broker.turn()
    assert sizes(line) == [2, 2, 2]
    assert sorted(queue.lease(4, request=b"named").ids) == sorted(line[1].leased.ids)


def test_several_items_of_a_key_may_be_asked_for(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce(*words(5), key="k")
    queue.produce("other", key=keys_at(queue, 1 - queue.loop.engine.map.owners[slot("k")])[0])
    held = queue.lease(10, per_key=3)
    assert sorted(held.texts) == sorted(["item-0", "item-1", "item-2", "other"])
    held.complete()
    assert queue.drain() == ["item-3", "item-4"]


@pytest.mark.parametrize(
    "wrong",
    [{"want": 0}, {"want": -1}, {"want": 10_001}, {"timeout": 500}, {"per_key": 0}, {"consumer": None}, {"request": "text"}],
    ids=str,
)
def test_an_invalid_lease_is_refused(broker: BrokerUnderTest, wrong: dict[str, Any]) -> None:
    queue = broker.create()
    queue.produce("there")
    with pytest.raises(InvalidRequest, match="; give "):
        queue.run(LeaseRequest(**{"want": 1, **wrong}))
    assert queue.counts() == {"ready": 1}
