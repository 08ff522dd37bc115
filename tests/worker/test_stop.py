"""Draining and stopping: no item is lost, none is handled twice at once, and late outcomes are refused."""

import asyncio
import random
import threading
from collections import Counter

import pytest

from penstock import Broker, Item, NewItem, Queue
from penstock.worker.context import Context
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker
from tests.worker.harness import WAIT, HandlerEvents, WorkerThread, wait_completed, wait_until


def test_draining_finishes_running_handlers_and_returns_the_other_items(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([b"%d" % n for n in range(10)])
    go = threading.Event()

    def handle(item: Item) -> None:
        log.add(item.id)
        go.wait(WAIT)
        log.add("end")

    one = Worker(queue, handle, concurrency=2, hooks=Hooks(drained=lambda: log.add("drained")))
    running = WorkerThread(one)
    log.take(2)
    one.stop()
    one.stop()  # a second call of stop drains too
    queue.produce(b"10")
    wait_until(lambda: queue.stats().waiting_consumers == 0)
    go.set()
    assert running.ended() == []
    assert log.rest() == ["end", "end", "drained"]
    stats = queue.stats()
    assert (stats.completed, stats.ready, stats.leased, stats.scheduled) == (2, 9, 0, 0)
    assert {lease.attempts for lease in queue.lease(20)} == {1}


@pytest.mark.parametrize("how", ["threads", "tasks", "batches"])
@pytest.mark.parametrize("seed", range(4))
def test_draining_at_any_time_neither_loses_nor_duplicates_items(broker: Broker, how: str, seed: int) -> None:
    queue = broker.create_queue("orders", partitions=3)
    rng = random.Random(f"{how} {seed}")
    total = 2_000
    queue.produce_many([NewItem(b"", key=str(rng.randrange(100)) if seed % 2 else None) for _ in range(total)])
    handled: Counter[str] = Counter()
    workers: list[Worker] = []
    moments = sorted(rng.sample(range(1, total), 3))
    while queue.stats().depth:
        moment = moments.pop(0) if moments else total

        def handle(item: Item, moment: int = moment) -> None:
            handled[item.id] += 1
            if handled.total() >= moment:
                workers[-1].stop()

        async def ahandle(item: Item) -> None:
            handle(item)
            await asyncio.sleep(0)

        def handle_all(items: list[Item]) -> None:
            for item in items:
                handle(item)

        if how == "batches":
            workers.append(Worker(queue, handle_all, concurrency=3, batch=7))
        else:
            workers.append(Worker(queue, handle if how == "threads" else ahandle, concurrency=3))
        running = WorkerThread(workers[-1])
        if moment == total:
            wait_completed(queue, total)
            workers[-1].stop()
        assert running.ended() == []
        stats = queue.stats()
        assert (stats.completed, stats.leased) == (handled.total(), 0)
    assert set(handled.values()) == {1} and len(handled) == total


def test_a_handler_may_end_its_own_worker(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([b"1", b"2", b"3"])

    def handle(item: Item) -> None:
        log.add(item.payload)
        one.stop()

    one = Worker(queue, handle)
    one.run(signals=False)
    handled = log.rest()
    assert handled == [b"1", b"2", b"3"][: len(handled)] and handled
    assert (queue.stats().completed, queue.stats().ready, queue.stats().leased) == (len(handled), 3 - len(handled), 0)


def test_stopping_threads_at_once_leaves_their_leases_to_expire(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", lease_timeout=1)
    queue.produce_many([b"done", b"stuck"])
    go = threading.Event()

    def handle(item: Item, context: Context) -> None:
        if item.payload == b"stuck":
            log.add("stuck")
            go.wait(WAIT)
            log.add(context.cancelled)

    one = Worker(queue, handle, concurrency=2)
    running = WorkerThread(one)
    log.next()
    wait_completed(queue, 1)
    one.stop(at_once=True)
    assert running.ended() == []
    assert queue.stats().leased == 1  # the handler may still run, so the item stays leased
    lease = queue.lease(wait=WAIT)[0]
    assert (lease.item.payload, lease.attempts) == (b"stuck", 2)
    go.set()
    assert log.next() is True
    lease.complete()
    assert one.stats().handled == 1


def test_stopping_tasks_at_once_cancels_them_and_returns_their_items(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([b"1", b"2"])

    async def handle(item: Item) -> None:
        try:
            log.add("begun")
            await asyncio.sleep(WAIT)
        finally:
            log.add("cancelled")

    one = Worker(queue, handle, concurrency=2, handler_timeout=WAIT)
    running = WorkerThread(one)
    assert log.take(2) == ["begun"] * 2
    one.stop()
    one.stop(at_once=True)
    assert running.ended() == []
    assert log.rest() == ["cancelled"] * 2
    assert [lease.attempts for lease in queue.lease(10)] == [1, 1]


def test_a_task_that_will_not_be_cancelled_is_not_waited_for(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", lease_timeout=1)
    queue.produce(b"")
    go = threading.Event()

    async def handle(item: Item) -> None:
        log.add("begun")
        while not go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                log.add("no")

    one = Worker(queue, handle)
    running = WorkerThread(one)
    log.next()
    one.stop(at_once=True)
    assert running.ended() == []
    assert log.next() == "no"
    assert queue.lease(wait=WAIT)[0].attempts == 2
    go.set()


def test_a_progress_report_detects_a_lost_lease(queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"x")
    late: list[str] = []

    def handle(item: Item, context: Context) -> None:
        queue.clear("leased")
        context.progress("still at it")
        wait_until(lambda: context.cancelled)
        log.add("noticed")

    one = Worker(queue, handle, hooks=Hooks(late=lambda item: late.append(item.id)))
    running = WorkerThread(one)
    assert log.next() == "noticed"
    wait_until(lambda: late)
    one.stop()
    assert running.ended() == []
    assert late == ["0-0"] and one.stats().late == 1
