"""Parts of frames, and the rows of a batch put together from them.

Owns: `Piece` (items that follow each other in one frame, as views of its buffers), `Few` (rows of many small frames, as values: for those
that is quicker), `gathered` (parts that go out together as one batch). A part gives the columns that a frame stores, under the names that
`STORED` has; what a table makes of them is for others.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from penstock.logs.arrow import TYPES
from penstock.logs.columns import BITS as BITS_OF_FRAMES
from penstock.logs.columns import Binary, Columns, Constant, Digests
from penstock.rules.runs import pairs
from penstock.words.fields import STORED
from penstock.words.limits import MIB

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
NOTHING: Final = {field.name: None if field.name == "payload" else column.nothing for field, column in STORED}
"""What an item has in a column that says nothing of it."""


class Piece(NamedTuple):
    """Items that follow each other in one frame: its rows [low, high)."""

    columns: Columns
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

    def cut(self, runs: Sequence[int]) -> "list[Piece]":
        """The parts that lie in runs of offsets."""
        base = self.columns.base
        return [self._replace(low=start - base, high=stop - base) for start, stop in pairs(runs)]

    def array(self, name: str) -> pa.Array:
        """Rows of a stored column, as they lie in the frame."""
        column, kind = self.columns.column(name), TYPES[name]
        if column is None:
            return repeated(NOTHING[name], kind, self.rows)
        if isinstance(column, Constant):
            return repeated(column.value, kind, self.rows)
        if isinstance(column, Binary):
            return binary_slice(column, self.low, self.high, kind)
        assert not isinstance(column, Digests)  # no table has them
        return pa.Array.from_buffers(kind, self.rows, [None, pa.py_buffer(column.numbers)], offset=self.low)

    def values(self, name: str) -> list[Any]:
        """The same as values."""
        column = self.columns.column(name)
        return [NOTHING[name]] * self.rows if column is None else [*column.values(self.low, self.high)]


def repeated(value: int | str | bytes | None, kind: pa.DataType, rows: int) -> pa.Array:
    """The same value for every row."""
    return nulls(rows, kind) if value is None else pa.repeat(scalar(value, kind), rows)


def nulls(rows: int, kind: pa.DataType) -> pa.Array:
    """No value in any row. Most batches have such columns: all share their buffers."""
    return _nulls(kind, 1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=32)
def _nulls(kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind)


def always(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    """A number that many batches have in every row; they share its buffer."""
    return _always(value, kind, 1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=32)
def _always(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(scalar(value, kind), rows)


def scalar(value: int | str | bytes, kind: pa.DataType) -> pa.Scalar:
    """A value as Arrow has it. It is made of buffers because pyarrow imports pandas, slowly, to look at one of Python's."""
    if isinstance(value, int):
        data = pa.py_buffer(value.to_bytes(kind.bit_width // 8, sys.byteorder, signed=value < 0))
        return pa.Array.from_buffers(kind, 1, [None, data])[0]
    data = value.encode() if isinstance(value, str) else value
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(array("i", (0, len(data)))), pa.py_buffer(data)])[0]


def binary_slice(column: Binary, low: int, high: int, kind: pa.DataType) -> pa.Array:
    """Rows of a column of byte strings, not copied."""
    there = None if column.bits is None else pa.py_buffer(column.bits)
    return pa.Array.from_buffers(kind, high - low, [there, pa.py_buffer(column.offsets), pa.py_buffer(column.data)], offset=low)


class Few:
    """Rows of small pieces, taken out of their frames one after the other."""

    def __init__(self, wanted: Iterable[str]) -> None:
        """`wanted`: the stored columns that will be asked for."""
        self.rows = 0
        self.present = 0
        self.runs: list[int] = []
        self.walls: list[tuple[int, int]] = []
        self._wanted = [(name, BITS[name]) for name in wanted]
        self._values: dict[str, list[Any]] = {}

    def add(self, piece: Piece) -> None:
        columns, present, low, high = piece
        start, rows = columns.base + low, high - low
        if self.runs and self.runs[-1] == start:
            self.runs[-1] = start + rows
        else:
            self.runs += (start, start + rows)
        self.walls.append((columns.wall, rows))
        self.present |= present
        for name, bit in self._wanted:
            column = columns.column(name) if present & bit or not bit else None
            if column is None:
                continue
            values = self._values.get(name)
            if values is None:
                values = self._values[name] = []
            if len(values) < self.rows:  # the pieces before had none
                values += [NOTHING[name]] * (self.rows - len(values))
            values += column.values(low, high)
        self.rows += rows

    def array(self, name: str) -> pa.Array:
        return pa.array(self.values(name), TYPES[name])

    def values(self, name: str) -> list[Any]:
        found = self._values.get(name, [])
        return found + [NOTHING[name]] * (self.rows - len(found))


Part: TypeAlias = Piece | Few


def gathered(pieces: Iterable[Piece], wanted: Sequence[str]) -> Iterator[list[Part]]:
    """Parts for one batch each, in order: many small ones, or one that is large."""
    held: list[Part] = []
    rows = size = 0
    for piece in pieces:
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
            if not isinstance(last, Few):
                last = Few(wanted)
                held.append(last)
            last.add(piece)
        rows, size = rows + count, size + more
    if held:
        yield held
