"""Generate the tables of item fields in docs/format.md and docs/spark.md from src/penstock/words/fields.py.

    python scripts/field_tables.py            writes them
    python scripts/field_tables.py --check    names each file that is not up to date, and fails if there is one

A table is everything between two HTML comments in the document.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.api import arrow
from penstock.spark.options import SPARK_TYPES
from penstock.spark.source import spark_schema
from penstock.tables.schemas import ITEMS
from penstock.words.clock import DAY
from penstock.words.fields import BY_NAME, GIVEN, STORED, Field, FieldType
from penstock.words.limits import KIB, MIB

DOCS = Path(__file__).parent.parent / "docs"
NOTES = {
    "key": "null without one",
    "payload": "`cast(payload AS string)` where it is text",
    "headers": "only with includeHeaders=true, or when `columns` names it",
    "at": "null if at once",
    "ttl": "null if for ever",
    "origin_queue": "else null",
}


def frame_columns() -> str:
    """The columns of a DATA frame."""
    rows = []
    for field, column in STORED:
        if field.name != "key_id":  # described with the key
            how = f"{column.layout.each}{_join(column.layout.each)}{column.format_note}" if column.format_note else column.layout.each
            rows.append(("–" if column.bit < 0 else str(column.bit), field.name, how, column.layout.constant))
    return _table(("bit", "column", "stored as", "when constant"), rows)


def _join(before: str) -> str:
    return ": " if before.endswith("MessagePack") else ", " if before.startswith("n ×") or before.endswith("bytes") else "; "


def items_table() -> str:
    """The columns of the items table, with Spark's types."""
    rows = [(one.name, one.dataType.simpleString(), "; ".join(_descriptions(BY_NAME[one.name]))) for one in spark_schema(ITEMS)]
    rows.append(
        ("generation", "int", "how often the queue had been resized when it was produced, plus 1; only with includeGeneration=true")
    )
    return _table(("column", "type", ""), rows)


def _descriptions(field: Field) -> Iterable[str]:
    yield field.meaning[0].lower() + field.meaning[1:]
    if field.name in NOTES:
        yield NOTES[field.name]


def written_columns() -> str:
    """The columns that a DataFrame may have when it is written to a queue."""
    rows = [(name, SPARK_TYPES.get(BY_NAME[name].type, arrow.accepted_types(name)), _limits(BY_NAME[name])) for name in GIVEN]
    return _table(("column", "type", "limits"), rows)


def _limits(field: Field) -> str:
    if field.type is FieldType.INSTANT:
        return "from 1970 to 9999"
    if field.type is FieldType.SPAN:
        return f"{field.low} microsecond to {field.high // (365 * DAY)} years"
    if field.type is FieldType.SMALL:
        return f"{field.low} to {field.high}; null is {field.stored.missing_value if field.stored else 0}"
    if field.name == "payload":
        return f"{field.high // MIB} MiB; never null. A string makes the encoding `text`, unless it is given"
    return f"{field.high // KIB} KiB in all" if field.type is FieldType.HEADERS else f"{field.high:,} bytes"


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [tuple(head), *rows]
    formatted = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines]
    return "\n".join([formatted[0], "|---" * len(lines[0]) + "|", *formatted[1:]])


TABLES = {
    "format.md": {"columns of a frame": frame_columns},
    "spark.md": {"columns of table items": items_table, "columns that can be written": written_columns},
}


def with_tables(text: str, tables: dict[str, str]) -> str:
    """A document with its tables replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by scripts/field_tables.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def main(check: bool) -> int:
    stale = 0
    for file, tables in TABLES.items():
        path = DOCS / file
        text = path.read_text("utf-8")
        right = with_tables(text, {name: make() for name, make in tables.items()})
        if check and text != right:
            print(f"docs/{file} is not up to date; run python scripts/field_tables.py")
            stale = 1
        elif not check:
            path.write_text(right, "utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
