"""The option orderBy: columns that give the order of the items of a key.

Owns: `SortOrder`. It sorts as Spark does: ascending with NULL first, descending with NULL last, NaN above every number.
Equal rows keep their order.
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
        """Parse terms such as "ts" or "seq desc"."""
        pairs = [(name, direction.strip().lower()) for name, _, direction in (text.strip().partition(" ") for text in given)]
        for text, (_, direction) in zip(given, pairs, strict=True):
            if direction not in _DIRECTIONS:
                raise InvalidRequest(f"orderBy has {text!r:.200}; give columns such as 'ts, seq desc'")
        return cls(tuple(name for name, _ in pairs), tuple(_DIRECTIONS[direction] for _, direction in pairs))

    def check(self, schema: StructType) -> None:
        """InvalidRequest if rows of that schema cannot be sorted by these columns."""
        for name in self.columns:
            if name not in schema.names:
                raise InvalidRequest(f"orderBy names {name!r}, and the DataFrame has {', '.join(schema.names)}; name one of these")
            kind = schema[name].dataType
            if not _is_ordered(kind):
                raise InvalidRequest(f"orderBy names {name!r}, which is {kind.simpleString()}; name columns of numbers, texts or times")

    def sort_indices(self, table: pa.Table, first: pa.Array | None = None) -> pa.Array:
        """The indexes that sort a table by these columns; by `first` before them."""
        keys: dict[str, Any] = {} if first is None else {"first": first}
        sort = [("first", "ascending")] if keys else []
        for index, (name, direction) in enumerate(zip(self.columns, self.directions, strict=True)):
            column = table[name]
            if column.null_count:
                keys[f"{index} valid"] = pc.is_valid(column)
            if pa.types.is_floating(column.type):
                keys[f"{index} not a number"] = pc.is_nan(column).fill_null(False)
            keys[f"{index}"] = column
            sort += [(key, direction) for key in keys if key.split(" ")[0] == str(index)]
        return pc.sort_indices(pa.table(keys), sort_keys=sort)

    def follows(self, before: pa.Table, after: pa.Table) -> bool:
        """Whether a row may come after another; both are tables of one row."""
        return bool(self.sort_indices(pa.concat_tables([before, after]))[0].as_py() == 0)


def order_terms(order_by: str | Sequence[str] | None) -> list[str]:
    """The terms of an argument `order_by`: a text with commas, a list, or None."""
    terms = order_by.split(",") if isinstance(order_by, str) else order_by or ()
    return [term.strip() for term in terms]


def _is_ordered(kind: DataType) -> bool:
    return isinstance(kind, AtomicType) and not isinstance(kind, _WITHOUT_ORDER)


def is_identity(rows: pa.Array) -> bool:
    """Whether taking rows by these indexes changes nothing."""
    return len(rows) < 2 or pc.min(pc.pairwise_diff(rows.cast(pa.int64()))).as_py() > 0
