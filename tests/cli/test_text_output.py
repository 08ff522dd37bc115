"""Text forms of values, and tables."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.items import Item, ItemSource
from penstock.cli import text_output
from penstock.words.batch import Batch


@given(st.text())
def test_control_characters_are_escaped(text: str) -> None:
    assert text_output.printable(text).isprintable()


def test_printable_text_is_unchanged() -> None:
    assert text_output.printable("kākāriki 🦀") == "kākāriki 🦀"
    assert text_output.printable("a\nb\x1b[31m\udcff") == r"a\nb\x1b[31m\xff"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "–"), (0, "0s"), (0.25, "0.25s"), (7.93, "7.9s"), (59, "59s"), (60, "1m"), (90, "1m 30s")),
        *((3600, "1h"), (3661, "1h 1m"), (86_400, "1d"), (90_000, "1d 1h"), (86_460, "1d"), (604_800, "7d")),
    ],
)
def test_a_span(seconds: float | None, text: str) -> None:
    assert text_output.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 50, "5,120 TiB")],
)
def test_a_size(size: int | None, text: str) -> None:
    assert text_output.format_size(size) == text


def test_counts() -> None:
    assert [text_output.format_count(number, "item") for number in (0, 1, 2_000)] == ["0 items", "1 item", "2,000 items"]
    assert text_output.format_count(2, "batch", "batches") == "2 batches"


def test_times_are_local() -> None:
    assert text_output.format_time(datetime(2030, 1, 1, tzinfo=UTC)) == datetime(2030, 1, 1, tzinfo=UTC).astimezone().strftime(
        "%Y-%m-%d %H:%M:%S"
    )


def test_payloads() -> None:
    batch = Batch([b"text\n", b"\xff\xfe", b""])
    items = [Item(ItemSource("q"), 0, index, batch, index, 0, 0) for index in range(3)]
    assert [text_output.format_payload(item) for item in items] == [r"text\n", "<2 bytes>", ""]


def test_a_plain_table_is_aligned_and_cuts_nothing() -> None:
    table = text_output.TextTable(("name", "count"), [("a", "1"), ("x" * 300, "1,000")], right=("count",))
    heading, first, second = table.plain().splitlines()
    assert heading == "NAME" + " " * 296 + "  COUNT"
    assert first == "a" + " " * 299 + "      1"
    assert second == "x" * 300 + "  1,000"


def test_columns_are_cut_to_the_terminal_except_uncut_ones() -> None:
    table = text_output.TextTable(("id", "key", "payload", "token"), [("0-1", "k" * 50, "p" * 90, "t" * 30)], uncut=("id", "token"))
    heading, row = table.lines(80)
    assert len(row) == 80 and row.startswith("0-1  kkk") and row.endswith("  " + "t" * 30)
    assert row.count("…") == 2 and heading.split() == ["id", "key", "payload", "token"]
    (_, row) = table.lines(20)
    assert row == f"0-1  {'k' * 7}…  {'p' * 7}…  {'t' * 30}"
    assert "…" not in table.plain()


def test_optional_columns_are_dropped_on_a_narrow_terminal() -> None:
    table = text_output.TextTable(
        ("id", "a", "b", "count"), [("0-1", "1" * 10, "2" * 10, "7")], right=("a", "b", "count"), uncut=("id",), optional=("b", "a")
    )
    assert table.lines(40)[0].split() == ["id", "a", "b", "count"]
    assert table.lines(30)[0].split() == ["id", "a", "count"]
    assert table.lines(15) == ["id   count", "0-1      7"] == table.lines(5)


def test_wide_characters_take_two_places() -> None:
    _, first, second = text_output.TextTable(("name", "n"), [("漢字", "1"), ("ab", "2")], right=("n",)).lines()
    assert (first, second) == ("漢字  1", "ab    2")


def test_pairs_without_a_value_are_omitted() -> None:
    assert text_output.format_pairs([("name", "orders"), ("nothing", ""), ("id", "1\n2")]) == "name  orders\nid    1\\n2"
