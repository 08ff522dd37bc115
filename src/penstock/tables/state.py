"""What is not completed, as record batches.

Owns: `states` (the table), and what it has in common with dead letters: `attempt_count` and `reason_of`. It stands at what is published when
it is read: the partition's state is replayed for it.
Items are read from the log only if a column asks for something that lies there: counting a backlog by its states does not touch it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from operator import itemgetter
from typing import Any

import pyarrow as pa

from penstock.loop.partition_reader import PartitionReader
from penstock.rules.item_states import ItemState
from penstock.rules.leases import LiveLease
from penstock.rules.runs import RunSet, count, offsets, pairs
from penstock.rules.state import State
from penstock.tables.arrays import ids, offsets_of, repeat_each
from penstock.tables.item_columns import NEEDS, ROWS, ItemRows, grouped_slices, stored_columns
from penstock.tables.items import OpenLog, frame_slices
from penstock.tables.schemas import INSTANT, STATE, batch_of, select_columns
from penstock.words.clock import Clock, Moment, SystemClock

IN_THE_LOG = {*NEEDS, "produced_at"}


# -- state ---------------------------------------------------------------------------------------------


def state_rows(open_log: OpenLog, columns: Sequence[str], *, clock: Clock | None = None) -> Iterator[pa.RecordBatch]:
    """Every item of a partition that is not completed."""
    schema = select_columns(STATE, columns)
    with closing(PartitionReader(open_log(), clock or SystemClock())) as reader:
        state, partition = reader.state, reader.log.partition
        now = _Now(state, reader.now())
        runs = state.completed.missing(0, state.next_offset)
        if not IN_THE_LOG & {*columns}:
            for part in _parts(runs):
                yield batch_of([_StateRows(now, part, partition).column(name) for name in columns], schema, count(part))
            return
        for made in _read(open_log, runs, partition, columns):
            told = _StateRows(now, made.runs, partition)
            arrays = [made.column(name) if name in IN_THE_LOG else told.column(name) for name in columns]
            yield batch_of(arrays, schema, made.rows)


def _read(open_log: OpenLog, runs: Sequence[int], partition: int, columns: Sequence[str]) -> Iterator[ItemRows]:
    with closing(open_log()) as log:
        for slices in grouped_slices(frame_slices(log, open_log, runs, strict=False), stored_columns(columns)):
            yield ItemRows(slices, partition)


def _parts(runs: Sequence[int]) -> Iterator[list[int]]:
    """Flat runs in stretches of ROWS offsets."""
    held: list[int] = []
    room = ROWS
    for start, stop in pairs(runs):
        while start < stop:
            end = min(stop, start + room)
            held += (start, end)
            room -= end - start
            start = end
            if not room:
                yield held
                held, room = [], ROWS
    if held:
        yield held


class _Now:
    """A partition's state, and what can be looked up in it for many items at a time."""

    def __init__(self, state: State, now: Moment) -> None:
        self.state = state
        self._now = now

    def wall(self, elapsed: int) -> int:
        """When that is, or was, by the clock on the wall."""
        return self._now.wall + elapsed - self._now.elapsed

    def lives(self, runs: Sequence[int]) -> list[tuple[int, int, ItemState]]:
        """(start, stop, state) of all offsets of the runs, in order."""
        state = self.state
        found: list[tuple[int, int, ItemState]] = []
        for start, stop in pairs(runs):
            ready = RunSet(state.outside_lanes.missing(start, stop))
            ready.add_all(state.passed_over.within(start, stop))
            known = {
                ItemState.READY: ready.runs,
                ItemState.SCHEDULED: state.scheduled.within(start, stop),
                ItemState.LEASED: state.leased_within(start, stop).runs,
                ItemState.BURIED: state.buried_set.within(start, stop),
                ItemState.MOVING: state.moving.within(start, stop),
                ItemState.COMPLETED: state.completed.within(start, stop),
            }
            found += sorted(((low, high, life) for life, its in known.items() for low, high in pairs(its)), key=itemgetter(0))
        return found

    @cached_property
    def _leased(self) -> tuple[list[int], list[tuple[int, int, LiveLease]]]:
        grants = self.state.leases.live.values()
        held = sorted(((start, stop, grant) for grant in grants for start, stop in pairs(grant.runs())), key=itemgetter(0))
        return [start for start, _, _ in held], held

    def grants(self, start: int, stop: int) -> Iterator[tuple[int, int, LiveLease]]:
        """Who holds the leased items [start, stop), in order."""
        starts, held = self._leased
        at = bisect_right(starts, start) - 1
        while start < stop:
            _, end, grant = held[at]
            yield start, min(stop, end), grant
            start, at = end, at + 1

    @cached_property
    def due(self) -> dict[int, int]:
        """offset → the wall time at which a scheduled item becomes ready."""
        found: dict[int, int] = {}
        scheduled = self.state.scheduled
        for calendar, wall in ((self.state.by_elapsed, self.wall), (self.state.by_wall, int)):
            for entry in calendar:
                for offset in offsets(scheduled.within(entry.start, entry.stop)):
                    found.setdefault(offset, wall(entry.when))
        return found


