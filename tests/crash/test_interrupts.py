"""Produces of a real process are interrupted: acknowledged items are stored once, and other threads see no error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, random, signal, sys, threading
from collections import Counter
import penstock

directory, partitions, seed, rounds = sys.argv[1], *map(int, sys.argv[2:])
broker = penstock.open(directory)
queue = broker.create_queue("q", partitions=partitions)
rng, acknowledged, errors, stop = random.Random(seed), set(), [], threading.Event()

def interrupt(*_):
    raise KeyboardInterrupt

def other():
    number = 0
    while not stop.is_set():
        number += 1
        try:
            queue.produce(f"other {number}", key=str(number % 7))
            acknowledged.add(f"other {number}")
        except Exception as error:
            errors.append(repr(error))

signal.signal(signal.SIGALRM, interrupt)
thread = threading.Thread(target=other)
thread.start()
interrupts = 0
for number in range(rounds):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, 0.0012))
        queue.produce(f"interrupted {number}", key=str(number % 5))
        signal.setitimer(signal.ITIMER_REAL, 0)
        acknowledged.add(f"interrupted {number}")
    except KeyboardInterrupt:
        interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    queue.produce(f"between {number}", key=str(number % 5))
    acknowledged.add(f"between {number}")
stop.set()
thread.join()
found = Counter()
while leases := queue.lease(1000, per_key=1000):
    found.update(lease.item.value for lease in leases)
    leases.complete()
broker.close()
duplicates = [name for name, times in found.items() if times > 1]
print(json.dumps({"interrupts": interrupts, "missing": sorted(acknowledged - found.keys()), "duplicates": duplicates, "errors": errors}))
"""


@pytest.mark.parametrize(("partitions", "seed"), [(1, 1), (3, 2), (8, 3)])
def test_interrupts_lose_nothing_and_affect_no_other_thread(tmp_path: Path, partitions: int, seed: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), str(partitions), str(seed), "300"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("interrupts") > 0
    assert found == {"missing": [], "duplicates": [], "errors": []}
