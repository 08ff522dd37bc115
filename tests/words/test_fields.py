"""The table of fields agrees with the rest of the package. A new field must be added wherever one of these tests then
fails.

Written by hand, because people and type checkers read them, are the columns of `Batch`, the fields of `NewItem` and
`single_item_batch`, the properties of `Item`, the parameters of `produce`, the options of the command line, and the
text of docs/api.md. Everything else is derived from the table.
"""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import penstock
from penstock.api import arrow
from penstock.api.items import Item, ItemSource, NewItem, single_item_batch
from penstock.cli import text_output
from penstock.cli.option_values import FIELD_OPTIONS, ITEM_OPTIONS
from penstock.logs import columns
from penstock.logs.arrow_batch import to_arrow
from penstock.rules.records import Produced
from penstock.rules.routing import key_ids
from penstock.spark.jobs import row_mapping
from penstock.tables import schemas
from penstock.words import origin, values
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.fields import BY_NAME, COLUMNS, FIELDS, GIVEN, STORED, Field, Surface, fields_on
from tests.logs.batches import framed

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
FULL = Batch(
    *([b"p"], [b"k"], key_ids([b"k"]), [values.encode_headers({"a": "b"})], ["k"], ["e"], ["r"], bytes([3]), [1], [2], [bytes(16)]),
    origins=[origin.encode(origin.Origin("q", 1, "0-1"))],
    dedup_windows=[7],
)
"""An item with a value in every column."""


def names(fields: Iterable[Field]) -> list[str]:
    return [field.name for field in fields]


# -- the table ---------------------------------------------------------------------------------------


def test_the_column_bits_of_existing_files_do_not_change() -> None:
    assert columns.BITS == {
        "key": 1 << 0,
        "key_id": 1 << 0,
        "headers": 1 << 1,
        "kind": 1 << 2,
        "encoding": 1 << 3,
        "reference": 1 << 4,
        "priority": 1 << 5,
        "at": 1 << 6,
        "ttl": 1 << 7,
        "dedup": 1 << 8,
        "parts": 1 << 9,
        "origin": 1 << 10,
        "dedup_window": 1 << 11,
    }
    assert columns.KNOWN == (1 << 12) - 1


def test_names_are_unique_and_bits_ascend() -> None:
    assert len(BY_NAME) == len(FIELDS)
    assert [column.bit for _, column in STORED] == sorted(column.bit for _, column in STORED)
    assert all(field.source in BY_NAME for field in FIELDS if field.source)
    assert all(field.meaning and not field.meaning.endswith(".") for field in FIELDS)


def test_every_field_a_producer_gives_is_stored_and_has_a_limit() -> None:
    assert all(field.stored is not None and field.high > field.low for field in fields_on(Surface.GIVEN))


# -- by hand -----------------------------------------------------------------------------------------


def test_a_batch_has_the_stored_columns() -> None:
    assert list(Batch.__struct_fields__) == [column.name for _, column in COLUMNS]
    assert all(getattr(FULL, column.name) is not None for _, column in COLUMNS), "the item of these tests has everything"


def test_a_new_item_has_every_field_a_producer_gives() -> None:
    assert NewItem.__struct_fields__ == (*GIVEN, "queue")
    assert tuple(inspect.signature(single_item_batch).parameters) == GIVEN


@pytest.mark.parametrize("queue", [penstock.Queue, penstock.AsyncQueue])
def test_produce_has_a_parameter_for_every_field_a_producer_gives(queue: type[penstock.Queue] | type[penstock.AsyncQueue]) -> None:
    taken = list(inspect.signature(queue.produce).parameters)
    assert taken == ["self", "value", *GIVEN[1:], "request_id", "timeout"]
    assert f"`queue.produce(value, *, {', '.join(taken[2:])})`" in " ".join(API.split())


def test_an_item_has_a_property_for_every_output_field() -> None:
    told = {name for name in dir(Item) if not name.startswith("_")}
    assert {*names(fields_on(Surface.SHOWN)), *names(fields_on(Surface.LEASED))} == told - {"value", "key_bytes", "queue", "max_attempts"}
    (shown,) = re.findall(r"^An `Item` has ([^.]*)\.", API, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", shown)) == {*names(fields_on(Surface.SHOWN)), "value"}


def test_the_command_line_has_an_option_for_all_but_payload_and_headers() -> None:
    assert {option.name for option in ITEM_OPTIONS} == {*GIVEN, "delay"} - {"payload", "headers"}


# -- derived -----------------------------------------------------------------------------------------


def test_derived_sets_of_fields_equal_the_table() -> None:
    assert arrow.COLUMNS == GIVEN
    assert tuple(row_mapping._BUILDERS) == GIVEN
    assert [option.name for option in FIELD_OPTIONS] == [f"{name}_field" for name in names(fields_on(Surface.CLI_INPUT))]
    assert sorted(schemas.ITEMS.names) == sorted(names(fields_on(Surface.TABLE)))
    assert arrow.item_schema().names == names(fields_on(Surface.LEASED))


def test_the_json_document_of_an_item_has_every_shown_field() -> None:
    document = text_output.item_document(Item(ItemSource("q"), 0, 1, FULL, 0, 1, 1))
    assert sorted(document) == sorted(names(fields_on(Surface.SHOWN)))
    assert list(document) == [  # scripts and people know this order
        *("id", "key", "payload", "attempts", "priority", "produced_at"),
        *("kind", "encoding", "reference", "at", "ttl", "headers", "origin"),
    ]


def test_a_frame_gives_every_column_back() -> None:
    found = columns.FrameColumns(framed(columns.encode([Produced(0, FULL)], Moment(1, 1))))
    assert found.batch() == FULL
    assert ["payload", *found.stored] == names(field for field, _ in COLUMNS)
    assert to_arrow(found).schema.names == [field.name for field, _ in COLUMNS if field.name != "dedup"]
    assert Batch.join([FULL, Batch([b"x"])]).slice(0, 1) == FULL


def test_the_field_tables_in_the_documents_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "field_tables.py", "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
