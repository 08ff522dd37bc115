"""Origins: encoding and decoding, refusal of other bytes, and the column of origins in a batch."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.words import origin
from penstock.words.batch import Batch, validate
from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.origin import MAX_ORIGIN_BYTES, Origin

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
TIMES = st.integers(0, 1 << 62)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.builds(lambda partition, offset: f"{partition}-{offset}", st.integers(0, 1_023), st.integers(0, (1 << 48) - 1))
ORIGINS = st.builds(
    Origin,
    TEXTS,
    st.integers(0, (1 << 64) - 1),
    IDS,
    st.integers(0, 65_535),
    TEXTS,
    TIMES,
    TIMES,
    TIMES,
    TIMES,
    st.booleans(),
    st.booleans(),
)


@given(ORIGINS)
def test_a_decoded_origin_equals_the_encoded_one(given_: Origin) -> None:
    assert origin.decode(origin.encode(given_)) == given_


def test_an_origin_is_the_array_that_the_format_shows() -> None:
    fields = re.findall(r"an origin is `\[([a-z_, ]+)\]`", FORMAT.read_text())
    assert fields == [", ".join(Origin.__struct_fields__)]
    whole = Origin("orders", 7, "3-17", 4, "why", 1, 2, 3, 5, True, False, 9, "1-2", True)
    assert msgspec.msgpack.decode(origin.encode(whole)) == ["orders", 7, "3-17", 4, "why", 1, 2, 3, 5, True, False, 9, "1-2", True]


def test_the_key_of_an_item_may_be_parked_in_two_queues() -> None:
    both = Origin("orders", 7, "3-17", parked=True, parked_in=9, parked_id="1-2")
    assert both.parkings == [(7, 3, 17), (9, 1, 2)]
    assert (both.parking_in(7), both.parking_in(9), both.parking_in(8)) == ((3, 17), (1, 2), None)
    assert Origin("orders", 7, "3-17").parkings == []


def test_missing_fields_get_defaults_and_unknown_fields_are_ignored() -> None:
    assert origin.decode(msgspec.msgpack.encode(["orders", 7, "3-17"])) == Origin("orders", 7, "3-17")
    longer = [*msgspec.to_builtins(Origin("orders", 7, "3-17")), "new"]
    assert origin.decode(msgspec.msgpack.encode(longer)) == Origin("orders", 7, "3-17")


def test_an_id_names_a_partition_and_an_offset() -> None:
    assert Origin("orders", 7, "3-17").partition_and_offset == (3, 17)
    assert Origin("orders", 7, "0-281474976710655").partition_and_offset == (0, (1 << 48) - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\xa1\xff\x07\xa43-17",
        origin.encode(Origin("orders", 7, "3-17")) + b"\0",
        msgspec.msgpack.encode({"queue": "orders"}),
        msgspec.msgpack.encode(["orders", 7]),
        msgspec.msgpack.encode(["orders", "7", "3-17"]),
        msgspec.msgpack.encode(["orders", 7, "3-17", "many"]),
        *(msgspec.msgpack.encode(["orders", 7, name]) for name in ("", "17", "3-", "-17", "3--17", "3-17\n", "a-b", "3-17-1", "٣-١٧")),
    ],
)
def test_bytes_that_are_no_origin_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptLog, match=r"(?s)^the origin of an item cannot be understood .*; run verify, or use a newer Penstock$"):
        origin.decode(data)


# -- in a batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origins", "says"),
    [
        ([b"o" * (MAX_ORIGIN_BYTES + 1)], "a transfer's origin has 8193 bytes; give at most 8192"),
        (["o"], "a transfer's origin is str; give bytes"),
        ([b"o", b"o"], "origins has 2 entries for 1 items; give one each"),
        (7, "origins are int; give a list"),
    ],
)
def test_a_wrong_column_of_origins_is_refused(origins: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(Batch([b"x"], origins=origins))
    assert str(caught.value).startswith(says)


def test_the_longest_origin_is_accepted() -> None:
    batch = Batch([b"x", b"y"], origins=[b"o" * MAX_ORIGIN_BYTES, None])
    assert validate(batch) is batch


def test_origins_are_kept_by_every_method_of_a_batch() -> None:
    batch = Batch([b"a", b"b", b"c"], origins=[b"1", None, b"3"])
    assert not batch.payloads_only
    assert batch.take([2, 0]).origins == [b"3", b"1"]
    assert batch.slice(1, 3).origins == [None, b"3"]
    own = batch.to_store()
    assert own == batch
    assert own.origins is not batch.origins
    assert batch.drop_empty_columns().origins == [b"1", None, b"3"]


def test_drop_empty_columns_removes_origins_when_no_item_has_one() -> None:
    assert Batch([b"a", b"b"], origins=[None, None]).drop_empty_columns() == Batch([b"a", b"b"])
    assert Batch([b"a"], origins=[b""]).drop_empty_columns().origins == [b""]
