"""Measures a worker, compared with its handlers without a worker.

    make bench-worker                    (python benchmarks/worker.py [--rounds N] [--no-write])

100-byte random payloads; completions are durable. The ideal is the same handlers run without a worker, by as many
threads, tasks or processes, once before and once after the worker. Every figure and every ratio is the median of
several rounds, because machines are noisy: read the ratios. `against.py` runs this with the code of another commit.
Writes benchmarks/results/worker.json.
"""

import asyncio
import multiprocessing
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from rounds import Figures, Rounds

import penstock
from penstock.worker.worker import Worker

PAYLOAD = 100
BATCH = 1_000
NOOPS = 300_000
HOT_KEYS, HOT_ITEMS = 10, 20_000
"""Few keys with long lines, in batches."""
PROCESSES = 2
SPINS = 40_000
"""Loop steps of the handler that uses the CPU: about a millisecond."""
SPUN = 4_000
"""Items for the handler that uses the CPU."""
MILLISECONDS = {16: 15_000, 256: 40_000}
"""Concurrency, and number of items whose handler sleeps a millisecond."""
WARM = 20
"""Items per handler slot that are handled before the measurement: threads and processes have started then."""


def nothing(item: object) -> None:
    """A handler that does nothing."""


async def anothing(item: object) -> None:
    """A handler that does nothing, in an event loop."""


def millisecond(item: object) -> None:
    time.sleep(0.001)


async def amillisecond(item: object) -> None:
    await asyncio.sleep(0.001)


def spin(item: object) -> None:
    number = 0
    for step in range(SPINS):
        number += step


# -- bare ------------------------------------------------------------------------------------------------


def bare_threads(handler: Callable[[Any], None], items: list[Any], threads: int) -> float:
    """Items per second of the handler in threads, without a worker."""
    waiting = deque(items)
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        ready.wait()
        try:
            while True:
                handler(waiting.popleft())
        except IndexError:
            return

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for one in workers:
        one.start()
    ready.wait()
    began = time.perf_counter()
    for one in workers:
        one.join()
    return len(items) / (time.perf_counter() - began)


def bare_tasks(handler: Callable[[Any], Awaitable[None]], items: list[Any], tasks: int) -> float:
    waiting = deque(items)

    async def work() -> None:
        try:
            while True:
                await handler(waiting.popleft())
        except IndexError:
            return

    async def run() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(tasks)))
        return len(items) / (time.perf_counter() - began)

    return asyncio.run(run())


