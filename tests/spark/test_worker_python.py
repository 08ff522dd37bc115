"""Sessions whose tasks run another Python than the program, and programs that write from other threads."""

import os
import sys
import threading
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock import Broker
from penstock.errors import InvalidRequest
from penstock.spark import redrive, register, worker_python, write
from penstock.spark.jobs.progress import to_penstock_error
from penstock.spark.worker_python import check_worker_python, is_this_python


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python of the same version without any package."""
    made = tmp_path_factory.mktemp("python") / "bare"
    venv.create(made, symlinks=True)
    return os.fspath(made / "bin" / "python3")


def test_this_python_is_known_by_other_names(tmp_path: Path, bare_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_this_python(sys.executable)
    beside = [path for path in Path(sys.executable).parent.glob("python3*") if os.path.realpath(path) == os.path.realpath(sys.executable)]
    assert all(is_this_python(str(path)) for path in beside)
    assert not is_this_python(bare_python), "the same program, but with other packages"
    assert not is_this_python(str(tmp_path / "python3")), "it does not exist"
    monkeypatch.setenv("PATH", str(Path(bare_python).parent))
    assert not is_this_python("python3")


def test_a_session_whose_tasks_cannot_import_penstock_is_refused(
    spark: SparkSession, broker_dir: str, bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = spark.sparkContext
    check_worker_python(spark)
    assert context.applicationId not in worker_python._checked, "the same Python needs no task"
    monkeypatch.setattr(context, "pythonExec", bare_python)
    with pytest.raises(
        InvalidRequest, match=r"Spark's tasks run '.*bare/bin/python3', which cannot import .*msgspec, xxhash, pyarrow; "
    ) as raised:
        register(spark)
    assert f"set PYSPARK_PYTHON={sys.executable} before Spark starts" in str(raised.value)
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    monkeypatch.setattr(worker_python, "_checked", {context.applicationId})  # so that the job itself meets the error
    try:
        with pytest.raises(
            InvalidRequest, match=r"Spark's tasks cannot import what they need \(No module named '\w+'\); set PYSPARK_PYTHON="
        ) as raised:
            redrive(spark, broker_dir, "orders", "true")
        assert "predicate" not in str(raised.value)
    finally:
        monkeypatch.undo()
        register(spark)


def test_a_missing_module_is_reported_as_such() -> None:
    error = type("Py4JJavaError", (Exception,), {})(
        "Traceback (most recent call last):\n  …\nModuleNotFoundError: No module named 'penstock'\n"
    )
    assert str(to_penstock_error(error, "selecting dead letters")).startswith(
        "selecting dead letters failed: Spark's tasks cannot import what they need (No module named 'penstock'); set PYSPARK_PYTHON="
    )


def in_thread(step: Callable[[], object]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_every_thread_can_write(spark: SparkSession, broker: Broker, broker_dir: str) -> None:
    queue, rows = broker.create_queue("orders"), spark.range(10).selectExpr("cast(id AS string) AS payload")
    options = {"broker": broker_dir, "queue": "orders"}
    in_thread(lambda: rows.write.format("penstock").options(**options).mode("append").save())
    in_thread(lambda: rows.write.mode("append").save(format="Penstock", **options))
    in_thread(lambda: write(rows, broker_dir, "orders"))
    assert queue.stats().ready == 30


@pytest.mark.long
def test_every_thread_can_start_a_stream_that_writes(spark: SparkSession, broker: Broker, broker_dir: str, tmp_path: Path) -> None:
    queue = broker.create_queue("orders")
    options = {"broker": broker_dir, "queue": "orders", "checkpointLocation": str(tmp_path / "checkpoint")}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "0.json").write_text('{"payload": "a"}\n{"payload": "b"}\n')

    def forward() -> None:
        stream = spark.readStream.schema("payload string").json(str(tmp_path / "rows"))
        query = stream.writeStream.format("penstock").options(**options).trigger(availableNow=True).start()
        assert query.awaitTermination(120)

    in_thread(forward)
    assert queue.stats().ready == 2


def test_a_second_session_has_the_source_and_the_first_stays_active(spark: SparkSession, broker: Broker, broker_dir: str) -> None:
    queue, other = broker.create_queue("orders"), spark.newSession()
    register(other)
    active = SparkSession.getActiveSession()
    assert active is not None and active._jsparkSession.equals(spark._jsparkSession)
    other.range(3).selectExpr("cast(id AS string) AS payload").write.format("penstock").options(broker=broker_dir, queue="orders").mode(
        "append"
    ).save()
    assert queue.stats().ready == 3


def test_an_application_numbers_its_writes(spark: SparkSession, broker: Broker, broker_dir: str) -> None:
    queue, rows = broker.create_queue("orders"), spark.range(5).selectExpr("cast(id AS string) AS payload")
    options = {"broker": broker_dir, "queue": "orders", "txnAppId": "forward"}
    for version in (0, 0):
        rows.write.format("penstock").options(**options, txnVersion=version).mode("append").save()
    assert queue.stats().ready == 5
    write(rows, broker_dir, "orders", txn_app_id="forward", txn_version=0)
    write(rows, broker_dir, "orders", txn_app_id="forward", txn_version=1)
    assert queue.stats().ready == 10
