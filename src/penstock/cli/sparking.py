"""What the `penstock spark …` commands have in common.

Owns: their options, `broker_of`, `ready` (what can be found wrong before a Spark is started, which takes ten seconds), `running` (a Spark
for one command), and `bar`, a job's progress as a terminal shows it.
Nothing here imports Spark before a command needs it: without penstock[spark] every other command works, and these say what to install.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli import reading
from penstock.cli.failures import MISSING_EXTRA, Failed
from penstock.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.jobs.progress import Progress as Said

NEEDED = ("pyspark", "pyarrow")
NOISE = ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "py4j")
"""Loggers of pyspark's that say on stderr what an error says too."""

MasterOption: TypeAlias = Annotated[str, typer.Option(metavar="URL", help="Where Spark runs: local[N], spark://…, sc://…")]
ConfOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.", show_default=False)
]
MASTER = "local[*]"
_MASTERS = re.compile(r"local(\[(\*|[1-9]\d*)(,\s*[1-9]\d*)?\])?|local-cluster\[\d+,\d+,\d+\]|(spark|sc|k8s)://.+|yarn")


def broker_of(session: Session) -> str:
    """The broker as the data source takes it; it must be there."""
    session.require()
    return json.dumps([session.target, *session.roots]) if session.roots else session.target


def ready(master: str, conf: Sequence[str] | None) -> dict[str, str]:
    """Spark's settings, if it is installed and can be started so."""
    settings = reading.pairs(conf or (), "--conf", "spark.driver.memory=4g")
    if not _MASTERS.fullmatch(master):
        raise Failed(f"--master is {master!r:.100}; give local[*], local[N] for N threads, spark://HOST:PORT, sc://HOST, k8s://… or yarn")
    missing = next((name for name in NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise Failed(f"Spark is not installed (no module {missing}); pip install 'penstock[spark]'", MISSING_EXTRA)
    return settings


@contextmanager
def running(master: str, conf: Sequence[str] | None) -> Iterator["SparkSession"]:
    """A Spark, for as long as the command lasts. One that runs in this process already is used, and left running."""
    settings = ready(master, conf)
    from penstock.spark.jobs.progress import translated
    from penstock.spark.session import running as already_running
    from penstock.spark.session import session as spark_session

    for name in NOISE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = already_running()
    with translated("starting Spark"):
        spark = spark_session(master=master, **settings)
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()


@contextmanager
def bar(session: Session) -> Iterator["Said | None"]:
    """A bar on stderr that shows what a job says; None, so that it need say nothing, where nobody looks."""
    if not session.err.is_terminal or session.as_json:
        yield None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=session.err, transient=True) as bars:
        task = bars.add_task("starting Spark", total=None)
        yield lambda what, done, total: bars.update(task, description=escape(what), completed=done, total=total or None)
