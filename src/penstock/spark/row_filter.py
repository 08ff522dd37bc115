"""The option `where`: which rows of a table a batch query reads.

Owns: `RowFilter` and `parse_filter`. A filter is conditions that must all be true, as in SQL: a row whose value is null
does not match. `partitions`, `keys`, `offsets`, `sequences` and `walls` say what need not be read at all; they may give
too much and never too little. `keep` then removes every other row that does not match.
Why Spark's own pushdown (`pushFilters`) is not used: Spark keeps one plan of a Python source per DataFrame, not per
query. After `df.where("partition = 0").count()`, `df.count()` counts partition 0 alone, without an error.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.queue_tables import TABLES
from penstock.tables import arrays, schemas
from penstock.words.errors import InvalidRequest
from penstock.words.ids import parse_id

Value: TypeAlias = int | str | bytes
Bounds: TypeAlias = tuple[int, int]
"""From a number on, before another."""
ReadInstant: TypeAlias = Callable[[str, str], int]

ENDLESS: Final = 1 << 63
LARGEST: Final = {pa.int32(): (1 << 31) - 1, pa.int64(): ENDLESS - 1}
MAX_VALUES: Final = 1_000
EXAMPLE: Final = "give conditions such as partition = 1 AND offset >= 1000 AND key = 'customer-7', and filter the DataFrame for all others"
_COMPARE: Final = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<hex>[xX]'[^']*')|(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+)|(?P<name>`[^`]+`|[A-Za-z_]\w*)|(?P<sign><=|>=|==|[=<>(),]))"
)


class Condition(msgspec.Struct, frozen=True):
    """A column compared with a value; the operator "=" may have several, of which one must be equal."""

    column: str
    operator: str
    values: tuple[Value, ...]

    def bounds(self) -> Bounds:
        """The smallest range that holds every number for which the condition is true."""
        numbers = [value for value in self.values if isinstance(value, int)]
        low, high = min(numbers), max(numbers)
        match self.operator:
            case "<":
                return -ENDLESS, high
            case "<=":
                return -ENDLESS, high + 1
            case ">":
                return low + 1, ENDLESS
            case ">=":
                return low, ENDLESS
        return low, high + 1

    def mask(self, column: pa.Array) -> pa.Array:
        """For each value of the column whether the condition is true; null for null."""
        kind = column.type
        if kind == schemas.INSTANT:
            kind = pa.int64()
            column = column.view(kind)
        found = None
        for value in self.values:
            one = _COMPARE[self.operator](column, arrays.scalar(value, kind))
            found = one if found is None else pc.or_(found, one)
        return found


class RowFilter(msgspec.Struct, frozen=True):
    """Conditions that must all be true."""

    conditions: tuple[Condition, ...]

    @property
    def columns(self) -> list[str]:
        """The columns that `keep` needs, each once."""
        return list(dict.fromkeys(condition.column for condition in self.conditions))

    def partitions(self, numbers: Iterable[int]) -> list[int]:
        """Those of the partitions that may have matching rows."""
        low, high = self._bounds("partition")
        named = [{*one.values} for one in self.conditions if one.column == "partition" and one.operator == "="]
        named += [{place[0] for place in places} for places in self._places()]
        return [number for number in numbers if low <= number < high and all(number in chosen for chosen in named)]

    def keys(self) -> set[bytes] | None:
        """The keys of which one is that of every matching row; None if the filter names none."""
        named = [
            {value for value in one.values if isinstance(value, bytes)}
            for one in self.conditions
            if one.column == "key" and one.operator == "="
        ]
        return set.intersection(*named) if named else None

    def offsets(self, partition: int) -> Bounds:
        """A range with the offsets of all matching rows of a partition."""
        low, high = self._bounds("offset")
        for places in self._places():
            offsets = [offset for number, offset in places if number == partition]
            low, high = max(low, min(offsets, default=high)), min(high, max(offsets, default=low - 1) + 1)
        return low, high

    def sequences(self) -> Bounds:
        """A range with the log sequences of all matching events."""
        return self._bounds("sequence")

    def walls(self) -> Bounds:
        """A range with the times at which all matching items were produced."""
        return self._bounds("produced_at")

    def keep(self, batches: Iterable[pa.RecordBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The matching rows of batches that have the columns of the filter, with only these columns."""
        for batch in batches:
            mask = None
            for condition in self.conditions:
                one = condition.mask(batch.column(condition.column))
                mask = one if mask is None else pc.and_(mask, one)
            kept = batch.filter(mask)  # null is no match
            if kept.num_rows:
                yield kept.select(list(columns))

    def _bounds(self, column: str) -> Bounds:
        low, high = -ENDLESS, ENDLESS
        for condition in self.conditions:
            if condition.column == column:
                least, end = condition.bounds()
                low, high = max(low, least), min(high, end)
        return low, high

    def _places(self) -> list[list[tuple[int, int]]]:
        """For each condition that ids are equal: the partitions and offsets of those ids that are well-formed."""
        return [[*_parsed_ids(one.values)] for one in self.conditions if one.column == "id" and one.operator == "="]


