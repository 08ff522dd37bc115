"""The catalog: its decisions, its records and its Base."""

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rules import catalog, slots
from penstock.rules.catalog import (
    MAX_SOURCES,
    AdoptionBegun,
    AdoptionFinished,
    CatalogRecord,
    CatalogState,
    ConsumerRightSet,
    Created,
    Deleted,
    FilesRemoved,
    PartitionsChanged,
    ReplacedMap,
    Updated,
)
from penstock.rules.options import Options
from penstock.words.clock import SECOND
from penstock.words.errors import CorruptLog, InvalidRequest, PenstockError, QueueExists, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, Policy, Retention
from penstock.words.sources import source_kind
from tests.rules.catalog_under_test import CatalogUnderTest, refused

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


def do(book: CatalogUnderTest, step: tuple[Any, ...]) -> None:
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
def test_records_and_base_give_the_same_state_after_any_history(steps: list[tuple[Any, ...]]) -> None:
    book = CatalogUnderTest()
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
    """As after a repair: the remaining records can be applied, and a name still belongs to one queue."""
    book = CatalogUnderTest()
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
    books = CatalogUnderTest(), CatalogUnderTest()
    for book, step in zip(books, (1, -1), strict=True):
        for name, incarnation in [("a", 8), ("b", 1 << 60), ("c", 7), ("d", 1 << 61), ("e", 9)][::step]:
            book.create(name, incarnation=incarnation)
        for name in ["a", "b", "c"][::step]:
            book.delete(name)
        book.reshape("d", [0, 1, 2], at=5)
        book.reshape("d", [0, 1], at=6, marks=dict([(0, 4), (1, 3), (2, 2)][::step]))
    assert catalog.dump(books[0].state) == catalog.dump(books[1].state)


def test_a_queue_whose_deletion_was_lost_is_replaced_by_the_next_of_its_name() -> None:
    book = CatalogUnderTest()
    book.create("orders", incarnation=5)
    catalog.apply(book.state, Created("orders", 6, Options(), 1, 0))
    assert (set(book.state.entries), book.state.deleted) == ({6}, {5})
    catalog.apply(book.state, FilesRemoved(6))
    assert (book.state.names, book.state.deleted) == ({}, {5})


@pytest.mark.parametrize(
    ("record", "head"),
    [
        (Created("a", 2, Options(), 3, 4), [1, "a", 2]),
        (Updated(2, Options()), [2, 2]),
        (PartitionsChanged(2, 3, b"m", [0], 1, [], [(0, 9)], 7, 1), [3, 2, 3, b"m", [0], 1, [], [[0, 9]], 7, 1]),
        (Deleted(2), [4, 2]),
        (FilesRemoved(2), [5, 2]),
        (AdoptionBegun(2, "d"), [6, 2, "d"]),
        (AdoptionFinished(2, "d", "s", 9), [7, 2, "d", "s", 9]),
        (AdoptionFinished(2, "d", "s", 9, 5, 77), [7, 2, "d", "s", 9, 5, 77]),
        (ConsumerRightSet(2, "h", 5, ["r"]), [8, 2, "h", 5, ["r"]]),
    ],
)
def test_a_record_is_an_array_headed_by_its_tag(record: CatalogRecord, head: list[Any]) -> None:
    body = msgspec.msgpack.encode(record)
    assert msgspec.msgpack.decode(body)[: len(head)] == head
    assert msgspec.msgpack.decode(body, type=CatalogRecord) == record


def test_a_published_write_keeps_its_adoption_number() -> None:
    book = CatalogUnderTest()
    book.create("a")
    book.create("b")
    assert [book.adopting("a", "x"), book.adopting("a", "x"), book.adopting("b", "x")] == [1, 1, 1]
    catalog.apply(book.state, AdoptionBegun(book.state.names["a"].incarnation, "x"))  # of a repaired log
    assert book.state.names["a"].adopting == {"x": 1} and book.state.names["a"].unfinished == "x"
    assert book.adopting("a", "y") == 2
    assert book.state.names["a"].unfinished == "y", "what was begun before it cannot be gone on with"
    entry = book.adopted("a", "y", "s", 1)
    assert (entry.adopting, entry.adoptions, entry.unfinished) == ({"x": 1}, 2, "")
    assert book.adopting("a", "y") == 3, "a number is given once"
    book.check()


