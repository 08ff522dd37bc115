"""The table of events: what happened to items.

Owns: `events`, and `frame_rows`, which counts its rows by frame. It is built from the runs that
`loop.item_events.frame_events` returns: an event that happened to many items at once is one entry, and costs the same
however many they are. A value that is not known, or does not apply, is null.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import pyarrow as pa

from penstock.logs.frame import DROPPED
from penstock.logs.log import Frame, Gap, ReadableLog, SegmentFacts
from penstock.loop.item_events import frame_events
from penstock.rules.events import EventRuns, format_place
from penstock.rules.runs import count, offsets, pairs
from penstock.tables.arrays import chunks, ids, offsets_of, repeat_each
from penstock.tables.item_columns import ROWS
from penstock.tables.items import OpenLog
from penstock.tables.schemas import EVENTS, INSTANT, batch_of, select_columns
from penstock.words.errors import InvalidRequest


class FrameRows(NamedTuple):
    """A number of rows of one frame."""

    sequence: int
    rows: int


class _Entry(NamedTuple):
    """Some items of one event."""

    sequence: int
    event: EventRuns
    runs: list[int]
    rows: int
    first: int
    """The index of the first of them among all items of the event."""


def events(
    open_log: OpenLog,
    start: int,
    stop: int,
    columns: Sequence[str],
    *,
    skip: int = 0,
    rows: int = 0,
    since: int | None = None,
    until: int | None = None,
    strict: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The events in the frames with sequences [start, stop), in batches. `since` and `until` limit their wall times.

    skip: leave out the first rows of the frame `start`.
    rows: add the first rows of the frame `stop`.
    strict: raise an error if retention has dropped or thinned out frames of this range. Otherwise return what is left.
    """
    schema = select_columns(EVENTS, columns)
    with closing(open_log()) as log:
        found = _entries(log, FrameRows(start, skip), FrameRows(stop, rows), strict)
        timely = (entry for entry in found if (since is None or entry.event.at >= since) and (until is None or entry.event.at < until))
        for entries in _grouped(timely):
            event_rows = _EventRows(entries, log.partition)
            yield batch_of([event_rows.column(name) for name in columns], schema, sum(entry.rows for entry in entries))


def frame_rows(open_log: OpenLog, start: int, stop: int, *, strict: bool = True) -> Iterator[FrameRows]:
    """The frames with sequences [start, stop) that have rows in the table, and how many."""
    with closing(open_log()) as log:
        for sequence, found in frame_events(_StrictLog(log, start, stop) if strict else log, start, stop):
            yield FrameRows(sequence, sum(count(event.runs) for event in found))


def _entries(log: ReadableLog, start: FrameRows, end: FrameRows, strict: bool) -> Iterator[_Entry]:
    """The events between two places in a log, as entries of at most ROWS rows."""
    stop = end.sequence + (end.rows > 0)
    for sequence, found in frame_events(_StrictLog(log, start.sequence, stop) if strict else log, start.sequence, stop):
        skip = start.rows if sequence == start.sequence else 0
        left = end.rows if sequence == end.sequence else None
        for event in found:
            runs, total = event.runs, count(event.runs)
            first, last = min(skip, total), total if left is None else min(left, total)
            skip, left = skip - first, None if left is None else left - last
            if first or last < total:
                runs = _rows_between(runs, first, last)
            for part in chunks(runs, ROWS):
                rows = count(part)
                yield _Entry(sequence, event, part, rows, first)
                first += rows


def _rows_between(runs: Sequence[int], first: int, last: int) -> list[int]:
    """Flat runs without the items before the index `first` and from the index `last` on."""
    found: list[int] = []
    index = 0
    for start, stop in pairs(runs):
        low, high = max(start, start + first - index), min(stop, start + last - index)
        if low < high:
            found += (low, high)
        index += stop - start
    return found


