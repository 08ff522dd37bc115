"""The catalog's records and Base: they tell the same, however much of them is left."""

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rules import catalog
from penstock.rules.catalog import (
    MAX_SOURCES,
    Adopted,
    Adopting,
    CatalogRecord,
    CatalogState,
    Created,
    Deleted,
    Held,
    Removed,
    Reshaped,
    Updated,
)
from penstock.rules.options import Options
from penstock.words.errors import CorruptLog, PenstockError
from tests.rules.book import Book

NAMES = st.sampled_from(["a", "b", "c"])
CHANGES = st.fixed_dictionaries({}, optional={"ttl": st.integers(0, 2), "dead_queue": NAMES | st.just("")})
NUMBERS = st.sets(st.integers(0, 5))
DROPS = st.sampled_from(["x", "y", "z"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), NAMES, st.integers(1, 5)),
        st.tuples(st.just("update"), NAMES, CHANGES),
        st.tuples(st.just("reshape"), NAMES, NUMBERS, st.integers(0, 2), NUMBERS, st.integers(0, 9)),
        st.tuples(st.just("delete"), NAMES),
        st.tuples(st.just("removed"), st.integers(1, 9)),
        st.tuples(st.just("adopting"), NAMES, DROPS),
        st.tuples(st.just("adopted"), NAMES, DROPS, DROPS, st.integers(1, 3)),
        st.tuples(st.just("hold"), NAMES, DROPS | st.just(""), st.integers(0, 2)),
    ),
    max_size=20,
)


def do(book: Book, step: tuple[Any, ...]) -> None:
    match step:
        case ["create", name, partitions]:
            book.create(name, partitions)
        case ["update", name, changes]:
            book.update(name, **changes)
        case ["reshape", name, keep, more, read_only, when]:
            end = book.state.names[name].next_partition
            active = [number for number in range(end + more) if number >= end or number in keep]
            held = [number for number in range(end) if number in read_only and number not in keep]
            book.reshape(name, active, read_only=held, marks={0: when}, at=when, keep_since=when - 2)
        case ["delete", name]:
            book.delete(name)
        case ["removed", incarnation]:
            book.removed(incarnation)
        case ["adopting", name, drop]:
            book.adopting(name, drop)
        case ["adopted", name, drop, source, number]:
            book.adopted(name, drop, source, number)
        case ["hold", name, holder, timeout]:
            book.hold(name, holder, timeout)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_records_and_base_tell_the_same_whatever_happened(steps: list[tuple[Any, ...]]) -> None:
    book = Book()
    for step in steps:
        before = catalog.dump(book.state)
        try:
            do(book, step)
        except (PenstockError, KeyError):
            assert catalog.dump(book.state) == before
    book.check()
    dead = [entry.options.dead_queue for entry in book.state.names.values() if entry.options.dead_queue]
    assert all(not book.state.names[name].options.dead_queue for name in dead)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.data())
def test_any_records_may_be_missing(steps: list[tuple[Any, ...]], data: st.DataObject) -> None:
    """After a repair: whatever is left is applied, and a name is still one queue's."""
    book = Book()
    for step in steps:
        try:
            do(book, step)
        except (PenstockError, KeyError):
            continue
    left = CatalogState()
    for record in book.records:
        if data.draw(st.booleans()):
            catalog.apply(left, record)
    assert {entry.incarnation for entry in left.names.values()} == set(left.entries)
    assert left.deleted.isdisjoint(left.entries)
    assert catalog.dump(catalog.load(catalog.dump(left))) == catalog.dump(left)


def test_two_ways_to_the_same_catalog_have_the_same_bytes() -> None:
    books = Book(), Book()
    for book, step in zip(books, (1, -1), strict=True):
        for name, incarnation in [("a", 8), ("b", 1 << 60), ("c", 7), ("d", 1 << 61), ("e", 9)][::step]:
            book.create(name, incarnation=incarnation)
        for name in ["a", "b", "c"][::step]:
            book.delete(name)
        book.reshape("d", [0, 1, 2], at=5)
        book.reshape("d", [0, 1], at=6, marks=dict([(0, 4), (1, 3), (2, 2)][::step]))
    assert catalog.dump(books[0].state) == catalog.dump(books[1].state)


def test_a_lost_deletion_is_told_by_what_follows() -> None:
    book = Book()
    book.create("orders", incarnation=5)
    catalog.apply(book.state, Created("orders", 6, Options(), 1, 0))
    assert (set(book.state.entries), book.state.deleted) == ({6}, {5})
    catalog.apply(book.state, Removed(6))
    assert (book.state.names, book.state.deleted) == ({}, {5})