def test_of_a_source_the_highest_number_is_remembered() -> None:
    book = CatalogUnderTest()
    book.create("a")
    for number in (1, 5, 3):
        book.adopting("a", f"{number}")
        book.adopted("a", f"{number}", "s", number)
    assert book.adopted("a", "t", "t", 2).adopted == {"s": 5, "t": 2}
    book.check()


def test_only_the_newest_sources_are_remembered() -> None:
    book = CatalogUnderTest()
    book.create("a")
    incarnation = book.state.names["a"].incarnation
    for number in range(MAX_SOURCES):
        book.state.names["a"].adopted[f"s{number}"] = 1  # as if it had been
    catalog.apply(book.state, AdoptionFinished(incarnation, "d", "s0", 2))
    catalog.apply(book.state, AdoptionFinished(incarnation, "d", "new", 1))
    adopted = book.state.names["a"].adopted
    assert len(adopted) == MAX_SOURCES and "s1" not in adopted
    assert [*adopted.items()][-2:] == [("s0", 2), ("new", 1)]
    assert [*catalog.load(catalog.dump(book.state)).names["a"].adopted] == [*adopted], "a Base keeps their order"


@pytest.mark.parametrize("kept", ["load:monday", "stream-1", "txn:app", "ledgerq:0:", "monday"])
def test_many_sources_of_one_kind_displace_none_of_another(kept: str) -> None:
    book = CatalogUnderTest()
    book.create("a")
    incarnation = book.state.names["a"].incarnation
    catalog.apply(book.state, AdoptionFinished(incarnation, "d", kept, 1))
    for prefix in {"load:", "stream-", "txn:", "ledgerq:", ""} - {source_kind(kept)}:
        for number in range(MAX_SOURCES):
            book.state.names["a"].adopted[f"{prefix}x{number}"] = 1  # as if it had been
        catalog.apply(book.state, AdoptionFinished(incarnation, "d", f"{prefix}new", 1))
        assert f"{prefix}x0" not in book.state.names["a"].adopted and f"{prefix}x1" in book.state.names["a"].adopted
    assert book.state.names["a"].adopted[kept] == 1


def test_what_the_last_writes_of_a_source_held_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_CONTENTS", 3)
    monkeypatch.setattr(catalog, "MAX_CONTENT_SOURCES", 2)
    book = CatalogUnderTest()
    book.create("a")
    incarnation = book.state.names["a"].incarnation
    for source, number in (("old", 1), ("s", 1), ("s", 2), ("s", 3), ("s", 7), ("t", 1)):
        catalog.apply(book.state, AdoptionFinished(incarnation, "d", source, number, 10 * number, number))
    catalog.apply(book.state, AdoptionFinished(incarnation, "d", "without", 1))
    contents = book.state.names["a"].contents
    assert contents == {"s": [(2, 20, 2), (3, 30, 3), (7, 70, 7)], "t": [(1, 10, 1)]}
    loaded = catalog.load(catalog.dump(book.state)).names["a"].contents
    assert loaded == contents and [*loaded] == [*contents], "a Base keeps their order"


def test_records_and_bases_from_before_contents_can_be_read() -> None:
    record = msgspec.msgpack.decode(msgspec.msgpack.encode([7, 2, "d", "s", 9]), type=CatalogRecord)
    assert record == AdoptionFinished(2, "d", "s", 9)
    book = CatalogUnderTest()
    book.create("a")
    catalog.apply(book.state, AdoptionFinished(book.state.names["a"].incarnation, "d", "s", 9))
    image = msgspec.msgpack.decode(catalog.dump(book.state))
    image[1] = [entry[:-1] for entry in image[1]]
    entry = catalog.load(msgspec.msgpack.encode(image)).names["a"]
    assert (entry.adopted, entry.contents) == ({"s": 9}, {})


def test_a_right_is_recorded_when_it_changes() -> None:
    book = CatalogUnderTest()
    book.create("a")
    book.hold("a", "h", 5)
    records = len(book.records)
    assert book.hold("a", "h", 5).consumer_right_holder == "h" and len(book.records) == records
    assert book.hold("a", "h", 6).consumer_right_timeout == 6
    assert book.hold("a", "h", 6, ["old", "new"]).consumer_right_runs == ["old", "new"]
    assert catalog.load(catalog.dump(book.state)).names["a"].consumer_right_runs == ["old", "new"]
    entry = book.hold("a", "")
    assert (entry.consumer_right_holder, entry.consumer_right_timeout, entry.consumer_right_runs) == ("", 0, [])
    book.check()


