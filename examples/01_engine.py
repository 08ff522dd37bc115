"""A partition that is killed in the middle of its work, again and again, and loses nothing.

    python examples/01_engine.py        (make demo)

A child process produces orders and handles them, durably, and prints what was acknowledged. It is killed with SIGKILL at a random
moment; the next one opens the same directory and goes on. In the end everything acknowledged is there and was completed once.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

from penstock.logs.files.directory import Directory
from penstock.loop.partition import Partition
from penstock.rules.commands import Complete, Granted, Lease, Produce, Stored
from penstock.words.batch import Batch
from penstock.words.clock import SystemClock

KILLS, CUSTOMERS = 8, 200


def work(place: str) -> None:
    """The child: produce some orders, handle some, tell what was acknowledged; until killed."""
    part = Partition(Directory.open(place).log(incarnation=1, partition=0), SystemClock())
    while True:
        keys = [b"customer-%d" % random.randrange(CUSTOMERS) for _ in range(100)]
        stored = part.run(Produce(Batch([b"an order of " + key for key in keys], keys)))
        granted = part.run(Lease(want=90, consumer="demo"))
        part.commit()
        assert isinstance(stored, Stored) and isinstance(granted, Granted)
        print("produced", stored.base, stored.count, flush=True)
        if granted.lease:
            part.run(Complete(granted.lease))
            part.commit()
            print("completed", *(f"{a}-{b}" for a, b in zip(granted.runs[::2], granted.runs[1::2], strict=True)), flush=True)


def main() -> None:
    produced, completed = 0, Counter[int]()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as place:
        for _ in range(KILLS):
            child = subprocess.Popen([sys.executable, __file__, place], stdout=subprocess.PIPE, text=True)
            time.sleep(0.4 + random.random() / 2)
            child.send_signal(signal.SIGKILL)
            for line in child.communicate()[0].splitlines(keepends=True):
                verb, *rest = line.split() if line.endswith("\n") else [""]
                produced = max(produced, sum(map(int, rest))) if verb == "produced" else produced
                if verb == "completed":
                    completed.update(o for run in rest for a, b in [map(int, run.split("-"))] for o in range(a, b))
        part = Partition(Directory.open(place).log(1, 0), SystemClock())
        state, kept = part.state, len(part.payloads([0, part.state.next_offset]))
        forgotten, doubled = sum(o not in state.resolved for o in completed), sum(times > 1 for times in completed.values())
        print(f"processes killed           {KILLS:9,}")
        print(f"orders acknowledged        {produced:9,}   read back after the last kill {kept:,}")
        print(f"completions acknowledged   {len(completed):9,}   forgotten {forgotten}, doubled {doubled}")
        if kept < produced or forgotten or doubled:
            sys.exit("something acknowledged was lost or done twice")


if __name__ == "__main__":
    work(sys.argv[1]) if len(sys.argv) > 1 else main()
