"""A process that uses a directory in every way while it is backed up, and what a restored copy of it must have.

Owns: `BusyProcess`, which keeps a journal of what it was answered; `numbers_in`; and `copying_process`, to be killed.
"""

import subprocess
import sys
from pathlib import Path
from time import monotonic
from types import TracebackType

import penstock

PROGRAM = """
import sys, threading
import penstock

directory, path = sys.argv[1:]
broker = penstock.open(directory, segment_bytes=4096)
retention = {"max_age": 1.0}
dead = broker.create_queue("dead", retention=retention)
work = broker.create_queue("work", partitions=3, dead_queue="dead", max_attempts=100, retention=retention)
journal, lock = open(path, "w", buffering=1), threading.Lock()
ends, buried = threading.Event(), set()

def note(word, numbers):
    with lock:
        journal.write("".join(f"{word} {number}\\n" for number in numbers))

def produce():
    first = 0
    while not ends.is_set():
        numbers = range(first, first + 20)
        work.produce_many([penstock.NewItem(str(n), key=f"k{n % 7}" if n % 2 else None, dedup=f"d{n}") for n in numbers])
        note("produced", numbers)
        first += 20

def consume():
    while not ends.is_set():
        for lease in work.lease(10, wait=0.1):
            number = int(lease.item.value)
            if number % 3 == 0:
                note("completing", [number])
                lease.complete()
                note("completed", [number])
            elif number % 3 == 1 and number not in buried:
                buried.add(number)
                lease.bury("test")
            elif number % 3 == 1:
                lease.retry(delay=30)
            # the others stay leased

def move():
    while not ends.is_set():
        broker.redrive("dead", to="work", limit=5)
        for queue in (work, dead):
            queue.compact()

threads = [threading.Thread(target=one, daemon=True) for one in (produce, consume, move)]
for thread in threads:
    thread.start()
print("ready", flush=True)
sys.stdin.read()
ends.set()
for thread in threads:
    thread.join()
broker.close()
print("closed", flush=True)
"""


class BusyProcess:
    """A process that owns a directory and produces, handles, buries and redrives items, and drops what it can."""

    def __init__(self, directory: Path, journal: Path) -> None:
        self._journal = journal
        command = [sys.executable, "-c", PROGRAM, str(directory), str(journal)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def noted(self, word: str) -> set[int]:
        """The numbers in the journal after a word."""
        lines = [line.split() for line in self._journal.read_text().splitlines()]
        return {int(number) for found, number in lines if found == word}

    def __enter__(self) -> "BusyProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.read()
        self.process.stdout.close()
        assert self.process.wait() == 0


def numbers_in(broker: penstock.Broker) -> list[int]:
    """The numbers of the items in all queues that are not completed, sorted. Waits until none is being moved."""
    deadline = monotonic() + 20
    while any(broker.queue(name).stats().moving for name in ("work", "dead")):
        assert monotonic() < deadline, "items are moved for too long"
    found: list[int] = []
    for name in ("work", "dead"):
        after = None
        while page := broker.queue(name).items(["ready", "scheduled", "leased", "buried"], after, 10_000):
            found += [int(listed.value) for listed in page]
            after = page[-1].id
    return sorted(found)


def copying_process(function: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that calls a function of penstock.broker.backup and stops when it has copied its first file."""
    program = f"""
import sys
from penstock.broker import backup

def stop(size):
    print("copied", flush=True)
    sys.stdin.read()

backup.{function}(*sys.argv[1:], copied=stop)
"""
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "copied\n"
    return process