def test_adoptions_and_the_consumer_right_are_deleted_with_their_queue() -> None:
    book = CatalogUnderTest()
    book.create("a")
    book.adopting("a", "x")
    book.hold("a", "h", 5)
    incarnation = book.delete("a")
    entry = book.create("a", incarnation=77)
    for record in (AdoptionBegun(incarnation, "y"), AdoptionFinished(incarnation, "y", "s", 1), ConsumerRightSet(incarnation, "h", 5)):
        catalog.apply(book.state, record)  # of a repaired log
    assert book.state.names["a"] == entry
    assert (entry.adoptions, entry.adopting, entry.adopted, entry.consumer_right_holder) == (0, {}, {}, "")


def test_a_base_from_before_the_inbox_can_be_read() -> None:
    book = CatalogUnderTest()
    book.create("a", 2)
    version, (image,), deleted, *_ = msgspec.msgpack.decode(catalog.dump(book.state))
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


def test_a_newer_base_is_refused_and_the_error_says_what_to_do() -> None:
    with pytest.raises(CorruptLog, match="version 2 and this Penstock knows 1; use a newer Penstock"):
        catalog.load(msgspec.msgpack.encode([2, [], []]))


@pytest.fixture
def book() -> CatalogUnderTest:
    return CatalogUnderTest()


# -- creating ------------------------------------------------------------------------------------------


def test_a_new_queue_has_what_was_asked_for(book: CatalogUnderTest) -> None:
    book.create("dead")
    entry = book.create("orders", 3, 77, lease_timeout=5 * SECOND, dead_queue="dead", max_items=10, durability="os")
    assert (entry.name, entry.incarnation, entry.created_at) == ("orders", 77, 1_000)
    assert entry.options == Options(Policy(lease_timeout=5 * SECOND), "dead", 10, 0, "os")
    assert (entry.active, entry.retired, entry.read_only, entry.next_partition) == ([0, 1, 2], [], [], 3)
    assert entry.map == slots.first_map(range(3))
    assert (entry.maps, entry.marks) == ([], {})
    assert book.state.entries[77] is book.state.names["orders"]


@pytest.mark.parametrize("name", ["a", "0", "Orders.dead-1_x", "a" * 200, "con", "a.."])
def test_valid_names(book: CatalogUnderTest, name: str) -> None:
    assert book.create(name).name == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "_a", "a" * 201, "a b", "a/b", "a\n", "ä", "٣", "a\x00", b"a", None, 3], ids=repr)
def test_invalid_names_are_refused(book: CatalogUnderTest, name: Any) -> None:
    refused(book, InvalidRequest, "is no name for a queue; use 1 to 200 letters", lambda: book.create(name))
    refused(book, InvalidRequest, "is no name for a queue", lambda: catalog.entry_by_name(book.state, name))


def test_names_that_differ_in_case_are_two_queues(book: CatalogUnderTest) -> None:
    assert book.create("orders").incarnation != book.create("Orders").incarnation


@pytest.mark.parametrize("partitions", [0, -1, MAX_PARTITIONS + 1, True, 2.0, None])
def test_a_wrong_number_of_partitions_is_refused(book: CatalogUnderTest, partitions: Any) -> None:
    refused(book, InvalidRequest, "partitions is", lambda: book.create("orders", partitions))


def test_creating_an_existing_queue_is_refused_without_exist_ok(book: CatalogUnderTest) -> None:
    first = book.create("orders", 2, max_attempts=3)
    refused(book, QueueExists, "there is a queue 'orders' already; use it, pass exist_ok=True", lambda: book.create("orders", 2))
    assert book.create("orders", exist_ok=True) is first
    assert book.create("orders", exist_ok=True, max_attempts=3, retention={"max_bytes": 1 << 30}) is first


