"""A program that archives a queue in micro-batches of 100 and dies in its second one; run by test_jobs_archive.py as a process of its own.

    python -m tests.spark.archive_program BROKER LAKE STEP

STEP: before the files are written, synced, looked at or entered, or after they are entered and before Spark has committed.
"""

import sys
from typing import Any

from penstock.spark import session
from penstock.spark.jobs import archive as job
from penstock.spark.jobs import manifest as manifests
from tests.spark.process_kill import enable_kill, kill_all


def main(broker: str, lake: str, step: str) -> None:
    enable_kill()
    keep = job._keep

    def second(rows: Any, place: Any, checkpoint: str, number: int) -> Any:
        if number == 1 and step == "write":
            kill_all()
        elif number == 1 and step in ("sync", "look"):
            setattr(manifests, step, kill_all)
        elif number == 1 and step == "manifest":
            manifests.write = kill_all  # type: ignore[assignment]
        found = keep(rows, place, checkpoint, number)
        if number == 1:
            kill_all()
        return found

    job._keep = second
    job.archive(session("mortal", "local[2]"), broker, "orders", lake, max_items_per_batch=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
