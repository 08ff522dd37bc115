"""Measures how cost grows with depth: produce, lease, memory and opening, with up to ten million waiting items.

    make bench-depth                     (python benchmarks/depth.py [--most N] [--no-write])

One partition, 100-byte payloads; at the end many queues. Rates are medians of several samples at each depth, taken from
the same log as it grows. Memory is what the process has allocated in addition, measured with tracemalloc where the
total is small. Writes benchmarks/results/depth.json.
"""

import argparse
import gc
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine import lease

import penstock
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import SystemFiles
from penstock.loop.partition import Partition
from penstock.rules.commands import AcquireLease, CompleteLeased, LeaseAnswer, Produce, RetryLeased
from penstock.rules.routing import digest, key_ids
from penstock.words.batch import Batch
from penstock.words.clock import DAY, HOUR, MINUTE, SystemClock
from penstock.words.limits import MIB, Policy, Retention

BATCH = 1_000
PAYLOADS = [os.urandom(100) for _ in range(BATCH)]
RESULTS = Path(__file__).parent / "results" / "depth.json"


def open_partition(directory: Path, policy: Policy | None = None, **options: Any) -> Partition:
    return Partition(FileLog(SystemFiles(), str(directory), 1, 0, durability="os"), SystemClock(), policy, **options)


