"""Single items: `NewItem` for producers, `Item` for consumers.

Owns: the two types, and the conversion of a list of items to a `Batch`. Work is done per column: a column that no item
uses is not built. An `Item` refers to its batch, and reads or decodes a field when it is asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import datetime, timedelta
from itertools import islice, repeat
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import astuple

from penstock.rules.routing import dedup_digest, key_id, key_ids
from penstock.words import values
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.ids import format_id
from penstock.words.limits import DEFAULT_PRIORITY, FIRST_PRIORITY, LAST_PRIORITY, MAX_BATCH_ITEMS, check_range
from penstock.words.origin import decode as decode_origin
from penstock.words.values import Headers, Value

T = TypeVar("T")
_SHOWN = 60


# -- producing ---------------------------------------------------------------------------------------


class _Payload(msgspec.Struct, frozen=True):
    payload: Value


class NewItem(_Payload, frozen=True, kw_only=True):
    """An item to produce, for `queue.produce_many` and for follow-ups.

        NewItem({"order": 1}, key="customer-42", priority=2)

    The payload is what `queue.produce` takes as its value. All other fields may be left out.
    """

    key: str | bytes | None = None
    """Items of the same key are handled one at a time, in the order in which they were produced."""
    headers: Headers | None = None
    """A dict from str to str or bytes."""
    kind: str | None = None
    """The type of the item, such as "invoice". Workers choose a handler by it."""
    encoding: str | None = None
    """How `item.value` decodes the payload. Default: derived from the type of the payload."""
    reference: str | None = None
    """A text for the caller's own use."""
    priority: int | None = None
    """0 (leased first) to 9 (last). Default: 5."""
    at: datetime | None = None
    """The item is not leased before this time: a datetime with a timezone."""
    ttl: float | timedelta | None = None
    """An item that still waits this long after it was produced is buried: seconds or a timedelta."""
    dedup: str | bytes | None = None
    """A dedup id. The item is not added if one with the same key and dedup id is remembered by the queue."""
    dedup_window: float | timedelta | None = None
    """How long the dedup id is remembered: seconds or a timedelta. Default: the `dedup_window` of the queue."""
    queue: str | None = None
    """Only for follow-ups: the name of the queue that gets the item. Default: the queue of the completed item."""

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in _OPTIONS if getattr(self, name) is not None]
        return f"NewItem({', '.join([_shown(self.payload), *given])})"


NewItems: TypeAlias = Iterable[NewItem | Value]
_OPTIONS = NewItem.__struct_fields__[1:]
_NOT_ITEMS = (str, bytes, bytearray, memoryview, Mapping, msgspec.Struct)
"""Iterable types that are one item, not a list of items."""
_PLAIN_TEXTS = frozenset((str, type(None)))
_NOT_PAYLOADS = (NewItem, Batch)


def to_batch(items: NewItems, *, follow_ups: bool = False) -> Batch:
    """The items as columns. Only follow-ups may name a queue; it is not part of the batch."""
    given = _listed(items)
    kinds = set(map(type, given))
    if kinds == {bytes}:
        return Batch(given)  # type: ignore[arg-type]
    if any(issubclass(kind, NewItem) for kind in kinds):
        return _columns(given if kinds == {NewItem} else [_exact(item) for item in given], follow_ups)  # type: ignore[arg-type]
    payloads, encodings = _payloads(given, [None] * len(given))
    return Batch(payloads, encodings=encodings)


