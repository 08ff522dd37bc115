"""Columns of a frame as sequences: what a list of the same values gives."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.words.binary_column import BinaryColumn, TextColumn, pack_bits

VALUES = st.lists(st.none() | st.text(max_size=4), min_size=1, max_size=20)


def column_of(values: Sequence[str | None], kind: type[BinaryColumn] = TextColumn) -> BinaryColumn:
    raw = [(value or "").encode() for value in values]
    bits = pack_bits("".join("0" if value is None else "1" for value in values))
    offsets = array("i", accumulate(map(len, raw), initial=0))
    return kind(memoryview(offsets), memoryview(b"".join(raw)), memoryview(bits))


@given(VALUES, st.slices(20))
def test_a_column_reads_like_a_list(values: list[str | None], some: slice) -> None:
    column = column_of(values)
    assert [*column] == values and len(column) == len(values)
    assert column[some] == values[some]
    assert [column[index] for index in range(-len(values), len(values))] == [*values, *values]
    assert column.count(None) == values.count(None) and column.count("") == values.count("")
    sizes = [len((value or "").encode()) for value in values]
    assert column.is_in_order and column.size_bytes == sum(sizes)
    with pytest.raises(IndexError):
        column[len(values)]


@given(st.lists(st.integers(0, 40), max_size=100), st.integers(0, 60))
def test_values_above_a_limit_are_found(sizes: list[int], limit: int) -> None:
    offsets = array("i", accumulate(sizes, initial=7))
    column = BinaryColumn(memoryview(offsets), memoryview(bytes(offsets[-1])))
    longest = max(sizes, default=0)
    assert column.longest_above(limit) == (longest if longest > limit else 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_offsets_that_are_not_in_order_are_found(offsets: list[int]) -> None:
    column = BinaryColumn(memoryview(array("i", offsets)), memoryview(bytes(9)))
    assert column.is_in_order == all(before <= after for before, after in pairwise(offsets))


@given(VALUES, st.data())
def test_a_taken_column_has_the_chosen_values(values: list[str | None], data: st.DataObject) -> None:
    column = column_of(values)
    for _ in range(2):
        chosen = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=20))
        taken = column.take(chosen)
        assert type(taken) is TextColumn and [*taken] == [values[index] for index in chosen]


def test_a_column_without_missing_values_needs_no_bitmap() -> None:
    column = BinaryColumn(memoryview(array("i", [0, 1, 1, 4])), memoryview(b"abcd"))
    assert [*column] == [b"a", b"", b"bcd"] and column.count(None) == 0
    assert column.take([2, 0]).bits is None and [*column.take([2, 0])] == [b"bcd", b"a"]


def test_bytes_are_not_decoded() -> None:
    assert [*column_of(["ä", None], BinaryColumn)] == ["ä".encode(), None]
