"""Items in bulk: columns, never a list of objects.

Owns: `Batch`, the form in which items enter a log and come out of it. Every column but payloads is optional, and absent when no item
has it; a present column has one entry per item. Cost is paid per batch: nothing looks at items one by one unless a rule needs it.
`validate` is the one check of what callers give; behind it everything is trusted.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.words.errors import InvalidRequest
from penstock.words.limits import (
    DEFAULT_PRIORITY,
    LAST_PRIORITY,
    MAX_BATCH_BYTES,
    MAX_BATCH_ITEMS,
    MAX_DELAY,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
)
from penstock.words.origin import MAX_ORIGIN_BYTES

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

    def pick(self, indexes: Sequence[int]) -> "Batch":
        """The items at `indexes`, in that order."""

        def chosen(column: Any) -> Any:
            if column is None:
                return None
            if isinstance(column, bytes):
                return bytes([column[i] for i in indexes])
            return [column[i] for i in indexes]

        return Batch(*(chosen(getattr(self, name)) for name in self.__struct_fields__))

    def cut(self, start: int, stop: int) -> "Batch":
        """The items at indexes [start, stop)."""
        if start == 0 and stop == len(self.payloads):
            return self
        columns = (getattr(self, name) for name in self.__struct_fields__)
        return Batch(*(None if column is None else column[start:stop] for column in columns))  # type: ignore[arg-type]

    @property
    def plain(self) -> bool:
        """Nothing but payloads."""
        return (
            self.key_ids is None
            and self.keys is None
            and self.encodings is None
            and self.headers is None
            and self.priorities is None
            and self.kinds is None
            and self.references is None
            and self.ats is None
            and self.ttls is None
            and self.dedups is None
            and self.origins is None
        )

    def own(self) -> "Batch":
        """A batch that its giver cannot change any more."""
        if self.plain:
            return Batch(list(self.payloads))
        columns = (getattr(self, name) for name in self.__struct_fields__)
        return Batch(*(column if column is None or isinstance(column, bytes) else list(column) for column in columns))  # type: ignore[arg-type]

    def compact(self) -> "Batch":
        """Self, without the columns that say nothing: so a batch has one form, before it is written and after it is read."""
        if self.plain:
            return self
        if self.key_ids is not None and not any(self.key_ids):
            self.keys = self.key_ids = None
        if self.priorities is not None and self.priorities.count(DEFAULT_PRIORITY) == len(self.priorities):
            self.priorities = None
        for name in ("headers", "kinds", "encodings", "references", "dedups", "origins"):
            column = getattr(self, name)
            if column is not None and all(value is None for value in column):
                setattr(self, name, None)
        for name in ("ats", "ttls"):
            column = getattr(self, name)
            if column is not None and not any(column):
                setattr(self, name, None)
        return self

    @property
    def size_bytes(self) -> int:
        """Payload bytes."""
        return sum(map(len, self.payloads))


def validate(batch: Batch) -> Batch:
    """Return the batch, or say which item breaks which limit."""
    if not isinstance(batch, Batch):
        raise InvalidRequest(f"items are {type(batch).__name__}; give a Batch")
    payloads, plain = batch.payloads, batch.plain
    _check_sequence("payloads", payloads)
    if plain and len(payloads) == 1 and type(payloads[0]) is bytes and len(payloads[0]) <= MAX_PAYLOAD_BYTES:
        return batch  # the commonest small batch
    count = len(payloads)
    if not 1 <= count <= MAX_BATCH_ITEMS:
        raise InvalidRequest(f"the batch has {count} items; give 1 to {MAX_BATCH_ITEMS}")
    size = _check_bytes("payload", payloads, MAX_PAYLOAD_BYTES, required=True)
    if size > MAX_BATCH_BYTES:
        raise InvalidRequest(f"the batch has {size} payload bytes; give at most {MAX_BATCH_BYTES}")
    return batch if plain else _validate_columns(batch, count)


def _validate_columns(batch: Batch, count: int) -> Batch:
    """Everything but the payloads."""
    for name in batch.__struct_fields__[1:]:
        column = getattr(batch, name)
        if column is not None:
            _check_sequence(name, column)
            if len(column) != count:
                raise InvalidRequest(f"{name} has {len(column)} entries for {count} items; give one each")
    _check_bytes("key", batch.keys, MAX_KEY_BYTES)
    _check_bytes("headers", batch.headers, MAX_HEADERS_BYTES)
    _check_bytes("transfer's origin", batch.origins, MAX_ORIGIN_BYTES)
    for name in ("kinds", "encodings", "references"):
        _check_texts(name[:-1], getattr(batch, name))
    if batch.priorities is not None and not isinstance(batch.priorities, bytes):
        raise InvalidRequest(f"priorities are {type(batch.priorities).__name__}; give bytes, one byte an item")
    if batch.priorities is not None and max(batch.priorities) > LAST_PRIORITY:
        raise InvalidRequest(f"a priority is {max(batch.priorities)}; give 0 (first) to {LAST_PRIORITY}")
    _check_numbers("key_id", batch.key_ids, (1 << 64) - 1, "numbers")
    _check_numbers("at", batch.ats, 1 << 62)
    _check_numbers("ttl", batch.ttls, MAX_DELAY)
    if (batch.keys is None) != (batch.key_ids is None):
        raise InvalidRequest("keys and key_ids must be given together; fill key_ids with routing.key_ids(keys)")
    if batch.dedups is not None and any(digest is not None and (type(digest) is not bytes or len(digest) != 16) for digest in batch.dedups):
        raise InvalidRequest("a dedup digest is not 16 bytes; make it with routing.dedup_digest")
    return batch


def _check_sequence(name: str, column: object) -> None:
    if not isinstance(column, Sequence) and not hasattr(column, "__getitem__"):
        raise InvalidRequest(f"{name} are {type(column).__name__}; give a list, one entry an item")


def _check_bytes(name: str, column: Sequence[bytes | None] | None, most: int, *, required: bool = False) -> int:
    """How many bytes they are together."""
    if column is None:
        return 0
    kinds = set(map(type, column))
    if not required:
        kinds.discard(type(None))
    if kinds - {bytes}:
        wrong = next(iter(kinds - {bytes})).__name__
        raise InvalidRequest(f"a {name} is {wrong}; give bytes")
    sizes = [len(value) for value in column if value is not None]
    if sizes and max(sizes) > most:
        raise InvalidRequest(f"{'headers have' if name == 'headers' else f'a {name} has'} {max(sizes)} bytes; give at most {most}")
    return sum(sizes)


def _check_texts(name: str, column: Texts) -> None:
    wrong = set(map(type, column or ())) - {str, type(None)}
    if wrong:
        raise InvalidRequest(f"a {name} is {wrong.pop().__name__}; give a text")
    for value in set(column or ()) - {None}:
        check_name(name, value)


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


def _check_numbers(name: str, column: Sequence[int] | None, most: int, unit: str = "microseconds") -> None:
    if column is None:
        return
    if set(map(type, column)) != {int} or min(column) < 0 or max(column) > most:
        raise InvalidRequest(f"{name} is out of bounds; give whole {unit} from 0 (none) to {most}")
