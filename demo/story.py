"""make demo: orders of many customers, workers that fail and die, dead letters, a redrive, two resizes under load, and a proof.

python demo/story.py [--orders 3000] [--keep DIRECTORY]
"""

import argparse
import logging
import tempfile
import threading
import time
from contextlib import nullcontext

from orders import FAILS_ONCE, KILLS_ONCE, POISON, handle
from proof import Proof, prove
from rich.console import Console
from rich.live import Live
from rich.table import Table

import penstock

CUSTOMERS = 150
BATCH = 50


def produce(queue: penstock.Queue, orders: int) -> None:
    """Orders 0, 1, 2, …, each for one of many customers, in small batches."""
    for start in range(0, orders, BATCH):
        numbers = range(start, min(start + BATCH, orders))
        queue.produce_many([penstock.NewItem({"order": n}, key=f"customer-{n * 31 % CUSTOMERS}", kind="order") for n in numbers])
        time.sleep(0.02)


class Story:
    """What is told while it happens."""

    def __init__(self, console: Console, broker: penstock.Broker, orders: int) -> None:
        self._console = console
        self._broker = broker
        self._total = orders
        self._began = time.monotonic()
        self.chapter = ""

    def __rich__(self) -> Table:
        table = Table(title=f"{time.monotonic() - self._began:5.1f} s  {self.chapter}", title_justify="left", min_width=76)
        for name in ("queue", "partitions", "ready", "leased", "waits for retry", "completed", "still moving"):
            table.add_column(name, justify="left" if name == "queue" else "right")
        for name in ("orders", "orders.dead", "mail"):
            stats = self._broker.queue(name).stats()
            width = sum(one.status == "active" for one in stats.partitions)
            fenced = sum(one.keys + one.slots for one in stats.resizing)
            table.add_row(name, *map(str, (width, stats.ready, stats.leased, stats.scheduled, stats.completed, fenced)))
        return table

    def tell(self, text: str) -> None:
        self.chapter = text
        if not self._console.is_terminal:
            self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}")


def wait_until_done(queue: penstock.Queue, dead: penstock.Queue, orders: int) -> None:
    """Every order is completed or given up."""
    while True:
        stats = queue.stats()
        if stats.depth == 0 and stats.completed + dead.stats().depth >= orders:
            return
        time.sleep(0.05)


def run(directory: str, orders: int, console: Console) -> None:
    with penstock.open(directory) as broker:
        dead = broker.create_queue("orders.dead", exist_ok=True)
        broker.create_queue("mail", exist_ok=True)
        queue = broker.create_queue("orders", partitions=4, dead_queue=dead, max_attempts=3, lease_timeout=5, exist_ok=True)
        policy = penstock.RetryPolicy(base=0.2, factor=2, jitter=0.2)
        worker = penstock.Worker(queue, handle, processes=3, retry=policy, handler_timeout=10, name="demo")
        working = threading.Thread(target=worker.run, kwargs={"signals": False})
        story = Story(console, broker, orders)
        with Live(story, console=console, refresh_per_second=5) if console.is_terminal else nullcontext():
            story.tell(f"{orders} orders of {CUSTOMERS} customers; three worker processes that fail and die")
            producing = threading.Thread(target=produce, args=(queue, orders))
            working.start()
            producing.start()
            while queue.stats().produced < orders // 3:
                time.sleep(0.05)
            story.tell("resized to 7 partitions while orders come in and are handled")
            queue.resize(7)
            while queue.stats().produced < 2 * orders // 3:
                time.sleep(0.05)
            story.tell("resized to 3 partitions")
            queue.resize(3)
            producing.join()
            wait_until_done(queue, dead, orders)
            letters = dead.items("ready", limit=1_000)
            story.tell(f"{len(letters)} orders could not be handled; they are mended and brought back")
            broker.redrive(dead, to=queue, where={"origin_queue": "orders"})
            while queue.stats().depth or dead.stats().depth or queue.stats().completed < orders:
                time.sleep(0.05)
            worker.stop()
            working.join()
            done = worker.stats()
            story.tell("done")
        console.print(f"\nThe worker handled {done.handled} orders; {done.retried} attempts failed or died and were tried again.")


def show(proof: Proof, console: Console) -> None:
    table = Table(title="What the log says", title_justify="left", min_width=76, show_header=False)
    rows = [
        ("orders produced", proof.orders),
        (
            f"attempts (every {FAILS_ONCE}th failed once, every {KILLS_ONCE}st killed its process, every {POISON}th was poison)",
            proof.attempts,
        ),
        ("orders completed", proof.completed),
        (f"  of these, given up first (every {POISON}th) and brought back from the dead queue", len(proof.redriven)),
        ("letters written by the completions", proof.letters),
        ("lost", len(proof.lost)),
        ("completed twice", len(proof.doubled)),
        ("pairs of one customer handled at the same time", len(proof.overlaps)),
        ("pairs of one customer completed in the wrong order", len(proof.disorder)),
    ]
    for name, number in rows:
        table.add_row(name, str(number))
    console.print(table)
    verdict = "Every customer's orders were handled in order; none was lost, none was done twice." if proof.holds else "IT DOES NOT HOLD"
    console.print(f"[bold]{verdict}[/bold]")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--orders", type=int, default=3_000)
    arguments.add_argument("--keep", help="a directory to leave the queues in")
    given = arguments.parse_args()
    console = Console()
    logging.getLogger("penstock").setLevel(logging.CRITICAL)  # what fails here is meant to
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as place:
        directory = given.keep or place
        run(directory, given.orders, console)
        proof = prove(directory, given.orders)
    show(proof, console)
    raise SystemExit(0 if proof.holds else 1)


if __name__ == "__main__":
    main()
