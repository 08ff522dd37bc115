"""The table of items, read from the frames of a log.

Owns: `items` and `frame_slices` (the slices of frames that hold wanted items).
The columns of a large frame are views of its buffers, neither copied nor looped over; small frames are combined
(item_columns.py). Retention blanks items in a frame that it thins out. A blanked item looks like one with an empty
payload, so where a payload is empty, the partition's published state decides. That is safe: retention records that it
dropped an item before it writes the blank.
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
"""About how much is read at a time. A larger frame is read alone."""

OpenLog: TypeAlias = Callable[[], ReadableLog]


def items(
    open_log: OpenLog,
    runs: Sequence[int],
    columns: Sequence[str],
    *,
    walls: tuple[int, int] | None = None,
    strict: bool = True,
    exact: bool = False,
    forwarded: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The items at flat runs of offsets, in batches.

    An item that was forwarded from another partition of the queue is left out: it is read in the partition where it was
    produced.

    walls: only items produced from the one time on, before the other.
    strict: raise an error if items are missing or damaged. Otherwise they are left out. Single items that retention
        dropped are left out in both cases.
    exact: with strict, raise an error for those too. For callers that know that the items existed.
    forwarded: return forwarded items too.
    """
    schema = select_columns(ITEMS, columns)
    with closing(open_log()) as log:
        found = frame_slices(log, open_log, runs, strict=strict, exact=exact)
        if walls is not None:
            found = (piece for piece in found if walls[0] <= piece.columns.wall < walls[1])
        wanted = found if forwarded else (kept for piece in found for kept in _not_forwarded(piece, log.incarnation))
        for slices in grouped_slices(wanted, stored_columns(columns)):
            rows = ItemRows(slices, log.partition)
            yield batch_of([rows.column(name) for name in columns], schema, rows.rows)


def frame_slices(
    log: ReadableLog, open_log: OpenLog, runs: Sequence[int], *, strict: bool = True, exact: bool = False
) -> Iterator[FrameSlice]:
    """The slices of frames that hold the items at flat runs of offsets, without blanked items. See `items`."""
    state, frames = _PublishedState(open_log, strict and exact), _FrameReader(log)
    try:
        for start, stop in pairs(runs):
            for found in frames.within(start, stop):
                first = max(start, found.start)
                if strict and start < first:
                    state.check_missing(start, first)
                start = min(stop, found.stop)
                if isinstance(found, Gap):
                    if strict:
                        state.check_gap(found, first, start)
                elif _has_empty(found):
                    yield from found.cut(state.kept(found))
                else:
                    yield found
            if strict and start < stop:
                state.check_missing(start, stop)
    finally:
        state.close()


class _FrameReader:
    """Reads the frames of a log in order. Keeps the last one, because many runs may be in one frame."""

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self._last: tuple[FrameColumns, int] | None = None

    def within(self, start: int, stop: int) -> Iterator[FrameSlice | Gap]:
        """The slices of frames with the offsets [start, stop), and the gaps between them."""
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
            if start == before:  # there are no more frames
                return


def _slice(columns: FrameColumns, present: int, start: int, stop: int) -> FrameSlice:
    """The rows of a frame with the offsets [start, stop)."""
    return FrameSlice(columns, present, max(start, columns.base) - columns.base, min(stop, columns.stop) - columns.base)


class _PublishedState:
    """The published state of the partition, read only if it is needed, and again for each frame that needs it."""

    def __init__(self, open_log: OpenLog, exact: bool) -> None:
        self._open_log = open_log
        self._exact = exact
        self._reader: PartitionReader | None = None
        self._asked: FrameColumns | None = None
        """The frame for which the state was last read."""

    def kept(self, piece: FrameSlice) -> list[int]:
        """The flat runs of a slice that retention has not dropped."""
        if self._reader is None or self._asked is not piece.columns:
            self._refresh()
            self._asked = piece.columns
        start, stop = piece.runs
        dropped = self._open.state.dropped.within(start, stop)
        if dropped and self._exact:
            raise self._deleted(dropped)
        return self._open.state.dropped.missing(start, stop)

    def check_missing(self, start: int, stop: int) -> None:
        """Raise an error if items that no frame holds were neither dropped nor lost, or with `exact`, in any case."""
        state = self._refresh()
        left = RunSet(state.dropped.missing(start, stop)).subtract(state.lost.runs)
        if left:
            which = f"items {left[0]} to {left[-1] - 1} are missing in the log, and no record says why"
            raise StorageFailed(f"{which}; the queue was deleted, or its directory is an older copy: read again")
        if self._exact:
            raise self._deleted([start, stop])

    def check_gap(self, gap: Gap, start: int, stop: int) -> None:
        """Raise an error for the items [start, stop) of a gap, unless a repair has recorded it and `exact` is off."""
        if gap.repaired:
            if self._exact:
                self._refresh()
                raise self._deleted([start, stop])
            return
        state = self._refresh()
        partition = self._open.log.partition
        which = f"items {partition}-{start} to {partition}-{stop - 1} cannot be read"
        skip = "or set failOnDataLoss=false to read what is left"
        why = missing_segment(gap) if state.dropped.missing(start, stop) else gap
        if why.why == DROPPED:
            raise InvalidRequest(f"{which}: retention dropped them; start at a later offset, {skip}")
        raise CorruptLog(f"{which}: {why.why} ({why.where}); run verify, then repair, {skip}")

    def _deleted(self, runs: Sequence[int]) -> InvalidRequest:
        partition = self._open.log.partition
        which = f"items {partition}-{runs[0]} to {partition}-{runs[-1] - 1} were lost to retention or damage"
        return InvalidRequest(f"{which} before they were read; set failOnDataLoss=false to continue without them, or start anew")

    @property
    def _open(self) -> PartitionReader:
        assert self._reader is not None  # `_refresh` opens it
        return self._reader

    def _refresh(self) -> State:
        """The state as it is published now."""
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


def _not_forwarded(piece: FrameSlice, incarnation: int) -> Iterable[FrameSlice]:
    """The slices of the items that did not come from another partition of the same queue."""
    if not piece.present & ORIGIN:
        return (piece,)
    kept, sources = RunSet(), _sources(piece)
    for offset, packed, source in zip(range(*piece.runs), piece.values("origin"), sources, strict=True):
        if packed is None or not _forwarded(origin.decode(packed), source, incarnation):
            kept.add(offset, offset + 1)
    return piece.cut(kept.runs)


def _forwarded(known: Origin, source: bytes | None, incarnation: int) -> bool:
    """Whether an item came from another partition of its queue.

    The source of its transfer says so, unless retention has rewritten the frame. The origin alone is less certain: it
    may be older than the last transfer, or of another queue.
    """
    if source is not None and len(source) == PLACE_BYTES:
        return unpack_destination(source)[0] == incarnation
    return known.forwarded and known.incarnation == incarnation


def _sources(piece: FrameSlice) -> list[bytes | None]:
    """The packed source of the transfer that brought each item; None if it was produced."""
    every = [part.source for part in piece.columns.parts for _ in range(part.count)]
    return every[piece.low : piece.high]
