"""The Arrow schemas of the tables.

Owns: the schemas of `items`, `events`, `state` and `dead`, by name in `TABLES`; `select_columns`; `batch_of`. Every
record batch of a table, or of some of its columns, has exactly these types. Only plain Arrow types that Spark supports
are used: no unsigned numbers and no dictionaries.
"""

from collections.abc import Sequence

import pyarrow as pa

from penstock.words.fields import BY_NAME, FieldType, Surface, fields_on

INSTANT = pa.timestamp("us", "UTC")
SPAN = pa.duration("us")
HEADERS = pa.map_(pa.string(), pa.binary())

ARROW_TYPES = {
    FieldType.BYTES: pa.binary(),
    FieldType.TEXT: pa.string(),
    FieldType.SMALL: pa.int32(),
    FieldType.INT: pa.int32(),
    FieldType.LONG: pa.int64(),
    FieldType.INSTANT: INSTANT,
    FieldType.SPAN: SPAN,
    FieldType.HEADERS: HEADERS,
}


def _schema(*columns: str, **types: FieldType) -> pa.Schema:
    """A schema of these columns. A column is a field of items, or has its type in `types`."""
    return pa.schema({name: ARROW_TYPES[types.get(name) or BY_NAME[name].type] for name in columns})


_FIRST = ("id", "partition", "offset", "key")
"""The columns that identify an item come first."""
ITEMS = _schema(*_FIRST, *(field.name for field in fields_on(Surface.TABLE) if field.name not in _FIRST))
"""The items that were produced. `origin_queue` and `origin_id` are null unless the item came from another queue, as a
dead letter or by a redrive."""

EVENTS = _schema(
    *("event", "id", "partition", "offset", "at", "attempt", "reason", "consumer", "lease", "destination", "source", "sequence"),
    **dict.fromkeys(("event", "reason", "consumer", "lease", "destination", "source"), FieldType.TEXT),
    attempt=FieldType.INT,
    sequence=FieldType.LONG,
)
"""What happened to items. `lease` is the lease number in hexadecimal digits; `sequence` is that of the log frame."""

STATE = _schema(
    *("id", "partition", "offset", "state", "key", "kind", "reference", "priority", "attempts", "reason", "consumer"),
    *("produced_at", "ready_at", "lease_until", "size_bytes"),
    **dict.fromkeys(("state", "reason", "consumer"), FieldType.TEXT),
    **dict.fromkeys(("ready_at", "lease_until"), FieldType.INSTANT),
)
"""Items that are not completed. `ready_at` is when a scheduled item becomes ready, `size_bytes` that of the payload."""

DEAD = _schema(
    *ITEMS.names,
    *("reason", "attempts", "buried_at", "first_failed_at", "last_failed_at", "dead_queue", "dead_id"),
    **dict.fromkeys(("reason", "dead_queue", "dead_id"), FieldType.TEXT),
    **dict.fromkeys(("buried_at", "first_failed_at", "last_failed_at"), FieldType.INSTANT),
)
"""Dead letters. `id`, `partition` and `offset` are those in the queue in which they were buried. `dead_queue` and
`dead_id` say where they are now: in a dead queue, or still in the same queue."""

TABLES = {"items": ITEMS, "events": EVENTS, "dead": DEAD, "state": STATE}


def batch_of(arrays: Sequence[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """A record batch that has the right number of rows even if it has no columns."""
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), rows, [None], children=[]))


def select_columns(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Some columns of a schema, in the order given."""
    return pa.schema([schema.field(name) for name in columns])