class _StateRows:
    """The columns that come from the state, not from the log, for the items of some runs."""

    def __init__(self, now: _Now, runs: list[int], partition: int) -> None:
        self._now = now
        self._runs = runs
        self._number = partition
        self._lives = now.lives(runs)
        self._counts = [stop - start for start, stop, _ in self._lives]

    def column(self, name: str) -> pa.Array:
        return _TELL[name](self)

    def id(self) -> pa.Array:
        return ids(self._number, self._runs)

    def partition(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._number, pa.int32()), count(self._runs))

    def offset(self) -> pa.Array:
        return offsets_of(self._runs)

    def state(self) -> pa.Array:
        return repeat_each([life.value for _, _, life in self._lives], self._counts, pa.string())

    def attempts(self) -> pa.Array:
        state = self._now.state
        if not state.failures and not state.burials:
            return repeat_each([int(life is ItemState.LEASED) for _, _, life in self._lives], self._counts, pa.int32())
        return pa.array([attempt_count(state, offset, life) for offset, life in self._each()], pa.int32())

    def reason(self) -> pa.Array:
        state = self._now.state
        if not state.failures and not state.burials:
            return pa.nulls(count(self._runs), pa.string())
        return pa.array([last_failure_reason(state, offset) or None for offset, _ in self._each()], pa.string())

    def consumer(self) -> pa.Array:
        return self._of_grants(lambda grant: grant.consumer or None, pa.string())

    def lease_until(self) -> pa.Array:
        return self._of_grants(lambda grant: self._now.wall(grant.deadline), pa.int64()).cast(INSTANT)

    def ready_at(self) -> pa.Array:
        found: list[int | None] = []
        for start, stop, life in self._lives:
            found += (
                [self._now.due.get(offset) for offset in range(start, stop)] if life is ItemState.SCHEDULED else [None] * (stop - start)
            )
        return pa.array(found, pa.int64()).cast(INSTANT)

    def _each(self) -> Iterator[tuple[int, ItemState]]:
        return ((offset, life) for start, stop, life in self._lives for offset in range(start, stop))

    def _of_grants(self, what: Callable[[LiveLease], Any], kind: pa.DataType) -> pa.Array:
        values: list[Any] = []
        counts: list[int] = []
        for start, stop, life in self._lives:
            if life is not ItemState.LEASED:
                values.append(None)
                counts.append(stop - start)
                continue
            for low, high, grant in self._now.grants(start, stop):
                values.append(what(grant))
                counts.append(high - low)
        return repeat_each(values, counts, kind)


_TELL: dict[str, Callable[[_StateRows], pa.Array]] = {
    "id": _StateRows.id,
    "partition": _StateRows.partition,
    "offset": _StateRows.offset,
    "state": _StateRows.state,
    "attempts": _StateRows.attempts,
    "reason": _StateRows.reason,
    "consumer": _StateRows.consumer,
    "ready_at": _StateRows.ready_at,
    "lease_until": _StateRows.lease_until,
}


def attempt_count(state: State, offset: int, life: ItemState) -> int:
    """How often an item was tried, the attempt that is under way included."""
    burial = state.burials.get(offset)
    return burial.attempts if burial is not None else state.attempts(offset) + (life is ItemState.LEASED)


def last_failure_reason(state: State, offset: int) -> str:
    """Why it was buried, or came back last."""
    known = state.burials.get(offset) or state.failures.get(offset)
    return known.reason if known is not None else ""
