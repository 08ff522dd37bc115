"""Conversion between items and Arrow tables.

Owns: `from_arrow` (table to batches), `read_columns` (table to checked columns), `expected_type` (a check of a type
before there is a table), `items_to_arrow` (items to a record batch) and `item_schema`, the schema of such record
batches. pyarrow is an optional dependency, so it is imported at the first use. A table is checked as a whole before its
first batch is returned; nothing of a wrong table is stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.api.items import convert_column, dedup_digests
from penstock.rules.routing import key_ids
from penstock.words import values
from penstock.words.batch import Batch
from penstock.words.errors import InvalidRequest
from penstock.words.fields import BY_NAME, GIVEN, ColumnLayout, Field, FieldType, Surface, fields_on
from penstock.words.fields import COLUMNS as BATCH_COLUMNS
from penstock.words.ids import format_id, format_ids
from penstock.words.limits import DEFAULT_PRIORITY, GIB, MAX_BATCH_BYTES, MAX_BATCH_ITEMS

if TYPE_CHECKING:
    import pyarrow as pa

ItemBlock: TypeAlias = tuple[int, Sequence[int], Batch, int, Mapping[int, int]]
"""Partition, offsets, items, time of production, and the attempts of items that have an unusual number."""

MAX_ARROW_BYTES = 2 * GIB - 1
"""The most bytes that a column of Arrow's binary type can hold."""

SHOWN_COLUMNS = 8
COLUMNS = GIVEN
"""The columns that a table of items may have."""
_MISSING = {
    field.name: column.missing_value for field, column in BATCH_COLUMNS if column.layout in (ColumnLayout.SMALL, ColumnLayout.NUMBERS)
}
"""The number that means "no value", by column of numbers."""


def _pyarrow() -> Any:
    try:
        import pyarrow.compute
    except ImportError:
        raise InvalidRequest("pyarrow is not installed; run pip install 'penstock[arrow]'") from None
    return pyarrow


# -- producing ---------------------------------------------------------------------------------------


def from_arrow(data: "pa.Table | pa.RecordBatch") -> Iterator[Batch]:
    """The rows as batches within the limits of a batch. Also takes objects with `__arrow_c_stream__`."""
    return _batches(read_columns(data))


def read_columns(data: "pa.Table | pa.RecordBatch") -> dict[str, Any]:
    """The columns of a table that have values, each converted to one Arrow type, with all values checked."""
    given = _given(data)
    columns = {name: read for name, column in given.items() if (read := _read(name, column, given.get("key"))) is not None}
    if "payload" not in columns:
        raise InvalidRequest(f"there is no column 'payload'; give one of {accepted_types('payload')}")
    windows, names = columns.pop("dedup_window", None), columns.get("dedup")
    if windows is not None and names is not None:  # of a row without a dedup id it means nothing: often all rows have the same
        columns["dedup_window"] = _pyarrow().compute.if_else(names.is_valid(), windows, None)
    if _is_text(given["payload"].type):
        encodings = columns.get("encoding")
        columns["encoding"] = _constant(values.TEXT, len(columns["payload"])) if encodings is None else encodings.fill_null(values.TEXT)
    return columns


def expected_type(name: str, kind: "pa.DataType | None") -> str:
    """The types that a column may have, if it cannot have type `kind`; "" if it can. None is a type not in Arrow."""
    pa = _pyarrow()
    if kind is not None and pa.types.is_null(kind) and name != "payload":
        return ""  # a column without values is ignored
    try:
        if kind is not None:
            _INPUTS[BY_NAME[name].type].read(pa.chunked_array([], kind))
            return ""
    except _WrongType:
        pass
    return accepted_types(name)


def unknown_columns_message(names: Sequence[str]) -> str:
    """The beginning of an error message about columns that items do not have. Names at most a few of them."""
    shown = ", ".join(f"{name!r:.100}" for name in names[:SHOWN_COLUMNS])
    more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
    return f"the column {shown} is not known; drop it" if len(names) == 1 else f"the columns {shown}{more} are not known; drop them"


def _given(data: Any) -> dict[str, Any]:
    """The columns by name: only known ones, without dictionaries. Validates the table: foreign data may be corrupt."""
    pa = _pyarrow()
    if not isinstance(data, pa.Table | pa.RecordBatch) and not hasattr(data, "__arrow_c_stream__"):
        raise InvalidRequest(f"the items are {type(data).__name__}; give a pyarrow Table or RecordBatch")
    try:
        table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else pa.table(data)
        table.validate(full=True)
        columns = [column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column for column in table.columns]
    except (pa.ArrowException, TypeError) as error:
        raise InvalidRequest(f"the items cannot be read as an Arrow table ({error}); give a pyarrow Table or RecordBatch") from None
    unknown = [name for name in table.schema.names if name not in COLUMNS]
    if unknown:
        raise InvalidRequest(f"{unknown_columns_message(unknown)} or use one of {', '.join(COLUMNS)}")
    for name in table.schema.names:
        if table.schema.names.count(name) > 1:
            raise InvalidRequest(f"there are several columns {name!r}; keep one")
    return dict(zip(table.schema.names, columns, strict=True))


