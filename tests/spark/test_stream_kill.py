"""A streaming driver killed at every step of a micro-batch, and started again: the sink equals the source.

Each start of a driver costs some ten seconds, so every change tries one step, and `make test-long` each of
them.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import Queue
from tests.spark.stream_program import ITEMS_PER_BATCH, STEPS, stream
from tests.spark.stream_runs import fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
DEADLINE = 120


def die_at(broker: str, place: Path, where: str, batch: int) -> None:
    """Run the program until it is killed."""
    told = [broker, str(place / "checkpoint"), str(place / "sink"), where, str(batch)]
    with (place / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.spark.stream_program", *told]
        started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            assert started.wait(DEADLINE) == -signal.SIGKILL, (place / "log").read_text()
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            raise


def streamed(spark: "SparkSession", broker: str, place: Path, queue: Queue, where: str, batch: int) -> tuple[list[str], list[str]]:
    """The produced ids, and those in the sink after the kill and an undisturbed run in another Spark."""
    (place / "sink").mkdir()
    ids = fill(queue, 3 * ITEMS_PER_BATCH)
    die_at(broker, place, where, batch)
    ids += fill(queue, 10, len(ids))
    stream(spark, "penstock", "nowhere", 0, broker=broker, checkpoint=str(place / "checkpoint"), sink=str(place / "sink"))
    return ids, [line for file in sorted((place / "sink").iterdir()) for line in file.read_text().splitlines()]


def test_a_driver_killed_when_a_batch_is_in_the_sink(spark: "SparkSession", tmp_path: Path, broker_dir: str) -> None:
    """Killed when the second batch is in the sink but not committed."""
    with penstock.open(broker_dir) as broker:
        ids, found = streamed(spark, broker_dir, tmp_path, broker.create_queue("orders", partitions=3), "sunk", 1)
        assert sorted(found) == sorted(ids)


@pytest.mark.long
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("where", STEPS)
def test_a_driver_killed_at_every_step(spark: "SparkSession", tmp_path: Path, broker_dir: str, where: str, batch: int) -> None:
    if (where, batch) in [("initial", 1), ("initial", 2), ("commit", 0)]:
        where = "latest"  # there is no such step
    with penstock.open(broker_dir) as broker:
        ids, found = streamed(spark, broker_dir, tmp_path, broker.create_queue("orders", partitions=3), where, batch)
        assert sorted(found) == sorted(ids)
