"""Makes `.format("penstock")` and `USING penstock` work without `spark.register`.

Spark imports every package named `pyspark_…` when a Python data source is first looked up, and takes its
`DefaultSource`. That happens also in programs that use another source, so this module imports nothing of Penstock
until a source is created.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from penstock.spark.source import PenstockSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The data source "penstock"; creating it gives a `PenstockSource`."""

    def __new__(cls, options: "MutableMapping[str, str]") -> "PenstockSource":  # type: ignore[misc]
        from penstock.spark.source import PenstockSource

        return PenstockSource(options)

    @classmethod
    def name(cls) -> str:
        return "penstock"
