"""The columns of items that tables share, made of parts of frames.

Owns: `Building`, which makes one batch's columns, each when it is asked for; `NEEDS`, which stored columns each is made of; `ids`,
`offsets_of` and `spread`.
Where volume is, arrays are made of buffers and not of Python's values, which are slow to look at.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.logs.arrow import TYPES
from penstock.rules.runs import pairs
from penstock.tables.parts import BITS, Part, always, nulls, repeated, scalar
from penstock.tables.schemas import HEADERS, INSTANT, SPAN
from penstock.words import origin, values
from penstock.words.fields import FIELDS
from penstock.words.limits import DEFAULT_PRIORITY
from penstock.words.origin import Origin

NEEDS: Final = {field.name: field.source or field.name for field in FIELDS if field.source or field.stored is not None}
"""The stored column that a column is made of."""
A_FEW: Final = 16
"""Values, or edges of runs, that are dealt with one by one."""


def stored(columns: Sequence[str]) -> list[str]:
    """The stored columns that those columns are made of."""
    return list(dict.fromkeys(NEEDS[name] for name in columns if name in NEEDS))


class Building:
    """The rows of some parts of one partition's frames."""

    def __init__(self, parts: Sequence[Part], partition: int) -> None:
        self.parts = parts
        self.rows = sum(part.rows for part in parts)
        self._partition = partition
        self._present = 0
        for part in parts:
            self._present |= part.present

    def column(self, name: str) -> pa.Array:
        """A column by its name in the tables."""
        return _MAKE[name](self) if name in _MAKE else self._joined(name)

    @cached_property
    def runs(self) -> list[int]:
        """Flat runs of the items' offsets."""
        found: list[int] = []
        for part in self.parts:
            more = part.runs
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
        return always(self._partition, pa.int32(), self.rows)

    def size_bytes(self) -> pa.Array:
        return pc.binary_length(self._joined("payload")).cast(pa.int64())

    def priority(self) -> pa.Array:
        if not self._present & BITS["priority"]:
            return always(DEFAULT_PRIORITY, pa.int32(), self.rows)
        return self._joined("priority").cast(pa.int32())

    def produced_at(self) -> pa.Array:
        walls, counts = zip(*(wall for part in self.parts for wall in part.walls), strict=True)
        return spread(walls, counts, pa.int64()).cast(INSTANT)

    def headers(self) -> pa.Array:
        if not self._present & BITS["headers"]:
            return nulls(self.rows, HEADERS)
        return pa.array([None if one is None else values.header_entries(one) for one in self._values("headers")], HEADERS)

    def at(self) -> pa.Array:
        return self._number("at", INSTANT)

    def ttl(self) -> pa.Array:
        return self._number("ttl", SPAN)

    @cached_property
    def origins(self) -> list[Origin | None]:
        """Where each item came from."""
        if not self._present & BITS["origin"]:
            return [None] * self.rows
        return [None if packed is None else origin.decode(packed) for packed in self._values("origin")]

    def origin_queue(self) -> pa.Array:
        return self._origin(lambda known: known.queue)

    def origin_id(self) -> pa.Array:
        return self._origin(lambda known: known.id)

    # -- steps ---------------------------------------------------------------------------------------

    def _origin(self, what: Callable[[Origin], str]) -> pa.Array:
        if not self._present & BITS["origin"]:
            return nulls(self.rows, pa.string())
        return pa.array([None if known is None else what(known) for known in self.origins], pa.string())

    def _number(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column in which 0 means none."""
        if not self._present & BITS[name]:
            return nulls(self.rows, kind)
        whole = self._joined(name)
        return pc.if_else(pc.equal(whole, scalar(0, pa.int64())), pa.nulls(self.rows, pa.int64()), whole).cast(kind)

    def _joined(self, name: str) -> pa.Array:
        """A stored column of all parts."""
        if BITS[name] and not self._present & BITS[name]:
            return nulls(self.rows, TYPES[name])
        arrays = [part.array(name) for part in self.parts]
        return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)

    def _values(self, name: str) -> list[Any]:
        return [value for part in self.parts for value in part.values(name)]


_MAKE: Final[dict[str, Callable[[Building], pa.Array]]] = {
    "id": Building.id,
    "partition": Building.partition,
    "offset": lambda made: made.offsets,
    "size_bytes": Building.size_bytes,
    "headers": Building.headers,
    "priority": Building.priority,
    "produced_at": Building.produced_at,
    "at": Building.at,
    "ttl": Building.ttl,
    "origin_queue": Building.origin_queue,
    "origin_id": Building.origin_id,
}
"""The others are as they are stored."""


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


def spread(values: Sequence[Any], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
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
