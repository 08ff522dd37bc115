"""A disk fails while a worker settles: failed requests are repeated until they succeed."""

import errno
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import penstock
from penstock import Broker, Item, NewItem, Queue
from penstock.logs.files.filesystem import SystemFiles
from penstock.worker.context import Context
from penstock.worker.outcomes import Bury, Retry
from penstock.worker.worker import Worker
from tests.worker.harness import WAIT, HandlerEvents, WorkerThread, running_worker, wait_completed, wait_until

FAR = datetime(2096, 1, 1, tzinfo=UTC)


class SyncFailingFiles(SystemFiles):
    """Real files whose syncs fail while the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.failures = 0

    def fail(self) -> None:
        self.broken = True

    def sync(self, handle: int) -> None:
        if self.broken:
            self.failures += 1
            raise OSError(errno.EIO, "Input/output error")
        super().sync(handle)


@pytest.fixture
def files() -> SyncFailingFiles:
    return SyncFailingFiles()


@pytest.fixture
def broker(tmp_path: Path, files: SyncFailingFiles) -> Iterator[Broker]:
    with penstock.open(tmp_path / "data", files=files) as broker:
        yield broker


def sync(queue: Queue) -> None:
    """Produce an item durably; this also syncs all records before it, such as leases."""
    queue.produce(b"", at=FAR)


def test_failed_settlements_are_repeated_until_the_disk_recovers(broker: Broker, files: SyncFailingFiles, log: HandlerEvents) -> None:
    queue, mail = broker.create_queue("orders", max_attempts=2), broker.create_queue("mail")
    verdicts = {b"done": None, b"retry": Retry(0, "again"), b"bury": Bury("poison"), b"follow": None}
    ids = dict(zip(verdicts, queue.produce_many(list(verdicts)), strict=True))

    def break_it() -> None:
        sync(queue)
        files.fail()

    all_there = threading.Barrier(len(verdicts), break_it)

    def handle(item: Item, context: Context) -> None:
        log.add((item.payload, item.attempts))
        if item.attempts == 1:
            all_there.wait(WAIT)
            if item.payload == b"follow":
                context.follow_up(NewItem(b"", queue="mail"))
            if (error := verdicts[item.payload]) is not None:
                raise error

    one = Worker(queue, handle, concurrency=4)
    with running_worker(one):
        log.take(4)
        wait_until(lambda: files.failures)
        files.broken = False
        wait_completed(queue, 3)
        assert log.next() == (b"retry", 2)
        stats = wait_until(one.stats, lambda stats: stats.in_hand == 0)
    assert (stats.handled, stats.retried, stats.buried, stats.late) == (3, 1, 1, 0)
    assert queue.explain(ids[b"bury"]).why == "buried because: poison"
    assert len(mail.lease(10, wait=WAIT)) == 1
    assert log.rest() == []


def test_items_whose_lease_the_disk_lost_are_late_and_leased_again(broker: Broker, files: SyncFailingFiles, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b"%d" % n for n in range(20)])

    def handle(item: Item) -> None:
        log.add(item.payload)
        if item.payload == b"10" and not files.failures:
            files.fail()

    one = Worker(queue, handle, concurrency=1)
    with running_worker(one):
        wait_until(lambda: files.failures)
        files.broken = False
        wait_completed(queue, 20)
        wait_until(lambda: one.stats().in_hand == 0)
    assert set(log.rest()) == {b"%d" % n for n in range(20)}
    assert one.stats().handled == 20


def test_a_worker_that_cannot_settle_can_be_stopped(broker: Broker, files: SyncFailingFiles, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", lease_timeout=1)
    queue.produce(b"x")

    def handle(item: Item) -> None:
        sync(queue)
        files.fail()
        log.add("done")

    one = Worker(queue, handle)
    running = WorkerThread(one)
    log.next()
    wait_until(lambda: files.failures)
    one.stop()
    one.stop(at_once=True)
    assert running.ended() == []
    files.broken = False
    assert queue.lease(wait=WAIT)[0].attempts == 2
    assert one.stats().handled == 0
