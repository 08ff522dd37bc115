"""Fast construction of Arrow arrays, and of runs, for the tables.

Owns: `repeated`, `nulls`, `shared_constant`, `repeat_each` and `scalar` for values that many rows share; `offsets_of`,
`ids` and `chunks` for flat runs of offsets. Arrays are made from buffers, because converting Python values one by one
is slow.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.rules.runs import count, pairs

A_FEW: Final = 16
"""Up to this many values, or edges of runs, are converted one by one."""


def repeated(value: int | str | bytes | None, kind: pa.DataType, rows: int) -> pa.Array:
    """An array with the same value in every row."""
    return nulls(rows, kind) if value is None else pa.repeat(scalar(value, kind), rows)


def nulls(rows: int, kind: pa.DataType) -> pa.Array:
    """An array without values. Most batches have such columns, so all share their buffers."""
    return _nulls(kind, 1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=32)
def _nulls(kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind)


def shared_constant(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    """Like `repeated`, for a number that many batches repeat: they share one buffer."""
    return _constants(value, kind, 1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=32)
def _constants(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(scalar(value, kind), rows)


def scalar(value: int | str | bytes, kind: pa.DataType) -> pa.Scalar:
    """A value as an Arrow scalar, made from buffers: to convert a Python value, pyarrow would first import pandas."""
    if isinstance(value, int):
        data = pa.py_buffer(value.to_bytes(kind.bit_width // 8, sys.byteorder, signed=value < 0))
        return pa.Array.from_buffers(kind, 1, [None, data])[0]
    data = value.encode() if isinstance(value, str) else value
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(array("i", (0, len(data)))), pa.py_buffer(data)])[0]


def offsets_of(runs: Sequence[int]) -> pa.Array:
    """All offsets of flat runs."""
    if len(runs) == 2:
        return pc.add(_count_up(runs[1] - runs[0]), scalar(runs[0], pa.int64()))
    found = array("q")
    for start, stop in zip(runs[::2], runs[1::2], strict=True):
        found.extend(range(start, stop))
    return pa.Array.from_buffers(pa.int64(), len(found), [None, pa.py_buffer(found)])


def _count_up(rows: int) -> pa.Array:
    """The numbers from 0 to `rows` - 1."""
    return _numbers(1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=8)
def _numbers(rows: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(array("q", range(rows)))])


def repeat_each(values: Sequence[Any], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
    """An array in which each value is repeated as often as its count says."""
    if len(values) <= A_FEW:
        found = [repeated(value, kind, times) for value, times in zip(values, counts, strict=True)]
        return found[0] if len(found) == 1 else pa.concat_arrays(found)
    indexes = array("i")
    for index, times in enumerate(counts):
        indexes.extend((index,) * times)
    return pa.array(values, kind).take(pa.Array.from_buffers(pa.int32(), len(indexes), [None, pa.py_buffer(indexes)]))


def chunks(runs: list[int], size: int) -> Iterator[list[int]]:
    """Flat runs, split into flat runs of at most `size` offsets each."""
    if 0 < count(runs) <= size:
        yield runs
        return
    chunk: list[int] = []
    room = size
    for start, stop in pairs(runs):
        while start < stop:
            end = min(stop, start + room)
            chunk += (start, end)
            room -= end - start
            start = end
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def ids(partition: int, runs: Sequence[int]) -> pa.Array:
    """The ids of the items in flat runs of one partition."""
    if len(runs) > A_FEW or min(runs[::2]) < BLOCK:
        return pc.binary_join_element_wise(
            scalar(f"{partition}", pa.string()), offsets_of(runs).cast(pa.string()), scalar("-", pa.string())
        )
    found = [_ids(f"{partition}-", *part) for run in pairs(runs) for part in _by_digits(*run)]
    return found[0] if len(found) == 1 else pa.concat_arrays(found)


BLOCK: Final = 1_000
_ENDINGS: Final = [b"", *(b"%03d" % number for number in range(BLOCK))]


def _ids(prefix: str, start: int, stop: int) -> pa.Array:
    """The ids of offsets that all have the same number of digits.

    Each block of a thousand ids differs in the last three digits only, so one join makes it. This takes a quarter of
    the time that Arrow needs to format the numbers.
    """
    blocks = []
    for number in range(start // BLOCK, -(-stop // BLOCK)):
        low, high = max(0, start - BLOCK * number), min(BLOCK, stop - BLOCK * number)
        endings = _ENDINGS if high - low == BLOCK else [b"", *_ENDINGS[1 + low : 1 + high]]
        blocks.append(f"{prefix}{number}".encode().join(endings))
    edges = _edges(len(prefix) + len(str(start)), 1 << max(14, (stop - start).bit_length()))
    return pa.Array.from_buffers(pa.string(), stop - start, [None, edges, pa.py_buffer(b"".join(blocks))])


def _by_digits(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A run, cut where the offsets get one more digit."""
    while start < stop:
        end = min(stop, 10 ** len(str(start)))
        yield start, end
        start = end


@lru_cache(maxsize=16)
def _edges(size: int, rows: int) -> pa.Buffer:
    """The offsets buffer of an array of strings that all have `size` bytes."""
    return pa.py_buffer(array("i", range(0, size * (rows + 1), size)))
