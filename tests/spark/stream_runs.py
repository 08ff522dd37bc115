"""A queue and a streaming query over it, without a JVM: the reader's methods, called as Spark calls them.

Owns: `StreamRun`, and helpers that fill queues and complete items.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import penstock
from penstock import Broker, NewItem, Queue
from penstock.spark.options import STREAM, parse_options
from penstock.spark.source import selected_schema
from penstock.spark.stream_reader import StreamReader

Offset = dict[str, Any]


class StreamRun:
    """One run of a stream: its offset, which goes through JSON as in Spark's checkpoint, and the rows read so far."""

    def __init__(self, broker: str, queue: str = "orders", start: Offset | None = None, **options: object) -> None:
        given = {"broker": broker, "queue": queue, **{name: str(value) for name, value in options.items()}}
        self.options = parse_options(given, STREAM)
        self.reader = StreamReader(self.options, selected_schema(self.options).names)
        self.at = start if start is not None else self.reader.initialOffset()
        self.rows: list[dict[str, Any]] = []
        self._first = start is None  # Spark runs a first batch in any case

    def batch(self) -> int:
        """Run a micro-batch; gives its number of rows, or -1 if Spark would not have started one."""
        end = through_json(self.reader.latestOffset(through_json(self.at), self.reader.getDefaultReadLimit()))
        if end == self.at and not self._first:
            return -1
        self._first = False
        found = self.between(self.at, end)
        self.rows += found
        self.at = end
        return len(found)

    def between(self, start: Offset, end: Offset) -> list[dict[str, Any]]:
        parts = self.reader.partitions(through_json(start), through_json(end))
        return [row for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()]

    def all(self) -> list[str]:
        """Run micro-batches until there is nothing to read; gives the ids of all rows."""
        while self.batch() >= 0:
            pass
        return [row["id"] for row in self.rows]


def through_json(offset: Mapping[str, Any]) -> Offset:
    found: Offset = json.loads(json.dumps(offset))
    return found


def fill(queue: Queue, count: int, start: int = 0, size: int = 8) -> list[str]:
    """Produce items, each with its own key; gives their ids. A payload is eight digits and random bytes up to
    `size`."""
    return queue.produce_many([NewItem(b"%08d" % n + os.urandom(size - 8), key=f"k{n}") for n in range(start, start + count)])


def resolve(queue: Queue, count: int) -> None:
    """Complete `count` items, oldest first."""
    while count > 0:
        batch = queue.lease(min(count, 1_000))
        assert len(batch), "there is nothing left to complete"
        count -= len(batch)
        batch.complete()


def small_segments(path: str) -> Broker:
    """A broker with small segments, so that retention has whole segments to remove."""
    return penstock.open(path, segment_bytes=4_096)