@pytest.mark.parametrize(
    ("given", "which"),
    [
        ({"max_attempts": 4}, "max_attempts"),
        ({"ttl": 0, "max_items": 1}, "max_items"),
        ({"retention": {"max_age": 7}}, "retention"),
        ({"retention": Retention(max_age=7)}, "retention"),
        ({"durability": "os", "max_attempts": 4}, "durability"),
        ({"dead_queue": "other"}, "dead_queue"),
    ],
)
def test_exist_ok_compares_only_the_given_options(book: CatalogUnderTest, given: dict[str, Any], which: str) -> None:
    existing = book.create("orders", 2, max_attempts=3)

    def ask() -> list[CatalogRecord]:
        return catalog.create(book.state, "orders", Options(), 1, 99, 0, True, given)

    refused(book, QueueExists, f"'orders' with another {which}; leave {which} out", ask)
    assert catalog.create(book.state, "orders", Options(), 1, 99, 0, True, {"partitions": 9, "max_attempts": 3}) == []
    assert book.state.names["orders"] is existing


def test_an_incarnation_is_given_once(book: CatalogUnderTest) -> None:
    book.create("orders", incarnation=5)
    refused(book, InvalidRequest, "incarnation 0000000000000005 is given already; draw", lambda: book.create("other", incarnation=5))
    book.delete("orders")
    refused(book, InvalidRequest, "is given already", lambda: book.create("other", incarnation=5))
    assert book.create("orders", incarnation=(1 << 64) - 1).incarnation == (1 << 64) - 1


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "5", 5.0])
def test_a_wrong_incarnation_is_refused(book: CatalogUnderTest, wrong: Any) -> None:
    refused(book, InvalidRequest, "incarnation is .*; give", lambda: book.create("orders", incarnation=wrong))
    refused(book, InvalidRequest, "incarnation is 0; give", lambda: catalog.create(book.state, "orders", Options(), 1, 0, 0))


# -- dead queues ---------------------------------------------------------------------------------------


def test_a_dead_queue_must_be_fit_for_it(book: CatalogUnderTest) -> None:
    refused(
        book, QueueNotFound, "no queue 'dead' to be the dead queue of 'a'; create it first", lambda: book.create("a", dead_queue="dead")
    )
    refused(book, InvalidRequest, "cannot be its own dead queue", lambda: book.create("a", dead_queue="a"))
    refused(book, InvalidRequest, "is no name for a queue", lambda: book.create("a", dead_queue="no name"))
    book.create("dead")
    book.create("a", dead_queue="dead")
    refused(book, InvalidRequest, "'a' has a dead queue of its own, so it cannot be one", lambda: book.create("b", dead_queue="a"))
    book.create("b")
    for ask in (lambda: book.update("b", dead_queue="a"), lambda: book.update("b", dead_queue="b")):
        refused(book, InvalidRequest, "dead queue", ask)
    refused(book, InvalidRequest, "'dead' is the dead queue of 'a', so it cannot have one", lambda: book.update("dead", dead_queue="b"))
    book.update("a", dead_queue="")
    assert book.update("dead", dead_queue="b").options.dead_queue == "b"


def test_a_queue_whose_dead_queue_was_lost_can_be_updated_all_the_same(book: CatalogUnderTest) -> None:
    book.apply([Created("a", 5, Options(dead_queue="lost"), 1, 0)])  # as after a repair
    assert book.update("a", ttl=7).options == Options(Policy(ttl=7), "lost")
    assert book.update("a", dead_queue="").options == Options(Policy(ttl=7))


def test_a_queue_in_use_as_a_dead_queue_is_not_deleted(book: CatalogUnderTest) -> None:
    book.create("dead")
    for name in ("e", "d", "c", "b", "a"):
        book.create(name, dead_queue="dead")
    refused(book, InvalidRequest, "'dead' is the dead queue of 'a', 'b', 'c' and 2 more; give them", lambda: book.delete("dead"))
    for name in ("a", "b", "c"):
        book.delete(name)
    book.update("d", dead_queue="")
    refused(book, InvalidRequest, "is the dead queue of 'e'; ", lambda: book.delete("dead"))
    book.update("e", dead_queue="")
    book.delete("dead")


# -- updating ------------------------------------------------------------------------------------------


def test_an_update_is_merged_with_what_was(book: CatalogUnderTest) -> None:
    book.create("orders", max_attempts=3, retention={"max_segments": 4}, max_bytes=9)
    entry = book.update("orders", ttl=8, retention={"max_age": 5}, max_items=2)
    retention = Retention(max_age=5, max_segments=4)
    assert entry.options == Options(Policy(max_attempts=3, ttl=8, retention=retention), max_items=2, max_bytes=9)
    assert book.update("orders", retention=Retention()).options.policy.retention == Retention()