class _StrictLog:
    """A log that raises an error if frames of the sequences [start, stop) are missing.

    A segment that retention thinned out has lost its Base and its state records, and keeps only some of its items. That
    can also happen between `segments` and `frames`, so `frames` checks that no sequence is missing.
    """

    def __init__(self, log: ReadableLog, start: int, stop: int) -> None:
        self._log = log
        self._start = max(start, 1)  # the first sequence of a log
        self._stop = stop
        self._oldest = 1
        self.incarnation, self.partition, self.findings = log.incarnation, log.partition, log.findings
        self.where = log.where
        self.recover, self.read, self.offset_at, self.close = log.recover, log.read, log.offset_at, log.close
        self.readable_range, self.size_bytes = log.readable_range, log.size_bytes

    @property
    def first_offset(self) -> int:
        return self._log.first_offset

    def segments(self) -> list[SegmentFacts]:
        found = self._log.segments()
        whole = whole_from(found)
        if self._start < min(whole, self._stop):
            raise self._gone(whole)
        self._oldest = found[0].first_sequence if found else 1
        return found

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        before = max(after, self._oldest - 1)
        wanted = before + 1  # the Base of a segment, its first frame
        for found in self._log.frames(after):
            first, last = _sequences(found)
            if max(before + 1, wanted) < min(first, self._stop):
                raise self._gone(first)
            before, wanted = max(before, last), self._start
            yield found

    def _gone(self, first: int) -> InvalidRequest:
        last = max(self._start, min(first, self._stop) - 1)
        which = f"sequences {self._start} to {last} of partition {self.partition} cannot be read"
        return InvalidRequest(f"{which}: retention deleted them; start later, or set failOnDataLoss=false to read what is left")


def _sequences(found: Frame | Gap) -> tuple[int, int]:
    """The first and the last sequence that a frame or gap stands for. A gap of retention stands for none."""
    if isinstance(found, Gap):
        return found.last_sequence + 1 if found.why == DROPPED else found.first_sequence, found.last_sequence
    return found.sequence, found.sequence


def whole_from(segments: Sequence[SegmentFacts]) -> int:
    """The first sequence that retention has not thinned out. It thins out the oldest segments first."""
    return next((facts.first_sequence for facts in segments if not facts.rewritten), 1)


def _grouped(entries: Iterator[_Entry]) -> Iterator[list[_Entry]]:
    """The entries of each record batch."""
    group: list[_Entry] = []
    rows = 0
    for entry in entries:
        if group and rows + entry.rows > ROWS:
            yield group
            group, rows = [], 0
        group.append(entry)
        rows += entry.rows
    if group:
        yield group


# -- columns -------------------------------------------------------------------------------------------


class _EventRows:
    """The columns of one record batch."""

    def __init__(self, entries: Sequence[_Entry], partition: int) -> None:
        self._entries = entries
        self._counts = [entry.rows for entry in entries]
        self._runs = [edge for entry in entries for edge in entry.runs]
        self._partition = partition

    def column(self, name: str) -> pa.Array:
        if name in _COMMON:
            return repeat_each([_COMMON[name](entry) for entry in self._entries], self._counts, EVENTS.field(name).type)
        found: pa.Array = getattr(self, name)()
        return found

    def id(self) -> pa.Array:
        return ids(self._partition, self._runs)

    def partition(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._partition, pa.int32()), sum(self._counts))

    def offset(self) -> pa.Array:
        return offsets_of(self._runs)

    def at(self) -> pa.Array:
        return repeat_each([entry.event.at for entry in self._entries], self._counts, pa.int64()).cast(INSTANT)

    def attempt(self) -> pa.Array:
        if not any(entry.event.attempts for entry in self._entries):
            return repeat_each([entry.event.attempt for entry in self._entries], self._counts, pa.int32())
        found: list[int] = []
        for _, event, runs, rows, _ in self._entries:
            usual, others = event.attempt, event.attempts
            found += [others.get(offset, usual) for offset in offsets(runs)] if others else [usual] * rows
        return pa.array(found, pa.int32())

    def destination(self) -> pa.Array:
        if not any(entry.event.destination for entry in self._entries):
            return pa.nulls(sum(self._counts), pa.string())
        return pa.array([text for entry in self._entries for text in _destinations(entry)], pa.string())


def _destinations(entry: _Entry) -> list[str | None]:
    event = entry.event
    if not event.destination:
        return [None] * entry.rows
    if event.base < 0:
        return [format_place(event.destination)] * entry.rows
    first = event.base + entry.first
    return [format_place(event.destination, offset) for offset in range(first, first + entry.rows)]


_COMMON: dict[str, Callable[[_Entry], str | int | None]] = {
    "event": lambda entry: entry.event.event.value,
    "reason": lambda entry: entry.event.reason or None,
    "consumer": lambda entry: entry.event.consumer or None,
    "lease": lambda entry: f"{entry.event.lease:x}" if entry.event.lease else None,
    "source": lambda entry: format_place(entry.event.source) if entry.event.source else None,
    "sequence": lambda entry: entry.sequence,
}
"""Columns that have the same value for all items of an event."""
