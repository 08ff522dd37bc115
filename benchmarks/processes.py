"""Measures many processes on one directory: through the owner's socket, compared with the embedded broker and a peer.

    make bench-processes                 (python benchmarks/processes.py [--rounds N] [--take-overs N] [--no-write])

100-byte payloads. Every figure is the median of several rounds; what is compared is measured in turn within each round,
because machines are noisy: read the ratios and differences. litequeue is a queue in SQLite that several processes may
use at once. Writes benchmarks/results/processes.json.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litequeue

import penstock
from penstock.logs.backends import holder_of

PAYLOAD = b"x" * 100
SINGLES = 2_000
BATCH = 1_000
BATCHES = 100
CLIENTS = (1, 4, 16)
SECONDS = 2.0
PARTITIONS = 8
TAKE_OVER_CLIENTS = 3
RESULTS = Path(__file__).parent / "results" / "processes.json"

Figures = dict[str, list[float]]


# -- what the other processes do ---------------------------------------------------------------------


def own(directory: str, durability: str) -> None:
    """Own a directory until the standard input ends."""
    with penstock.open(directory, durability=durability) as broker:  # type: ignore[arg-type]
        broker.create_queue("bench", exist_ok=True)
        print("ready", flush=True)
        sys.stdin.read()


def produce_singles(directory: str, _: str) -> None:
    """Produce durable single items for SECONDS, when told to begin; print how many."""
    with penstock.open(directory) as broker:
        queue = broker.queue("bench")
        _count_for_a_while(lambda: queue.produce(PAYLOAD))


def put_singles_lite(directory: str, _: str) -> None:
    queue = litequeue.LiteQueue(f"{directory}/lite.db", timeout=60)
    queue.conn.execute("PRAGMA synchronous=FULL")
    text = PAYLOAD.decode()
    _count_for_a_while(lambda: queue.put(text))


def _count_for_a_while(work: Callable[[], object]) -> None:
    for _ in range(20):
        work()
    print("ready", flush=True)
    sys.stdin.readline()
    done, until = 0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        work()
        done += 1
    print(done, flush=True)


def produce_for_ever(directory: str, _: str) -> None:
    """Produce keyed items; print the machine's time after every answer."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("bench", partitions=PARTITIONS, exist_ok=True)
        number = 0
        while True:
            number += 1
            queue.produce(PAYLOAD, key=str(number))
            print(time.monotonic(), flush=True)


ROLES: dict[str, Callable[[str, str], None]] = {
    "own": own,
    "produce_singles": produce_singles,
    "put_singles_lite": put_singles_lite,
    "produce_for_ever": produce_for_ever,
}


