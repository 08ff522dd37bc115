"""A read-only partition: its state and items from its published log.

Owns: `PartitionReader`; the interfaces that it shares with the owner's partition (`ReadablePartition`, and in a queue
`PartitionView` and `QueueView`); and reading from an offset on (`retained_runs`, `read_retained`).
A reader takes no lock and writes nothing. Its state is the one published when it was opened or last refreshed.
Published frames are never taken back while the machine runs, so a refresh reads only new ones; when the next ones are
deleted or damaged, it replays from a Base. Single-threaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.logs.log import Frame, Gap, ReadableLog
from penstock.loop.item_cache import BlockCache, ItemCache, Items
from penstock.loop.recovery import apply_frames, elapsed_shift, mark_missing_front
from penstock.rules.explain import Explanation, explain
from penstock.rules.runs import RunSet, first_of, pairs
from penstock.rules.state import MissingBlocks, State
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, Moment
from penstock.words.errors import PenstockError


class ReadablePartition(Protocol):
    """The owner's partition or a reader."""

    @property
    def state(self) -> State: ...
    @property
    def gaps(self) -> list[Gap]: ...
    @property
    def log(self) -> ReadableLog: ...
    def now(self) -> Moment: ...
    def items(self, runs: Sequence[int]) -> list[Items]: ...
    def read_retained(self, start: int, limit: int) -> "RetainedItems": ...
    def offset_at(self, wall: int) -> int: ...
    def explain(self, offset: int) -> Explanation: ...


class PartitionView(Protocol):
    """One partition of a queue, usable or not."""

    @property
    def number(self) -> int: ...
    @property
    def is_usable(self) -> bool: ...
    @property
    def error(self) -> PenstockError | None: ...
    @property
    def slow(self) -> bool:
        """Whether its present I/O, or the last one, took long."""
        ...

    @property
    def in_io(self) -> bool: ...
    @property
    def summary(self) -> Summary | None:
        """The summary of a closed partition."""
        ...

    @property
    def closed(self) -> bool: ...
    @property
    def usable_partition(self) -> ReadablePartition:
        """The partition; raises the reason when it cannot be used."""
        ...

    @property
    def readable_partition(self) -> ReadablePartition | None:
        """The partition even while it is failing, if its state in memory is right."""
        ...

    @property
    def state(self) -> State: ...


class QueueView(Protocol):
    """A queue for queries: the owner's or a snapshot's."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def active(self) -> Sequence[int]: ...
    @property
    def handles(self) -> Mapping[int, PartitionView]: ...
    @property
    def is_dead_queue(self) -> bool: ...
    def usable(self) -> Iterator[PartitionView]: ...
    def touch(self, handle: Any, /) -> None:
        """Called before items of a partition are read: damage that the read finds is committed with the turn."""
        ...


def last_sequence(found: Frame | Gap) -> int:
    """The sequence after which to continue reading."""
    return found.last_sequence if isinstance(found, Gap) else found.sequence


def retained_runs(state: State, start: int, limit: int) -> list[int]:
    """Runs of up to `limit` items from `start` on, in any state, that are neither deleted nor known to be lost."""
    found = RunSet(state.dropped.missing(start, state.next_offset))
    found.remove_all(state.lost.runs)
    return first_of(found.runs, limit)


class RetainedItems(NamedTuple):
    """Items of a partition in any state, and the offset up to which was read."""

    items: list[Items]
    stop: int


def read_retained(partition: ReadablePartition, start: int, limit: int) -> RetainedItems:
    """Up to `limit` retained items from `start` on; none only when none are left."""
    while True:
        runs = retained_runs(partition.state, start, limit)
        items = partition.items(runs)
        if items or not runs:
            return RetainedItems(items, runs[-1] if runs else partition.state.next_offset)
        start = runs[-1]  # all of these are lost


class PartitionReader:
    """A partition's published state and items."""

    def __init__(self, log: ReadableLog, clock: Clock) -> None:
        self.log = log
        self.state = State()
        self.gaps: list[Gap] = []
        self._clock = clock
        self._items = ItemCache(log)
        self._blocks = BlockCache(self._items)
        self._lost = RunSet()
        """Items found lost since the last refresh; they are not read again. (Only the owner changes the state.)"""
        self.sequence = 0
        """The sequence of the last frame in the state; 0 when there is none, or the last replay failed."""
        self._begin()

    def _begin(self) -> None:
        first = self.log.first_offset  # before the state: an owner records what it deletes first
        self.state, self.gaps = apply_frames(State(), self._record_sequence(self.log.recover()))
        self.gaps += mark_missing_front(self.state, first, self.log.where)
        self._items.clear()
        self._blocks.clear()

    def refresh(self) -> None:
        """Bring the state up to what is published now."""
        sequence, self.sequence = self.sequence, 0
        self._lost.clear()
        if sequence:  # else the log was empty, or reading it failed
            self.state, gaps = apply_frames(self.state, self._record_sequence(self.log.frames(sequence), sequence))
            self._blocks.clear()  # blocks of items not yet published may be marked as lost
            if not gaps:
                return
        self._begin()

    def _record_sequence(self, frames: Iterator[Frame | Gap], sequence: int = 0) -> Iterator[Frame | Gap]:
        """Pass frames on, and set `sequence` at the end: a state that was replayed in part must not be continued."""
        for found in frames:
            sequence = last_sequence(found)
            yield found
        self.sequence = sequence

    def close(self) -> None:
        self.log.close()

    # -- reading -------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The partition's time, calculated as its owner does."""
        raw = self._clock.read()
        shift, _ = elapsed_shift(self.state, raw, self._clock.boot)
        return Moment(raw.elapsed + shift, raw.wall)

    def items(self, runs: Sequence[int]) -> list[Items]:
        """Items in the order of `runs`, without lost and deleted ones."""
        found = self._items.collect([edge for start, stop in pairs(runs) for edge in self._lost.missing(start, stop)])
        self._lost.add_all(edge for gap in found.gaps for edge in (gap.start, gap.stop))
        return [Items(run[0], cached.batch(*run), cached.wall) for cached, its_runs in found.parts for run in pairs(its_runs)]

    def read_retained(self, start: int, limit: int) -> RetainedItems:
        """Up to `limit` retained items from `start` on, in any state."""
        return read_retained(self, start, limit)

    def offset_at(self, wall: int) -> int:
        """The first offset produced at or after a wall time."""
        return max(min(self.log.offset_at(wall), self.state.next_offset), self.state.dropped.first_missing(0))

    def explain(self, offset: int) -> Explanation:
        """Why an item is not running."""
        while True:
            try:
                return explain(self.state, self.log.partition, offset, self.now(), self._blocks)
            except MissingBlocks as missing:
                self._blocks.trim()
                for wanted in missing.offsets:
                    self._blocks.fetch(wanted)

    def __repr__(self) -> str:
        return f"PartitionReader({self.log.partition}, {self.state!r})"
