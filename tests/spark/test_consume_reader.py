"""ConsumingReader on a real broker's directory, without a JVM."""

import os
from threading import Event, Thread
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import penstock
from penstock import Broker, Queue
from penstock.broker.directory_client import DirectoryClient
from penstock.errors import BrokerClosed, InvalidRequest, QueueHeld, QueueNotFound, StorageFailed
from penstock.operations import A, Operation, RenewStream
from penstock.spark import consuming_reader
from penstock.spark.consuming_reader import Heartbeat
from penstock.words.clock import MINUTE
from tests.spark.consuming_runs import numbers_by_key, produce_keyed
from tests.spark.stream_runs import StreamRun, fill
from tests.spark.waiting import wait_until


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an empty grant the owner is asked again at once."""
    monkeypatch.setattr(consuming_reader, "IDLE", 0)


def counts(queue: Queue) -> tuple[int, int, int]:
    found = queue.stats()
    return found.ready, found.leased, found.completed


# -- batch after batch --------------------------------------------------------------------------------


def test_a_committed_batch_is_completed_by_the_next_latest_offset(queue: Queue, start: Any) -> None:
    ids = fill(queue, 100)
    stream = start(maxItemsPerTrigger=40)
    seen = []
    while stream.batch() >= 0:
        seen.append(counts(queue))
    assert seen == [(60, 40, 0), (20, 40, 40), (0, 20, 80)]
    assert counts(queue) == (0, 0, 100)
    assert sorted(stream.ids) == sorted(ids)
    assert {row["id"]: row["payload"] for row in stream.rows} == {id: b"%08d" % n for n, id in enumerate(ids)}


@pytest.mark.usefixtures("at_once")
def test_a_stream_without_end_takes_what_comes(queue: Queue, start: Any) -> None:
    stream = start()
    assert stream.batch() == -1
    ids = fill(queue, 5)
    assert stream.batch(ReadAllAvailable()) == 5
    ids += fill(queue, 5, 5)
    assert stream.batch(ReadMaxRows(2)) == 2
    assert sorted(stream.all()) == sorted(ids)
    assert counts(queue) == (0, 0, 10)


def test_after_an_empty_grant_the_owner_is_not_asked_for_a_while(queue: Queue, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = start()
    monkeypatch.setattr(consuming_reader, "IDLE", MINUTE)
    assert stream.batch() == -1
    fill(queue, 5)
    assert stream.batch() == -1
    monkeypatch.setattr(stream.reader, "_idle_until", 0)
    assert stream.batch() == 5
    stream.reader._idle_until = 1 << 62
    assert stream.batch() == -1
    assert counts(queue) == (0, 0, 5), "what is committed is said at once"


def test_the_rows_have_the_columns_that_were_asked_for(queue: Queue, start: Any) -> None:
    queue.produce(b"x", key="k", headers={"a": b"1"})
    stream = start(columns="id, headers, payload", minPartitions=4)
    stream.batch()
    assert stream.rows == [{"id": stream.ids[0], "headers": [("a", b"1")], "payload": b"x"}]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("per_key", [1, 3, 10_000])
def test_lines_of_keys_are_in_order_within_and_across_batches(queue: Queue, start: Any, per_key: int) -> None:
    produce_keyed(queue, 7, 10)
    stream = start(maxItemsPerTrigger=30, perKey=per_key, minPartitions=6)
    while stream.batch() >= 0:
        counted = numbers_by_key((row["key"], row["payload"]) for row in stream.batches[-1])
        assert max(map(len, counted.values())) <= per_key
    lines = numbers_by_key((row["key"], row["payload"]) for row in stream.rows)
    assert lines == {f"k{key}": [*range(10)] for key in range(7)}


@pytest.mark.usefixtures("at_once")
def test_resizes_between_batches(queue: Queue, start: Any) -> None:
    """Items that a resize forwards are read once, in their new partition, after the earlier items of their key."""
    stream = start(maxItemsPerTrigger=25, perKey=2)
    produce_keyed(queue, 9, 6)
    for step, width in enumerate((5, 1, 4)):
        assert stream.batch() > 0
        queue.resize(width)
        produce_keyed(queue, 9, 4, 6 + 4 * step)
    wait_until(lambda: stream.batch() < 0 and queue.stats().depth == 0)
    lines = numbers_by_key((row["key"], row["payload"]) for row in stream.rows)
    assert lines == {f"k{key}": [*range(18)] for key in range(9)}


# -- what is available now ----------------------------------------------------------------------------


def test_an_available_now_run_ends_and_gives_the_right_back(queue: Queue, start: Any) -> None:
    fill(queue, 50)
    stream = start(available_now=True, maxItemsPerTrigger=20)
    sizes = []
    while (size := stream.batch()) >= 0:
        sizes.append(size)
        fill(queue, 10, 50 + 10 * len(sizes))
        with pytest.raises(QueueHeld):
            queue.lease(1)
    assert sizes == [20, 20, 10], "what came meanwhile is for the next run"
    assert counts(queue) == (30, 0, 50)
    assert len(queue.lease(1)) == 1
    assert stream.reader._heartbeat is None
    again = start(stream.at, available_now=True)
    assert len(again.all()) == 29


def test_an_empty_available_now_run_gives_the_right_back(queue: Queue, start: Any) -> None:
    stream = start(available_now=True)
    assert stream.batch() == stream.batch() == -1
    fill(queue, 1)
    assert len(queue.lease(1)) == 1


# -- begun anew ----------------------------------------------------------------------------------------


def test_a_batch_is_repeated_with_the_same_rows(queue: Queue, start: Any) -> None:
    """Spark repeats the very first batch from a new initialOffset."""
    fill(queue, 30)
    stream = start(maxItemsPerTrigger=20)
    begin = stream.at
    stream.batch()
    stream.kill()
    fill(queue, 30, 30)
    again = start(maxItemsPerTrigger=20)
    assert again.at != begin
    assert again.between(again.at, stream.at) == stream.rows
    again.at = stream.at
    again.all()
    assert counts(queue) == (0, 0, 60)
    assert len({*again.ids} | {*stream.ids}) == 60


def test_a_grant_that_spark_never_heard_of_is_given_again(queue: Queue, start: Any) -> None:
    fill(queue, 30)
    stream = start(maxItemsPerTrigger=20)
    stream.batch()
    end = stream.begin()
    stream.kill()
    again = start(stream.at, maxItemsPerTrigger=5)
    assert again.begin() == end
    assert again.batch() == 10


def test_begun_anew_when_its_right_and_its_leases_have_ended(queue: Queue, start: Any) -> None:
    """The stream takes its right again before the batch is repeated; the committed items are completed without a
    lease."""
    fill(queue, 30)
    stream = start(maxItemsPerTrigger=20, consumerTimeout=1)
    begin = stream.at
    stream.batch()
    stream.kill()
    wait_until(lambda: counts(queue) == (30, 0, 0))
    assert queue.stats().holder == ""
    again = start(maxItemsPerTrigger=20, consumerTimeout=60)
    assert again.between(begin, stream.at) == stream.rows
    with pytest.raises(QueueHeld):
        queue.lease(1)
    again.at = stream.at
    again.all()
    assert counts(queue) == (0, 0, 30) and len(again.rows) == 10


def test_items_that_another_consumer_completed_are_completed_once(queue: Queue, start: Any) -> None:
    fill(queue, 30)
    stream = start(consumerTimeout=1)
    stream.batch()
    stream.kill()
    wait_until(lambda: counts(queue) == (30, 0, 0))
    queue.lease(10).complete()
    start(stream.at).all()
    assert counts(queue) == (0, 0, 30)


# -- the right ------------------------------------------------------------------------------------------


def test_a_stream_that_is_stopped_gives_its_right_back(queue: Queue, start: Any) -> None:
    fill(queue, 20)
    stream = start(maxItemsPerTrigger=10)
    stream.batch()
    with pytest.raises(QueueHeld, match="is consumed by spark:"):
        queue.lease(1)
    stream.reader.stop()
    wait_until(lambda: not queue.stats().holder)
    assert len(queue.lease(20)) == 10, "what it was granted is still leased"
    stream.reader.stop()
    again = start(stream.at)
    again.batch()
    assert queue.stats().completed == 10, "and completed if it comes back in time"


def test_stop_does_not_wait_for_a_renewal_without_an_answer(queue: Queue, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGTERM the process has a few seconds to give the right back."""
    fill(queue, 5)
    stream, called, answered = start(), Event(), Event()
    stream.batch()
    stream.reader._heartbeat.end()

    def renew() -> None:
        called.set()
        answered.wait()

    stream.reader._heartbeat = Heartbeat(renew, 0.01)
    assert called.wait(10)
    monkeypatch.setattr(consuming_reader, "STOP_TIMEOUT_SECONDS", 0.2)
    stopping = Thread(target=stream.reader.stop)
    stopping.start()
    try:
        wait_until(lambda: not queue.stats().holder)
    finally:
        answered.set()
        stopping.join()


