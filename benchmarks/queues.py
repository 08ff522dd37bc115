"""Measures the public API, compared with a bare partition, and how it scales with threads and partitions.

    make bench-queues                    (python benchmarks/queues.py [--items N] [--rounds N] [--no-write])

100-byte random payloads. Every figure is the median of several rounds. What is compared is measured in turn
within each round, because machines are noisy: read the ratios. Writes benchmarks/results/queues.json.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import engine
import peers

import penstock
from penstock.logs.log import Durability
from penstock.operations import ReadMetrics

BATCH = 1_000
PAYLOAD = 100
SINGLES = 3_000
THREADS = 16
PER_THREAD = 150
WIDTHS = (1, 2, 4, 8, 64)
KEYS = 100_000
HOT_KEYS = {(1_000, 1): "≥ 300,000", (10, 100): "≥ 300,000", (1, 100): "≥ 100,000"}
"""Number of keys and `per_key` of a drain of few keys with long lines, and the aim in items per second."""
PINGS = 500
VERBS = ("produce", "consume")
"""What is measured of other queues (peers.py)."""
RESULTS = Path(__file__).parent / "results" / "queues.json"

Figures = dict[str, list[float]]


@contextmanager
def queue(root: Path, durability: Durability = "fsync", partitions: int = 1) -> Iterator[penstock.Queue]:
    """A new queue in its own directory, which is removed afterwards."""
    directory = Path(tempfile.mkdtemp(dir=root))
    broker = penstock.open(directory, durability=durability)
    try:
        created = broker.create_queue("bench", partitions=partitions)
        created.produce(b"first")  # a partition is opened; that of the engine is, too
        created.lease().complete()
        yield created
    finally:
        broker.close()
        shutil.rmtree(directory)


def produce(target: penstock.Queue, batches: list[list[bytes]]) -> None:
    for payloads in batches:
        target.produce_many(payloads)


def drain(target: penstock.Queue, batch: int = BATCH, per_key: int = 1) -> int:
    """Lease a batch, make a bytes object of every payload, complete the batch."""
    done = 0
    while leases := target.lease(batch, per_key=per_key):
        done += len(leases.payloads)
        leases.complete()
    return done


async def aproduce_and_drain(directory: Path, durability: Durability, batches: list[list[bytes]], figures: Figures, name: str) -> None:
    async with await penstock.aopen(directory, durability=durability) as broker:
        target = await broker.create_queue("bench")
        await target.produce(b"first")  # the partition is opened; that of the engine is, too
        await (await target.lease()).complete()
        items = sum(map(len, batches))
        began = time.perf_counter()
        for payloads in batches:
            await target.produce_many(payloads)
        middle = time.perf_counter()
        done = 0
        while leases := await target.lease(BATCH):
            done += len(leases.payloads)
            await leases.complete()
        assert done == items
        figures[f"{name}_async_produce"].append(items / (middle - began))
        figures[f"{name}_async_drain"].append(items / (time.perf_counter() - middle))


async def aproduce_side_by_side(directory: Path, payload: bytes) -> float:
    """Single durable items from many tasks at once."""
    async with await penstock.aopen(directory) as broker:
        target = await broker.create_queue("bench")

        async def one() -> None:
            for _ in range(PER_THREAD):
                await target.produce(payload)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(THREADS)))
        return THREADS * PER_THREAD / (time.perf_counter() - began)


def threads_produce(target: penstock.Queue, threads: int, each: int, payload: bytes) -> float:
    """Items per second when threads produce single items."""
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        ready.wait()
        for _ in range(each):
            target.produce(payload)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return threads * each / (time.perf_counter() - began)


def requests_and_turns(target: penstock.Queue) -> tuple[int, int]:
    """How many produces a queue took so far, and in how many turns."""
    found = target.home.call(ReadMetrics()).queues[target.name]
    return found.requests["produce"], found.turns


def ping(target: penstock.Queue) -> list[float]:
    """Seconds from produce until a waiting lease returns, on an idle queue; one value per item."""
    sent: list[float] = []
    took: list[float] = []
    listening, heard = threading.Semaphore(0), threading.Semaphore(0)

    def consume() -> None:
        for _ in range(PINGS):
            listening.release()
            leases = target.lease(wait=30)
            took.append(time.perf_counter() - sent[-1])
            leases.complete()
            heard.release()

    consumer = threading.Thread(target=consume)
    consumer.start()
    for _ in range(PINGS):
        listening.acquire()
        while not target.stats().waiting_consumers:
            pass
        sent.append(time.perf_counter())
        target.produce(b"ping")
        heard.acquire()
    consumer.join()
    return took


def against_the_engine(root: Path, batches: list[list[bytes]], figures: Figures) -> None:
    """Batches through the API and through a bare partition, with and without fsync."""
    items = sum(map(len, batches))
    for durability in ("fsync", "os"):
        with engine.partition(root, durability) as part:
            figures[f"{durability}_engine_produce"].append(engine.per_second(items, lambda: engine.produce(part, batches)))
            figures[f"{durability}_engine_drain"].append(engine.per_second(items, lambda: engine.drain(part)))
        with queue(root, durability) as target:
            figures[f"{durability}_produce"].append(engine.per_second(items, lambda: produce(target, batches)))
            figures[f"{durability}_drain"].append(engine.per_second(items, lambda: drain(target)))
        directory = Path(tempfile.mkdtemp(dir=root))
        asyncio.run(aproduce_and_drain(directory, durability, batches, figures, durability))
        shutil.rmtree(directory)


def singles(root: Path, payload: bytes, figures: Figures) -> None:
    """One item per call: produce, lease, complete; beside them two other embedded queues, without fsync."""
    runs: list[tuple[Durability, int]] = [("fsync", SINGLES // 10), ("os", SINGLES)]
    for durability, number in runs:
        with queue(root, durability) as target:
            figures[f"{durability}_single_produce"].append(
                engine.per_second(number, lambda: [target.produce(payload) for _ in range(number)])  # noqa: B023
            )
            figures[f"{durability}_single_drain"].append(engine.per_second(number, lambda: drain(target, 1)))
    peers.measure(root, figures, engine.per_second, ["single"])


def side_by_side(root: Path, payload: bytes, figures: Figures) -> None:
    """Many callers at the same time, whose writes share a sync."""
    with queue(root) as target:
        figures["threads_1"].append(threads_produce(target, 1, PER_THREAD, payload))
        before = requests_and_turns(target)
        figures[f"threads_{THREADS}"].append(threads_produce(target, THREADS, PER_THREAD, payload))
        requests, turns = (now - then for now, then in zip(requests_and_turns(target), before, strict=True))
        figures["requests_per_turn"].append(requests / turns)
    directory = Path(tempfile.mkdtemp(dir=root))
    figures[f"tasks_{THREADS}"].append(asyncio.run(aproduce_side_by_side(directory, payload)))
    shutil.rmtree(directory)


def widths(root: Path, batches: list[list[bytes]], keys: list[list[str]], figures: Figures) -> None:
    """One producer and one consumer with a growing number of partitions, with and without keys."""
    items = sum(map(len, batches))
    for width in WIDTHS:
        with queue(root, partitions=width) as target:
            figures[f"width_{width}_produce"].append(engine.per_second(items, lambda: produce(target, batches)))
            figures[f"width_{width}_drain"].append(engine.per_second(items, lambda: drain(target)))
        with queue(root, partitions=width) as target:
            keyed = [[penstock.NewItem(p, key=k) for p, k in zip(*pair, strict=True)] for pair in zip(batches, keys, strict=True)]
            figures[f"width_{width}_keyed_produce"].append(
                engine.per_second(items, lambda: [target.produce_many(batch) for batch in keyed])  # noqa: B023
            )
            figures[f"width_{width}_keyed_drain"].append(engine.per_second(items, lambda: drain(target)))


def hot_keys(root: Path, batches: list[list[bytes]], rng: random.Random, figures: Figures) -> None:
    """A drain of few keys with long lines, and beside it the drain of as many items without keys."""
    items = sum(map(len, batches))
    with queue(root, "os") as target:
        produce(target, batches)
        figures["hot_unkeyed_drain"].append(engine.per_second(items, lambda: drain(target)))
    for keys, per_key in HOT_KEYS:
        with queue(root, "os") as target:
            for payloads in batches:
                target.produce_many([penstock.NewItem(payload, key=f"key-{rng.randrange(keys)}") for payload in payloads])
            figures[f"hot_{keys}_keys_drain"].append(engine.per_second(items, lambda: drain(target, per_key=per_key)))  # noqa: B023


def latency(root: Path, figures: Figures) -> None:
    for durability in ("fsync", "os"):
        with queue(root, durability) as target:
            took = sorted(ping(target))
            figures[f"{durability}_idle_p50_us"].append(took[len(took) // 2] * 1e6)
            figures[f"{durability}_idle_p99_us"].append(took[len(took) * 99 // 100] * 1e6)


def ratios(found: dict[str, float]) -> dict[str, tuple[float, str]]:
    """The ratios with their aims."""
    made = {
        f"{verb}, {how}{durability}, of the bare engine": (
            found[f"{durability}_{key}{verb}"] / found[f"{durability}_engine_{verb}"],
            "≥ 0.6" if key and durability == "os" else "≥ 0.7",
        )
        for durability in ("fsync", "os")
        for how, key in (("", ""), ("async, ", "async_"))
        for verb in ("produce", "drain")
    }
    made[f"{THREADS} threads producing single items with fsync, of one"] = (found[f"threads_{THREADS}"] / found["threads_1"], "≥ 6")
    made[f"{THREADS} threads producing single items: requests per turn"] = (found["requests_per_turn"], "–")
    made[f"{THREADS} tasks producing single items with fsync, of one thread"] = (found[f"tasks_{THREADS}"] / found["threads_1"], "–")
    for peer in peers.PEERS:
        for name, ours, theirs in (("produce", "produce", "produce"), ("lease + complete", "drain", "consume")):
            rates = found[f"os_single_{ours}"], found[f"{peer}_single_{theirs}_per_s"]
            made[f"{name} one item, no fsync, of {peer.replace('_', '-')}"] = (rates[0] / rates[1], "≥ 1.5")
    for number, per_key in HOT_KEYS:
        name = f"drain of {number:,} keys, per_key {per_key}, of one without keys"
        made[name] = (found[f"hot_{number}_keys_drain"] / found["hot_unkeyed_drain"], "–")
    for width in WIDTHS[1:]:
        for kind in ("produce", "drain", "keyed_produce", "keyed_drain"):
            made[f"{kind.replace('_', ' ')}, {width} partitions, of one"] = (found[f"width_{width}_{kind}"] / found[f"width_1_{kind}"], "–")
    return made


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--items", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--no-write", action="store_true", help="print only")
    given = arguments.parse_args()
    rng = random.Random(1)
    batches = [[rng.randbytes(PAYLOAD) for _ in range(BATCH)] for _ in range(given.items // BATCH)]
    keys = [[f"key-{rng.randrange(KEYS)}" for _ in range(BATCH)] for _ in batches]
    figures: Figures = defaultdict(list)
    steps: list[Callable[[Path], None]] = [
        lambda root: against_the_engine(root, batches, figures),
        lambda root: singles(root, batches[0][0], figures),
        lambda root: side_by_side(root, batches[0][0], figures),
        lambda root: widths(root, batches[: len(batches) // 4], keys[: len(batches) // 4], figures),
        lambda root: hot_keys(root, batches[: len(batches) // 4], rng, figures),
        lambda root: latency(root, figures),
    ]
    for _ in range(given.rounds):
        for step in steps:
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
                step(Path(root))
    found = {name: statistics.median(values) for name, values in figures.items()}
    read = ratios(found)
    print(f"{'':62} measured     aim")
    for name, (value, aim) in read.items():
        print(f"{name:62} {value:8.2f} {aim:>7}")
    for (number, per_key), aim in HOT_KEYS.items():
        name = f"drain, keys {number:,}, per_key {per_key}: items per second"
        print(f"{name:62} {found[f'hot_{number}_keys_drain']:8,.0f} {aim:>9}")
    for name in ("os_single_produce", "os_single_drain", *(f"{peer}_single_{verb}_per_s" for peer in peers.PEERS for verb in VERBS)):
        print(f"{name + ', µs per item':62} {1e6 / found[name]:8.1f}")
    for name in ("fsync_idle_p50_us", "fsync_idle_p99_us", "os_idle_p50_us", "os_idle_p99_us"):
        print(f"{name:62} {found[name]:8.0f}")
    if not given.no_write:
        about = {"items": given.items, "rounds": given.rounds, "python": platform.python_version(), "cores": os.cpu_count()}
        written = {"about": about, "ratios": {name: round(value, 3) for name, (value, _) in read.items()}, "per_second": found}
        RESULTS.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
