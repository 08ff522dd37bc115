"""The columns of tables, made from the frames that hold the items.

Owns: `FrameSlice` (consecutive items of one frame, as views of its buffers), `SmallSlices` (items of many small frames,
as Python values, which is faster for those), `grouped_slices` (which slices form one record batch), `ItemRows` (the
columns of such a batch, each made when it is asked for) and `stored_columns` (which stored columns they need).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs.arrow_batch import TYPES, binary_array
from penstock.logs.columns import BITS as BITS_OF_FRAMES
from penstock.logs.columns import ConstantColumn, DigestColumn, FrameColumns
from penstock.rules.runs import pairs
from penstock.tables import schemas
from penstock.tables.arrays import ids, nulls, offsets_of, repeat_each, repeated, scalar, shared_constant
from penstock.tables.schemas import HEADERS, INSTANT
from penstock.words import origin, values
from penstock.words.binary_column import BinaryColumn
from penstock.words.fields import BY_NAME, FIELDS, STORED, ColumnLayout
from penstock.words.limits import DEFAULT_PRIORITY, MIB
from penstock.words.origin import Origin

ROWS: Final = 10_000
"""About how many rows a record batch has. It has fewer if payloads are large; a large slice is a batch of its own."""
BATCH_BYTES = 4 * MIB
LARGE_ROWS = 4_096
LARGE_BYTES = 1 * MIB
"""A slice with this many rows or bytes is a batch of its own, without a copy."""
FEW_ROWS = 64
"""For fewer rows than this, Python values cost less than views."""
BITS: Final = {"payload": 0, **BITS_OF_FRAMES}
"""The bit that is set if a frame has the column; 0 if every frame has it."""
MISSING: Final = {field.name: None if field.name == "payload" else column.missing_value for field, column in STORED}
"""The value of an item in a column that its frame lacks."""
NEEDS: Final = {field.name: field.source or field.name for field in FIELDS if field.source or field.stored is not None}
"""The stored column from which a column is made."""


class FrameSlice(NamedTuple):
    """Consecutive items of one frame: its rows [low, high)."""

    columns: FrameColumns
    present: int
    """The bits of the columns that the frame has."""
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
        """The offset after the last item."""
        return self.start + self.rows

    @property
    def runs(self) -> list[int]:
        return [self.start, self.stop]

    @property
    def walls(self) -> list[tuple[int, int]]:
        """When the items were produced: (wall time, number of items)."""
        return [(self.columns.wall, self.rows)]

    def cut(self, runs: Sequence[int]) -> "list[FrameSlice]":
        """The parts of the slice at these flat runs of offsets."""
        base = self.columns.base
        return [self._replace(low=start - base, high=stop - base) for start, stop in pairs(runs)]

    def array(self, name: str) -> pa.Array:
        """A stored column, as a view of the frame's buffer."""
        column, kind = self.columns.column(name), TYPES[name]
        if column is None:
            return repeated(MISSING[name], kind, self.rows)
        if isinstance(column, ConstantColumn):
            return repeated(column.value, kind, self.rows)
        if isinstance(column, BinaryColumn):
            return binary_array(column, self.low, self.high, kind)
        assert not isinstance(column, DigestColumn)  # no table has this column
        return pa.Array.from_buffers(kind, self.rows, [None, pa.py_buffer(column.numbers)], offset=self.low)

    def values(self, name: str) -> list[Any]:
        """A stored column, as Python values."""
        column = self.columns.column(name)
        return [MISSING[name]] * self.rows if column is None else [*column.values(self.low, self.high)]


class SmallSlices:
    """The items of small slices, as Python values."""

    def __init__(self, wanted: Iterable[str]) -> None:
        """`wanted`: the stored columns that will be needed."""
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
            if len(values) < self.rows:  # earlier slices had no such column
                values += [MISSING[name]] * (self.rows - len(values))
            values += column.values(low, high)
        self.rows += rows

    def array(self, name: str) -> pa.Array:
        return pa.array(self.values(name), TYPES[name])

    def values(self, name: str) -> list[Any]:
        found = self._values.get(name, [])
        return found + [MISSING[name]] * (self.rows - len(found))


