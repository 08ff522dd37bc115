"""Maps the rows of files to the columns of items, and finds the rows that cannot be items.

Owns: `ColumnMapping` (the caller's choice of columns), `REASONS` (why a row cannot be an item; the first that applies
is given) and `map_rows`. Rows without a reason must pass the writer's checks (api/arrow.py): one bad row would fail the
whole write.
"""

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Final, NamedTuple, TypeAlias

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from penstock.spark.jobs.order_columns import order_column
from penstock.spark.jobs.source_files import FAULT, FILE, LINE, NOT_UTF8, data_columns, quoted
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.fields import BY_NAME, GIVEN, FieldType
from penstock.words.limits import LAST_PRIORITY, MAX_DELAY, MAX_HEADERS_BYTES, MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES

REASON, DETAIL, RAW = "__reason", "__detail", "__raw"
_HEADER_OVERHEAD = 10
"""Bytes that MessagePack may add to a header's name and value."""

NOT_A_ROW = "not a row of this format"
NO_OBJECT = "not an object, so it has no columns"
NO_PAYLOAD = "payload is null"
LONG_PAYLOAD = f"payload has more than {MAX_PAYLOAD_BYTES} bytes"
LONG_KEY = f"key has more than {MAX_KEY_BYTES} bytes"
BAD_HEADERS = "headers are not texts by name"
LONG_HEADERS = f"headers have more than {MAX_HEADERS_BYTES} bytes"
BAD_TEXT = "kind, encoding or reference is not valid Unicode"
LONG_TEXT = f"kind, encoding, reference or dedup has more than {MAX_NAME_BYTES} bytes"
EMPTY_DEDUP = "dedup is empty"
BAD_PRIORITY = f"priority is not a whole number from 0 to {LAST_PRIORITY}"
BAD_AT = "at is not a time since 1970"
BAD_TTL = "ttl is not a span of time from 1 microsecond to 10 years"
REASONS: Final = (
    *(NOT_UTF8, NOT_A_ROW, NO_PAYLOAD, LONG_PAYLOAD, LONG_KEY, BAD_HEADERS, LONG_HEADERS),
    *(BAD_TEXT, LONG_TEXT, EMPTY_DEDUP, BAD_PRIORITY, BAD_AT, BAD_TTL),
)


class ColumnMapping(msgspec.Struct, frozen=True):
    """Which columns become which fields. Without a payload column, the payload is the row as JSON."""

    payload: str | None = None
    key: str | None = None
    reference: str | None = None
    kind: str | None = None
    """The kind of all items; not a column."""

    def columns(self, found: Sequence[str]) -> dict[str, str]:
        """The columns by field of an item, for a source with the columns `found`. InvalidRequest if one is missing."""
        chosen = {name: column for name in ("payload", "key", "reference") if (column := getattr(self, name)) is not None}
        for name, column in chosen.items():
            require_column(column, f"for the {name}", found)
        if self.payload is not None or "payload" in found:
            chosen = {**{name: name for name in GIVEN if name in found}, **chosen}
        return chosen


class ItemColumn(NamedTuple):
    """A field of an item, and by reason a condition for rows whose value is wrong."""

    column: Column
    wrong: dict[str, Column]


ColumnBuilder: TypeAlias = Callable[[str, Column, T.DataType], ItemColumn]


def map_rows(rows: DataFrame, mapping: ColumnMapping, order_by: Sequence[str] = ()) -> DataFrame:
    """The rows with the columns of items, and `REASON` (NULL: good), `DETAIL`, `RAW` and `FILE`.

    The columns of `order_by` are kept under the names of `order_column`.
    """
    found = data_columns(rows)
    chosen = mapping.columns(found)
    for name in order_by:
        require_column(name, "to order by", found)
    types = {field.name: field.dataType for field in rows.schema}
    made = {name: _BUILDERS[name](name, F.col(quoted(column)), types[column]) for name, column in chosen.items()}
    detail = F.col(FAULT)
    if "payload" in made:  # the payload is a column, so a line of JSON must be an object
        detail = F.coalesce(detail, F.when(~F.col(LINE).rlike(r"^\s*\{"), NO_OBJECT))
    else:
        made["payload"] = _bytes("payload", F.coalesce(F.col(LINE), _as_json(found)), T.StringType())
        made["encoding"] = ItemColumn(F.lit(values.JSON), {})
    if "encoding" not in made and not isinstance(types[chosen["payload"]], T.BinaryType):
        made["encoding"] = ItemColumn(F.lit(_encoding(types[chosen["payload"]])), {})
    if mapping.kind is not None:
        made["kind"] = ItemColumn(F.lit(mapping.kind), {})
    wrong = {NOT_UTF8: F.col(FAULT) == NOT_UTF8, NOT_A_ROW: detail.isNotNull()}
    for field in made.values():
        for reason, fault in field.wrong.items():
            wrong[reason] = (wrong[reason] | fault) if reason in wrong else fault
    judged = F.coalesce(*(F.when(wrong[reason], F.lit(reason)) for reason in REASONS if reason in wrong))
    kept = [F.col(quoted(name)).alias(order_column(number)) for number, name in enumerate(order_by)]
    added = [judged.alias(REASON), detail.alias(DETAIL), F.coalesce(F.col(LINE), _as_json(found)).alias(RAW), F.col(FILE)]
    return rows.select(*(field.column.alias(name) for name, field in made.items()), *kept, *added)


