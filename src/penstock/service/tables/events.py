"""What happened to items, as record batches.

Owns: `events` (the table). Built from what loop/history.py tells, which is in runs: a batch of items that were leased together is told
once and costs the same however many they are. What is not known, or does not apply, is null.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import pyarrow as pa

from penstock.logs.api import Frame, Gap, Readable, SegmentFacts
from penstock.logs.marks import DROPPED
from penstock.loop.history import told
from penstock.rules.events import Happening, place_text
from penstock.rules.runs import count, first_of, offsets, pairs
from penstock.service.tables.building import ids, offsets_of, spread
from penstock.service.tables.items import OpenLog
from penstock.service.tables.parts import ROWS
from penstock.service.tables.schemas import EVENTS, INSTANT, narrowed
from penstock.words.errors import InvalidRequest


class _Entry(NamedTuple):
    """Some of the items of a happening: those from its item number `first` on that `runs` name."""

    sequence: int
    one: Happening
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

    strict: frames of this range that retention dropped are an error; otherwise they are left out.
    """
    schema = narrowed(EVENTS, columns)
    with closing(open_log()) as log:
        for entries in _gathered(_entries(log, start, stop, since, until, strict)):
            yield _build(entries, log.partition, schema)


def _entries(log: Readable, start: int, stop: int, since: int | None, until: int | None, strict: bool) -> Iterator[_Entry]:
    for sequence, happenings in told(_Whole(log, start) if strict else log, start, stop):
        for one in happenings:
            if (since is None or one.at >= since) and (until is None or one.at < until):
                yield from _cut(sequence, one)


def _cut(sequence: int, one: Happening) -> Iterator[_Entry]:
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
    """A log that says so when frames from a sequence on are gone."""

    def __init__(self, log: Readable, start: int) -> None:
        self._log = log
        self._start = max(start, 1)  # where logs begin
        self.incarnation, self.partition, self.notes = log.incarnation, log.partition, log.notes
        self.recover, self.read, self.offset_at, self.close = log.recover, log.read, log.offset_at, log.close

    def segments(self) -> list[SegmentFacts]:
        found = self._log.segments()
        if found and found[0].first_sequence > self._start:
            raise self._gone(found[0].first_sequence - 1)
        return found

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        for found in self._log.frames(after):
            if isinstance(found, Gap) and found.why == DROPPED and found.last_sequence >= self._start:
                raise self._gone(found.last_sequence)
            yield found

    def _gone(self, last: int) -> InvalidRequest:
        which = f"the log of partition {self.partition} does not tell sequences {self._start} to {last} any more"
        return InvalidRequest(f"{which}: retention dropped them; start later, or set failOnDataLoss=false to read what is left")


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


class _Building:
    """The rows of some entries."""

    def __init__(self, entries: Sequence[_Entry], partition: int) -> None:
        self._entries = entries
        self._counts = [entry.rows for entry in entries]
        self._runs = [edge for entry in entries for edge in entry.runs]
        self._partition = partition

    def column(self, name: str) -> pa.Array:
        if name in _ALIKE:
            return spread([_ALIKE[name](entry) for entry in self._entries], self._counts, EVENTS.field(name).type)
        found: pa.Array = getattr(self, name)()
        return found

    def id(self) -> pa.Array:
        return ids(self._partition, self._runs)

    def partition(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._partition, pa.int32()), sum(self._counts))

    def offset(self) -> pa.Array:
        return offsets_of(self._runs)

    def at(self) -> pa.Array:
        return spread([entry.one.at for entry in self._entries], self._counts, pa.int64()).cast(INSTANT)

    def attempt(self) -> pa.Array:
        if not any(entry.one.attempts for entry in self._entries):
            return spread([entry.one.attempt for entry in self._entries], self._counts, pa.int32())
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
        return [place_text(one.destination)] * entry.rows
    first = one.base + entry.first
    return [place_text(one.destination, offset) for offset in range(first, first + entry.rows)]


_ALIKE: dict[str, Callable[[_Entry], str | int | None]] = {
    "event": lambda entry: entry.one.event.value,
    "reason": lambda entry: entry.one.reason or None,
    "consumer": lambda entry: entry.one.consumer or None,
    "lease": lambda entry: f"{entry.one.lease:x}" if entry.one.lease else None,
    "source": lambda entry: place_text(entry.one.source) if entry.one.source else None,
    "sequence": lambda entry: entry.sequence,
}
"""Columns that are alike for all items of a happening."""


def _build(entries: Sequence[_Entry], partition: int, schema: pa.Schema) -> pa.RecordBatch:
    made = _Building(entries, partition)
    return pa.RecordBatch.from_arrays([made.column(name) for name in schema.names], schema=schema)
