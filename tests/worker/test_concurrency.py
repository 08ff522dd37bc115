"""Concurrency, rates and weights of a worker."""

import asyncio
import threading
from collections import Counter

import pytest

import penstock
from penstock import Broker, Item, NewItem, Queue
from penstock.errors import BrokerClosed, QueueNotFound
from penstock.words.clock import SystemClock
from penstock.worker.worker import Worker
from tests.worker.harness import WAIT, HandlerEvents, WorkerThread, running_worker, wait_completed, wait_until


class ConcurrencyProbe:
    """A handler that waits for `go` and counts how many calls run at once."""

    def __init__(self, log: HandlerEvents) -> None:
        self.log = log
        self.go = threading.Event()
        self._lock = threading.Lock()
        self.now = 0
        self.most = 0

    def handle(self, item: Item) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.log.add(item)
        self.go.wait(WAIT)
        with self._lock:
            self.now -= 1

    async def ahandle(self, item: Item) -> None:
        await asyncio.to_thread(self.handle, item)


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_concurrency_limits_the_running_handlers(queue: Queue, log: HandlerEvents, how: str) -> None:
    queue.produce_many([b""] * 30)
    probe = ConcurrencyProbe(log)
    with running_worker(Worker(queue, probe.handle if how == "threads" else probe.ahandle, concurrency=5)) as _:
        log.take(5)
        assert probe.now == 5
        assert queue.stats().ready == 25  # items that cannot start are not leased
        probe.go.set()
        wait_completed(queue, 30)
    assert probe.most == 5