def test_an_update_that_changes_nothing_leaves_no_record(book: CatalogUnderTest) -> None:
    entry = book.create("orders", max_attempts=3, durability="fsync")
    assert book.update("orders", max_attempts=3, durability="fsync") is entry
    assert book.update("orders") is entry
    assert len(book.records) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"partitions": 4}, "no option 'partitions'; the options are lease_timeout, max_attempts, .*retention, dead_queue, .*durability"),
        ({"policy": Policy()}, "no option 'policy'"),
        ({7: 7}, "no option 7"),
        ({"lease_timeout": 0}, "lease_timeout is 0; give"),
        ({"max_attempts": "3"}, "max_attempts is str; give"),
        ({"on_bury": "burn"}, "on_bury is 'burn'; use"),
        ({"retention": {"max_age": -1}}, "max_age is -1; give"),
        ({"retention": {"age": 1}}, "retention is {'age': 1}; give a Retention, or a mapping with any of max_age"),
        ({"retention": None}, "retention is None; give"),
        ({"max_items": -1}, "max_items is -1; give"),
        ({"max_bytes": 1.5}, "max_bytes is float; give"),
        ({"durability": "sometimes"}, "durability is 'sometimes'; use 'fsync'"),
        ({"durability": "os"}, "durability of queue 'orders' cannot be changed; create a new queue"),
        ({"dead_queue": None}, "None is no name"),
    ],
)
def test_wrong_options_are_refused(book: CatalogUnderTest, changes: dict[str, Any], sentence: str) -> None:
    entry = book.create("orders")
    refused(book, InvalidRequest, sentence, lambda: catalog.update(book.state, entry.incarnation, changes))


def test_a_queue_that_does_not_exist_cannot_be_changed(book: CatalogUnderTest) -> None:
    gone = book.create("orders").incarnation
    book.delete("orders")
    refused(book, QueueNotFound, "no queue of incarnation 0000000000000001", lambda: catalog.update(book.state, gone, {}))
    refused(book, QueueNotFound, "no queue of incarnation", lambda: catalog.change_partitions(book.state, gone, [0], [], {}, 0))
    refused(book, QueueNotFound, "no queue 'orders'; create it", lambda: catalog.delete(book.state, "orders"))
    refused(book, InvalidRequest, "incarnation is str", lambda: catalog.update(book.state, "1", {}))  # type: ignore[arg-type]


# -- reshaping -----------------------------------------------------------------------------------------


def test_a_queue_keeps_its_earlier_slot_maps(book: CatalogUnderTest) -> None:
    first = book.create("orders", 2)
    grown = book.reshape("orders", [0, 1, 2, 3], marks={1: 50, 0: 7}, at=2_000)
    assert (grown.active, grown.retired, grown.next_partition) == ([0, 1, 2, 3], [], 4)
    assert grown.map == slots.next_map(first.map, range(4))
    assert grown.maps == [ReplacedMap(1, first.map.pack(), 2_000)]
    assert grown.marks == {2: {0: 7, 1: 50}}
    shrunk = book.reshape("orders", [3, 1], marks={3: 4}, at=3_000)
    assert (shrunk.active, shrunk.retired, shrunk.next_partition) == ([1, 3], [0, 2], 4)
    assert [old.version for old in shrunk.maps] == [1, 2]
    assert shrunk.marks == {2: {0: 7, 1: 50}, 3: {3: 4}}
    again = book.reshape("orders", [0, 1, 3, 4])  # one that was retired comes back, a new one gets a new number
    assert (again.active, again.retired, again.map.version) == ([0, 1, 3, 4], [2], 4)
    assert first.map.version == 1 and first.active == [0, 1], "an entry once held does not change"
    book.check()


def test_old_maps_are_forgotten_but_for_the_last(book: CatalogUnderTest) -> None:
    book.create("orders")
    for width, at in ((2, 10), (3, 20), (4, 30)):
        book.reshape("orders", list(range(width)), at=at, marks={0: at})
    kept = book.reshape("orders", list(range(5)), at=40, keep_since=20, marks={0: 40})
    assert [(old.version, old.replaced_at) for old in kept.maps] == [(2, 20), (3, 30), (4, 40)]
    assert kept.marks == {2: {0: 10}, 3: {0: 20}, 4: {0: 30}, 5: {0: 40}}
    last = book.reshape("orders", [0], at=50, keep_since=1_000)
    assert [old.version for old in last.maps] == [5]
    assert last.marks == {5: {0: 40}, 6: {}}
    book.check()


