"""Calls that wait: what wakes them, and what happens when they are cancelled."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import AsyncQueue, Broker, LeaseBatch, NewItem, Queue
from penstock.errors import BrokerClosed, InvalidRequest, QueueNotFound
from tests.api.both_apis import WAIT


@pytest.fixture
def plain() -> Any:
    with penstock.open("memory://") as broker:
        yield broker


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def wait_for(queue: Queue, consumers: int) -> None:
    """Wait until this many consumers wait."""
    while queue.stats().waiting_consumers < consumers:
        pass


# -- threads -----------------------------------------------------------------------------------------


def resume(queue: Queue) -> None:
    queue.pause(produce=False)
    queue.produce(b"new")
    queue.resume()


def redrive_in_place(broker: Broker, queue: Queue) -> None:
    queue.lease(request_id="held")[0].bury("bad")
    broker.redrive(queue, to=queue)


def seek(queue: Queue) -> None:
    queue.complete(queue.lease(request_id="held"))
    queue.seek("0-0")


WAKERS: list[tuple[str, Callable[[Broker, Queue], object]]] = [
    ("produce", lambda _, q: q.produce(b"new")),
    ("retry", lambda _, q: q.lease(request_id="held")[0].retry()),
    ("delayed retry", lambda _, q: q.lease(request_id="held")[0].retry(delay=0.02)),
    ("schedule", lambda _, q: q.produce(b"new", at=q.lease(request_id="held")[0].item.produced_at + timedelta(seconds=0.3))),
    ("resume", lambda _, q: resume(q)),
    ("redrive", lambda b, q: b.redrive("other", to=q)),
    ("redrive in place", redrive_in_place),
    ("dead letter", lambda b, _: b.queue("source").lease()[0].bury("bad")),
    ("follow-up", lambda b, _: b.queue("other").lease()[0].complete(then=[NewItem(b"next", queue="orders")])),
    ("released key", lambda _, q: q.complete(q.lease(request_id="key"))),
    ("seek", lambda _, q: seek(q)),
]


@pytest.mark.parametrize("wake", [case[1] for case in WAKERS], ids=[case[0] for case in WAKERS])
def test_a_waiting_lease_is_woken(plain: Broker, pool: ThreadPoolExecutor, wake: Callable[[Broker, Queue], object]) -> None:
    queue = plain.create_queue("orders")
    plain.create_queue("other").produce(b"other")
    plain.create_queue("source", dead_queue=queue).produce(b"dead")
    queue.produce(b"held")
    queue.lease(request_id="held")
    queue.produce_many([NewItem(b"1", key="k"), NewItem(b"2", key="k")])
    queue.lease(request_id="key")
    waiting: Future[LeaseBatch] = pool.submit(queue.lease, wait=WAIT)
    wait_for(queue, 1)
    wake(plain, queue)
    assert len(waiting.result(WAIT)) == 1


def test_waiting_consumers_share_new_items(plain: Broker, pool: ThreadPoolExecutor) -> None:
    queue = plain.create_queue("orders")
    waiting = []
    for opener, want in enumerate((20, 6, 1)):
        waiting.append(pool.submit(queue.lease, want, wait=WAIT))
        wait_for(queue, opener + 1)
    queue.produce_many([b""] * 23)
    assert [len(one.result(WAIT)) for one in waiting] == [16, 6, 1]


def test_an_expired_lease_wakes_a_waiting_consumer(plain: Broker) -> None:
    queue = plain.create_queue("orders")
    queue.produce(b"1")
    queue.lease(lease_timeout=1)
    assert queue.lease(wait=WAIT)[0].attempts == 2


def test_a_producer_waits_for_room(plain: Broker, pool: ThreadPoolExecutor) -> None:
    queue = plain.create_queue("orders", max_items=1)
    queue.produce(b"1")
    waiting = pool.submit(queue.produce, b"2", timeout=WAIT)
    while not queue.stats().waiting_producers:
        pass
    queue.lease().complete()
    assert waiting.result(WAIT) == "0-1"


def test_closing_ends_all_waiting_calls(plain: Broker, pool: ThreadPoolExecutor) -> None:
    queue = plain.create_queue("orders")
    waiting = [pool.submit(queue.lease, wait=WAIT) for _ in range(4)]
    wait_for(queue, 4)
    plain.close()
    for one in waiting:
        with pytest.raises(BrokerClosed):
            one.result(WAIT)


def test_deleting_a_queue_ends_its_waiting_calls(plain: Broker, pool: ThreadPoolExecutor) -> None:
    queue = plain.create_queue("orders")
    waiting = pool.submit(queue.lease, wait=WAIT)
    wait_for(queue, 1)
    queue.delete()
    with pytest.raises(QueueNotFound):
        waiting.result(WAIT)


def test_many_threads_handle_every_item_once_and_keys_in_order(tmp_path: Path) -> None:
    done: dict[str, list[int]] = {}
    holding: set[str] = set()
    failed: set[bytes] = set()
    lock = threading.Lock()

    def work(queue: Queue) -> None:
        while batch := queue.lease(7, wait=1):
            for lease in batch:
                key, payload = str(lease.item.key), lease.item.payload
                with lock:
                    assert key not in holding, "two of a key at once"
                    holding.add(key)
                    fails = payload not in failed
                    failed.add(payload)
                    holding.remove(key)
                    if not fails:
                        done.setdefault(key, []).append(int(payload.split()[1]))
                lease.retry(delay=0.001, reason="first time") if fails else lease.complete()

    with penstock.open(tmp_path / "data", durability="os") as broker, ThreadPoolExecutor(8) as pool:
        queue = broker.create_queue("orders", partitions=4)
        for n in range(10):
            queue.produce_many([NewItem(b"%d %d" % (key, n), key=str(key)) for key in range(10)])
        for one in [pool.submit(work, queue) for _ in range(8)]:
            one.result()
    assert done == {str(key): list(range(10)) for key in range(10)}


# -- asyncio -----------------------------------------------------------------------------------------


async def until_waiting(queue: AsyncQueue, consumers: int) -> None:
    while (await queue.stats()).waiting_consumers != consumers:
        pass


def test_tasks_wait_without_blocking_each_other() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            waiting = [asyncio.create_task(queue.lease(wait=WAIT)) for _ in range(50)]
            await until_waiting(queue, 50)
            await queue.produce_many([b"%d" % n for n in range(50)])
            batches = await asyncio.gather(*waiting)
            assert sorted(int(batch[0].item.payload) for batch in batches) == list(range(50))
            await asyncio.gather(*(batch.complete() for batch in batches))
            assert (await queue.stats()).completed == 50

    asyncio.run(main())


def test_an_async_broker_needs_its_threads() -> None:
    with pytest.raises(InvalidRequest, match="the async API needs the broker's threads; leave it out"):
        asyncio.run(penstock.aopen("memory://", threaded=False))


def test_a_cancelled_task_gets_no_items() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            task = asyncio.create_task(queue.lease(wait=WAIT))
            await until_waiting(queue, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await queue.produce(b"1")
            (lease,) = await queue.lease(wait=WAIT)
            assert lease.attempts == 1

    asyncio.run(main())


def test_items_leased_for_a_cancelled_task_return_to_the_queue() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            for _ in range(50):
                await queue.produce(b"1")
                task = asyncio.create_task(queue.lease())
                await asyncio.sleep(0)  # the request is sent, and may be answered before the task is cancelled
                task.cancel()
                await asyncio.wait([task])
                batch = task.result() if not task.cancelled() else await queue.lease(wait=WAIT)
                assert [lease.attempts for lease in batch] == [1]
                await batch.complete()

    asyncio.run(main())


def test_asyncio_timeout_ends_a_waiting_lease_at_once() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await queue.lease(wait=900)
            await until_waiting(queue, 0)

    asyncio.run(main())


def test_closing_ends_the_calls_of_all_waiting_tasks() -> None:
    async def main() -> None:
        broker = await penstock.aopen("memory://")
        queue = await broker.create_queue("orders")
        tasks = [asyncio.create_task(queue.lease(wait=WAIT)) for _ in range(3)]
        await until_waiting(queue, 3)
        await broker.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [BrokerClosed] * 3

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [True, False])
def test_an_event_loop_that_ends_leaves_nothing_leased(orderly: bool) -> None:
    """orderly: the waiting task is cancelled. Otherwise its event loop is closed before the answer comes."""
    loop = asyncio.new_event_loop()
    broker = loop.run_until_complete(penstock.aopen("memory://"))
    queue = loop.run_until_complete(broker.create_queue("orders"))
    task: Any = loop.create_task(queue.lease(wait=WAIT))
    loop.run_until_complete(until_waiting(queue, 1))
    if orderly:
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
    task._log_destroy_pending = False
    loop.close()
    with asyncio.Runner() as runner:
        runner.run(queue.produce(b"1"))
        assert [lease.attempts for lease in runner.run(queue.lease(wait=WAIT))] == [1]
        runner.run(broker.close())


def test_an_async_cursor_follows() -> None:
    async def read(queue: AsyncQueue) -> list[int]:
        seen: list[int] = []
        async for item in await queue.cursor("audit", follow=True):
            seen.append(int(item.payload))
            if len(seen) == 20:
                break
        return seen

    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            reader = asyncio.create_task(read(queue))
            for n in range(20):
                await queue.produce(b"%d" % n)
            assert await reader == list(range(20))

    asyncio.run(main())


def test_with_blocks_of_the_async_api() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            await queue.produce_many([b"1", b"2"])
            async with (await queue.lease())[0] as lease:
                assert lease.item.payload == b"1"
            with pytest.raises(ValueError, match="bad"):
                async with await queue.lease() as batch:
                    raise ValueError("bad")
            assert (lease.state, batch[0].state) == ("completed", "retried")

    asyncio.run(main())
