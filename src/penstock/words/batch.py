"""Many items as one set of columns.

Owns: `Batch`, in which items are written to a log and read from it, and `validate`, the only check of a caller's batch:
code behind it checks nothing again.
Every column except `payloads` is optional: it is None when no item has a value, and otherwise has one entry per item.
Work is done per column, not per item, wherever possible. The columns of a *view* (`logs.columns.FrameColumns.view`) are
parts of a frame: a BinaryColumn or TextColumn in place of a list of bytes or texts, an array for the key ids.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import msgspec
from msgspec.structs import astuple

from penstock.words.binary_column import BinaryColumn, TextColumn
from penstock.words.errors import InvalidRequest
from penstock.words.fields import BY_NAME, COLUMNS, Column, ColumnLayout, Field, FieldType
from penstock.words.limits import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES

Texts = Sequence[str | None] | None


class Batch(msgspec.Struct, gc=False):
    """Items as columns. Times are microseconds; 0 in a column of numbers means none."""

    payloads: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    key_ids: Sequence[int] | None = None
    """`routing.key_ids(keys)`; given exactly when `keys` is given."""
    headers: Sequence[bytes | None] | None = None
    """MessagePack maps of str to str or bytes."""
    kinds: Texts = None
    encodings: Texts = None
    references: Texts = None
    priorities: bytes | None = None
    ats: Sequence[int] | None = None
    """The wall time at which each item becomes ready."""
    ttls: Sequence[int] | None = None
    dedups: Sequence[bytes | None] | None = None
    """`routing.dedup_digest(key, dedup id)`."""
    origins: Sequence[bytes | None] | None = None
    """`origin.encode(Origin)` of transferred items."""
    dedup_windows: Sequence[int] | None = None
    """How long each dedup id is remembered; 0: the queue's own window."""

    def __len__(self) -> int:
        return len(self.payloads)

    @staticmethod
    def join(batches: "Sequence[Batch]") -> "Batch":
        """One batch of several. A column that only some of them have gets its missing value for the other items."""
        if len(batches) == 1:
            return batches[0]

        def joined(column: Column) -> Any:
            given = [getattr(batch, column.name) for batch in batches]
            if all(values is None for values in given):
                return None
            filled = (repeat(column.missing_value, len(b)) if v is None else v for v, b in zip(given, batches, strict=True))
            return (bytes if column.layout is ColumnLayout.SMALL else list)(chain.from_iterable(filled))

        return Batch(*(joined(column) for _, column in COLUMNS))

    def take(self, indexes: Sequence[int]) -> "Batch":
        """The items at `indexes`, in that order."""

        def chosen(column: Any) -> Any:
            if isinstance(column, bytes):
                return bytes([column[i] for i in indexes])
            if isinstance(column, BinaryColumn):
                return column.take(indexes)
            return [*several(column)] if several is not None else [column[i] for i in indexes]

        several = itemgetter(*indexes) if len(indexes) > 1 else None
        return Batch(*[None if column is None else chosen(column) for column in astuple(self)])  # type: ignore[arg-type]

    def slice(self, start: int, stop: int) -> "Batch":
        """The items at indexes [start, stop)."""
        if start == 0 and stop == len(self.payloads):
            return self
        if self.payloads_only:
            return Batch(self.payloads[start:stop])
        return Batch(*[None if column is None else column[start:stop] for column in astuple(self)])  # type: ignore[arg-type]

    @property
    def payloads_only(self) -> bool:
        """Whether every optional column is None."""
        return astuple(self)[1:] == _NO_COLUMNS

    def to_store(self) -> "Batch":
        """A batch with its own lists, which changes to the lists of this batch do not affect; without empty columns."""
        if self.payloads_only:
            return Batch(self.payloads if self.is_view else list(self.payloads))
        columns = (getattr(self, name) for name in self.__struct_fields__)
        fixed = (bytes, BinaryColumn, array) if self.is_view else bytes
        copied = Batch(*(column if column is None or isinstance(column, fixed) else list(column) for column in columns))  # type: ignore[arg-type]
        return copied.drop_empty_columns()

    def drop_empty_columns(self) -> "Batch":
        """Set columns without any value to None, and return self. So a batch that was read equals the one written."""
        if self.payloads_only:
            return self
        if self.key_ids is not None and not any(self.key_ids):
            self.keys = self.key_ids = None
        for name, missing in _MISSING_VALUES:
            column = getattr(self, name)
            if column is not None and (not column or column[0] == missing) and column.count(missing) == len(column):
                setattr(self, name, None)
        return self

    @property
    def is_view(self) -> bool:
        """Whether its columns are parts of a frame."""
        return type(self.payloads) is not list and isinstance(self.payloads, BinaryColumn)  # the first is quicker

    @property
    def size_bytes(self) -> int:
        """Payload bytes."""
        return self.payloads.size_bytes if isinstance(self.payloads, BinaryColumn) else sum(map(len, self.payloads))


