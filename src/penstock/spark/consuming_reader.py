"""A stream that is its queue's consumer: what a micro-batch committed is completed.

Owns: `ConsumingReader` (consume=true) and `settle`. The owner of the queue leases to the stream by grants, numbered from 1
(broker/streams.py); an offset says which stream it is and how many grants are done with:
    {"incarnation": "5f0c…", "stream": "c0ffee…", "grant": 17}
Spark asks where the next micro-batch ends only when the one before is in its commit log, also after the last one of a run: that is where a
grant is completed. A batch that Spark repeats after a crash is read by its grant, so it has the same rows.
While the stream lives it says so, three times as often as it must; when it has died, its right and its leases end by themselves. One that
is stopped in order gives its right back at once.
Everything but `read` runs on the driver, in one process, one call after the other; only the signs of life come from a thread.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from penstock.operations import TIMEOUT, A, EndStream, FailGranted, FindQueue, Home, Operation, ReadGrant, RenewStream, TakeGrant
from penstock.reports import GrantAnswer, QueueDescription
from penstock.rules.runs import RunSet
from penstock.spark.broker_access import open_home, parse_broker
from penstock.spark.options import SourceOptions, require_directories
from penstock.spark.queue_tables import QueueTables
from penstock.spark.ranges import split
from penstock.spark.stream_reader import StreamTask
from penstock.words.clock import MILLISECOND, SECOND, Clock, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError, QueueHeld, QueueNotFound
from penstock.words.ids import format_id, parse_id
from penstock.words.limits import MAX_GRANT
from penstock.words.values import duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DEFAULT_BATCH_ITEMS = 250_000
"""Of a micro-batch, unless maxItemsPerTrigger says otherwise."""
IDLE = 250 * MILLISECOND
"""When there was nothing, the owner is not asked again so soon."""
SETTLED_AT_ONCE = 10_000
SHOWN_IDS = 3
SPARK_STREAM_MODULE = "pyspark.sql.streaming.python_streaming_source_runner"
"""The program in which Spark runs the driver's side of a stream, a process for each query."""
STOP_TIMEOUT_SECONDS = 5


