"""Payload values, keys, headers and times: decoding gives the encoded value, and other values are refused."""

import enum
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.words import values
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_DELAY

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)
HEADERS = st.dictionaries(st.text(), st.text() | st.binary(), max_size=5)
INSTANTS = st.integers(0, values.LAST_INSTANT)

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Point:
    x: int
    y: float | None = None


class Order(msgspec.Struct):
    number: int


class Colour(enum.IntEnum):
    RED = 1


class Tag(str):
    __slots__ = ()


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


# -- payloads ----------------------------------------------------------------------------------------


@given(st.binary(), st.none() | st.sampled_from(["protobuf", "", "JSON"]))
def test_bytes_stay_as_they_are(payload: bytes, encoding: str | None) -> None:
    assert values.encode(payload) == (payload, None)
    assert values.decode(payload, encoding) is payload


@given(st.text())
def test_a_text_is_decoded_as_it_was_encoded(text: str) -> None:
    payload, encoding = values.encode(text)
    assert (payload, encoding) == (text.encode(), "text")
    assert values.decode(payload, encoding) == text


@given(JSON.filter(lambda value: value is not None and not isinstance(value, str)))
def test_a_json_value_is_decoded_as_it_was_encoded(value: Any) -> None:
    payload, encoding = values.encode(value)
    assert encoding == "json"
    found = values.decode(payload, encoding)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "payload", "encoding"),
    [
        (bytearray(b"ab"), b"ab", None),
        (memoryview(b"abcd")[::2], b"ac", None),
        (Tag("ab"), b"ab", "text"),
        ((1, 2), b"[1,2]", "json"),
        (Pair(1, 2), b"[1,2]", "json"),
        (OrderedDict(a=1), b'{"a":1}', "json"),
        (Point(1, 0.5), b'{"x":1,"y":0.5}', "json"),
        (Order(7), b'{"number":7}', "json"),
        (Colour.RED, b"1", "json"),
        (True, b"true", "json"),
        (1 << 70, b"1180591620717411303424", "json"),
        ({"a": [None, Point(1)]}, b'{"a":[null,{"x":1,"y":null}]}', "json"),
        ({"null": "null"}, b'{"null":"null"}', "json"),
        ({"when": datetime(2030, 1, 1, tzinfo=UTC)}, b'{"when":"2030-01-01T00:00:00Z"}', "json"),
    ],
)
def test_other_types_of_payload_that_are_accepted(value: Any, payload: bytes, encoding: str | None) -> None:
    assert values.encode(value) == (payload, encoding)
    assert type(values.encode(value)[0]) is bytes


@pytest.mark.parametrize("value", [None, object(), {1, 2}, date(2030, 1, 1), Point, Order, iter([1]), 1j, enum.Enum("E", "A")])
def test_an_error_for_another_type_of_payload_lists_the_accepted_ones(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.encode(value)
    says = "give bytes, str, or for JSON a dict, list, tuple, number, bool, dataclass or Struct"
    assert str(caught.value) == f"the payload is {type(value).__name__}; {says}"


@pytest.mark.parametrize(
    "value",
    [{"a": object()}, [{(1, 2): 3}], {"a": "\ud800"}, {"\ud800": 1}, endless(), 10**5_000, [1j]],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"(?s)^the payload cannot be written as JSON \(.+\); fix it or give bytes$"):
        values.encode(value)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: [None, x], lambda x: {"a": {"b": (1, x)}}, lambda x: Point(1, x), lambda x: [{x}]]
)
def test_a_float_that_is_not_finite_is_refused(strange: float, around: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^the payload has a float that is not finite, which JSON cannot hold; give None or a text instead$"
    ):
        values.encode(around(strange))


def test_a_deep_payload_with_a_null_is_searched_without_recursion() -> None:
    deep: Any = None
    for _ in range(500):
        deep = [deep]
    assert values.encode(deep)[0] == b"[" * 500 + b"null" + b"]" * 500


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^the payload is not valid Unicode; remove its lone surrogates or give bytes$"):
        values.encode("a\ud800")


