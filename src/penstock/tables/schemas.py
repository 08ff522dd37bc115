"""The columns of the tables that a queue can be read as.

Owns: the Arrow schemas of `items`, `events`, `state` and `dead`, by name in `TABLES`; `narrowed`; `batch_of`. Every record batch of a
table, or of some of its columns, has exactly these types, so that whoever reads them need look at the first only.
Arrow's plain types, and none that Spark cannot hold: no unsigned numbers, no dictionaries.
"""

from collections.abc import Sequence

import pyarrow as pa

INSTANT = pa.timestamp("us", "UTC")
SPAN = pa.duration("us")
HEADERS = pa.map_(pa.string(), pa.binary())

ITEMS = pa.schema(
    {
        "id": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "key": pa.binary(),
        "payload": pa.binary(),
        "headers": HEADERS,
        "kind": pa.string(),
        "encoding": pa.string(),
        "reference": pa.string(),
        "priority": pa.int32(),
        "produced_at": INSTANT,
        "at": INSTANT,
        "ttl": SPAN,
        "origin_queue": pa.string(),
        "origin_id": pa.string(),
    }
)
"""What was produced. The origin is that of an item which came from another queue: where it was buried, or sent from by a redrive."""

EVENTS = pa.schema(
    {
        "event": pa.string(),
        "id": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "at": INSTANT,
        "attempt": pa.int32(),
        "reason": pa.string(),
        "consumer": pa.string(),
        "lease": pa.string(),
        "destination": pa.string(),
        "source": pa.string(),
        "sequence": pa.int64(),
    }
)
"""What happened to items. `lease` is its number in hexadecimal digits; `sequence` that of the frame of the log which tells it."""

STATE = pa.schema(
    {
        "id": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "state": pa.string(),
        "key": pa.binary(),
        "kind": pa.string(),
        "reference": pa.string(),
        "priority": pa.int32(),
        "attempts": pa.int32(),
        "reason": pa.string(),
        "consumer": pa.string(),
        "produced_at": INSTANT,
        "ready_at": INSTANT,
        "lease_until": INSTANT,
        "size_bytes": pa.int64(),
    }
)
"""What is not completed, now. `ready_at` is when a scheduled item becomes ready, `size_bytes` that of the payload."""

DEAD = pa.schema(
    [
        *ITEMS,
        pa.field("reason", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("buried_at", INSTANT),
        pa.field("first_failed_at", INSTANT),
        pa.field("last_failed_at", INSTANT),
        pa.field("dead_queue", pa.string()),
        pa.field("dead_id", pa.string()),
    ]
)
"""Dead letters. `id`, `partition` and `offset` are those in the queue that gave them up, `dead_queue` and `dead_id` say where they lie
now: in a dead queue, or, where they were buried in place, still there."""

TABLES = {"items": ITEMS, "events": EVENTS, "dead": DEAD, "state": STATE}


def batch_of(arrays: Sequence[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """A record batch that knows how many rows it has, also when it has no columns."""
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), rows, [None], children=[]))


def narrowed(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Some columns of a schema, in the order given."""
    return pa.schema([schema.field(name) for name in columns])
