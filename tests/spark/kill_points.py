"""Kills the process that a campaign has ordered to be killed, at a step of a micro-batch.

Owns: `KillOrder`, the processes that can be killed (`record_process`), and `reached`, which every step of the
campaign's streams calls. The campaign (campaign.py) leaves an order in its folder; the first process that reaches the
step takes it and sends SIGKILL: to the driver, the JVM, the owner, or itself, a Python worker of Spark.
The classes below are Penstock's readers and writer with these steps.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, DataSourceStreamReader, InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from penstock.spark.consuming_reader import ConsumingReader
from penstock.spark.options import parse_options
from penstock.spark.source import PenstockSource, selected_columns
from penstock.spark.stream_reader import StreamReader
from penstock.spark.writer import StreamWriter

FOLDER = "CAMPAIGN_FOLDER"
"""The environment variable with the campaign's folder."""
WRITE, READ, CONSUME = "write", "read", "consume"
DIRECTIONS = (WRITE, READ, CONSUME)
DRIVER, JVM, WORKER, OWNER = "driver", "JVM", "Python worker", "owner"
KINDS = (DRIVER, JVM, WORKER, OWNER)
_READER_STEPS = ("ask", "latest", "partitions", "read", "commit", "committed")
WORKER_STEPS = {WRITE: ("write", "staged", "commit", "published"), READ: _READER_STEPS, CONSUME: _READER_STEPS}
"""The steps that run in Python workers of Spark."""
DRIVER_STEPS = {WRITE: (), READ: ("sink", "sunk"), CONSUME: ("sink", "sunk")}
"""The steps that run in the driver."""
LAST_STEP = {WRITE: "published", READ: "sunk", CONSUME: "sunk"}
"""The step with which a micro-batch has done its work."""
ORDER, DONE = "order", "order-done"


class KillOrder(msgspec.Struct, frozen=True):
    """Which process is killed, and where."""

    kind: str
    direction: str
    step: str

    def leave(self, folder: Path) -> None:
        """Leave the order in the campaign's folder."""
        (folder / "new").write_bytes(msgspec.json.encode(self))
        (folder / "new").rename(folder / ORDER)


def record_process(folder: Path, kind: str, pid: int) -> None:
    """Make a process known as the one of its kind."""
    own = folder / f"new-pid-{os.getpid()}"  # the program before this one may record its own at the same time
    own.write_text(str(pid))
    own.rename(folder / f"pid {kind}")


def recorded_process(folder: Path, kind: str) -> int:
    return int((folder / f"pid {kind}").read_text())


def reached(direction: str, step: str) -> None:
    """Carry out the order that is for this step, if there is one. Counts the last steps of micro-batches."""
    folder = Path(os.environ[FOLDER])
    if step == LAST_STEP[direction]:
        with (folder / f"progress {direction}").open("ab") as progress:
            progress.write(b".")
    try:
        order = msgspec.json.decode((folder / ORDER).read_bytes(), type=KillOrder)
        if (order.direction, order.step) != (direction, step):
            return
        (folder / ORDER).rename(folder / DONE)
    except FileNotFoundError:
        return
    os.kill(os.getpid() if order.kind == WORKER else recorded_process(folder, order.kind), signal.SIGKILL)


class _ReaderSteps(DataSourceStreamReader):
    """The steps of a stream that reads."""

    direction: str

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        reached(self.direction, "ask")
        found = super().latestOffset(start, limit)
        reached(self.direction, "latest")
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found = super().partitions(start, end)
        reached(self.direction, "partitions")
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in super().read(partition):
            yield batch
            reached(self.direction, "read")

    def commit(self, end: dict[str, Any]) -> None:
        reached(self.direction, "commit")
        super().commit(end)
        reached(self.direction, "committed")


class KillableReader(_ReaderSteps, StreamReader):
    direction = READ


class KillableConsumer(_ReaderSteps, ConsumingReader):
    direction = CONSUME


class KillableWriter(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        reached(WRITE, "write")
        found = super().write(iterator)
        reached(WRITE, "staged")
        return found

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        reached(WRITE, "commit")
        super().commit(messages, batchId)
        reached(WRITE, "published")


class KillableWrite(PenstockSource):
    """Penstock's source, whose stream that writes has the steps.

    Every direction has a source of its own: when three streams of one registered source started together, we saw all
    their tasks fail with an OptionalDataException. Probably they share an object that Spark changes when they start.
    """

    @classmethod
    def name(cls) -> str:
        return f"killable-{WRITE}"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return KillableWriter(parse_options(self.options), schema, overwrite)


class KillableRead(PenstockSource):
    @classmethod
    def name(cls) -> str:
        return f"killable-{READ}"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse_options(self.options)
        return KillableReader(options, selected_columns(options, schema))


class KillableConsume(PenstockSource):
    @classmethod
    def name(cls) -> str:
        return f"killable-{CONSUME}"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse_options(self.options)
        return KillableConsumer(options, selected_columns(options, schema))


SOURCES = (KillableWrite, KillableRead, KillableConsume)
