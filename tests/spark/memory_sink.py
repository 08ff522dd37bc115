"""A sink that a test can look into.

Owns: `MemorySink`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class MemorySink:
    """The rows of every micro-batch, by its number; a repeated micro-batch replaces its rows."""

    def __init__(self, place: Path) -> None:
        self.checkpoint = str(place / "checkpoint")
        self.batches: dict[int, list[Any]] = {}

    def keep(self, rows: "DataFrame", handle: "Callable[[DataFrame], Any] | None" = None, **trigger: Any) -> "StreamingQuery":
        """Begin a query whose batches are kept here, and then handled."""

        def take(batch: "DataFrame", number: int) -> None:
            self.batches[number] = batch.collect()
            if handle is not None:
                handle(batch)

        writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", self.checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()

    @property
    def rows(self) -> list[Any]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    @property
    def ids(self) -> list[str]:
        return sorted(row.id for row in self.rows)
