"""DATA frames from Arrow columns, and Arrow columns from DATA frames, without a loop over the items.

Owns: `ArrowBatch` (many items as Arrow columns, with their hashes; `draft` makes a frame of them), `batch_boundaries`,
and `to_arrow` (the columns of a frame as a RecordBatch, not copied).
A draft has exactly the bytes that columns.py makes of the same items. Item offsets are no column: they count from the
frame's base offset.
Input is not checked here. api/arrow.py has checked it, converted every column to large_binary, large_string or int64,
and left out the columns without any value. Only the hashes of keys and dedup ids are computed item by item.
This is the only module of penstock.logs that needs pyarrow, which is an optional dependency.
"""

from array import array
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs import columns
from penstock.logs.columns import ConstantColumn, DigestColumn, FrameColumns, add_padded
from penstock.logs.log import Buffer, Draft, Frame, FrameType
from penstock.rules.routing import NO_KEY, SLOT_MASK, dedup_digest, dedup_slot, key_ids
from penstock.words.binary_column import BinaryColumn
from penstock.words.clock import Moment
from penstock.words.fields import GIVEN, STORED, ColumnLayout
from penstock.words.limits import MAX_BATCH_BYTES, MAX_BATCH_ITEMS

ANY_PARTITION: Final = -1
"""In place of a partition number: the item may be stored in any partition."""
KEY_ID, DIGEST = "key_id", "dedup_digest"
_INT32, _INT64, _UINT64, _UINT8 = pa.int32(), pa.int64(), pa.uint64(), pa.uint8()
_DIGEST = pa.binary(16)
_WIDE_TYPES: Final = {pa.binary(): pa.large_binary(), pa.string(): pa.large_string(), _UINT8: _INT64}

BY_LAYOUT = {
    ColumnLayout.BYTES: pa.binary(),
    ColumnLayout.OPTIONAL_BYTES: pa.binary(),
    ColumnLayout.TEXTS: pa.string(),
    ColumnLayout.KEY_IDS: pa.uint64(),
    ColumnLayout.SMALL: pa.uint8(),
    ColumnLayout.NUMBERS: pa.int64(),
}
"""The Arrow type of a stored column. Digests are not among them: `to_arrow` does not give them."""
TYPES = {field.name: BY_LAYOUT[column.layout] for field, column in STORED if column.layout in BY_LAYOUT}
"""The columns of `to_arrow` in their order, and their types."""


