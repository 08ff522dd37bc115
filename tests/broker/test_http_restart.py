"""Clients of a server that is killed and started again on the same port: they carry on, and nothing is done twice."""

import asyncio
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import penstock
from tests.broker.server_process import ServerProcess
from tests.broker.test_http_home import WAIT


def test_calls_and_waiting_leases_carry_on_when_the_server_is_killed(tmp_path: Path) -> None:
    produced: set[str] = set()
    found: SimpleQueue[str] = SimpleQueue()
    enough, done, all_produced = threading.Event(), threading.Event(), threading.Event()
    with ServerProcess(tmp_path / "data") as server, penstock.open(server.url) as broker:
        queue = broker.create_queue("orders", partitions=3)
        quiet = broker.create_queue("quiet")
        waited: SimpleQueue[Any] = SimpleQueue()
        waiter = threading.Thread(target=lambda: waited.put(quiet.lease(wait=60)))
        waiter.start()

        def produce(number: int) -> None:
            count = 0
            while not done.is_set():
                queue.produce(f"{number}-{count}", key=f"{number}")
                produced.add(f"{number}-{count}")
                count += 1
                if count == 30:
                    enough.set()

        def consume() -> None:
            while not all_produced.is_set() or queue.stats().ready:
                for lease in queue.lease(10, wait=0.5):
                    lease.complete()
                    found.put(lease.item.value)

        producers, consumer = [threading.Thread(target=produce, args=(number,)) for number in range(3)], threading.Thread(target=consume)
        for thread in (*producers, consumer):
            thread.start()
        for _ in range(2):
            assert enough.wait(WAIT)
            server.kill()
            enough.clear()
            server.restart()
            goal = len(produced) + 60
            while len(produced) < goal:
                threading.Event().wait(0.005)
            enough.set()
        done.set()
        for thread in producers:
            thread.join()
        all_produced.set()
        consumer.join()
        values = [found.get() for _ in range(found.qsize())]
        assert sorted(values) == sorted(produced) and len({*values}) == len(values)
        for number in range(3):
            own = [int(value.partition("-")[2]) for value in values if value.startswith(f"{number}-")]
            assert own == sorted(own), "in the order of their key"
        quiet.produce("at last")
        (lease,) = waited.get(timeout=WAIT)
        assert lease.item.value == "at last"
        waiter.join()


def test_async_calls_carry_on_too(tmp_path: Path) -> None:
    async def use(server: ServerProcess) -> list[str]:
        async with await penstock.aopen(server.url) as broker:
            queue = await broker.create_queue("orders", partitions=3)
            calls = [asyncio.ensure_future(queue.produce(str(number))) for number in range(200)]
            await calls[0]
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.restart)
            ids = await asyncio.gather(*calls)
            assert len({*ids}) == 200
            return [item.value for item in await queue.items(limit=1_000)]

    with ServerProcess(tmp_path / "data") as server:
        values = asyncio.run(use(server))
    assert sorted(values) == sorted(str(number) for number in range(200))
