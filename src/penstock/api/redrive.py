"""The filter and the result of a redrive.

Owns: `item_filter`, which turns the argument `where` into a function, and `Redriven`. The filter runs in the caller's
thread.
"""

from collections.abc import Callable, Mapping, Sequence
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
REDRIVABLE: tuple[StateName, ...] = ("ready", "buried")
"""The states in which an item can be redriven."""
FIELDS = ("kind", "key", "reference", "encoding", "reason", "origin_queue")
_HEADERS = "headers."


class Redriven(msgspec.Struct, frozen=True):
    """The result of `broker.redrive`: what it moved, or with `preview` would move."""

    items: int
    """How many items were moved. Fewer than `ids` if some were leased or completed meanwhile."""
    ids: list[str]
    """The ids in the source queue of the items that were chosen."""


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
