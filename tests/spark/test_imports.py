"""What Spark's Python processes import: they are started for queries, so that imports are a large part of the start."""

import subprocess
import sys

import pytest

PROGRAM = "import sys, {spark}; known = {{*sys.modules}}; import penstock.spark.source, {ours}; print(*{{*sys.modules}} - known)"
NOT_NEEDED = ("penstock.api", "penstock.worker", "penstock.server", "penstock.wire", "pandas", "matplotlib", "asyncio", "ssl")


@pytest.mark.parametrize(
    ("spark", "ours"),
    [
        ("pyspark.sql.worker.plan_data_source_read", "penstock.spark.batch_reader"),
        ("pyspark.sql.streaming.python_streaming_source_runner", "penstock.spark.stream_reader"),
        ("pyspark.worker", "penstock.spark.batch_reader"),
    ],
)
def test_a_process_that_reads_imports_no_api_and_no_engine(spark: str, ours: str) -> None:
    program = PROGRAM.format(spark=spark, ours=ours)
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert ours in found
    assert [name for name in found if name.startswith(NOT_NEEDED)] == []
    assert {"penstock.broker.embedded", "penstock.broker.queries", "penstock.loop.turn", "penstock.loop.partition"}.isdisjoint(found)
