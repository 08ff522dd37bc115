"""Reads the tables of a queue without owning its directory, as Spark tasks do.

Owns: `PublishedQueue`, and `rows`, which checks record batches and returns their rows.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from penstock.broker.snapshot import Snapshot
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.published_log import PublishedLog
from penstock.operations import FindOffsets, FindQueue
from penstock.tables.dead import dead
from penstock.tables.events import events
from penstock.tables.items import items
from penstock.tables.schemas import DEAD, EVENTS, ITEMS, STATE
from penstock.tables.state import state_rows
from penstock.words.clock import Clock


def rows(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """The rows of the batches. Each batch must be valid and have exactly the schema of the first."""
    found: list[dict[str, Any]] = []
    schema = None
    for batch in batches:
        batch.validate(full=True)
        schema = schema or batch.schema
        assert batch.schema.equals(schema) and batch.num_rows
        found += batch.to_pylist(maps_as_pydicts="strict")
    return found


class PublishedQueue:
    """A queue in a directory, opened read-only."""

    def __init__(self, path: "str | os.PathLike[str]", queue: str) -> None:
        self.directory = FileStore.open(path, read_only=True)
        with Snapshot.open(path) as seen:
            self.info = seen.call(FindQueue(name=queue))
        self.partitions = sorted([*self.info.active, *self.info.retired])

    def log(self, partition: int) -> Callable[[], PublishedLog]:
        return lambda: self.directory.reader(self.info.incarnation, partition)

    def end(self, partition: int) -> int:
        with Snapshot.open(self.directory.roots[0].path) as seen:
            found: dict[int, int] = seen.call(FindOffsets(queue=self.info.incarnation, at="newest"))
            return found[partition]

    def items(self, columns: Sequence[str] = ITEMS.names, *, strict: bool = True) -> list[dict[str, Any]]:
        return [row for number in self.partitions for row in rows(items(self.log(number), [0, self.end(number)], columns, strict=strict))]

    def events(self, columns: Sequence[str] = EVENTS.names) -> list[dict[str, Any]]:
        return [row for number in self.partitions for row in rows(events(self.log(number), 0, 1 << 60, columns))]

    def states(self, columns: Sequence[str] = STATE.names, clock: Clock | None = None) -> list[dict[str, Any]]:
        return [row for number in self.partitions for row in rows(state_rows(self.log(number), columns, clock=clock))]

    def dead(self, columns: Sequence[str] = DEAD.names, **which: Any) -> list[dict[str, Any]]:
        return [row for number in self.partitions for row in rows(dead(self.log(number), self.info.name, columns, **which))]


@contextmanager
def published_queue(path: "str | os.PathLike[str]", queue: str) -> Iterator[PublishedQueue]:
    seen = PublishedQueue(path, queue)
    try:
        yield seen
    finally:
        seen.directory.close()