def single_item_batch(
    payload: Value,
    key: str | bytes | None = None,
    headers: Headers | None = None,
    kind: str | None = None,
    encoding: str | None = None,
    reference: str | None = None,
    priority: int | None = None,
    at: datetime | None = None,
    ttl: float | timedelta | None = None,
    dedup: str | bytes | None = None,
    dedup_window: float | timedelta | None = None,
) -> Batch:
    """A batch of one item."""
    data, encoding = (payload, encoding) if type(payload) is bytes else _encode(payload, encoding)
    name = None if key is None else values.encode_key(key)
    packed = None if headers is None else values.encode_headers(headers)
    return Batch(
        [data],
        None if name is None else [name],
        None if name is None else [key_id(name)],
        None if packed is None else [packed],
        None if kind is None else [values.plain_text(kind)],
        None if encoding is None else [values.plain_text(encoding)],
        None if reference is None else [values.plain_text(reference)],
        None if priority is None else bytes([_priority(priority)]),
        None if at is None else [values.instant(at)],
        None if ttl is None else [_ttl(ttl)],
        None if dedup is None else [dedup_digest(name, values.encode_dedup_id(dedup))],
        dedup_windows=None if dedup_window is None else [_dedup_window(dedup_window)],
    )


def _listed(items: NewItems) -> list[NewItem | Value]:
    """The items as a new list. An endless iterable is cut at a length that `validate` refuses."""
    if isinstance(items, _NOT_ITEMS) or not isinstance(items, Iterable):
        raise InvalidRequest(f"the items are {type(items).__name__}; give a list of them")
    return list(items if isinstance(items, Sized) else islice(items, MAX_BATCH_ITEMS + 1))


def _exact(item: NewItem | Value) -> NewItem:
    """The item as a NewItem and no subclass of it: `_columns` relies on the order of the fields."""
    if type(item) is NewItem:
        return item
    if isinstance(item, NewItem):
        return NewItem(item.payload, **{name: getattr(item, name) for name in _OPTIONS})
    return NewItem(item)


def _columns(items: list[NewItem], follow_ups: bool) -> Batch:
    payload, key, headers, kind, encoding, reference, priority, at, ttl, dedup, window, queue = zip(*map(astuple, items), strict=True)
    if not follow_ups:
        convert_column(_refuse_queue, queue)
    payloads, encodings = _payloads(payload, encoding)
    keys = convert_column(values.encode_key, key)
    priorities = convert_column(_priority, priority, DEFAULT_PRIORITY)
    return Batch(
        payloads,
        keys,
        None if keys is None else key_ids(keys),
        convert_column(values.encode_headers, headers),
        _texts(kind),
        encodings,
        _texts(reference),
        None if priorities is None else bytes(priorities),
        convert_column(values.instant, at, 0),
        convert_column(_ttl, ttl, 0),
        dedup_digests(keys, convert_column(values.encode_dedup_id, dedup)),
        dedup_windows=convert_column(_dedup_window, window, 0),
    )


def _payloads(given: Sequence[Any], encodings: Sequence[str | None]) -> tuple[list[bytes], list[str | None] | None]:
    if set(map(type, given)) == {bytes}:
        return list(given), _texts(encodings)
    pairs = convert_column(_encode_pair, list(zip(given, encodings, strict=True))) or []
    return [payload for payload, _ in pairs], _texts([encoding for _, encoding in pairs])


def convert_column(
    convert: Callable[[Any], T], column: Sequence[Any], missing: Any = None, called: Callable[[int], str] = "item {}".format
) -> list[T] | None:
    """The column converted, or None if all values are None. Errors begin with the name of the item: `called(index)`."""
    if column.count(None) == len(column):
        return None
    found: list[T] = []
    append = found.append
    try:
        for value in column:
            append(missing if value is None else convert(value))
    except InvalidRequest as error:
        raise InvalidRequest(f"{called(len(found))}: {error}") from None
    return found


def _texts(column: Sequence[str | None]) -> list[str | None] | None:
    if column.count(None) == len(column):
        return None
    return list(column) if _PLAIN_TEXTS.issuperset(map(type, column)) else [values.plain_text(text) for text in column]


def dedup_digests(keys: Sequence[bytes | None] | None, names: Sequence[bytes | None] | None) -> list[bytes | None] | None:
    """The column `dedups`: the digests of dedup ids and keys."""
    if names is None:
        return None
    pairs = zip(keys or repeat(None), names)  # noqa: B905 (repeat has no end)
    return [None if name is None else dedup_digest(key, name) for key, name in pairs]


