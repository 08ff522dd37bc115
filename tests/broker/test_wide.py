"""Turns that write to many partitions are ended together, and wait for nothing else."""

import threading
from pathlib import Path

from penstock.loop.requests import ProduceRequest
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, SubmittedRequest, batch_of, keys_at
from tests.broker.storages import DirectoryStorage, SimulatedStorage

WIDTH = 20


def wide_queue(broker: BrokerUnderTest, width: int = WIDTH) -> tuple[QueueUnderTest, list[str]]:
    """A queue whose partitions are all open, and a key of each."""
    queue = broker.create(partitions=width)
    keys = [keys_at(queue, number)[0] for number in range(width)]
    queue.produce(*keys, keys=keys)
    return queue, keys


def test_partitions_that_are_durable_can_be_used_while_another_of_the_turn_hangs() -> None:
    by_hand = BrokerUnderTest(SimulatedStorage())
    queue, keys = wide_queue(by_hand, 3)
    hangs = [True]
    queue.loop.stays_in_io = lambda handle: hangs[0] and handle.number == 2
    asked: SubmittedRequest = queue.submit(ProduceRequest(batch_of(*keys, keys=keys), deadline=by_hand.deadline(10)))
    queue.loop.turn()
    assert not asked.done and len(queue.loop.engine.io_finished) == 2, "they wait for the third one"
    assert queue.produce("more", key=keys[0]), "a turn takes them back"
    assert not asked.done
    hangs[0] = False
    by_hand.turn()
    assert asked.done
    assert queue.stats().ready == 3 + 3 + 1


def test_a_request_that_came_before_the_end_of_the_syncs_is_not_forgotten(tmp_path: Path) -> None:
    broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    queue, keys = wide_queue(broker)
    threads = [threading.Thread(target=lambda: [queue.produce(*keys, keys=keys) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        queue.produce("single", key=keys[0])
    for thread in threads:
        thread.join()
    assert queue.stats().ready == WIDTH * 21 + 10
    broker.embedded.close()
