"""The demo's Spark jobs: load orders from files, archive the log as Parquet, redrive dead letters by SQL, report.

The jobs run while the workers do, in the program that owns the broker. Spark reads the log without a lock, and leaves
what it writes in the inbox for the owner.
"""

import json
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import penstock.spark
from penstock.broker.snapshot import Snapshot
from penstock.operations import FindQueue, ReadItems
from penstock.spark.jobs.archive import ArchiveResult
from penstock.spark.jobs.load import LoadResult
from penstock.spark.jobs.report_metrics import ReportMetrics

MALFORMED = ["{", '{"order": }', "this is not an order"]


def write_files(folder: Path, orders: range, customers: int, name: str) -> Path:
    """A file with an order per line, and a few malformed lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"order": n, "customer": f"customer-{n * 31 % customers}", "amount": n * 7919 % 500}) for n in orders]
    path = folder / f"{name}.json"
    path.write_text("\n".join([*lines, *MALFORMED]) + "\n")
    return path


class Pipeline:
    """The Spark jobs on the broker of a directory."""

    def __init__(self, spark: SparkSession, directory: Path, lake: Path) -> None:
        self._spark = spark
        self._broker = str(directory)
        self._lake = lake

    def load(self, path: Path) -> LoadResult:
        """Load a file of orders, in order per customer; malformed lines go to the quarantine."""
        schema = "order long, customer string, amount long"
        quarantine = str(self._lake / "quarantine")
        return penstock.spark.load(
            self._spark,
            str(path),
            self._broker,
            "orders",
            key="customer",
            kind="order",
            schema=schema,
            order_by="order",
            quarantine=quarantine,
        )

    def archive(self) -> ArchiveResult:
        """Add to the archive what is new in the log."""
        return penstock.spark.archive(self._spark, self._broker, "orders", str(self._lake / "archive"))

    def dead_letter_reasons(self) -> list[tuple[str, int]]:
        """The number of dead letters by reason."""
        dead = self._spark.read.format("penstock").options(broker=self._broker, queue="orders", table="dead").load()
        return [(row.reason, row.items) for row in dead.groupBy("reason").agg(F.count("*").alias("items")).orderBy("reason").collect()]

    def redrive(self, where: str) -> int:
        """Redrive the dead letters for which a SQL predicate is true; gives their number."""
        return int(penstock.spark.redrive(self._spark, self._broker, "orders", where).items)

    def report(self, path: Path) -> ReportMetrics:
        return penstock.spark.report(self._spark, self._broker, "orders", path)


class ArchiveCheck(NamedTuple):
    """The result of comparing the archive with the log."""

    archived: int
    missing: int
    doubled: int
    unexpected: int

    @property
    def passed(self) -> bool:
        return self.archived > 0 and not (self.missing or self.doubled or self.unexpected)


def compare(spark: SparkSession, archived: ArchiveResult, directory: Path) -> ArchiveCheck:
    """Compare the archive, read by Spark, with the log, read without Spark."""
    found = [(row.id, bytes(row.payload)) for row in spark.read.parquet(archived.path).select("id", "payload").collect()]
    with Snapshot.open(str(directory)) as log:
        orders = log.call(FindQueue(name="orders"))
        partitions = [*orders.active, *orders.retired]
        parts = log.call(ReadItems(queue=orders.incarnation, start=dict.fromkeys(partitions, 0), limit=1_000_000)).items
    kept = {(f"{number}-{items.start + n}", payload) for number, items in parts for n, payload in enumerate(items.batch.payloads)}
    return ArchiveCheck(len(found), len(kept - set(found)), len(found) - len(set(found)), len(set(found) - kept))