def test_a_second_stream_waits_and_is_refused(queue: Queue, start: Any) -> None:
    fill(queue, 20)
    first, second = start(maxItemsPerTrigger=10), start(consumerTimeout=1)
    first.batch()
    with pytest.raises(QueueHeld, match=r"is consumed by spark:\w+, which alone may lease from it; end that consumer"):
        second.batch()
    second.reader.stop()
    assert queue.stats().holder.startswith("spark:"), "that is nothing to the first"
    assert first.batch() == 10


def test_a_second_stream_takes_over_from_one_that_died(queue: Queue, start: Any) -> None:
    """As after a crash in the very first batch, before the stream's id is in the checkpoint."""
    fill(queue, 20)
    first, second = start(consumerTimeout=1), start(consumerTimeout=5)
    first.batch()
    first.kill()
    second.reader._idle_until = 0
    wait_until(lambda: second.batch() == 20)


def test_signs_of_life_keep_right_and_leases(queue: Queue, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without heartbeats, right and leases expire."""
    signs: list[type] = []
    call = DirectoryClient.call

    def count(self: DirectoryClient, operation: Operation[A]) -> A:
        found = call(self, operation)
        signs.append(type(operation))
        return found

    monkeypatch.setattr(DirectoryClient, "call", count)
    fill(queue, 20)
    stream = start(consumerTimeout=1)
    stream.batch()
    wait_until(lambda: signs.count(RenewStream) >= 7)
    assert counts(queue) == (0, 20, 0) and queue.stats().holder
    stream.kill()
    wait_until(lambda: counts(queue) == (20, 0, 0) and not queue.stats().holder)


def test_signs_of_life_end_with_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's JVM may be killed while the stream's process goes on."""
    given = Event()
    life = Heartbeat(given.set, 0.001)
    assert given.wait(60)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    life._thread.join(60)
    assert not life._thread.is_alive()


def test_signs_of_life_go_on_when_one_was_not_heard() -> None:
    heard = Event()
    tries: list[int] = []

    def renew() -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise StorageFailed("nobody answers; try again")
        heard.set()

    life = Heartbeat(renew, 0.001)
    assert heard.wait(60)
    life.end()
    assert not life._thread.is_alive()


# -- what cannot be -------------------------------------------------------------------------------------


def test_nobody_has_the_directory_open(broker_dir: str, start: Any) -> None:
    with penstock.open(broker_dir) as broker:
        fill(broker.create_queue("orders"), 5)
    stream = start(hasty=True)
    with pytest.raises(BrokerClosed, match=rf"no process has {broker_dir} open, .*; keep it open in some program while this runs"):
        stream.batch()
    with penstock.open(broker_dir) as broker:
        assert broker.queue("orders").stats().ready == 5
        again = start(stream.at)
        assert again.batch() == 5
        again.kill()
    with pytest.raises(BrokerClosed, match="no process has"):  # also before a batch is repeated
        start(hasty=True).between(stream.at, again.at)


def test_an_owner_that_starts_again_is_waited_for(broker_dir: str, start: Any) -> None:
    with penstock.open(broker_dir) as broker:
        fill(broker.create_queue("orders", partitions=2), 50)
        stream = start(maxItemsPerTrigger=20)
        stream.batch()
    with penstock.open(broker_dir) as broker:
        stream.all()
        assert counts(broker.queue("orders")) == (0, 0, 50)
        assert len({*stream.ids}) == len(stream.ids) == 50


def test_a_queue_created_anew_is_refused(broker: Broker, queue: Queue, start: Any) -> None:
    fill(queue, 5)
    stream = start(maxItemsPerTrigger=2)
    stream.batch()
    queue.delete()
    fill(broker.create_queue("orders"), 50)
    again = start(stream.at)
    for use in (again.batch, lambda: again.between(stream.at, stream.at)):
        with pytest.raises(QueueNotFound, match="deleted and created anew since this stream began"):
            use()
    with pytest.raises(QueueNotFound):
        stream.batch()


def test_an_offset_of_another_source_is_refused(broker_dir: str, queue: Queue, start: Any) -> None:
    fill(queue, 5)
    looking = StreamRun(broker_dir)
    with pytest.raises(InvalidRequest, match="is no offset of a stream that consumes; the checkpoint belongs to another source"):
        start(looking.at).batch()
    with pytest.raises(InvalidRequest, match="start with a new checkpointLocation"):
        start({"incarnation": "1", "stream": "x", "grant": "1"}).batch()


def test_a_batch_that_is_done_with_cannot_be_repeated(queue: Queue, start: Any) -> None:
    """The checkpoint is an old copy."""
    fill(queue, 5)
    stream = start(maxItemsPerTrigger=2)
    begin = stream.at
    stream.batch()
    first = stream.at
    stream.batch()
    with pytest.raises(InvalidRequest, match=r"grant 1 of the stream \w+ does not exist any more; start the stream with a new checkpoint"):
        start().between(begin, first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "earliest"}, "startingOffsets is given, and consume=true takes what is ready"),
        ({"endingOffsets": "latest"}, "endingOffsets is given"),
        ({"startingTimestamp": "2026-01-01"}, "startingTimestamp is given"),
        ({"endingTimestamp": "2026-01-01"}, "endingTimestamp is given"),
        ({"cursor": "lake"}, "cursor is given"),
        ({"failOnDataLoss": "false"}, "failOnDataLoss is false, and consume=true would complete what it could not read"),
        ({"table": "events"}, "only table items can be consumed"),
        ({"perKey": "0"}, "perKey is '0'"),
        ({"consumerTimeout": "0.1"}, "consumerTimeout is '0.1'; give seconds from 1 to 43200"),
    ],
)
def test_options_that_do_not_go_together(queue: Queue, start: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        start(**options)
