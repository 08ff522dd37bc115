"""What `--json` says: documents of plain values, whose fields scripts rely on.

Owns: the form of items, queues and times in JSON. Bytes that are not UTF-8 are said under the same name with `_base64` behind it.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.api.arguments import ListedItem
from penstock.api.items import Item
from penstock.api.leases import HeldLease
from penstock.api.options import QueueInfo
from penstock.reports import HeldKey, ItemEvent, QueueStats
from penstock.words import values
from penstock.words.errors import InvalidRequest
from penstock.words.fields import Surface, Type, on
from penstock.words.origin import Origin

Document = dict[str, Any]


def textual(name: str, data: bytes | None) -> Document:
    """Bytes under a name: as text if they are UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode("ascii")}


def moment(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def wall(microseconds: int) -> str | None:
    return moment(values.timestamp(microseconds)) if microseconds else None


def headers(given: Mapping[str, str | bytes]) -> Document:
    found: Document = {}
    for name, value in given.items():
        found |= {name: value} if isinstance(value, str) else textual(name, value)
    return found


def item(given: Item) -> Document:
    """An item; what it does not have is left out, but its key."""
    found: Document = {"id": given.id, **textual("key", given.key_bytes), **_payload(given)}
    found |= {"attempts": given.attempts, "priority": given.priority, "produced_at": moment(given.produced_at)}
    return found | {name: write(value) for name, write in _OPTIONAL if (value := getattr(given, name)) not in (None, {})}


def _payload(given: Item) -> Document:
    """The payload as text, and for JSON the value besides."""
    found = textual("payload", given.payload)
    if given.encoding == values.JSON:
        try:
            found["value"] = given.value
        except InvalidRequest:  # it only claims to be JSON
            found["value"] = None
    return found


def listed(given: ListedItem) -> Document:
    return {**item(given), "state": given.state, **({"reason": given.reason} if given.reason else {})}


def lease(given: HeldLease) -> Document:
    return {**item(given.item), "token": given.token, "deadline": moment(given.deadline)}


def origin(given: Origin) -> Document:
    fields: Document = msgspec.structs.asdict(given)
    times = {name: wall(value) for name, value in fields.items() if name.endswith("_at")}
    return {**fields, **times, "incarnation": f"{given.incarnation:016x}"}


_SAID_OF_ALL = ("id", "key", "payload", "attempts", "priority", "produced_at")
_WRITE: dict[Type, Callable[[Any], Any]] = {Type.INSTANT: moment, Type.HEADERS: headers, Type.ORIGIN: origin}
_OPTIONAL = [
    (field.name, _WRITE.get(field.type, lambda value: value))
    for field in sorted(on(Surface.SHOWN), key=lambda field: field.type in (Type.HEADERS, Type.ORIGIN))  # what has parts comes last
    if field.name not in _SAID_OF_ALL
]


def queue(given: QueueInfo) -> Document:
    return {**msgspec.structs.asdict(given), "created_at": moment(given.created_at)}


def stats(given: QueueStats) -> Document:
    found: Document = msgspec.to_builtins(given)
    return {**found, "depth": given.depth}


def event(given: ItemEvent) -> Document:
    """What happened to an item; what there is not to say is left out."""
    found = {name: value for name, value in msgspec.structs.asdict(given).items() if value}
    return {**found, "at": wall(given.at)}


def held_key(given: HeldKey) -> Document:
    found = msgspec.structs.asdict(given)
    return {**textual("key", given.key), **{name: value for name, value in found.items() if name != "key"}}