Slice: TypeAlias = FrameSlice | SmallSlices


def grouped_slices(slices: Iterable[FrameSlice], wanted: Sequence[str]) -> Iterator[list[Slice]]:
    """The slices of each record batch, in order: several small ones, or a single large one."""
    group: list[Slice] = []
    rows = size = 0
    for piece in slices:
        count = piece.high - piece.low
        edges = piece.columns.payload.offsets
        more = edges[piece.high] - edges[piece.low]
        large = count >= LARGE_ROWS or more >= LARGE_BYTES
        if group and (large or rows + count > ROWS or size + more > BATCH_BYTES):
            yield group
            group, rows, size = [], 0, 0
        if large:
            yield [piece]
            continue
        if count >= FEW_ROWS:
            group.append(piece)
        else:
            last = group[-1] if group else None
            if not isinstance(last, SmallSlices):
                last = SmallSlices(wanted)
                group.append(last)
            last.add(piece)
        rows, size = rows + count, size + more
    if group:
        yield group


def stored_columns(columns: Sequence[str]) -> list[str]:
    """The stored columns from which these columns are made."""
    return list(dict.fromkeys(NEEDS[name] for name in columns if name in NEEDS))


class ItemRows:
    """The columns of one record batch of items of one partition."""

    def __init__(self, slices: Sequence[Slice], partition: int) -> None:
        self._slices = slices
        self.rows = sum(one.rows for one in slices)
        self._partition = partition
        self._present = 0
        for one in slices:
            self._present |= one.present

    def column(self, name: str) -> pa.Array:
        """A column, by its name in the tables."""
        if name in _MAKE:
            return _MAKE[name](self)
        column = BY_NAME[name].stored
        return self._numbers(name) if column is not None and column.layout is ColumnLayout.NUMBERS else self._joined(name)

    @cached_property
    def runs(self) -> list[int]:
        """The flat runs of the items' offsets."""
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
        """The origin of each item; None if it was produced here."""
        if not self._present & BITS["origin"]:
            return [None] * self.rows
        return [None if packed is None else origin.decode(packed) for packed in self._values("origin")]

    def origin_queue(self) -> pa.Array:
        return self._origin(lambda known: known.queue)

    def origin_id(self) -> pa.Array:
        return self._origin(lambda known: known.id)

    # -- helpers -------------------------------------------------------------------------------------

    def _origin(self, what: Callable[[Origin], str]) -> pa.Array:
        if not self._present & BITS["origin"]:
            return nulls(self.rows, pa.string())
        return pa.array([None if known is None else what(known) for known in self.origins], pa.string())

    def _numbers(self, name: str) -> pa.Array:
        """A column of numbers, in which a stored 0 is null."""
        kind = schemas.ARROW_TYPES[BY_NAME[name].type]
        if not self._present & BITS[name]:
            return nulls(self.rows, kind)
        whole = self._joined(name)
        return pc.if_else(pc.equal(whole, scalar(0, pa.int64())), pa.nulls(self.rows, pa.int64()), whole).cast(kind)

    def _joined(self, name: str) -> pa.Array:
        """A stored column, of all slices."""
        if BITS[name] and not self._present & BITS[name]:
            return nulls(self.rows, TYPES[name])
        arrays = [one.array(name) for one in self._slices]
        return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)

    def _values(self, name: str) -> list[Any]:
        return [value for one in self._slices for value in one.values(name)]


_MAKE: Final[dict[str, Callable[[ItemRows], pa.Array]]] = {
    "id": ItemRows.id,
    "partition": ItemRows.partition,
    "offset": lambda rows: rows.offsets,
    "size_bytes": ItemRows.size_bytes,
    "headers": ItemRows.headers,
    "priority": ItemRows.priority,
    "produced_at": ItemRows.produced_at,
    "origin_queue": ItemRows.origin_queue,
    "origin_id": ItemRows.origin_id,
}
"""The columns that are not returned as they are stored."""
