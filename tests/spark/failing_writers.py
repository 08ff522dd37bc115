"""Published writes in a broker's inbox, read without adopting them; and data sources whose tasks or commits fail.

Owns: `published_items`, `inbox`, and the sources: their tasks fail, are killed or run twice at certain attempts.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.logs.columns import FrameColumns
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.inbox import MANIFEST, StagedReader
from penstock.logs.store import WriteManifest
from penstock.spark.options import parse_options
from penstock.spark.source import PenstockSource
from penstock.spark.writer import BatchWriter, StreamWriter


class PublishedItem(NamedTuple):
    """An item of a published write, with the partition in its frame's header."""

    partition: int
    key: str | None
    payload: bytes


def inbox(broker: str) -> list[str]:
    folder = Path(broker, "inbox")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def published_items(broker: str) -> list[PublishedItem]:
    """The items of all published writes in the inbox, in the order in which they would be adopted."""
    return [row for name in inbox(broker) if name.endswith(".drop") for row in _rows(Path(broker, "inbox", name))]


def manifests(broker: str) -> list[WriteManifest]:
    writes = [name for name in inbox(broker) if name.endswith(".drop")]
    return [msgspec.json.decode(Path(broker, "inbox", name, MANIFEST).read_bytes(), type=WriteManifest) for name in writes]


def _rows(write: Path) -> Iterator[PublishedItem]:
    manifest = msgspec.json.decode((write / MANIFEST).read_bytes(), type=WriteManifest)
    assert {path.name for path in write.iterdir()} == {MANIFEST, *(part.name for part in manifest.parts)}
    incarnation = int(write.name.partition("-")[0], 16)
    for part in manifest.parts:
        reader = StagedReader(SystemFiles(), str(write / part.name), incarnation)
        found = [*reader.all()]
        reader.close()
        assert (len(found), sum(frame.count for _, frame in found)) == (part.frames, part.items)
        for header, frame in found:
            batch = FrameColumns(frame).batch()
            for key, payload in zip(batch.keys or [None] * len(batch), batch.payloads, strict=True):
                yield PublishedItem(header.partition, None if key is None else key.decode(), payload)


# -- failing tasks -----------------------------------------------------------------------------------


def attempt() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber()


class KilledTaskWriter(BatchWriter):
    """Every task is killed after it has written its rows, except in its third attempt."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        found = super().write(iterator)
        if attempt() < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class FailingTaskWriter(BatchWriter):
    """Every task fails in the middle of its rows, except in its second attempt."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(self._failing(iterator))

    def _failing(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in iterator:
            yield batch
            if attempt() == 0:
                raise RuntimeError("a task that fails at first")


class RunTwiceWriter(BatchWriter):
    """Every task writes twice, as with speculative execution; the first commit message is lost."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batches = [*iterator]
        super().write(iter(batches))
        return super().write(iter(batches))


class AlwaysKilledTaskWriter(BatchWriter):
    """The task of the last rows is killed at every attempt; the other tasks succeed."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        found = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class FailingCommitWriter(StreamWriter):
    """Publishes a batch and then fails, once per batch."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        super().commit(messages, batchId)
        mark = Path(self._options.broker[0]).parent / f"failed-{batchId}"
        if not mark.exists():
            mark.touch()
            raise RuntimeError("the driver is gone")


WRITERS: dict[str, Any] = {
    "dying": KilledTaskWriter,
    "failing": FailingTaskWriter,
    "double": RunTwiceWriter,
    "hopeless": AlwaysKilledTaskWriter,
}


class _FailingSource(PenstockSource):
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        found: DataSourceArrowWriter = WRITERS[self.name()](parse_options(self.options), schema, overwrite)
        return found

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return FailingCommitWriter(parse_options(self.options), schema, overwrite)


class KilledTaskSource(_FailingSource):
    @classmethod
    def name(cls) -> str:
        return "dying"


class FailingTaskSource(_FailingSource):
    @classmethod
    def name(cls) -> str:
        return "failing"


class RunTwiceSource(_FailingSource):
    @classmethod
    def name(cls) -> str:
        return "double"


class AlwaysKilledTaskSource(_FailingSource):
    @classmethod
    def name(cls) -> str:
        return "hopeless"


SOURCES = (KilledTaskSource, FailingTaskSource, RunTwiceSource, AlwaysKilledTaskSource)