def _parsed_ids(ids: Iterable[Value]) -> Iterator[tuple[int, int]]:
    for one in ids:
        with suppress(InvalidRequest):
            yield parse_id(str(one))


# -- parsing -----------------------------------------------------------------------------------------


def parse_filter(text: str, table: str, read_instant: ReadInstant) -> RowFilter:
    """Parse the option `where` for a table. InvalidRequest if it has more than this module can do."""
    return _Parser(text, table, read_instant).parse()


class _Parser:
    """Parses `column operator value AND …`, with the operators = < <= > >= IN and BETWEEN."""

    def __init__(self, text: str, table: str, read_instant: ReadInstant) -> None:
        self._text = text
        self._table = table
        self._schema = TABLES[table]
        self._read_instant = read_instant
        self._tokens = [*self._split(text)]
        self._at = 0

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                self._refuse(f"it has {text[at:].strip()!r:.40}")
            at = found.end()
            yield str(found.lastgroup), found[str(found.lastgroup)]

    def parse(self) -> RowFilter:
        found = [*self._condition()]
        while self._at < len(self._tokens):
            self._expect("AND")
            found += self._condition()
        return RowFilter(tuple(found))

    def _condition(self) -> Iterator[Condition]:
        column = self._column()
        kind, sign = self._next()
        word = sign.upper()
        if kind == "sign" and sign in ("=", "==", "<", "<=", ">", ">="):
            yield Condition(column, "=" if sign == "==" else sign, (self._value(column),))
        elif word == "BETWEEN":
            yield Condition(column, ">=", (self._value(column),))
            self._expect("AND")
            yield Condition(column, "<=", (self._value(column),))
        elif word == "IN":
            self._expect("(")
            values = [self._value(column)]
            while (more := self._next()[1]) == ",":
                values.append(self._value(column))
            if more != ")" or len(values) > MAX_VALUES:
                self._refuse(f"the list of {column} has no end, or more than {MAX_VALUES} values")
            yield Condition(column, "=", tuple(values))
        else:
            self._refuse(f"{sign!r:.40} follows {column}")

    def _column(self) -> str:
        kind, given = self._next()
        name = given.strip("`").lower()
        if kind != "name" or name not in self._schema.names:
            self._refuse(f"{given!r:.40} is no column of table {self._table}")
        if self._schema.field(name).type in (schemas.SPAN, schemas.HEADERS):
            self._refuse(f"{name} cannot be compared")
        return name

    def _value(self, column: str) -> Value:
        kind, given = self._next()
        if kind == "name" and given.upper() == "TIMESTAMP":
            kind, given = self._next()
        wanted: Any = self._schema.field(column).type
        text = given[1:-1].replace("''", "'") if kind == "text" else given
        if wanted == schemas.INSTANT and kind in ("text", "number"):
            return self._read_instant(f"{column} in where", text)
        if kind == "number" and wanted in LARGEST:
            if not -LARGEST[wanted] <= int(text) <= LARGEST[wanted]:
                self._refuse(f"{text} is too large for {column}")
            return int(text)
        if kind == "text" and wanted == pa.string():
            return text
        if wanted == pa.binary() and kind in ("text", "hex"):
            with suppress(ValueError):
                return text.encode() if kind == "text" else bytes.fromhex(given[2:-1])
        return self._refuse(f"{given!r:.40} is no value for {column}")

    def _expect(self, word: str) -> None:
        found = self._next()[1]
        if found.upper() != word:
            self._refuse(f"{found!r:.40} is where {word} must be")

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            self._refuse("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidRequest(f"where is {self._text!r:.200}, and {why}; {EXAMPLE}")
