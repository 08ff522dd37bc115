"""Produces of a real process are interrupted: acknowledged items are stored once, and other threads see no error and
do not wait long.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from tests.server.conftest import serve

LONGEST_SECONDS = 15.0
"""A caller that is not woken waits for 30 seconds."""

PROGRAM = """
import json, random, signal, sys, threading, time
from collections import Counter
import penstock

directory, partitions, seed, rounds = sys.argv[1], *map(int, sys.argv[2:])
broker = penstock.open(directory)
queue = broker.create_queue("q", partitions=partitions)
rng, acknowledged, errors, waits, stop = random.Random(seed), set(), [], [], threading.Event()
longest = 0.006 if directory.startswith("http") else 0.0012  # about as long as a call takes

def interrupt(*_):
    raise KeyboardInterrupt

def other(name):
    number = 0
    while not stop.is_set():
        number += 1
        try:
            began = time.monotonic()
            queue.produce(f"{name} {number}", key=str(number % 7))
            waits.append(time.monotonic() - began)
            acknowledged.add(f"{name} {number}")
        except Exception as error:
            errors.append(repr(error))

signal.signal(signal.SIGALRM, interrupt)
threads = [threading.Thread(target=other, args=(name,), daemon=True) for name in "abcde"]
for thread in threads:
    thread.start()
interrupts = 0
for number in range(rounds):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, longest))
        queue.produce(f"interrupted {number}", key=str(number % 5))
        signal.setitimer(signal.ITIMER_REAL, 0)
        acknowledged.add(f"interrupted {number}")
    except KeyboardInterrupt:
        interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    queue.produce(f"between {number}", key=str(number % 5))
    acknowledged.add(f"between {number}")
stop.set()
for thread in threads:
    thread.join()
found = Counter()
while leases := queue.lease(1000, per_key=1000):
    found.update(lease.item.value for lease in leases)
    leases.complete()
broker.close()
duplicates = [name for name, times in found.items() if times > 1]
counts = {"interrupts": interrupts, "longest": max(waits)}
print(json.dumps({**counts, "missing": sorted(acknowledged - found.keys()), "duplicates": duplicates, "errors": errors}))
"""


@pytest.mark.parametrize(("partitions", "seed"), [(1, 1), (3, 2), (8, 3)])
def test_interrupts_lose_nothing_and_affect_no_other_thread(tmp_path: Path, partitions: int, seed: int) -> None:
    interrupt_calls(str(tmp_path / "data"), partitions, seed)


def test_interrupts_of_calls_to_a_server_lose_nothing_and_affect_no_other_thread(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker, serve(broker.home) as server:
        interrupt_calls(server.url, partitions=3, seed=4, rounds=150)


WAITING_PROGRAM = """
import signal, sys, threading
import penstock

broker = penstock.open(sys.argv[1])
queue = broker.create_queue("q")

def interrupt():
    while not queue.stats().waiting_consumers:
        pass
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    queue.lease(wait=60)
except KeyboardInterrupt:
    while queue.stats().waiting_consumers:  # the server sees that nobody waits any more
        pass
    queue.produce("x")
    print([lease.item.value for lease in queue.lease(wait=60)])
"""


def test_an_interrupt_ends_a_lease_that_waits_at_a_server(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker, serve(broker.home) as server:
        ran = subprocess.run([sys.executable, "-c", WAITING_PROGRAM, server.url], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("['x']\n", "")


def interrupt_calls(target: str, partitions: int, seed: int, rounds: int = 300) -> None:
    command = [sys.executable, "-c", PROGRAM, target, str(partitions), str(seed), str(rounds)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("interrupts") > 0
    assert found.pop("longest") < LONGEST_SECONDS
    assert found == {"missing": [], "duplicates": [], "errors": []}
