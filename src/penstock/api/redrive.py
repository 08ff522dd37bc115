"""Redrive: which items are meant, and what was done with them.

Owns: `item_filter` (a filter as callers give it → a function), `Redriven`. Evaluated in the caller's thread, on a page of items at a time.
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
"""The states of items that a redrive may take."""
FIELDS = ("kind", "key", "reference", "encoding", "reason", "origin_queue")
_HEADERS = "headers."


class Redriven(msgspec.Struct, frozen=True):
    """What a redrive moved, or would move: how many items, and the ids they had."""

    items: int
    ids: list[str]


def item_filter(where: Where | None) -> ItemFilter:
    """Whether an item is meant."""
    if where is None:
        return lambda item: True
    if not isinstance(where, Mapping):
        if not callable(where):
            raise InvalidRequest(f"where is {type(where).__name__}; give a dict such as {{'kind': 'invoice'}}, or a function of an item")
        return lambda item: bool(where(item))
    tests = [_equals(name, value) for name, value in where.items()]
    return lambda item: all(test(item) for test in tests)


def by_partition(items: Sequence[ListedItem]) -> dict[int, list[int]]:
    """Offsets of items, by partition."""
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
    """Why it was given up: here, or where it came from."""
    return item.reason or ("" if item.origin is None else item.origin.reason)
