"""Kills a program in the middle of its work several times, and checks that nothing is lost.

    python examples/08_kills.py

A child process produces orders and completes orders, and prints every id once Penstock has acknowledged it. It is
killed with SIGKILL at a random moment; the next child opens the same directory and continues. At the end every
acknowledged item must be there, and no item may be completed twice.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter

import penstock

KILLS, CUSTOMERS = 6, 200


def work(directory: str) -> None:
    """Produce and complete orders until killed."""
    with penstock.open(directory) as broker:
        orders = broker.create_queue("orders", partitions=2, exist_ok=True)
        while True:
            customers = [f"customer-{random.randrange(CUSTOMERS)}" for _ in range(50)]
            ids = orders.produce_many([penstock.NewItem({"buy": 1}, key=key) for key in customers])
            print("produced", *ids, flush=True)
            batch = orders.lease(45)
            batch.complete()
            print("completed", *(item.id for item in batch.items), flush=True)


def main() -> None:
    produced: set[str] = set()
    completed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as directory:
        for _ in range(KILLS):
            child = subprocess.Popen([sys.executable, __file__, directory], stdout=subprocess.PIPE, text=True)
            first = child.stdout.readline()  # its first order is acknowledged
            time.sleep(random.random())
            child.send_signal(signal.SIGKILL)
            for line in [first, *child.communicate()[0].splitlines(keepends=True)]:
                verb, *ids = line.split() if line.endswith("\n") else [""]
                produced.update(ids if verb == "produced" else [])
                completed.update(ids if verb == "completed" else [])
        with penstock.open(directory) as broker:
            orders = broker.queue("orders")
            states = {item.id: item.state for state in ("ready", "leased") for item in orders.items(state)}
            kept = {item.id for item in orders.cursor("check")}
    lost, again = len(produced - kept), sum(times > 1 for times in completed.values()) + len(completed.keys() & states.keys())
    print(f"processes killed          {KILLS:7,}")
    print(f"orders acknowledged       {len(produced):7,}   lost {lost}")
    print(f"completions acknowledged  {len(completed):7,}   forgotten or done twice {again}")
    if lost or again:
        sys.exit("something acknowledged was lost or done twice")


if __name__ == "__main__":
    work(sys.argv[1]) if len(sys.argv) > 1 else main()