class ConsumePosition(msgspec.Struct, frozen=True):
    """How far a consuming stream is."""

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
    """Takes items of a queue, and completes them when Spark has committed what became of them."""

    ANSWER_TIMEOUT: ClassVar[int] = TIMEOUT
    """How long the owner is waited for, who may be starting again."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = check_consume_options(options)
        self._columns = tuple(columns)
        self._clock: Clock = SystemClock()
        self._run = os.urandom(8).hex()
        """Which process of the stream this is: one that ends late must not take the right from its successor."""
        self._queue: QueueDescription | None = None
        self._initial: ConsumePosition | None = None
        self._life: Heartbeat | None = None
        self._living: ConsumePosition | None = None
        self._done = 0
        """The grant that was last said to be done."""
        self._quiet_until = 0
        self._available_now = False
        self._left: int | None = None
        """Of what was ready when a run began that takes what is available now: not granted yet."""

    # -- how far -------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:  # asked for twice, and must then be the same
            self._initial = ConsumePosition(f"{self._found().incarnation:016x}", os.urandom(8).hex(), 0)
        return self._initial.to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_items_per_trigger or DEFAULT_BATCH_ITEMS)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The grant of the next micro-batch. Those up to `start` are in the sink, so they are completed."""
        place = self._own(start)
        now = self._clock.read().elapsed
        if place.grant == self._done and now < self._quiet_until:
            return start
        want = min(limit.max_rows if isinstance(limit, ReadMaxRows) else MAX_GRANT, MAX_GRANT)
        if self._left is not None:
            want = min(want, self._left)
        taken = self._take(place, want)
        self._done = place.grant
        if taken.grant == place.grant:
            self._quiet_until = now + IDLE
        if self._available_now:
            self._left = taken.ready if self._left is None else max(0, self._left - taken.items)
            if taken.grant == place.grant:
                self._release_right(place)
        return msgspec.structs.replace(place, grant=taken.grant).to_offset()

    def _take(self, place: ConsumePosition, want: int) -> GrantAnswer:
        operation = TakeGrant(
            queue=int(place.incarnation, 16),
            stream=place.stream,
            run=self._run,
            done=place.grant,
            want=want,
            per_key=self._options.per_key,
            timeout=self._timeout,
        )
        found = self._call_as_consumer(place, operation)
        self._start_heartbeat(place)
        return found

    def _call_as_consumer(self, place: ConsumePosition, operation: Operation[A]) -> A:
        """Ask what only the consumer may. Another that died has the right for a while yet: wait so long, if this one was at work before.

        One that is new waits only for another that is being stopped: more likely there is one that lives.
        """
        patience = self._timeout + SECOND if place.grant else min(self._timeout + SECOND, STOP_TIMEOUT_SECONDS * SECOND)
        deadline = self._clock.read().elapsed + patience
        while True:
            try:
                return self._ask(operation)
            except QueueHeld:
                if self._clock.read().elapsed > deadline:
                    raise
                Event().wait(IDLE / SECOND)

    def _ask(self, operation: Operation[A]) -> A:
        with self._home(self.ANSWER_TIMEOUT) as home:
            return home.call(operation)

    def _home(self, timeout: int = TIMEOUT) -> "closing[Home]":
        """Opened anew for each call: tasks get a copy of this reader, and a thread asks too."""
        return closing(open_home(self._options.broker, timeout=timeout))

    def _end(self, place: ConsumePosition) -> EndStream:
        return EndStream(queue=int(place.incarnation, 16), stream=place.stream, run=self._run)

    def _release_right(self, place: ConsumePosition) -> None:
        """Nothing more is wanted: others may lease at once. No sign of life may come behind it."""
        self._stop_heartbeat()
        self._ask(self._end(place))

    # -- what to read --------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """A micro-batch, or one that Spark repeats after a crash: then nothing else was asked before."""
        last = self._own(end)
        first = parse_consume_position(start)
        begins = first.grant if first.stream == last.stream else 0  # a first batch is repeated from an offset drawn anew
        incarnation = int(last.incarnation, 16)
        runs: dict[int, RunSet] = {}
        with self._home() as home:
            for number in range(begins + 1, last.grant + 1):
                for partition, _, leased in home.call(ReadGrant(queue=incarnation, stream=last.stream, number=number)).leases:
                    runs.setdefault(partition, RunSet()).add_all(leased)
        if self._life is None:  # begun anew: what is left of its time may not last for this batch
            self._call_as_consumer(last, self._renewal(last, again=begins))
            self._start_heartbeat(last)
        parts = split({partition: found.runs for partition, found in runs.items()}, self._options.min_partitions)
        return [StreamTask(incarnation, part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of a range."""
        assert isinstance(partition, StreamTask)
        with QueueTables.open(self._options.broker) as tables:
            number, runs = partition.part.partition, partition.part.runs
            yield from tables.items(partition.incarnation, number, runs, self._columns, forwarded=True)

    def commit(self, end: dict[str, Any]) -> None:
        """The next `latestOffset` says it, and also says it of the last one of a run."""

    def stop(self) -> None:
        """The query ends: nobody need wait until the right does."""
        place = self._living
        self._stop_heartbeat()
        if place is not None:
            with suppress(PenstockError), self._home() as home:
                home.submit(self._end(place))

    # -- steps ---------------------------------------------------------------------------------------

    @property
    def _timeout(self) -> int:
        return int(self._options.consumer_timeout * SECOND)

    def _found(self) -> QueueDescription:
        if self._queue is None:
            with QueueTables.open(self._options.broker) as tables:
                self._queue = tables.find(self._options.queue)
        return self._queue

    def _own(self, offset: Mapping[str, Any]) -> ConsumePosition:
        """An offset that Spark gives back, if it is of this very queue."""
        place, queue = parse_consume_position(offset), self._found()
        if place.incarnation != f"{queue.incarnation:016x}":
            raise QueueNotFound(
                f"queue {queue.name!r} was deleted and created anew since this stream began, or the checkpoint is of another queue; "
                "start with a new checkpointLocation"
            )
        return place

    def _start_heartbeat(self, place: ConsumePosition) -> None:
        if self._life is None:

            def renew() -> None:
                with self._home(self._timeout // 3) as home:
                    home.call(self._renewal(place))

            self._life, self._living = Heartbeat(renew, self._timeout / 3 / SECOND), place
            self._handle_sigterm()

    def _renewal(self, place: ConsumePosition, again: int | None = None) -> RenewStream:
        return RenewStream(queue=int(place.incarnation, 16), stream=place.stream, run=self._run, timeout=self._timeout, reset_after=again)

    def _stop_heartbeat(self) -> None:
        if self._life is not None:
            self._life.end()
        self._life = self._living = None

    def _handle_sigterm(self) -> None:
        """Spark ends its process of a stream by a signal, and calls `stop` only where the process ends by itself."""
        program = sys.modules["__main__"].__spec__
        if program is not None and program.name == SPARK_STREAM_MODULE:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # Spark says it twice
        signal.alarm(STOP_TIMEOUT_SECONDS)  # by then it is over, whatever comes
        self.stop()
        os._exit(128 + number)

    def __repr__(self) -> str:
        return f"ConsumingReader({self._options.queue!r})"


class Heartbeat:
    """A thread that says that a stream lives, while its process and that one's parent do: Spark ends the process with the query."""

    def __init__(self, renew: Callable[[], None], every_seconds: float) -> None:
        self._renew = renew
        self._every = every_seconds
        self._ended = Event()
        self._parent = os.getppid()
        self._thread = Thread(target=self._run, name="penstock-signs-of-life", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """None comes any more when this returns."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every) and os.getppid() == self._parent:
            try:
                self._renew()
            except PenstockError:  # nobody answered, or the right is gone; the next may do, and what is wrong the stream itself says
                continue


def check_consume_options(options: SourceOptions) -> SourceOptions:
    """The options, if a stream can consume as they say."""
    for name, value in (
        ("startingOffsets", options.starting_offsets),
        ("startingTimestamp", options.starting_timestamp),
        ("endingOffsets", options.ending_offsets),
        ("endingTimestamp", options.ending_timestamp),
        ("cursor", options.cursor or None),
    ):
        if value is not None:
            raise InvalidRequest(f"{name} is given, and consume=true takes what is ready; leave one of them out")
    if options.table != "items":
        raise InvalidRequest(f"consume is true but table {options.table} is read; only table items can be consumed")
    if not options.fail_on_data_loss:
        raise InvalidRequest("failOnDataLoss is false, and consume=true would complete what it could not read; leave it out")
    return options


# -- what a batch could not handle -----------------------------------------------------------------------


def settle(
    df: "DataFrame",
    broker: str | os.PathLike[str],
    queue: str,
    action: Literal["retry", "bury"] = "retry",
    *,
    delay: float = 0,
    reason: "str | Column" = "",
) -> int:
    """Retry or bury items that a consuming stream was given, instead of completing them; says how many.

    For foreachBatch: `df` has the column `id`. They come again in a later batch, after `delay` seconds, or go to the dead queue. `reason`
    is a text, or a column of `df`. What was settled before, as when Spark repeats a batch, is no matter; an item that no stream of the
    queue was given, or that is completed, is an error.

        def handle(batch, number):
            done, failed = …
            penstock.spark.settle(failed, "data/", "orders", "bury", reason=F.col("error"))
    """
    from pyspark.sql import functions as F

    if "id" not in df.columns:
        raise InvalidRequest(f"there is no column 'id' to settle by; keep it when you select, this has {', '.join(df.columns)}")
    if action not in ("retry", "bury"):
        raise InvalidRequest(f"there is no way {action!r} to settle; use 'retry' or 'bury'")
    target, wait = require_directories(parse_broker(os.fspath(broker))), duration(delay, "delay")
    why = (F.lit(reason) if isinstance(reason, str) else reason).cast("string")
    rows = df.select(F.col("id"), F.coalesce(why, F.lit("")).alias("reason"))
    with closing(open_home(target)) as home:
        incarnation = home.call(FindQueue(name=queue)).incarnation
        done, waiting = 0, FailedItems()
        for row in rows.toLocalIterator():
            waiting.add(row.id, row.reason)
            if waiting.total >= SETTLED_AT_ONCE:
                done, waiting = done + waiting.settle(home, incarnation, action, wait), FailedItems()
        return done + waiting.settle(home, incarnation, action, wait)


class FailedItems:
    """Items to be settled, by their reason."""

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
            shown = ", ".join(format_id(*place) for place in missing[:SHOWN_IDS])
            raise InvalidRequest(
                f"{len(missing)} of these items ({shown}{', …' if len(missing) > SHOWN_IDS else ''}) are not in the hands of a stream that "
                "consumes this queue; name the queue that the stream reads, and settle the items of a batch in its own foreachBatch"
            )
        return found
