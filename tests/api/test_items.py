"""Single items: a list of them becomes a batch, and the batch becomes the same items."""

import pickle
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.items import Item, ItemOrigin, ItemSource, NewItem, items_of, single_item_batch, to_batch
from penstock.rules.routing import dedup_digest, dedup_slot, key_ids, slot
from penstock.words.batch import Batch, validate
from penstock.words.clock import SECOND
from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.limits import MAX_BATCH_ITEMS
from penstock.words.origin import Origin, encode

TEXTS = st.none() | st.text(max_size=5)
NAMES = TEXTS | st.binary(max_size=5)
PAYLOADS = (
    st.binary(max_size=9) | st.text(max_size=5) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2) | st.lists(st.booleans())
)
SECONDS = st.integers(1, 1 << 60).map(lambda microseconds: timedelta(microseconds=microseconds % (300_000_000 * SECOND) + 1))
WHEN = st.datetimes(datetime(1970, 1, 2), timezones=st.just(UTC))
HEADERS = st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.binary(max_size=3), max_size=2)
NEW_ITEMS = st.builds(
    NewItem,
    PAYLOADS,
    key=NAMES,
    headers=st.none() | HEADERS,
    kind=TEXTS,
    reference=TEXTS,
    priority=st.none() | st.integers(0, 9),
    at=st.none() | WHEN,
    ttl=st.none() | SECONDS,
    dedup=NAMES.filter(lambda name: name is None or len(name) > 0),
)
LISTS = st.lists(NEW_ITEMS | PAYLOADS, min_size=1, max_size=8)
SOURCE = ItemSource("orders", 4)
ORIGIN = Origin("orders", 7, "3-17", attempts=5, reason="spent", buried_at=1_500_000)
SHOWN_ORIGIN = ItemOrigin("orders", 7, "3-17", 5, "spent", None, None, None, datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC), False, False)


class Special(NewItem, frozen=True):
    """A caller's own subclass of NewItem."""

    note: str = ""


def alone(batch: Batch, **options: Any) -> Item:
    return items_of(SOURCE, 3, [17], batch, 1_000_000, {}, **options)[0]


def as_bytes(name: str | bytes | None) -> bytes | None:
    return name.encode() if isinstance(name, str) else name


def check(item: Item, given: Any) -> None:
    """Assert that the item equals what was given."""
    new = given if isinstance(given, NewItem) else NewItem(given)
    assert item.value == new.payload
    assert type(item.value) is type(new.payload)
    assert item.key_bytes == as_bytes(new.key)
    assert item.headers == (new.headers or {})
    assert (item.kind, item.reference) == (new.kind, new.reference)
    assert item.priority == (5 if new.priority is None else new.priority)
    assert item.at == new.at
    assert isinstance(new.ttl, timedelta | None)
    assert item.ttl == (None if new.ttl is None else new.ttl.total_seconds())


# -- on the way in -----------------------------------------------------------------------------------


@given(LISTS)
def test_items_come_back_as_they_were_given(items: list[Any]) -> None:
    batch = validate(to_batch(items))
    found = items_of(SOURCE, 3, range(17, 17 + len(batch)), batch, 5, {})
    assert [item.id for item in found] == [f"3-{17 + index}" for index in range(len(items))]
    for item, new in zip(found, items, strict=True):
        check(item, new)


@given(LISTS)
def test_a_batch_has_only_columns_that_some_item_has(items: list[Any]) -> None:
    news = [item if isinstance(item, NewItem) else NewItem(item) for item in items]
    batch = to_batch(items)
    columns = {
        "keys": any(new.key is not None for new in news),
        "key_ids": any(new.key is not None for new in news),
        "headers": any(new.headers is not None for new in news),
        "kinds": any(new.kind is not None for new in news),
        "encodings": any(type(new.payload) is not bytes for new in news),
        "references": any(new.reference is not None for new in news),
        "priorities": any(new.priority is not None for new in news),
        "ats": any(new.at is not None for new in news),
        "ttls": any(new.ttl is not None for new in news),
        "dedups": any(new.dedup is not None for new in news),
        "origins": False,
    }
    assert {name: getattr(batch, name) is not None for name in columns} == columns


