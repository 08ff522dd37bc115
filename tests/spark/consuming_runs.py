"""A stream that consumes, without a JVM: the reader's methods, called as Spark calls them.

Owns: `ConsumingStreamRun`; `produce_keyed`, which fills a queue; and `numbers_by_key`, to check the order within keys.
"""

from collections.abc import Iterable
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit

from penstock import NewItem, Queue
from penstock.spark.consuming_reader import ConsumingReader
from penstock.spark.options import parse_options
from penstock.spark.source import selected_schema
from penstock.words.clock import SECOND
from tests.spark.stream_runs import Offset, through_json


class ShortTimeoutReader(ConsumingReader):
    """Does not wait long for an answer when there is no owner."""

    ANSWER_TIMEOUT = SECOND


class ConsumingStreamRun:
    """One run of a stream: its offset, which goes through JSON as in Spark's checkpoint, and the rows of each batch."""

    def __init__(
        self, broker: str, start: Offset | None = None, available_now: bool = False, hasty: bool = False, **options: object
    ) -> None:
        given = {"broker": broker, "queue": "orders", "consume": "true", **{name: str(value) for name, value in options.items()}}
        self.options = parse_options(given)
        self.reader = (ShortTimeoutReader if hasty else ConsumingReader)(self.options, selected_schema(self.options).names)
        self.at = start if start is not None else self.reader.initialOffset()
        self.batches: list[list[dict[str, Any]]] = []
        if available_now:
            self.reader.prepareForTriggerAvailableNow()

    def begin(self, limit: ReadLimit | None = None) -> Offset:
        """Where the next micro-batch ends; commits the one before."""
        return through_json(self.reader.latestOffset(through_json(self.at), limit or self.reader.getDefaultReadLimit()))

    def batch(self, limit: ReadLimit | None = None) -> int:
        """Run a micro-batch, which the next one commits; gives its number of rows, or -1 if there is none."""
        end = self.begin(limit)
        if end == self.at:
            return -1
        self.batches.append(self.between(self.at, end))
        self.at = end
        return len(self.batches[-1])

    def between(self, start: Offset, end: Offset) -> list[dict[str, Any]]:
        parts = self.reader.partitions(through_json(start), through_json(end))
        return [row for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()]

    def all(self) -> list[str]:
        """Run micro-batches until there is nothing to read; gives the ids of all rows."""
        while self.batch() >= 0:
            pass
        return self.ids

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]

    @property
    def ids(self) -> list[str]:
        return [row["id"] for row in self.rows]

    def kill(self) -> None:
        """Stop the heartbeat without giving the consumer right back, as if the process had been killed."""
        self.reader._stop_heartbeat()


def produce_keyed(queue: Queue, keys: int, each: int, start: int = 0) -> list[str]:
    """Produce `each` items of each key, numbered in their order; gives their ids."""
    return queue.produce_many([NewItem(b"%d" % n, key=f"k{key}") for n in range(start, start + each) for key in range(keys)])


def numbers_by_key(rows: Iterable[tuple[bytes, bytes]]) -> dict[str, list[int]]:
    """The numbers of each key, in the order of the rows (key, payload)."""
    lines: dict[str, list[int]] = {}
    for key, payload in rows:
        lines.setdefault(key.decode(), []).append(int(payload))
    return lines