class ArrowBatch:
    """Items as Arrow columns, to be written as frames."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @classmethod
    def from_columns(cls, given: Mapping[str, pa.ChunkedArray]) -> "ArrowBatch":
        """A batch of checked columns (api/arrow.py), with the hashes of their keys and dedup ids added."""
        found = dict(given)
        keys, names = found.get("key"), found.pop("dedup", None)
        count = len(found["payload"])
        ids, digests = array("Q"), []
        for start in range(0, count, MAX_BATCH_ITEMS):  # in slices: Python objects of all items need too much memory
            some = keys.slice(start, MAX_BATCH_ITEMS).to_pylist() if keys is not None else None
            if some is not None:
                ids.extend(key_ids(some))
            if names is not None:
                pairs = zip(some or repeat(None), names.slice(start, MAX_BATCH_ITEMS).to_pylist())  # noqa: B905 (repeat has no end)
                digests.append(pa.array([None if name is None else dedup_digest(key, name) for key, name in pairs], _DIGEST))
        if keys is not None:
            found[KEY_ID] = pa.chunked_array([pa.array(ids, _UINT64)])
        if names is not None:
            found[DIGEST] = pa.chunked_array(digests, _DIGEST)
        return cls(pa.table(found))

    @classmethod
    def from_frame(cls, frame: Frame) -> "ArrowBatch":
        """The items of a DATA frame."""
        found = columns.FrameColumns(frame)
        table = pa.table(to_arrow(found))
        for index, field in enumerate(table.schema):
            if field.type in _WIDE_TYPES:
                table = table.set_column(index, field.name, table[field.name].cast(_WIDE_TYPES[field.type]))
        digests = found.stored.get("dedup")
        if isinstance(digests, columns.DigestColumn):
            buffers = [pa.py_buffer(digests.bits), pa.py_buffer(digests.data)]
            table = table.append_column(DIGEST, pa.Array.from_buffers(_DIGEST, table.num_rows, buffers))
        return cls(table)

    @staticmethod
    def join(batches: "Sequence[ArrowBatch]") -> "ArrowBatch":
        """One batch of several. Where a batch lacks a column that another has, its items get null."""
        return ArrowBatch(pa.concat_tables([batch._table for batch in batches], promote_options="default"))

    def __len__(self) -> int:
        count: int = self._table.num_rows
        return count

    def partitions(self, owners: Sequence[int]) -> pa.Array:
        """The partition of each item, or ANY_PARTITION; loop/produce.py routes items in the same way.

        owners: the partition of each slot.
        """
        table, count = self._table, len(self)
        if len(set(owners)) == 1:
            return pa.repeat(pa.scalar(owners[0], _INT32), count)
        partitions = pa.repeat(pa.scalar(ANY_PARTITION, _INT32), count)
        by_slot = pa.array(owners, _INT32)
        if KEY_ID in table.column_names:
            ids = _combined(table[KEY_ID])
            found = by_slot.take(pc.bit_wise_and(ids, pa.scalar(SLOT_MASK, _UINT64)))
            partitions = pc.if_else(pc.not_equal(ids, pa.scalar(NO_KEY, _UINT64)), found, partitions)
        if DIGEST in table.column_names:
            slots = [None if digest is None else dedup_slot(digest) for digest in table[DIGEST].to_pylist()]
            partitions = pc.coalesce(by_slot.take(pa.array(slots, _INT32)), partitions)
        return partitions

    def take(self, rows: pa.Array) -> "ArrowBatch":
        """The items at `rows`, in that order."""
        return ArrowBatch(self._table.take(rows))

    def slice(self, start: int, stop: int) -> "ArrowBatch":
        return ArrowBatch(self._table.slice(start, stop - start))

    def sizes(self) -> pa.ChunkedArray:
        """The size of each item: the bytes of its fields of variable length."""
        total = pc.binary_length(self._table["payload"])
        for field in self._table.schema:
            if field.name != "payload" and field.type in (pa.large_binary(), pa.large_string()):
                total = pc.add(total, pc.binary_length(self._table[field.name]).fill_null(0))
        return total

    def frame_boundaries(self, most_bytes: int | None = None) -> list[int]:
        """As `batch_boundaries`, for the payloads of this batch; by default with the byte limit of a Batch."""
        return batch_boundaries(pc.binary_length(self._table["payload"]), MAX_BATCH_BYTES if most_bytes is None else most_bytes)

    def draft(self, now: Moment) -> Draft:
        """A DATA frame of all items, with base offset 0."""
        table = self._table
        parts: list[Buffer] = []
        _add_binary(parts, _combined(table["payload"]))
        column_bits = 0
        for name, bit, missing, add in _ADD:
            if name in table.column_names:
                column_bits |= add(parts, bit, _combined(table[name]), missing)
                if name == "key" and column_bits:
                    _add_fixed(parts, _combined(table[KEY_ID]).fill_null(NO_KEY))
        return Draft(FrameType.DATA, 0, len(self), column_bits, now.elapsed, now.wall, parts)


def batch_boundaries(sizes: pa.Array | pa.ChunkedArray, most_bytes: int) -> list[int]:
    """The row numbers at which to cut items of these sizes into pieces, including 0 and the number of items.

    No piece has more items than a Batch may have, or more than `most_bytes` bytes unless it is a single item.
    """
    found = [0]
    while found[-1] < len(sizes):
        some = sizes.slice(found[-1], MAX_BATCH_ITEMS)
        fitting = len(some)
        if pc.sum(some).as_py() > most_bytes:
            fitting = max(1, bisect(list(accumulate(some.to_pylist())), most_bytes))
        found.append(found[-1] + fitting)
    return found


def _combined(column: pa.ChunkedArray) -> Any:
    """The column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


# -- buffers -----------------------------------------------------------------------------------------


def _add_binary(parts: list[Buffer], column: pa.Array) -> None:
    """Add the offsets, which begin with 0, and the data."""
    count, (_, raw_offsets, data) = len(column), column.buffers()
    offsets = pa.Array.from_buffers(_INT64, count + 1, [None, raw_offsets], offset=column.offset)
    low, high = offsets[0].as_py(), offsets[count].as_py()
    _add_fixed(parts, (pc.subtract(offsets, pa.scalar(low, _INT64)) if low else offsets).cast(_INT32))
    add_padded(parts, memoryview(data)[low:high] if high > low else b"")


def _add_fixed(parts: list[Buffer], column: pa.Array) -> None:
    width = column.type.byte_width
    data = memoryview(column.buffers()[1])
    add_padded(parts, data[column.offset * width : (column.offset + len(column)) * width])