@given(NEW_ITEMS)
def test_a_single_item_is_a_batch_of_one(new: NewItem) -> None:
    options = {name: getattr(new, name) for name in NewItem.__struct_fields__[1:-1]}
    assert single_item_batch(new.payload, **options).drop_empty_columns() == to_batch([new]).drop_empty_columns()
    assert single_item_batch(new.payload, *options.values()) == single_item_batch(new.payload, **options)


@pytest.mark.parametrize("items", [[b"a", b"b"], (b"a", b"b"), iter([b"a", b"b"]), {b"a": 1, b"b": 2}.keys()])
def test_plain_bytes_become_a_batch_without_other_columns(items: Any) -> None:
    batch = to_batch(items)
    assert batch == Batch([b"a", b"b"])
    assert batch.payloads is not items


def test_bytes_and_text_and_objects_may_be_mixed() -> None:
    assert to_batch([b"a", "b", {"c": 1}]) == Batch([b"a", b"b", b'{"c":1}'], encodings=[None, "text", "json"])


def test_items_of_bytes_may_have_an_encoding_of_their_own() -> None:
    given = [NewItem(b"a", encoding="avro"), NewItem(b"b")]
    assert to_batch(given) == Batch([b"a", b"b"], encodings=["avro", None])
    assert to_batch([*given, "c"]) == Batch([b"a", b"b", b"c"], encodings=["avro", None, "text"])
    assert single_item_batch(b"a", encoding="avro") == Batch([b"a"], encodings=["avro"])
    assert single_item_batch("a", encoding="csv") == Batch([b"a"], encodings=["csv"])


def test_a_batch_has_the_key_ids_of_its_keys() -> None:
    batch = to_batch([NewItem(b"a", key="customer-42"), NewItem(b"b"), NewItem(b"c", key=b"\xff")])
    assert batch.keys == [b"customer-42", None, b"\xff"]
    assert batch.key_ids == key_ids([b"customer-42", None, b"\xff"])


def test_a_dedup_id_is_routed_like_its_item() -> None:
    batch = to_batch([NewItem(b"a", key="k", dedup="d"), NewItem(b"b", dedup="d"), NewItem(b"c")])
    assert batch.dedups == [dedup_digest(b"k", b"d"), dedup_digest(None, b"d"), None]
    assert [dedup_slot(digest) for digest in batch.dedups if digest] == [slot(b"k"), slot(b"d")]
    assert to_batch([NewItem(b"b", dedup=b"d")]).dedups == [dedup_digest(None, b"d")]


def test_a_subclass_of_new_item_is_accepted() -> None:
    given = Special(b"a", key="k", note="x")
    assert to_batch([given, b"b"]) == to_batch([NewItem(b"a", key="k"), b"b"])


def test_follow_ups_may_name_a_queue() -> None:
    assert to_batch([NewItem(b"a", queue="next")], follow_ups=True) == Batch([b"a"])


def test_an_endless_iterable_is_refused_as_too_large() -> None:
    with pytest.raises(InvalidRequest, match=r"^the batch has 10001 items; give 1 to 10000$"):
        validate(to_batch(count()))
    assert len(to_batch([b""] * (MAX_BATCH_ITEMS + 5))) == MAX_BATCH_ITEMS + 5


def test_an_empty_list_is_an_empty_batch() -> None:
    assert to_batch([]) == Batch([])


