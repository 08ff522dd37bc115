"""The best item of the whole queue is leased first, whatever partition it lies in."""

import random
from typing import Any

import pytest

from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, LeasedItems, QueueUnderTest, keys_at


def spread(queue: QueueUnderTest, partitions: int, name: str, each: int = 1, **options: Any) -> list[str]:
    """Items of different keys in every partition; each says when it was produced."""
    made: list[str] = []
    for partition in range(partitions):
        keys = keys_at(queue, partition, each, prefix=f"{name}-{partition}")
        made += [f"{name} of {key}" for key in keys]
        queue.produce(*made[-each:], keys=keys, **options)
    return made


def rounds(texts: list[str]) -> list[str]:
    """By which `spread` each item was produced, in the order given."""
    return [text.partition(" ")[0] for text in texts]


def partitions_of(held: LeasedItems) -> list[int]:
    return [one.partition for one in held.parts_granted]


# -- priority -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [2, 16, 64])
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_an_urgent_item_is_the_next_leased(broker: BrokerUnderTest, partitions: int, keyed: bool) -> None:
    queue = broker.create(partitions=partitions)
    if keyed:
        spread(queue, partitions, "patient", 5, priority=9)
    else:
        for number in range(partitions):
            queue.produce(*[f"patient {number}"] * 5, priority=9)
    queue.lease(1)  # so that the urgent item does not come to where the next lease would begin anyway
    queue.produce("urgent", priority=0, **({"key": "any"} if keyed else {}))
    assert queue.lease(1).texts == ["urgent"]
    queue.produce("urgent again", priority=4)
    assert queue.lease(10).texts[0] == "urgent again"


def test_a_batch_takes_all_that_is_urgent_before_anything_else(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=16)
    spread(queue, 16, "patient", 4, priority=6)
    urgent = spread(queue, 16, "urgent", 2, priority=2)
    held = queue.lease(40)
    assert sorted(held.texts[:32]) == sorted(urgent)
    assert rounds(held.texts[32:]) == ["patient"] * 8