def _read(name: str, column: Any, keys: Any) -> Any:
    """A column converted to one Arrow type, with all values checked; None if it has no values."""
    if name == "payload" and column.null_count:
        raise InvalidRequest(f"{_row(_first(column.is_null()), keys)}: the payload is null; give bytes or text")
    if name != "payload" and column.null_count == len(column):
        return None
    try:
        found = _INPUTS[BY_NAME[name].type].read(column)
    except _WrongType:
        raise InvalidRequest(f"the column {name!r} is {column.type}; give {accepted_types(name)}") from None
    except _pyarrow().ArrowException as error:
        raise InvalidRequest(f"the column {name!r} cannot be read ({error}); give {accepted_types(name)}") from None
    _check_limits(BY_NAME[name], found, None if name == "key" else keys)
    return found


def _check_limits(field: Field, column: Any, keys: Any) -> None:
    pa = _pyarrow()
    in_bytes = column.type != pa.int64()
    measured = pa.compute.binary_length(column) if in_bytes else column
    row = _first(pa.compute.or_(pa.compute.less(measured, field.low), pa.compute.greater(measured, field.high)))
    if row >= 0:
        is_wrong = f"has {measured[row]} bytes" if in_bytes else f"is {measured[row]}"
        raise InvalidRequest(f"{_row(row, keys)}: the {field.name} {is_wrong}; give {field.low} to {field.high}{_INPUTS[field.type].unit}")


def _row(row: int, keys: Any) -> str:
    """The name of a row in messages. It includes the key: row numbers mean little in a table that a query made."""
    key = None if keys is None else keys[row].as_py()
    if isinstance(key, bytes):
        key = key.decode(errors="backslashreplace")
    return f"row {row}" if key is None else f"row {row} (key {key!r:.100})"


def _first(rows: Any) -> int:
    """The number of the first row that is true, or -1."""
    found: int = _pyarrow().compute.index(rows, True).as_py()
    return found


class _WrongType(Exception):
    """The type of a column is not accepted."""


def _read_bytes(column: Any) -> Any:
    return _cast(column, _pyarrow().large_binary(), _is_bytes(column.type) or _is_text(column.type))


def _read_text(column: Any) -> Any:
    return _cast(column, _pyarrow().large_string(), _is_text(column.type))


def _read_number(column: Any) -> Any:
    pa = _pyarrow()
    return _cast(column, pa.int64(), pa.types.is_integer(column.type))


def _read_at(column: Any) -> Any:
    pa = _pyarrow()
    if not pa.types.is_timestamp(column.type):
        return _read_number(column)
    return _cast(column, pa.timestamp("us", column.type.tz), column.type.tz is not None).cast(pa.int64())


def _read_ttl(column: Any) -> Any:
    pa = _pyarrow()
    if not pa.types.is_duration(column.type):
        return _read_number(column)
    return _cast(column, pa.duration("us")).cast(pa.int64())


def _read_headers(column: Any) -> Any:
    """Headers as MessagePack: a map is encoded, bytes are checked to be MessagePack."""
    pa = _pyarrow()
    kind = column.type
    if pa.types.is_map(kind) and _is_text(kind.key_type) and (_is_text(kind.item_type) or _is_bytes(kind.item_type)):
        convert: Callable[[Any], bytes | None] = _encode_headers
    elif _is_bytes(kind):
        convert = _check_headers
    else:
        raise _WrongType
    found = convert_column(convert, column.to_pylist(), called="row {}".format)
    return pa.chunked_array([pa.array(found or [], pa.large_binary())])


def _encode_headers(headers: list[tuple[str, Any]]) -> bytes | None:
    return values.encode_headers(dict(headers))


def _check_headers(headers: bytes) -> bytes:
    values.decode_headers(headers)
    return headers


class _Input(NamedTuple):
    """The Arrow types accepted for a field type, the function that converts them, and the unit of the limits."""

    types: str
    read: Callable[[Any], Any]
    unit: str = ""


_INPUTS = {
    FieldType.BYTES: _Input("binary or string", _read_bytes),
    FieldType.HEADERS: _Input("map<string, string>, map<string, binary>, or binary that is MessagePack", _read_headers),
    FieldType.TEXT: _Input("string", _read_text),
    FieldType.SMALL: _Input("an integer type", _read_number),
    FieldType.INSTANT: _Input("a timestamp with a timezone, or int64 (microseconds since 1970)", _read_at, " microseconds"),
    FieldType.SPAN: _Input("a duration, or int64 (microseconds)", _read_ttl, " microseconds"),
}