@pytest.mark.parametrize("items", [b"a", "a", {"a": 1}, bytearray(b"a"), memoryview(b"a"), NewItem(b"a"), Batch([b"a"]), None, 5])
def test_a_single_value_is_not_a_list_of_items(items: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_batch(items)
    assert str(caught.value) == f"the items are {type(items).__name__}; give a list of them"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"payload": None}, "the payload is NoneType; give bytes, str, or for JSON "),
    ({"payload": {"a": {1j}}}, "the payload cannot be written as JSON ("),
    ({"payload": "\ud800"}, "the payload is not valid Unicode; remove "),
    ({"payload": NewItem(b"a")}, "the payload is a NewItem; give what is in it, or give items to produce_many"),
    ({"payload": Batch([b"a"])}, "the payload is a Batch; give what is in it, or give items to produce_many"),
    ({"payload": [1], "encoding": "text"}, "the encoding is 'text' but the payload is list; leave it out, or give bytes or str"),
    ({"key": 5}, "the key is int; give str or bytes"),
    ({"headers": {"a": 1}}, "the header 'a' is int; give str or bytes"),
    ({"priority": 10}, "the priority is 10; give a whole number from 0 to 9"),
    ({"priority": -1}, "the priority is -1; give a whole number from 0 to 9"),
    ({"priority": True}, "the priority is bool; give a whole number from 0 to 9"),
    ({"priority": 5.0}, "the priority is float; give a whole number from 0 to 9"),
    ({"at": datetime(2030, 1, 1)}, "at has no timezone; give one"),
    ({"at": "tomorrow"}, "at is str; give a datetime with a timezone"),
    ({"ttl": -1}, "the ttl is out of bounds; give 0 to "),
    ({"ttl": "1h"}, "the ttl is str; give seconds or a timedelta"),
    ({"ttl": 0}, "the ttl is 0; give more, or None for the queue's own"),
    ({"dedup": b""}, "the dedup id is empty; give a text, or none at all"),
    ({"dedup": 5}, "the dedup id is int; give str or bytes"),
    ({"dedup": "é" * 513}, "the dedup id has 1026 bytes; give at most 1024"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_the_message_about_a_wrong_item_names_the_item(options: dict[str, Any], says: str) -> None:
    wrong = NewItem(**{"payload": b"x", **options})
    cases: list[tuple[list[Any], int]] = [([wrong], 0), ([NewItem(b"a", key="k", ttl=1), b"b", wrong, wrong], 2)]
    for items, index in cases:
        with pytest.raises(InvalidRequest) as caught:
            to_batch(items)
        assert str(caught.value).startswith(f"item {index}: {says}")


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_a_wrong_single_item_has_the_same_message(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        single_item_batch(**{"payload": b"x", **options})
    assert str(caught.value).startswith(says)


def test_a_wrong_payload_among_plain_ones_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^item 1: the payload is NoneType; give "):
        to_batch([b"a", None, b"c"])  # type: ignore[list-item]


def test_a_queue_is_only_for_follow_ups() -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_batch([b"a", NewItem(b"b", queue="next")])
    says = "the queue is 'next', but only a follow-up in complete(then=…) may name one; produce it to that queue"
    assert str(caught.value) == f"item 1: {says}"


def test_validate_checks_the_type_of_a_kind() -> None:
    with pytest.raises(InvalidRequest, match=r"^a kind is int; give a text$"):
        validate(to_batch([NewItem(b"a", kind=5)]))  # type: ignore[arg-type]


def test_the_repr_of_a_new_item() -> None:
    assert repr(NewItem(b"a")) == "NewItem(b'a')"
    assert repr(NewItem({"a": 1}, key="k", priority=0)) == "NewItem({'a': 1}, key='k', priority=0)"
    assert repr(NewItem(b"a" * 5_000)) == f"NewItem({b'a' * 60!r}… (5000 bytes))"
    assert repr(NewItem("a" * 5_000)) == f"NewItem({'a' * 60!r}… (5000 characters))"
    assert len(repr(NewItem(["a" * 5_000], key="k"))) < 300


def test_a_new_item_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        NewItem(b"a").key = "k"  # type: ignore[misc]
    with pytest.raises(TypeError):
        NewItem(b"a", "k")  # type: ignore[call-arg]


# -- on the way out ----------------------------------------------------------------------------------


def test_an_item_without_optional_fields() -> None:
    item = alone(Batch([b"a"]))
    assert (item.id, item.partition, item.offset, item.payload, item.value, item.attempts) == ("3-17", 3, 17, b"a", b"a", 1)
    assert (item.key, item.key_bytes, item.kind, item.encoding, item.reference, item.at, item.ttl, item.origin) == (None,) * 8
    assert (item.headers, item.priority, item.produced_at) == ({}, 5, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))


def test_at_and_ttl_of_0_are_none() -> None:
    item = alone(Batch([b"a"], ats=[0], ttls=[0], priorities=bytes([0])))
    assert (item.at, item.ttl, item.priority) == (None, None, 0)


def test_each_item_reads_its_own_row() -> None:
    batch = Batch([b"a", b"b"], [b"k", None], [1, 0], kinds=[None, "x"], ttls=[0, 1_500_000], origins=[None, encode(ORIGIN)])
    first, second = items_of(SOURCE, 3, range(17, 17 + len(batch)), batch, 5, {})
    assert (first.payload, first.key, first.kind, first.ttl, first.origin) == (b"a", "k", None, None, None)
    assert (second.payload, second.key, second.kind, second.ttl, second.origin) == (b"b", None, "x", 1.5, SHOWN_ORIGIN)


def test_an_item_knows_its_queue() -> None:
    assert [(item.queue, item.max_attempts) for item in items_of(SOURCE, 3, [17, 18], Batch([b"a", b"b"]), 5, {})] == [("orders", 4)] * 2


def test_attempts_are_those_given_or_the_usual_number() -> None:
    batch = Batch([b"a", b"b", b"c"])
    assert [item.attempts for item in items_of(SOURCE, 0, [5, 6, 7], batch, 1, {6: 4, 9: 9})] == [1, 4, 1]
    assert [item.attempts for item in items_of(SOURCE, 0, [5, 6, 7], batch, 1, {6: 4}, usual_attempts=0)] == [0, 4, 0]
    assert [item.attempts for item in items_of(SOURCE, 0, [5, 6, 7], batch, 1, {}, usual_attempts=0)] == [0, 0, 0]


def test_a_value_is_decoded_once_and_headers_are_a_new_dict_each_time() -> None:
    item = alone(single_item_batch({"a": 1}, headers={"h": "x"}))
    assert item.value is item.value
    item.headers.clear()
    assert item.headers == {"h": "x"}


def test_a_value_that_is_null_is_decoded_once_too() -> None:
    item = alone(Batch([b"null"], encodings=["json"]))
    assert item.value is None
    assert item.value is None


def test_a_damaged_payload_can_still_be_taken_as_bytes() -> None:
    item = alone(Batch([b"{"], encodings=["json"]))
    with pytest.raises(InvalidRequest, match=r"; read its bytes from `\.payload`$"):
        _ = item.value
    assert item.payload == b"{"


def test_a_damaged_origin_is_an_error() -> None:
    with pytest.raises(CorruptLog, match=r"^the origin of an item cannot be understood"):
        _ = alone(Batch([b"a"], origins=[b"\xc1"])).origin


def test_a_key_that_is_not_text_can_be_given_again() -> None:
    item = alone(single_item_batch(b"a", key=b"\xff\x00"))
    assert item.key is not None
    assert single_item_batch(b"b", key=item.key).keys == [b"\xff\x00"]


def test_items_are_compared_by_identity() -> None:
    batch = Batch([b"a"])
    first, second = alone(batch), alone(batch)
    assert first != second
    assert len({first, second, first}) == 2


def test_a_copied_item_holds_one_row_of_its_batch() -> None:
    batch = to_batch([NewItem("a" * 10_000, key="k"), NewItem({"b": 1}, key="m", priority=2), b"c" * 10_000])
    item = items_of(SOURCE, 3, range(17, 17 + len(batch)), batch, 5, {18: 4})[1]
    data = pickle.dumps(item)
    copy = pickle.loads(data)
    assert len(data) < 1_000
    for name in ("id", "partition", "offset", "payload", "value", "key", "priority", "encoding", "produced_at", "attempts"):
        assert getattr(copy, name) == getattr(item, name), name
    assert (copy.queue, copy.max_attempts) == SOURCE


def test_the_repr_of_an_item() -> None:
    assert repr(alone(Batch([b"a"]))) == "Item('3-17', b'a', attempts=1)"
    item = alone(single_item_batch({"a": 1}, key="k", kind="x", reference="r"))
    assert repr(item) == """Item('3-17', b'{"a":1}', key='k', kind='x', encoding='json', reference='r', attempts=1)"""
    assert repr(alone(Batch([b"a" * 5_000]))) == f"Item('3-17', {b'a' * 60!r}… (5000 bytes), attempts=1)"


def test_an_item_cannot_be_produced_by_mistake() -> None:
    with pytest.raises(InvalidRequest, match=r"^the payload is Item; give bytes"):
        single_item_batch(alone(Batch([b"a"])))  # type: ignore[arg-type]
