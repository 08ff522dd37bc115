"""Items in bulk: columns, never a list of objects.

Owns: `Batch`, the form in which items enter a log and come out of it. Every column but payloads is optional, and absent when no item
has it; a present column has one entry per item. Cost is paid per batch: nothing looks at items one by one unless a rule needs it.
`validate` is the one check of what callers give; behind it everything is trusted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.words.errors import InvalidRequest
from penstock.words.fields import BY_NAME, COLUMNS, ColumnLayout, Field, FieldType
from penstock.words.limits import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES

Texts = Sequence[str | None] | None


class Batch(msgspec.Struct, gc=False):
    """Items as columns. Times are microseconds; 0 in a column of numbers means none."""

    payloads: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    key_ids: Sequence[int] | None = None
    """routing.key_ids(keys): present exactly when keys are."""
    headers: Sequence[bytes | None] | None = None
    """MessagePack maps of str to str or bytes."""
    kinds: Texts = None
    encodings: Texts = None
    references: Texts = None
    priorities: bytes | None = None
    ats: Sequence[int] | None = None
    """Wall time before which an item is not ready."""
    ttls: Sequence[int] | None = None
    dedups: Sequence[bytes | None] | None = None
    """routing.dedup_digest(key, dedup id)."""
    origins: Sequence[bytes | None] | None = None
    """Where transferred items came from: origin.encode(Origin)."""

    def __len__(self) -> int:
        return len(self.payloads)

    def take(self, indexes: Sequence[int]) -> "Batch":
        """The items at `indexes`, in that order."""

        def chosen(column: Any) -> Any:
            if column is None:
                return None
            if isinstance(column, bytes):
                return bytes([column[i] for i in indexes])
            return [column[i] for i in indexes]

        return Batch(*(chosen(getattr(self, name)) for name in self.__struct_fields__))

    def slice(self, start: int, stop: int) -> "Batch":
        """The items at indexes [start, stop)."""
        if start == 0 and stop == len(self.payloads):
            return self
        columns = (getattr(self, name) for name in self.__struct_fields__)
        return Batch(*(None if column is None else column[start:stop] for column in columns))  # type: ignore[arg-type]

    @property
    def payloads_only(self) -> bool:
        """Nothing but payloads."""
        return self == Batch(self.payloads)

    def copy(self) -> "Batch":
        """A batch that its giver cannot change any more."""
        if self.payloads_only:
            return Batch(list(self.payloads))
        columns = (getattr(self, name) for name in self.__struct_fields__)
        return Batch(*(column if column is None or isinstance(column, bytes) else list(column) for column in columns))  # type: ignore[arg-type]

    def drop_empty_columns(self) -> "Batch":
        """Self, without the columns that say nothing: so a batch has one form, before it is written and after it is read."""
        if self.payloads_only:
            return self
        if self.key_ids is not None and not any(self.key_ids):
            self.keys = self.key_ids = None
        for name, nothing in _NOTHING:
            column = getattr(self, name)
            if column is not None and (not column or column[0] == nothing) and column.count(nothing) == len(column):
                setattr(self, name, None)
        return self

    @property
    def size_bytes(self) -> int:
        """Payload bytes."""
        return sum(map(len, self.payloads))


_OPTIONAL = COLUMNS[1:]
_NOTHING = [(column.name, column.missing_value) for field, column in _OPTIONAL if field.name not in ("key", "key_id")]
"""What columns have that say nothing."""


def validate(batch: Batch) -> Batch:
    """Return the batch, or say which item breaks which limit."""
    if not isinstance(batch, Batch):
        raise InvalidRequest(f"items are {type(batch).__name__}; give a Batch")
    payloads, plain = batch.payloads, batch.payloads_only
    _check_sequence("payloads", payloads)
    if plain and len(payloads) == 1 and type(payloads[0]) is bytes and len(payloads[0]) <= MAX_PAYLOAD_BYTES:
        return batch  # the commonest small batch
    count = len(payloads)
    if not 1 <= count <= MAX_BATCH_ITEMS:
        raise InvalidRequest(f"the batch has {count} items; give 1 to {MAX_BATCH_ITEMS}")
    size = _check_bytes(BY_NAME["payload"], payloads, required=True)
    if size > MAX_BATCH_BYTES:
        raise InvalidRequest(f"the batch has {size} payload bytes; give at most {MAX_BATCH_BYTES}")
    return batch if plain else _validate_columns(batch, count)


def _validate_columns(batch: Batch, count: int) -> Batch:
    """Everything but the payloads."""
    given = [(field, column, values) for field, column in _OPTIONAL if (values := getattr(batch, column.name)) is not None]
    for _, column, values in given:
        _check_sequence(column.name, values)
        if len(values) != count:
            raise InvalidRequest(f"{column.name} has {len(values)} entries for {count} items; give one each")
    for field, column, values in given:
        _CHECKS[column.form](field, values)
    if (batch.keys is None) != (batch.key_ids is None):
        raise InvalidRequest("keys and key_ids must be given together; fill key_ids with routing.key_ids(keys)")
    return batch


def _check_sequence(name: str, column: object) -> None:
    if not isinstance(column, Sequence) and not hasattr(column, "__getitem__"):
        raise InvalidRequest(f"{name} are {type(column).__name__}; give a list, one entry an item")


def _check_bytes(field: Field, values: Sequence[bytes | None], *, required: bool = False) -> int:
    """How many bytes they are together."""
    name = "transfer's origin" if field.type is FieldType.ORIGIN else field.name
    kinds = set(map(type, values))
    if not required:
        kinds.discard(type(None))
    if kinds - {bytes}:
        wrong = next(iter(kinds - {bytes})).__name__
        raise InvalidRequest(f"a {name} is {wrong}; give bytes")
    sizes = [len(value) for value in values if value is not None]
    if sizes and max(sizes) > field.high:
        have = "headers have" if field.type is FieldType.HEADERS else f"a {name} has"
        raise InvalidRequest(f"{have} {max(sizes)} bytes; give at most {field.high}")
    return sum(sizes)


def _check_texts(field: Field, values: Sequence[str | None]) -> None:
    wrong = set(map(type, values)) - {str, type(None)}
    if wrong:
        raise InvalidRequest(f"a {field.name} is {wrong.pop().__name__}; give a text")
    for value in set(values) - {None}:
        check_name(field.name, value)


def _check_small(field: Field, values: bytes) -> None:
    if not isinstance(values, bytes):
        raise InvalidRequest(f"priorities are {type(values).__name__}; give bytes, one byte an item")
    if max(values) > field.high:
        raise InvalidRequest(f"a {field.name} is {max(values)}; give 0 (first) to {field.high}")


def _check_numbers(field: Field, values: Sequence[int]) -> None:
    most = 1 << 62 if field.type is FieldType.INSTANT else field.high
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > most:
        unit = "numbers" if field.type is FieldType.LONG else "microseconds"
        raise InvalidRequest(f"{field.name} is out of bounds; give whole {unit} from 0 (none) to {most}")


def _check_digests(field: Field, values: Sequence[bytes | None]) -> None:
    if any(digest is not None and (type(digest) is not bytes or len(digest) != 16) for digest in values):
        raise InvalidRequest(f"a {field.name} digest is not 16 bytes; make it with routing.dedup_digest")


_CHECKS: dict[ColumnLayout, Callable[[Field, Any], object]] = {
    ColumnLayout.OPTIONAL_BYTES: _check_bytes,
    ColumnLayout.KEY_IDS: _check_numbers,
    ColumnLayout.TEXTS: _check_texts,
    ColumnLayout.SMALL: _check_small,
    ColumnLayout.NUMBERS: _check_numbers,
    ColumnLayout.DIGESTS: _check_digests,
}


def check_name(what: str, text: str | None) -> None:
    """Say so when a text cannot be stored."""
    if not isinstance(text, str):
        raise InvalidRequest(f"a {what} is {type(text).__name__}; give a text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"a {what} is not valid Unicode; remove its lone surrogates") from None
    if size > MAX_NAME_BYTES:
        raise InvalidRequest(f"a {what} has {size} bytes; give at most {MAX_NAME_BYTES}")


def check_request(request: bytes | None) -> None:
    """Say so when a request id is not the digest it must be."""
    if request is not None and (type(request) is not bytes or len(request) != 16):
        raise InvalidRequest("the request id is not a 16-byte digest; make it with routing.digest")
