"""The table of an item's fields.

Owns: `FIELDS` (name, meaning, type, limits, column in a DATA frame, and surfaces of every field) and what is derived
from it: the columns of a frame (`STORED`), the columns of a Batch (`COLUMNS`), the fields a producer may give (`GIVEN`)
and the fields of a surface (`fields_on`).
The Arrow types are chosen in tables/schemas.py and api/arrow.py, so that this module needs no pyarrow.
A new field needs a line here, a column of `Batch`, a field of `NewItem` and `Item`, and the code that uses it;
tests/words/test_fields.py fails for every module that lacks it.
"""

from enum import Enum, Flag, auto
from typing import Any, Final

import msgspec

from penstock.words.limits import (
    DEFAULT_PRIORITY,
    LAST_PRIORITY,
    MAX_DELAY,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
)
from penstock.words.origin import MAX_ORIGIN_BYTES
from penstock.words.values import LAST_INSTANT


class FieldType(Enum):
    """The type of a field's values."""

    BYTES = auto()
    TEXT = auto()
    SMALL = auto()
    """A number from 0 to 255."""
    INT = auto()
    LONG = auto()
    INSTANT = auto()
    """Wall microseconds since 1970."""
    SPAN = auto()
    """Microseconds."""
    HEADERS = auto()
    """Texts or bytes by name; stored as a MessagePack map."""
    ORIGIN = auto()
    """An Origin (words/origin.py); stored as a MessagePack array."""


class ColumnLayout(Enum):
    """How a column is stored in a DATA frame of n items: per item, or as a constant when all values are equal."""

    BYTES = ("offsets, then data: (n+1) × i32, bytes", "never")
    OPTIONAL_BYTES = ("bitmap, offsets, data", "never")
    TEXTS = ("bitmap, offsets, data (UTF-8)", "u32 length, bytes")
    KEY_IDS = ("n × u64", "never")
    SMALL = ("n × u8", "1 byte")
    NUMBERS = ("n × i64", "8 bytes")
    DIGESTS = ("bitmap; n × 16 bytes", "never")
    PARTS = ("u32 length, MessagePack", "never")
    """One entry per produce in the frame, not per item (logs/columns.py)."""

    @property
    def each(self) -> str:
        return self.value[0]

    @property
    def constant(self) -> str:
        return self.value[1]


class Surface(Flag):
    """Where a user gives or sees a field."""

    GIVEN = auto()
    """An option of NewItem and produce, and a column of a table of items to be produced."""
    CLI_INPUT = auto()
    """The command line can read it from a field of a JSON line or a column of a CSV file."""
    SHOWN = auto()
    """A member of the JSON document of an item."""
    LEASED = auto()
    """A column of the record batches of leased items and of cursors."""
    TABLE = auto()
    """A column of the tables items and dead."""
    ALL_OUTPUTS = SHOWN | LEASED | TABLE


NOWHERE: Final = Surface(0)


class Column(msgspec.Struct, frozen=True):
    """The column of a field in a Batch and in a DATA frame."""

    name: str
    """The attribute of Batch; empty when a Batch has no such column."""
    layout: ColumnLayout
    bit: int = -1
    """Its bit in a frame's column bits; -1 when every frame has the column."""
    missing_value: Any = None
    """What the column has for an item without a value."""
    format_note: str = ""
    """Added to the layout in docs/format.md."""


class Field(msgspec.Struct, frozen=True):
    """One field of an item."""

    name: str
    type: FieldType
    meaning: str
    """A phrase for the documents and the command line's help."""
    surfaces: Surface = NOWHERE
    stored: Column | None = None
    high: int = 0
    """The greatest length of bytes and texts in bytes; the greatest number."""
    low: int = 0
    source: str = ""
    """The stored field from which this one is derived."""


_GIVEN = Surface.GIVEN | Surface.ALL_OUTPUTS
_NAME = Surface.GIVEN | Surface.CLI_INPUT | Surface.ALL_OUTPUTS
_KEY = "then the key ids: n × u64, 0 where there is no key"
_PARTS = "`[[count, request, ids, source, sequence, replaced, calls, indexes], …]`"
_ORIGIN = "each value a MessagePack array, the origin of a transferred item"

