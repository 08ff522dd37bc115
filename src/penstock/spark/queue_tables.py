"""A broker's queues as the tables that Spark reads: their ranges, where to cut them into tasks, and their rows.

Owns: `QueueTables`, `LazyQueueTables`, `DeadLetterPartition`, and `TABLES`, their columns. Works on any home. The
driver asks by operations and reads the published ranges of logs; tasks open the logs that they read. The broker may
have an owner at the same time, or none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa

from penstock.logs.log import Gap, LogRange, ReadableLog
from penstock.loop.partition_reader import PartitionReader
from penstock.operations import FindQueue, Home, ListCursors, ListQueues, ReadSlotMap
from penstock.reports import QueueDescription
from penstock.rules.routing import slot
from penstock.rules.runs import RunSet, count
from penstock.rules.slots import SlotMap
from penstock.spark.broker_access import BrokerRoots, open_home
from penstock.spark.generations import Generations
from penstock.tables import dead, events, items, schemas, state
from penstock.tables.events import FrameRows
from penstock.tables.schemas import select_columns
from penstock.words.limits import MIB

TASK_BYTES = 128 * MIB
"""About how much of a log one task reads, unless more are asked for: Spark's default for files."""
PAGE = 1_000
GENERATION = "generation"
QUEUE = "queue"
"""The column that a stream of several queues has besides."""
TABLES = {**schemas.TABLES, "items": schemas.ITEMS.append(pa.field(GENERATION, pa.int32()))}
"""The columns of the tables: those of the logs, and what a queue's catalog says of its items."""


class DeadLetterPartition(NamedTuple):
    """A partition that may hold dead letters of a queue."""

    queue: str
    incarnation: int
    partition: int
    waiting: bool
    """Whether its waiting items are dead letters too (it is a dead queue), besides the items buried in it."""
    origin: str | None
    """Only dead letters that came from this queue; None: all."""


