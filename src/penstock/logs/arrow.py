"""A DATA frame as an Arrow RecordBatch: the frame's own buffers, not copied, not looped over.

Owns: `to_arrow`, `binary_array` and the types of the columns (`TYPES`). Needs pyarrow, which is an extra; nothing else in this layer does.
The item offsets are not a column: they run from the frame's base.
"""

import pyarrow as pa

from penstock.logs.columns import Binary, Columns, Constant, Digests
from penstock.words.fields import STORED, Form

BY_FORM = {
    Form.BYTES: pa.binary(),
    Form.OPTIONAL_BYTES: pa.binary(),
    Form.TEXTS: pa.string(),
    Form.KEY_IDS: pa.uint64(),
    Form.SMALL: pa.uint8(),
    Form.NUMBERS: pa.int64(),
}
"""The type of a column as it lies in a frame. Digests are bytes of one size, which Arrow has as another type: drafting.py."""
TYPES = {field.name: BY_FORM[column.form] for field, column in STORED if column.form in BY_FORM}
"""The columns that come out, in their order, and their types."""


def to_arrow(columns: Columns) -> pa.RecordBatch:
    """The columns that the frame stores."""
    count = columns.stop - columns.base
    names, arrays = ["payload"], [binary_array(columns.payload, 0, count, TYPES["payload"])]
    for name, column in columns.stored.items():
        if isinstance(column, Digests):
            continue
        kind = TYPES[name]
        names.append(name)
        if isinstance(column, Binary):
            arrays.append(binary_array(column, 0, count, kind))
        elif isinstance(column, Constant):
            arrays.append(_repeated(column, count, kind))
        else:
            arrays.append(pa.Array.from_buffers(kind, count, [None, pa.py_buffer(column.numbers)]))
    return pa.RecordBatch.from_arrays(arrays, names)


def binary_array(column: Binary, low: int, high: int, kind: pa.DataType) -> pa.Array:
    """The items [low, high) of a column of byte strings, not copied."""
    bits = None if column.bits is None else pa.py_buffer(column.bits)
    return pa.Array.from_buffers(kind, high - low, [bits, pa.py_buffer(column.offsets), pa.py_buffer(column.data)], offset=low)


def _repeated(column: Constant, count: int, kind: pa.DataType) -> pa.Array:
    value = column.value.decode() if isinstance(column.value, bytes) else column.value
    return pa.repeat(pa.scalar(value, kind), count)
