"""Running a worker in a thread, until its queues are empty, and with a limit for draining."""

import asyncio
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker, Item, NewItem, Queue
from penstock.errors import BrokerClosed, InvalidRequest
from penstock.words.clock import SECOND
from penstock.worker.context import Context
from penstock.worker.outcomes import Retry, RetryPolicy
from penstock.worker.worker import Worker
from tests.worker.harness import WAIT, HandlerEvents, wait_until

# -- until the queues are empty --------------------------------------------------------------------------------


def test_until_empty_the_worker_ends_when_everything_is_handled_also_retries(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([NewItem(b"%d" % n, key=str(n % 5)) for n in range(50)])

    def handle(item: Item) -> None:
        log.add(item.attempts)
        if item.attempts == 1:
            raise Retry(0.01)

    Worker(queue, handle, concurrency=4).run(until_empty=True)
    stats = queue.stats()
    assert (stats.completed, stats.depth) == (50, 0)
    assert len(log.rest()) == 100
    Worker(queue, handle).run(until_empty=True)  # nothing to do


def test_until_empty_waits_for_follow_ups_in_another_queue(broker: Broker, queue: Queue, log: HandlerEvents) -> None:
    mail = broker.create_queue("mail", partitions=3)
    queue.produce_many([b"%d" % n for n in range(20)])

    def handle(item: Item, context: Context) -> None:
        log.add(item.queue)
        if item.queue == "orders":
            context.follow_up(NewItem(item.payload, queue="mail"))

    Worker([mail, queue], handle, concurrency=3).run(until_empty=True)
    assert (mail.stats().completed, queue.stats().completed, len(log.rest())) == (20, 20, 40)


def test_until_empty_waits_for_items_of_other_consumers_and_of_later(queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"other's")
    other = queue.lease()[0]
    worker = Worker(queue, lambda item: log.add(item.payload)).start(until_empty=True)
    queue.produce(b"mine")
    assert log.next() == b"mine"
    wait_until(lambda: worker.stats().handled)
    queue.produce(b"later", at=datetime.now(UTC) + timedelta(seconds=0.2))
    other.complete()
    assert worker.join(WAIT)
    assert log.rest() == [b"later"]


def test_until_empty_with_seconds_ends_when_no_item_came_for_so_long(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([NewItem(b"later", at=datetime.now(UTC) + timedelta(hours=1)), NewItem(b"now")])
    clock = queue.home.clock
    before = clock.read().elapsed
    Worker(queue, lambda item: log.add(item.payload)).run(until_empty=0.3)
    assert clock.read().elapsed - before >= 0.3 * SECOND
    assert (log.rest(), queue.stats().scheduled) == ([b"now"], 1)


def test_until_empty_in_an_event_loop(queue: Queue, log: HandlerEvents) -> None:
    async def handle(item: Item) -> None:
        log.add(item.payload)

    queue.produce_many([b"1", b"2"])
    asyncio.run(Worker(queue, handle).arun(until_empty=True))
    assert sorted(log.rest()) == [b"1", b"2"]


@pytest.mark.parametrize("wrong", [0, -1, "yes", None])
def test_a_wrong_until_empty_is_refused(queue: Queue, wrong: Any) -> None:
    worker = Worker(queue, print)
    with pytest.raises(InvalidRequest, match="until_empty is "):
        worker.run(until_empty=wrong)
    worker.run(until_empty=True)


# -- in a thread -----------------------------------------------------------------------------------------------


def test_start_returns_at_once_and_join_waits_for_the_end(queue: Queue, log: HandlerEvents) -> None:
    go = threading.Event()

    def handle(item: Item) -> None:
        log.add(item.payload)
        go.wait(WAIT)

    worker = Worker(queue, handle)
    assert worker.join(), "it does not run"
    assert worker.start() is worker
    queue.produce(b"x")
    assert log.next() == b"x"
    with pytest.raises(InvalidRequest, match="running already"):
        worker.start()
    worker.stop()
    assert not worker.join(0)
    go.set()
    assert worker.join(WAIT) and queue.stats().completed == 1
    worker.start().stop()  # it can run again, and be stopped at once
    assert worker.join(WAIT)


def test_a_block_runs_the_worker_and_drains_it(queue: Queue, log: HandlerEvents) -> None:
    with Worker(queue, lambda item: log.add(item.payload)) as worker:
        queue.produce(b"x")
        assert log.next() == b"x"
    assert queue.stats().completed == 1 and "running" not in repr(worker)
    with worker.start() as same:
        assert same is worker


def test_join_raises_the_error_that_ended_the_run(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(broker.create_queue("orders"), print).start()
    broker.close()
    with pytest.raises(BrokerClosed) as caught:
        worker.join(WAIT)
    assert caplog.messages == [f"the worker of queue 'orders' has ended: {caught.value}"]


def test_a_started_worker_is_drained_when_the_program_ends(tmp_path: Path) -> None:
    program = """
import sys, threading, penstock
broker = penstock.open(sys.argv[1])
queue = broker.create_queue("orders")
queue.produce_many([b"x"] * 3)
begun = threading.Event()
def handle(item):
    begun.set()
    threading.main_thread().join()  # the program ends meanwhile
    print("handled", flush=True)
worker = penstock.Worker(queue, handle).start()
begun.wait()
"""
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path / "data")], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "handled\n", "")
    with penstock.open(tmp_path / "data") as broker:
        stats = broker.queue("orders").stats()
        assert (stats.completed, stats.ready, stats.leased) == (1, 2, 0)


# -- a limit for draining ----------------------------------------------------------------------------------------


def test_after_the_drain_timeout_the_worker_stops_at_once(queue: Queue, log: HandlerEvents, caplog: pytest.LogCaptureFixture) -> None:
    queue.produce_many([b"1", b"2"])
    go = threading.Event()

    def handle(item: Item) -> None:
        log.add(item.id)
        go.wait(WAIT)

    worker = Worker(queue, handle, drain_timeout=0.1).start()
    log.next()
    worker.stop()
    assert worker.join(WAIT) and not go.is_set()
    assert "it stops now and does not wait for running handlers" in caplog.text
    assert (queue.stats().leased, queue.stats().ready) == (1, 1)
    go.set()


def test_a_task_is_cancelled_after_the_drain_timeout(queue: Queue, log: HandlerEvents) -> None:
    async def handle(item: Item) -> None:
        log.add("begin")
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            log.add("cancelled")
            raise

    queue.produce(b"x")
    worker = Worker(queue, handle, drain_timeout=timedelta(seconds=0.05)).start()
    assert log.next() == "begin"
    worker.stop()
    assert worker.join(WAIT) and log.next() == "cancelled"
    assert queue.stats().ready == 1, "it is returned"


def test_draining_that_ends_in_time_is_not_cut_off(queue: Queue, log: HandlerEvents, caplog: pytest.LogCaptureFixture) -> None:
    queue.produce(b"x")
    worker = Worker(queue, lambda item: log.add("handled"), retry=RetryPolicy(base=0), drain_timeout=WAIT).start()
    log.next()
    worker.stop()
    assert worker.join(WAIT)
    assert queue.stats().completed == 1 and "stops now" not in caplog.text