def _encode_pair(pair: tuple[Value, str | None]) -> tuple[bytes, str | None]:
    return _encode(*pair)


def _encode(payload: Value, encoding: str | None) -> tuple[bytes, str | None]:
    if isinstance(payload, _NOT_PAYLOADS):  # these could be stored as JSON, but that is certainly a mistake
        raise InvalidRequest(f"the payload is a {type(payload).__name__}; give what is in it, or give items to produce_many")
    return values.encode_as(payload, encoding)


def _priority(priority: int) -> int:
    return check_range("the priority", priority, FIRST_PRIORITY, LAST_PRIORITY)


def _ttl(ttl: float | timedelta) -> int:
    span = values.duration(ttl, "the ttl")
    if not span:
        raise InvalidRequest("the ttl is 0; give more, or None for the queue's own")
    return span


def _dedup_window(window: float | timedelta) -> int:
    span = values.duration(window, "the dedup_window")
    if not span:
        raise InvalidRequest("the dedup_window is 0; give more, or None for the queue's own")
    return span


def _refuse_queue(queue: str) -> None:
    raise InvalidRequest(f"the queue is {queue!r}, but only a follow-up in complete(then=…) may name one; produce it to that queue")


# -- consuming ---------------------------------------------------------------------------------------


class ItemSource(NamedTuple):
    """What the items of one answer have in common."""

    queue: str
    max_attempts: int = 0


class Item:
    """An item of a queue, as leases, cursors and lists return it. It can be copied and pickled."""

    __slots__ = ("_batch", "_index", "_produced_at", "_source", "_value", "attempts", "offset", "partition")

    _value: Any

    def __init__(self, source: ItemSource, partition: int, offset: int, batch: Batch, index: int, produced_at: int, attempts: int) -> None:
        self._source = source
        self.partition = partition
        self.offset = offset
        self.attempts = attempts
        """The number of attempts; of a leased item, including the current one."""
        self._batch = batch
        self._index = index
        self._produced_at = produced_at

    @property
    def id(self) -> str:
        """The partition and the offset of the item, as in "3-17". It is unique in the queue."""
        return format_id(self.partition, self.offset)

    @property
    def queue(self) -> str:
        """The name of the item's queue."""
        return self._source.queue

    @property
    def max_attempts(self) -> int:
        """Of a leased item: how many attempts its queue allowed when it was leased; 0 is no limit."""
        return self._source.max_attempts

    @property
    def payload(self) -> bytes:
        """The payload as it is stored. See `value`."""
        return self._batch.payloads[self._index]

    @property
    def value(self) -> Any:
        """The payload decoded by its encoding: "text" gives a str, "json" an object, any other encoding the bytes.

        It is the same object each time. Raises `InvalidRequest` if the payload does not fit its encoding.
        """
        found = getattr(self, "_value", msgspec.UNSET)
        if found is msgspec.UNSET:
            found = self._value = values.decode(self.payload, self.encoding)
        return found

    @property
    def key(self) -> str | None:
        """The key as text. Bytes that are not UTF-8 are escaped such that the text can be given as a key again."""
        key = self.key_bytes
        return None if key is None else values.decode_key(key)

    @property
    def key_bytes(self) -> bytes | None:
        """The key as it is stored."""
        return self._of(self._batch.keys)

    @property
    def headers(self) -> dict[str, str | bytes]:
        """The headers, as a new dict each time."""
        return values.decode_headers(self._of(self._batch.headers))

    @property
    def kind(self) -> str | None:
        """The type of the item, as its producer named it."""
        return self._of(self._batch.kinds)

    @property
    def encoding(self) -> str | None:
        """How the payload is encoded; None is plain bytes."""
        return self._of(self._batch.encodings)

    @property
    def reference(self) -> str | None:
        """The producer's own text."""
        return self._of(self._batch.references)

    @property
    def priority(self) -> int:
        """0 (leased first) to 9 (last)."""
        priorities = self._batch.priorities
        return DEFAULT_PRIORITY if priorities is None else priorities[self._index]

    @property
    def produced_at(self) -> datetime:
        """When the item was added to this queue."""
        return values.timestamp(self._produced_at)

    @property
    def at(self) -> datetime | None:
        """The time before which the item is not leased, if its producer gave one."""
        at = self._of(self._batch.ats)
        return values.timestamp(at) if at else None

    @property
    def ttl(self) -> float | None:
        """The ttl in seconds, if its producer gave one."""
        ttl = self._of(self._batch.ttls)
        return ttl / SECOND if ttl else None

    @property
    def origin(self) -> "ItemOrigin | None":
        """The queue and id that the item had before, and why it was buried there; None if it was never moved."""
        data = self._of(self._batch.origins)
        return None if data is None else _item_origin(data)

    def _of(self, column: Sequence[T | None] | None) -> T | None:
        return None if column is None else column[self._index]

    def __reduce__(self) -> tuple[Any, ...]:
        alone = self._batch.slice(self._index, self._index + 1)  # a copy holds one row, not the whole batch
        return Item, (self._source, self.partition, self.offset, alone, 0, self._produced_at, self.attempts)

    def __repr__(self) -> str:
        parts = [f"Item({self.id!r}", _shown(self.payload)]
        parts += [f"{name}={value!r}" for name in ("key", "kind", "encoding", "reference") if (value := getattr(self, name)) is not None]
        return ", ".join([*parts, f"attempts={self.attempts})"])


