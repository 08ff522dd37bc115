"""Who gets what: shares among those who wait, one consumer over many partitions, items over partitions."""

import random
from typing import Any

import pytest

from penstock.loop.lease import shares
from penstock.loop.requests import LeaseRequest, ProduceRequest
from penstock.words.errors import InvalidRequest
from tests.broker.broker_under_test import Asked, Desk, Rig, batch_of, keys_at
from tests.partition_under_test import slot


def words(number: int, prefix: str = "item") -> list[str]:
    return [f"{prefix}-{index}" for index in range(number)]


def line_up(desk: Desk, *wants: int) -> list[Asked]:
    """Leases that wait, in this order."""
    return [desk.waiter(want) for want in wants]


def sizes(line: list[Asked]) -> list[int]:
    return [len(asked.held) if asked.done else 0 for asked in line]


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_items_are_dealt_as_cards_are(broker: Rig, partitions: int) -> None:
    desk = broker.create(partitions=partitions)
    line = line_up(desk, 20, 6, 1)
    for batch in (words(10, "a"), words(9, "b"), words(4, "c")):  # three callers, one turn
        desk.submit(ProduceRequest(batch_of(*batch)))
    broker.turn()
    assert sizes(line) == [16, 6, 1]
    texts = [text for asked in line for text in asked.held.texts]
    assert sorted(texts) == sorted(words(10, "a") + words(9, "b") + words(4, "c"))


@pytest.mark.parametrize("partitions", [1, 3])
def test_those_who_wait_get_exactly_what_they_want_when_it_is_there(broker: Rig, partitions: int) -> None:
    desk = broker.create(partitions=partitions)
    line = line_up(desk, 5, 10, 20)
    for number in range(5):
        desk.submit(ProduceRequest(batch_of(*words(8, f"{number}"))))
    broker.turn()
    assert sizes(line) == [5, 10, 20]
    assert desk.counts() == {"ready": 5, "leased": 35}


def test_five_who_wait_share_ten_items_of_five_partitions(broker: Rig) -> None:
    desk = broker.create(partitions=5)
    line = line_up(desk, *[10] * 5)
    for number in range(5):
        desk.submit(ProduceRequest(batch_of(*words(2, f"{number}"))))
    broker.turn()
    assert sizes(line) == [2] * 5
    assert [one.produced for one in desk.stats().partitions] == [2] * 5


def test_shares_are_fair_whatever_is_wanted_and_wherever_it_lies(broker: Rig) -> None:
    rng = random.Random(3)
    for number in range(60):
        desk = broker.create(f"q{number}", partitions=rng.randint(1, 4))
        wants = [rng.choice((1, 2, 3, 7, 30)) for _ in range(rng.randint(1, 6))]
        line = line_up(desk, *wants)
        there = 0
        for batch in range(rng.randint(1, 4)):
            size = rng.randint(1, 15)
            desk.submit(ProduceRequest(batch_of(*words(size, str(batch)))))
            there += size
        broker.turn()
        assert sizes(line) == shares(wants, there), f"{wants} with {there} items"


def test_items_of_few_keys_are_shared_too(broker: Rig) -> None:
    """Forty items are ready, but only eight can be leased: one of each key."""
    desk = broker.create(partitions=3)
    line = line_up(desk, 10, 10, 10, 10)
    keys = words(8, "key")
    desk.produce(*words(40), keys=[keys[index % 8] for index in range(40)])
    assert sizes(line) == [2, 2, 2, 2]
    given = [key for asked in line for key in asked.held.keys]
    assert sorted(given) == sorted(keys)
    assert desk.counts() == {"ready": 32, "leased": 8}


