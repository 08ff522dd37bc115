"""Items from lines, JSON lines and CSV."""

import os
from collections.abc import Callable, Iterator
from io import BytesIO
from threading import Timer
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.items import NewItem
from penstock.cli import text_input
from penstock.cli.failures import CommandFailed
from penstock.cli.text_input import InputLines, RecordFields, json_items, line_items


def make(payload: bytes, **own: Any) -> NewItem:
    return NewItem(payload, **own)


def of(found: Iterator[text_input.NumberedItem]) -> list[tuple[int, Any, Any]]:
    """(line, payload or problem, key) of each line."""
    return [(line, one, None) if isinstance(one, str) else (line, one.payload, one.key) for line, one in found]


# -- lines -------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20).filter(lambda line: not {*b"\r\n\xef"} & {*line})), st.booleans())
def test_lines_come_back_as_they_were(lines: list[bytes], ended: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    expected = data.split(b"\n")
    assert list(InputLines(BytesIO(data))) == (expected[:-1] if expected[-1] == b"" else expected)


def test_a_byte_order_mark_and_windows_line_ends_are_removed() -> None:
    data = b"\xef\xbb\xbf1\r\n\r\n2\n3\r\n"
    for source in (line_items(InputLines(BytesIO(data)), "text", NewItem), json_items(InputLines(BytesIO(data)), {}, NewItem)):
        assert [(number, item.payload) for number, item in source if isinstance(item, NewItem)] == [(1, b"1"), (3, b"2"), (4, b"3")]
    assert rows(b"a,b\r\n1,2\r\n\r\n3,4\r\n") == [(2, b'{"a":"1","b":"2"}', None), (4, b'{"a":"3","b":"4"}', None)]


def test_a_line_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "MAX_LINE_BYTES", 3 * text_input.CHUNK)
    with pytest.raises(CommandFailed, match=r"line 2 is longer than 3 MiB"):
        list(InputLines(BytesIO(b"short\n" + b"x" * 5 * text_input.CHUNK)))


def test_on_pause_is_called_before_waiting_for_input() -> None:
    reads, writes = os.pipe()
    said: list[int] = []

    def waits() -> None:
        said.append(lines.number)
        if len(said) == 1:
            os.write(writes, b"three\n")
        else:
            os.close(writes)

    os.write(writes, b"one\ntwo\n")
    watchdog = Timer(20, os.close, [writes])  # ends a reader that does not call on_pause
    watchdog.start()
    with os.fdopen(reads, "rb") as stream:
        lines = InputLines(stream, waits)
        assert list(lines) == [b"one", b"two", b"three"]
    watchdog.cancel()
    assert said == [2, 3]


def test_on_read_counts_the_bytes() -> None:
    sizes: list[int] = []
    list(InputLines(BytesIO(b"a\nbc\n"), on_read=sizes.append))
    assert sum(sizes) == 5


def test_each_line_an_item() -> None:
    found = text_input.line_items(InputLines(BytesIO("one\n\n  two \nkākā\n".encode())), "text", make)
    assert of(found) == [(1, b"one", None), (3, b"  two ", None), (4, "kākā".encode(), None)]


def test_lines_of_other_forms() -> None:
    data = b"1\n\xff\n"
    assert of(text_input.line_items(InputLines(BytesIO(data)), "bytes", make)) == [(1, b"1", None), (2, b"\xff", None)]
    assert of(text_input.line_items(InputLines(BytesIO(data)), "text", make))[1][1].startswith("is not UTF-8")
    assert of(text_input.line_items(InputLines(BytesIO(data)), "json", make))[1][1].startswith("is not JSON")


@pytest.mark.parametrize(("form", "encoding"), [("text", "text"), ("json", "json"), ("bytes", None)])
def test_the_form_is_the_encoding(form: str, encoding: str | None) -> None:
    assert text_input.single_item(b"17", form, make) == NewItem(b"17", encoding=encoding)


# -- JSON lines --------------------------------------------------------------------------------------


def jsonl(text: str, **fields: str) -> list[tuple[int, Any, Any]]:
    return of(text_input.json_items(InputLines(BytesIO(text.encode())), fields, make))


def test_json_is_stored_as_it_is_written() -> None:
    assert jsonl('{"a": 1.0}\n\n [ ] \n') == [(1, b'{"a": 1.0}', None), (3, b"[ ]", None)]


