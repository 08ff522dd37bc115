"""A frame as an Arrow RecordBatch: the same values, in the same memory."""

from typing import Any

import pyarrow as pa
from hypothesis import given

from penstock.logs.arrow import to_arrow
from penstock.logs.columns import Columns, encode
from penstock.rules.records import Produced
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from tests.logs.batches import batches, framed

NAMES = {
    "payload": "payloads",
    "key": "keys",
    "key_id": "key_ids",
    "headers": "headers",
    "kind": "kinds",
    "encoding": "encodings",
    "reference": "references",
    "priority": "priorities",
    "at": "ats",
    "ttl": "ttls",
    "origin": "origins",
}
MIXED = Batch(
    [b"a", b"bb", b"ccc"],
    [b"k", None, b"m"],
    [1, 0, 3],
    [None, b"h", None],
    ["x", "y", None],
    priorities=bytes([1, 2, 3]),
    ats=[1, 2, 3],
    ttls=[4, 5, 6],
    origins=[b"o", None, b"oo"],
)


def columns(batch: Batch) -> Columns:
    return Columns(framed(encode([Produced(0, batch)], Moment(1, 1))))


@given(batches())
def test_every_column_has_the_values_of_the_batch(batch: Batch) -> None:
    found = to_arrow(columns(batch))
    found.validate(full=True)
    assert found.num_rows == len(batch)
    assert found.schema.names == [name for name, column in NAMES.items() if getattr(batch, column) is not None]
    for name in found.schema.names:
        assert found.column(name).to_pylist() == list(getattr(batch, NAMES[name])), name


def test_types_do_not_depend_on_whether_a_column_is_constant() -> None:
    constant = Batch([b"a"] * 3, kinds=["x"] * 3, priorities=bytes([1]) * 3, ats=[1] * 3, ttls=[4] * 3)
    first, second = to_arrow(columns(MIXED)).schema, to_arrow(columns(constant)).schema
    assert all(second.field(name).type == first.field(name).type for name in second.names)


def test_nothing_is_copied() -> None:
    body = bytearray(b"".join(encode([Produced(0, MIXED)], Moment(1, 1)).parts))
    frame = framed(encode([Produced(0, MIXED)], Moment(1, 1)))._replace(body=memoryview(body))
    found = to_arrow(Columns(frame))
    low = pa.py_buffer(body).address
    shared = {name: [low <= buffer.address < low + len(body) for buffer in _buffers(found, name)] for name in found.schema.names}
    priority = shared.pop("priority")  # one byte an item, which rules want as bytes
    assert all(all(buffers) for buffers in shared.values()), shared
    assert len(priority) == 1


def test_every_buffer_is_aligned_for_arrow() -> None:
    """The body itself starts 8-aligned in a frame; within it every buffer does."""
    body = bytearray(b"".join(encode([Produced(0, MIXED)], Moment(1, 1)).parts))
    frame = framed(encode([Produced(0, MIXED)], Moment(1, 1)))._replace(body=memoryview(body))
    found = to_arrow(Columns(frame))
    low = pa.py_buffer(body).address
    for name in set(found.schema.names) - {"priority"}:
        assert [(buffer.address - low) % 8 for buffer in _buffers(found, name)] == [0] * len(_buffers(found, name)), name


def _buffers(batch: Any, name: str) -> list[Any]:
    return [buffer for buffer in batch.column(name).buffers() if buffer is not None]
