"""The values in JSON bodies: durations, times, names, ids and bytes.

Owns: their types, which say in the OpenAPI document how they are written, and their conversion. Durations are texts
such as `30s`, `1h30m` or `250ms`, or numbers of seconds; times are RFC 3339 with a timezone; bytes are base64. What the
types do not say (limits of durations, the rule for names) is checked by the conversion, whose messages are clearer.
"""

import re
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from penstock.api.arguments import MAX_WAIT
from penstock.operations import Offsets
from penstock.rules.options import MAX_QUEUE_NAME
from penstock.words import values
from penstock.words.clock import HOUR, MILLISECOND, MINUTE, SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.ids import LAST_PARTITION
from penstock.words.limits import (
    MAX_BATCH_ITEMS,
    MAX_DELAY,
    MAX_KEY_BYTES,
    MAX_LEASE_TIMEOUT,
    MAX_NAME_BYTES,
    MAX_PARTITIONS,
    MIN_LEASE_TIMEOUT,
)
from penstock.words.quantities import parse_duration

_DURATION = r"([0-9]{1,15}(\.[0-9]{1,9})?|([0-9]{1,15}(\.[0-9]{1,9})?(ms|s|m|h|d|w))+)"
_WRITTEN = re.compile(_DURATION)
_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_DATE = "(19[7-9][0-9]|[2-9][0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = rf"{_DATE}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_QUEUE = f"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_QUEUE_NAME - 1}}}"
_ID = "(0|[1-9][0-9]{0,3})-(0|[1-9][0-9]{0,13})"
_TOKEN = r"[0-9a-f]{16}\.(0|[1-9][0-9]{0,3})\.[1-9a-f][0-9a-f]{0,15}\.(0|[1-9][0-9]{0,13})"


def _shown(**schema: Any) -> Meta:
    """What only the OpenAPI document says of a type."""
    return Meta(extra_json_schema=schema)


DurationText: TypeAlias = Annotated[str, _shown(pattern=f"^{_DURATION}$", examples=["30s"])]
Wait: TypeAlias = DurationText | Annotated[float, Meta(ge=0, le=MAX_WAIT / SECOND)]
"""How long a call may wait."""
LeaseTime: TypeAlias = DurationText | Annotated[float, Meta(ge=MIN_LEASE_TIMEOUT / SECOND, le=MAX_LEASE_TIMEOUT / SECOND)]
Span: TypeAlias = DurationText | Annotated[float, Meta(ge=0, le=MAX_DELAY / SECOND)]
Lifetime: TypeAlias = DurationText | Annotated[float, Meta(gt=0, le=MAX_DELAY / SECOND)]
"""A duration that cannot be 0."""
Time: TypeAlias = Annotated[datetime, Meta(tz=True, extra_json_schema={"pattern": f"^{_TIME}$"})]
Base64: TypeAlias = Annotated[bytes, _shown(pattern=_BASE64)]
QueueName: TypeAlias = Annotated[str, _shown(pattern=f"^{_QUEUE}$", examples=["orders"])]
QueueNameOrNone: TypeAlias = Annotated[str, _shown(pattern=f"^({_QUEUE})?$")]
Name: TypeAlias = Annotated[str, _shown(maxLength=MAX_NAME_BYTES)]
"""A text of at most MAX_NAME_BYTES bytes."""
Key: TypeAlias = Annotated[str, _shown(maxLength=MAX_KEY_BYTES)]
RequestName: TypeAlias = Annotated[str, _shown(minLength=1, maxLength=MAX_NAME_BYTES)]
CursorName: TypeAlias = RequestName
ItemId: TypeAlias = Annotated[str, _shown(pattern=f"^{_ID}$", examples=["0-17"])]
ItemIds: TypeAlias = Annotated[list[ItemId], Meta(min_length=1, max_length=MAX_BATCH_ITEMS)]
TokenText: TypeAlias = Annotated[str, _shown(pattern=f"^{_TOKEN}$")]
IdOrToken: TypeAlias = Annotated[str, _shown(pattern=f"^({_ID}|{_TOKEN})$")]
LogPosition: TypeAlias = Annotated[str, _shown(anyOf=[{"enum": ["oldest", "newest"]}, {"format": "date-time", "pattern": f"^{_TIME}$"}])]
PartitionNumber: TypeAlias = Annotated[int, Meta(ge=0, le=LAST_PARTITION)]
PartitionCount: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)]
_PARTITIONS = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,3})$"}, "examples": [{"0": 17}]}
PartitionOffsets: TypeAlias = Annotated[Offsets, Meta(extra_json_schema=_PARTITIONS)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_BATCH_ITEMS)]


