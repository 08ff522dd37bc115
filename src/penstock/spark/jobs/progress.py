"""The progress of a job, and the translation of Spark's errors.

Owns: `Progress`, the callback of a job; `report_task_progress`, which reports the finished tasks of the running stages;
and `translate_spark_errors`, which turns Spark's errors into Penstock's. Without a callback no thread is started.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from pyspark.errors import AnalysisException, ParseException, PySparkException

from penstock.spark.worker_python import advice, import_error
from penstock.words import errors
from penstock.words.errors import InvalidRequest, PenstockError, StorageFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of the step, how much of it is done, and of how much (0: unknown)."""

PAUSE_SECONDS = 0.25
_OURS = re.compile(r"penstock\.words\.errors\.(\w+): (.+)")
_TRACEBACK = "Traceback (most recent call last)"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\w*: (.+)$", re.MULTILINE)
_CAUSED = re.compile(r"^Caused by: [\w.$]+: (.+)$", re.MULTILINE)
_CONDITION = re.compile(r"^\[[A-Z_.0-9]+\] ")
_STATE = re.compile(r" *SQLSTATE: \w+")
_UNREADABLE = re.compile(r"\[FAILED_READ_FILE\b[\w.]*\] Encountered error while reading file (\S+?)\.\s")
_LONGEST = 300


@contextmanager
def report_task_progress(spark: "SparkSession", title: str, progress: Progress | None) -> Iterator[None]:
    """In the block, report how many tasks of the running stages are done; nothing with Spark Connect."""
    tracker = None
    if progress is not None:
        with suppress(PySparkException):
            tracker = spark.sparkContext.statusTracker()
    if progress is None or tracker is None:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(PAUSE_SECONDS):
            stages = [stage for number in tracker.getActiveStageIds() if (stage := tracker.getStageInfo(number)) is not None]
            if stages:
                progress(title, sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages))

    progress(title, 0, 0)
    watcher = threading.Thread(target=report, name="penstock-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@contextmanager
def translate_spark_errors(doing: str) -> Iterator[None]:
    """Raise Spark's errors as PenstockErrors that say what was being done."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt):
        raise
    except Exception as error:
        found = to_penstock_error(error, doing)
        if found is None:
            raise
        raise found from error


def to_penstock_error(error: Exception, doing: str) -> PenstockError | None:
    """The PenstockError for an error of Spark; None if it is not Spark's."""
    if not isinstance(error, PySparkException) and type(error).__name__ not in ("Py4JJavaError", "Py4JError"):
        return None
    text = str(error)
    inner = _OURS.findall(text)
    if inner:  # raised by the data source in one of Spark's Python processes
        kind = getattr(errors, inner[-1][0], StorageFailed)
        return kind(inner[-1][1].strip()) if issubclass(kind, PenstockError) else StorageFailed(inner[-1][1].strip())
    missing = import_error(error)
    if missing is not None:
        return InvalidRequest(f"{doing} failed: Spark's tasks cannot import what they need ({missing}); {advice()}")
    if isinstance(error, AnalysisException | ParseException):
        return InvalidRequest(f"{doing} is not possible ({spark_message(error)}); fix that")
    unreadable = _UNREADABLE.search(text)
    if unreadable is not None:
        return StorageFailed(f"{doing} failed: {unreadable[1]} cannot be read ({spark_message(error)}); fix that file, or leave it out")
    return StorageFailed(f"{doing} failed ({spark_message(error)}); see the log of Spark, and try again")


def spark_message(error: Exception) -> str:
    """The main sentence of an error of Spark, without codes; for an error in Python, the last line of its traceback."""
    text = str(error)
    raised = _RAISED.findall(text.partition(_TRACEBACK)[2])
    caused = _CAUSED.findall(text)
    line = raised[-1] if raised else caused[-1] if caused else text.strip().partition("\n")[0]
    return _STATE.sub("", _CONDITION.sub("", line.strip())).rstrip(". ")[:_LONGEST]
