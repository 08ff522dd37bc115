"""The buffers of leased items: shares of queues, and limits per partition."""

from collections import Counter

import pytest

import penstock
from penstock import Broker
from penstock.api.items import ItemSource, items_of
from penstock.operations import LeaseItems, SettleItems
from penstock.rules.commands import Settled
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import SECOND
from penstock.words.errors import Refused
from penstock.worker.buffer import LeasedItem, PlainBuffer, SharedBuffer, SourceQueue, WorkerLease


def source(broker: Broker, name: str = "orders", partitions: int = 1) -> SourceQueue:
    return SourceQueue(broker.create_queue(name, partitions=partitions))


def pairs(at: SourceQueue, *counts: int, first: int = 0) -> list[LeasedItem]:
    """Items leased from a queue, `counts` from its partitions, with ascending numbers as payloads."""
    queue = at.queue
    for count in counts:  # each call goes to the partition with the fewest items
        queue.produce_many([b"%d" % number for number in range(first, first + count)])
        first += count
    handed = at.lease(LeaseItems(queue=at.incarnation, count=1_000))
    return [
        (lease, item)
        for one in sorted(handed)
        for lease in [WorkerLease(at, None, one, 0)]
        for part in one.items
        for item in items_of(ItemSource(at.name), one.partition, part.offsets, *part[1:], {})
    ]


def numbers(found: list[LeasedItem]) -> list[int]:
    return [int(item.payload) for _, item in found]


def test_one_queue_is_first_in_first_out(broker: Broker) -> None:
    orders, buffer = source(broker), PlainBuffer()
    buffer.put(orders, pairs(orders, 5))
    assert numbers([buffer.take(), buffer.take()]) == [0, 1]
    buffer.put_back(pairs(orders, 2, first=10))
    assert numbers(buffer.take_many(3)) == [10, 11, 2]
    assert numbers(buffer.take_many(9)) == [3, 4]
    assert not buffer.has_next
    with pytest.raises(IndexError):
        buffer.take_many(1)


@pytest.mark.parametrize("several", [False, True])
def test_remove_takes_out_the_items_of_a_lost_lease(broker: Broker, several: bool) -> None:
    orders = source(broker)
    buffer: PlainBuffer | SharedBuffer = SharedBuffer({orders: 1}, 0) if several else PlainBuffer()
    lost, kept = pairs(orders, 3), pairs(orders, 3, first=3)
    buffer.put(orders, lost)
    buffer.put(orders, kept)
    assert buffer.remove(lost[0][0]) == lost
    assert numbers(buffer.clear()) == [3, 4, 5]
    assert len(buffer) == 0


def test_handlers_are_shared_by_weight_while_all_queues_have_items(broker: Broker) -> None:
    orders, mail = source(broker), source(broker, "mail")
    buffer = SharedBuffer({orders: 3, mail: 1}, 0)
    buffer.put(orders, pairs(orders, 100))
    buffer.put(mail, pairs(mail, 100))
    taken = [buffer.take() for _ in range(16)]
    assert Counter(lease.source for lease, _ in taken) == {orders: 12, mail: 4}
    assert (buffer.in_handlers(orders), buffer.count(orders), buffer.count(mail), len(buffer)) == (12, 88, 96, 184)


def test_a_free_handler_goes_to_the_queue_below_its_share(broker: Broker) -> None:
    orders, mail = source(broker), source(broker, "mail")
    buffer = SharedBuffer({orders: 3, mail: 1}, 0)
    buffer.put(orders, pairs(orders, 100))
    taken = [buffer.take() for _ in range(16)]  # mail has no items, so orders get all handlers
    buffer.put(mail, pairs(mail, 100))
    for pair in taken[:4]:
        buffer.handler_ended(pair)
    assert {buffer.take()[0].source for _ in range(4)} == {mail}
    buffer.handler_ended(taken[5])
    assert buffer.take()[0].source is orders


def test_quick_items_are_served_by_weight_too(broker: Broker) -> None:
    orders, mail = source(broker), source(broker, "mail")
    buffer = SharedBuffer({orders: 3, mail: 1}, 0)
    buffer.put(orders, pairs(orders, 1_000))
    served: list[SourceQueue] = []
    for turn in range(500):
        if turn == 100:
            buffer.put(mail, pairs(mail, 1_000))  # an idle queue does not make up for the items it did not have
        pair = buffer.take()
        served.append(pair[0].source)
        buffer.handler_ended(pair)
    assert set(served[:100]) == {orders}
    assert Counter(served[100:]) == {orders: 300, mail: 100}


def test_a_partition_occupies_no_more_handlers_than_its_limit(broker: Broker) -> None:
    orders = source(broker, partitions=2)
    buffer = SharedBuffer({orders: 1}, 2)
    buffer.put(orders, pairs(orders, 5, 3))
    taken = buffer.take_many(10)
    assert numbers(taken) == [0, 5, 1, 6]
    assert not buffer.has_next and len(buffer) == 4
    with pytest.raises(IndexError):
        buffer.take()
    buffer.handler_ended(taken[1])
    assert buffer.has_next and numbers([buffer.take()]) == [7]
    buffer.put_back([taken[0]])
    assert numbers([buffer.take()]) == [0]


def test_items_put_back_come_first_and_are_not_counted(broker: Broker) -> None:
    orders, mail = source(broker), source(broker, "mail")
    buffer = SharedBuffer({orders: 1, mail: 1}, 0)
    buffer.put(orders, pairs(orders, 4))
    found = buffer.take_many(2)
    buffer.put_back(found)
    assert (buffer.in_handlers(orders), buffer.count(orders)) == (0, 4)
    assert numbers(buffer.clear()) == [0, 1, 2, 3]


class DistantQueue(SourceQueue):
    """A queue that is hard to reach: answers to extensions take so many seconds (the last of these for all later ones),
    and others do not get through.
    """

    def __init__(self, queue: penstock.Queue, clock: MicrosecondClock, *seconds: float) -> None:
        super().__init__(queue)
        self._clock, self._seconds = clock, [*seconds]

    def settle(self, operation: SettleItems) -> list[Settled | Refused]:
        for part in operation.parts:
            self.home.stop_extending(self.incarnation, part.partition, part.lease)
        answer = super().settle(operation)
        self._clock.advance(round((self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]) * SECOND))
        return answer


@pytest.mark.parametrize(
    ("asked_before", "answered_after", "kept"),
    [
        pytest.param(0, [0], True, id="asked just now"),
        pytest.param(20, [1], True, id="asked long ago, and extended"),
        pytest.param(20, [15, 1], False, id="the extension was over when its answer came, and another consumer may have the items"),
    ],
)
def test_a_lease_is_kept_only_if_it_surely_lasts(asked_before: int, answered_after: list[float], kept: bool) -> None:
    """An answer that was lost with its connection is given again, long after the lease was extended."""
    clock = MicrosecondClock()
    with penstock.open("memory://", clock=clock, threaded=False) as broker:
        queue = broker.create_queue("orders", lease_timeout=10)
        queue.produce(b"1")
        at = DistantQueue(queue, clock, *answered_after)
        (granted,) = at.lease(LeaseItems(queue=at.incarnation))
        lease = WorkerLease(at, None, granted, clock.read().elapsed - asked_before * SECOND)
        assert lease.keep() == kept
        clock.advance(SECOND // 2)
        assert bool(queue.lease().payloads) != kept
        lease.stop_extending()
