"""Parsing of durations, sizes, times and pairs."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import option_values
from penstock.cli.failures import CommandFailed
from penstock.words.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30", 30), ("0", 0), ("1.5", 1.5), ("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86_400), ("1w", 604_800)),
        *(("250ms", 0.25), ("1d12h", 129_600), (" 5M ", 300), ("1.5h", 5400), ("1h30m10s", 5410)),
    ],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert option_values.parse_duration(text, "--ttl") == seconds


@pytest.mark.parametrize("text", ["", "s", "-5", "-5s", "5x", "5 m", "m5", "1h 30m", "1:30", "five", "5mm", "nan", "inf", "1e3", "½h"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^--ttl is .*; give seconds"):
        option_values.parse_duration(text, "--ttl")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("64mib", 64 << 20),
        ("1GiB", 1 << 30),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2_000_000_000),
        ("1t", 1 << 40),
    ],
)
def test_a_size(text: str, size: int) -> None:
    assert option_values.parse_size(text, "--max-bytes") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "1KiB2", "none"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^--max-bytes is .*; give bytes"):
        option_values.parse_size(text, "--max-bytes")


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (option_values.or_none(option_values.parse_duration), "none", None),
        (option_values.or_none(option_values.parse_duration), "5m", 300),
        (option_values.or_none(option_values.parse_size), "None", None),
        (option_values.or_none(option_values.parse_size), "1k", 1024),
        (option_values.or_none(option_values.parse_number), "none", None),
        (option_values.or_none(option_values.parse_number), "1,000", 1000),
        (option_values.parse_number, "10_000", 10_000),
    ],
)
def test_none_gives_no_value(read: Callable[[str, str], Any], text: str, value: float | None) -> None:
    assert read(text, "--it") == value


def test_not_a_number() -> None:
    with pytest.raises(CommandFailed, match="give a whole number"):
        option_values.parse_number("1.5", "--max-items")


def test_a_time_with_an_offset() -> None:
    assert option_values.parse_time("2030-01-31T08:00:00Z", "--at") == datetime(2030, 1, 31, 8, tzinfo=UTC)
    assert option_values.parse_time("2030-01-31T08:00:00+02:00", "--at") == datetime(2030, 1, 31, 6, tzinfo=UTC)


def test_a_time_without_an_offset_is_local() -> None:
    assert option_values.parse_time("2030-01-31T08:00:00", "--at") == datetime(2030, 1, 31, 8).astimezone()
    assert option_values.parse_time("2030-01-31", "--at") == datetime(2030, 1, 31).astimezone()


@pytest.mark.parametrize("text", ["", "tomorrow", "08:00", "2030-13-01", "1735689600.5.5", "9999-12-31T23:59:59-23:59x"])
def test_not_a_time(text: str) -> None:
    with pytest.raises(CommandFailed, match=r"^--at is .*; give a time as 2030"):
        option_values.parse_time(text, "--at")


def test_pairs() -> None:
    assert option_values.parse_pairs(["a=1", "b=", "c=x=y"], "--header", "NAME=VALUE") == {"a": "1", "b": "", "c": "x=y"}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(CommandFailed, match=r"^--header"):
            option_values.parse_pairs(wrong, "--header", "NAME=VALUE")


def test_weights() -> None:
    assert option_values.parse_weights(["orders=3", "mail"], "--queue") == {"orders": 3, "mail": 1}
    for wrong in (["a=0"], ["a=-1"], ["a=x"], ["a="], ["=1"], ["a", "a=2"], ["a=1.5"]):
        with pytest.raises(CommandFailed, match="give each queue once"):
            option_values.parse_weights(wrong, "--queue")


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for read in (option_values.parse_duration, option_values.parse_size, option_values.parse_number, option_values.parse_time):
        with suppress(CommandFailed, InvalidRequest):
            read(text, "--it")
