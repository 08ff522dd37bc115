"""A DATA frame as an Arrow RecordBatch: the frame's own buffers, not copied, not looped over.

Owns: `to_arrow`. Needs pyarrow, which is an extra; nothing else in this layer does.
The item offsets are not a column: they run from the frame's base.
"""

from typing import Any

import pyarrow as pa

from penstock.logs.columns import Binary, Columns, Constant

_BINARY, _TEXT, _INT64, _UINT64, _UINT8 = pa.binary(), pa.string(), pa.int64(), pa.uint64(), pa.uint8()
_SINGULAR = {"kinds": "kind", "encodings": "encoding", "references": "reference", "ats": "at", "ttls": "ttl"}


def to_arrow(columns: Columns) -> pa.RecordBatch:
    """The columns that the frame stores."""
    count = columns.stop - columns.base
    names, arrays = ["payload"], [_binary(columns.payload, count, _BINARY)]
    if columns.key is not None:
        names += ("key", "key_id")
        arrays += (_binary(columns.key, count, _BINARY), _fixed(columns.raw_key_ids, count, _UINT64))
    if columns.headers is not None:
        names.append("headers")
        arrays.append(_binary(columns.headers, count, _BINARY))
    for name, text in columns.texts.items():
        names.append(_SINGULAR[name])
        arrays.append(_repeated(text, count, _TEXT) if isinstance(text, Constant) else _binary(text, count, _TEXT))
    if columns.priorities is not None:
        names.append("priority")
        arrays.append(_fixed(columns.priorities, count, _UINT8))
    for name, numbers in columns.numbers.items():
        names.append(_SINGULAR[name])
        arrays.append(_repeated(numbers, count, _INT64) if isinstance(numbers, Constant) else _fixed(numbers.numbers, count, _INT64))
    if columns.origin is not None:
        names.append("origin")
        arrays.append(_binary(columns.origin, count, _BINARY))
    return pa.RecordBatch.from_arrays(arrays, names)


def _binary(column: Binary, count: int, kind: pa.DataType) -> pa.Array:
    bits = None if column.bits is None else pa.py_buffer(column.bits)
    return pa.Array.from_buffers(kind, count, [bits, pa.py_buffer(column.offsets), pa.py_buffer(column.data)])


def _fixed(data: Any, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def _repeated(column: Constant, count: int, kind: pa.DataType) -> pa.Array:
    value = column.value.decode() if kind is _TEXT else column.value
    return pa.repeat(pa.scalar(value, kind), count)
