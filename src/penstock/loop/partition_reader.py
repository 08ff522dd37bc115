"""A partition that is only read: its state as its published log tells it, beside an owner at work or without one.

Owns: `PartitionReader`, and what it has in common with a partition at work: how it is looked at (`ReadablePartition`, and in its queue `PartitionView` and `QueueView`)
and how it is read from an offset on (`retained`, `history`).
A reader takes no lock, decides nothing and writes nothing. It stands at what was published when it was opened or last refreshed.
What is published is never taken back while the machine runs, so a refresh reads only what is new; where it cannot go on (what followed
is dropped already, or damaged) it begins anew.
Single-threaded.
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
    """A partition that can be looked at: one at work, or a reader."""

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
    """One partition of a queue, in order or not."""

    @property
    def number(self) -> int: ...
    @property
    def is_usable(self) -> bool: ...
    @property
    def error(self) -> PenstockError | None: ...
    @property
    def slow(self) -> bool: ...
    @property
    def summary(self) -> Summary | None:
        """What is known of it while it is closed."""
        ...

    @property
    def closed(self) -> bool: ...
    @property
    def usable_partition(self) -> ReadablePartition:
        """The partition, or why it cannot be looked at."""
        ...

    @property
    def readable_partition(self) -> ReadablePartition | None:
        """The partition even while it is failing, if what is known of it is true."""
        ...

    @property
    def state(self) -> State: ...


class QueueView(Protocol):
    """A queue that can be looked at."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def active(self) -> Sequence[int]: ...
    @property
    def handles(self) -> Mapping[int, PartitionView]: ...
    def usable(self) -> Iterator[PartitionView]: ...
    def touch(self, member: Any, /) -> None:
        """It is about to be read from: whatever that brings to light is kept with the turn."""
        ...


def last_sequence(found: Frame | Gap) -> int:
    """The sequence behind which reading goes on."""
    return found.last_sequence if isinstance(found, Gap) else found.sequence


def retained_runs(state: State, start: int, limit: int) -> list[int]:
    """Runs of up to `limit` items from offset `start` on whose bytes are there, as far as is known, whatever became of them."""
    there = RunSet(state.dropped.missing(start, state.next_offset))
    there.remove_all(state.lost.runs)
    return first_of(there.runs, limit)


class RetainedItems(NamedTuple):
    """Items of a partition, whatever became of them, and the offset up to which it was read for them."""

    items: list[Items]
    stop: int


def read_retained(partition: ReadablePartition, start: int, limit: int) -> RetainedItems:
    """Up to `limit` retained items from offset `start` on; none only when there is none up to the end."""
    while True:
        runs = retained_runs(partition.state, start, limit)
        items = partition.items(runs)
        if items or not runs:
            return RetainedItems(items, runs[-1] if runs else partition.state.next_offset)
        start = runs[-1]  # all of these are lost


class PartitionReader:
    """A partition's state and items, as published."""

    def __init__(self, log: ReadableLog, clock: Clock) -> None:
        self.log = log
        self.state = State()
        self.gaps: list[Gap] = []
        self._clock = clock
        self._frames = ItemCache(log)
        self._blocks = BlockCache(self._frames)
        self._lost = RunSet()
        """What damage was found to have taken since the last refresh: it is not looked for again. The state is the owner's to change."""
        self.sequence = 0
        """Of the last frame that the state rests on; 0 when there is none, or it cannot be relied on."""
        self._begin()

    def _begin(self) -> None:
        first = self.log.first_offset  # before the state: what an owner drops meanwhile it says first
        self.state, self.gaps = apply_frames(State(), self._noted(self.log.recover()))
        self.gaps += mark_missing_front(self.state, first, self.log.where)
        self._frames.clear()
        self._blocks.clear()

    def refresh(self) -> None:
        """Go on to what is published now."""
        sequence, self.sequence = self.sequence, 0
        self._lost.clear()
        if sequence:  # else nothing was there, or reading it failed
            self.state, gaps = apply_frames(self.state, self._noted(self.log.frames(sequence), sequence))
            self._blocks.clear()  # what was not there yet may count as lost in them
            if not gaps:
                return
        self._begin()

    def _noted(self, frames: Iterator[Frame | Gap], sequence: int = 0) -> Iterator[Frame | Gap]:
        """The same, and in the end how far it came: a state that was brought only half the way is not to be carried on."""
        for found in frames:
            sequence = last_sequence(found)
            yield found
        self.sequence = sequence

    def close(self) -> None:
        self.log.close()

    # -- looking -------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The partition's time, as an owner would carry it on."""
        raw = self._clock.read()
        shift, _ = elapsed_shift(self.state, raw, self._clock.boot)
        return Moment(raw.elapsed + shift, raw.wall)

    def items(self, runs: Sequence[int]) -> list[Items]:
        """Whole items, in the order of `runs`; what damage or retention took is left out."""
        found = self._frames.collect([edge for start, stop in pairs(runs) for edge in self._lost.missing(start, stop)])
        self._lost.add_all(edge for gap in found.gaps for edge in (gap.start, gap.stop))
        return [Items(start, held.batch(start, stop), held.wall) for held, start, stop in found.parts]

    def read_retained(self, start: int, limit: int) -> RetainedItems:
        """Up to `limit` retained items from offset `start` on, whatever became of them."""
        return read_retained(self, start, limit)

    def offset_at(self, wall: int) -> int:
        """The first offset produced at or after a wall time."""
        return max(min(self.log.offset_at(wall), self.state.next_offset), self.state.dropped.first_missing(0))

    def explain(self, offset: int) -> Explanation:
        """Why an item is not running."""
        while True:
            try:
                return explain(self.state, offset, self.now(), self._blocks)
            except MissingBlocks as missing:
                self._blocks.trim()
                for wanted in missing.offsets:
                    self._blocks.fetch(wanted)

    def __repr__(self) -> str:
        return f"Reader({self.log.partition}, {self.state!r})"
