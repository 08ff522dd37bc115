"""The session that `penstock.spark.session` makes, and what importing it costs."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
import penstock.spark
from penstock.spark import scratch

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pyspark":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import penstock, penstock.spark
from penstock.errors import InvalidRequest
for ask in (penstock.spark.session, lambda: penstock.spark.register, lambda: penstock.spark.slot):
    try:
        ask()
    except InvalidRequest as error:
        print(error)
"""
DAEMON_LINE = re.compile(r"Traceback |\s|BrokenPipeError|ConnectionResetError|During handling|$")
"""A line of the tracebacks that Spark's own daemons print when their session ends before them; they may be mixed."""
LIGHT = "import penstock, penstock.spark, sys; print([name for name in ('pyspark', 'pandas', 'pyarrow', 'py4j') if name in sys.modules])"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_penstock_imports_no_spark() -> None:
    assert run(LIGHT) == "[]\n"


def test_without_pyspark_every_name_says_what_to_install() -> None:
    told = run(WITHOUT).splitlines()
    assert len(told) == 3
    assert all("no module pyspark" in line and line.endswith("run pip install 'penstock[spark]'") for line in told)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = penstock.spark.nothing


def test_every_public_name_is_there() -> None:
    assert [name for name in penstock.spark.__all__ if not callable(getattr(penstock.spark, name))] == []
    assert set(penstock.spark.__all__) <= set(dir(penstock.spark))


def test_the_session_is_local_quiet_and_uses_utc(spark: SparkSession) -> None:
    told = {name: spark.conf.get(f"spark.{name}") for name in ("sql.session.timeZone", "ui.enabled", "driver.host", "driver.bindAddress")}
    assert told == {"sql.session.timeZone": "UTC", "ui.enabled": "false", "driver.host": "127.0.0.1", "driver.bindAddress": "127.0.0.1"}
    assert spark.conf.get("spark.ui.showConsoleProgress") == "false"


def test_tasks_run_this_very_python(spark: SparkSession) -> None:
    def whose(batches):  # type: ignore[no-untyped-def]
        import sys

        import pyarrow as pa

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable]})

    assert {row.python for row in spark.range(2).mapInArrow(whose, "python string").collect()} == {sys.executable}


def test_a_session_that_runs_is_used_again(spark: SparkSession) -> None:
    again = penstock.spark.session("other", "local[7]", **{"spark.sql.shuffle.partitions": 99})
    assert again is spark or again.sparkContext is spark.sparkContext
    assert spark.conf.get("spark.sql.shuffle.partitions") == "4"


def test_the_data_source_is_known(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="the option broker is missing"):
        spark.read.format("penstock").load()


def test_the_environment_is_as_it_was(spark: SparkSession) -> None:
    assert not {"SPARK_LOCAL_IP", "PYSPARK_DRIVER_PYTHON"} & set(os.environ)


ALONE = """
import os, sys
from pathlib import Path
from penstock import spark
session = spark.session(master="local[1]", **{"spark.sql.shuffle.partitions": 3})
place = Path(session.conf.get("spark.local.dir")).parent
print(session.range(10).repartition(2).count(), session.conf.get("spark.sql.shuffle.partitions"), os.listdir("."), place.exists())
print(place)
"""


def test_a_process_leaves_nothing_behind(tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    ran = subprocess.run([sys.executable, "-c", ALONE], cwd=cwd, capture_output=True, text=True, check=True)
    figures, place = ran.stdout.splitlines()
    assert figures == "10 3 [] True"
    assert not Path(place).exists()
    assert list(cwd.iterdir()) == []
    assert str(Path(penstock.__file__).parent) not in ran.stderr, "a traceback through Penstock"
    said = [line for line in ran.stderr.splitlines() if not DAEMON_LINE.match(line)]
    assert {line.partition(":")[0] for line in said} <= {"WARNING"}  # what Java itself says


KILLED = """
import os, signal
from penstock.spark import scratch
print(scratch.make(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_directories_of_killed_processes_are_removed_but_none_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    left, mine, foreign = Path(killed.stdout.strip()), scratch.make(), tmp_path / f"{scratch.PREFIX}other"
    assert not left.exists() and killed.stdout.startswith(str(tmp_path))
    foreign.mkdir()
    other = scratch.make()
    assert mine.exists() and foreign.exists()
    for one in (mine, other):
        scratch.remove(one)
    assert list(tmp_path.iterdir()) == [foreign]


BAD = """
import penstock.spark
from penstock.errors import InvalidRequest
try:
    penstock.spark.session(master="nonsense")
except InvalidRequest as error:
    print(error)
"""


def test_a_start_that_fails_is_said() -> None:
    assert run(BAD).startswith("Spark did not start (")
