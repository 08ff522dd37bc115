"""The columns that a load is ordered by: what their texts mean.

Owns: `order_column`, the names under which the columns are kept; `value_kind`, which finds out what a text is; and
`sort_type` and `sort_column`, which turn texts into values that sort as they are meant. CSV, and JSON without a schema,
give texts only, and as texts 10 comes before 9. So a load looks at all values of such a column: numbers are sorted as
numbers, times as times. If they are of several kinds, or of one whose order is not known, the load is refused. The
items themselves keep the texts.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F

from penstock.words.errors import InvalidRequest

# Bits, so that the kinds of all values of a column are one number. Those of numbers are the lowest: the highest of them
# says how the column is sorted.
WHOLE, LONG_WHOLE, DECIMAL, LONG_DECIMAL, EXPONENT, FLOAT = (1 << bit for bit in range(6))
DATE, ZONED_TIME, TEXT, LONG_NUMBER, LOCAL_NUMBER, UNKNOWN_TIME, CLOCK_TIME, NESTED = (1 << bit for bit in range(6, 14))
NUMBERS = WHOLE | LONG_WHOLE | DECIMAL | LONG_DECIMAL | EXPONENT | FLOAT
KIND_NAMES: Mapping[int, str] = {
    NUMBERS: "numbers",
    DATE: "dates and times without a time zone",
    ZONED_TIME: "times with a time zone",
    TEXT: "texts",
    LONG_NUMBER: "numbers of more than 20 digits, or 18 after the point",
    LOCAL_NUMBER: "numbers with commas, spaces, signs or units",
    UNKNOWN_TIME: "dates of an unknown format, or that do not exist",
    CLOCK_TIME: "times of day that are not written as 09:05 or 21:05",
    NESTED: "objects or lists",
}
_ADVICE = {
    LONG_NUMBER: "give a schema with a type that fits, such as 'decimal(38,0)'",
    LOCAL_NUMBER: "write them as 1234.5, or give a schema: string sorts them as texts",
    UNKNOWN_TIME: "write them as in ISO 8601 (2026-05-01T12:00:00Z), or give a schema and the option timestampFormat",
    CLOCK_TIME: "write them so, or give a schema: string sorts them as texts",
    NESTED: "order by a column of numbers, texts or times",
}
_EXACT = "decimal(38,18)"
_TYPES = {WHOLE: "bigint", LONG_WHOLE: "bigint", DECIMAL: _EXACT, LONG_DECIMAL: _EXACT, EXPONENT: _EXACT, FLOAT: "double"}

_DECIMAL = r"[+-]?(\d{1,20}(\.\d{0,18})?|\.\d{1,18})"
_DATE = r"\d{4}-\d{2}-\d{2}"
_TIME = rf"{_DATE}[T ]\d{{2}}:\d{{2}}(:\d{{2}}(\.\d{{1,9}})?)?"
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_KINDS = (
    (r"[+-]?\d{1,15}", WHOLE),
    (r"[+-]?\d{16,18}", LONG_WHOLE),
    (rf"(?=(\D*\d){{18}}|[+-]?\d{{16}}){_DECIMAL}", LONG_DECIMAL),
    (_DECIMAL, DECIMAL),
    (r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", EXPONENT),
    (r"[+-]?(\d+\.?\d*|\.\d+)", LONG_NUMBER),
    (rf"{_DATE}|{_TIME}", DATE),
    (rf"{_TIME} ?([Zz]|[+-]\d{{2}}(:?\d{{2}})?)", ZONED_TIME),
    (r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([T ,].*)?", UNKNOWN_TIME),
    (r"(\d|\d{3,}):\d{2}(:\d{2}([.,]\d+)?)?|\d{1,2}(:\d{2}){0,2} ?[AaPp]\.?[Mm]\.?", CLOCK_TIME),
    (rf"(?i)(?=.*\d\D+\d).*\b({_MONTHS})[a-z]*\b.*", UNKNOWN_TIME),
    (
        r"[$€£¥]?[ \u00a0\u202f]?[+\u2212-]?\d+([.,'’_ \u00a0\u202f]\d+)*[ \u00a0\u202f]?([%‰€$£¥]|[ \u00a0\u202f][A-Za-z]{1,3})?",
        LOCAL_NUMBER,
    ),
    (r"0[xX][0-9A-Fa-f]+", LOCAL_NUMBER),
)


class ColumnKinds(NamedTuple):
    """The values of a column: the bits of their kinds, and a value of the lowest kind and one of the highest."""

    kinds: int
    lowest: str | None = None
    highest: str | None = None


def order_column(number: int) -> str:
    """The name under which a load keeps the column of a term of order_by."""
    return f"__order_{number}"


def value_kind(text: Column, json: bool) -> Column:
    """The kind of a text, as a bit; NULL for NULL. json: texts may be objects or lists of JSON."""
    trimmed = F.trim(text)
    found = F.when(trimmed.rlike(r"^[\[{]"), F.lit(NESTED)) if json else F.when(F.lit(False), F.lit(NESTED))
    for pattern, kind in _KINDS:
        found = found.when(trimmed.rlike(f"^({pattern})$"), _checked(trimmed, kind))
    return F.when(text.isNotNull(), found.otherwise(TEXT))


def _checked(text: Column, kind: int) -> Column:
    """The kind of a text that looks like one of a kind."""
    if kind & (DATE | ZONED_TIME):
        return F.when(text.try_cast("timestamp").isNull(), UNKNOWN_TIME).otherwise(kind)
    if kind == EXPONENT:  # 1e3 is an exact number as well, 1e300 and 1e-30 are not
        return F.when(text.try_cast(_EXACT).cast("double") == text.try_cast("double"), EXPONENT).otherwise(FLOAT)
    return F.lit(kind)


def sort_type(name: str, found: ColumnKinds) -> int:
    """The kind by which the column is sorted. InvalidRequest if there is none by which all its values can be."""
    kinds = NUMBERS if found.kinds & NUMBERS and not found.kinds & ~NUMBERS else found.kinds
    for kind, advice in _ADVICE.items():
        if kinds == kind:
            raise InvalidRequest(f"the column {name!r:.100} to order by has {KIND_NAMES[kind]} ({_shown(found.highest)}); {advice}")
    if kinds == NUMBERS and found.kinds & FLOAT and found.kinds & (LONG_WHOLE | LONG_DECIMAL):
        raise InvalidRequest(
            f"the column {name!r:.100} to order by has very large or small numbers ({_shown(found.highest)}) beside numbers of more than "
            "15 digits, which floating point cannot tell apart; give a schema with a type that fits, such as 'double'"
        )
    if kinds and kinds not in KIND_NAMES:
        raise InvalidRequest(
            f"the column {name!r:.100} to order by has values of several kinds ({_listed(found)}), which have no common order; "
            "make them one kind, or give a schema with its type: string sorts all of them as texts"
        )
    return 1 << (found.kinds.bit_length() - 1) if kinds == NUMBERS else kinds or TEXT


def _listed(found: ColumnKinds) -> str:
    """The kinds with examples where they are known: those of the lowest and the highest."""
    names = [name for kind, name in KIND_NAMES.items() if found.kinds & kind]
    names[0], names[-1] = f"{names[0]} such as {_shown(found.lowest)}", f"{names[-1]} such as {_shown(found.highest)}"
    return ", ".join(names)


def _shown(value: str | None) -> str:
    return f"{value!r:.60}"


def sort_column(text: Column, kind: int) -> Column:
    """A text as a value that sorts as it is meant."""
    trimmed = F.trim(text)
    if kind in _TYPES:
        return trimmed.cast(_TYPES[kind])
    if kind & (DATE | ZONED_TIME):  # nanoseconds: Spark's timestamps have microseconds
        finer = F.rpad(F.regexp_extract(trimmed, r"\.\d{6}(\d{1,3})", 1), 3, "0").cast("decimal(38,0)")
        if kind == DATE:  # as UTC: in the session's zone, an hour of the year may be there twice or not at all
            missing = F.when(trimmed.rlike(f"^{_DATE}$"), "T00:00:00Z").when(trimmed.rlike(r"^[^:]*:[^:]*$"), ":00Z").otherwise("Z")
            trimmed = F.concat(trimmed, missing)
        return (F.unix_micros(trimmed.cast("timestamp")).cast("decimal(38,0)") * F.lit(1_000) + finer).cast("decimal(38,0)")
    return text
