"""Measures a worker, compared with its handlers without a worker.

    make bench-worker                    (python benchmarks/worker.py [--rounds N] [--no-write])

100-byte random payloads; completions are durable. The ideal is the same handlers run without a worker, by as many
threads, tasks or processes, once before and once after the worker. Every figure and every ratio is the median of
several rounds, because machines are noisy: read the ratios. Writes benchmarks/results/worker.json.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

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
RESULTS = Path(__file__).parent / "results" / "worker.json"

Figures = dict[str, list[float]]


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


def one_round(root: Path, rng: random.Random, figures: Figures) -> None:
    figures["noop_threads"].append(handled(root, nothing, NOOPS, rng, concurrency=16))
    figures["noop_tasks"].append(handled(root, anothing, NOOPS, rng, concurrency=16))
    figures["noop_batch"].append(handled(root, nothing, NOOPS, rng, batch=500))
    figures["noop_batch_keys"].append(handled(root, nothing, HOT_ITEMS, rng, keys=HOT_KEYS, batch=BATCH))
    figures["noop_processes"].append(handled(root, nothing, NOOPS // 4, rng, processes=PROCESSES))
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
    compared(
        figures, "spin_processes", partial(bare_processes, SPUN, PROCESSES), partial(handled, root, spin, SPUN, rng, processes=PROCESSES)
    )
    figures["spin_threads"].append(handled(root, spin, SPUN // 4, rng, concurrency=PROCESSES))


def ratios(figures: Figures) -> dict[str, tuple[float, str]]:
    """The ratios with their aims."""

    def ratio(name: str, of: str) -> float:
        return statistics.median(one / other for one, other in zip(figures[name], figures[of], strict=True))

    made = {
        f"1 ms handlers in {many} {how}, of the same run bare": (
            ratio(f"millisecond_{how}_{many}", f"bare_millisecond_{how}_{many}"),
            "≥ 0.9",
        )
        for many in MILLISECONDS
        for how in ("threads", "tasks")
    }
    made[f"CPU handlers in {PROCESSES} processes, of the same run bare"] = (ratio("spin_processes", "bare_spin_processes"), "–")
    made[f"CPU handlers in {PROCESSES} processes, of {PROCESSES} threads"] = (ratio("spin_processes", "spin_threads"), "–")
    return made


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--no-write", action="store_true", help="print only")
    given = arguments.parse_args()
    figures: Figures = defaultdict(list)
    rng = random.Random(1)
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
            one_round(Path(root), rng, figures)
    found = {name: statistics.median(values) for name, values in figures.items()}
    read = ratios(figures)
    print(f"{'':62} measured      aim")
    for name, aim in (
        ("noop_threads", "≥ 50,000"),
        ("noop_tasks", "≥ 50,000"),
        ("noop_batch", "–"),
        ("noop_batch_keys", "≥ 50,000"),
        ("noop_processes", "–"),
    ):
        print(f"{name.replace('_', ', ') + ': items per second':62} {found[name]:8,.0f} {aim:>8}")
    for name, (value, aim) in read.items():
        print(f"{name:62} {value:8.2f} {aim:>8}")
    if not given.no_write:
        about = {"rounds": given.rounds, "python": platform.python_version(), "cores": os.cpu_count(), "payload_bytes": PAYLOAD}
        written = {"about": about, "ratios": {name: round(value, 3) for name, (value, _) in read.items()}, "per_second": found}
        RESULTS.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