_OPTIONAL = COLUMNS[1:]
_NO_COLUMNS = (None,) * len(_OPTIONAL)
_MISSING_VALUES = [(column.name, column.missing_value) for field, column in _OPTIONAL if field.name not in ("key", "key_id")]
"""The columns that `drop_empty_columns` checks one by one, and what an item without a value has in each."""


def validate(batch: Batch) -> Batch:
    """Return the batch; InvalidRequest when a column has the wrong type or length or breaks a limit."""
    if not isinstance(batch, Batch):
        raise InvalidRequest(f"items are {type(batch).__name__}; give a Batch")
    payloads, plain = batch.payloads, batch.payloads_only
    if plain and type(payloads) is list and len(payloads) == 1 and type(payloads[0]) is bytes and len(payloads[0]) <= MAX_PAYLOAD_BYTES:
        return batch  # the most common small batch: skip the general checks
    _check_sequence("payloads", payloads)
    count = len(payloads)
    if not 1 <= count <= MAX_BATCH_ITEMS:
        raise InvalidRequest(f"the batch has {count} items; give 1 to {MAX_BATCH_ITEMS}")
    size = _check_bytes(BY_NAME["payload"], payloads, required=True)
    if size > MAX_BATCH_BYTES:
        raise InvalidRequest(f"the batch has {size} payload bytes; give at most {MAX_BATCH_BYTES}")
    return batch if plain else _validate_columns(batch, count)


def _validate_columns(batch: Batch, count: int) -> Batch:
    """Check every column except the payloads."""
    given = [(field, column, values) for field, column in _OPTIONAL if (values := getattr(batch, column.name)) is not None]
    for _, column, values in given:
        _check_sequence(column.name, values)
        if len(values) != count:
            raise InvalidRequest(f"{column.name} has {len(values)} entries for {count} items; give one each")
    for field, column, values in given:
        _CHECKS[column.layout](field, values)
    if (batch.keys is None) != (batch.key_ids is None):
        raise InvalidRequest("keys and key_ids must be given together; fill key_ids with routing.key_ids(keys)")
    if batch.dedup_windows is not None:
        names = batch.dedups or [None] * count
        if any(window and name is None for window, name in zip(batch.dedup_windows, names, strict=True)):
            raise InvalidRequest("an item has a dedup_window and no dedup id; give it one, or leave the dedup_window out")
    return batch


def _check_sequence(name: str, column: object) -> None:
    if not isinstance(column, Sequence) and not hasattr(column, "__getitem__"):
        raise InvalidRequest(f"{name} are {type(column).__name__}; give a list with one entry per item")


