"""The table of states: the items that are not completed.

Owns: `state_rows`; `attempt_count` and `last_failure_reason`, which the table of dead letters uses too. The table shows
the partition's published state at the time of reading. Items are read from the log only for columns that are stored
there: counting items by state does not read them.
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
from penstock.tables.arrays import chunks, ids, offsets_of, repeat_each
from penstock.tables.item_columns import NEEDS, ROWS, ItemRows, grouped_slices, stored_columns
from penstock.tables.items import OpenLog, frame_slices
from penstock.tables.schemas import INSTANT, STATE, batch_of, select_columns
from penstock.words.clock import Clock, Moment, SystemClock

IN_THE_LOG = {*NEEDS, "produced_at"}
"""Columns that are read from the log, not from the state."""


def state_rows(open_log: OpenLog, columns: Sequence[str], *, clock: Clock | None = None) -> Iterator[pa.RecordBatch]:
    """The items of a partition that are not completed, in batches."""
    schema = select_columns(STATE, columns)
    with closing(PartitionReader(open_log(), clock or SystemClock())) as reader:
        state, partition = reader.state, reader.log.partition
        lookup = _StateLookup(state, reader.now())
        runs = state.completed.missing(0, state.next_offset)
        if not IN_THE_LOG & {*columns}:
            for chunk in chunks(runs, ROWS):
                yield batch_of([_StateRows(lookup, chunk, partition).column(name) for name in columns], schema, count(chunk))
            return
        for items in _read(open_log, runs, partition, columns):
            states = _StateRows(lookup, items.runs, partition)
            arrays = [items.column(name) if name in IN_THE_LOG else states.column(name) for name in columns]
            yield batch_of(arrays, schema, items.rows)


def _read(open_log: OpenLog, runs: Sequence[int], partition: int, columns: Sequence[str]) -> Iterator[ItemRows]:
    with closing(open_log()) as log:
        for slices in grouped_slices(frame_slices(log, open_log, runs, strict=False), stored_columns(columns)):
            yield ItemRows(slices, partition)


class _StateLookup:
    """Lookups in a partition's state for many items at a time."""

    def __init__(self, state: State, now: Moment) -> None:
        self.state = state
        self._now = now

    def wall(self, elapsed: int) -> int:
        """The wall time of an elapsed time."""
        return self._now.wall + elapsed - self._now.elapsed

    def item_states(self, runs: Sequence[int]) -> list[tuple[int, int, ItemState]]:
        """(start, stop, state) of all offsets of the runs, sorted by offset."""
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
                ItemState.COMPLETED: RunSet(state.completed.within(start, stop)).subtract(state.cancelled.within(start, stop)),
                ItemState.CANCELLED: state.cancelled.within(start, stop),
            }
            found += sorted(((low, high, item_state) for item_state, its in known.items() for low, high in pairs(its)), key=itemgetter(0))
        return found

    @cached_property
    def _leased(self) -> tuple[list[int], list[tuple[int, int, LiveLease]]]:
        """The leased runs, sorted: their starts, and (start, stop, lease) of each."""
        leases = self.state.leases.live.values()
        leased = sorted(((start, stop, lease) for lease in leases for start, stop in pairs(lease.runs())), key=itemgetter(0))
        return [start for start, _, _ in leased], leased

    def leases(self, start: int, stop: int) -> Iterator[tuple[int, int, LiveLease]]:
        """The leases of the items [start, stop), all of which are leased: (start, stop, lease), sorted by offset."""
        starts, leased = self._leased
        index = bisect_right(starts, start) - 1
        while start < stop:
            _, end, lease = leased[index]
            yield start, min(stop, end), lease
            start, index = end, index + 1

    @cached_property
    def due(self) -> dict[int, int]:
        """The wall time at which each scheduled item becomes ready, by offset."""
        found: dict[int, int] = {}
        for calendar, by_wall, wall in ((self.state.by_elapsed, False, self.wall), (self.state.by_wall, True, int)):
            part = self.state.due_by(by_wall)
            for entry in calendar:
                for offset in offsets(part(entry)):
                    found.setdefault(offset, wall(entry.when))
        return found


class _StateRows:
    """The columns that come from the state, not from the log, for the items at some runs."""

    def __init__(self, lookup: _StateLookup, runs: list[int], partition: int) -> None:
        self._lookup = lookup
        self._runs = runs
        self._number = partition
        self._item_states = lookup.item_states(runs)
        self._counts = [stop - start for start, stop, _ in self._item_states]

    def column(self, name: str) -> pa.Array:
        return _COLUMNS[name](self)

    def id(self) -> pa.Array:
        return ids(self._number, self._runs)

    def partition(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._number, pa.int32()), count(self._runs))

    def offset(self) -> pa.Array:
        return offsets_of(self._runs)

    def state(self) -> pa.Array:
        return repeat_each([item_state.value for _, _, item_state in self._item_states], self._counts, pa.string())

    def attempts(self) -> pa.Array:
        state = self._lookup.state
        if not state.failures and not state.burials:
            return repeat_each([int(item_state is ItemState.LEASED) for _, _, item_state in self._item_states], self._counts, pa.int32())
        return pa.array([attempt_count(state, offset, item_state) for offset, item_state in self._each()], pa.int32())

    def reason(self) -> pa.Array:
        state = self._lookup.state
        if not state.failures and not state.burials:
            return pa.nulls(count(self._runs), pa.string())
        return pa.array([last_failure_reason(state, offset) or None for offset, _ in self._each()], pa.string())

    def consumer(self) -> pa.Array:
        return self._of_leases(lambda lease: lease.consumer or None, pa.string())

    def lease_until(self) -> pa.Array:
        return self._of_leases(lambda lease: self._lookup.wall(lease.deadline), pa.int64()).cast(INSTANT)

    def ready_at(self) -> pa.Array:
        found: list[int | None] = []
        for start, stop, item_state in self._item_states:
            scheduled = item_state is ItemState.SCHEDULED
            found += [self._lookup.due.get(offset) for offset in range(start, stop)] if scheduled else [None] * (stop - start)
        return pa.array(found, pa.int64()).cast(INSTANT)

    def _each(self) -> Iterator[tuple[int, ItemState]]:
        return ((offset, item_state) for start, stop, item_state in self._item_states for offset in range(start, stop))

    def _of_leases(self, value_of: Callable[[LiveLease], Any], kind: pa.DataType) -> pa.Array:
        """A column that has values for leased items only."""
        values: list[Any] = []
        counts: list[int] = []
        for start, stop, item_state in self._item_states:
            if item_state is not ItemState.LEASED:
                values.append(None)
                counts.append(stop - start)
                continue
            for low, high, lease in self._lookup.leases(start, stop):
                values.append(value_of(lease))
                counts.append(high - low)
        return repeat_each(values, counts, kind)


_COLUMNS: dict[str, Callable[[_StateRows], pa.Array]] = {
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


def attempt_count(state: State, offset: int, item_state: ItemState) -> int:
    """The number of attempts of an item, including the current one if it is leased."""
    burial = state.burials.get(offset)
    return burial.attempts if burial is not None else state.attempts(offset) + (item_state is ItemState.LEASED)


def last_failure_reason(state: State, offset: int) -> str:
    """Why an item was buried or last retried; "" if it never failed."""
    known = state.burials.get(offset) or state.failures.get(offset)
    return known.reason if known is not None else ""