def test_the_last_mark_of_a_retired_partition_is_kept(book: CatalogUnderTest) -> None:
    book.create("orders")
    book.reshape("orders", [0, 1, 2], at=10, marks={0: 1})
    book.reshape("orders", [0, 1], at=20, marks={0: 2, 1: 3, 2: 4})
    book.reshape("orders", [0], at=30, marks={0: 5, 1: 6})
    kept = book.reshape("orders", [0, 3], at=40, keep_since=1_000, marks={0: 7})
    assert kept.marks == {4: {0: 5, 1: 6, 2: 4}, 5: {0: 7}}
    later = book.reshape("orders", [0], at=50, keep_since=1_000, marks={0: 8, 3: 9})
    assert later.marks == {5: {0: 7, 1: 6, 2: 4}, 6: {0: 8, 3: 9}}
    book.check()


def test_a_clock_set_back_makes_a_map_be_kept_too_long_rather_than_lost(book: CatalogUnderTest) -> None:
    book.create("orders")
    book.reshape("orders", [0, 1], at=100)
    book.reshape("orders", [0], at=10)
    assert [old.version for old in book.reshape("orders", [0, 1], at=120, keep_since=50).maps] == [1, 2, 3]


def test_a_partition_is_set_read_only_and_taken_back(book: CatalogUnderTest) -> None:
    book.create("orders", 3)
    held = book.reshape("orders", [0, 2], read_only=[1])
    assert (held.active, held.retired, held.read_only) == ([0, 2], [1], [1])
    free = book.reshape("orders", [0, 2], marks={0: 9}, at=9_999)
    assert (free.read_only, free.map, free.maps, free.marks) == ([], held.map, held.maps, held.marks)
    back = book.reshape("orders", [0, 1, 2])
    assert (back.active, back.map.version) == ([0, 1, 2], 3)
    book.check()


def test_a_change_to_the_same_partitions_writes_no_record(book: CatalogUnderTest) -> None:
    entry = book.create("orders", 3)
    assert book.reshape("orders", [2, 1, 0], marks={0: 1}) is entry
    assert len(book.records) == 1


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"active": []}, "the count of active partitions is 0; give"),
        ({"active": list(range(MAX_PARTITIONS + 1))}, "the count of active partitions is 1025; give"),
        ({"active": [0, 0]}, "active names a partition twice; give"),
        ({"active": [0, 65_536]}, "a partition in active is 65536; give"),
        ({"active": [0, "1"]}, "a partition in active is str; give"),
        ({"active": [0, 3, 5]}, "partition 4 of queue 'orders' is skipped; number new partitions on from 3"),
        ({"active": [0, 1], "read_only": [1]}, "partition 1 of queue 'orders' is active or not there; only"),
        ({"active": [0, 1], "read_only": [3]}, "partition 3 of queue 'orders' is active or not there; only"),
        ({"active": [0], "marks": {3: 0}}, "the number of a mark is 3; give"),
        ({"active": [0], "marks": {0: -1}}, "the offset of a mark is -1; give"),
    ],
)
def test_wrong_partitions_are_refused(book: CatalogUnderTest, shape: dict[str, Any], sentence: str) -> None:
    book.create("orders", 3)
    refused(book, InvalidRequest, sentence, lambda: book.reshape("orders", **shape))


# -- deleting ------------------------------------------------------------------------------------------


def test_a_deleted_queue_is_remembered_until_its_files_are_gone(book: CatalogUnderTest) -> None:
    old = book.create("orders")
    refused(book, InvalidRequest, "'orders' is not deleted; delete it before", lambda: book.removed(old.incarnation))
    assert book.delete("orders") == old.incarnation
    assert (book.state.names, book.state.entries, book.state.deleted) == ({}, {}, {old.incarnation})
    new = book.create("orders")
    assert new.incarnation != old.incarnation
    book.check()
    book.removed(old.incarnation)
    book.removed(old.incarnation)
    assert book.state.deleted == set()
    assert [type(record) for record in book.records] == [Created, Deleted, Created, FilesRemoved]
    book.check()
