"""The filter and the result of a redrive.

Owns: `item_filter`, which turns the argument `where` into a function, `Redriven` and `RedriveSample`. The filter runs
in the caller's thread.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from penstock.api.arguments import ListedItem
from penstock.api.items import Item
from penstock.operations import StateName
from penstock.words import values
from penstock.words.errors import InvalidRequest

Where: TypeAlias = Mapping[str, Any] | Callable[[Item], bool]
ItemFilter: TypeAlias = Callable[[ListedItem], bool]

PAGE = 1_000
REDRIVABLE: tuple[StateName, ...] = ("ready", "scheduled", "buried")
"""The states in which an item can be redriven."""
MAX_SAMPLE = 100
"""The most items that a preview describes. It counts all."""
SHOWN = 200
"""Characters of a payload in a sample."""
FIELDS = ("kind", "key", "reference", "encoding", "reason", "state", "origin_queue")
_HEADERS = "headers."


class Redriven(msgspec.Struct, frozen=True):
    """The result of `broker.redrive`: what it moved, or with `preview` would move."""

    items: int
    """How many items were moved, or would be. Fewer than `ids` if some were leased or completed meanwhile."""
    ids: list[str]
    """The ids in the source queue of the items that were chosen; in a preview those of `sample`."""
    sample: "list[RedriveSample]" = []
    """In a preview: the first 100 items that would be moved."""


class RedriveSample(msgspec.Struct, frozen=True):
    """An item that a redrive would move."""

    id: str
    """Its id in the source queue."""
    state: str
    """"ready", "scheduled" or "buried"."""
    key: str | None
    kind: str | None
    reason: str
    """Why it was buried or last retried, in this queue or in the one that it came from; "" if it never failed."""
    attempts: int
    """How often it was tried, in the queue where it was buried."""
    origin_queue: str | None
    """The queue that it came from; None if it was produced to this one."""
    produced_at: datetime
    buried_at: datetime | None
    size_bytes: int
    """The size of its payload."""
    payload: str
    """The first 200 characters of its payload if that is text, else "0x" and the first 100 bytes in hexadecimal."""


def sample_of(item: ListedItem) -> RedriveSample:
    origin = item.origin
    return RedriveSample(
        item.id,
        item.state,
        item.key,
        item.kind,
        _reason(item),
        item.attempts if item.state == "buried" or origin is None or not origin.attempts else origin.attempts,
        None if origin is None else origin.queue,
        item.produced_at,
        item.buried_at,
        len(item.payload),
        _start_of(item.payload),
    )


def _start_of(payload: bytes) -> str:
    start = payload[: 4 * SHOWN]  # a character has at most 4 bytes; the last one may be cut
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) == len(payload))[:SHOWN]
    except UnicodeDecodeError:
        return f"0x{payload[: SHOWN // 2].hex()}"


def item_filter(where: Where | None) -> ItemFilter:
    """A function that says whether an item matches `where`."""
    if where is None:
        return lambda item: True
    if not isinstance(where, Mapping):
        if not callable(where):
            raise InvalidRequest(f"where is {type(where).__name__}; give a dict such as {{'kind': 'invoice'}}, or a function of an item")
        return lambda item: bool(where(item))
    tests = [_equals(name, value) for name, value in where.items()]
    return lambda item: all(test(item) for test in tests)


def by_partition(items: Sequence[ListedItem]) -> dict[int, list[int]]:
    """The offsets of the items, by partition."""
    found: dict[int, list[int]] = {}
    for item in items:
        found.setdefault(item.partition, []).append(item.offset)
    return found


def _equals(name: str, wanted: Any) -> ItemFilter:
    if name == "key":
        key = None if wanted is None else values.encode_key(wanted)
        return lambda item: item.key_bytes == key
    if name == "reason":
        return lambda item: _reason(item) == wanted
    if name == "origin_queue":
        return lambda item: (None if item.origin is None else item.origin.queue) == wanted
    if isinstance(name, str) and name.startswith(_HEADERS):
        header = name.removeprefix(_HEADERS)
        return lambda item: item.headers.get(header) == wanted
    if name in FIELDS:
        return lambda item: bool(getattr(item, name) == wanted)
    raise InvalidRequest(f"items cannot be chosen by {name!r}; use {', '.join(FIELDS)}, 'headers.<name>', or a function of an item")


def _reason(item: ListedItem) -> str:
    """Why the item last failed in this queue, or why it was buried in the queue that it came from."""
    return item.reason or ("" if item.origin is None else item.origin.reason)
