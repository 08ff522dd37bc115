"""Measures one partition, compared with the disk's limit and with two other embedded queues.

    make bench-engine                    (python benchmarks/engine.py [--items N] [--rounds N] [--no-write])

One partition, 100-byte random payloads, batches of 1,000. Every figure is the median of several rounds. What is
compared is measured in turn within each round, because machines are noisy: read the ratios. Writes
benchmarks/results/engine.json.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers

from penstock.logs.arrow_batch import to_arrow
from penstock.logs.columns import FrameColumns
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.log import Durability
from penstock.loop.partition import Partition
from penstock.rules.commands import AcquireLease, CompleteLeased, LeaseAnswer, Produce
from penstock.rules.routing import key_ids
from penstock.words.batch import Batch
from penstock.words.clock import SystemClock

BATCH = 1_000
PAYLOAD = 100
KEYS = 100_000
HOT_KEYS = 1_000
SINGLES = 10_000
RESULTS = Path(__file__).parent / "results" / "engine.json"

Figures = dict[str, list[float]]


@contextmanager
def partition(root: Path, durability: Durability) -> Iterator[Partition]:
    """A new partition in its own directory, which is removed afterwards."""
    directory = Path(tempfile.mkdtemp(dir=root))
    made = Partition(FileLog(SystemFiles(), str(directory), 1, 0, durability=durability), SystemClock())
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory)


def per_second(items: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return items / (time.perf_counter() - began)


def produce(part: Partition, batches: list[list[bytes]]) -> None:
    for payloads in batches:
        part.run(Produce(Batch(payloads)))
        part.commit()


def produce_keyed(part: Partition, batches: list[list[bytes]], keys: list[list[bytes]]) -> None:
    for payloads, names in zip(batches, keys, strict=True):
        part.run(Produce(Batch(payloads, names, key_ids(names))))
        part.commit()


def lease(part: Partition, want: int) -> LeaseAnswer:
    granted = part.run(AcquireLease(want))
    part.commit()
    assert isinstance(granted, LeaseAnswer)
    return granted


def drain(part: Partition, batch: int = BATCH) -> int:
    """Lease a batch, make a bytes object of every payload, complete the batch; with a commit each."""
    done = 0
    while (granted := lease(part, batch)).lease:
        done += len(part.payloads(granted.runs))
        part.run(CompleteLeased(granted.lease))
        part.commit()
    return done


def drain_by_item(part: Partition) -> int:
    """Lease a batch and complete each item with its own command; one commit per batch."""
    done = 0
    while (granted := lease(part, BATCH)).lease:
        start, _ = granted.runs
        for offset, payload in enumerate(part.payloads(granted.runs), start):
            done += len(payload) == PAYLOAD
            part.run(CompleteLeased(granted.lease, (offset,)))
        part.commit()
    return done


def drain_singly(part: Partition) -> int:
    """Lease and complete one item at a time, with a commit for each step."""
    return drain(part, 1)


def raw(root: Path, size: int, times: int) -> None:
    """The limit: write and fdatasync the same bytes without a queue."""
    path = root / "raw"
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    blob = os.urandom(size)
    for _ in range(times):
        os.write(handle, blob)
        os.fdatasync(handle)
    os.close(handle)
    path.unlink()


def size_on_disk(part: Partition) -> int:
    log = part.log
    assert isinstance(log, FileLog)
    return sum(entry.stat().st_size for entry in os.scandir(log.directory))


def batch_round(root: Path, items: int, found: Figures) -> None:
    batches = [[os.urandom(PAYLOAD) for _ in range(BATCH)] for _ in range(items // BATCH)]
    with partition(root, "fsync") as part:
        frame_bytes = BATCH * (PAYLOAD + 4) + 88
        found["raw_fsync_per_s"].append(per_second(items, lambda: raw(root, frame_bytes, len(batches))))
        found["produce_batch_fsync_per_s"].append(per_second(items, lambda: produce(part, batches)))
        found["drain_batch_per_s"].append(per_second(items, lambda: _all(drain(part), items)))
        found["bytes_per_item"].append(size_on_disk(part) / items)
        produce(part, batches)
        found["drain_item_per_s"].append(per_second(items, lambda: _all(drain_by_item(part), items)))
        found["arrow_decode_ns_per_item"].append(arrow_decode(part))
    with partition(root, "os") as part:
        found["produce_batch_os_per_s"].append(per_second(items, lambda: produce(part, batches)))
    with partition(root, "fsync") as part:
        names = customers(KEYS, len(batches))
        found["produce_keyed_batch_fsync_per_s"].append(per_second(items, lambda: produce_keyed(part, batches, names)))
        found["keyed_drain_per_s"].append(per_second(items, lambda: _all(drain(part), items)))
    with partition(root, "fsync") as part:  # the hard case: the keys of most items are busy
        some = len(batches) // 10
        produce_keyed(part, batches[:some], customers(HOT_KEYS, some))
        found["hot_keyed_drain_per_s"].append(per_second(some * BATCH, lambda: _all(drain(part), some * BATCH)))


def customers(keys: int, batches: int) -> list[list[bytes]]:
    return [[b"customer-%d" % random.randrange(keys) for _ in range(BATCH)] for _ in range(batches)]


def single_round(root: Path, items: int, found: Figures) -> None:
    payloads = [[os.urandom(PAYLOAD)] for _ in range(items)]
    with partition(root, "os") as part:
        found["produce_single_os_per_s"].append(per_second(items, lambda: produce(part, payloads)))
        found["consume_single_os_per_s"].append(per_second(items, lambda: _all(drain_singly(part), items)))


def arrow_decode(part: Partition) -> float:
    """Nanoseconds per item from a frame's verified bytes to an Arrow batch."""
    (frame,) = part.log.read(0, BATCH)
    times = 200
    seconds = times / per_second(times, lambda: [to_arrow(FrameColumns(frame)) for _ in range(times)])  # type: ignore[arg-type]
    return seconds / times / BATCH * 1e9