class QueueTables:
    """Reads the queues of a broker, from any process that sees its directory. The caller closes it."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._readers: dict[tuple[int, int], PartitionReader] = {}
        """The state of the partitions for which `missing` was called."""

    @classmethod
    def open(cls, roots: BrokerRoots) -> "QueueTables":
        return cls(open_home(roots))

    def __enter__(self) -> "QueueTables":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- queues and their ranges -----------------------------------------------------------------------

    def find(self, queue: str) -> QueueDescription:
        """The queue of that name, with the marks of its resizes."""
        return self._home.call(FindQueue(name=queue, marks=True))

    def partitions_of(self, queue: QueueDescription, keys: Iterable[bytes]) -> list[int]:
        """The partitions that may hold items of these keys: their slots' owners, and all if the queue was ever resized,
        because older slot maps are not kept for ever."""
        owners = SlotMap.unpack(0, self._home.call(ReadSlotMap(queue=queue.incarnation))).owners
        if self.find(queue.name).marks:  # asked after the map, so that no resize came in between
            return _partitions(queue)
        return sorted({owners[slot(key)] for key in keys})

    def refresh(self) -> None:
        """Bring the partitions' state, which `missing` uses, up to what is published now."""
        for reader in self._readers.values():
            reader.refresh()

    def published(self, queue: QueueDescription) -> dict[int, LogRange]:
        """The readable range of every partition, active or retired."""
        return {partition: self._range(queue.incarnation, partition) for partition in _partitions(queue)}

    def _range(self, incarnation: int, partition: int) -> LogRange:
        with closing(self._home.log(incarnation, partition)) as log:
            return log.readable_range()

    def offsets_at(self, queue: QueueDescription, wall: int) -> dict[int, int]:
        """The first item offset of each partition given at or after a time; the partition's end if there is none."""
        found = {}
        for partition in _partitions(queue):
            with closing(self._home.log(queue.incarnation, partition)) as log:
                found[partition] = log.offset_at(wall)
        return found

    def sequences_at(self, queue: QueueDescription, wall: int) -> dict[int, int]:
        """For each partition the first log sequence at or after a time: where to begin to read events from then on."""
        return {partition: self._sequence_at(queue.incarnation, partition, wall) for partition in _partitions(queue)}

    def _sequence_at(self, incarnation: int, partition: int, wall: int) -> int:
        sequence = self._range(incarnation, partition).sequence
        with closing(self._home.log(incarnation, partition)) as log:
            recent = [facts for facts in log.segments() if facts.last_wall >= wall]
            for found in log.frames(recent[0].first_sequence - 1) if recent else ():
                if not isinstance(found, Gap) and found.wall >= wall:
                    return found.sequence
        return sequence + 1

    def missing(self, queue: QueueDescription, partition: int, start: int, stop: int) -> list[int]:
        """Flat runs of the item offsets in [start, stop) that retention or damage had removed at the last `refresh`."""
        state = self._reader(queue, partition).state
        gone = RunSet(state.dropped.within(start, stop))
        gone.add_all(state.lost.within(start, stop))
        return gone.subtract(state.holes.runs)

    def holes(self, queue: QueueDescription, partition: int) -> list[int]:
        """Flat runs of the offsets that were never given, because the queue was restored from a backup."""
        if not queue.restores:
            return []
        return self._reader(queue, partition).state.holes.runs

    def _reader(self, queue: QueueDescription, partition: int) -> PartitionReader:
        key = queue.incarnation, partition
        if key not in self._readers:
            self._readers[key] = PartitionReader(self._home.log(*key), self._home.clock)
        return self._readers[key]

    def cursor(self, incarnation: int, name: str) -> dict[int, int]:
        """The position of a cursor in each partition of a queue that has it."""
        return self._home.call(ListCursors(queue=incarnation)).get(name, {})

    def frame_sizes(self, incarnation: int, partition: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The frames with the offsets [start, stop): first offset, offset after the last, uncompressed bytes."""
        with closing(self._home.log(incarnation, partition)) as log:
            while start < stop:
                before = start
                for found in log.read(start, stop, MIB):
                    if not isinstance(found, Gap):
                        yield found.base_offset, found.base_offset + found.count, len(found.body)
                        start = max(start, found.base_offset + found.count)
                    start = max(start, found.stop if isinstance(found, Gap) else start)
                if start == before:  # there are no more frames
                    return

    def oldest_wall(self, incarnation: int, partition: int, number: int, *, events: bool) -> int | None:
        """When the item of an offset was produced, or the first frame from a log sequence on written; None: unknown."""
        with closing(self._home.log(incarnation, partition)) as log:
            found = log.frames(number - 1) if events else iter(log.read(number, number + 1, 1))
            return next((frame.wall for frame in found if not isinstance(frame, Gap)), None)

    # -- cuts between tasks ----------------------------------------------------------------------------

    def item_cuts(self, queue: QueueDescription, partition: int, start: int, stop: int, pieces: int) -> list[int]:
        """Offsets in (start, stop), ascending, that cut the range into `pieces`, or into more if a piece were too large
        for a task; between frames where possible, so that few frames are read by two tasks."""
        with closing(self._home.log(queue.incarnation, partition)) as log:
            bounds = log.readable_range()
            share = (stop - start) / max(1, bounds.end - bounds.start - count(self.holes(queue, partition)))
            pieces = max(pieces, round(share * log.size_bytes() / TASK_BYTES), 1)
            cuts: list[int] = []
            for cut in [start + (stop - start) * number // pieces for number in range(1, pieces)]:
                frames = [found for found in log.read(cut, cut + 1) if not isinstance(found, Gap)]
                edge = frames[0].base_offset if frames else cut
                if frames and edge <= (cuts[-1] if cuts else start):  # the frame spans several pieces: cut inside it
                    edge = cut
                if (cuts[-1] if cuts else start) < edge < stop:
                    cuts.append(edge)
        return cuts

    def sequence_cuts(self, queue: QueueDescription, partition: int, start: int, stop: int) -> list[int]:
        """The log sequences in (start, stop) with which a segment begins: events can be read from there on."""
        return [sequence for sequence in self._range(queue.incarnation, partition).segments if start < sequence < stop]

    # -- rows ------------------------------------------------------------------------------------------

    def items(
        self,
        incarnation: int,
        partition: int,
        runs: Sequence[int],
        columns: Sequence[str],
        *,
        walls: tuple[int, int] | None = None,
        fail_on_data_loss: bool = True,
        exact: bool = False,
        forwarded: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The items of flat runs of offsets, without items forwarded from another partition and without removed items.

        walls: only items produced from the one time on, before the other.
        fail_on_data_loss: raise an error if segments were removed since the range was chosen, or are damaged.
        exact: with fail_on_data_loss, raise an error for every missing item: `runs` has none that was missing before.
        forwarded: include the items forwarded from another partition of the queue, as a consumer needs them.
        """
        log = self._log_opener(incarnation, partition)
        if GENERATION not in columns:
            yield from items.items(log, runs, columns, walls=walls, strict=fail_on_data_loss, exact=exact, forwarded=forwarded)
            return
        generations = Generations(self._home.call(FindQueue(queue=incarnation, marks=True)))
        stored = list(dict.fromkeys([*(name for name in columns if name != GENERATION), "offset"]))
        for batch in items.items(log, runs, stored, walls=walls, strict=fail_on_data_loss, exact=exact, forwarded=forwarded):
            found = generations.column(partition, batch.column("offset"))
            arrays = [found if name == GENERATION else batch.column(name) for name in columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=select_columns(TABLES["items"], columns))

    def events(
        self,
        incarnation: int,
        partition: int,
        start: int,
        stop: int,
        columns: Sequence[str],
        *,
        skip: int = 0,
        rows: int = 0,
        since: int | None = None,
        until: int | None = None,
        fail_on_data_loss: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """The events of the log sequences [start, stop) and the times [since, until), without the first `skip` rows of
        the frame `start`, and with the first `rows` rows of the frame `stop`."""
        log = self._log_opener(incarnation, partition)
        return events.events(log, start, stop, columns, skip=skip, rows=rows, since=since, until=until, strict=fail_on_data_loss)

    def event_rows(self, incarnation: int, partition: int, start: int, stop: int, *, fail_on_data_loss: bool = True) -> Iterator[FrameRows]:
        """How many events each frame of the log sequences [start, stop) has."""
        return events.frame_rows(self._log_opener(incarnation, partition), start, stop, strict=fail_on_data_loss)

    def states(self, incarnation: int, partition: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The items of a partition that are not completed now."""
        return state.state_rows(self._log_opener(incarnation, partition), columns)

    def dead_letter_partitions(self, queue: QueueDescription) -> list[DeadLetterPartition]:
        """The partitions that may hold dead letters of a queue; the same as for the command `penstock dead list`."""
        buries_into = queue.options.dead_queue
        is_dead_queue = not buries_into and any(other.options.dead_queue == queue.name for other in self.queues())
        found = [DeadLetterPartition(queue.name, queue.incarnation, partition, is_dead_queue, None) for partition in _partitions(queue)]
        if buries_into:
            other = self.find(buries_into)
            found += [DeadLetterPartition(other.name, other.incarnation, partition, True, queue.name) for partition in _partitions(other)]
        return found

    def dead(self, source: DeadLetterPartition, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The dead letters that a partition holds now."""
        log = self._log_opener(source.incarnation, source.partition)
        return dead.dead(log, source.queue, columns, waiting=source.waiting, origin=source.origin)

    def _log_opener(self, incarnation: int, partition: int) -> Callable[[], ReadableLog]:
        return partial(self._home.log, incarnation, partition)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._home.close()

    def __repr__(self) -> str:
        return f"QueueTables({self._home!r})"

    def queues(self) -> Iterator[QueueDescription]:
        """All queues, without marks."""
        after = ""
        while page := self._home.call(ListQueues(after=after, limit=PAGE)):
            yield from page
            after = page[-1].name


class LazyQueueTables:
    """The tables of a broker for a stream's reader: opened when they are first needed, because tasks get a copy of the
    reader and may not need them."""

    def __init__(self, roots: BrokerRoots) -> None:
        self._roots = roots
        self._tables: QueueTables | None = None

    @property
    def opened(self) -> QueueTables:
        if self._tables is None:
            self._tables = QueueTables.open(self._roots)
        return self._tables

    def refreshed(self) -> QueueTables:
        """The tables with the state of what is published now."""
        if self._tables is not None:
            self._tables.refresh()
        return self.opened

    def close(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None


def _partitions(queue: QueueDescription) -> list[int]:
    return sorted([*queue.active, *queue.retired])
