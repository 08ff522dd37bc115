"""The part of the story that runs on Spark: orders come from files, the log goes to Parquet, dead letters are judged by SQL.

Everything here works beside the workers, in the program that owns the queues: Spark reads the log without a lock and hands what it
writes to the owner through the inbox.
"""

import json
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock.spark
from penstock.broker.snapshot import Snapshot
from penstock.operations import FindQueue, ReadItems
from penstock.spark.jobs.archive import ArchiveResult
from penstock.spark.jobs.load import LoadResult
from penstock.spark.jobs.report_metrics import ReportMetrics

MALFORMED = ["{", '{"order": }', "these are no orders"]


def write_files(folder: Path, orders: range, customers: int, name: str) -> Path:
    """Orders as somebody sends them: a line each, and a few lines that are none."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"order": n, "customer": f"customer-{n * 31 % customers}", "amount": n * 7919 % 500}) for n in orders]
    path = folder / f"{name}.json"
    path.write_text("\n".join([*lines, *MALFORMED]) + "\n")
    return path


class Pipeline:
    """Spark beside the queues of a directory."""

    def __init__(self, spark: SparkSession, directory: Path, lake: Path) -> None:
        self._spark = spark
        self._broker = str(directory)
        self._lake = lake

    def load(self, path: Path) -> LoadResult:
        """A file of orders → items, in each customer's order; what is no order is set aside."""
        schema = "order long, customer string, amount long"
        aside = str(self._lake / "quarantine")
        return penstock.spark.load(
            self._spark, str(path), self._broker, "orders", key="customer", kind="order", schema=schema, order_by="order", quarantine=aside
        )

    def archive(self) -> ArchiveResult:
        """What the log holds and the archive does not → Parquet."""
        return penstock.spark.archive(self._spark, self._broker, "orders", str(self._lake / "archive"))

    def dead_letter_reasons(self) -> list[tuple[str, int]]:
        """Dead letters by the reason why they were given up."""
        dead = self._table("dead")
        return [(row.reason, row.letters) for row in dead.groupBy("reason").agg(F.count("*").alias("letters")).orderBy("reason").collect()]

    def redrive(self, where: str) -> int:
        """Dead letters for which a SQL predicate is true go back to where they came from."""
        return int(penstock.spark.redrive(self._spark, self._broker, "orders", where).items)

    def report(self, path: Path) -> ReportMetrics:
        return penstock.spark.report(self._spark, self._broker, "orders", path)

    def _table(self, name: str) -> DataFrame:
        return self._spark.read.format("penstock").options(broker=self._broker, queue="orders", table=name).load()


class ArchiveCheck(NamedTuple):
    """What is in the archive, beside what is in the log."""

    archived: int
    missing: int
    doubled: int
    unexpected: int

    @property
    def passed(self) -> bool:
        return self.archived > 0 and not (self.missing or self.doubled or self.unexpected)


def compare(spark: SparkSession, archived: ArchiveResult, directory: Path) -> ArchiveCheck:
    """The archive, read by Spark, against the log, read without it."""
    found = [(row.id, bytes(row.payload)) for row in spark.read.parquet(archived.path).select("id", "payload").collect()]
    with Snapshot.open(str(directory)) as log:
        orders = log.call(FindQueue(name="orders"))
        places = [*orders.active, *orders.retired]
        parts = log.call(ReadItems(queue=orders.incarnation, start=dict.fromkeys(places, 0), limit=1_000_000)).items
    kept = {(f"{number}-{items.start + n}", payload) for number, items in parts for n, payload in enumerate(items.batch.payloads)}
    return ArchiveCheck(len(found), len(kept - set(found)), len(found) - len(set(found)), len(set(found) - kept))
