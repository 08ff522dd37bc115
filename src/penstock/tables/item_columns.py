"""Items of frames as the columns of tables.

Owns: `FrameSlice` (items that follow each other in one frame, as views of its buffers), `SmallSlices` (items of many small frames, as
values: for those that is quicker), `gathered` (slices that go out together as one record batch), `ItemRows` (the columns of such a batch,
each made when it is asked for) and `stored` (which columns of frames are needed for them).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs.arrow_batch import TYPES, binary_array
from penstock.logs.columns import BITS as BITS_OF_FRAMES
from penstock.logs.columns import BinaryColumn, ConstantColumn, DigestColumn, FrameColumns
from penstock.rules.runs import pairs
from penstock.tables import schemas
from penstock.tables.arrays import ids, nulls, offsets_of, repeat_each, repeated, scalar, shared_constant
from penstock.tables.schemas import HEADERS, INSTANT
from penstock.words import origin, values
from penstock.words.fields import BY_NAME, FIELDS, STORED, ColumnLayout
from penstock.words.limits import DEFAULT_PRIORITY, MIB
from penstock.words.origin import Origin

ROWS: Final = 10_000
"""Rows of a batch, about: less where payloads are large, and a large part of a frame goes out alone."""
BATCH_BYTES = 4 * MIB
LARGE_ROWS = 4_096
LARGE_BYTES = 1 * MIB
"""A part of a frame as large as this is worth a batch of its own, which costs no copy."""
FEW_ROWS = 64
"""Below so many rows, values cost less than views."""
BITS: Final = {"payload": 0, **BITS_OF_FRAMES}
"""Set where a frame has the column; 0: every frame has."""
NOTHING: Final = {field.name: None if field.name == "payload" else column.missing_value for field, column in STORED}
"""What an item has in a column that says nothing of it."""
NEEDS: Final = {field.name: field.source or field.name for field in FIELDS if field.source or field.stored is not None}
"""The stored column that a column is made of."""


class FrameSlice(NamedTuple):
    """Items that follow each other in one frame: its rows [low, high)."""

    columns: FrameColumns
    present: int
    """Bits of the columns that the frame has."""
    low: int
    high: int

    @property
    def rows(self) -> int:
        return self.high - self.low

    @property
    def start(self) -> int:
        """The offset of the first item."""
        return self.columns.base + self.low

    @property
    def stop(self) -> int:
        """The offset behind the last item."""
        return self.start + self.rows

    @property
    def runs(self) -> list[int]:
        return [self.start, self.stop]

    @property
    def walls(self) -> list[tuple[int, int]]:
        """When the items were produced: (wall time, how many)."""
        return [(self.columns.wall, self.rows)]

    def cut(self, runs: Sequence[int]) -> "list[FrameSlice]":
        """The slices of it that lie in runs of offsets."""
        base = self.columns.base
        return [self._replace(low=start - base, high=stop - base) for start, stop in pairs(runs)]

    def array(self, name: str) -> pa.Array:
        """Rows of a stored column, as they lie in the frame."""
        column, kind = self.columns.column(name), TYPES[name]
        if column is None:
            return repeated(NOTHING[name], kind, self.rows)
        if isinstance(column, ConstantColumn):
            return repeated(column.value, kind, self.rows)
        if isinstance(column, BinaryColumn):
            return binary_array(column, self.low, self.high, kind)
        assert not isinstance(column, DigestColumn)  # no table has them
        return pa.Array.from_buffers(kind, self.rows, [None, pa.py_buffer(column.numbers)], offset=self.low)

    def values(self, name: str) -> list[Any]:
        """The same as values."""
        column = self.columns.column(name)
        return [NOTHING[name]] * self.rows if column is None else [*column.values(self.low, self.high)]


class SmallSlices:
    """Items of small slices, taken out of their frames one after the other."""

    def __init__(self, wanted: Iterable[str]) -> None:
        """`wanted`: the stored columns that will be asked for."""
        self.rows = 0
        self.present = 0
        self.runs: list[int] = []
        self.walls: list[tuple[int, int]] = []
        self._wanted = list(wanted)
        self._values: dict[str, list[Any]] = {}

    def add(self, piece: FrameSlice) -> None:
        columns, present, low, high = piece
        start, rows = columns.base + low, high - low
        if self.runs and self.runs[-1] == start:
            self.runs[-1] = start + rows
        else:
            self.runs += (start, start + rows)
        self.walls.append((columns.wall, rows))
        self.present |= present
        for name in self._wanted:
            column = columns.column(name)
            if column is None:
                continue
            values = self._values.get(name)
            if values is None:
                values = self._values[name] = []
            if len(values) < self.rows:  # the slices before had none
                values += [NOTHING[name]] * (self.rows - len(values))
            values += column.values(low, high)
        self.rows += rows

    def array(self, name: str) -> pa.Array:
        return pa.array(self.values(name), TYPES[name])

    def values(self, name: str) -> list[Any]:
        found = self._values.get(name, [])
        return found + [NOTHING[name]] * (self.rows - len(found))


Slice: TypeAlias = FrameSlice | SmallSlices


def grouped_slices(slices: Iterable[FrameSlice], wanted: Sequence[str]) -> Iterator[list[Slice]]:
    """Slices for one record batch each, in order: many small ones, or one that is large."""
    held: list[Slice] = []
    rows = size = 0
    for piece in slices:
        count = piece.high - piece.low
        edges = piece.columns.payload.offsets
        more = edges[piece.high] - edges[piece.low]
        large = count >= LARGE_ROWS or more >= LARGE_BYTES
        if held and (large or rows + count > ROWS or size + more > BATCH_BYTES):
            yield held
            held, rows, size = [], 0, 0
        if large:
            yield [piece]
            continue
        if count >= FEW_ROWS:
            held.append(piece)
        else:
            last = held[-1] if held else None
            if not isinstance(last, SmallSlices):
                last = SmallSlices(wanted)
                held.append(last)
            last.add(piece)
        rows, size = rows + count, size + more
    if held:
        yield held


def stored_columns(columns: Sequence[str]) -> list[str]:
    """The stored columns that those columns are made of."""
    return list(dict.fromkeys(NEEDS[name] for name in columns if name in NEEDS))


class ItemRows:
    """The columns of a record batch of items: those of some slices of one partition's frames."""

    def __init__(self, slices: Sequence[Slice], partition: int) -> None:
        self._slices = slices
        self.rows = sum(one.rows for one in slices)
        self._partition = partition
        self._present = 0
        for one in slices:
            self._present |= one.present

    def column(self, name: str) -> pa.Array:
        """A column by its name in the tables."""
        if name in _MAKE:
            return _MAKE[name](self)
        column = BY_NAME[name].stored
        return self._numbers(name) if column is not None and column.layout is ColumnLayout.NUMBERS else self._joined(name)

    @cached_property
    def runs(self) -> list[int]:
        """Flat runs of the items' offsets."""
        found: list[int] = []
        for one in self._slices:
            more = one.runs
            if found and found[-1] == more[0]:
                found[-1] = more[1]
                more = more[2:]
            found += more
        return found

    @cached_property
    def offsets(self) -> pa.Array:
        return offsets_of(self.runs)

    def id(self) -> pa.Array:
        return ids(self._partition, self.runs)

    def partition(self) -> pa.Array:
        return shared_constant(self._partition, pa.int32(), self.rows)

    def size_bytes(self) -> pa.Array:
        return pc.binary_length(self._joined("payload")).cast(pa.int64())

    def priority(self) -> pa.Array:
        if not self._present & BITS["priority"]:
            return shared_constant(DEFAULT_PRIORITY, pa.int32(), self.rows)
        return self._joined("priority").cast(pa.int32())

    def produced_at(self) -> pa.Array:
        walls, counts = zip(*(wall for one in self._slices for wall in one.walls), strict=True)
        return repeat_each(walls, counts, pa.int64()).cast(INSTANT)

    def headers(self) -> pa.Array:
        if not self._present & BITS["headers"]:
            return nulls(self.rows, HEADERS)
        return pa.array([None if packed is None else values.header_entries(packed) for packed in self._values("headers")], HEADERS)

    @cached_property
    def origins(self) -> list[Origin | None]:
        """Where each item came from."""
        if not self._present & BITS["origin"]:
            return [None] * self.rows
        return [None if packed is None else origin.decode(packed) for packed in self._values("origin")]

    def origin_queue(self) -> pa.Array:
        return self._origin(lambda known: known.queue)

    def origin_id(self) -> pa.Array:
        return self._origin(lambda known: known.id)

    # -- steps ---------------------------------------------------------------------------------------

    def _origin(self, what: Callable[[Origin], str]) -> pa.Array:
        if not self._present & BITS["origin"]:
            return nulls(self.rows, pa.string())
        return pa.array([None if known is None else what(known) for known in self.origins], pa.string())

    def _numbers(self, name: str) -> pa.Array:
        """A column in which 0 means none."""
        kind = schemas.ARROW_TYPES[BY_NAME[name].type]
        if not self._present & BITS[name]:
            return nulls(self.rows, kind)
        whole = self._joined(name)
        return pc.if_else(pc.equal(whole, scalar(0, pa.int64())), pa.nulls(self.rows, pa.int64()), whole).cast(kind)

    def _joined(self, name: str) -> pa.Array:
        """A stored column of all slices."""
        if BITS[name] and not self._present & BITS[name]:
            return nulls(self.rows, TYPES[name])
        arrays = [one.array(name) for one in self._slices]
        return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)

    def _values(self, name: str) -> list[Any]:
        return [value for one in self._slices for value in one.values(name)]


_MAKE: Final[dict[str, Callable[[ItemRows], pa.Array]]] = {
    "id": ItemRows.id,
    "partition": ItemRows.partition,
    "offset": lambda made: made.offsets,
    "size_bytes": ItemRows.size_bytes,
    "headers": ItemRows.headers,
    "priority": ItemRows.priority,
    "produced_at": ItemRows.produced_at,
    "origin_queue": ItemRows.origin_queue,
    "origin_id": ItemRows.origin_id,
}
"""How the columns are made that are not as they are stored."""
