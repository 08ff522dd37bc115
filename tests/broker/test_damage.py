"""Damage under a broker run by hand: whoever waits gets what is whole, and no queue runs turn after turn for what is
not.
"""

import errno
from collections.abc import Iterator

import pytest

from penstock.loop.partition_handle import FIRST_WAIT
from penstock.operations import ListHeldKeys, ReadItems
from penstock.testing import SimulatedFiles
from penstock.testing.device import error
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest
from tests.broker.storages import SimulatedStorage


class UnreadableLogFiles(SimulatedFiles):
    """A disk from which no log can be read for as long as a test wants."""

    broken = False

    def pread(self, handle: int, size: int, position: int) -> bytes:
        path = self._opened_file(handle).path
        if self.broken and path.endswith(".log"):
            raise error(errno.EIO, path)
        return super().pread(handle, size, position)


@pytest.fixture
def file_broker() -> Iterator[BrokerUnderTest]:
    broker = BrokerUnderTest(SimulatedStorage(UnreadableLogFiles()), compression=False)
    yield broker
    broker.check()
    broker.embedded.close()


def disk(broker: BrokerUnderTest) -> UnreadableLogFiles:
    assert isinstance(broker.storage, SimulatedStorage) and isinstance(broker.storage.files, UnreadableLogFiles)
    return broker.storage.files


def flip(broker: BrokerUnderTest, queue: QueueUnderTest, text: str) -> None:
    """Damage the frame that holds a payload, in whichever partition it lies; the broker is closed and opened again
    around it.
    """
    broker.embedded.close()
    files = disk(broker)
    paths = [path for path in files.contents() if f"{queue.incarnation:016x}" in path and path.endswith(".log")]
    (path,) = [path for path in paths if text.encode() in files.content(path)]
    files.flip_bit(path, 8 * files.content(path).index(text.encode()))
    broker.embedded = broker._open()


def records(queue: QueueUnderTest) -> int:
    return sum(handle.usable_partition.records_applied for handle in queue.loop.engine.handles.values())


def test_an_empty_answer_is_not_given_for_items_that_are_lost(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("lost 0", "lost 1")
    queue.produce("whole 2", "whole 3")
    flip(file_broker, queue, "lost 0")
    held = queue.lease(2)
    assert held.texts == ["whole 2", "whole 3"]
    assert held.complete() == 2
    assert not queue.lease(2)
    assert (queue.counts(), queue.stats().partitions[0].lost) == ({"completed": 2}, 2)


def test_a_lease_names_only_the_items_that_it_gives(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("whole 0")
    queue.produce("lost 1")
    queue.produce("whole 2")
    flip(file_broker, queue, "lost 1")
    (handed,) = queue.lease().parts_granted
    assert handed.granted.runs == [0, 1, 2, 3]


def test_a_waiting_lease_is_not_answered_with_lost_items(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("lost")
    flip(file_broker, queue, "lost")
    waiter = queue.submit_lease(wait=60)
    assert not waiter.done
    before = records(queue)
    assert file_broker.turn() == 0 and records(queue) == before
    queue.produce("whole")
    assert waiter.leased.texts == ["whole"]


def test_an_unreadable_item_is_tried_again_after_a_while_and_not_at_once(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("x" * 500_000)
    file_broker.restart()  # so that it is not in memory
    disk(file_broker).broken = True
    waiter = queue.submit_lease(wait=600)
    assert not waiter.done
    before = records_known(queue)
    for _ in range(10):
        file_broker.advance(FIRST_WAIT / SECOND)
    assert records_known(queue) - before <= 40, "a few for every try"
    assert queue.stats().partitions[0].status == "failing"
    disk(file_broker).broken = False
    file_broker.advance(10)
    assert waiter.leased.texts == ["x" * 500_000]


def records_known(queue: QueueUnderTest) -> int:
    """Also of a partition that fails."""
    return sum(handle.partition.records_applied for handle in queue.loop.engine.handles.values() if handle.partition is not None)


def test_keys_are_listed_although_items_in_their_lines_are_lost(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a", "b", keys=["k1", "k2"])
    held = queue.lease()
    queue.produce("lost a", "lost b", keys=["k1", "k2"])
    queue.produce("whole", key="k3")
    assert queue.lease(timeout=1_000).texts == ["whole"]  # the others wait in their keys' lines
    held.complete()
    flip(file_broker, queue, "lost a")
    assert [one.key for one in queue.call(ListHeldKeys(limit=10))] == [b"k3"]
    assert queue.stats().partitions[0].lost == 2


def test_transferred_items_that_are_lost_do_not_stop_other_transfers(file_broker: BrokerUnderTest) -> None:
    dead, queue = file_broker.create("dead"), file_broker.create("q")
    queue.produce("whole 0")
    queue.produce("lost 1")
    queue.produce("whole 2")
    queue.lease().bury()
    flip(file_broker, queue, "lost 1")
    queue.update(dead_queue="dead")
    file_broker.turn()
    assert queue.counts() == {}
    assert dead.drain() == ["whole 0", "whole 2"]
    assert queue.stats().partitions[0].lost == 1


def test_an_item_that_was_sent_and_is_then_damaged_counts_once(file_broker: BrokerUnderTest) -> None:
    dead, queue = file_broker.create("dead"), file_broker.create("q", dead_queue="dead")
    queue.produce("gone")
    queue.lease().bury()
    file_broker.turn()
    assert dead.drain() == ["gone"]
    flip(file_broker, queue, "gone")
    assert queue.call(ReadItems(start={}, limit=10)).items == []
    stats = queue.stats()
    assert (stats.completed, stats.partitions[0].lost) == (0, 1)
