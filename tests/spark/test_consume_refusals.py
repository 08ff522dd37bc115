"""What a stream that consumes, and who settles its items, is told at once; on a real broker's directory and without a
JVM."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock import Broker, Queue
from penstock.broker.directory_client import DirectoryClient
from penstock.errors import InvalidRequest, QueueHeld, QueueNotFound
from penstock.operations import Home, Operation, TakeGrant
from penstock.reports import GrantAnswer
from penstock.spark import consuming_reader
from penstock.spark.broker_access import open_home
from penstock.words.clock import MINUTE, SystemClock
from tests.spark.stream_runs import StreamRun, fill


def test_a_new_stream_does_not_wait_long_for_a_live_consumer(queue: Queue, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a stream that consumed before waits for the timeout of a dead consumer."""
    monkeypatch.setattr(consuming_reader, "STOP_TIMEOUT_SECONDS", 0)
    fill(queue, 20)
    first, second = start(maxItemsPerTrigger=10), start(consumerTimeout=60)
    first.batch()
    began = SystemClock().read().elapsed
    with pytest.raises(QueueHeld, match="is consumed by spark:"):
        second.batch()
    assert SystemClock().read().elapsed - began < MINUTE // 2
    second.at = {**second.at, "grant": 1}
    asked: list[type] = []

    def held_twice(self: DirectoryClient, operation: Operation[Any]) -> GrantAnswer:
        asked.append(type(operation))
        if len(asked) < 3:
            raise QueueHeld("held; wait")
        return GrantAnswer(1, 0, 0)

    monkeypatch.setattr(consuming_reader, "IDLE", 0)
    monkeypatch.setattr(DirectoryClient, "call", held_twice)
    assert second.begin()["grant"] == 1 and asked == [TakeGrant] * 3


def test_a_checkpoint_of_another_queue_is_refused(broker_dir: str, broker: Broker, queue: Queue, start: Any) -> None:
    fill(queue, 5)
    stream = start()
    stream.batch()
    fill(broker.create_queue("bills"), 5)
    other = start(stream.at, queue="bills")
    with pytest.raises(QueueNotFound, match="or the checkpoint is of another queue; start with a new checkpointLocation"):
        other.batch()
    looking = StreamRun(broker_dir, "bills", StreamRun(broker_dir).at)
    with pytest.raises(QueueNotFound, match="or the checkpoint is of another queue; start with a new checkpointLocation"):
        looking.batch()


# -- what a batch could not handle ------------------------------------------------------------------------


@pytest.fixture
def home(broker_dir: str, broker: Broker) -> Iterator[Home]:
    """The broker as a driver opens it."""
    with closing(open_home((broker_dir,))) as found:
        yield found


def failed(ids: list[str], reason: str = "no price") -> consuming_reader.FailedItems:
    found = consuming_reader.FailedItems()
    for id in ids:
        found.add(id, reason)
    return found


def test_settled_items_may_be_settled_again(home: Home, queue: Queue, start: Any) -> None:
    fill(queue, 20)
    stream = start()
    stream.batch()
    incarnation = queue.incarnation
    for _ in range(2):  # as when Spark repeats a batch
        assert failed(stream.ids[:3] * 2).settle(home, incarnation, "bury", 0) == 3
    assert failed([]).settle(home, incarnation, "bury", 0) == 0


def test_items_that_no_stream_was_given_cannot_be_settled(home: Home, broker: Broker, queue: Queue, start: Any) -> None:
    """With another queue's name, after completion, or without a stream: settle must not succeed silently."""
    fill(queue, 20)
    stream = start(maxItemsPerTrigger=10)
    stream.batch()
    ids, incarnation = sorted(stream.ids), queue.incarnation
    other = int(broker.create_queue("bills").info().incarnation, 16)
    said = r"are not leased by a stream that consumes this queue; name the queue that the stream reads, and settle"
    with pytest.raises(InvalidRequest, match=rf"^5 of these items \({', '.join(ids[:3])}, …\) {said}"):
        failed(ids[:5]).settle(home, other, "bury", 0)
    with pytest.raises(InvalidRequest, match=rf"^1 of these items \(2-999\) {said}"):
        failed(["2-999", *ids[:5]]).settle(home, incarnation, "bury", 0)
    stream.batch()  # by which those of the first are completed
    with pytest.raises(InvalidRequest, match=rf"^2 of these items \({ids[0]}, {ids[1]}\) {said}"):
        failed(ids[:2]).settle(home, incarnation, "bury", 0)