def test_what_there_is_goes_round_to_those_who_came_first(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    line = line_up(desk, 4, 4, 4)
    desk.produce("only")
    assert sizes(line) == [1, 0, 0]
    desk.produce("second", "third")
    assert sizes(line) == [1, 1, 1]
    assert [asked.held.texts for asked in line] == [["only"], ["second"], ["third"]]


def test_an_answer_never_waits_to_fill_up(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    (asked,) = line_up(desk, 100)
    desk.produce("one")
    assert asked.held.texts == ["one"]


def test_one_answer_may_mix_partitions(broker: Rig) -> None:
    desk = broker.create(partitions=3)
    for number in range(3):
        desk.produce(f"item-{number}")
    held = desk.lease(3)
    assert sorted(one.partition for one in held.handed) == [0, 1, 2]
    assert sorted(held.texts) == words(3)
    assert held.complete() == 3


def test_an_empty_queue_answers_at_the_deadline_and_not_before(broker: Rig) -> None:
    desk = broker.create(partitions=4)
    asked = desk.waiter(wait=5)
    broker.pass_by(4.999_999)
    assert not asked.done
    broker.pass_by(0.000_001)
    assert asked.held.texts == []
    assert desk.stats().waiting_consumers == 0
    assert desk.lease().texts == [], "without a wait it answers at once"


def test_each_who_waits_has_its_own_deadline(broker: Rig) -> None:
    desk = broker.create()
    line = [desk.waiter(wait=wait) for wait in (3, 1, 2)]
    for done in ([False, True, False], [False, True, True], [True, True, True]):
        broker.pass_by(1)
        assert [asked.done for asked in line] == done
    desk.produce("for nobody")
    assert desk.counts() == {"ready": 1}


def test_one_consumer_drains_ten_partitions(broker: Rig) -> None:
    desk = broker.create(partitions=10)
    for number in range(50):
        desk.produce(*words(2, f"{number}"))
    assert [one.ready for one in desk.stats().partitions] == [10] * 10
    leased: list[str] = []
    partitions: set[int] = set()
    while held := desk.lease(7):
        assert len(held) == 7 or len(leased) + len(held) == 100, "what one partition lacks comes from the next"
        partitions |= {one.partition for one in held.handed}
        leased += held.texts
        held.complete()
    assert sorted(leased) == sorted(word for number in range(50) for word in words(2, f"{number}"))
    assert partitions == set(range(10))


def test_no_partition_is_left_behind(broker: Rig) -> None:
    """A consumer that takes little at a time comes round to every partition, though the first never runs empty."""
    desk = broker.create(partitions=5)
    for number in range(5):
        desk.produce(*words(40, f"{number}"))
    seen = [desk.lease(1).handed[0].partition for _ in range(10)]
    assert sorted(seen) == sorted([0, 1, 2, 3, 4] * 2)


def test_unkeyed_batches_go_where_there_is_least(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    for number in range(5):
        desk.produce(*words(10, f"{number}"))
    assert [one.ready for one in desk.stats().partitions] == [30, 20]


def test_a_batch_without_keys_stays_together_and_in_order(broker: Rig) -> None:
    desk = broker.create(partitions=4)
    found = desk.produce(*words(9))
    assert len({item.partition("-")[0] for item in found}) == 1
    assert desk.drain(4) == words(9)


def test_ten_then_the_next_ten_of_ten_thousand(broker: Rig) -> None:
    desk = broker.create()
    desk.produce(*words(10_000))
    first, second = desk.lease(10), desk.lease(10)
    assert first.texts == words(10_000)[:10]
    assert second.texts == words(10_000)[10:20]


def test_a_lease_repeated_with_its_id_answers_the_same(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    for number in range(4):
        desk.produce(*words(2, f"{number}"))
    first = desk.lease(5, request=b"once")
    again = desk.lease(5, request=b"once")
    assert sorted(again.ids) == sorted(first.ids) and len(first) == 5
    assert {part.lease for part in again.parts} == {part.lease for part in first.parts}
    other = desk.lease(5, request=b"another")
    assert len(other) == 3 and not set(other.ids) & set(first.ids)
    assert first.complete() == 5


def test_one_with_a_request_id_has_its_fair_share_among_others(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    line = [desk.waiter(4), desk.waiter(4, request=b"named"), desk.waiter(4)]
    for number in range(3):
        desk.submit(ProduceRequest(batch_of(*words(2, f"{number}"))))
    broker.turn()
    assert sizes(line) == [2, 2, 2]
    assert sorted(desk.lease(4, request=b"named").ids) == sorted(line[1].held.ids)


def test_several_items_of_a_key_may_be_asked_for(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    desk.produce(*words(5), key="k")
    desk.produce("other", key=keys_at(desk, 1 - desk.loop.turns.map.owners[slot("k")])[0])
    held = desk.lease(10, per_key=3)
    assert sorted(held.texts) == sorted(["item-0", "item-1", "item-2", "other"])
    held.complete()
    assert desk.drain() == ["item-3", "item-4"]


@pytest.mark.parametrize(
    "wrong",
    [{"want": 0}, {"want": -1}, {"want": 10_001}, {"timeout": 500}, {"per_key": 0}, {"consumer": None}, {"request": "text"}],
    ids=str,
)
def test_a_senseless_lease_is_refused(broker: Rig, wrong: dict[str, Any]) -> None:
    desk = broker.create()
    desk.produce("there")
    with pytest.raises(InvalidRequest, match="; give "):
        desk.run(LeaseRequest(**{"want": 1, **wrong}))
    assert desk.counts() == {"ready": 1}