def accepted_types(name: str) -> str:
    """The Arrow types that a column may have in `produce_arrow`, as a text."""
    return _INPUTS[BY_NAME[name].type].types


def _is_text(kind: Any) -> bool:
    types = _pyarrow().types
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view))


def _is_bytes(kind: Any) -> bool:
    types = _pyarrow().types
    return any(test(kind) for test in (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary))


def _cast(column: Any, kind: Any, possible: bool = True) -> Any:
    """Cast a column. Nanoseconds are cut off; any other value that does not fit is an error."""
    if not possible:
        raise _WrongType
    return column.cast(options=_pyarrow().compute.CastOptions(kind, allow_time_truncate=True))


def _constant(text: str, count: int) -> Any:
    pa = _pyarrow()
    return pa.chunked_array([pa.repeat(pa.scalar(text, pa.large_string()), count)])


def _batches(columns: Mapping[str, Any]) -> Iterator[Batch]:
    sizes = _pyarrow().compute.binary_length(columns["payload"]).to_pylist()
    start = size = 0
    for row, more in enumerate(sizes):
        if row - start == MAX_BATCH_ITEMS or size + more > MAX_BATCH_BYTES:
            yield _batch(columns, start, row)
            start, size = row, 0
        size += more
    if sizes:
        yield _batch(columns, start, len(sizes))


def _batch(columns: Mapping[str, Any], start: int, stop: int) -> Batch:
    found: dict[str, Any] = {name: column.slice(start, stop - start).to_pylist() for name, column in columns.items()}
    keys = found.get("key")
    if keys is not None:
        found["key_id"] = key_ids(keys)
    if "dedup" in found:
        found["dedup"] = dedup_digests(keys, found["dedup"])
    for name in found.keys() & _MISSING:
        found[name] = [_MISSING[name] if value is None else value for value in found[name]]
    if "priority" in found:
        found["priority"] = bytes(found["priority"])
    return Batch(*(found.get(field.name) for field, _ in BATCH_COLUMNS)).drop_empty_columns()  # type: ignore[arg-type]


# -- consuming ---------------------------------------------------------------------------------------


@cache
def item_schema() -> "pa.Schema":
    """The schema of `items_to_arrow`: leased items and items read by a cursor."""
    pa = _pyarrow()
    from penstock.tables.schemas import ARROW_TYPES

    return pa.schema(
        {field.name: pa.uint8() if field.type is FieldType.SMALL else ARROW_TYPES[field.type] for field in fields_on(Surface.LEASED)}
    )


def items_to_arrow(blocks: Sequence[ItemBlock], usual_attempts: int = 1) -> "pa.RecordBatch":
    """The items of all blocks, in that order. Items whose attempts a block does not name have `usual_attempts`."""
    pa, schema = _pyarrow(), item_schema()
    size = sum(batch.size_bytes for _, _, batch, _, _ in blocks)
    if size > MAX_ARROW_BYTES:
        raise InvalidRequest(f"the items have {size} payload bytes, which one record batch cannot hold; take fewer at a time")
    counted = [(len(block[2]), _columns_of(block, usual_attempts)) for block in blocks]
    return pa.RecordBatch.from_arrays([_joined(field, counted) for field in schema], schema=schema)


def _joined(field: "pa.Field", blocks: Sequence[tuple[int, Mapping[str, Any]]]) -> Any:
    """One column of all blocks, which are given as (number of items, columns)."""
    pa = _pyarrow()
    if all(columns[field.name] is None for _, columns in blocks):
        return pa.nulls(sum(count for count, _ in blocks), field.type)
    whole = chain.from_iterable(columns[field.name] or repeat(None, count) for count, columns in blocks)
    return pa.array(list(whole), field.type)


def _columns_of(block: ItemBlock, usual_attempts: int) -> dict[str, Sequence[Any] | None]:
    partition, offsets, batch, produced_at, attempts = block
    count = len(batch)
    found: dict[str, Sequence[Any] | None] = {field.name: getattr(batch, column.name) for field, column in BATCH_COLUMNS}
    for name in ("at", "ttl"):
        found[name] = None if (numbers := found[name]) is None else [number or None for number in numbers]
    return {
        **found,
        "id": format_ids(partition, offsets),
        "partition": [partition] * count,
        "offset": offsets,
        "headers": convert_column(
            values.header_entries, batch.headers or (), called=lambda index: f"item {format_id(partition, offsets[index])}"
        ),
        "priority": batch.priorities or [DEFAULT_PRIORITY] * count,
        "produced_at": [produced_at] * count,
        "attempts": [attempts.get(offset, usual_attempts) for offset in offsets] if attempts else [usual_attempts] * count,
    }
