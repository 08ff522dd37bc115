"""A broker's queues as tables, as Spark reads them: how far they go, where to cut them, and their rows.

Owns: `QueueTables`, `DeadLetterPartition`. Works on any home: what the driver wants to know is asked by operations, or of what a log has published;
tasks open the logs that they read. The owner of the queues may be at work meanwhile, or nobody.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa

from penstock.logs.log import Gap, LogRange, ReadableLog
from penstock.loop.partition_reader import PartitionReader
from penstock.operations import FindQueue, Home, ListCursors, ListQueues
from penstock.reports import QueueDescription
from penstock.rules.runs import RunSet
from penstock.spark.broker_access import BrokerRoots, open_home
from penstock.tables import dead, events, items, state
from penstock.words.limits import MIB

TASK_BYTES = 128 * MIB
"""Of log that one task reads, about, unless more tasks are asked for: what Spark itself takes of a file."""
PAGE = 1_000


class DeadLetterPartition(NamedTuple):
    """A partition in which dead letters of a queue may lie."""

    queue: str
    incarnation: int
    partition: int
    waiting: bool
    """Whether what waits there counts (it is a dead queue), besides what was buried in place."""
    origin: str | None
    """Only letters that came from this queue; None: all."""


class QueueTables:
    """Queues that are read, from any process that reaches them. Close it."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._readers: dict[tuple[int, int], PartitionReader] = {}
        """Partitions whose state was asked for."""

    @classmethod
    def open(cls, target: BrokerRoots) -> "QueueTables":
        return cls(open_home(target))

    def __enter__(self) -> "QueueTables":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- queues, and how far they go -------------------------------------------------------------------

    def find(self, queue: str) -> QueueDescription:
        return self._home.call(FindQueue(name=queue))

    def refresh(self) -> None:
        """Let the partitions whose state was asked for go on to what is published now."""
        for reader in self._readers.values():
            reader.refresh()

    def published(self, queue: QueueDescription) -> dict[int, LogRange]:
        """What is published and retained of every partition, active or retired."""
        return {partition: self._bounds(queue.incarnation, partition) for partition in _partitions(queue)}

    def _bounds(self, incarnation: int, partition: int) -> LogRange:
        with closing(self._home.log(incarnation, partition)) as log:
            return log.readable_range()

    def offsets_at(self, queue: QueueDescription, wall: int) -> dict[int, int]:
        """The first item offset that each partition gave at or after a time; its end where there is none."""
        found = {}
        for partition in _partitions(queue):
            with closing(self._home.log(queue.incarnation, partition)) as log:
                found[partition] = log.offset_at(wall)
        return found

    def sequences_at(self, queue: QueueDescription, wall: int) -> dict[int, int]:
        """A sequence in each partition before which nothing happened at or after a time: where reading events from then on may begin."""
        return {partition: self._sequence_at(queue.incarnation, partition, wall) for partition in _partitions(queue)}

    def _sequence_at(self, incarnation: int, partition: int, wall: int) -> int:
        sequence = self._bounds(incarnation, partition).sequence
        with closing(self._home.log(incarnation, partition)) as log:
            recent = [facts for facts in log.segments() if facts.last_wall >= wall]
            for found in log.frames(recent[0].first_sequence - 1) if recent else ():
                if not isinstance(found, Gap) and found.wall >= wall:
                    return found.sequence
        return sequence + 1

    def missing(self, queue: QueueDescription, partition: int, start: int, stop: int) -> list[int]:
        """Flat runs of the item offsets [start, stop) whose bytes retention or damage took, as far as `refresh` has come."""
        place = queue.incarnation, partition
        if place not in self._readers:
            self._readers[place] = PartitionReader(self._home.log(*place), self._home.clock)
        state = self._readers[place].state
        gone = RunSet(state.dropped.within(start, stop))
        gone.add_all(state.lost.within(start, stop))
        return gone.runs

    def cursor(self, queue: QueueDescription, name: str) -> dict[int, int]:
        """Where a cursor stands in each partition that knows it."""
        return self._home.call(ListCursors(queue=queue.incarnation)).get(name, {})

    # -- where to cut ----------------------------------------------------------------------------------

    def item_cuts(self, queue: QueueDescription, partition: int, start: int, stop: int, pieces: int) -> list[int]:
        """Offsets inside (start, stop), in order, that cut the range into so many pieces, or more where those would be too large for one
        task; at the edges of frames where there are any, so that few are read twice."""
        with closing(self._home.log(queue.incarnation, partition)) as log:
            bounds = log.readable_range()
            share = (stop - start) / max(1, bounds.end - bounds.start)
            pieces = max(pieces, round(share * log.size_bytes() / TASK_BYTES), 1)
            cuts: list[int] = []
            for cut in [start + (stop - start) * number // pieces for number in range(1, pieces)]:
                frames = [found for found in log.read(cut, cut + 1) if not isinstance(found, Gap)]
                edge = frames[0].base_offset if frames else cut
                if frames and edge <= (cuts[-1] if cuts else start):  # a frame of several pieces: it is cut
                    edge = cut
                if (cuts[-1] if cuts else start) < edge < stop:
                    cuts.append(edge)
        return cuts

    def sequence_cuts(self, queue: QueueDescription, partition: int, start: int, stop: int) -> list[int]:
        """Sequences inside (start, stop) at which reading events can begin without reading what is before."""
        return [sequence for sequence in self._bounds(queue.incarnation, partition).segments if start < sequence < stop]

    # -- rows, in tasks --------------------------------------------------------------------------------

    def items(
        self,
        incarnation: int,
        partition: int,
        runs: Sequence[int],
        columns: Sequence[str],
        *,
        fail_on_data_loss: bool = True,
        exact: bool = False,
        forwarded: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The items of flat runs of offsets; what was forwarded from another partition, and what retention took before, is left out.

        fail_on_data_loss: whole segments that are gone since the range was chosen, and what is damaged, are an error and not left out.
        exact: then so is every single item that is gone: the runs name none that was when they were chosen.
        forwarded: items that came from another partition of the queue too, for who consumes them rather than reads the log.
        """

        def open_log() -> ReadableLog:
            return self._home.log(incarnation, partition)

        return items.items(open_log, runs, columns, strict=fail_on_data_loss, exact=exact, forwarded=forwarded)

    def events(
        self,
        incarnation: int,
        partition: int,
        start: int,
        stop: int,
        columns: Sequence[str],
        *,
        since: int | None = None,
        until: int | None = None,
        fail_on_data_loss: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """What the log tells in the sequences [start, stop), of the times [since, until)."""

        def open_log() -> ReadableLog:
            return self._home.log(incarnation, partition)

        return events.events(open_log, start, stop, columns, since=since, until=until, strict=fail_on_data_loss)

    def states(self, incarnation: int, partition: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The items of a partition that are not completed, as they are now."""
        return state.state_rows(lambda: self._home.log(incarnation, partition), columns)

    def dead_letter_partitions(self, queue: QueueDescription) -> list[DeadLetterPartition]:
        """Where dead letters of a queue may lie: as the command `penstock dead list` has it."""
        buries_into = queue.options.dead_queue
        is_dead_queue = not buries_into and any(other.options.dead_queue == queue.name for other in self._queues())
        places = [DeadLetterPartition(queue.name, queue.incarnation, partition, is_dead_queue, None) for partition in _partitions(queue)]
        if buries_into:
            there = self.find(buries_into)
            places += [DeadLetterPartition(there.name, there.incarnation, partition, True, queue.name) for partition in _partitions(there)]
        return places

    def dead(self, place: DeadLetterPartition, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The dead letters that lie there now."""

        def open_log() -> ReadableLog:
            return self._home.log(place.incarnation, place.partition)

        return dead.dead(open_log, place.queue, columns, waiting=place.waiting, origin=place.origin)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._home.close()

    def __repr__(self) -> str:
        return f"QueueTables({self._home!r})"

    def _queues(self) -> Iterator[QueueDescription]:
        after = ""
        while page := self._home.call(ListQueues(after=after, limit=PAGE)):
            yield from page
            after = page[-1].name


def _partitions(queue: QueueDescription) -> list[int]:
    return sorted([*queue.active, *queue.retired])