def test_per_partition_limits_the_handlers_of_each_partition(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", partitions=4)
    for _ in range(4):
        queue.produce_many([b""] * 10)  # each to another partition
    probe = ConcurrencyProbe(log)
    busy: Counter[int] = Counter()
    with running_worker(Worker(queue, probe.handle, concurrency=8, per_partition=2)):
        for item in log.take(8):
            busy[item.partition] += 1
        assert busy == {0: 2, 1: 2, 2: 2, 3: 2}
        probe.go.set()
        wait_completed(queue, 40)


def test_per_partition_1_handles_a_partition_in_order(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", partitions=4)
    queue.produce_many([b"%d" % n for n in range(100)])
    probe = ConcurrencyProbe(log)
    with running_worker(Worker(queue, probe.handle, concurrency=8, per_partition=1)):
        items = log.take(1)
        wait_until(lambda: queue.stats().leased, lambda leased: leased > 8)  # items over the limit wait in the buffer
        assert probe.now == 1
        probe.go.set()
        items += log.take(99)
        wait_completed(queue, 100)
    assert probe.most == 1
    assert [int(item.payload) for item in items] == list(range(100))


def test_queues_share_the_handlers_by_weight(broker: Broker, log: HandlerEvents) -> None:
    orders, mail = broker.create_queue("orders"), broker.create_queue("mail")
    orders.produce_many([NewItem(b"", kind="orders")] * 100)
    mail.produce_many([NewItem(b"", kind="mail")] * 100)
    probe = ConcurrencyProbe(log)
    with running_worker(Worker({orders: 3, mail: 1}, probe.handle, concurrency=16)):
        log.take(16)  # the queue that was leased first may have got all handlers
        probe.go.set()
        begun = Counter(item.kind for item in log.take(100))
        wait_completed(orders, 100)
        wait_completed(mail, 100)
    assert probe.most <= 16
    assert begun["orders"] and begun["mail"], "each queue gets handlers before the other has ended; test_buffer.py tests the shares"


def test_the_share_of_an_idle_queue_goes_to_the_others(broker: Broker, log: HandlerEvents) -> None:
    orders, mail = broker.create_queue("orders"), broker.create_queue("mail")
    probe = ConcurrencyProbe(log)
    mail.produce_many([b"1"] * 16)
    with running_worker(Worker({orders: 3, mail: 1}, probe.handle, concurrency=16)):
        log.take(16)
        orders.produce(b"2")
        probe.go.set()
        assert log.next().payload == b"2"
        wait_completed(orders, 1)


def test_a_list_of_queues_is_served_alike(broker: Broker, log: HandlerEvents) -> None:
    queues = [broker.create_queue(name) for name in ("a", "b", "c")]
    for queue in queues:
        queue.produce_many([NewItem(b"", kind=queue.name)] * 10)
    with running_worker(Worker(queues, lambda item: log.add(item.kind))):
        assert Counter(log.take(30)) == {"a": 10, "b": 10, "c": 10}
        for queue in queues:
            wait_completed(queue, 10)


def test_a_rate_is_kept(broker: Broker, log: HandlerEvents) -> None:
    slow, fast = broker.create_queue("slow"), broker.create_queue("fast")
    slow.produce_many([b"s"] * 40)
    fast.produce_many([b"f"] * 500)
    clock = SystemClock()
    began = clock.read().elapsed
    with running_worker(Worker([slow, fast], lambda item: log.add(item.payload), concurrency=4, rate={slow: 50})):
        wait_completed(fast, 500)
        wait_completed(slow, 30)
        took = (clock.read().elapsed - began) / 1e6
    assert took >= (30 - 5 - 1) / 50  # the limit keeps at most 0.1 s of unused rate


def test_stats_count_the_items_of_a_worker(queue: Queue, log: HandlerEvents) -> None:
    probe = ConcurrencyProbe(log)
    one = Worker(queue, probe.handle, concurrency=3)
    assert one.stats().handled == one.stats().in_hand == 0
    queue.produce_many([b""] * 3)
    with running_worker(one):
        log.take(3)
        assert one.stats().in_hand == 3
        probe.go.set()
        stats = wait_until(one.stats, lambda stats: stats.handled == 3)
        assert stats.in_hand == 0 and stats.per_second > 0


def test_an_idle_worker_leases_new_items_after_its_lease_request_has_ended(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", lease_timeout=1)
    with running_worker(Worker(queue, lambda item: log.add(item.payload))):
        wait_until(lambda: broker.metrics().queues["orders"].requests.get("lease", 0), lambda count: count >= 3)
        queue.produce(b"x")
        assert log.next() == b"x"


# -- in an async program -----------------------------------------------------------------------------------------


def test_arun_runs_handlers_in_its_own_loop() -> None:
    async def program() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            loops: asyncio.Queue[object] = asyncio.Queue()

            async def handle(item: Item) -> None:
                await loops.put(asyncio.get_running_loop())

            one = Worker(queue, handle, concurrency=4)
            task = asyncio.create_task(one.arun())
            await queue.produce_many([b""] * 50)
            for _ in range(50):
                assert await asyncio.wait_for(loops.get(), WAIT) is asyncio.get_running_loop()
            one.stop()
            await asyncio.wait_for(task, WAIT)
            assert (await queue.stats()).completed == 50

    asyncio.run(program())


def test_cancelling_arun_drains_it() -> None:
    async def program() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            begun, go = asyncio.Event(), asyncio.Event()

            async def handle(item: Item) -> None:
                begun.set()
                await go.wait()

            one = Worker(queue, handle)
            task = asyncio.create_task(one.arun())
            await queue.produce_many([b""] * 2)
            await asyncio.wait_for(begun.wait(), WAIT)
            task.cancel()
            while one._run is None or not one._run._draining:
                await asyncio.sleep(0)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            stats = await queue.stats()
            assert (stats.completed, stats.ready, stats.leased) == (1, 1, 0)

    asyncio.run(program())


def test_arun_runs_plain_handlers_in_threads() -> None:
    async def program() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            threads: set[str] = set()

            def handle(item: Item) -> None:
                threads.add(threading.current_thread().name)
                one.stop()

            one = Worker(queue, handle)
            await queue.produce(b"")
            await asyncio.wait_for(one.arun(), WAIT)
            assert threads == {"penstock handler 1"}

    asyncio.run(program())


# -- when the queue is no more ---------------------------------------------------------------------------------------


def test_a_broker_that_is_closed_ends_the_worker(log: HandlerEvents) -> None:
    broker = penstock.open("memory://")
    queue = broker.create_queue("orders")
    queue.produce(b"")
    running = WorkerThread(Worker(queue, log.add))
    log.next()
    broker.close()
    assert [type(error) for error in running.ended()] == [BrokerClosed]


def test_a_queue_that_is_deleted_ends_the_worker(broker: Broker, queue: Queue, log: HandlerEvents) -> None:
    go = threading.Event()
    queue.produce(b"")

    def handle(item: Item) -> None:
        log.add("begun")
        go.wait(WAIT)

    running = WorkerThread(Worker(queue, handle, concurrency=2))
    log.next()
    queue.delete()
    go.set()
    assert [type(error) for error in running.ended()] == [QueueNotFound]
