"""The fields of an item: the one table of them.

Owns: `FIELDS`, which says of each field what it is called, what it means, of which type it is, how it lies in a DATA frame, and where it is
seen; and the views of it that other modules take: the columns of a frame (`STORED`), of a Batch (`COLUMNS`), what a producer may give
(`GIVEN`), what is told of an item (`on`). Arrow's types for these are chosen where pyarrow is needed: tables/schemas.py and
api/arrow.py. A new field is a line here, a column of `Batch`, a field of `NewItem` and `Item`, and the code that gives it meaning;
tests/words/test_fields.py names every place.
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
    """What a value is."""

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
    """words/origin.py; stored as a MessagePack array."""


class ColumnLayout(Enum):
    """How a column lies in a DATA frame of n items: for each item, and when all have the same value (a constant)."""

    BYTES = ("offsets, then data: (n+1) × i32, bytes", "never")
    OPTIONAL_BYTES = ("bitmap, offsets, data", "never")
    TEXTS = ("bitmap, offsets, data (UTF-8)", "u32 length, bytes")
    KEY_IDS = ("n × u64", "never")
    SMALL = ("n × u8", "1 byte")
    NUMBERS = ("n × i64", "8 bytes")
    DIGESTS = ("bitmap; n × 16 bytes", "never")
    PARTS = ("u32 length, MessagePack", "never")
    """Not of the items, but of the produces that share a frame: logs/columns.py."""

    @property
    def each(self) -> str:
        return self.value[0]

    @property
    def constant(self) -> str:
        return self.value[1]


class Surface(Flag):
    """Where a field is seen."""

    GIVEN = auto()
    """A producer may give it: as an option of NewItem and produce, and as a column of a table of items to be produced."""
    CLI_INPUT = auto()
    """The command line takes it from a field of a JSON line or a column of a CSV file."""
    SHOWN = auto()
    """In the JSON document of an item."""
    LEASED = auto()
    """A column of the record batches of leased items and of cursors."""
    TABLE = auto()
    """A column of the tables items and dead."""
    TOLD = SHOWN | LEASED | TABLE


NOWHERE: Final = Surface(0)


class Column(msgspec.Struct, frozen=True):
    """Where a field is stored: its column in a Batch and in a DATA frame."""

    name: str
    """In a Batch."""
    form: ColumnLayout
    bit: int = -1
    """Its number in a frame; -1: every frame has it."""
    missing_value: Any = None
    """What an item without a value has there."""
    layout: str = ""
    """What docs/format.md says of it besides."""


class Field(msgspec.Struct, frozen=True):
    """One field of an item."""

    name: str
    type: FieldType
    meaning: str
    """What it is, as documents and the command line say it."""
    surfaces: Surface = NOWHERE
    stored: Column | None = None
    high: int = 0
    """The limit: of bytes and texts how long, of numbers how large."""
    low: int = 0
    source: str = ""
    """The stored field that it is made of, when that is another one."""


_GIVEN = Surface.GIVEN | Surface.TOLD
_NAME = Surface.GIVEN | Surface.CLI_INPUT | Surface.TOLD
_KEY = "then the key ids: n × u64, 0 where there is no key"
_PARTS = "`[[count, request, ids, source, sequence, places], …]`"
_ORIGIN = "each value a MessagePack array, the origin of a transferred item"

FIELDS: Final = (
    Field("id", FieldType.TEXT, "Its partition and its offset: unique in its queue", Surface.TOLD),
    Field("partition", FieldType.INT, "The part of the queue in which it lies", Surface.LEASED | Surface.TABLE),
    Field("offset", FieldType.LONG, "Its number in its partition", Surface.LEASED | Surface.TABLE),
    Field(
        "payload",
        FieldType.BYTES,
        "What is to be handled",
        _GIVEN,
        Column("payloads", ColumnLayout.BYTES, missing_value=b""),
        MAX_PAYLOAD_BYTES,
    ),
    Field(
        "key",
        FieldType.BYTES,
        "Items of one key are handled in order, one at a time",
        _NAME,
        Column("keys", ColumnLayout.OPTIONAL_BYTES, 0, layout=_KEY),
        MAX_KEY_BYTES,
    ),
    Field(
        "key_id",
        FieldType.LONG,
        "What the key hashes to (rules/routing.py)",
        NOWHERE,
        Column("key_ids", ColumnLayout.KEY_IDS, 0, 0),
        (1 << 64) - 1,
    ),
    Field(
        "headers",
        FieldType.HEADERS,
        "Texts or bytes by name",
        _GIVEN,
        Column("headers", ColumnLayout.OPTIONAL_BYTES, 1, layout="each value a MessagePack map"),
        MAX_HEADERS_BYTES,
    ),
    Field("kind", FieldType.TEXT, "A word to tell items apart by", _NAME, Column("kinds", ColumnLayout.TEXTS, 2), MAX_NAME_BYTES),
    Field(
        "encoding",
        FieldType.TEXT,
        "How consumers are to read the payload",
        _GIVEN,
        Column("encodings", ColumnLayout.TEXTS, 3),
        MAX_NAME_BYTES,
    ),
    Field("reference", FieldType.TEXT, "A text of yours", _NAME, Column("references", ColumnLayout.TEXTS, 4), MAX_NAME_BYTES),
    Field(
        "priority", FieldType.SMALL, "0 comes first", _GIVEN, Column("priorities", ColumnLayout.SMALL, 5, DEFAULT_PRIORITY), LAST_PRIORITY
    ),
    Field("produced_at", FieldType.INSTANT, "When it was stored", Surface.TOLD),
    Field(
        "at",
        FieldType.INSTANT,
        "Not before then",
        _GIVEN,
        Column("ats", ColumnLayout.NUMBERS, 6, 0, "wall microseconds, 0 for now"),
        LAST_INSTANT,
    ),
    Field(
        "ttl",
        FieldType.SPAN,
        "Given up when it has waited so long",
        _GIVEN,
        Column("ttls", ColumnLayout.NUMBERS, 7, 0, "microseconds, 0 for none"),
        MAX_DELAY,
        low=1,
    ),
    Field(
        "dedup",
        FieldType.BYTES,
        "A second item of this id adds nothing while the queue remembers the first",
        Surface.GIVEN | Surface.CLI_INPUT,
        Column("dedups", ColumnLayout.DIGESTS, 8, layout="digests"),
        MAX_NAME_BYTES,
    ),
    Field("parts", FieldType.BYTES, "The produces that share the frame", NOWHERE, Column("", ColumnLayout.PARTS, 9, layout=_PARTS)),
    Field(
        "origin",
        FieldType.ORIGIN,
        "The item that a transferred one was before",
        Surface.SHOWN,
        Column("origins", ColumnLayout.OPTIONAL_BYTES, 10, layout=_ORIGIN),
        MAX_ORIGIN_BYTES,
    ),
    Field("origin_queue", FieldType.TEXT, "Where a dead letter, redriven item or follow-up comes from", Surface.TABLE, source="origin"),
    Field("origin_id", FieldType.TEXT, "Its id there", Surface.TABLE, source="origin"),
    Field("size_bytes", FieldType.LONG, "How large the payload is", source="payload"),
    Field("attempts", FieldType.INT, "How often it was leased, this time included", Surface.SHOWN | Surface.LEASED),
)
"""In the order of the columns of a frame, and of most tables."""
BY_NAME: Final = {field.name: field for field in FIELDS}
STORED: Final = tuple((field, field.stored) for field in FIELDS if field.stored is not None)
"""Those with a column of a frame, in their order there, and that column."""
COLUMNS: Final = tuple((field, column) for field, column in STORED if column.name)
"""Those with a column of a Batch, in their order there, and that column."""
GIVEN: Final = tuple(field.name for field in FIELDS if Surface.GIVEN in field.surfaces)


def fields_on(surface: Surface) -> list[Field]:
    """The fields that are seen there."""
    return [field for field in FIELDS if surface in field.surfaces]