def test_a_key_from_a_field() -> None:
    text = '{"c":"ann"}\n{"c":7}\n{"c":null}\n{"c":1.5}'
    assert [key for _, _, key in jsonl(text, key="c")] == ["ann", "7", None, "1.5"]


def test_a_field_of_a_field() -> None:
    assert jsonl('{"a":{"b":"x"}}', key="a.b")[0][2] == "x"
    assert jsonl('{"a.b":"y","a":{"b":"x"}}', key="a.b")[0][2] == "y"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{bad", "is not JSON"),
        ('{"d":1}', "has no field 'c'"),
        ("[1]", "has no field 'c'"),
        ("17", "has no field 'c'"),
        ('{"c":[]}', "has in its field 'c' a list"),
        ('{"c":true}', "has in its field 'c' a bool"),
        ("NaN", "is not JSON"),
    ],
)
def test_a_bad_json_line_is_named(line: str, why: str) -> None:
    good, bad, after = jsonl(f'{{"c":"ann"}}\n{line}\n{{"c":"bob"}}\n', key="c")
    assert good[2] == "ann" and after == (3, b'{"c":"bob"}', "bob")
    assert bad[0] == 2 and bad[1].startswith(why)


def test_every_field() -> None:
    (_, found), *_ = text_input.json_items(
        InputLines(BytesIO(b'{"k":"a","t":"b","r":"c","d":"d"}')), {"key": "k", "kind": "t", "reference": "r", "dedup": "d"}, make
    )
    assert isinstance(found, NewItem)
    assert (found.key, found.kind, found.reference, found.dedup) == ("a", "b", "c", "d")


# -- CSV ---------------------------------------------------------------------------------------------


def rows(data: bytes, fields: RecordFields = MappingProxyType({}), **options: Any) -> list[tuple[int, Any, Any]]:
    return of(text_input.csv_items(InputLines(BytesIO(data)), fields, make, **options))


def test_rows_become_objects() -> None:
    data = 'id,name\n1,"O\'Brien, ""Bob"""\n2,kākā\n'.encode()
    assert rows(data, {"key": "name"}) == [
        (2, b'{"id":"1","name":"O\'Brien, \\"Bob\\""}', 'O\'Brien, "Bob"'),
        (3, '{"id":"2","name":"kākā"}'.encode(), "kākā"),
    ]


def test_a_cell_may_have_several_lines() -> None:
    assert rows(b'id,text\n1,"a\nb"\n2,c\n') == [(2, b'{"id":"1","text":"a\\nb"}', None), (4, b'{"id":"2","text":"c"}', None)]


def test_line_ends_inside_a_cell_are_kept() -> None:
    assert rows(b'id,text\r\n1,"a\r\nb\nc\r"\r\n') == [(2, b'{"id":"1","text":"a\\r\\nb\\nc\\r"}', None)]


def test_no_header_and_another_delimiter() -> None:
    assert rows(b"1\tann\n", {"key": "name"}, delimiter="\t", columns=["id", "name"]) == [(1, b'{"id":"1","name":"ann"}', "ann")]


def test_an_empty_cell_is_no_key_and_an_empty_row_nothing() -> None:
    assert rows(b"id,name\n1,\n\n2,x\n", {"key": "name"}) == [(2, b'{"id":"1","name":""}', None), (4, b'{"id":"2","name":"x"}', "x")]


def test_bad_rows_are_named_and_the_others_read() -> None:
    found = rows(b'a,b\n1\n2,3\n"x"y,4\n\xff,5\n6,7\n')
    assert [line for line, one, _ in found if isinstance(one, str)] == [2, 4, 5]
    assert [one for _, one, _ in found if isinstance(one, bytes)] == [b'{"a":"2","b":"3"}', b'{"a":"6","b":"7"}']


def test_a_quote_that_does_not_end() -> None:
    (good, bad) = rows(b'a,b\n1,2\n"3,4\n5,6\n')
    assert good[0] == 2 and bad[0] == 3 and "is not CSV" in bad[1]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: rows(b"a,a\n1,2\n"), "names the column 'a' twice"),
        (lambda: rows(b"a,b\n1,2\n", {"key": "c"}), "there is no column 'c'; there are a, b"),
        (lambda: rows(b"1,2\n", {"key": "c"}, columns=["a", "b"]), "there is no column 'c'"),
        (lambda: rows(b"a,b\n", {"key": "c"}), "there is no column 'c'"),
    ],
)
def test_columns_that_are_not_there(call: Callable[[], object], why: str) -> None:
    with pytest.raises(CommandFailed, match=why):
        call()