@pytest.mark.parametrize(
    ("payload", "encoding"),
    [(b"{", "json"), (b"", "json"), (b"nul", "json"), (b'"\xff"', "json"), (b"[" * 100_000, "json"), (b"1e999", "json"), (b"\xff", "text")],
    ids=lambda value: value[:5],
)
def test_the_error_of_a_payload_that_cannot_be_decoded_names_the_encoding(payload: bytes, encoding: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^the payload cannot be decoded as '{encoding}' \(.+\); read its bytes from `\.payload`$"):
        values.decode(payload, encoding)


@pytest.mark.parametrize(
    ("value", "encoding", "expected"),
    [
        (b"{}", "json", (b"{}", "json")),
        ("<a/>", "xml", (b"<a/>", "xml")),
        ("a", None, (b"a", "text")),
        ("a", "", (b"a", "")),
        (b"a", None, (b"a", None)),
        ({}, "json", (b"{}", "json")),
        ({}, None, (b"{}", "json")),
    ],
)
def test_bytes_and_str_may_have_the_callers_own_encoding(value: Any, encoding: str | None, expected: tuple[bytes, str | None]) -> None:
    assert values.encode_as(value, encoding) == expected


def test_a_json_payload_cannot_have_another_encoding() -> None:
    with pytest.raises(InvalidRequest, match=r"^the encoding is 'text' but the payload is dict; leave it out, or give bytes or str$"):
        values.encode_as({}, "text")


# -- keys and headers --------------------------------------------------------------------------------


@given(st.binary())
def test_a_key_of_any_bytes_can_be_given_again_as_text(key: bytes) -> None:
    assert values.encode_key(key) == key
    assert values.encode_key(values.decode_key(key)) == key


@given(st.text())
def test_a_key_is_utf8(key: str) -> None:
    assert values.encode_key(key) == key.encode()
    assert values.decode_key(values.encode_key(key)) == key


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (1, "the key is int; give str or bytes"),
        (None, "the key is NoneType; give str or bytes"),
        (bytearray(b"a"), "the key is bytearray; give str or bytes"),
        ("\ud800", "the key is not valid Unicode; remove its lone surrogates or give bytes"),
    ],
)
def test_a_wrong_key_is_refused(key: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.encode_key(key)
    assert str(caught.value) == says
    with pytest.raises(InvalidRequest) as caught:
        values.encode_key(key, "dedup id")
    assert str(caught.value) == says.replace("key", "dedup id")


@given(HEADERS)
def test_headers_are_decoded_as_they_were_encoded(headers: dict[str, str | bytes]) -> None:
    packed = values.encode_headers(headers)
    assert (packed is None) == (not headers)
    assert values.decode_headers(packed) == headers


@pytest.mark.parametrize("headers", [MappingProxyType({"a": "b"}), UserDict({"a": "b"}), OrderedDict(a="b")])
def test_headers_may_be_any_mapping(headers: Any) -> None:
    assert values.decode_headers(values.encode_headers(headers)) == {"a": "b"}


def test_no_headers_are_stored_as_none() -> None:
    assert values.encode_headers(None) is None
    assert values.encode_headers({}) is None
    assert values.encode_headers(MappingProxyType({})) is None
    assert values.decode_headers(None) == {}


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ([("a", "b")], "the headers are list; give a dict of str to str or bytes"),
        ("a", "the headers are str; give a dict of str to str or bytes"),
        ({1: "a"}, "the name of a header is int; give str"),
        ({b"a": "a"}, "the name of a header is bytes; give str"),
        ({"a": 1}, "the header 'a' is int; give str or bytes"),
        ({"a": None}, "the header 'a' is NoneType; give str or bytes"),
        ({"a": ["b"]}, "the header 'a' is list; give str or bytes"),
        ({"a": "\ud800"}, "a header is not valid Unicode; remove its lone surrogates or give its value as bytes"),
        ({"\ud800": "a"}, "a header is not valid Unicode; remove its lone surrogates or give its value as bytes"),
    ],
)
def test_wrong_headers_are_refused(headers: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.encode_headers(headers)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the headers are not MessagePack ("),
        (b"\x80\x80", "the headers are not MessagePack ("),
        (b"\x81\xa1\xff\xa1a", "the headers are not MessagePack ("),
        (b"\x81" * 100_000, "the headers are not MessagePack ("),
        (b"\x90", "the headers are list in MessagePack; write them as a map of str to str or bytes"),
        (b"\xc0", "the headers are NoneType in MessagePack; write them as a map of str to str or bytes"),
        (b"\x81\x01\xa1a", "the name of a header is int; give str"),
        (b"\x81\xa1a\x01", "the header 'a' is int; give str or bytes"),
    ],
    ids=lambda value: value[:9],
)
def test_stored_headers_that_cannot_be_decoded_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.decode_headers(data)
    assert str(caught.value).startswith(says)
    assert "; write them as a map" in str(caught.value) or "; give " in str(caught.value)