def _add_optional(parts: list[Buffer], bit: int, column: pa.Array, missing: None = None) -> int:
    """Add a column in which values may be missing. Returns its column bits; 0 when no item has a value.

    The functions below return the same; bits shifted by CONSTANT_SHIFT say that the value is stored once.
    """
    if column.null_count == len(column):
        return 0
    add_padded(parts, _bitmap(column))
    _add_binary(parts, column.fill_null(b"" if column.type == pa.large_binary() else "") if column.null_count else column)
    return bit


def _add_texts(parts: list[Buffer], bit: int, column: pa.Array, missing: None) -> int:
    if column.null_count or not _same(column):
        return _add_optional(parts, bit, column)
    text = column[0].as_py().encode()
    add_padded(parts, len(text).to_bytes(4, "little") + text)
    return bit | bit << columns.CONSTANT_SHIFT


def _add_digests(parts: list[Buffer], bit: int, column: pa.Array, missing: None) -> int:
    if column.null_count == len(column):
        return 0
    add_padded(parts, _bitmap(column))
    _add_fixed(parts, column.fill_null(bytes(16)) if column.null_count else column)
    return bit


def _add_small(parts: list[Buffer], bit: int, column: pa.Array, missing: int) -> int:
    return _add_filled(parts, bit, column.fill_null(missing).cast(_UINT8), missing)


def _add_numbers(parts: list[Buffer], bit: int, column: pa.Array, missing: int) -> int:
    return _add_filled(parts, bit, column.fill_null(missing), missing)


def _add_filled(parts: list[Buffer], bit: int, column: pa.Array, missing: int) -> int:
    if not _same(column):
        _add_fixed(parts, column)
        return bit
    if column[0].as_py() == missing:
        return 0
    _add_fixed(parts, column[:1])
    return bit | bit << columns.CONSTANT_SHIFT


_BY_LAYOUT: Final[dict[ColumnLayout, Callable[[list[Buffer], int, pa.Array, Any], int]]] = {
    ColumnLayout.OPTIONAL_BYTES: _add_optional,
    ColumnLayout.TEXTS: _add_texts,
    ColumnLayout.SMALL: _add_small,
    ColumnLayout.NUMBERS: _add_numbers,
    ColumnLayout.DIGESTS: _add_digests,
}
_ADD: Final = [
    (DIGEST if column.layout is ColumnLayout.DIGESTS else field.name, 1 << column.bit, column.missing_value, _BY_LAYOUT[column.layout])
    for field, column in STORED[1:]
    if field.name in GIVEN
]


def _same(column: pa.Array) -> bool:
    """Whether all values are equal. The column has no nulls."""
    return column[0].equals(column[len(column) - 1]) and bool(pc.all(pc.equal(column, column[0])).as_py())


def _bitmap(column: pa.Array) -> bytes:
    """A bit per item, 1 where it has a value. Without missing values all bytes are 255, as in columns.py."""
    size = (len(column) + 7) // 8
    if not column.null_count:
        return b"\xff" * size
    raw = memoryview(column.buffers()[0])[column.offset // 8 : (column.offset + len(column) + 7) // 8]
    bits: int = int.from_bytes(raw, "little") >> column.offset % 8
    return (bits & (1 << len(column)) - 1).to_bytes(size, "little")


# -- frames as Arrow ---------------------------------------------------------------------------------


def to_arrow(frame: FrameColumns) -> pa.RecordBatch:
    """The columns of a frame except digests, as Arrow arrays on the frame's memory."""
    count = frame.stop - frame.base
    names, arrays = ["payload"], [binary_array(frame.payload, 0, count, TYPES["payload"])]
    for name, column in frame.stored.items():
        if isinstance(column, DigestColumn):
            continue
        kind = TYPES[name]
        names.append(name)
        if isinstance(column, BinaryColumn):
            arrays.append(binary_array(column, 0, count, kind))
        elif isinstance(column, ConstantColumn):
            arrays.append(_repeated(column, count, kind))
        else:
            arrays.append(pa.Array.from_buffers(kind, count, [None, pa.py_buffer(column.numbers)]))
    return pa.RecordBatch.from_arrays(arrays, names)


def binary_array(column: BinaryColumn, low: int, high: int, kind: pa.DataType) -> pa.Array:
    """The values [low, high) of a column of byte strings, not copied."""
    bits = None if column.bits is None else pa.py_buffer(column.bits)
    return pa.Array.from_buffers(kind, high - low, [bits, pa.py_buffer(column.offsets), pa.py_buffer(column.data)], offset=low)


def _repeated(column: ConstantColumn, count: int, kind: pa.DataType) -> pa.Array:
    value = column.value.decode() if isinstance(column.value, bytes) else column.value
    return pa.repeat(pa.scalar(value, kind), count)
