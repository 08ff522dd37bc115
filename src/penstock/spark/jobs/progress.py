"""How far a job has come, and what Spark says when it cannot go on.

Owns: `Progress` (what a job tells whoever watches it), `watching`, which tells the tasks of the stages that run now, and `translate_spark_errors`,
which turns Spark's errors into ours. A job that nobody watches tells nothing and starts no thread.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from pyspark.errors import AnalysisException, ParseException, PySparkException

from penstock.words import errors
from penstock.words.errors import InvalidRequest, PenstockError, StorageFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress: TypeAlias = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much (0: not known)."""

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
def report_task_progress(spark: "SparkSession", title: str, said: Progress | None) -> Iterator[None]:
    """While the block runs, tell how many of the tasks of the running stages are done. Spark Connect does not say; then nothing is told."""
    tracker = None
    if said is not None:
        with suppress(PySparkException):
            tracker = spark.sparkContext.statusTracker()
    if said is None or tracker is None:
        yield
        return
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(PAUSE_SECONDS):
            stages = [stage for number in tracker.getActiveStageIds() if (stage := tracker.getStageInfo(number)) is not None]
            if stages:
                said(title, sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages))

    said(title, 0, 0)
    watcher = threading.Thread(target=look, name="penstock-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@contextmanager
def translate_spark_errors(doing: str) -> Iterator[None]:
    """An error of Spark leaves the block as one of ours, which says what was being done."""
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
    """What an error of Spark means to us; None when it is none of Spark's."""
    if not isinstance(error, PySparkException) and type(error).__name__ not in ("Py4JJavaError", "Py4JError"):
        return None
    text = str(error)
    inner = _OURS.findall(text)
    if inner:  # raised by our source in a Python process of Spark's
        kind = getattr(errors, inner[-1][0], StorageFailed)
        return kind(inner[-1][1].strip()) if issubclass(kind, PenstockError) else StorageFailed(inner[-1][1].strip())
    if isinstance(error, AnalysisException | ParseException):
        return InvalidRequest(f"{doing} is not possible ({spark_message(error)}); mend that")
    unreadable = _UNREADABLE.search(text)
    if unreadable is not None:
        return StorageFailed(f"{doing} failed: {unreadable[1]} cannot be read ({spark_message(error)}); mend that file, or leave it out")
    return StorageFailed(f"{doing} failed ({spark_message(error)}); see the log of Spark, and try again")


def spark_message(error: Exception) -> str:
    """The gist of an error of Spark: one sentence, without codes. What went wrong in Python is told by the last line of its traceback."""
    text = str(error)
    raised = _RAISED.findall(text.partition(_TRACEBACK)[2])
    caused = _CAUSED.findall(text)
    line = raised[-1] if raised else caused[-1] if caused else text.strip().partition("\n")[0]
    return _STATE.sub("", _CONDITION.sub("", line.strip())).rstrip(". ")[:_LONGEST]
