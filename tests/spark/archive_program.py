"""Archives a queue in micro-batches of 100 and kills itself in the second one; test_jobs_archive.py runs it.

    python -m tests.spark.archive_program BROKER LAKE STEP

STEP: killed before the files are written (write), synced (sync), read back (describe_files) or entered (manifest), or
(after) after they are entered and before Spark has committed.
"""

import sys
from typing import Any

from penstock.spark import session
from penstock.spark.jobs import archive as job
from penstock.spark.jobs import manifest as manifests
from tests.spark.process_kill import enable_kill, kill_all


def main(broker: str, lake: str, step: str) -> None:
    enable_kill()
    write_batch = job._write_batch

    def killed_in_second(rows: Any, location: Any, checkpoint: str, number: int) -> Any:
        if number == 1 and step == "write":
            kill_all()
        elif number == 1 and step in ("sync", "describe_files"):
            setattr(manifests, step, kill_all)
        elif number == 1 and step == "manifest":
            manifests.write = kill_all  # type: ignore[assignment]
        found = write_batch(rows, location, checkpoint, number)
        if number == 1:
            kill_all()
        return found

    job._write_batch = killed_in_second
    job.archive(session("mortal", "local[2]"), broker, "orders", lake, max_items_per_batch=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
