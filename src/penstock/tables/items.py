"""Items as record batches, straight from the frames of a log.

Owns: `items` (the table) and `frame_slices` (the slices of frames that hold wanted items).
The columns of a large frame are its own buffers, not copied and not looped over; small frames are gathered (frames.py).
What retention blanked in a frame that it thinned out looks like an item with an empty payload: where one is met, the partition's state is
asked, as it is published by then. A blank is never written before the record that the item was dropped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs.columns import ORIGIN, FrameColumns
from penstock.logs.frame import DROPPED
from penstock.logs.log import Gap, ReadableLog
from penstock.loop.partition_reader import PartitionReader
from penstock.loop.recovery import missing_segment
from penstock.rules.events import PLACE_BYTES
from penstock.rules.outbox import unpack_destination
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import State
from penstock.tables.item_columns import FEW_ROWS, FrameSlice, ItemRows, grouped_slices, stored_columns
from penstock.tables.schemas import ITEMS, batch_of, select_columns
from penstock.words import origin
from penstock.words.clock import SystemClock
from penstock.words.errors import CorruptLog, InvalidRequest, StorageFailed
from penstock.words.limits import MIB
from penstock.words.origin import Origin

READ_BYTES = 1 * MIB
"""Frames are read so much at a time, about; one that is larger, alone."""

OpenLog: TypeAlias = Callable[[], ReadableLog]


def items(
    open_log: OpenLog, runs: Sequence[int], columns: Sequence[str], *, strict: bool = True, exact: bool = False, forwarded: bool = False
) -> Iterator[pa.RecordBatch]:
    """The items of flat runs of offsets, but for what was forwarded from another partition of the queue: it was there before.

    forwarded: those too.
    strict: items that are gone or damaged are an error; otherwise they are left out, as those are that retention let go here and there.
    exact: with strict, those are an error too: whoever chose the runs knew that they were there.
    """
    schema = select_columns(ITEMS, columns)
    with closing(open_log()) as log:
        found = frame_slices(log, open_log, runs, strict=strict, exact=exact)
        wanted = found if forwarded else (own for piece in found for own in _own(piece, log.incarnation))
        for slices in grouped_slices(wanted, stored_columns(columns)):
            made = ItemRows(slices, log.partition)
            yield batch_of([made.column(name) for name in columns], schema, made.rows)


def frame_slices(
    log: ReadableLog, open_log: OpenLog, runs: Sequence[int], *, strict: bool = True, exact: bool = False
) -> Iterator[FrameSlice]:
    """The slices of frames that hold the items of flat runs, without blanks."""
    state, frames = _Published(open_log, strict and exact), _Frames(log)
    try:
        for start, stop in pairs(runs):
            for found in frames.within(start, stop):
                first = max(start, found.start)
                if strict and start < first:
                    state.account_for(start, first)
                start = min(stop, found.stop)
                if isinstance(found, Gap):
                    if strict:
                        state.account_for_gap(found, first, start)
                elif _has_empty(found):
                    yield from found.cut(state.kept(found))
                else:
                    yield found
            if strict and start < stop:
                state.account_for(start, stop)
    finally:
        state.close()


class _Frames:
    """A log's frames, read in order. The last one is kept: many runs may lie in it."""

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self._last: tuple[FrameColumns, int] | None = None

    def within(self, start: int, stop: int) -> Iterator[FrameSlice | Gap]:
        """The slices of frames in [start, stop), and the gaps between them."""
        last = self._last
        if last is not None and last[0].base <= start < last[0].stop:
            piece = _slice(*last, start, stop)
            start = piece.start + piece.rows
            yield piece
        while start < stop:
            before = start
            for found in self._log.read(start, stop, READ_BYTES):
                if isinstance(found, Gap):
                    if start < found.stop:
                        yield found
                        start = found.stop
                    continue
                self._last = columns, present = FrameColumns(found), found.column_bits & 0xFFFF
                if start < columns.stop and columns.base < stop:
                    piece = _slice(columns, present, start, stop)
                    start = piece.start + piece.rows
                    yield piece
            if start == before:  # none is left
                return


def _slice(columns: FrameColumns, present: int, start: int, stop: int) -> FrameSlice:
    """The rows of a frame that are in [start, stop)."""
    return FrameSlice(columns, present, max(start, columns.base) - columns.base, min(stop, columns.stop) - columns.base)


