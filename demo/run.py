"""make demo: Spark loads orders, workers fail and die over them, the queue is resized twice under load, Spark streams the log to Parquet,
dead letters are judged by SQL and brought back, a report is written, and then there is a proof.

python demo/run.py [--orders 3000] [--keep DIRECTORY] [--report FILE]
"""

import argparse
import logging
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from orders import FAILS_ONCE, KILLS_ONCE, POISON, handle
from pipeline import Copy, Pipeline, compare, write_files
from proof import Proof, prove
from rich.console import Console
from rich.live import Live
from rich.table import Table

import penstock
import penstock.spark
from penstock.spark.jobs.report_metrics import ReportMetrics
from penstock.worker.stats import WorkerStats

CUSTOMERS = 150


class ProgressDisplay:
    """What is told while it happens."""

    def __init__(self, console: Console, broker: penstock.Broker) -> None:
        self._console = console
        self._broker = broker
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

    def show(self, text: str) -> None:
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


class DemoResult(NamedTuple):
    """What is left to be told when it is over."""

    worker: WorkerStats
    copy: Copy
    report: ReportMetrics


def run(directory: Path, orders: int, report: Path, console: Console) -> DemoResult:
    lake = directory.with_name(directory.name + "-lake")
    with penstock.open(directory) as broker:
        dead = broker.create_queue("orders.dead", exist_ok=True)
        broker.create_queue("mail", exist_ok=True)
        queue = broker.create_queue("orders", partitions=4, dead_queue=dead, max_attempts=3, lease_timeout=5, exist_ok=True)
        policy = penstock.RetryPolicy(base=0.2, factor=2, jitter=0.2)
        worker = penstock.Worker(queue, handle, processes=3, retry=policy, handler_timeout=10, name="demo")
        working = threading.Thread(target=worker.run, kwargs={"signals": False})
        story = ProgressDisplay(console, broker)
        with Live(story, console=console, refresh_per_second=5) if console.is_terminal else nullcontext():
            story.show("Spark starts")
            spark = penstock.spark.session("penstock demo", master="local[2]")
            pipeline = Pipeline(spark, directory, lake)
            loaded = pipeline.load(write_files(lake, range(orders // 2), CUSTOMERS, "morning"))
            story.show(
                f"Spark loaded {loaded.items} orders of {CUSTOMERS} customers and set {loaded.quarantined} lines aside that are none"
            )
            working.start()
            story.show("three worker processes handle them, which fail and die; resized to 7 partitions meanwhile")
            queue.resize(7)
            loaded = pipeline.load(write_files(lake, range(orders // 2, orders), CUSTOMERS, "evening"))
            story.show(f"Spark loaded {loaded.items} more while they work; resized to 3 partitions")
            queue.resize(3)
            archived = pipeline.archive()
            story.show(f"Spark streamed {archived.rows} orders from the log to Parquet meanwhile")
            wait_until_done(queue, dead, orders)
            for reason, letters in pipeline.dead_letter_reasons():
                story.show(f"{letters} orders were given up: {reason}")
            count = pipeline.redrive("reason like '%address%' and payload_json:order is not null")
            story.show(f"{count} of them, chosen by SQL, are mended and brought back")
            while queue.stats().depth or dead.stats().depth or queue.stats().completed < orders:
                time.sleep(0.05)
            worker.stop()
            working.join()
            archived = pipeline.archive()
            story.show(f"Spark added to the archive what is new: {archived.rows} orders; and writes its report")
            figures = pipeline.report(report)
            story.show("done")
    return DemoResult(worker.stats(), compare(spark, archived, directory), figures)


def show(proof: Proof, told: DemoResult, console: Console) -> bool:
    done, copy, figures = told
    table = Table(title="What the log says", title_justify="left", min_width=76, show_header=False)
    kinds = f"every {FAILS_ONCE}th failed once, every {KILLS_ONCE}st killed its process, every {POISON}th was poison"
    rows = [
        ("orders produced", proof.orders),
        (f"attempts ({kinds})", proof.attempts),
        ("orders completed", proof.completed),
        (f"  of these, given up first (every {POISON}th) and brought back from the dead queue", len(proof.redriven)),
        ("letters written by the completions", proof.mails),
        ("lost", len(proof.lost)),
        ("completed twice", len(proof.doubled)),
        ("pairs of one customer handled at the same time", len(proof.overlaps)),
        ("pairs of one customer completed in the wrong order", len(proof.out_of_order)),
        ("items of the log in the Parquet archive", copy.archived),
        ("  missing there, twice there, or not from the log", copy.missing + copy.doubled + copy.unexpected),
    ]
    for name, number in rows:
        table.add_row(name, str(number))
    console.print(f"\nThe worker handled {done.handled} orders; {done.retried} attempts failed or died and were tried again.")
    console.print(table)
    waiting, handling = figures.waiting, figures.handling
    console.print(
        f"Waiting: half of them less than {waiting.p50:.2f} s, 99 % less than {waiting.p99:.2f} s; handling {handling.p50 * 1000:.0f} ms."
    )
    holds = proof.passed and copy.passed
    verdict = "Every customer's orders were handled in order; none was lost, none was done twice." if holds else "IT DOES NOT HOLD"
    console.print(f"[bold]{verdict}[/bold]")
    return holds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--orders", type=int, default=3_000)
    arguments.add_argument("--keep", help="a directory to leave the queues in", type=Path)
    arguments.add_argument("--report", help="where to write the report", type=Path, default=Path("build/demo/report.html"))
    given = arguments.parse_args()
    console = Console()
    logging.getLogger("penstock").setLevel(logging.CRITICAL)  # what fails here is meant to
    given.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as place:
        directory = given.keep or Path(place) / "queues"
        told = run(directory, given.orders, given.report, console)
        proof = prove(str(directory), given.orders)
    holds = show(proof, told, console)
    console.print(f"The report: {given.report}", soft_wrap=True)
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
