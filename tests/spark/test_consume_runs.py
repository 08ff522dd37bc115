"""Several runs of one stream that consumes, without a JVM: what one says late, or said before it died, does not bind
the next."""

from contextlib import closing

import pytest

from penstock import Broker, Queue
from penstock.broker.directory_client import DirectoryClient
from penstock.broker.streams import StreamCoordinator
from penstock.errors import QueueHeld
from penstock.operations import A, EndStream, FailGranted, Operation
from penstock.spark import consuming_reader
from penstock.spark.broker_access import open_home
from tests.spark.consuming_runs import ConsumingStreamRun
from tests.spark.stream_runs import fill
from tests.spark.waiting import wait_until


@pytest.fixture
def queue(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr(consuming_reader, "IDLE", 0)
    return broker.create_queue("orders")


def incarnation(run: ConsumingStreamRun) -> int:
    return int(str(run.at["incarnation"]), 16)


def test_settle_calls_of_a_repeated_batch_are_replaced(broker_dir: str, queue: Queue) -> None:
    ids = fill(queue, 3)
    first = ConsumingStreamRun(broker_dir)
    before = dict(first.at)
    assert first.batch() == 3
    with closing(open_home((broker_dir,))) as home:
        assert home.call(FailGranted(queue=incarnation(first), action="retry", groups=[("db down", {0: [1]})])) == (1, [])
    first.kill()
    second = ConsumingStreamRun(broker_dir, first.at)
    assert sorted(row["id"] for row in second.between(before, first.at)) == sorted(ids)
    assert second.batch() == -1, "this time all were handled"
    assert queue.stats().completed == 3
    second.kill()


def test_a_run_that_ends_late_takes_nothing_from_the_next(broker_dir: str, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queue, 4)
    old = ConsumingStreamRun(broker_dir, maxItemsPerTrigger=2)
    old.batch()
    new = ConsumingStreamRun(broker_dir, old.at, maxItemsPerTrigger=2)
    new.batch()
    done: list[str] = []
    end = StreamCoordinator.end

    def noted(self: StreamCoordinator, asked: EndStream) -> None:
        try:
            end(self, asked)
        finally:
            done.append(asked.run)

    monkeypatch.setattr(StreamCoordinator, "end", noted)
    old.reader.stop()
    wait_until(lambda: len(done) == 1)
    with pytest.raises(QueueHeld):
        queue.lease(1)
    new.reader.stop()
    wait_until(lambda: not queue.stats().holder)


def test_many_reasons_are_one_word(broker_dir: str, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = fill(queue, 300)
    run = ConsumingStreamRun(broker_dir)
    run.batch()
    asked: list[type] = []
    call = DirectoryClient.call

    def noted(self: DirectoryClient, operation: Operation[A]) -> A:
        asked.append(type(operation))
        return call(self, operation)

    failed = consuming_reader.FailedItems()
    for number, id in enumerate(ids[:200]):
        failed.add(id, f"bad row {number}")
    with monkeypatch.context() as patch, closing(open_home((broker_dir,))) as home:
        patch.setattr(DirectoryClient, "call", noted)
        assert failed.settle(home, incarnation(run), "bury", 0) == 200
        assert consuming_reader.FailedItems().settle(home, incarnation(run), "bury", 0) == 0
    assert asked.count(FailGranted) == 1
    assert run.batch() == -1
    assert (queue.stats().completed, queue.stats().buried) == (100, 200)
    assert queue.explain(ids[7]).reason == "bad row 7"
    run.kill()
