"""Arrow arrays made quickly: of buffers where volume is, and not of Python's values, which are slow to look at.

Owns: what every table needs. `repeated`, `nulls`, `shared_constant` and `spread` for values that many rows share, `offsets_of` and `ids` for the
items of runs, `scalar`.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.rules.runs import pairs

A_FEW: Final = 16
"""Values, or edges of runs, that are dealt with one by one."""


def repeated(value: int | str | bytes | None, kind: pa.DataType, rows: int) -> pa.Array:
    """The same value for every row."""
    return nulls(rows, kind) if value is None else pa.repeat(scalar(value, kind), rows)


def nulls(rows: int, kind: pa.DataType) -> pa.Array:
    """No value in any row. Most batches have such columns: all share their buffers."""
    return _nulls(kind, 1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=32)
def _nulls(kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind)


def shared_constant(value: int, kind: pa.DataType, rows: int) -> pa.Array:
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


def offsets_of(runs: Sequence[int]) -> pa.Array:
    """Every offset of flat runs."""
    if len(runs) == 2:
        return pc.add(_count_up(runs[1] - runs[0]), scalar(runs[0], pa.int64()))
    found = array("q")
    for start, stop in zip(runs[::2], runs[1::2], strict=True):
        found.extend(range(start, stop))
    return pa.Array.from_buffers(pa.int64(), len(found), [None, pa.py_buffer(found)])


def _count_up(rows: int) -> pa.Array:
    """The numbers from 0 on."""
    return _numbers(1 << max(14, (rows - 1).bit_length()))[:rows]


@lru_cache(maxsize=8)
def _numbers(rows: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(array("q", range(rows)))])


def repeat_each(values: Sequence[Any], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Each value as often as its count says."""
    if len(values) <= A_FEW:
        found = [repeated(value, kind, count) for value, count in zip(values, counts, strict=True)]
        return found[0] if len(found) == 1 else pa.concat_arrays(found)
    places = array("i")
    for place, count in enumerate(counts):
        places.extend((place,) * count)
    return pa.array(values, kind).take(pa.Array.from_buffers(pa.int32(), len(places), [None, pa.py_buffer(places)]))


def ids(partition: int, runs: Sequence[int]) -> pa.Array:
    """The ids of the items of a partition's flat runs."""
    if len(runs) > A_FEW or min(runs[::2]) < BLOCK:
        return pc.binary_join_element_wise(
            scalar(f"{partition}", pa.string()), offsets_of(runs).cast(pa.string()), scalar("-", pa.string())
        )
    found = [_ids(f"{partition}-", *alike) for run in pairs(runs) for alike in _of_one_length(*run)]
    return found[0] if len(found) == 1 else pa.concat_arrays(found)


BLOCK: Final = 1_000
_ENDINGS: Final = [b"", *(b"%03d" % number for number in range(BLOCK))]


def _ids(prefix: str, start: int, stop: int) -> pa.Array:
    """The ids of offsets that all have as many digits: a thousand at a time they differ in the last three only, and one join makes them
    all, in a quarter of the time that Arrow takes to write the numbers."""
    blocks = []
    for number in range(start // BLOCK, -(-stop // BLOCK)):
        low, high = max(0, start - BLOCK * number), min(BLOCK, stop - BLOCK * number)
        endings = _ENDINGS if high - low == BLOCK else [b"", *_ENDINGS[1 + low : 1 + high]]
        blocks.append(f"{prefix}{number}".encode().join(endings))
    edges = _edges(len(prefix) + len(str(start)), 1 << max(14, (stop - start).bit_length()))
    return pa.Array.from_buffers(pa.string(), stop - start, [None, edges, pa.py_buffer(b"".join(blocks))])


def _of_one_length(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A run, cut where the offsets get another digit."""
    while start < stop:
        end = min(stop, 10 ** len(str(start)))
        yield start, end
        start = end


@lru_cache(maxsize=16)
def _edges(size: int, rows: int) -> pa.Buffer:
    """Where strings of one size begin and end."""
    return pa.py_buffer(array("i", range(0, size * (rows + 1), size)))
