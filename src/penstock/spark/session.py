"""A SparkSession that needs no configuration on one machine.

Owns: the settings of a local session (loopback, UTC, errors only in the log, this Python, a Java that is found), its
temporary directory, and the reuse of an active session. pyspark is imported only when a session is asked for.
Invariants: the caller's settings win. Once the session runs, the environment of this process is as it was before.
"""

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.spark import scratch as scratches
from penstock.spark.java import java_home
from penstock.words.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
MISSING = "Spark is not installed (no module {name}); run pip install 'penstock[spark]'"
ANYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # as many as a frame holds, so that a batch becomes one frame
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.ui.showConsoleProgress": "false",
}
LOCAL = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
    "spark.python.unix.domain.socket.enabled": "true",  # faster than TCP between Java and Python
}

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
COLLECTOR = "-XX:+UseParallelGC"
ARROW = ("-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false")
LOGGING = """\
# Made by penstock.spark.session: errors only, from the start (a log level that is set later would not suppress the start's warnings).
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex{6}
"""


def session(app: str = "penstock", master: str = "local[*]", **conf: object) -> "SparkSession":
    """A SparkSession with the data source `penstock`. An active session is used as it is, with the source added.

    `conf` are Spark's settings: session(**{"spark.driver.memory": "8g"}). A `master` sc://… connects to a Spark Connect
    server. InvalidRequest if pyspark is not installed, no Java is found, or Spark does not start.
    """
    try:
        from penstock.spark.source import register
    except ModuleNotFoundError as error:
        raise not_installed(error) from error
    spark = active_session() or start_session(app, master, {name: _text(value) for name, value in conf.items()})
    register(spark)
    return spark


def not_installed(error: ModuleNotFoundError) -> Exception:
    """The error to raise instead: InvalidRequest, but the error itself if the missing module is Penstock's own."""
    top = (error.name or "").split(".")[0]
    return error if top == "penstock" else InvalidRequest(MISSING.format(name=error.name))


def active_session() -> "SparkSession | None":
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkException:
        return None


def start_session(app: str, master: str, conf: Mapping[str, str]) -> "SparkSession":
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(app)
    if master.startswith("sc://"):
        return _with(builder.remote(master), conf).getOrCreate()
    scratch = scratches.make()
    atexit.register(_clean_up, scratch, os.getpid())
    local = master.startswith("local")
    settings = {**ANYWHERE, **(LOCAL | _directories(scratch) if local else {}), **conf}
    settings[JAVA_OPTIONS] = " ".join(
        [_logging(scratch), *_tuning(settings.get(JAVA_OPTIONS, ""), local), settings.get(JAVA_OPTIONS, "")]
    ).strip()
    try:
        with spark_environment(scratch, local):
            return _with(builder.master(master), settings).getOrCreate()
    except PySparkException as error:
        raise InvalidRequest(f"Spark did not start ({error}); its own message is above, on stderr") from error


def _with(builder: "SparkSession.Builder", settings: Mapping[str, str]) -> "SparkSession.Builder":
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder


def _directories(scratch: Path) -> dict[str, str]:
    """Spark's own files, all in one directory, which is removed when the process ends."""
    return {"spark.local.dir": str(scratch / "local"), "spark.sql.warehouse.dir": (scratch / "warehouse").as_uri()}


def _tuning(given: str, local: bool) -> list[str]:
    """Java options of a local session: a throughput collector, unless one is given; Arrow without bounds checks."""
    if not local:
        return []
    return [*ARROW, *([] if "-XX:+Use" in given else [COLLECTOR])]


def _logging(scratch: Path) -> str:
    config = scratch / "log4j2.properties"
    config.write_text(LOGGING)
    return f"-Dlog4j2.configurationFile={config.as_uri()}"


@contextmanager
def spark_environment(scratch: Path, local: bool) -> Iterator[None]:
    """Set the environment variables that Spark reads when it starts; restore them afterwards."""
    wanted = {"JAVA_HOME": str(java_home(scratch))}
    if local:
        wanted |= {"SPARK_LOCAL_IP": LOOPBACK, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    before = dict(os.environ)
    os.environ.update({name: value for name, value in wanted.items() if name == "JAVA_HOME" or name not in before})
    try:
        yield
    finally:
        for name in wanted:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _clean_up(scratch: Path, owner: int) -> None:
    """At the end of the process, stop Spark and remove its directory. Does nothing in a forked child."""
    if os.getpid() != owner:
        return
    spark = active_session()
    if spark is not None:
        spark.stop()
    scratches.remove(scratch)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
