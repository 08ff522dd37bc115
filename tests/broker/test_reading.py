"""What is answered is what was produced, however much of it is at hand."""

import random
from string import ascii_letters

import pytest

from penstock.loop import lease
from penstock.loop.requests import ProduceRequest
from penstock.operations import ListItems
from tests.broker.broker_under_test import BrokerUnderTest, batch_of


def test_a_partly_cached_frame_is_read_once_and_whole(broker: BrokerUnderTest) -> None:
    """Produces of one turn share a frame; the first of them fits into the cache, the second does not."""
    queue = broker.create()
    queue.produce("o" * 2_000_000)
    queue.drain()
    broker.restart()
    for _ in range(8):
        queue.produce("x" * 1_000_000)
    queue.submit(ProduceRequest(batch_of("y" * 500_000)))
    queue.submit(ProduceRequest(batch_of("the item")))
    broker.turn()
    queue.lease(8)
    assert len(queue.call(ListItems(states=["completed"], limit=1))) == 1  # what was read goes, for something old
    held = queue.lease(2)
    assert [len(text) for text in held.texts] == [500_000, 8]
    assert queue.counts() == {"leased": 10, "completed": 1}


def test_a_large_backlog_of_shared_frames_is_served_once_each(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    names = [f"item-{number}" for number in range(300_000)]
    for start in range(0, len(names), 5_000):
        queue.submit(ProduceRequest(batch_of(*names[start : start + 5_000])))
    broker.turn()
    served: list[str] = []
    while held := queue.lease(997):
        assert len(held) == 997 or len(served) + len(held) == len(names)
        served += held.texts
        held.complete()
    assert len(served) == len(names) and set(served) == set(names)


def test_large_and_small_items_read_in_any_order(broker: BrokerUnderTest) -> None:
    """Leases, looks back and new items, in no order: nobody is given what it was not given, nothing is lost."""
    rng = random.Random(5)
    queue = broker.create()
    made: dict[str, str] = {}
    served: list[str] = []
    for round_ in range(60):
        for part in range(rng.randint(1, 3)):
            sizes = [rng.choice((10, 10, 300_000, 1_500_000)) for _ in range(rng.randint(1, 4))]
            texts = [f"{round_}.{part}.{index}:" + "x" * size for index, size in enumerate(sizes)]
            made.update((text.partition(":")[0], text) for text in texts)
            queue.submit(ProduceRequest(batch_of(*texts)))
        broker.turn()
        held = queue.lease(rng.randint(1, 6))
        if rng.random() < 0.5:
            queue.call(ListItems(after=(0, rng.randrange(len(made))), limit=rng.randint(1, 5)))
        for text in held.texts:
            name = text.partition(":")[0]
            assert text == made[name]
            served.append(name)
        held.complete()
        if rng.random() < 0.1:
            broker.restart()
    while held := queue.lease(7):
        served += [text.partition(":")[0] for text in held.texts]
        held.complete()
    assert served == list(made)


@pytest.mark.parametrize("partitions", [1, 6])
def test_the_bytes_of_a_lease_are_limited_over_all_partitions(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """No log is larger than the limit when there are six, but all together are."""
    monkeypatch.setattr(lease, "MAX_BATCH_BYTES", 100_000)
    queue = broker.create(partitions=partitions)
    payloads = ["".join(random.Random(number).choices(ascii_letters, k=1_000)) for number in range(240)]
    for payload in payloads:
        queue.produce(payload)
    found = queue.lease(1_000).texts
    assert 50 <= len(found) <= 140
    while more := queue.lease(1_000).texts:
        found += more
    assert sorted(found) == sorted(payloads)
