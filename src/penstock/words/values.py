"""Conversion between Python values and what is stored: payloads, keys, headers and times.

Every `encode` returns bytes from which the matching `decode` gives the same value, or raises an InvalidRequest that
names the accepted types. Times are stored as whole microseconds.
"""

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import msgspec

from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_DELAY, MAX_NAME_BYTES

JSON: Final = "json"
TEXT: Final = "text"
TRACE_PARENT: Final = "traceparent"
TRACE_STATE: Final = "tracestate"
"""The headers with the trace context of an item (W3C Trace Context)."""


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Value: TypeAlias = bytes | bytearray | memoryview | str | dict[Any, Any] | list[Any] | tuple[Any, ...] | float | msgspec.Struct | Dataclass
"""The types of a payload that `encode` accepts."""
Headers: TypeAlias = Mapping[str, str] | Mapping[str, bytes] | Mapping[str, str | bytes]

_BYTES_TYPES = (bytes, bytearray, memoryview)
_EXACT_TYPES = frozenset((str, bytes))
_JSON_TYPES = (dict, list, tuple, int, float, msgspec.Struct)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_INSTANT = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_FAR = 1e15  # seconds; greater floats (and NaN) are out of bounds, and are not converted to int


def plain_text(value: Any) -> Any:
    """A value of a subclass of str (such as the id that `produce` returns) as a str; other values as they are.

    msgspec encodes no subclasses.
    """
    return str.__str__(value) if isinstance(value, str) and type(value) is not str else value


def _encode_unknown(value: Any) -> Any:
    """What is written for a value whose type msgspec does not know."""
    if isinstance(value, str):
        return plain_text(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_to_json = msgspec.json.Encoder(enc_hook=_encode_unknown).encode
_from_json: Any = msgspec.json.Decoder().decode
_pack = msgspec.msgpack.Encoder().encode
_unpack: Any = msgspec.msgpack.Decoder().decode


# -- payloads ----------------------------------------------------------------------------------------


def encode(value: Value) -> tuple[bytes, str | None]:
    """The payload bytes of a value, and the encoding that `decode` needs to give the value again."""
    if isinstance(value, str):
        try:
            return value.encode(), TEXT
        except UnicodeEncodeError:
            raise InvalidRequest("the payload is not valid Unicode; remove its lone surrogates or give bytes") from None
    if isinstance(value, _BYTES_TYPES):
        return bytes(value), None
    if isinstance(value, _JSON_TYPES) or (is_dataclass(value) and not isinstance(value, type)):
        return _encode_json(value), JSON
    raise InvalidRequest(
        f"the payload is {type(value).__name__}; give bytes, str, or for JSON a dict, list, tuple, number, bool, dataclass or Struct"
    )


def encode_as(value: Value, encoding: str | None) -> tuple[bytes, str | None]:
    """As `encode`, with the caller's own encoding, which only bytes and str may have; other values are JSON."""
    payload, derived = encode(value)
    if encoding is None or encoding == derived:
        return payload, derived
    if derived == JSON:
        raise InvalidRequest(f"the encoding is {encoding!r} but the payload is {type(value).__name__}; leave it out, or give bytes or str")
    return payload, encoding


def decode(payload: bytes, encoding: str | None) -> Any:
    """The value of a payload. With an unknown encoding or none, the payload itself."""
    try:
        if encoding == JSON:
            return _from_json(payload)
        if encoding == TEXT:
            return payload.decode()
    except (ValueError, RecursionError) as error:  # errors of msgspec are ValueErrors
        raise InvalidRequest(f"the payload cannot be decoded as {encoding!r} ({error}); read its bytes from `.payload`") from None
    return payload


def _encode_json(value: Any) -> bytes:
    try:
        payload = _to_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the payload cannot be written as JSON ({error}); fix it or give bytes") from None
    # JSON has no NaN or infinity: msgspec writes null, which would be read as None. So search the value for them.
    if b"null" in payload and _has_non_finite_float(msgspec.to_builtins(value, enc_hook=_encode_unknown)):
        raise InvalidRequest("the payload has a float that is not finite, which JSON cannot hold; give None or a text instead")
    return payload


def _has_non_finite_float(value: Any) -> bool:
    pending = [value]
    for part in pending:
        if isinstance(part, float) and not math.isfinite(part):
            return True
        if isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            pending.extend(part)
    return False


# -- keys, dedup ids, headers ------------------------------------------------------------------------


def encode_key(key: str | bytes, name: str = "key") -> bytes:
    """The bytes of a key, or of another id that errors call `name`. Accepts every text that `decode_key` returns."""
    if isinstance(key, str):
        try:
            return key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidRequest(f"the {name} is not valid Unicode; remove its lone surrogates or give bytes") from None
    if isinstance(key, bytes):
        return bytes(key)
    raise InvalidRequest(f"the {name} is {type(key).__name__}; give str or bytes")


def encode_dedup_id(dedup: str | bytes, name: str = "dedup id") -> bytes:
    """The bytes of a dedup id, checked. Errors call it `name`.

    An empty one is refused: it is most likely a field that the caller forgot to fill, and would make all such items
    duplicates of each other.
    """
    found = encode_key(dedup, name)
    if not 1 <= len(found) <= MAX_NAME_BYTES:
        is_wrong = f"has {len(found)} bytes; give at most {MAX_NAME_BYTES}" if found else "is empty; give a text, or none at all"
        raise InvalidRequest(f"the {name} {is_wrong}")
    return found


def decode_key(key: bytes) -> str:
    """A key as text. Bytes that are not UTF-8 become lone surrogates, which `encode_key` turns into the same bytes."""
    return key.decode("utf-8", "surrogateescape")


def encode_headers(headers: Headers | None) -> bytes | None:
    """Headers as a MessagePack map; None for no headers."""
    if headers is None:
        return None
    if type(headers) is not dict:
        if not isinstance(headers, Mapping):
            raise InvalidRequest(f"the headers are {type(headers).__name__}; give a dict of str to str or bytes")
        headers = dict(headers)
    if not _EXACT_TYPES.issuperset(map(type, headers.values())):
        headers = {name: plain_text(value) for name, value in headers.items()}
    _check_headers(headers)
    try:
        return _pack(headers) if headers else None
    except UnicodeEncodeError:
        raise InvalidRequest("a header is not valid Unicode; remove its lone surrogates or give its value as bytes") from None


def decode_headers(headers: bytes | None) -> dict[str, str | bytes]:
    if headers is None:
        return {}
    try:
        found = _unpack(headers)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the headers are not MessagePack ({error}); write them as a map of str to str or bytes") from None
    if type(found) is not dict:
        raise InvalidRequest(f"the headers are {type(found).__name__} in MessagePack; write them as a map of str to str or bytes")
    _check_headers(found)
    return found


def header_entries(headers: bytes) -> list[tuple[str, bytes]]:
    """The entries of stored headers for a map column, where all values must have one type: bytes."""
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in decode_headers(headers).items()]


