"""The driver of a consuming stream killed at every step of a micro-batch, and started again: the sink equals the
source, and every item is completed once.

Each start of a driver costs some ten seconds, so every change tries one step, and `make test-long` each of them.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import Queue
from penstock.errors import QueueHeld
from tests.spark.consume_program import ITEMS_PER_BATCH, STEPS, consume
from tests.spark.stream_runs import StreamRun, fill
from tests.spark.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
DEADLINE = 120
SOON, LATE = 1, 60
"""Seconds after which a dead stream has lost its right: before it comes back, or long after."""


def die_at(broker: str, place: Path, where: str, batch: int, timeout: int) -> None:
    """Run the program until it is killed."""
    (place / "sink").mkdir(exist_ok=True)
    told = [broker, str(place / "checkpoint"), str(place / "sink"), where, str(batch), str(timeout)]
    with (place / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.spark.consume_program", *told]
        started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            assert started.wait(DEADLINE) == -signal.SIGKILL, (place / "log").read_text()
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            raise


def in_peace(spark: "SparkSession", broker: str, place: Path, timeout: int) -> list[str]:
    """Consume the rest; gives what is in the sink then."""
    places = {"checkpoint": str(place / "checkpoint"), "sink": str(place / "sink")}
    consume(spark, "penstock", "-", 0, broker=broker, timeout=str(timeout), **places)
    return [line for file in sorted((place / "sink").iterdir()) for line in file.read_text().splitlines()]


def check(broker: str, queue: Queue, ids: list[str], sink: list[str]) -> None:
    assert sorted(sink) == sorted(ids)
    found = queue.stats()
    assert (found.ready, found.leased, found.completed, found.holder) == (0, 0, len(ids), "")
    history = StreamRun(broker, table="events")
    history.all()
    assert Counter(row["id"] for row in history.rows if row["event"] == "completed") == Counter(ids)


def test_a_driver_killed_when_a_batch_was_in_the_sink(spark: "SparkSession", tmp_path: Path, broker_dir: str) -> None:
    """The stream restarts after its right and leases have expired; other consumers wait only so long."""
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=3)
        ids = fill(queue, 3 * ITEMS_PER_BATCH)
        die_at(broker_dir, tmp_path, "sunk", 1, SOON)
        wait_until(lambda: queue.stats().leased == 0)
        wait_until(lambda: not queue.stats().holder)
        assert queue.stats().completed == ITEMS_PER_BATCH
        queue.lease(1, consumer="other")[0].retry(counted=False)
        check(broker_dir, queue, ids, in_peace(spark, broker_dir, tmp_path, SOON))


@pytest.mark.long
@pytest.mark.parametrize("timeout", [SOON, LATE])
@pytest.mark.parametrize(("where", "batch"), [(where, batch) for where in STEPS for batch in (0, 2) if (where, batch) != ("initial", 2)])
def test_a_driver_killed_at_every_step(
    spark: "SparkSession", tmp_path: Path, broker_dir: str, where: str, batch: int, timeout: int
) -> None:
    """The stream restarts in time, after right and leases have expired, or while they expire."""
    # then who comes back has another name, and waits until the right has ended
    if batch == 0 and where in ("ask", "latest"):
        timeout = min(timeout, 5)
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders", partitions=3)
        ids = fill(queue, 3 * ITEMS_PER_BATCH)
        die_at(broker_dir, tmp_path, where, batch, timeout)
        if timeout == LATE and (where, batch) != ("initial", 0):
            with pytest.raises(QueueHeld):
                queue.lease(1)
        if timeout == SOON:
            wait_until(lambda: queue.stats().leased == 0 and not queue.stats().holder)
        ids += fill(queue, 10, len(ids))
        check(broker_dir, queue, ids, in_peace(spark, broker_dir, tmp_path, timeout))