def start(role: str, directory: Path, argument: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--role", role, str(directory), argument]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


# -- what is measured --------------------------------------------------------------------------------


def calls(queue: penstock.Queue, name: str, figures: Figures) -> None:
    """Microseconds of single calls, and items per second in batches."""
    for _ in range(200):
        queue.produce(PAYLOAD)
        queue.lease(1).complete()
    began = time.perf_counter()
    for _ in range(SINGLES):
        queue.produce(PAYLOAD)
    figures[f"{name}_produce_us"].append((time.perf_counter() - began) / SINGLES * 1e6)
    began = time.perf_counter()
    for _ in range(SINGLES):
        queue.lease(1).complete()
    figures[f"{name}_lease_complete_us"].append((time.perf_counter() - began) / SINGLES * 1e6)
    payloads = [PAYLOAD] * BATCH
    began = time.perf_counter()
    for _ in range(BATCHES):
        queue.produce_many(payloads)
    figures[f"{name}_batch_produce_per_s"].append(BATCH * BATCHES / (time.perf_counter() - began))
    began = time.perf_counter()
    for _ in range(BATCHES):
        leases = queue.lease(BATCH)
        assert len(leases.payloads) == BATCH
        leases.complete()
    figures[f"{name}_batch_drain_per_s"].append(BATCH * BATCHES / (time.perf_counter() - began))


def beside_embedded(root: Path, figures: Figures) -> None:
    for durability in ("os", "fsync"):
        with penstock.open(root / f"embedded-{durability}", durability=durability) as broker:
            calls(broker.create_queue("bench"), f"{durability}_embedded", figures)
        owner = start("own", root / f"shared-{durability}", durability)
        assert line(owner) == "ready"
        with penstock.open(root / f"shared-{durability}", durability=durability) as broker:
            calls(broker.queue("bench"), f"{durability}_client", figures)
        end(owner)


def many_clients(root: Path, figures: Figures) -> None:
    """Durable single items per second of 1, 4 and 16 processes."""
    for role, name in (("produce_singles", "penstock"), ("put_singles_lite", "litequeue")):
        for count in CLIENTS:
            directory = root / f"{name}-{count}"
            directory.mkdir()
            owner = start("own", directory / "data", "fsync") if name == "penstock" else None
            if owner is not None:
                assert line(owner) == "ready"
            clients = [start(role, directory / "data" if owner is not None else directory) for _ in range(count)]
            for client in clients:
                assert line(client) == "ready"
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            figures[f"{name}_{count}_per_s"].append(sum(int(line(client)) for client in clients) / SECONDS)
            for process in [*clients, *([owner] if owner is not None else [])]:
                end(process)


def take_overs(root: Path, times: int, figures: Figures) -> None:
    """Seconds from the SIGKILL of the owner to the first item that another process has produced since."""
    directory = root / "data"
    with penstock.open(directory) as broker:
        queue = broker.create_queue("bench", partitions=PARTITIONS)
        for number in range(10_000):  # some thousand frames to replay
            queue.produce(PAYLOAD, key=str(number))
    clients = {process.pid: process for process in (start("produce_for_ever", directory) for _ in range(TAKE_OVER_CLIENTS))}
    for process in clients.values():
        line(process)
    for _ in range(times):
        holder = holder_of(str(directory))
        assert holder is not None
        while holder.pid not in clients or not holder.secret or holder.unfinished:
            time.sleep(0.001)
            holder = holder_of(str(directory)) or holder
        victim = clients.pop(holder.pid)
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        figures["take_over_s"].append(min(_first_after(process, killed) for process in clients.values()) - killed)
        victim.wait()
        fresh = start("produce_for_ever", directory)
        line(fresh)
        clients[fresh.pid] = fresh
    for process in clients.values():
        process.kill()
        process.wait()


def _first_after(process: subprocess.Popen[str], instant: float) -> float:
    while (found := float(line(process))) <= instant:
        continue
    return found


def read(found: dict[str, float]) -> dict[str, tuple[float, str]]:
    """Ratios and differences, with their aims."""
    one = found["penstock_1_per_s"]
    made = {
        "µs that a single produce takes longer through the socket": (
            found["os_client_produce_us"] - found["os_embedded_produce_us"],
            "≤ 40",
        ),
        "µs that lease + complete (2 calls) take longer": (
            found["os_client_lease_complete_us"] - found["os_embedded_lease_complete_us"],
            "≤ 80",
        ),
    }
    for durability in ("os", "fsync"):
        for verb in ("produce", "drain"):
            ratio = found[f"{durability}_client_batch_{verb}_per_s"] / found[f"{durability}_embedded_batch_{verb}_per_s"]
            made[f"{verb} in batches of {BATCH}, {durability}, of embedded"] = (ratio, "≥ 0.7")
    made["4 processes producing durable single items, of one"] = (found["penstock_4_per_s"] / one, "≥ 2.5")
    made["16 processes producing durable single items, of one"] = (found["penstock_16_per_s"] / one, "–")
    for count in CLIENTS:
        made[f"{count} processes producing durable single items, of litequeue"] = (
            found[f"penstock_{count}_per_s"] / found[f"litequeue_{count}_per_s"],
            "–",
        )
    made["take-over, p50, seconds"] = (found["take_over_p50_s"], "–")
    made["take-over, p99, seconds"] = (found["take_over_p99_s"], "≤ 1")
    return made


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--take-overs", type=int, default=50)
    arguments.add_argument("--no-write", action="store_true", help="print only")
    arguments.add_argument("--role", nargs=3, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.role:
        ROLES[given.role[0]](given.role[1], given.role[2])
        return
    figures: Figures = defaultdict(list)
    for _ in range(given.rounds):
        for step in (beside_embedded, many_clients):
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
                step(Path(root), figures)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
        take_overs(Path(root), given.take_overs, figures)
    times = sorted(figures.pop("take_over_s"))
    found = {name: statistics.median(values) for name, values in figures.items()}
    found["take_over_p50_s"], found["take_over_p99_s"] = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    table = read(found)
    print(f"{'':62} measured     aim")
    for name, (value, aim) in table.items():
        print(f"{name:62} {value:8.2f} {aim:>7}")
    if not given.no_write:
        about: dict[str, Any] = {
            "rounds": given.rounds,
            "take_overs": len(times),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        written = {"about": about, "read": {name: round(value, 3) for name, (value, _) in table.items()}, "measured": found}
        RESULTS.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
