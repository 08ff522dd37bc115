"""The Python that Spark's tasks run.

Owns: `check_worker_python`. Unless PYSPARK_PYTHON was set when Spark started, tasks run the `python3` of the PATH.
Often that is not the Python of the program, and has no penstock. Each task would then fail with a long traceback.
"""

import os
import re
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from penstock.words.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = ("penstock", "msgspec", "xxhash", "pyarrow")
_IMPORT_ERROR = re.compile(r"^(?:ModuleNotFoundError|ImportError): (.+)$", re.MULTILINE)
_checked: set[str] = set()
"""The ids of Spark applications whose tasks can import what they need."""


def check_worker_python(spark: "SparkSession") -> None:
    """InvalidRequest if the tasks of a session cannot import penstock.

    Runs nothing if they run the Python of this process; otherwise one task, once for each application. With Spark
    Connect the Python of the server is not known, and nothing is checked.
    """
    try:
        context = spark.sparkContext
    except PySparkException:
        return
    command = context.pythonExec
    if is_this_python(command) or context.applicationId in _checked:
        return
    try:
        # functions of the standard library: those of a module of ours could not even be unpickled there
        found = context.parallelize(NEEDED, 1).map(find_spec).map(bool).collect()
    except Exception as error:  # Py4J's errors have no common class
        raise InvalidRequest(f"Spark's tasks run {command!r}, which does not work ({_sentence(error)}); {advice()}") from error
    missing = [name for name, is_there in zip(NEEDED, found, strict=True) if not is_there]
    if missing:
        raise InvalidRequest(f"Spark's tasks run {command!r}, which cannot import {', '.join(missing)}; {advice()}")
    _checked.add(context.applicationId)


def is_this_python(command: str) -> bool:
    """Whether a command of this machine is the Python of this process, with the same packages."""
    found = shutil.which(command)
    return found is not None and _location(found) == _location(sys.executable)


def _location(path: str) -> tuple[str, str]:
    # the folder tells virtual environments apart: their `python` may be links to the same file
    return os.path.dirname(os.path.abspath(path)), os.path.realpath(path)


def import_error(error: Exception) -> str | None:
    """The message of the ImportError of a task that made Spark fail; None if it failed for another reason."""
    found = _IMPORT_ERROR.findall(str(error))
    return found[-1].strip() if found else None


def _sentence(error: Exception) -> str:
    """Spark's own words, as far as they tell something."""
    found = re.search(r"\[PYTHON_VERSION_MISMATCH\] ([^\n]+?\.)|(Cannot run program [^\n]+)", str(error))
    return (found[1] or found[2]).rstrip(".") if found else "see the log of Spark"


def advice() -> str:
    return f"set PYSPARK_PYTHON={sys.executable} before Spark starts, or install penstock[spark] in the Python of the tasks"
