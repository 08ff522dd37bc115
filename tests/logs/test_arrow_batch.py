"""A frame as an Arrow RecordBatch: the same values, in the same memory.

Arrow columns into frames: the same bytes as from a batch, however the columns lie in memory.
"""

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.arrow import from_arrow, read_columns
from penstock.logs import arrow_batch
from penstock.logs.arrow_batch import ANY_PARTITION, ArrowBatch, batch_boundaries, to_arrow
from penstock.logs.columns import FrameColumns, encode
from penstock.logs.log import FrameType
from penstock.rules import slots
from penstock.rules.records import Produced
from penstock.rules.routing import SLOT_MASK, dedup_digest, dedup_slot, key_id
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from tests.api.test_arrow import tables
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


def columns(batch: Batch) -> FrameColumns:
    return FrameColumns(framed(encode([Produced(0, batch)], Moment(1, 1))))


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
    found = to_arrow(FrameColumns(frame))
    low = pa.py_buffer(body).address
    shared = {name: [low <= buffer.address < low + len(body) for buffer in _buffers(found, name)] for name in found.schema.names}
    priority = shared.pop("priority")  # one byte per item; rules need bytes
    assert all(all(buffers) for buffers in shared.values()), shared
    assert len(priority) == 1


def test_every_buffer_is_aligned_for_arrow() -> None:
    """The body itself starts 8-aligned in a frame; within it every buffer does."""
    body = bytearray(b"".join(encode([Produced(0, MIXED)], Moment(1, 1)).parts))
    frame = framed(encode([Produced(0, MIXED)], Moment(1, 1)))._replace(body=memoryview(body))
    found = to_arrow(FrameColumns(frame))
    low = pa.py_buffer(body).address
    for name in set(found.schema.names) - {"priority"}:
        assert [(buffer.address - low) % 8 for buffer in _buffers(found, name)] == [0] * len(_buffers(found, name)), name


def _buffers(batch: Any, name: str) -> list[Any]:
    return [buffer for buffer in batch.column(name).buffers() if buffer is not None]


NOW = Moment(12, 34)
OWNERS = slots.first_map([0, 2, 5]).owners
TEXT_PAYLOADS = st.lists(st.text(max_size=5), min_size=1, max_size=9).map(lambda texts: pa.table({"payload": pa.array(texts)}))


def expected(table: Any) -> tuple[int, int, bytes]:
    (batch,) = from_arrow(table)
    draft = encode([Produced(0, batch)], NOW)
    return draft.count, draft.column_bits, b"".join(draft.parts)


def drafted(batch: ArrowBatch) -> tuple[int, int, bytes]:
    draft = batch.draft(NOW)
    assert draft.type is FrameType.DATA and (draft.base_offset, draft.elapsed, draft.wall) == (0, 12, 34)
    assert all(len(memoryview(part).cast("B")) == len(part) for part in draft.parts)  # their sizes in bytes
    return draft.count, draft.column_bits, b"".join(draft.parts)


def batch_of_table(table: Any) -> ArrowBatch:
    return ArrowBatch.from_columns(read_columns(table))


@given(tables().map(lambda case: case[0]) | TEXT_PAYLOADS)
def test_a_draft_has_the_bytes_that_columns_encode_gives(table: Any) -> None:
    assert drafted(batch_of_table(table)) == expected(table)


@given(tables().map(lambda case: case[0]), st.data())
def test_a_slice_has_the_bytes_of_the_sliced_table(table: Any, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, table.num_rows - 1))
    stop = data.draw(st.integers(start + 1, table.num_rows))
    assert drafted(batch_of_table(table).slice(start, stop)) == expected(table.slice(start, stop - start))
    assert drafted(batch_of_table(table.slice(start, stop - start))) == expected(table.slice(start, stop - start))


@given(tables().map(lambda case: case[0]), st.data())
def test_rows_can_be_taken_in_any_order(table: Any, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, table.num_rows - 1), min_size=1, max_size=9))
    assert drafted(batch_of_table(table).take(pa.array(rows))) == expected(table.take(rows))


@given(st.lists(tables().map(lambda case: case[0]), min_size=1, max_size=3))
def test_joined_batches_have_the_bytes_of_the_whole_table(pieces: list[Any]) -> None:
    whole = pa.concat_tables(pieces, promote_options="default")
    assert drafted(batch_of_table(whole)) == expected(whole)
    assert drafted(ArrowBatch.join([batch_of_table(piece) for piece in pieces])) == expected(whole)


