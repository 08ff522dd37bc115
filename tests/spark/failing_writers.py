"""What a Spark write left in a broker's inbox, read without adopting it, and sources that go wrong in tasks.

Owns: `dropped`, `inbox`, `Mortal…`: data sources whose tasks or commits fail, die or run twice where `attempt` says.
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


class DroppedItem(NamedTuple):
    """An item of a drop; `partition` is what its frame's header names."""

    partition: int
    key: str | None
    payload: bytes


def inbox(broker: str) -> list[str]:
    folder = Path(broker, "inbox")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def dropped(broker: str) -> list[DroppedItem]:
    """The items of every drop in the inbox, in the order in which they would be adopted."""
    return [row for name in inbox(broker) if name.endswith(".drop") for row in _rows(Path(broker, "inbox", name))]


def manifests(broker: str) -> list[WriteManifest]:
    drops = [name for name in inbox(broker) if name.endswith(".drop")]
    return [msgspec.json.decode(Path(broker, "inbox", name, MANIFEST).read_bytes(), type=WriteManifest) for name in drops]


def _rows(drop: Path) -> Iterator[DroppedItem]:
    manifest = msgspec.json.decode((drop / MANIFEST).read_bytes(), type=WriteManifest)
    assert {path.name for path in drop.iterdir()} == {MANIFEST, *(part.name for part in manifest.parts)}
    incarnation = int(drop.name.partition("-")[0], 16)
    for part in manifest.parts:
        reader = StagedReader(SystemFiles(), str(drop / part.name), incarnation)
        found = [*reader.all()]
        reader.close()
        assert (len(found), sum(frame.count for _, frame in found)) == (part.frames, part.items)
        for header, frame in found:
            batch = FrameColumns(frame).batch()
            for key, payload in zip(batch.keys or [None] * len(batch), batch.payloads, strict=True):
                yield DroppedItem(header.partition, None if key is None else key.decode(), payload)


# -- tasks that go wrong -----------------------------------------------------------------------------


def attempt() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber()


class KilledTaskWriter(BatchWriter):
    """Every task is killed when it has written its rows, but for its third attempt."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        found = super().write(iterator)
        if attempt() < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class FailingTaskWriter(BatchWriter):
    """Every task fails in the middle of its rows, but for its second attempt."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(self._failing(iterator))

    def _failing(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in iterator:
            yield batch
            if attempt() == 0:
                raise RuntimeError("a task that fails at first")


class RunTwiceWriter(BatchWriter):
    """Every task runs twice, as a speculative one does; the first one's message never comes."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batches = [*iterator]
        super().write(iter(batches))
        return super().write(iter(batches))


class AlwaysKilledTaskWriter(BatchWriter):
    """The task of the last rows is killed at every attempt; others do well."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        found = super().write(iterator)
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class FailingCommitWriter(StreamWriter):
    """Publishes a batch and then fails, once for each file that is to be made."""

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
