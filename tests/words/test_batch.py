"""Batch: the checks of `validate`, `take` and `drop_empty_columns`."""

from typing import Any

import pytest

from penstock.rules import routing
from penstock.words.batch import Batch, validate
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_DELAY, MIB

IDS = routing.key_ids([b"k"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"payloads": []}, "the batch has 0 items; give 1 to 10000"),
        ({"payloads": [b""] * 10_001}, "the batch has 10001 items; give 1 to 10000"),
        ({"payloads": ["text"]}, "a payload is str; give bytes"),
        ({"payloads": [None]}, "a payload is NoneType; give bytes"),
        ({"payloads": b"x"}, "a payload is int; give bytes"),
        ({"payloads": [bytes(16 * MIB + 1)]}, "a payload has 16777217 bytes; give at most 16777216"),
        ({"payloads": [bytes(16 * MIB)] * 4 + [b"x"]}, "the batch has 67108865 payload bytes; give at most 67108864"),
        ({"keys": [b"k" * 1_025], "key_ids": IDS}, "a key has 1025 bytes; give at most 1024"),
        ({"keys": ["k"], "key_ids": IDS}, "a key is str; give bytes"),
        ({"keys": [b"k"]}, "keys and key_ids must be given together; fill key_ids"),
        ({"key_ids": IDS}, "keys and key_ids must be given together; fill key_ids"),
        ({"keys": [b"k", b"k"], "key_ids": IDS * 2}, "keys has 2 entries for 1 items; give one each"),
        ({"headers": [b"h" * 65_537]}, "headers have 65537 bytes; give at most 65536"),
        ({"headers": [{"a": "b"}]}, "a headers is dict; give bytes"),
        ({"kinds": ["x" * 1_025]}, "a kind has 1025 bytes; give at most 1024"),
        ({"kinds": [["list"]]}, "a kind is list; give a text"),
        ({"encodings": [b"json"]}, "a encoding is bytes; give a text"),
        ({"references": ["\ud800"]}, "a reference is not valid Unicode; remove"),
        ({"priorities": bytes([10])}, "a priority is 10; give 0"),
        ({"priorities": [5]}, "priorities are list; give bytes"),
        ({"ats": [-1]}, "at is out of bounds; give whole microseconds"),
        ({"ats": [1.5]}, "at is out of bounds; give whole microseconds"),
        ({"ats": [True]}, "at is out of bounds; give whole microseconds"),
        ({"ttls": [MAX_DELAY + 1]}, "ttl is out of bounds; give whole microseconds"),
        ({"dedups": [b"short"]}, "a dedup digest is not 16 bytes; make it with"),
        ({"dedups": ["sixteen letters!"]}, "a dedup digest is not 16 bytes; make it with"),
    ],
)
def test_a_wrong_batch_is_refused_with_a_message_that_names_the_column(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(Batch(**{"payloads": [b"x"], **options}))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("given", [[b"x"], None, b"x"])
def test_other_types_than_a_batch_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="; give a Batch"):
        validate(given)


def test_a_batch_at_every_limit_is_accepted() -> None:
    batch = Batch(
        [b"", b"x"],
        [b"k" * 1_024, None],
        [1, 0],
        [b"h" * 65_536, None],
        ["x" * 1_024, None],
        ["é" * 512, ""],
        [None, "r"],
        bytes([0, 9]),
        [0, 1 << 62],
        [0, MAX_DELAY],
        [bytes(16), None],
    )
    assert validate(batch) is batch


def test_take_takes_from_every_column() -> None:
    batch = Batch([b"a", b"b", b"c"], [b"k", None, b"m"], [1, 0, 2], kinds=["x", "y", None], priorities=bytes([1, 2, 3]), ats=[7, 8, 9])
    assert batch.take([2, 0]) == Batch([b"c", b"a"], [b"m", b"k"], [2, 1], kinds=[None, "x"], priorities=bytes([3, 1]), ats=[9, 7])


def test_drop_empty_columns_removes_columns_without_values() -> None:
    empty = Batch([b"a"], [None], [0], [None], [None], [None], [None], bytes([5]), [0], [0], [None])
    assert empty.drop_empty_columns() == Batch([b"a"])


def test_drop_empty_columns_keeps_columns_with_a_value() -> None:
    full: list[Any] = [[b"a"], [b""], [1], [b""], [""], [""], [""], bytes([4]), [1], [1], [bytes(16)]]
    assert Batch(*full).drop_empty_columns() == Batch(*full)


def test_a_batch_with_any_other_column_has_not_only_payloads() -> None:
    assert Batch([b"x"]).payloads_only
    for name in Batch.__struct_fields__[1:]:
        columns: dict[str, Any] = {name: [None]}
        assert not Batch([b"x"], **columns).payloads_only, name
