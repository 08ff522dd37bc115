"""Measures how soon another process can use a directory whose owner was killed.

    make bench-opening        (python benchmarks/opening.py [--frames N] [--rounds N] [--backlog N] [--no-write])

A process makes a queue of 8 partitions and writes 10,000 frames to each: single items with and without keys, leases and
completes, some items left leased. Then it is killed with SIGKILL. Other processes open copies of its directory: as it
was left, without its checkpoints (so that all frames are replayed), and with a large backlog. Times count from the call
that opens the directory. The cost of checkpoints is their part of the time of producing single items.
Writes benchmarks/results/opening.json.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import penstock
from penstock.logs.log import DURABILITIES, Durability
from penstock.loop.partition import Partition
from penstock.rules.routing import slot
from penstock.rules.slots import first_map

PARTITIONS = 8
PAYLOAD = 100
KEYS = 5_000
BATCH = 1_000
SINGLES = 12_500
AIM_SECONDS, AIM_SHARE = 0.5, 0.05
RESULTS = Path(__file__).parent / "results" / "opening.json"
STEPS = ("open", "produce", "keyed", "lease")
"""Opened; first produce without a key answered; a keyed produce answered in every partition; first lease answered."""


# -- the owner that is killed ------------------------------------------------------------------------


def own(directory: str, frames: int, backlog: int) -> None:
    """Write to a new queue until every partition has so many frames, then die."""
    rng = random.Random(1)
    payload = rng.randbytes(PAYLOAD)
    broker = penstock.open(directory)
    queue = broker.create_queue("bench", partitions=PARTITIONS, lease_timeout=3600)
    for start in range(0, backlog, BATCH):
        keys = [f"waiting-{rng.randrange(10 * KEYS)}" if start % 2_000 else None for _ in range(BATCH)]
        queue.produce_many([penstock.NewItem(payload, key=key) for key in keys])
    held = [queue.lease(100) for _ in range(backlog // 1_000)]
    first = _frames_written(broker)
    while min(now - then for now, then in zip(_frames_written(broker), first, strict=True)) < frames:
        for _ in range(200):
            queue.produce(payload, key=f"key-{rng.randrange(KEYS)}")
            queue.produce(payload)
            leases = queue.lease(rng.choice((1, 1, 2, 3)))
            if rng.random() < 0.05:
                held.append(leases)
            elif rng.random() < 0.05:
                leases.retry(reason="again")
            else:
                leases.complete()
    os.kill(os.getpid(), signal.SIGKILL)


def _frames_written(broker: penstock.Broker) -> list[int]:
    [loop] = broker._home.loops()  # type: ignore[attr-defined]
    return [0 if handle.partition is None else handle.log.sequence for handle in loop.engine.handles.values()]


# -- the process that takes over ---------------------------------------------------------------------


def take_over(directory: str) -> None:
    """Open the directory, use it, and print the seconds from the call of `open` to the end of each step."""
    owners = first_map(range(PARTITIONS)).owners
    keys = {owners[slot(f"key-{number}".encode())]: f"key-{number}" for number in range(KEYS)}.values()
    found: dict[str, float] = {}
    began = time.perf_counter()

    def note(step: str) -> None:
        found[step] = time.perf_counter() - began

    broker = penstock.open(directory)
    note("open")
    queue = broker.queue("bench")

    def lease() -> None:
        assert queue.lease(1, wait=60)
        note("lease")

    def produce(key: str | None = None) -> None:
        while True:
            try:
                queue.produce(b"an item", key=key)
                return
            except penstock.errors.StorageFailed:  # it says to try again in a moment
                time.sleep(0.01)

    consumer = threading.Thread(target=lease)
    consumer.start()
    produce()
    note("produce")
    for key in keys:
        produce(key)
    note("keyed")
    consumer.join()
    print(json.dumps(found))
    os._exit(0)


# -- what is measured --------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


def killed_owner(root: Path, name: str, frames: int, backlog: int) -> Path:
    directory = root / name
    ended = subprocess.run([sys.executable, __file__, "own", str(directory), str(frames), str(backlog)], timeout=900)
    assert ended.returncode == -signal.SIGKILL, ended
    return directory


def openings(directory: Path, rounds: int, *, checkpoints: bool) -> list[dict[str, float]]:
    """The times of several openings of copies of a directory."""
    found = []
    for _ in range(rounds):
        copy = directory.with_name("copy")
        shutil.copytree(directory, copy)
        if not checkpoints:
            for path in copy.glob("**/checkpoint"):
                path.unlink()
        os.sync()
        found.append(json.loads(run("take-over", copy)))
        shutil.rmtree(copy)
    return found


def checkpoint_share(root: Path, durability: Durability, rounds: int) -> float:
    """The part of the time of single produces that checkpoints take: the median of rounds."""
    payload = os.urandom(PAYLOAD)
    write = Partition._checkpoint
    shares = []
    for _ in range(rounds):
        spent = [0.0]

        def timed(part: Partition, spent: list[float] = spent) -> None:
            began = time.perf_counter()
            write(part)
            spent.append(time.perf_counter() - began)

        directory = Path(tempfile.mkdtemp(dir=root))
        with mock.patch.object(Partition, "_checkpoint", timed), penstock.open(directory, durability=durability) as broker:
            queue = broker.create_queue("bench")
            began = time.perf_counter()
            for _ in range(SINGLES):
                queue.produce(payload)
            shares.append(sum(spent) / (time.perf_counter() - began))
        shutil.rmtree(directory)
    return statistics.median(shares)


def summarized(times: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The median and the 99th percentile of each step."""
    return {
        step: {"p50": percentile([one[step] for one in times], 0.5), "p99": percentile([one[step] for one in times], 0.99)}
        for step in STEPS
    }


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000, help="frames in each partition since the last Base")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as temporary:
        root = Path(temporary)
        small = killed_owner(root, "small", given.frames, 0)
        cases = {"as it was left": (small, True), "without checkpoints": (small, False)}
        if given.backlog:
            cases[f"with {given.backlog:,} items waiting"] = (killed_owner(root, "large", given.frames, given.backlog), True)
        for name, (directory, checkpoints) in cases.items():
            found[name] = summarized(openings(directory, given.rounds, checkpoints=checkpoints))
        shares = {durability: checkpoint_share(root, durability, 3) for durability in DURABILITIES}
    print(f"{'seconds, p50 / p99':32}" + "".join(f"{step:>17}" for step in STEPS))
    for name, steps in found.items():
        print(f"{name:32}" + "".join(f"{steps[step]['p50']:9.3f} /{steps[step]['p99']:6.3f}" for step in STEPS))
    print(f"\n{'first produce, worst p99':44} {max(steps['produce']['p99'] for steps in found.values()):8.3f}   aim <= {AIM_SECONDS:g}")
    for durability, share in shares.items():
        print(f"{f'checkpoints, part of single produces, {durability}':44} {share:8.3f}   aim <= {AIM_SHARE:g}")
    if not given.no_write:
        about = {"frames": given.frames, "rounds": given.rounds, "python": platform.python_version(), "cores": os.cpu_count()}
        RESULTS.write_text(json.dumps({"about": about, "seconds": found, "checkpoint_share": shares}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        own(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["take-over"]:
        take_over(sys.argv[2])
    else:
        main()
