"""Writes from any thread of a program.

Owns: `activate`, `activated` and `activate_in_writers`. Spark looks for the data source of a write in the *active*
session, which each thread has for itself; a thread that did not create the session has none, and
`df.write.format("penstock")` would not be found there. Reads do not need the active session.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from pyspark.sql.readwriter import DataFrameWriter
from pyspark.sql.streaming.readwriter import DataStreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MARK = "activates_session"


def activate(spark: "SparkSession") -> None:
    """Make a session the active one of this thread, as Spark's `createDataFrame` does. Nothing with Spark Connect."""
    session = getattr(spark, "_jsparkSession", None)
    if session is not None:
        spark._get_j_spark_session_class(spark._jvm).setActiveSession(session)


@contextmanager
def activated(spark: "SparkSession") -> Iterator[None]:
    """In the block a session is the active one of this thread; then again the one that was."""
    if getattr(spark, "_jsparkSession", None) is None:
        yield
        return
    sessions = spark._get_j_spark_session_class(spark._jvm)
    before = sessions.getActiveSession()
    activate(spark)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def activate_in_writers(name: str) -> None:
    """From now on `.format(name)` of a writer activates the session of its DataFrame. Repeating it does no harm."""
    for writer in (DataFrameWriter, DataStreamWriter):
        if not hasattr(writer.format, _MARK):
            # Spark has no hook between a user's call and its search for the source
            setattr(writer, "format", _activating(writer.format, name))  # noqa: B010


def _activating(choose: Callable[[Any, str], Any], name: str) -> Callable[[Any, str], Any]:
    @wraps(choose)
    def format(self: Any, source: str) -> Any:
        if isinstance(source, str) and source.lower() == name:
            activate(self._spark)
        return choose(self, source)

    setattr(format, _MARK, True)
    return format
