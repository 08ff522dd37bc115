"""What happened to items, as record batches.

Owns: `events` (the table). Built from what loop/item_events.py tells, which is in runs: a batch of items that were leased together is told
once and costs the same however many they are. What is not known, or does not apply, is null.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import pyarrow as pa

from penstock.logs.frame import DROPPED
from penstock.logs.log import Frame, Gap, ReadableLog, SegmentFacts
from penstock.loop.item_events import frame_events
from penstock.rules.events import EventRuns, format_place
from penstock.rules.runs import count, first_of, offsets, pairs
from penstock.tables.arrays import ids, offsets_of, repeat_each
from penstock.tables.item_columns import ROWS
from penstock.tables.items import OpenLog
from penstock.tables.schemas import EVENTS, INSTANT, batch_of, select_columns
from penstock.words.errors import InvalidRequest


class _Entry(NamedTuple):
    """Some of the items of a happening: those from its item number `first` on that `runs` name."""

    sequence: int
    one: EventRuns
    runs: list[int]
    rows: int
    first: int


def events(
    open_log: OpenLog,
    start: int,
    stop: int,
    columns: Sequence[str],
    *,
    since: int | None = None,
    until: int | None = None,
    strict: bool = True,
) -> Iterator[pa.RecordBatch]:
    """What the frames of the sequences [start, stop) tell, of the times [since, until).

    strict: frames of this range that retention dropped or thinned out are an error; otherwise what is left of them is told.
    """
    schema = select_columns(EVENTS, columns)
    with closing(open_log()) as log:
        for entries in _gathered(_entries(log, start, stop, since, until, strict)):
            made = _EventRows(entries, log.partition)
            yield batch_of([made.column(name) for name in columns], schema, sum(entry.rows for entry in entries))


def _entries(log: ReadableLog, start: int, stop: int, since: int | None, until: int | None, strict: bool) -> Iterator[_Entry]:
    for sequence, happenings in frame_events(_Whole(log, start, stop) if strict else log, start, stop):
        for one in happenings:
            if (since is None or one.at >= since) and (until is None or one.at < until):
                yield from _cut(sequence, one)


def _cut(sequence: int, one: EventRuns) -> Iterator[_Entry]:
    """In entries of ROWS rows at most."""
    rows = count(one.runs)
    if rows <= ROWS:
        yield _Entry(sequence, one, one.runs, rows, 0)
        return
    index, runs = 0, one.runs
    while runs:
        part = first_of(runs, ROWS)
        yield _Entry(sequence, one, part, count(part), index)
        index += count(part)
        runs = _behind(runs, count(part))


def _behind(runs: Sequence[int], skipped: int) -> list[int]:
    """Flat runs without their first offsets."""
    left: list[int] = []
    for start, stop in pairs(runs):
        if skipped < stop - start:
            left += (start + skipped, stop)
        skipped = max(0, skipped - (stop - start))
    return left


class _Whole:
    """A log that says so when something of the sequences [start, stop) is gone.

    A segment that retention thinned out has no Base and no state any more, and of its items only those that are needed. One may be thinned
    out between two looks, so the frames are looked at too: none may be missing.
    """

    def __init__(self, log: ReadableLog, start: int, stop: int) -> None:
        self._log = log
        self._start = max(start, 1)  # where logs begin
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
        wanted = before + 1  # the Base of a segment, which goes first
        for found in self._log.frames(after):
            first, last = _sequences(found)
            if max(before + 1, wanted) < min(first, self._stop):
                raise self._gone(first)
            before, wanted = max(before, last), self._start
            yield found

    def _gone(self, first: int) -> InvalidRequest:
        last = max(self._start, min(first, self._stop) - 1)
        which = f"the log of partition {self.partition} does not tell sequences {self._start} to {last} any more"
        return InvalidRequest(f"{which}: retention took them; start later, or set failOnDataLoss=false to read what is left")


def _sequences(found: Frame | Gap) -> tuple[int, int]:
    """The first and the last one that something found accounts for; what retention dropped is not accounted for."""
    if isinstance(found, Gap):
        return found.last_sequence + 1 if found.why == DROPPED else found.first_sequence, found.last_sequence
    return found.sequence, found.sequence


def whole_from(segments: Sequence[SegmentFacts]) -> int:
    """The first sequence from which on retention has taken nothing; it thins out only from the oldest segment on."""
    return next((facts.first_sequence for facts in segments if not facts.rewritten), 1)


def _gathered(found: Iterator[_Entry]) -> Iterator[list[_Entry]]:
    held: list[_Entry] = []
    rows = 0
    for entry in found:
        if held and rows + entry.rows > ROWS:
            yield held
            held, rows = [], 0
        held.append(entry)
        rows += entry.rows
    if held:
        yield held


# -- columns -------------------------------------------------------------------------------------------


class _EventRows:
    """The columns of a record batch: those of some entries."""

    def __init__(self, entries: Sequence[_Entry], partition: int) -> None:
        self._entries = entries
        self._counts = [entry.rows for entry in entries]
        self._runs = [edge for entry in entries for edge in entry.runs]
        self._partition = partition

    def column(self, name: str) -> pa.Array:
        if name in _ALIKE:
            return repeat_each([_ALIKE[name](entry) for entry in self._entries], self._counts, EVENTS.field(name).type)
        found: pa.Array = getattr(self, name)()
        return found

    def id(self) -> pa.Array:
        return ids(self._partition, self._runs)

    def partition(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._partition, pa.int32()), sum(self._counts))

    def offset(self) -> pa.Array:
        return offsets_of(self._runs)

    def at(self) -> pa.Array:
        return repeat_each([entry.one.at for entry in self._entries], self._counts, pa.int64()).cast(INSTANT)

    def attempt(self) -> pa.Array:
        if not any(entry.one.attempts for entry in self._entries):
            return repeat_each([entry.one.attempt for entry in self._entries], self._counts, pa.int32())
        found: list[int] = []
        for _, one, runs, rows, _ in self._entries:
            usual, others = one.attempt, one.attempts
            found += [others.get(offset, usual) for offset in offsets(runs)] if others else [usual] * rows
        return pa.array(found, pa.int32())

    def destination(self) -> pa.Array:
        if not any(entry.one.destination for entry in self._entries):
            return pa.nulls(sum(self._counts), pa.string())
        return pa.array([text for entry in self._entries for text in _destinations(entry)], pa.string())


def _destinations(entry: _Entry) -> list[str | None]:
    one = entry.one
    if not one.destination:
        return [None] * entry.rows
    if one.base < 0:
        return [format_place(one.destination)] * entry.rows
    first = one.base + entry.first
    return [format_place(one.destination, offset) for offset in range(first, first + entry.rows)]


_ALIKE: dict[str, Callable[[_Entry], str | int | None]] = {
    "event": lambda entry: entry.one.event.value,
    "reason": lambda entry: entry.one.reason or None,
    "consumer": lambda entry: entry.one.consumer or None,
    "lease": lambda entry: f"{entry.one.lease:x}" if entry.one.lease else None,
    "source": lambda entry: format_place(entry.one.source) if entry.one.source else None,
    "sequence": lambda entry: entry.sequence,
}
"""Columns that are alike for all items of a happening."""