# -- times -------------------------------------------------------------------------------------------


@given(INSTANTS)
def test_an_instant_keeps_its_microseconds(microseconds: int) -> None:
    when = values.timestamp(microseconds)
    assert when.tzinfo is UTC
    assert values.instant(when) == microseconds


@pytest.mark.parametrize(
    ("when", "microseconds"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 2, tzinfo=UTC), DAY),
        (datetime(1970, 1, 2, 1, tzinfo=timezone(timedelta(hours=1))), DAY),
        (datetime.max.replace(tzinfo=UTC), values.LAST_INSTANT),
    ],
)
def test_instants(when: datetime, microseconds: int) -> None:
    assert values.instant(when) == microseconds


YEARS = "at is not between the years 1970 and 9999; give a time in between"
KINDS = "give a datetime with a timezone"
NUMBER = (
    "at is a number; give a datetime with a timezone, such as datetime.now(timezone.utc) + timedelta(seconds=…), "
    "or datetime.fromtimestamp(…, timezone.utc)"
)


@pytest.mark.parametrize(
    ("when", "says"),
    [
        (datetime(2030, 1, 1), "at has no timezone; give one, such as datetime.now(timezone.utc) or when.astimezone()"),
        (True, f"at is bool; {KINDS}"),
        ("2030-01-01", f"at is str; {KINDS}"),
        (date(2030, 1, 1), f"at is date; {KINDS}"),
        (timedelta(1), f"at is timedelta; {KINDS}"),
        (0, NUMBER),
        (-0.5, NUMBER),
        (1_900_000_000, NUMBER),
        (float("nan"), NUMBER),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), YEARS),
        (datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-2))), YEARS),
    ],
)
def test_a_wrong_instant_is_refused(when: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.instant(when)
    assert str(caught.value) == says


def test_the_error_of_an_instant_has_its_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^since has no timezone; "):
        values.instant(datetime(2030, 1, 1), "since")


def test_a_time_beyond_the_last_datetime_gives_the_last_datetime() -> None:
    assert values.timestamp(1 << 62) == datetime.max.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("span", "microseconds"),
    [
        (0, 0),
        (0.0, 0),
        (2, 2_000_000),
        (1.1, 1_100_000),
        (1e-9, 1),
        (timedelta(milliseconds=3), 3_000),
        (timedelta(0), 0),
        (MAX_DELAY // SECOND, MAX_DELAY),
    ],
)
def test_durations(span: float | timedelta, microseconds: int) -> None:
    found = values.duration(span, "ttl")
    assert (found, type(found)) == (microseconds, int)


BOUNDS = "ttl is out of bounds; give 0 to 315360000 seconds, or a timedelta"


@pytest.mark.parametrize(
    ("span", "says"),
    [
        (True, "ttl is bool; give seconds or a timedelta"),
        ("1", "ttl is str; give seconds or a timedelta"),
        (None, "ttl is NoneType; give seconds or a timedelta"),
        *((span, BOUNDS) for span in (-1, -1e-9, float("nan"), float("inf"), 1e300, 10**400, MAX_DELAY // SECOND + 1)),
        (timedelta(microseconds=-1), BOUNDS),
        (timedelta.max, BOUNDS),
    ],
)
def test_a_wrong_duration_is_refused(span: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.duration(span, "ttl")
    assert str(caught.value) == says


def test_headers_without_the_trace_context() -> None:
    others: dict[str, str | bytes] = {"shop": "7", "raw": b"\xff", "tracestate-not": "x"}
    packed = values.encode_headers(others)
    traced = values.encode_headers({"traceparent": "00-1-2-01", **others, "tracestate": "a=b"})
    assert values.without_trace_context(traced) == values.without_trace_context(packed) == packed
    assert values.without_trace_context(values.encode_headers({"traceparent": "00-1-2-01"})) is None
    assert [values.without_trace_context(given) for given in (None, b"\xc1traceparent")] == [None, b"\xc1traceparent"]
