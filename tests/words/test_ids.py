"""Item ids and lease tokens: the parsers accept what the formatters write, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.words import ids
from penstock.words.errors import InvalidRequest

PARTITIONS = st.integers(0, ids.LAST_PARTITION)
OFFSETS = st.integers(0, ids.FIRST_FOREIGN_NUMBER - 1)
NUMBERS = st.integers(0, (1 << 64) - 1)
TOKENS = st.builds(ids.Token, NUMBERS, PARTITIONS, st.integers(1, (1 << 64) - 1), OFFSETS)

TOKEN = "00000000000000ff.3.10000000001.17"


def test_an_id_is_partition_and_offset() -> None:
    assert ids.format_id(3, 17) == "3-17"
    assert ids.parse_id("3-17") == (3, 17)


@given(PARTITIONS, OFFSETS)
def test_a_formatted_id_parses_to_the_same_id(partition: int, offset: int) -> None:
    assert ids.parse_id(ids.format_id(partition, offset)) == (partition, offset)


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "3", "3-", "-17", "3--17", "-3-17", "3-17-1", " 3-17", "3-17\n", "3- 17", "+3-17", "3_1-17", "3-1.0", "x-17"),
        *("03-17", "3-017", "٣-17", "3-१७", "65535-17", "99999999-17", f"3-{1 << 48}", "3-" + "9" * 5_000),
    ],
)
def test_other_texts_are_not_ids(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r" is not the id of an item; give one as produce returned it, such as '3-17'$") as caught:
        ids.parse_id(text)
    assert str(caught.value).startswith(repr(text)[:80])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("given", [None, 317, b"3-17", (3, 17)])
def test_an_id_is_text(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^a value of type {type(given).__name__} is not the id of an item; give "):
        ids.parse_id(given)


@given(PARTITIONS, PARTITIONS, OFFSETS)
def test_a_foreign_number_gives_the_same_item_in_every_partition(own: int, partition: int, offset: int) -> None:
    number = ids.foreign_number(partition, offset)
    assert ids.FIRST_FOREIGN_NUMBER <= number < 1 << 64
    assert ids.locate(own, number) == (partition, offset)


@given(PARTITIONS, OFFSETS)
def test_a_number_below_the_foreign_numbers_is_an_offset_of_the_own_partition(own: int, offset: int) -> None:
    assert ids.locate(own, offset) == (own, offset)


@pytest.mark.parametrize("numbers", [range(5, 8), range(8, 5, -1), range(0), [], [7, 5], (9,)])
def test_ids_of_own_items(numbers: Any) -> None:
    assert ids.format_ids(4, numbers) == [f"4-{number}" for number in numbers]


@given(PARTITIONS, st.lists(OFFSETS | st.builds(ids.foreign_number, PARTITIONS, OFFSETS), max_size=10))
def test_ids_of_own_and_foreign_items(own: int, numbers: list[int]) -> None:
    assert [ids.parse_id(text) for text in ids.format_ids(own, numbers)] == [ids.locate(own, number) for number in numbers]


@pytest.mark.parametrize("step", [1, -1])
def test_a_range_may_hold_foreign_numbers(step: int) -> None:
    numbers = range(ids.foreign_number(2, 0), ids.foreign_number(2, 2))[::step]
    assert ids.format_ids(4, numbers) == ["2-0", "2-1"][::step]


def test_a_token_names_incarnation_partition_lease_and_offset() -> None:
    token = ids.Token(incarnation=255, partition=3, lease=1 << 40 | 1, offset=17)
    assert ids.format_token(token) == TOKEN
    assert ids.parse_token(TOKEN) == token


@given(TOKENS)
def test_a_formatted_token_parses_to_the_same_token(token: ids.Token) -> None:
    assert ids.parse_token(ids.format_token(token)) == token


@pytest.mark.parametrize(
    "text",
    [
        *("", "3-17", "ff.3.10000000001.17", TOKEN.upper(), TOKEN + "\n", " " + TOKEN, TOKEN + ".1", TOKEN.replace(".", "-")),
        *("00000000000000ff.3.0.17", "00000000000000ff.3.01.17", "00000000000000ff.03.1.17", "00000000000000ff.3.1.017"),
        *("00000000000000ff.3..17", "00000000000000ff.3.11111111111111111.17", "00000000000000ff.65535.1.17"),
        *(f"00000000000000ff.3.1.{1 << 48}", "00000000000000fg.3.1.17", "0x000000000000ff.3.1.17"),
    ],
)
def test_other_texts_are_not_tokens(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r" is not a lease token; give one as lease returned it$"):
        ids.parse_token(text)


@pytest.mark.parametrize("given", [None, TOKEN.encode(), ids.Token(255, 3, 1, 17)])
def test_a_token_is_text(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^a value of type {type(given).__name__} is not a lease token; give "):
        ids.parse_token(given)