def _check_bytes(field: Field, values: Sequence[bytes | None], *, required: bool = False) -> int:
    """Check the types and lengths of the values, and return their total length."""
    name = "transfer's origin" if field.type is FieldType.ORIGIN else field.name
    if isinstance(values, BinaryColumn):
        if not values.is_in_order:
            raise InvalidRequest(f"the {name} column of a frame is damaged: its offsets are not in order; write the items again")
        total = values.size_bytes
        longest = values.longest_above(field.high) if total > field.high else 0
    else:
        _check_types(name, values, required=required)
        sizes = [*map(len, values if required else filter(None, values))]  # type: ignore[arg-type]
        total = sum(sizes)
        longest = max(sizes) if total > field.high else 0
    if longest > field.high:
        have = "headers have" if field.type is FieldType.HEADERS else f"a {name} has"
        raise InvalidRequest(f"{have} {longest} bytes; give at most {field.high}")
    return total


def _check_types(name: str, values: Sequence[bytes | None], *, required: bool) -> None:
    kinds = set(map(type, values))
    if not required:
        kinds.discard(type(None))
    if kinds - {bytes}:
        wrong = next(iter(kinds - {bytes})).__name__
        raise InvalidRequest(f"a {name} is {wrong}; give bytes")


def _check_texts(field: Field, values: Sequence[str | None]) -> None:
    if isinstance(values, TextColumn):
        _check_bytes(field, values)
        try:
            str(values.data, "ascii")  # then each text is valid, wherever it begins and ends
        except UnicodeDecodeError:
            pass
        else:
            return
        try:
            values = values[:]
        except UnicodeDecodeError:
            raise InvalidRequest(f"a {field.name} is not valid Unicode; give UTF-8") from None
    wrong = set(map(type, values)) - {str, type(None)}
    if wrong:
        raise InvalidRequest(f"a {field.name} is {wrong.pop().__name__}; give a text")
    for value in set(values) - {None}:
        check_name(field.name, value)


def _check_small(field: Field, values: bytes) -> None:
    if not isinstance(values, bytes):
        raise InvalidRequest(f"priorities are {type(values).__name__}; give bytes, one byte per item")
    if max(values) > field.high:
        raise InvalidRequest(f"a {field.name} is {max(values)}; give 0 (handled first) to {field.high}")


def _check_numbers(field: Field, values: Sequence[int]) -> None:
    most = 1 << 62 if field.type is FieldType.INSTANT else field.high
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > most:
        unit = "numbers" if field.type is FieldType.LONG else "microseconds"
        raise InvalidRequest(f"{field.name} is out of bounds; give whole {unit} from 0 (none) to {most}")


def _check_key_ids(field: Field, values: Sequence[int]) -> None:
    if not isinstance(values, array) or values.typecode != "Q":  # such an array has no other numbers
        _check_numbers(field, values)


def _check_digests(field: Field, values: Sequence[bytes | None]) -> None:
    if any(digest is not None and (type(digest) is not bytes or len(digest) != 16) for digest in values):
        raise InvalidRequest(f"a {field.name} digest is not 16 bytes; make it with routing.dedup_digest")


_CHECKS: dict[ColumnLayout, Callable[[Field, Any], object]] = {
    ColumnLayout.OPTIONAL_BYTES: _check_bytes,
    ColumnLayout.KEY_IDS: _check_key_ids,
    ColumnLayout.TEXTS: _check_texts,
    ColumnLayout.SMALL: _check_small,
    ColumnLayout.NUMBERS: _check_numbers,
    ColumnLayout.DIGESTS: _check_digests,
}


def check_name(what: str, text: str | None) -> None:
    """InvalidRequest when a text cannot be stored: not a str, not valid Unicode, or too long."""
    if not isinstance(text, str):
        raise InvalidRequest(f"a {what} is {type(text).__name__}; give a text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"a {what} is not valid Unicode; remove its lone surrogates") from None
    if size > MAX_NAME_BYTES:
        raise InvalidRequest(f"a {what} has {size} bytes; give at most {MAX_NAME_BYTES}")