@given(tables().map(lambda case: case[0]))
def test_a_batch_read_from_a_frame_gives_the_same_frame(table: Any) -> None:
    draft = batch_of_table(table).draft(NOW)
    assert drafted(ArrowBatch.from_frame(framed(draft))) == (draft.count, draft.column_bits, b"".join(draft.parts))


def test_bytes_under_a_null_are_not_stored() -> None:
    under = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\2"), pa.array([0, 3, 4], pa.int32()).buffers()[1], pa.py_buffer(b"abcd")]
    )
    assert under.to_pylist() == [None, b"d"]
    table = pa.table({"payload": [b"x", b"y"], "key": under})
    assert drafted(batch_of_table(table)) == expected(table)


@given(tables().map(lambda case: case[0]))
def test_partitions_are_those_that_produce_would_choose(table: Any) -> None:
    (batch,) = from_arrow(table)
    keys, names = batch.keys or [None] * len(batch), batch.dedups or [None] * len(batch)
    meant = [
        OWNERS[dedup_slot(name)] if name is not None else ANY_PARTITION if key is None else OWNERS[key_id(key) & SLOT_MASK]
        for key, name in zip(keys, names, strict=True)
    ]
    assert batch_of_table(table).partitions(OWNERS).to_pylist() == meant
    assert batch_of_table(table).partitions(slots.first_map([7]).owners).to_pylist() == [7] * len(batch)


def test_a_dedup_id_without_a_key_has_a_partition() -> None:
    table = pa.table({"payload": [b"x"], "dedup": ["once"]})
    assert batch_of_table(table).partitions(OWNERS).to_pylist() == [OWNERS[dedup_slot(dedup_digest(None, b"once"))]]


def test_frames_hold_no_more_than_a_batch_may() -> None:
    assert batch_of_table(pa.table({"payload": pa.repeat(pa.scalar(b"x"), 25_000)})).frame_boundaries() == [0, 10_000, 20_000, 25_000]


def test_frames_hold_no_more_bytes_than_a_batch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_batch, "MAX_BATCH_BYTES", 10)
    assert batch_of_table(pa.table({"payload": [b"x" * 4, b"x" * 6, b"x", b"x" * 10, b""]})).frame_boundaries() == [0, 2, 3, 5]


def test_frame_boundaries_with_a_lower_byte_limit() -> None:
    batch = batch_of_table(pa.table({"payload": [b"x" * 4, b"x" * 6, b"x", b"x" * 99, b""]}))
    assert batch.frame_boundaries(10) == [0, 2, 3, 4, 5]  # a single item may be larger
    assert batch.frame_boundaries(3) == [0, 1, 2, 3, 4, 5]
    assert batch_boundaries(pa.array([], pa.int64()), 10) == [0]


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 30), st.integers(1, 7))
def test_pieces_are_as_large_as_they_may_be(sizes: list[int], most_bytes: int, most_items: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_batch, "MAX_BATCH_ITEMS", most_items)
        found = batch_boundaries(pa.array(sizes, pa.int64()), most_bytes)
    assert found[0] == 0 and found[-1] == len(sizes)
    for start, stop in pairwise(found):
        piece = sizes[start:stop]
        assert 0 < len(piece) <= most_items and (sum(piece) <= most_bytes or len(piece) == 1)
        assert stop == len(sizes) or len(piece) == most_items or sum(piece) + sizes[stop] > most_bytes


def test_the_size_of_an_item_is_that_of_all_its_fields() -> None:
    table = pa.table({"key": ["k", None], "payload": [b"abc", b""], "kind": ["é", "x"], "at": pa.array([1, 2], pa.int64())})
    assert batch_of_table(table).sizes().to_pylist() == [1 + 3 + 2, 1]


@given(tables().map(lambda case: case[0]))
def test_hashing_in_slices_gives_the_same_frame(table: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_batch, "MAX_BATCH_ITEMS", 2)
        found = drafted(batch_of_table(table))
    assert found == expected(table)


def test_a_frame_of_arrow_columns_decodes_to_the_same_items() -> None:
    table = pa.table({"payload": [b"x", b"y"], "key": ["k", None], "at": pa.array([5, None], pa.int64())})
    (batch,) = from_arrow(table)
    assert FrameColumns(framed(batch_of_table(table).draft(NOW))).batch() == batch


def test_a_missing_payload_is_named_by_its_row() -> None:
    with pytest.raises(InvalidRequest, match="row 1: the payload is null; give bytes or text"):
        batch_of_table(pa.table({"payload": pa.array([b"x", None])}))
