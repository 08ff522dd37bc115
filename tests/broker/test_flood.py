"""A great many leases end at once: bounded work a turn, and everybody else goes on in between."""

from penstock.loop.partition import DUE_ITEMS
from penstock.loop.requests import LeaseRequest, ProduceRequest, SettleRequest
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of

SMALL, LARGE, SIZE = 14_000, 2_000, 193
"""So many leases of one item, and so many of SIZE items."""
TOTAL = SMALL + LARGE * SIZE
TIMEOUT = 100


def leased_out(broker: BrokerUnderTest, partitions: int) -> QueueUnderTest:
    """A queue whose items are all leased, by leases that end at the same moment."""
    queue = broker.create(partitions=partitions)
    for start in range(0, TOTAL, 10_000):
        queue.submit(ProduceRequest(batch_of(*map(str, range(start, start + 10_000)))))
    broker.turn()
    for _ in range(0, SMALL, 1_000):
        leases = [queue.submit(LeaseRequest(1, timeout=TIMEOUT * SECOND)) for _ in range(1_000)]
        broker.turn()
        assert all(len(asked.leased) == 1 for asked in leases)
    for _ in range(LARGE):
        assert len(queue.lease(SIZE, timeout=TIMEOUT)) == SIZE
    assert queue.counts() == {"leased": TOTAL}
    return queue


def test_other_requests_are_served_during_many_lease_expiries(broker: BrokerUnderTest) -> None:
    partitions = 2
    queue = leased_out(broker, partitions)
    queue.produce(*[f"kept-{number}" for number in range(1_000)])
    held = [queue.lease(1, timeout=10_000) for _ in range(250)]
    queue.drain()
    broker.clock.advance(TIMEOUT * SECOND)
    left = queue.loop.engine
    turns = 0
    before = sum(handle.state.counts.leased for handle in left.usable())
    while True:
        request = queue.submit(ProduceRequest(batch_of(f"new-{turns}")))
        settled = queue.submit(SettleRequest("complete", held.pop().parts))
        queue.loop.turn()
        turns += 1
        assert request.result[0].refused is None and settled.result[0].done == 1, "answered by the turn that took them"
        now = sum(handle.state.counts.leased for handle in left.usable())
        ended = before - now - 1
        assert ended <= partitions * (DUE_ITEMS + SIZE), "no turn does more than its part"
        before = now
        if not ended:
            break
    assert turns > TOTAL / (partitions * (DUE_ITEMS + SIZE))
    assert before == len(held)
    assert queue.stats().ready == TOTAL + turns


def test_waiting_leases_share_the_returned_items(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    queue.submit(ProduceRequest(batch_of(*map(str, range(5_000)))))
    queue.submit(ProduceRequest(batch_of(*map(str, range(5_000)))))
    broker.turn()
    while held := queue.lease(100, timeout=TIMEOUT):
        assert len(held) == 100
    line = [queue.submit_lease(2_000, wait=1_000) for _ in range(10)]
    broker.advance_in_steps(TIMEOUT)
    counts = [len(asked.leased) for asked in line]
    assert len(set(counts)) == 1 and sum(counts) >= DUE_ITEMS, "each has as much as the others"
    assert all(attempt == 2 for asked in line for attempt in asked.leased.attempts)
    again = [len(queue.lease(10_000, wait=0)) for _ in range(2)]
    assert again == [10_000 - sum(counts), 0], "nothing is given twice, nothing is forgotten"