FIELDS: Final = (
    Field("id", FieldType.TEXT, "Its partition and its offset: unique in its queue", Surface.ALL_OUTPUTS),
    Field("partition", FieldType.INT, "The partition that stores it", Surface.LEASED | Surface.TABLE),
    Field("offset", FieldType.LONG, "Its number in its partition", Surface.LEASED | Surface.TABLE),
    Field(
        "payload",
        FieldType.BYTES,
        "The content of the item",
        _GIVEN,
        Column("payloads", ColumnLayout.BYTES, missing_value=b""),
        MAX_PAYLOAD_BYTES,
    ),
    Field(
        "key",
        FieldType.BYTES,
        "Items of one key are handled in order, one at a time",
        _NAME,
        Column("keys", ColumnLayout.OPTIONAL_BYTES, 0, format_note=_KEY),
        MAX_KEY_BYTES,
    ),
    Field(
        "key_id",
        FieldType.LONG,
        "The hash of the key (rules/routing.py)",
        NOWHERE,
        Column("key_ids", ColumnLayout.KEY_IDS, 0, 0),
        (1 << 64) - 1,
    ),
    Field(
        "headers",
        FieldType.HEADERS,
        "Texts or bytes by name",
        _GIVEN,
        Column("headers", ColumnLayout.OPTIONAL_BYTES, 1, format_note="each value a MessagePack map"),
        MAX_HEADERS_BYTES,
    ),
    Field("kind", FieldType.TEXT, "A word for the sort of item it is", _NAME, Column("kinds", ColumnLayout.TEXTS, 2), MAX_NAME_BYTES),
    Field(
        "encoding",
        FieldType.TEXT,
        "How consumers decode the payload",
        _GIVEN,
        Column("encodings", ColumnLayout.TEXTS, 3),
        MAX_NAME_BYTES,
    ),
    Field("reference", FieldType.TEXT, "Any text of the producer", _NAME, Column("references", ColumnLayout.TEXTS, 4), MAX_NAME_BYTES),
    Field(
        "priority",
        FieldType.SMALL,
        "0 is handled first, 9 last",
        _GIVEN,
        Column("priorities", ColumnLayout.SMALL, 5, DEFAULT_PRIORITY),
        LAST_PRIORITY,
    ),
    Field("produced_at", FieldType.INSTANT, "When it was stored", Surface.ALL_OUTPUTS),
    Field(
        "at",
        FieldType.INSTANT,
        "Not leased before this time",
        _GIVEN,
        Column("ats", ColumnLayout.NUMBERS, 6, 0, "wall microseconds, 0 for now"),
        LAST_INSTANT,
    ),
    Field(
        "ttl",
        FieldType.SPAN,
        "Buried when it has waited this long",
        _GIVEN,
        Column("ttls", ColumnLayout.NUMBERS, 7, 0, "microseconds, 0 for none"),
        MAX_DELAY,
        low=1,
    ),
    Field(
        "dedup",
        FieldType.BYTES,
        "A later item with the same id is not added while the queue remembers the first",
        Surface.GIVEN | Surface.CLI_INPUT,
        Column("dedups", ColumnLayout.DIGESTS, 8, format_note="digests"),
        MAX_NAME_BYTES,
        low=1,
    ),
    Field(
        "parts",
        FieldType.BYTES,
        "The produces whose items are in the frame",
        NOWHERE,
        Column("", ColumnLayout.PARTS, 9, format_note=_PARTS),
    ),
    Field(
        "origin",
        FieldType.ORIGIN,
        "The item from which a transferred one was made",
        Surface.SHOWN,
        Column("origins", ColumnLayout.OPTIONAL_BYTES, 10, format_note=_ORIGIN),
        MAX_ORIGIN_BYTES,
    ),
    Field(
        "dedup_window",
        FieldType.SPAN,
        "How long its dedup id is remembered, if not for the queue's own window",
        Surface.GIVEN,
        Column("dedup_windows", ColumnLayout.NUMBERS, 11, 0, "microseconds, 0 for the queue's own"),
        MAX_DELAY,
        low=1,
    ),
    Field(
        "origin_queue",
        FieldType.TEXT,
        "The queue that a dead letter, redriven item or follow-up comes from",
        Surface.TABLE,
        source="origin",
    ),
    Field("origin_id", FieldType.TEXT, "Its id in that queue", Surface.TABLE, source="origin"),
    Field("size_bytes", FieldType.LONG, "The size of the payload", source="payload"),
    Field("attempts", FieldType.INT, "How often it was leased, including this time", Surface.SHOWN | Surface.LEASED),
)
"""In the order of the columns of a frame, and of most tables."""
BY_NAME: Final = {field.name: field for field in FIELDS}
STORED: Final = tuple((field, field.stored) for field in FIELDS if field.stored is not None)
"""The fields with a column in a frame, in the order of a frame, each with its column."""
COLUMNS: Final = tuple((field, column) for field, column in STORED if column.name)
"""The fields with a column in a Batch, in the order of a Batch, each with its column."""
GIVEN: Final = tuple(field.name for field in FIELDS if Surface.GIVEN in field.surfaces)


def fields_on(surface: Surface) -> list[Field]:
    """The fields of a surface, in table order."""
    return [field for field in FIELDS if surface in field.surfaces]
