"""Operations that tasks of an event loop send to a broker."""

import asyncio
import threading
from typing import Any

import pytest

import penstock
from penstock import AsyncQueue
from penstock.api.homes import SMALL_BYTES, SMALL_ITEMS, _is_small
from penstock.operations import LeaseItems, Operation, ProduceItems, ReadStats, SettleItems
from penstock.words.batch import Batch
from tests.api.both_apis import WAIT
from tests.api.test_waiting import until_waiting


def turns_of(queue: AsyncQueue) -> int:
    home: Any = queue.home
    turns: int = home.loop(queue.incarnation).meter.turns
    return turns


def test_operations_of_one_round_of_the_event_loop_share_a_turn() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            await queue.produce(b"first")
            before = turns_of(queue)
            ids = await asyncio.gather(*(queue.produce(b"%d" % number) for number in range(50)))
            assert len(set(ids)) == 50
            assert turns_of(queue) <= before + 5  # a timer may have run some

    asyncio.run(main())


def test_answers_do_not_keep_other_tasks_from_running() -> None:
    """Each call lets the other tasks run, although its answer is there at once."""

    async def main() -> None:
        rounds = 0

        async def count() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            await queue.produce(b"first")
            counting = asyncio.create_task(count())
            for expected in range(1, 20):
                await queue.produce(b"next")
                assert rounds >= expected
            counting.cancel()

    asyncio.run(main())


def test_a_task_that_is_cancelled_before_its_operation_is_sent_does_nothing() -> None:
    async def main() -> None:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            task = asyncio.create_task(queue.produce(b"cancelled"))
            await asyncio.sleep(0)  # the task has called `produce`, and its round is not over
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await queue.produce(b"next")
            assert (await queue.stats()).produced == 1

    asyncio.run(main())


def test_a_broker_can_be_used_in_several_event_loops_at_once() -> None:
    found: list[str] = []
    broker = asyncio.run(penstock.aopen("memory://"))

    async def produce() -> None:
        queue = await broker.create_queue("orders", exist_ok=True)
        for _ in range(20):
            found.extend(await asyncio.gather(*(queue.produce(b"item") for _ in range(5))))

    threads = [threading.Thread(target=asyncio.run, args=(produce(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(set(found)) == 300
    asyncio.run(broker.close())


def test_items_of_all_tasks_of_a_closed_event_loop_return_to_the_queue() -> None:
    loop = asyncio.new_event_loop()
    broker = loop.run_until_complete(penstock.aopen("memory://"))
    queue = loop.run_until_complete(broker.create_queue("orders"))
    tasks: list[Any] = [loop.create_task(queue.lease(wait=WAIT)) for _ in range(3)]
    loop.run_until_complete(until_waiting(queue, 3))
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()

    async def main() -> None:
        for number in range(3):
            await queue.produce(b"%d" % number)
        got: list[bytes] = []
        while len(got) < 3:
            got += (await queue.lease(3, wait=WAIT)).payloads
        assert sorted(got) == [b"0", b"1", b"2"]
        await broker.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("operation", "small"),
    [
        (ProduceItems(queue=1, batch=Batch([b"x"] * SMALL_ITEMS)), True),
        (ProduceItems(queue=1, batch=Batch([b"x"] * (SMALL_ITEMS + 1))), False),
        (ProduceItems(queue=1, batch=Batch([bytes(SMALL_BYTES)] * 2)), False),
        (LeaseItems(queue=1, count=SMALL_ITEMS), True),
        (LeaseItems(queue=1, count=SMALL_ITEMS + 1), False),
        (SettleItems(queue=1, action="complete", parts=[]), True),
        (SettleItems(queue=1, action="complete", parts=[], then=[(1, Batch([b"x"]))]), False),
        (ReadStats(queue=1), False),
    ],
)
def test_only_small_operations_run_in_the_thread_of_the_event_loop(operation: Operation[Any], small: bool) -> None:
    assert _is_small(operation) is small