class _Published:
    """The partition's state, as published by the time of asking."""

    def __init__(self, open_log: OpenLog, exact: bool) -> None:
        self._open_log = open_log
        self._exact = exact
        self._reader: PartitionReader | None = None
        self._asked: FrameColumns | None = None
        """The frame for which it was looked at last."""

    def kept(self, piece: FrameSlice) -> list[int]:
        """Runs of a slice that retention did not let go."""
        if self._reader is None or self._asked is not piece.columns:
            self._now()
            self._asked = piece.columns
        start, stop = piece.runs
        gone = self._open.state.dropped.within(start, stop)
        if gone and self._exact:
            raise self._went(gone)
        return self._open.state.dropped.missing(start, stop)

    def account_for(self, start: int, stop: int) -> None:
        """Say so if items are not there and the state does not know that they went, or they should be."""
        state = self._now()
        left = RunSet(state.dropped.missing(start, stop)).subtract(state.lost.runs)
        if left:
            which = f"items {left[0]} to {left[-1] - 1} are not in their log, which does not say that they went"
            raise StorageFailed(f"{which}; the queue was deleted, or its directory is an older copy: read again")
        if self._exact:
            raise self._went([start, stop])

    def account_for_gap(self, gap: Gap, start: int, stop: int) -> None:
        """Say so if the log has lost [start, stop) and no repair has said that it is so, or they should be there."""
        if gap.repaired:
            if self._exact:
                self._now()
                raise self._went([start, stop])
            return
        state = self._now()
        partition = self._open.log.partition
        which = f"items {partition}-{start} to {partition}-{stop - 1} cannot be read"
        leave = "or set failOnDataLoss=false to read what is left"
        why = missing_segment(gap) if state.dropped.missing(start, stop) else gap
        if why.why == DROPPED:
            raise InvalidRequest(f"{which}: retention dropped them; start at a later offset, {leave}")
        raise CorruptLog(f"{which}: {why.why} ({why.where}); run verify, then repair, {leave}")

    def _went(self, gone: Sequence[int]) -> InvalidRequest:
        partition = self._open.log.partition
        which = f"items {partition}-{gone[0]} to {partition}-{gone[-1] - 1} went by retention or damage"
        return InvalidRequest(f"{which} before they were read; set failOnDataLoss=false to go on without them, or start anew")

    @property
    def _open(self) -> PartitionReader:
        assert self._reader is not None  # `_now` opens it
        return self._reader

    def _now(self) -> State:
        if self._reader is None:
            self._reader = PartitionReader(self._open_log(), SystemClock())
        else:
            self._reader.refresh()
        return self._reader.state

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _has_empty(piece: FrameSlice) -> bool:
    """Whether a payload is empty."""
    edges, low, high = piece.columns.payload.offsets, piece.low, piece.high
    if high - low < FEW_ROWS:
        return any(edges[row] == edges[row + 1] for row in range(low, high))
    found: bool = pc.min_max(pc.binary_length(piece.array("payload")))["min"].as_py() == 0
    return found


def _own(piece: FrameSlice, incarnation: int) -> Iterable[FrameSlice]:
    """The slices that are not copies of what came from another partition of the same queue."""
    if not piece.present & ORIGIN:
        return (piece,)
    kept, sources = RunSet(), _sources(piece)
    for offset, packed, source in zip(range(*piece.runs), piece.values("origin"), sources, strict=True):
        if packed is None or not _forwarded(origin.decode(packed), source, incarnation):
            kept.add(offset, offset + 1)
    return piece.cut(kept.runs)


def _forwarded(known: Origin, source: bytes | None, incarnation: int) -> bool:
    """Whether an item came from another partition of its queue. The transfer that brought it tells, as long as retention has not touched
    the frame; its origin may also be one that it had long before, or that it has from another queue."""
    if source is not None and len(source) == PLACE_BYTES:
        return unpack_destination(source)[0] == incarnation
    return known.forwarded and known.incarnation == incarnation


def _sources(piece: FrameSlice) -> list[bytes | None]:
    """The transfer that brought each item."""
    every = [part.source for part in piece.columns.parts for _ in range(part.count)]
    return every[piece.low : piece.high]
