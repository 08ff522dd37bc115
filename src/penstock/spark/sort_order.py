"""The option orderBy: columns by which the rows of a key follow each other.

Owns: `Order`. It sorts as Spark does: ascending with missing values first, descending with them last, NaN above every number.
Rows that are equal stay in the order in which they come.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    AtomicType,
    CalendarIntervalType,
    DataType,
    NullType,
    StructType,
    VariantType,
    YearMonthIntervalType,
)

from penstock.words.errors import InvalidRequest

_DIRECTIONS = {"": "ascending", "asc": "ascending", "desc": "descending"}
_WITHOUT_ORDER = (CalendarIntervalType, NullType, VariantType, YearMonthIntervalType)


class SortOrder(NamedTuple):
    """Column names, and for each "ascending" or "descending"."""

    columns: tuple[str, ...] = ()
    directions: tuple[str, ...] = ()

    @classmethod
    def parse(cls, given: Sequence[str]) -> "SortOrder":
        """Of texts such as "ts" or "seq desc"."""
        pairs = [(name, direction.strip().lower()) for name, _, direction in (text.strip().partition(" ") for text in given)]
        for text, (_, direction) in zip(given, pairs, strict=True):
            if direction not in _DIRECTIONS:
                raise InvalidRequest(f"orderBy has {text!r:.200}; give columns such as 'ts, seq desc'")
        return cls(tuple(name for name, _ in pairs), tuple(_DIRECTIONS[direction] for _, direction in pairs))

    def check(self, schema: StructType) -> None:
        """Say so when rows of that schema cannot be ordered like this."""
        for name in self.columns:
            if name not in schema.names:
                raise InvalidRequest(f"orderBy names {name!r}, and the DataFrame has {', '.join(schema.names)}; name one of these")
            kind = schema[name].dataType
            if not _is_ordered(kind):
                raise InvalidRequest(f"orderBy names {name!r}, which is {kind.simpleString()}; name columns of numbers, texts or times")

    def sort_indices(self, table: pa.Table, first: pa.Array | None = None) -> pa.Array:
        """Where the rows of a table with these columns belong, by `first` before all others: the indexes of the sorted table."""
        keys: dict[str, Any] = {} if first is None else {"first": first}
        sort = [("first", "ascending")] if keys else []
        for place, (name, direction) in enumerate(zip(self.columns, self.directions, strict=True)):
            column = table[name]
            if column.null_count:
                keys[f"{place} there"] = pc.is_valid(column)
            if pa.types.is_floating(column.type):
                keys[f"{place} not a number"] = pc.is_nan(column).fill_null(False)
            keys[f"{place}"] = column
            sort += [(key, direction) for key in keys if key.split(" ")[0] == str(place)]
        return pc.sort_indices(pa.table(keys), sort_keys=sort)

    def follows(self, before: pa.Table, after: pa.Table) -> bool:
        """Whether a row may stand behind another: both are tables of one row."""
        return bool(self.sort_indices(pa.concat_tables([before, after]))[0].as_py() == 0)


def _is_ordered(kind: DataType) -> bool:
    return isinstance(kind, AtomicType) and not isinstance(kind, _WITHOUT_ORDER)


def is_identity(rows: pa.Array) -> bool:
    """Whether these indexes leave everything where it is."""
    return len(rows) < 2 or pc.min(pc.pairwise_diff(rows.cast(pa.int64()))).as_py() > 0
