"""Programs whose main thread ends while another thread uses the broker."""

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import asyncio, sys, threading
import penstock
from penstock import NewItem

def items():
    return [NewItem("x", key=str(number)) for number in range(20)]

def start(work):
    def run():
        threading.main_thread().join()
        work()
        print("done", flush=True)
    threading.Thread(target=run).start()
"""
CALLS = """
broker = penstock.open(sys.argv[1])
queue = broker.create_queue("q", partitions=4)

def work():
    for _ in range(3):
        queue.produce_many(items())
        queue.lease(20).complete()
    assert [part.status for part in queue.stats().partitions] == ["active"] * 4
    broker.close()

start(work)
"""
OPEN = """
def work():
    with penstock.open(sys.argv[1]) as broker:
        queue = broker.create_queue("q", partitions=4)
        queue.produce_many(items())
        assert len(queue.lease(20, wait=5)) == 20

start(work)
"""
WORKER = """
broker = penstock.open(sys.argv[1])
queue = broker.create_queue("q", partitions=4)
handled = threading.Semaphore(0)
worker = penstock.Worker(queue, lambda item: handled.release(), concurrency=8)

def work():
    queue.produce_many(items())
    running = threading.Thread(target=worker.run)
    running.start()
    for _ in range(20):
        assert handled.acquire(timeout=20)
    worker.stop()
    running.join()
    assert queue.stats().completed == 20
    broker.close()

start(work)
"""
ASYNC = """
async def handle(item):
    handled.release()

async def main():
    async with await penstock.aopen(sys.argv[1]) as broker:
        queue = await broker.create_queue("q", partitions=4)
        await queue.produce_many(items())
        await (await queue.lease(20)).complete()
        await queue.produce_many(items())
        worker = penstock.Worker(queue, handle, concurrency=3)
        running = asyncio.ensure_future(worker.arun())
        for _ in range(20):
            await handled.acquire()
        worker.stop()
        await running
        assert (await queue.stats()).completed == 40

handled = asyncio.Semaphore(0)
start(lambda: asyncio.run(main()))
"""


@pytest.mark.parametrize("program", [CALLS, OPEN, WORKER, ASYNC], ids=["calls", "open", "worker", "async"])
def test_a_program_whose_main_thread_ends(program: str, tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", START + program, str(tmp_path / "data")], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "done\n", "")