def _all(done: int, items: int) -> None:
    if done != items:
        raise SystemExit(f"drained {done} of {items} items: the figures are invalid")


def together(*rates: float) -> float:
    """Items per second through several stages in sequence."""
    return 1 / sum(1 / rate for rate in rates)


def ratios(rate: dict[str, float]) -> dict[str, tuple[float, str, float]]:
    """The ratios with their aims: value, comparison, aim."""
    batch = together(rate["produce_batch_fsync_per_s"], rate["drain_batch_per_s"])
    single = together(rate["produce_single_os_per_s"], rate["consume_single_os_per_s"])
    found = {
        "produce / raw limit": (rate["produce_batch_fsync_per_s"] / rate["raw_fsync_per_s"], ">=", 0.6),
        "drain / produce": (rate["drain_batch_per_s"] / rate["produce_batch_fsync_per_s"], ">=", 0.5),
        "keyed drain / drain": (rate["keyed_drain_per_s"] / rate["drain_batch_per_s"], ">=", 0.4),
        "bytes per 100-byte item": (rate["bytes_per_item"], "<=", 108.0),
        "arrow ns per item": (rate["arrow_decode_ns_per_item"], "<=", 20.0),
    }
    for name in peers.PEERS:
        peer_batch = together(rate[f"{name}_durable_produce_per_s"], rate[f"{name}_durable_consume_per_s"])
        peer_single = together(rate[f"{name}_single_produce_per_s"], rate[f"{name}_single_consume_per_s"])
        found[f"durable in batches / {name}"] = (batch / peer_batch, ">=", 100.0)
        found[f"single, no fsync / {name}"] = (single / peer_single, ">=", 3.0)
        found[f"single produce, no fsync / {name}"] = (rate["produce_single_os_per_s"] / rate[f"{name}_single_produce_per_s"], ">=", 3.0)
    return found


def show(rate: dict[str, float], compared: dict[str, tuple[float, str, float]]) -> None:
    for name, value in rate.items():
        print(f"{name:38} {value:14,.1f}" if value < 1_000 else f"{name:38} {value:14,.0f}")
    print()
    for name, (value, sign, aim) in compared.items():
        met = value >= aim if sign == ">=" else value <= aim
        print(f"{name:38} {value:14,.2f}   aim {sign} {aim:g} {'' if met else '  MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=500_000, help="items per round in batches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    options = parser.parse_args()
    found: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        root = Path(directory)
        for _ in range(options.rounds):
            batch_round(root, options.items, found)
            single_round(root, SINGLES, found)
            peers.measure(root, found, per_second)
    rate = {name: statistics.median(values) for name, values in found.items()}
    compared = ratios(rate)
    show(rate, compared)
    if not options.no_write:
        written: dict[str, Any] = {
            **{name: round(value, 3) for name, value in rate.items()},
            "ratios": {name: {"value": round(value, 3), "aim": f"{sign} {aim:g}"} for name, (value, sign, aim) in compared.items()},
            "setting": {"items": options.items, "rounds": options.rounds, "batch": BATCH, "keys": KEYS, "hot_keys": HOT_KEYS},
            "machine": {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()},
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(written, indent=2) + "\n")
        print(f"\nwritten: {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
