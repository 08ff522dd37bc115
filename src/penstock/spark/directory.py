"""A broker's directory as Spark reads it: no lock is taken, nothing is written, and only what is durable is seen.

Owns: `DirectoryReading`. What the driver asks is answered from the files' names and the published positions, or, where the state of a
partition must be known, from its log; tasks open the logs that they read. The owner of the directory may be at work meanwhile, or nobody.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

import pyarrow as pa

from penstock.broker.snapshot import Snapshot
from penstock.logs.api import Gap, Readable
from penstock.logs.backends import open_read_only
from penstock.logs.files.system import Files
from penstock.logs.store import ReadStore
from penstock.loop.reading import Reader
from penstock.reports import QueueInfo
from penstock.rules.runs import RunSet
from penstock.spark.home import Bounds, DeadPlace, Target
from penstock.tables import dead, events, items, states
from penstock.words.clock import SystemClock
from penstock.words.errors import CorruptLog, QueueNotFound
from penstock.words.limits import MIB

TASK_BYTES = 128 * MIB
"""Of log that one task reads, about, unless more tasks are asked for: what Spark itself takes of a file."""
PAGE = 1_000


class DirectoryReading:
    """A directory that is read, from any process that reaches it."""

    def __init__(self, target: Target, files: Files | None = None) -> None:
        self._target = target
        self._files = files
        self._seen: Snapshot | None = None
        self._opened: ReadStore | None = None
        self._readers: dict[tuple[int, int], Reader] = {}
        """Partitions whose state was asked for."""

    @property
    def _snapshot(self) -> Snapshot:
        if self._seen is None:
            self._seen = Snapshot.open([*self._target], files=self._files)
        return self._seen

    @property
    def _store(self) -> ReadStore:
        if self._opened is None:
            self._opened = open_read_only([*self._target], self._files)
        return self._opened

    # -- queues, and how far they go -------------------------------------------------------------------

    def find(self, queue: str) -> QueueInfo:
        return self._snapshot.find(queue)

    def refresh(self) -> None:
        self._snapshot.refresh()
        for reader in self._readers.values():
            reader.refresh()

    def bounds(self, queue: QueueInfo) -> dict[int, Bounds]:
        return {partition: self._bounds(queue.incarnation, partition) for partition in _partitions(queue)}

    def _bounds(self, incarnation: int, partition: int) -> Bounds:
        with closing(self._log(incarnation, partition)) as log:
            found = log.published()
        return Bounds(found.start, found.end, found.first_sequence, found.sequence, found.whole_from)

    def offsets_at(self, queue: QueueInfo, wall: int) -> dict[int, int]:
        found = {}
        for partition in _partitions(queue):
            with closing(self._log(queue.incarnation, partition)) as log:
                found[partition] = log.offset_at(wall)
        return found

    def sequences_at(self, queue: QueueInfo, wall: int) -> dict[int, int]:
        return {partition: self._sequence_at(queue.incarnation, partition, wall) for partition in _partitions(queue)}

    def _sequence_at(self, incarnation: int, partition: int, wall: int) -> int:
        sequence = self._bounds(incarnation, partition).sequence
        with closing(self._log(incarnation, partition)) as log:
            recent = [facts for facts in log.segments() if facts.last_wall >= wall]
            for found in log.frames(recent[0].first_sequence - 1) if recent else ():
                if not isinstance(found, Gap) and found.wall >= wall:
                    return found.sequence
        return sequence + 1

    def missing(self, queue: QueueInfo, partition: int, start: int, stop: int) -> list[int]:
        owner = queue.incarnation, partition
        if owner not in self._readers:
            self._readers[owner] = Reader(self._log(*owner), SystemClock())
        state = self._readers[owner].state
        gone = RunSet(state.dropped.within(start, stop))
        gone.add_all(state.lost.within(start, stop))
        return gone.runs

    def cursor(self, queue: QueueInfo, name: str) -> dict[int, int]:
        found: dict[int, int] = self._snapshot.ask(queue.incarnation, "cursor", name=name)
        return found

    # -- where to cut ----------------------------------------------------------------------------------

    def item_cuts(self, queue: QueueInfo, partition: int, start: int, stop: int, pieces: int) -> list[int]:
        bounds = self._bounds(queue.incarnation, partition)
        share = (stop - start) / max(1, bounds.end - bounds.start)
        cuts: list[int] = []
        with closing(self._log(queue.incarnation, partition)) as log:
            pieces = max(pieces, round(share * log.size_bytes() / TASK_BYTES), 1)
            wanted = [start + (stop - start) * number // pieces for number in range(1, pieces)]
            for cut in wanted:
                frames = [found for found in log.read(cut, cut + 1) if not isinstance(found, Gap)]
                edge = frames[0].base if frames else cut
                if frames and edge <= (cuts[-1] if cuts else start):  # a frame of several pieces: it is cut
                    edge = cut
                if (cuts[-1] if cuts else start) < edge < stop:
                    cuts.append(edge)
        return cuts

    def sequence_cuts(self, queue: QueueInfo, partition: int, start: int, stop: int) -> list[int]:
        with closing(self._log(queue.incarnation, partition)) as log:
            return [sequence for sequence in log.published().segments if start < sequence < stop]

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
        def open_log() -> Readable:
            return self._log(incarnation, partition)

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
        def open_log() -> Readable:
            return self._log(incarnation, partition)

        return events.events(open_log, start, stop, columns, since=since, until=until, strict=fail_on_data_loss)

    def states(self, incarnation: int, partition: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return states.states(lambda: self._log(incarnation, partition), columns)

    def dead_places(self, queue: QueueInfo) -> list[DeadPlace]:
        """As the command `penstock dead list` has it."""
        buries_into = queue.options.dead_queue
        is_dead_queue = not buries_into and any(other.options.dead_queue == queue.name for other in self._queues())
        places = [DeadPlace(queue.name, queue.incarnation, partition, is_dead_queue, None) for partition in _partitions(queue)]
        if buries_into:
            there = self.find(buries_into)
            places += [DeadPlace(there.name, there.incarnation, partition, True, queue.name) for partition in _partitions(there)]
        return places

    def dead(self, place: DeadPlace, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        def open_log() -> Readable:
            return self._log(place.incarnation, place.partition)

        return dead.dead(open_log, place.queue, columns, waiting=place.waiting, origin=place.origin)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        if self._seen is not None:
            self._seen.close()
        if self._opened is not None:
            self._opened.close()

    def __repr__(self) -> str:
        return f"DirectoryReading({', '.join(self._target)})"

    # -- steps -----------------------------------------------------------------------------------------

    def _queues(self) -> Iterator[QueueInfo]:
        after = ""
        while page := self._snapshot.list(after=after, limit=PAGE):
            yield from page
            after = page[-1].name

    def _log(self, incarnation: int, partition: int) -> Readable:
        try:
            return self._store.reader(incarnation, partition)
        except CorruptLog:
            if incarnation in self._store.incarnations():
                raise
            raise QueueNotFound("the queue was deleted (perhaps created anew since); ask for it by name") from None


def _partitions(queue: QueueInfo) -> list[int]:
    return sorted([*queue.active, *queue.retired])