class ItemOrigin(msgspec.Struct, frozen=True):
    """The item from which a moved item was made, and what happened to it in its queue. A time is None if not known."""

    queue: str
    incarnation: int
    id: str
    attempts: int
    reason: str
    """Why it was buried; "" if it was not."""
    produced_at: datetime | None
    first_failed_at: datetime | None
    last_failed_at: datetime | None
    buried_at: datetime | None
    parked: bool
    """Burying it parked its key in the queue it comes from."""
    forwarded: bool
    """It is the same item, moved to the partition that has its key since a resize."""


def _item_origin(data: bytes) -> ItemOrigin:
    found = decode_origin(data)
    return ItemOrigin(
        found.queue,
        found.incarnation,
        found.id,
        found.attempts,
        found.reason,
        _moment(found.produced_at),
        _moment(found.first_failed_at),
        _moment(found.last_failed_at),
        _moment(found.buried_at),
        found.parked,
        found.forwarded,
    )


def _moment(microseconds: int) -> datetime | None:
    return values.timestamp(microseconds) if microseconds else None


def stored_headers(item: Item) -> bytes | None:
    """The headers of an item as they are stored."""
    return item._of(item._batch.headers)


def items_of(
    source: ItemSource,
    partition: int,
    offsets: Sequence[int],
    batch: Batch,
    produced_at: int,
    attempts: Mapping[int, int],
    usual_attempts: int = 1,
) -> list[Item]:
    """The items of a batch, which have these offsets. Those that `attempts` lacks have `usual_attempts`."""
    counts: Iterable[int] = repeat(usual_attempts)
    if attempts:
        known = attempts.get
        counts = [known(offset, usual_attempts) for offset in offsets]
    return [*map(Item, repeat(source), repeat(partition), offsets, repeat(batch), range(len(offsets)), repeat(produced_at), counts)]


def _shown(payload: object) -> str:
    """A payload as a repr shows it: its beginning, and if that is not all, its length."""
    if isinstance(payload, bytes | str) and len(payload) > _SHOWN:
        unit = "bytes" if isinstance(payload, bytes) else "characters"
        return f"{payload[:_SHOWN]!r}… ({len(payload)} {unit})"
    text = repr(payload)
    return text if len(text) <= 4 * _SHOWN else f"{text[: 4 * _SHOWN]}…"
