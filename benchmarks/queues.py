"""Measures the public API, compared with a bare partition, and how it scales with threads and partitions.

    make bench-queues                    (python benchmarks/queues.py [--items N] [--rounds N] [--no-write])

100-byte random payloads. Every figure is the median of several rounds. What is compared is measured in turn
within each round, because machines are noisy: read the ratios. Single items are measured beside two other embedded
queues. `against.py` runs this with the code of another commit. Writes benchmarks/results/queues.json.
"""

import asyncio
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import engine
import peers
from rounds import Figures, Rounds

import penstock
from penstock.logs.columns import encode
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.inbox import FileInbox
from penstock.logs.log import Durability
from penstock.logs.store import WriteManifest, write_name
from penstock.operations import ReadMetrics
from penstock.rules.records import Produced
from penstock.rules.routing import key_ids
from penstock.words.batch import Batch
from penstock.words.clock import Moment

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
SINGLE_ITEMS = [
    ("os_single_produce", "produce", "≤ 15"),
    ("os_single_drain", "lease + complete", "≤ 50"),
    *((f"{peer}_single_produce_per_s", f"{peer}: put", "–") for peer in peers.PEERS),
    *((f"{peer}_single_consume_per_s", f"{peer}: get + acknowledge", "–") for peer in peers.PEERS),
]
"""Rates that are printed as microseconds per item: the name of the figure, what it is, the aim."""
ADOPTED_FRAME = 10_000
"""Items in a frame of a write that is adopted, as Spark writes them."""
WAITING = (100, 1_000, 5_000)
"""How many leases wait when a produce wakes one."""
WOKEN = 100


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
    peers.measure(root, figures, engine.per_second, ["single"])
    runs: list[tuple[Durability, int]] = [("fsync", SINGLES // 10), ("os", SINGLES)]
    for durability, number in runs:
        with queue(root, durability) as target:
            figures[f"{durability}_single_produce"].append(
                engine.per_second(number, lambda: [target.produce(payload) for _ in range(number)])  # noqa: B023
            )
            figures[f"{durability}_single_drain"].append(engine.per_second(number, lambda: drain(target, 1)))


async def awake_one(directory: Path, waiting: int) -> float:
    """Microseconds of a produce that wakes one of so many waiting leases."""
    async with await penstock.aopen(directory, durability="os") as broker:
        target = await broker.create_queue("bench")
        tasks = [asyncio.create_task(target.lease(wait=600)) for _ in range(waiting + WOKEN)]
        while (await target.stats()).waiting_consumers < len(tasks):
            await asyncio.sleep(0.01)
        took = 0.0
        for number in range(1, WOKEN + 1):
            began = time.perf_counter()
            await target.produce(b"wake")
            took += time.perf_counter() - began
            while sum(task.done() for task in tasks) < number:
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return took / WOKEN * 1e6


def waking(root: Path, figures: Figures) -> None:
    """A produce that wakes one of many waiting leases."""
    for waiting in WAITING:
        figures[f"wake_one_of_{waiting}_us"].append(asyncio.run(awake_one(Path(tempfile.mkdtemp(dir=root)), waiting)))


def adoption(root: Path, batches: list[list[bytes]], keys: list[list[str]], figures: Figures) -> None:
    """Items per second from opening a broker until it has adopted what another process published, as Spark does."""
    payloads = [payload for batch in batches for payload in batch]
    names = [name.encode() for batch in keys for name in batch]
    with penstock.open(root, durability="os") as broker:
        incarnation = broker.create_queue("bench").incarnation
    inbox, write = FileInbox(SystemFiles(), str(root)), write_name(1_700_000_000_000_000)
    inbox.begin_write(write)
    writer = inbox.part_writer(write, "part-0.frames", incarnation)
    for start in range(0, len(payloads), ADOPTED_FRAME):
        some, named = payloads[start : start + ADOPTED_FRAME], names[start : start + ADOPTED_FRAME]
        writer.add(encode([Produced(0, Batch(some, named, key_ids(named)))], Moment(0, 0)))
    inbox.publish(write, incarnation, WriteManifest([writer.finish()], "bench", 1))
    began = time.perf_counter()
    with penstock.open(root, durability="os") as broker:
        while broker.queue("bench").stats().ready < len(payloads):
            time.sleep(0.001)
        figures["adopted_items"].append(len(payloads) / (time.perf_counter() - began))


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
    """The ratios with their aims; those of which one side was not measured are left out."""
    wanted: dict[str, tuple[str, str, str]] = {
        f"{verb}, {how}{durability}, of the bare engine": (
            f"{durability}_{key}{verb}",
            f"{durability}_engine_{verb}",
            "≥ 0.6" if key and durability == "os" else "≥ 0.7",
        )
        for durability in ("fsync", "os")
        for how, key in (("", ""), ("async, ", "async_"))
        for verb in ("produce", "drain")
    }
    for peer in peers.PEERS:
        for name, ours, theirs in (("produce", "produce", "produce"), ("lease + complete", "drain", "consume")):
            key = f"{name} one item, no fsync, of {peer.replace('_', '-')}"
            wanted[key] = (f"os_single_{ours}", f"{peer}_single_{theirs}_per_s", "≥ 1.5")
    wanted[f"{THREADS} threads producing single items with fsync, of one"] = (f"threads_{THREADS}", "threads_1", "≥ 6")
    wanted[f"{THREADS} tasks producing single items with fsync, of one thread"] = (f"tasks_{THREADS}", "threads_1", "–")
    for number, per_key in HOT_KEYS:
        wanted[f"drain of {number:,} keys, per_key {per_key}, of one without keys"] = (f"hot_{number}_keys_drain", "hot_unkeyed_drain", "–")
    for width in WIDTHS[1:]:
        for kind in ("produce", "drain", "keyed_produce", "keyed_drain"):
            wanted[f"{kind.replace('_', ' ')}, {width} partitions, of one"] = (f"width_{width}_{kind}", f"width_1_{kind}", "–")
    for many in WAITING[1:]:
        name = f"produce that wakes one of {many:,} leases: time of that with {WAITING[0]}"
        wanted[name] = (f"wake_one_of_{many}_us", f"wake_one_of_{WAITING[0]}_us", "≤ 1.2")
    return {name: (found[one] / found[other], aim) for name, (one, other, aim) in wanted.items() if one in found and other in found}


def figures_with_aims() -> dict[str, tuple[str, str]]:
    """What is printed besides the ratios: name of the figure → what it is, and the aim."""
    shown: dict[str, tuple[str, str]] = {}
    shown["requests_per_turn"] = (f"{THREADS} threads producing single items: requests per turn", "–")
    for (number, per_key), aim in HOT_KEYS.items():
        shown[f"hot_{number}_keys_drain"] = (f"drain, keys {number:,}, per_key {per_key}: items per second", aim)
    shown["adopted_items"] = ("adoption of what another process wrote: items per second", "≥ 2,000,000")
    for many in WAITING:
        shown[f"wake_one_of_{many}_us"] = (f"produce that wakes one of {many:,} waiting leases: µs", "–")
    for durability in ("fsync", "os"):
        for percent in ("p50", "p99"):
            shown[f"{durability}_idle_{percent}_us"] = (f"from produce to a waiting lease, {durability}, {percent}: µs", "–")
    return shown


def main() -> None:
    rounds = Rounds("queues", __doc__, rounds=3, items=200_000)
    rng, figures, items = random.Random(1), rounds.figures, rounds.given.items
    batches = [[rng.randbytes(PAYLOAD) for _ in range(BATCH)] for _ in range(items // BATCH)]
    keys = [[f"key-{rng.randrange(KEYS)}" for _ in range(BATCH)] for _ in batches]
    few, payload = slice(len(batches) // 4), batches[0][0]
    steps: dict[str, Callable[[Path], None]] = {
        "engine": lambda root: against_the_engine(root, batches, figures),
        "singles": lambda root: singles(root, payload, figures),
        "threads": lambda root: side_by_side(root, payload, figures),
        "widths": lambda root: widths(root, batches[few], keys[few], figures),
        "hot keys": lambda root: hot_keys(root, batches[few], rng, figures),
        "waiting leases": lambda root: waking(root, figures),
        "adoption": lambda root: adoption(root, batches, keys, figures),
        "latency": lambda root: latency(root, figures),
    }
    found = rounds.run(steps)
    read = ratios(found)
    print(f"{'':70} measured         aim")
    for name, (value, aim) in read.items():
        print(f"{name:70} {value:8.2f} {aim:>11}")
    for name, what, aim in SINGLE_ITEMS:
        if name in found:
            print(f"{what + ', one item, no fsync: µs':70} {1e6 / found[name]:8.1f} {aim:>11}")
    for name, (what, aim) in figures_with_aims().items():
        if name in found:
            print(f"{what:70} {found[name]:8,.0f} {aim:>11}")
    rounds.write({name: value for name, (value, _) in read.items()}, found, items=items)


if __name__ == "__main__":
    main()
