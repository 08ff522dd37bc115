"""Penstock on Apache Spark: the data source `penstock`, routing, and the jobs of the pipeline.

    from penstock import spark

    session = spark.session()
    session.read.format("penstock").options(broker="data/", queue="orders").load().show()

Needs penstock[spark]. Each name is imported when it is first used, so that this import stays cheap. Where pyspark is
missing, that first use raises InvalidRequest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.spark.session import not_installed, session

if TYPE_CHECKING:
    from penstock.spark.consuming_reader import settle
    from penstock.spark.jobs.archive import archive
    from penstock.spark.jobs.load import load
    from penstock.spark.jobs.redrive import redrive
    from penstock.spark.jobs.report import report
    from penstock.spark.routing import routed, slot, write
    from penstock.spark.source import register

_MODULES = {
    "register": "penstock.spark.source",
    "slot": "penstock.spark.routing",
    "routed": "penstock.spark.routing",
    "write": "penstock.spark.routing",
    "settle": "penstock.spark.consuming_reader",
    "load": "penstock.spark.jobs.load",
    "archive": "penstock.spark.jobs.archive",
    "report": "penstock.spark.jobs.report",
    "redrive": "penstock.spark.jobs.redrive",
}

__all__ = ["archive", "load", "redrive", "register", "report", "routed", "session", "settle", "slot", "write"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise not_installed(error) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