def without_trace_context(headers: bytes | None) -> bytes | None:
    """Stored headers without those of the trace context; None if no others are left."""
    if headers is None or TRACE_PARENT.encode() not in headers:
        return headers
    try:
        left = decode_headers(headers)
    except InvalidRequest:
        return headers
    return encode_headers({name: value for name, value in left.items() if name not in (TRACE_PARENT, TRACE_STATE)})


def _check_headers(headers: dict[Any, Any]) -> None:
    for name, value in headers.items():
        if type(name) is not str:
            raise InvalidRequest(f"the name of a header is {type(name).__name__}; give str")
        if type(value) is not str and type(value) is not bytes:
            raise InvalidRequest(f"the header {name!r} is {type(value).__name__}; give str or bytes")


# -- times -------------------------------------------------------------------------------------------


def instant(when: datetime, name: str = "at") -> int:
    """A datetime with a timezone, as wall microseconds."""
    if isinstance(when, datetime):
        if when.utcoffset() is None:
            raise InvalidRequest(f"{name} has no timezone; give one, such as datetime.now(timezone.utc) or when.astimezone()")
        return check_instant((when - _EPOCH) // timedelta(microseconds=1), name)
    if isinstance(when, int | float) and not isinstance(when, bool):
        example = "datetime.now(timezone.utc) + timedelta(seconds=…), or datetime.fromtimestamp(…, timezone.utc)"
        raise InvalidRequest(f"{name} is a number; give a datetime with a timezone, such as {example}")
    raise InvalidRequest(f"{name} is {type(when).__name__}; give a datetime with a timezone")


def check_instant(microseconds: int, name: str = "at") -> int:
    """Return wall microseconds; InvalidRequest when a datetime cannot hold them."""
    if not 0 <= microseconds <= LAST_INSTANT:
        raise InvalidRequest(f"{name} is not between the years 1970 and 9999; give a time in between")
    return microseconds


def duration(span: float | timedelta, name: str) -> int:
    """Seconds or a timedelta as microseconds. A positive length is at least 1: for many options 0 means none."""
    if isinstance(span, timedelta):
        microseconds = span // timedelta(microseconds=1)
    elif type(span) is int:
        microseconds = span * SECOND
    elif isinstance(span, float):
        microseconds = (round(span * SECOND) or (span > 0) - (span < 0)) if abs(span) < _FAR else -1
    else:
        raise InvalidRequest(f"{name} is {type(span).__name__}; give seconds or a timedelta")
    if not 0 <= microseconds <= MAX_DELAY:
        raise InvalidRequest(f"{name} is out of bounds; give 0 to {MAX_DELAY // SECOND} seconds, or a timedelta")
    return microseconds


def timestamp(microseconds: int) -> datetime:
    """Wall microseconds as a datetime in UTC; later times than a datetime can hold give the latest datetime."""
    return _EPOCH + timedelta(microseconds=min(microseconds, LAST_INSTANT))