def _spin_many(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        spin(None)
    return time.perf_counter() - began


def bare_processes(count: int, processes: int) -> float:
    """Items per second of the handler in processes, each with a fixed part of the items."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_spin_many, [1] * processes, 1)
        began = time.perf_counter()
        pool.map(_spin_many, [count // processes] * processes, 1)
        return count / (time.perf_counter() - began)


# -- workers ---------------------------------------------------------------------------------------------


def produced(root: Path, count: int, rng: random.Random, keys: int) -> tuple[Path, penstock.Broker, penstock.Queue]:
    """A queue with so many items; with `keys`, each has one of so many keys."""
    directory = Path(tempfile.mkdtemp(dir=root))
    broker = penstock.open(directory)
    queue = broker.create_queue("bench")
    payloads = [rng.randbytes(PAYLOAD) for _ in range(BATCH)]
    for start in range(0, count, BATCH):
        some = payloads[: min(BATCH, count - start)]
        queue.produce_many([penstock.NewItem(payload, key=f"key-{rng.randrange(keys)}") for payload in some] if keys else some)
    return directory, broker, queue


def handled(root: Path, handler: Callable[[Any], Any], count: int, rng: random.Random, *, keys: int = 0, **options: Any) -> float:
    """Items per second of a worker, from when it is warm until the last is settled."""
    warm: int = WARM * max(options.values())
    directory, broker, queue = produced(root, count + warm, rng, keys)
    worker = Worker(queue, handler, **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    while (before := worker.stats().handled) < warm:
        time.sleep(0.001)
    began = time.perf_counter()
    while worker.stats().handled < count + warm:
        time.sleep(0.002)
    took = time.perf_counter() - began
    worker.stop()
    thread.join()
    broker.close()
    shutil.rmtree(directory)
    return (count + warm - before) / took


# -- measurements ----------------------------------------------------------------------------------------


def compared(figures: Figures, name: str, bare: Callable[[], float], worker: Callable[[], float]) -> None:
    """Measure a worker, and the same handler without a worker before and after it."""
    before = bare()
    figures[name].append(worker())
    figures[f"bare_{name}"].append((before + bare()) / 2)


def noops(root: Path, rng: random.Random, figures: Figures) -> None:
    """Handlers that do nothing: what the worker itself needs."""
    figures["noop_threads"].append(handled(root, nothing, NOOPS, rng, concurrency=16))
    figures["noop_tasks"].append(handled(root, anothing, NOOPS, rng, concurrency=16))
    figures["noop_batch"].append(handled(root, nothing, NOOPS, rng, batch=BATCH))
    figures["noop_processes"].append(handled(root, nothing, NOOPS // 4, rng, processes=PROCESSES))


def hot_keys(root: Path, rng: random.Random, figures: Figures) -> None:
    figures["noop_batch_keys"].append(handled(root, nothing, HOT_ITEMS, rng, keys=HOT_KEYS, batch=BATCH))


def milliseconds(root: Path, rng: random.Random, figures: Figures) -> None:
    for many, count in MILLISECONDS.items():
        items: list[Any] = [None] * count
        compared(
            figures,
            f"millisecond_threads_{many}",
            partial(bare_threads, millisecond, items, many),
            partial(handled, root, millisecond, count, rng, concurrency=many),
        )
        compared(
            figures,
            f"millisecond_tasks_{many}",
            partial(bare_tasks, amillisecond, items, many),
            partial(handled, root, amillisecond, count, rng, concurrency=many),
        )


def spins(root: Path, rng: random.Random, figures: Figures) -> None:
    compared(
        figures, "spin_processes", partial(bare_processes, SPUN, PROCESSES), partial(handled, root, spin, SPUN, rng, processes=PROCESSES)
    )
    figures["spin_threads"].append(handled(root, spin, SPUN // 4, rng, concurrency=PROCESSES))


def ratios(figures: Figures) -> dict[str, tuple[float, str]]:
    """The ratios with their aims; those of which one side was not measured are left out."""
    wanted = {
        f"1 ms handlers in {many} {how}, of the same run bare": (f"millisecond_{how}_{many}", f"bare_millisecond_{how}_{many}", "≥ 0.9")
        for many in MILLISECONDS
        for how in ("threads", "tasks")
    }
    wanted[f"CPU handlers in {PROCESSES} processes, of the same run bare"] = ("spin_processes", "bare_spin_processes", "–")
    wanted[f"CPU handlers in {PROCESSES} processes, of {PROCESSES} threads"] = ("spin_processes", "spin_threads", "–")
    return {
        name: (statistics.median(one / other for one, other in zip(figures[top], figures[bottom], strict=True)), aim)
        for name, (top, bottom, aim) in wanted.items()
        if top in figures and bottom in figures
    }


def main() -> None:
    rounds = Rounds("worker", __doc__, rounds=3)
    rng, figures = random.Random(1), rounds.figures
    steps: dict[str, Callable[[Path], None]] = {
        "noops": lambda root: noops(root, rng, figures),
        "hot keys": lambda root: hot_keys(root, rng, figures),
        "milliseconds": lambda root: milliseconds(root, rng, figures),
        "spins": lambda root: spins(root, rng, figures),
    }
    found = rounds.run(steps)
    read = ratios(figures)
    print(f"{'':70} measured      aim")
    for name, what, aim in (
        ("noop_threads", "threads", "≥ 50,000"),
        ("noop_tasks", "tasks", "≥ 50,000"),
        ("noop_batch", f"batches of {BATCH:,}", "–"),
        ("noop_batch_keys", f"{HOT_KEYS} keys, batches of {BATCH:,}", "≥ 50,000"),
        ("noop_processes", "processes", "–"),
    ):
        if name in found:
            print(f"{'handlers that do nothing, ' + what + ': items per second':70} {found[name]:8,.0f} {aim:>8}")
    for name, (value, aim) in read.items():
        print(f"{name:70} {value:8.2f} {aim:>8}")
    rounds.write({name: value for name, (value, _) in read.items()}, found, payload_bytes=PAYLOAD)


if __name__ == "__main__":
    main()