def produce(part: Partition, items: int) -> None:
    for _ in range(items // BATCH):
        part.run(Produce(Batch(PAYLOADS)))
        part.commit()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def produce_sample(part: Partition) -> float:
    """Microseconds per item, in batches."""
    return seconds(lambda: produce(part, BATCH)) / BATCH * 1e6


def drain_sample(part: Partition) -> float:
    """Microseconds per item to lease a batch, read its payloads and complete it, without cached frames."""
    part._items.clear()

    def once() -> None:
        granted = lease(part, BATCH)
        assert len(part.payloads(granted.runs)) == BATCH
        part.run(CompleteLeased(granted.lease))
        part.commit()

    return seconds(once) / BATCH * 1e6


def at_depth(root: Path, depths: list[int], found: dict[str, Any]) -> None:
    """The cost of batches while the backlog grows, and of opening the partition."""
    directory = Path(tempfile.mkdtemp(dir=root))
    part = open_partition(directory)
    samples = 60
    for depth in depths:
        produce(part, depth - part.state.counts.ready)
        gc.collect()
        found[f"produce_us_at_{depth}"] = statistics.median(produce_sample(part) for _ in range(samples))
        found[f"drain_us_at_{depth}"] = statistics.median(drain_sample(part) for _ in range(samples))
    times = [part.now().wall - random.randrange(10**7) for _ in range(20)]
    found["seek_by_time_ms"] = 1e3 * statistics.median([seconds(partial(part.offset_at, when)) for when in times])
    part.close()
    opening(directory, found)
    shutil.rmtree(directory)


def opening(directory: Path, found: dict[str, Any]) -> None:
    """The time to open with the checkpoint, without it, and to read the log's bytes."""

    def reopened() -> None:
        part = open_partition(directory)
        part.log.close()

    found["open_s_with_checkpoint"] = seconds(reopened)
    (directory / "checkpoint").unlink(missing_ok=True)
    found["open_s_without_checkpoint"] = seconds(reopened)
    found["bare_read_s"] = seconds(lambda: bare_read(sorted(directory.glob("*.log"))))
    found["log_mb"] = sum(path.stat().st_size for path in directory.glob("*.log")) / 1e6


def bare_read(paths: Sequence[Path]) -> None:
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def memory_mb(work: Callable[[Partition], object], root: Path, policy: Policy | None = None) -> float:
    """Megabytes that are still allocated after `work` on a new partition."""
    directory = Path(tempfile.mkdtemp(dir=root))
    part = open_partition(directory, policy)
    gc.collect()
    tracemalloc.start()
    work(part)
    part._items.clear()  # caches have a fixed limit and are not measured
    part._blocks.clear()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    part.close()
    shutil.rmtree(directory)
    return held / 1e6


def memories(root: Path, million: int, found: dict[str, Any]) -> None:
    def singly(part: Partition) -> None:
        for _ in range(million):
            part.run(Produce(Batch(PAYLOADS[:1])))
            part.commit()

    def scheduled(part: Partition) -> None:
        soon = part.now().wall + HOUR // 3600 * 1_000
        for _ in range(million // BATCH):
            part.run(Produce(Batch(PAYLOADS, ats=[soon + random.randrange(DAY) for _ in range(BATCH)])))
            part.commit()

    def with_dedup_ids(part: Partition) -> None:
        for start in range(0, million, BATCH):
            names = [digest(b"", b"order-%d" % number) for number in range(start, start + BATCH)]
            part.run(Produce(Batch(PAYLOADS, dedups=names)))
            part.commit()

    def of_one_key(part: Partition, every: int = 1) -> None:
        keys = [b"hot" if number % every == 0 else b"cold-%d" % number for number in range(BATCH)]
        ids = key_ids(keys)
        for _ in range(million * every // BATCH):
            part.run(Produce(Batch(PAYLOADS, keys, ids)))
            part.commit()
        first = part.run(AcquireLease(1))
        assert isinstance(first, LeaseAnswer)
        while (granted := lease(part, 10_000)).lease:  # items of the leased key are passed over
            part.run(CompleteLeased(granted.lease))

    def leased(part: Partition) -> None:
        produce(part, million)
        while lease(part, BATCH).lease:
            pass

    def delayed(part: Partition) -> None:
        produce(part, million)
        while (granted := lease(part, BATCH)).lease:
            part.run(RetryLeased(granted.lease, delay=HOUR, reason="again"))
            part.commit()

    found["mb_per_million_waiting"] = memory_mb(lambda part: produce(part, million), root) / million * 1e6
    found["mb_per_million_waiting_produced_singly"] = memory_mb(singly, root) / million * 1e6
    found["mb_per_million_scheduled"] = memory_mb(scheduled, root) / million * 1e6
    found["mb_per_million_dedup_ids"] = memory_mb(with_dedup_ids, root, Policy(dedup_window=60 * MINUTE)) / million * 1e6
    found["mb_per_million_of_a_held_key"] = memory_mb(of_one_key, root) / million * 1e6
    found["mb_per_million_of_a_held_key_among_others"] = memory_mb(lambda part: of_one_key(part, 2), root) / million * 1e6
    found["mb_per_million_leased_in_batches"] = memory_mb(leased, root) / million * 1e6
    found["mb_per_million_delayed_after_failure"] = memory_mb(delayed, root) / million * 1e6


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def sustained(root: Path, items: int, found: dict[str, Any]) -> None:
    """Produce and drain with retention: disk and memory should not grow."""
    directory = Path(tempfile.mkdtemp(dir=root))
    policy = Policy(retention=Retention(max_bytes=256 * MIB))
    part = open_partition(directory, policy, segment_bytes=32 * MIB)
    disk: list[float] = []
    memory: list[float] = []
    share = items // 20
    began = time.perf_counter()
    for _ in range(20):
        for _ in range(share // BATCH):
            produce_sample(part)
            drain_sample(part)
        disk.append(sum(path.stat().st_size for path in directory.iterdir()) / 1e6)
        memory.append(resident_mb())
    found["sustained_items_per_s"] = items / (time.perf_counter() - began)
    found["sustained_disk_mb"] = {"after a quarter": disk[4], "most after that": max(disk[4:]), "at the end": disk[-1]}
    found["sustained_memory_mb"] = {"after a quarter": memory[4], "most after that": max(memory[4:]), "at the end": memory[-1]}
    part.close()
    shutil.rmtree(directory)


def many_queues(root: Path, queues: int, found: dict[str, Any]) -> None:
    """Queues of eight partitions, most of them idle: time to create, close and open; descriptors and threads."""
    directory = root / "many"
    broker = penstock.open(directory)
    found["many_queues"] = queues
    found["many_create_s"] = seconds(lambda: [broker.create_queue(f"queue-{number}", partitions=8) for number in range(queues)])
    for number in range(0, queues, queues // 10):
        broker.queue(f"queue-{number}").produce("an item")
    found["many_close_s"] = seconds(broker.close)
    began = time.perf_counter()
    broker = penstock.open(directory)
    found["many_open_s"] = time.perf_counter() - began
    found["many_descriptors"] = len(os.listdir("/proc/self/fd"))
    found["many_threads"] = len(os.listdir("/proc/self/task"))
    found["many_first_lease_s"] = seconds(lambda: broker.queue("queue-0").lease(1).complete())
    broker.close()
    shutil.rmtree(directory)


def ratios(found: dict[str, Any], depths: list[int]) -> dict[str, tuple[float, str, float]]:
    low, *_, high = depths
    return {
        f"produce at {high:,} / at {low:,}": (found[f"produce_us_at_{high}"] / found[f"produce_us_at_{low}"], "<=", 1.2),
        f"drain at {high:,} / at {low:,}": (found[f"drain_us_at_{high}"] / found[f"drain_us_at_{low}"], "<=", 1.2),
        "MB per million waiting": (found["mb_per_million_waiting"], "<=", 10.0),
        "MB per million produced singly": (found["mb_per_million_waiting_produced_singly"], "<=", 30.0),
        "open with checkpoint, s": (found["open_s_with_checkpoint"], "<=", 2.0),
        "open without / bare read": (found["open_s_without_checkpoint"] / found["bare_read_s"], "<=", 3.0),
        f"open {found['many_queues']:,} queues of 8, s": (found["many_open_s"], "<=", 2.0),
        "its descriptors": (found["many_descriptors"], "<=", 300),
        "its threads": (found["many_threads"], "<=", 20),
    }


def show(found: dict[str, Any], compared: dict[str, tuple[float, str, float]]) -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{when} {size:,.0f}" for when, size in value.items())
            print(f"{name:44} {value}")
        else:
            print(f"{name:44} {value:14,.3f}")
    print()
    for name, (value, sign, aim) in compared.items():
        print(f"{name:44} {value:14,.2f}   aim {sign} {aim:g} {'' if value <= aim else '  MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10_000_000, help="the deepest backlog")
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    options = parser.parse_args()
    depths = sorted({10_000, options.most // 10, options.most})
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        root = Path(directory)
        at_depth(root, depths, found)
        memories(root, options.most // 10, found)
        sustained(root, options.most * 2, found)
        many_queues(root, max(10, options.most // 10_000), found)
    compared = ratios(found, depths)
    show(found, compared)
    if not options.no_write:
        written = {
            **{name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()},
            "ratios": {name: {"value": round(value, 3), "aim": f"{sign} {aim:g}"} for name, (value, sign, aim) in compared.items()},
            "machine": {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()},
        }
        RESULTS.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