def test_an_urgent_item_comes_next_while_others_wait_in_line(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    spread(queue, 4, "patient", 3, priority=8)
    queue.pause(lease=True)
    line = [queue.submit_lease(1) for _ in range(3)]
    queue.produce("urgent", priority=0)
    queue.pause(lease=False)
    broker.turn()
    assert line[0].leased.texts == ["urgent"]
    assert [rounds(asked.leased.texts) for asked in line[1:]] == [["patient"]] * 2


def test_waiting_lifts_an_item_over_newer_ones_of_other_partitions(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2, priority_aging=10 * SECOND)
    one, other = keys_at(queue, 0)[0], keys_at(queue, 1)[0]
    queue.produce("old", key=one, priority=7)
    broker.advance(19)
    queue.produce("new", key=other, priority=5)
    assert queue.lease(1).texts == ["new"], "the other is lifted to 6"
    queue.lease(1).complete()

    queue.produce("old", key=keys_at(queue, 0, 2)[1], priority=7)
    broker.advance(21)
    queue.produce("new", key=keys_at(queue, 1, 2)[1], priority=5)
    assert queue.lease(1).texts == ["old"], "it is lifted to 5 too, and older"


def test_without_aging_a_lower_priority_waits_however_old_it_is(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2, priority_aging=0)
    queue.produce("old", key=keys_at(queue, 0)[0], priority=6)
    broker.advance(10_000)
    queue.produce("new", key=keys_at(queue, 1)[0], priority=5)
    assert queue.lease(2).texts == ["new", "old"]


# -- age ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [2, 16, 64])
@pytest.mark.parametrize("want", [1, 7, 100])
def test_old_items_are_leased_before_newer_ones_of_other_partitions(broker: BrokerUnderTest, partitions: int, want: int) -> None:
    queue = broker.create(partitions=partitions)
    expected: list[str] = []
    for number in range(4):
        expected += rounds(spread(queue, partitions, str(number), 2 if number == 1 else 1))
        broker.advance(2.1)
    assert rounds(queue.drain(want)) == expected


def test_old_items_are_leased_first_wherever_unkeyed_ones_were_put(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=8)
    rng = random.Random(5)
    made: list[str] = []
    for number in range(60):
        texts = [f"{number}"] * rng.randint(1, 4)
        made += texts
        queue.produce(*texts)
        broker.advance(2.1)
        if number % 3 == 0:
            held = queue.lease(rng.randint(1, 3))
            assert held.texts == made[: len(held)]
            del made[: held.complete()]
    assert queue.drain(5) == made


@pytest.mark.parametrize("widths", [(1, 4), (4, 2), (2, 8)], ids=str)
def test_after_a_resize_the_backlog_still_goes_first(broker: BrokerUnderTest, widths: tuple[int, int]) -> None:
    """New partitions count their time from when they were made."""
    old, new = widths
    queue = broker.create(partitions=old)
    for number in range(20):
        queue.produce(*[f"backlog {number}"] * 5)
    broker.advance(5)
    queue.resize(new)
    queue.produce(*["newer"] * 30)
    queue.produce(*["newer"] * 30)
    held = queue.lease(40)
    assert rounds(held.texts) == ["backlog"] * 40
    assert rounds(queue.drain(25)) == ["backlog"] * 60 + ["newer"] * 60


@pytest.mark.parametrize("how", ["restart", "kill", "reboot"])
def test_ages_are_compared_and_not_instants(broker: BrokerUnderTest, how: str) -> None:
    """Partitions whose elapsed time stands at different points, before and after they are opened anew."""
    queue = broker.create(partitions=1)
    queue.produce("first")
    broker.advance(1_000)
    queue.resize(4)
    keys = [keys_at(queue, partition)[0] for partition in range(4)]
    for partition in (2, 0, 3, 1):
        queue.produce(f"of partition {partition}", key=keys[partition])
        broker.advance(3)
    if how == "reboot":
        broker.clock.reboot()
    getattr(broker, "restart" if how == "restart" else "kill")()
    queue.open_all()
    shifts = {handle.state.clock_shift for handle in queue.loop.engine.usable()}
    assert len(shifts) > 1, "their times differ"
    queue.produce("last")
    assert queue.drain(2) == ["first", "of partition 2", "of partition 0", "of partition 3", "of partition 1", "last"]


def test_the_age_of_an_item_counts_from_when_it_became_ready(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce("retried", "kept")
    held = queue.lease(1)
    queue.produce("scheduled", at=broker.after(6))
    broker.advance(3)
    queue.produce("in between")
    broker.advance(3)
    held.retry()
    broker.advance(3)
    queue.produce("last")
    served = queue.drain(1)
    assert served[:2] == ["kept", "in between"] and served[-1] == "last"
    assert sorted(served[2:4]) == ["retried", "scheduled"]


def test_a_keyed_item_that_came_back_does_not_hold_up_older_ones_behind_it(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    here = keys_at(queue, 0, 3)
    queue.produce("returns", "old", "older than the other", keys=here)
    held = queue.lease(1)
    broker.advance(10)
    queue.produce("young", key=keys_at(queue, 1)[0])
    broker.advance(10)
    held.retry()
    assert queue.drain(1) == ["returns", "old", "older than the other", "young"]


# -- few partitions -------------------------------------------------------------------------------------------


def test_a_batch_stays_in_few_partitions_while_their_heads_are_of_about_the_same_age(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=8)
    for _ in range(8):
        for _ in range(3):
            queue.produce(*["item"] * 10)
        broker.advance(0.1)
    assert [one.ready for one in queue.stats().partitions] == [30] * 8
    seen = []
    while held := queue.lease(30):
        seen.append(set(partitions_of(held)))
        held.complete()
    assert sorted(seen, key=min) == [{number} for number in range(8)]


@pytest.mark.parametrize(("later", "order"), [(1.5, ["first", "second", "other"]), (1.500_001, ["first", "other", "second"])])
def test_a_lease_stays_where_it_is_for_what_is_up_to_a_second_younger(broker: BrokerUnderTest, later: float, order: list[str]) -> None:
    queue = broker.create(partitions=2)
    here, there = keys_at(queue, 0, 2), keys_at(queue, 1)
    queue.produce("first", key=here[0])
    broker.advance(0.5)
    queue.produce("other", key=there[0])
    broker.advance(later - 0.5)
    queue.produce("second", key=here[1])
    assert queue.lease(3).texts == order


def test_a_lease_begins_with_what_is_oldest_to_a_second(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    for partition in (1, 2, 0):
        queue.produce(f"{partition}", key=keys_at(queue, partition)[0])
        broker.advance(2)
    assert [queue.lease(1).texts for _ in range(3)] == [["1"], ["2"], ["0"]]


def test_small_leases_go_round_among_partitions_of_about_the_same_age(broker: BrokerUnderTest) -> None:
    """Whoever takes little at a time meets every partition: of those that are about equally old the one not used for
    longest is next.
    """
    queue = broker.create(partitions=4)
    for partition in range(4):
        key = keys_at(queue, partition)[0]
        queue.produce(*[f"{partition}"] * 6, keys=[f"{key}"] * 6)
    assert [queue.lease(1).texts for _ in range(4)] == [["0"], ["1"], ["2"], ["3"]]


# -- what cannot be leased ------------------------------------------------------------------------------------


def test_items_behind_a_held_key_do_not_keep_others_waiting(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    (hot,), there = keys_at(queue, 0), keys_at(queue, 1, 20)
    queue.produce(*[f"hot {number}" for number in range(4)], key=hot, priority=1)
    broker.advance(5)
    queue.produce(*[f"cold {number}" for number in range(20)], keys=there)
    held = queue.lease(1)
    assert held.texts == ["hot 0"]
    assert rounds(queue.lease(10).texts) == ["cold"] * 10
    held.complete()
    assert queue.lease(2).texts[0] == "hot 1", "a key that was released competes with its head"


def test_a_paused_partition_is_passed_by(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    spread(queue, 3, "old")
    broker.advance(5)
    spread(queue, 3, "new")
    queue.pause(lease=True, partition=1)
    held = queue.lease(10)
    assert rounds(held.texts) == ["old"] * 2 + ["new"] * 2
    assert set(partitions_of(held)) == {0, 2}
    queue.pause(lease=False, partition=1)
    assert rounds(queue.drain()) == ["old", "new"]


# -- request ids ----------------------------------------------------------------------------------------------


def test_a_request_with_an_id_gets_the_best_first_and_the_same_again(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    for number in range(6):
        queue.produce(f"{number}", key=keys_at(queue, number % 2, number + 1)[number])
        broker.advance(3)
    first = queue.lease(5, request=b"once")
    assert first.texts == ["0", "1", "2", "3", "4"]
    assert partitions_of(first) == [0, 1, 0, 1, 0], "a partition may be asked several times"
    again = queue.lease(5, request=b"once")
    assert {part.lease for part in again.parts} == {part.lease for part in first.parts}
    assert sorted(again.texts) == first.texts
    broker.kill()
    assert sorted(queue.lease(5, request=b"once").texts) == first.texts
    assert queue.lease(5, request=b"another").texts == ["5"]
    assert first.complete() == 5
    assert queue.lease(5, request=b"once").texts == []