@pytest.mark.parametrize(
    ("record", "head"),
    [
        (Created("a", 2, Options(), 3, 4), [1, "a", 2]),
        (Updated(2, Options()), [2, 2]),
        (Reshaped(2, 3, b"m", [0], 1, [], [(0, 9)], 7, 1), [3, 2, 3, b"m", [0], 1, [], [[0, 9]], 7, 1]),
        (Deleted(2), [4, 2]),
        (Removed(2), [5, 2]),
        (Adopting(2, "d"), [6, 2, "d"]),
        (Adopted(2, "d", "s", 9), [7, 2, "d", "s", 9]),
        (Held(2, "h", 5), [8, 2, "h", 5]),
    ],
)
def test_a_record_is_an_array_headed_by_its_tag(record: CatalogRecord, head: list[Any]) -> None:
    body = msgspec.msgpack.encode(record)
    assert msgspec.msgpack.decode(body)[: len(head)] == head
    assert msgspec.msgpack.decode(body, type=CatalogRecord) == record


def test_a_drop_keeps_the_number_it_was_given() -> None:
    book = Book()
    book.create("a")
    book.create("b")
    assert [book.adopting("a", "x"), book.adopting("a", "x"), book.adopting("b", "x")] == [1, 1, 1]
    catalog.apply(book.state, Adopting(book.state.names["a"].incarnation, "x"))  # of a repaired log
    assert book.state.names["a"].adopting == {"x": 1} and book.state.names["a"].unfinished == "x"
    assert book.adopting("a", "y") == 2
    assert book.state.names["a"].unfinished == "y", "what was begun before it cannot be gone on with"
    entry = book.adopted("a", "y", "s", 1)
    assert (entry.adopting, entry.adoptions, entry.unfinished) == ({"x": 1}, 2, "")
    assert book.adopting("a", "y") == 3, "a number is given once"
    book.check()


def test_of_a_source_the_highest_number_is_remembered() -> None:
    book = Book()
    book.create("a")
    for number in (1, 5, 3):
        book.adopting("a", f"{number}")
        book.adopted("a", f"{number}", "s", number)
    assert book.adopted("a", "t", "t", 2).adopted == {"s": 5, "t": 2}
    book.check()


def test_so_many_sources_are_remembered_the_newest_of_them() -> None:
    book = Book()
    book.create("a")
    incarnation = book.state.names["a"].incarnation
    for number in range(MAX_SOURCES):
        book.state.names["a"].adopted[f"s{number}"] = 1  # as if it had been
    catalog.apply(book.state, Adopted(incarnation, "d", "s0", 2))
    catalog.apply(book.state, Adopted(incarnation, "d", "new", 1))
    adopted = book.state.names["a"].adopted
    assert len(adopted) == MAX_SOURCES and "s1" not in adopted
    assert [*adopted.items()][-2:] == [("s0", 2), ("new", 1)]
    assert [*catalog.load(catalog.dump(book.state)).names["a"].adopted] == [*adopted], "a Base keeps their order"


def test_a_right_is_recorded_when_it_changes() -> None:
    book = Book()
    book.create("a")
    book.hold("a", "h", 5)
    records = len(book.records)
    assert book.hold("a", "h", 5).holder == "h" and len(book.records) == records
    assert book.hold("a", "h", 6).hold_timeout == 6
    entry = book.hold("a", "")
    assert (entry.holder, entry.hold_timeout) == ("", 0)
    book.check()


def test_they_go_with_their_queue() -> None:
    book = Book()
    book.create("a")
    book.adopting("a", "x")
    book.hold("a", "h", 5)
    incarnation = book.delete("a")
    entry = book.create("a", incarnation=77)
    for record in (Adopting(incarnation, "y"), Adopted(incarnation, "y", "s", 1), Held(incarnation, "h", 5)):
        catalog.apply(book.state, record)  # of a repaired log
    assert book.state.names["a"] == entry
    assert (entry.adoptions, entry.adopting, entry.adopted, entry.holder) == (0, {}, {}, "")


def test_a_base_of_before_there_was_an_inbox_is_read() -> None:
    book = Book()
    book.create("a", 2)
    version, (image,), deleted = msgspec.msgpack.decode(catalog.dump(book.state))
    old = msgspec.msgpack.encode([version, [image[:11]], deleted])
    assert catalog.load(old).names == book.state.names


def test_the_table_of_records_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    told = re.findall(r"^\| (\w+) \| (\d+) \| ([a-z_, ]+) \|", text.partition("## The catalog's records")[2], re.MULTILINE)
    real = [(kind.__name__, str(kind.__struct_config__.tag), ", ".join(kind.__struct_fields__)) for kind in get_args(CatalogRecord)]
    assert told == real


@pytest.mark.parametrize("body", [b"", b"\x90", b"not a Base"])
def test_bytes_that_are_no_base_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptLog, match="; run verify"):
        catalog.load(body)


def test_a_newer_base_is_refused_with_a_word_on_what_to_do() -> None:
    with pytest.raises(CorruptLog, match="version 2 and this Penstock knows 1; use a newer Penstock"):
        catalog.load(msgspec.msgpack.encode([2, [], []]))