class RequestShape(msgspec.Struct, forbid_unknown_fields=True):
    """The base of the shapes that clients send: a field that is not known is an error."""

    schema_rules: ClassVar[dict[str, Any]] = {}
    """What the OpenAPI document says of fields that depend on each other. The conversion checks it."""


def one_given(*names: str) -> list[dict[str, Any]]:
    """Alternatives for `schema_rules`: one of these fields is given and not null."""
    return [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]


def one_true(*names: str) -> list[dict[str, Any]]:
    """Alternatives for `schema_rules`: one of these fields is true."""
    return [{"required": [name], "properties": {name: {"const": True}}} for name in names]


class ReplyShape(msgspec.Struct, omit_defaults=True, gc=False):
    """The base of the shapes that clients receive: fields that have their default are left out."""


# -- durations and times -----------------------------------------------------------------------------


def to_microseconds(given: str | float, name: str, low: int = 0, high: int = MAX_DELAY) -> int:
    """A duration in microseconds; InvalidRequest, which names the field, unless it is from `low` to `high`."""
    if isinstance(given, str) and not _WRITTEN.fullmatch(given):
        raise InvalidRequest(f"{name} is {given!r:.60}; give a duration such as 30s, 5m, 1h30m or 250ms, or a number of seconds")
    seconds = parse_duration(given, name) if isinstance(given, str) else given
    found = values.duration(seconds, name) if seconds * SECOND <= MAX_DELAY else -1
    if not low <= found <= high:
        raise InvalidRequest(f"{name} is {given!r:.60}; give {format_duration(low)} to {format_duration(high)}")
    return found


def wait_microseconds(given: str | float, name: str = "request_timeout") -> int:
    return to_microseconds(given, name, 0, MAX_WAIT)


def lease_microseconds(given: str | float | None, name: str = "lease_timeout") -> int:
    """How long a lease lasts; 0 for the queue's own timeout."""
    return 0 if given is None else to_microseconds(given, name, MIN_LEASE_TIMEOUT, MAX_LEASE_TIMEOUT)


def format_duration(microseconds: int) -> str:
    """A duration as text: `1h30m`, `0.25s` is `250ms`. Other programs (Go) can read it too."""
    if microseconds < SECOND:
        return f"{microseconds / MILLISECOND:g}ms" if microseconds else "0s"
    hours, rest = divmod(microseconds, HOUR)
    minutes, rest = divmod(rest, MINUTE)
    seconds = f"{rest / SECOND:.6f}".rstrip("0").rstrip(".")
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "") + (f"{seconds}s" if rest else "")


def parse_position(given: str) -> Literal["oldest", "newest"] | int:
    """A place in the log: its oldest item, its end, or a time in wall microseconds."""
    if given == "oldest" or given == "newest":
        return "oldest" if given == "oldest" else "newest"
    try:
        return values.instant(msgspec.convert(given, Time), "at")
    except msgspec.ValidationError:
        raise InvalidRequest(f"at is {given!r:.60}; give oldest, newest, or a time such as 2025-01-31T12:00:00Z") from None


def time_or_none(microseconds: int) -> datetime | None:
    """Wall microseconds as a time; None for 0."""
    return values.timestamp(microseconds) if microseconds else None


# -- keys --------------------------------------------------------------------------------------------


def key_bytes_of(text: str | None, raw: bytes | None) -> bytes | None:
    """A key that is given as text or in base64. The bytes count when both are given."""
    key = raw if raw is not None else None if text is None else values.encode_key(text)
    if key is not None and len(key) > MAX_KEY_BYTES:
        raise InvalidRequest(f"the key has {len(key)} bytes; give at most {MAX_KEY_BYTES}")
    return key


def text_or_bytes(data: bytes) -> tuple[str | None, bytes | None]:
    """Stored bytes as text if they are UTF-8, else as they are."""
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return None, data
