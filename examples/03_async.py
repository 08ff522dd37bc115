"""The async API: a producer and three consumers in one event loop.

python examples/03_async.py
"""

import asyncio

import penstock


async def produce(queue: penstock.AsyncQueue) -> None:
    for number in range(30):
        await queue.produce({"n": number}, key=f"sensor-{number % 5}")


async def consume(queue: penstock.AsyncQueue, name: str, seen: dict[str, list[int]]) -> None:
    while leases := await queue.lease(5, wait=0.5, consumer=name):
        for lease in leases:
            seen.setdefault(lease.item.key, []).append(lease.item.value["n"])
        await leases.complete()


async def main() -> None:
    seen: dict[str, list[int]] = {}
    async with await penstock.aopen("memory://") as broker:
        queue = await broker.create_queue("readings", partitions=2)
        await asyncio.gather(produce(queue), *(consume(queue, f"consumer-{n}", seen) for n in range(3)))
        print(f"{(await queue.stats()).completed} handled")
    for key, numbers in sorted(seen.items()):
        print(key, numbers, "in order" if numbers == sorted(numbers) else "OUT OF ORDER")


asyncio.run(main())
