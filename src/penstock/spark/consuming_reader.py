"""Streaming queries that consume (consume=true): the items of a micro-batch are completed after Spark committed it.

Owns: `ConsumingReader` and `settle`. The queue's owner leases items to the stream in grants, numbered from 1
(broker/streams.py). An offset of the stream is its id and the number of the last grant that it covers:
    {"incarnation": "5f0c…", "stream": "c0ffee…", "grant": 17}
Spark calls `latestOffset` only after the micro-batch before is in its commit log, and also after the last micro-batch
of a run; that call completes the grant. A batch that Spark repeats after a crash reads the same grant, so the same
rows. A thread renews the consumer right three times per consumerTimeout. Without renewal the right and the leases
expire. A stream that is stopped gives the right back at once.
Everything but `read` runs on the driver, in one process, one call at a time; only the heartbeat has its own thread.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from penstock.operations import TIMEOUT, A, EndStream, FailGranted, FindQueue, Home, Operation, ReadGrant, RenewStream, TakeGrant
from penstock.reports import GrantAnswer, QueueDescription
from penstock.rules.runs import RunSet
from penstock.spark.broker_access import ask_present_owner, open_home, parse_broker
from penstock.spark.options import SourceOptions, require_directories
from penstock.spark.positions import BACKLOG, LAG
from penstock.spark.queue_tables import QueueTables
from penstock.spark.ranges import Split, split
from penstock.spark.stream_reader import StreamTask
from penstock.words.clock import MILLISECOND, SECOND, Clock, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError, QueueHeld, QueueNotFound
from penstock.words.ids import format_id, parse_id
from penstock.words.limits import MAX_GRANT
from penstock.words.values import duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DEFAULT_BATCH_ITEMS = 250_000
"""Items of a micro-batch, unless maxItemsPerTrigger is given."""
IDLE = 250 * MILLISECOND
"""How long to wait after an empty grant before the owner is asked again."""
SETTLED_AT_ONCE = 10_000
SHOWN_IDS = 3
SPARK_STREAM_MODULE = "pyspark.sql.streaming.python_streaming_source_runner"
"""The module that Spark runs as the driver's process of a streaming query, one process per query."""
STOP_TIMEOUT_SECONDS = 5
"""How long a stream that gets SIGTERM may take to give its consumer right back."""


class ConsumePosition(msgspec.Struct, frozen=True):
    """An offset of a consuming stream, as Spark keeps it in the checkpoint."""

    incarnation: str
    stream: str
    grant: int

    def to_offset(self) -> dict[str, Any]:
        return {"incarnation": self.incarnation, "stream": self.stream, "grant": self.grant}


def parse_consume_position(offset: Mapping[str, Any]) -> ConsumePosition:
    try:
        return msgspec.convert(dict(offset), ConsumePosition)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"{offset!r:.200} is no offset of a stream that consumes; the checkpoint belongs to another source, or to a stream without "
            "consume=true: start with a new checkpointLocation"
        ) from None


class ConsumingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Leases items of a queue, and completes them when Spark has committed their micro-batch."""

    ANSWER_TIMEOUT: ClassVar[int] = TIMEOUT
    """How long to wait for an owner, which may be restarting."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = check_consume_options(options)
        self._columns = tuple(columns)
        self._clock: Clock = SystemClock()
        self._run = os.urandom(8).hex()
        """Id of this process of the stream: a process that ends late must not end the right of its successor."""
        self._queue: QueueDescription | None = None
        self._initial: ConsumePosition | None = None
        self._heartbeat: Heartbeat | None = None
        self._renewed: ConsumePosition | None = None
        """The stream whose right the heartbeat renews."""
        self._done = 0
        """The last grant that the owner was asked to complete."""
        self._idle_until = 0
        self._taken: tuple[ConsumePosition, GrantAnswer] | None = None
        """The last request for a grant, and its answer."""
        self._available_now = False
        self._remaining: int | None = None
        """With trigger availableNow: how many of the items that were ready when the run began are not granted yet."""

    # -- offsets -------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:  # Spark asks twice and needs the same answer
            self._initial = ConsumePosition(f"{self._queue_found().incarnation:016x}", os.urandom(8).hex(), 0)
        return self._initial.to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_items_per_trigger or DEFAULT_BATCH_ITEMS)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Take the grant of the next micro-batch. Grants up to `start` are in the sink; this completes them."""
        position = self._check_queue(start)
        now = self._clock.read().elapsed
        if position.grant == self._done and now < self._idle_until:
            return start
        want = min(limit.max_rows if isinstance(limit, ReadMaxRows) else MAX_GRANT, MAX_GRANT)
        if self._remaining is not None:
            want = min(want, self._remaining)
        taken = self._take_grant(position, want)
        self._done = position.grant
        if taken.grant == position.grant:
            self._idle_until = now + IDLE
        self._taken = position, taken
        if self._available_now:
            self._remaining = taken.ready if self._remaining is None else max(0, self._remaining - taken.items)
            if taken.grant == position.grant:
                self._release_right(position)
        return msgspec.structs.replace(position, grant=taken.grant).to_offset()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The newest grant, with how many items wait and for how long, as the owner said when it was taken."""
        if self._taken is None:
            return None
        position, taken = self._taken
        newest = msgspec.structs.replace(position, grant=taken.grant)
        return newest.to_offset() | {BACKLOG: taken.ready, LAG: round(taken.oldest_seconds, 3)}

    def _take_grant(self, position: ConsumePosition, want: int) -> GrantAnswer:
        operation = TakeGrant(
            queue=int(position.incarnation, 16),
            stream=position.stream,
            run=self._run,
            done=position.grant,
            want=want,
            per_key=self._options.per_key,
            timeout=self._timeout,
        )
        answer = self._call_as_consumer(position, operation)
        self._start_heartbeat(position)
        return answer

    def _call_as_consumer(self, position: ConsumePosition, operation: Operation[A]) -> A:
        """Call an operation that only the consumer may; while another consumer has the right, try again.

        A stream that consumed before waits until the right of a dead process has expired. A new stream waits only as
        long as another stream needs to stop: the other consumer is then probably alive.
        """
        patience = self._timeout + SECOND if position.grant else min(self._timeout + SECOND, STOP_TIMEOUT_SECONDS * SECOND)
        deadline = self._clock.read().elapsed + patience
        while True:
            try:
                return self._call(operation)
            except QueueHeld:
                if self._clock.read().elapsed > deadline:
                    raise
                Event().wait(IDLE / SECOND)

    def _call(self, operation: Operation[A]) -> A:
        with self._home(self.ANSWER_TIMEOUT) as home:
            return home.call(operation)

    def _home(self, timeout: int = TIMEOUT) -> "closing[Home]":
        """Open a home for one call: tasks get a copy of this reader, and the heartbeat's thread calls too."""
        return closing(open_home(self._options.broker, timeout=timeout))

    def _end_stream(self, position: ConsumePosition) -> EndStream:
        return EndStream(queue=int(position.incarnation, 16), stream=position.stream, run=self._run)

    def _release_right(self, position: ConsumePosition) -> None:
        """Give the consumer right back: others can lease at once. Ends the heartbeat first, which would renew it."""
        self._stop_heartbeat()
        self._call(self._end_stream(position))

    # -- rows ----------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch. When Spark repeats one after a crash, this is the first call of the process."""
        last = self._check_queue(end)
        first = parse_consume_position(start)
        begins = (
            first.grant if first.stream == last.stream else 0
        )  # after a restart Spark gives the first batch a start of another stream id
        incarnation = int(last.incarnation, 16)
        runs: dict[int, RunSet] = {}
        with self._home() as home:
            for number in range(begins + 1, last.grant + 1):
                for partition, _, leased in home.call(ReadGrant(queue=incarnation, stream=last.stream, number=number)).leases:
                    runs.setdefault(partition, RunSet()).add_all(leased)
        if self._heartbeat is None:  # the process restarted: the right could expire during this batch
            self._call_as_consumer(last, self._renewal(last, reset_after=begins))
            self._start_heartbeat(last)
        parts = split({partition: found.runs for partition, found in runs.items()}, self._options.min_partitions)
        return [StreamTask(incarnation, part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Runs in the task's process."""
        assert isinstance(partition, StreamTask)
        with QueueTables.open(self._options.broker) as tables:
            assert isinstance(partition.part, Split)
            number, runs = partition.part.partition, partition.part.runs
            yield from tables.items(partition.incarnation, number, runs, self._columns, forwarded=True)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the next `latestOffset` completes the grant, also that of the last micro-batch of a run."""

    def stop(self) -> None:
        """Give the consumer right back, if there is an owner that answers soon; else the right ends by its timeout."""
        position = self._renewed
        self._stop_heartbeat(wait=STOP_TIMEOUT_SECONDS / 2)  # a call in flight may wait long for an owner
        if position is not None:
            ask_present_owner(self._options.broker, self._end_stream(position), STOP_TIMEOUT_SECONDS / 2)

    # -- steps ---------------------------------------------------------------------------------------

    @property
    def _timeout(self) -> int:
        return int(self._options.consumer_timeout * SECOND)

    def _queue_found(self) -> QueueDescription:
        if self._queue is None:
            with QueueTables.open(self._options.broker) as tables:
                self._queue = tables.find(self._options.queue)
        return self._queue

    def _check_queue(self, offset: Mapping[str, Any]) -> ConsumePosition:
        """Parse an offset from Spark's checkpoint. QueueNotFound if it is of another queue or incarnation."""
        position, queue = parse_consume_position(offset), self._queue_found()
        if position.incarnation != f"{queue.incarnation:016x}":
            raise QueueNotFound(
                f"queue {queue.name!r} was deleted and created anew since this stream began, or the checkpoint is of another queue; "
                "start with a new checkpointLocation"
            )
        return position

    def _start_heartbeat(self, position: ConsumePosition) -> None:
        if self._heartbeat is None:

            def renew() -> None:
                with self._home(self._timeout // 3) as home:
                    home.call(self._renewal(position))

            self._heartbeat, self._renewed = Heartbeat(renew, self._timeout / 3 / SECOND), position
            self._handle_sigterm()

    def _renewal(self, position: ConsumePosition, reset_after: int | None = None) -> RenewStream:
        return RenewStream(
            queue=int(position.incarnation, 16), stream=position.stream, run=self._run, timeout=self._timeout, reset_after=reset_after
        )

    def _stop_heartbeat(self, wait: float | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end(wait)
        self._heartbeat = self._renewed = None

    def _handle_sigterm(self) -> None:
        """Call `stop` on SIGTERM. Spark ends a stream's process by this signal, without calling `stop`."""
        if in_stream_process():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # Spark sends it twice
        signal.alarm(STOP_TIMEOUT_SECONDS)  # ends the process if `stop` takes too long
        self.stop()
        os._exit(128 + number)

    def __repr__(self) -> str:
        return f"ConsumingReader({self._options.queue!r})"


def in_stream_process() -> bool:
    """Whether this is the process in which Spark runs the driver's side of a streaming query."""
    program = sys.modules["__main__"].__spec__
    return program is not None and program.name == SPARK_STREAM_MODULE


class Heartbeat:
    """A thread that calls `renew` at an interval. It ends when the parent process does: then the query has ended."""

    def __init__(self, renew: Callable[[], None], every_seconds: float) -> None:
        self._renew = renew
        self._every = every_seconds
        self._ended = Event()
        self._parent = os.getppid()
        self._thread = Thread(target=self._run, name="penstock-stream-heartbeat", daemon=True)
        self._thread.start()

    def end(self, wait: float | None = None) -> None:
        """Stop calling `renew`. Waits for a call that runs, up to `wait` seconds."""
        self._ended.set()
        self._thread.join(wait)

    def _run(self) -> None:
        while not self._ended.wait(self._every) and os.getppid() == self._parent:
            try:
                self._renew()
            except PenstockError:  # the next call may succeed; if the right is lost, `latestOffset` raises the error
                continue


def check_consume_options(options: SourceOptions) -> SourceOptions:
    """The options; InvalidRequest if a consuming stream cannot have them."""
    for name, value in (
        ("startingOffsets", options.starting_offsets),
        ("startingTimestamp", options.starting_timestamp),
        ("endingOffsets", options.ending_offsets),
        ("endingTimestamp", options.ending_timestamp),
        ("cursor", options.cursor or None),
        ("minOffsetsPerTrigger", options.min_offsets_per_trigger),
        ("maxBytesPerTrigger", options.max_bytes_per_trigger),
    ):
        if value is not None:
            raise InvalidRequest(f"{name} is given, and consume=true takes what is ready; leave one of them out")
    if not options.fail_on_data_loss:
        raise InvalidRequest("failOnDataLoss is false, and consume=true would complete what it could not read; leave it out")
    return options


# -- items that a batch could not handle -----------------------------------------------------------------


def settle(
    df: "DataFrame",
    broker: str | os.PathLike[str],
    queue: str,
    action: Literal["retry", "bury"] = "retry",
    *,
    delay: float = 0,
    reason: "str | Column" = "",
) -> int:
    """Retry or bury items that a consuming stream has leased, instead of completing them; returns their number.

    Call it in foreachBatch. `df` needs the column `id`. Retried items come again in a later batch, after `delay`
    seconds; buried ones go to the dead queue, if there is one. `reason` is a text, or a column of `df`. A second
    call for the same item, as when Spark repeats a batch, replaces the first. InvalidRequest if an item is completed,
    or not leased by a stream of this queue.

        def handle(batch, number):
            done, failed = …
            penstock.spark.settle(failed, "data/", "orders", "bury", reason=F.col("error"))
    """
    from pyspark.sql import functions as F

    if "id" not in df.columns:
        raise InvalidRequest(f"the DataFrame has no column 'id' to settle by; keep it when you select: it has {', '.join(df.columns)}")
    if action not in ("retry", "bury"):
        raise InvalidRequest(f"action is {action!r}; give 'retry' or 'bury'")
    roots, wait = require_directories(parse_broker(os.fspath(broker))), duration(delay, "delay")
    why = (F.lit(reason) if isinstance(reason, str) else reason).cast("string")
    rows = df.select(F.col("id"), F.coalesce(why, F.lit("")).alias("reason"))
    with closing(open_home(roots)) as home:
        incarnation = home.call(FindQueue(name=queue)).incarnation
        done, waiting = 0, FailedItems()
        for row in rows.toLocalIterator():
            waiting.add(row.id, row.reason)
            if waiting.total >= SETTLED_AT_ONCE:
                done, waiting = done + waiting.settle(home, incarnation, action, wait), FailedItems()
        return done + waiting.settle(home, incarnation, action, wait)


class FailedItems:
    """Items to retry or bury, grouped by reason."""

    def __init__(self) -> None:
        self.total = 0
        self._items: dict[str, dict[int, list[int]]] = {}

    def add(self, id: str, reason: str) -> None:
        partition, offset = parse_id(id)
        self._items.setdefault(reason, {}).setdefault(partition, []).append(offset)
        self.total += 1

    def settle(self, home: Home, incarnation: int, action: Literal["retry", "bury"], delay: int) -> int:
        if not self._items:
            return 0
        found, missing = home.call(FailGranted(queue=incarnation, action=action, delay=delay, groups=[*self._items.items()]))
        if missing:
            shown = ", ".join(format_id(*id) for id in missing[:SHOWN_IDS])
            raise InvalidRequest(
                f"{len(missing)} of these items ({shown}{', …' if len(missing) > SHOWN_IDS else ''}) are not leased by a stream that "
                "consumes this queue; name the queue that the stream reads, and settle the items of a batch in its own foreachBatch"
            )
        return found