def require_column(column: str, what: str, found: Sequence[str]) -> None:
    if column not in found:
        raise InvalidRequest(f"the source has no column {column!r:.100} {what}; it has {', '.join(found[:50]) or 'none'}")


def _as_json(columns: Sequence[str]) -> Column:
    return F.to_json(F.struct(*(F.col(quoted(name)) for name in columns)), {"ignoreNullFields": "false"})


def _encoding(type: T.DataType) -> str:
    return values.JSON if isinstance(type, T.StructType | T.MapType | T.ArrayType | T.VariantType) else values.TEXT


# -- fields ------------------------------------------------------------------------------------------


def _bytes(name: str, column: Column, type: T.DataType) -> ItemColumn:
    """payload, key, dedup: bytes as they are; structs, maps and arrays (payload only) as JSON; others as text."""
    if isinstance(type, T.StructType | T.MapType | T.ArrayType | T.VariantType):
        if name != "payload":
            raise InvalidRequest(f"the column for the {name} is {type.simpleString():.100}; give one of text, bytes or numbers")
        column = F.to_json(column)
    elif not isinstance(type, T.StringType | T.BinaryType):
        column = column.cast("string")
    found = column.cast("binary")
    most, reason = {"payload": (MAX_PAYLOAD_BYTES, LONG_PAYLOAD), "key": (MAX_KEY_BYTES, LONG_KEY)}.get(name, (MAX_NAME_BYTES, LONG_TEXT))
    wrong = {reason: F.octet_length(found) > most}
    if name == "payload":
        wrong[NO_PAYLOAD] = found.isNull()
    elif name == "dedup":
        wrong[EMPTY_DEDUP] = F.octet_length(found) == 0
    return ItemColumn(found, wrong)


def _text(name: str, column: Column, type: T.DataType) -> ItemColumn:
    found = column.cast("string")
    return ItemColumn(found, {BAD_TEXT: ~F.is_valid_utf8(found), LONG_TEXT: F.octet_length(found) > MAX_NAME_BYTES})


def _headers(name: str, column: Column, type: T.DataType) -> ItemColumn:
    if isinstance(type, T.StringType):  # expected to be a JSON object; anything else gives NULL
        found, given = F.from_json(column, "map<string,string>"), column
    elif isinstance(type, T.MapType) and isinstance(type.keyType, T.StringType):
        found = given = column
    else:
        raise InvalidRequest(f"the column for the headers is {type.simpleString():.100}; give a map of text to text or bytes")
    found = F.transform_values(found, lambda _, value: value.cast("binary"))
    sizes = F.transform(F.map_entries(found), lambda one: F.octet_length(one["key"]) + F.octet_length(one["value"]) + _HEADER_OVERHEAD)
    size = F.aggregate(sizes, F.lit(0).cast("long"), lambda total, one: total + one)
    without = F.exists(F.map_values(found), lambda value: value.isNull()) | (given.isNotNull() & found.isNull())
    return ItemColumn(found, {BAD_HEADERS: without, LONG_HEADERS: size > MAX_HEADERS_BYTES})


def _priority(name: str, column: Column, type: T.DataType) -> ItemColumn:
    found = column.try_cast("int")
    return ItemColumn(found, {BAD_PRIORITY: column.isNotNull() & (found.isNull() | ~found.between(0, LAST_PRIORITY))})


def _at(name: str, column: Column, type: T.DataType) -> ItemColumn:
    """A timestamp, a text of one, or microseconds since 1970."""
    found = F.timestamp_micros(column) if isinstance(type, T.IntegralType) else column.try_cast("timestamp")
    low, high = (F.timestamp_micros(F.lit(instant)) for instant in (0, values.LAST_INSTANT))
    return ItemColumn(found, {BAD_AT: column.isNotNull() & (found.isNull() | ~found.between(low, high))})


def _ttl(name: str, column: Column, type: T.DataType) -> ItemColumn:
    """An interval, or microseconds."""
    span = isinstance(type, T.DayTimeIntervalType)
    found = column if span else column.try_cast("long")
    low, high = (_span(1), _span(MAX_DELAY)) if span else (F.lit(1), F.lit(MAX_DELAY))
    return ItemColumn(found, {BAD_TTL: column.isNotNull() & (found.isNull() | ~found.between(low, high))})


def _span(micros: int) -> Column:
    return F.make_dt_interval(F.lit(0), F.lit(0), F.lit(0), F.lit(Decimal(micros) / SECOND).cast("decimal(18,6)"))


_BY_TYPE: dict[FieldType, ColumnBuilder] = {
    FieldType.BYTES: _bytes,
    FieldType.TEXT: _text,
    FieldType.HEADERS: _headers,
    FieldType.SMALL: _priority,
    FieldType.INSTANT: _at,
    FieldType.SPAN: _ttl,
}
_BUILDERS = {name: _BY_TYPE[BY_NAME[name].type] for name in GIVEN}
