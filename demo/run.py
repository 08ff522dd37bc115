"""make demo: Spark loads orders, workers handle them, with failures and killed processes; the queue is resized twice
meanwhile; Spark archives the log as Parquet, redrives dead letters by SQL and writes a report. Then the log is checked.

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

from log_check import LogCheck, check_log
from orders import FAILS_ONCE, KILLS_ONCE, POISON, handle
from pipeline import ArchiveCheck, Pipeline, compare, write_files
from rich.console import Console
from rich.live import Live
from rich.table import Table

import penstock
import penstock.spark
from penstock.spark.jobs.report_metrics import ReportMetrics
from penstock.worker.stats import WorkerStats

CUSTOMERS = 150


class ProgressDisplay:
    """Shows the current step and the queues while the demo runs."""

    def __init__(self, console: Console, broker: penstock.Broker) -> None:
        self._console = console
        self._broker = broker
        self._began = time.monotonic()
        self.step = ""

    def __rich__(self) -> Table:
        table = Table(title=f"{time.monotonic() - self._began:5.1f} s  {self.step}", title_justify="left", min_width=76)
        for name in ("queue", "partitions", "ready", "leased", "waits for retry", "completed", "still moving"):
            table.add_column(name, justify="left" if name == "queue" else "right")
        for name in ("orders", "orders.dead", "mail"):
            stats = self._broker.queue(name).stats()
            width = sum(one.status == "active" for one in stats.partitions)
            fenced = sum(one.keys + one.slots for one in stats.resizing)
            table.add_row(name, *map(str, (width, stats.ready, stats.leased, stats.scheduled, stats.completed, fenced)))
        return table

    def show(self, text: str) -> None:
        self.step = text
        if not self._console.is_terminal:
            self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}")


def wait_until_done(queue: penstock.Queue, dead: penstock.Queue, orders: int) -> None:
    """Wait until every order is completed or buried."""
    while True:
        stats = queue.stats()
        if stats.depth == 0 and stats.completed + dead.stats().depth >= orders:
            return
        time.sleep(0.05)


class DemoResult(NamedTuple):
    """What the demo shows at its end."""

    worker: WorkerStats
    archive: ArchiveCheck
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
        display = ProgressDisplay(console, broker)
        with Live(display, console=console, refresh_per_second=5) if console.is_terminal else nullcontext():
            display.show("Spark starts")
            spark = penstock.spark.session("penstock demo", master="local[2]")
            pipeline = Pipeline(spark, directory, lake)
            loaded = pipeline.load(write_files(lake, range(orders // 2), CUSTOMERS, "morning"))
            display.show(
                f"Spark loaded {loaded.items} orders of {CUSTOMERS} customers and put {loaded.quarantined} malformed lines into quarantine"
            )
            working.start()
            display.show("three worker processes handle them; some fail, some are killed; resized to 7 partitions meanwhile")
            queue.resize(7)
            loaded = pipeline.load(write_files(lake, range(orders // 2, orders), CUSTOMERS, "evening"))
            display.show(f"Spark loaded {loaded.items} more while they work; resized to 3 partitions")
            queue.resize(3)
            archived = pipeline.archive()
            display.show(f"Spark archived {archived.rows} orders as Parquet meanwhile")
            wait_until_done(queue, dead, orders)
            for reason, buried in pipeline.dead_letter_reasons():
                display.show(f"{buried} orders were buried: {reason}")
            count = pipeline.redrive("reason like '%address%' and payload_json:order is not null")
            display.show(f"{count} of them, selected by SQL, are redriven")
            while queue.stats().depth or dead.stats().depth or queue.stats().completed < orders:
                time.sleep(0.05)
            worker.stop()
            working.join()
            archived = pipeline.archive()
            display.show(f"Spark added {archived.rows} new orders to the archive, and writes the report")
            metrics = pipeline.report(report)
            display.show("done")
    result = DemoResult(worker.stats(), compare(spark, archived, directory), metrics)
    spark.stop()  # before the result is shown: what Spark's processes print when they end would follow it
    return result


def show(check: LogCheck, result: DemoResult, console: Console) -> bool:
    """Print the result; gives whether every check passed."""
    worker, archive, metrics = result
    table = Table(title="What the log says", title_justify="left", min_width=76, show_header=False)
    kinds = f"every {FAILS_ONCE}th failed once, every {KILLS_ONCE}st killed its process, every {POISON}th was poison"
    rows = [
        ("orders produced", check.orders),
        (f"attempts ({kinds})", check.attempts),
        ("orders completed", check.completed),
        (f"  of these, buried first (every {POISON}th) and redriven from the dead queue", len(check.redriven)),
        ("mails produced by the completions", check.mails),
        ("lost", len(check.lost)),
        ("completed twice", len(check.doubled)),
        ("pairs of one customer handled at the same time", len(check.overlaps)),
        ("pairs of one customer completed in the wrong order", len(check.out_of_order)),
        ("items of the log in the Parquet archive", archive.archived),
        ("  missing there, twice there, or not from the log", archive.missing + archive.doubled + archive.unexpected),
    ]
    for name, number in rows:
        table.add_row(name, str(number))
    console.print(f"\nThe worker handled {worker.handled} orders; {worker.retried} attempts failed or were killed, and were retried.")
    console.print(table)
    waiting, handling = metrics.waiting, metrics.handling
    console.print(
        f"Waiting: half of them less than {waiting.p50:.2f} s, 99 % less than {waiting.p99:.2f} s; handling {handling.p50 * 1000:.0f} ms."
    )
    passed: bool = check.passed and archive.passed
    verdict = "Every customer's orders were handled in order; none was lost, none was done twice." if passed else "THE CHECK FAILED"
    console.print(f"[bold]{verdict}[/bold]")
    return passed


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--orders", type=int, default=3_000)
    arguments.add_argument("--keep", help="a directory to leave the queues in", type=Path)
    arguments.add_argument("--report", help="where to write the report", type=Path, default=Path("build/demo/report.html"))
    given = arguments.parse_args()
    console = Console()
    logging.getLogger("penstock").setLevel(logging.CRITICAL)  # failures are part of the demo
    given.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        directory = given.keep or Path(temporary) / "queues"
        result = run(directory, given.orders, given.report, console)
        check = check_log(str(directory), given.orders)
    passed = show(check, result, console)
    console.print(f"The report: {given.report}", soft_wrap=True)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
