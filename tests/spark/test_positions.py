"""How far a micro-batch goes and how it is cut, without Spark."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.runs import RunSet, count, offsets
from penstock.spark.positions import StreamPosition, end_of_batch, parse_position, shares, unread_count
from penstock.spark.ranges import cut, split
from penstock.words.errors import InvalidRequest

BACKLOGS = st.dictionaries(st.integers(0, 12), st.integers(-5, 500), max_size=8)
POSITIONS = st.dictionaries(st.integers(0, 12), st.integers(0, 500), max_size=8)
RUNS = st.lists(st.integers(0, 400), max_size=12).map(lambda edges: RunSet(sorted(edges)[: len(edges) // 2 * 2]).runs)


# -- offsets in the checkpoint -------------------------------------------------------------------------


@given(st.integers(0, (1 << 64) - 1), st.sampled_from(["items", "events"]), POSITIONS, POSITIONS)
def test_an_offset_comes_back_as_it_was(incarnation: int, table: str, at: dict[int, int], missing: dict[int, int]) -> None:
    position = StreamPosition(incarnation, table, at, {partition: items for partition, items in missing.items() if items})
    text = json.dumps(position.to_offset())
    assert parse_position(json.loads(text)) == position
    assert json.dumps(parse_position(json.loads(text)).to_offset()) == text


def test_equal_positions_have_equal_json() -> None:
    one, other = StreamPosition(7, "items", {10: 1, 2: 5}), StreamPosition(7, "items", {2: 5, 10: 1})
    assert json.dumps(one.to_offset()) == json.dumps(other.to_offset())
    assert json.dumps(one.to_offset()) == '{"incarnation": "0000000000000007", "table": "items", "2": 5, "10": 1}'


@pytest.mark.parametrize(
    "offset",
    [
        {},
        {"0": 12},
        {"incarnation": "zz", "table": "items"},
        {"incarnation": "1", "table": "items", "orders": {"0": 12}},
        {"incarnation": "1", "table": "items", "0": "12"},
        {"incarnation": "1", "table": "items", "0": -1},
        {"incarnation": "1", "table": "items", "-1": 1},
        {"incarnation": "1", "table": "items", "0": True},
        {"incarnation": "1", "table": "items", "missing": 3},
        {"incarnation": "1", "table": "items", "missing": {"0": None}},
    ],
)
def test_an_offset_of_another_source_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"is no offset of a Penstock stream; .* start with a new checkpointLocation"):
        parse_position(offset)


# -- shares --------------------------------------------------------------------------------------------


@given(BACKLOGS, st.integers(0, 2_000), st.integers(0, 10_000))
def test_shares_are_fair(backlog: dict[int, int], limit: int, turn: int) -> None:
    taken = shares(backlog, limit, turn)
    there = {partition: size for partition, size in backlog.items() if size > 0}
    assert set(taken) == set(there)
    assert sum(taken.values()) == min(limit, sum(there.values()))
    assert all(0 <= taken[partition] <= size for partition, size in there.items())
    cut_short = [taken[partition] for partition, size in there.items() if taken[partition] < size]
    if cut_short:  # none gets more than one that had to wait, but for the item that cannot be shared
        assert max(taken.values()) <= min(cut_short) + 1


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 30))
def test_a_limit_below_the_number_of_partitions_leaves_none_behind(partitions: int, limit: int, items: int) -> None:
    ends = dict.fromkeys(range(partitions), items)
    at: dict[int, int] = {}
    batches = 0
    while unread_count(at, ends):
        before, at = at, end_of_batch(at, ends, limit)
        assert 1 <= sum(at.values()) - sum(before.values()) <= limit
        batches += 1
        reached = [at.get(partition, 0) for partition in range(partitions)]
        assert max(reached) - min(reached) <= 1
    assert at == ends and batches == -(-partitions * items // limit)


def test_the_share_that_a_small_partition_does_not_need_goes_to_others() -> None:
    assert shares({0: 10, 1: 1_000, 2: 1_000}, 110) == {0: 10, 1: 50, 2: 50}


# -- how far -------------------------------------------------------------------------------------------


@given(POSITIONS, POSITIONS, st.none() | st.integers(1, 1_000))
def test_going_on_never_goes_back_nor_beyond_the_end(start: dict[int, int], ends: dict[int, int], limit: int | None) -> None:
    at = end_of_batch(start, ends, limit)
    assert start.keys() <= at.keys() <= start.keys() | ends.keys()
    for partition, number in at.items():
        assert start.get(partition, 0) <= number <= max(start.get(partition, 0), ends.get(partition, 0))
    total = sum(at.values()) - sum(start.values())
    assert total == (unread_count(start, ends) if limit is None else min(limit, unread_count(start, ends)))
    assert (at == start) == (unread_count(start, ends) == 0)


def test_partitions_that_appear_are_read_from_their_first_item() -> None:
    assert end_of_batch({0: 5}, {0: 5, 1: 3, 2: 0}, None) == {0: 5, 1: 3}


def test_a_partition_that_cannot_be_seen_stays_where_it_is() -> None:
    assert end_of_batch({0: 5, 1: 7}, {0: 9}, None) == {0: 9, 1: 7}


# -- splits --------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 6), RUNS, max_size=5), st.integers(0, 40))
def test_splits_hold_everything_once_and_evenly(wanted: dict[int, list[int]], least: int) -> None:
    found = split(wanted, least)
    for partition, runs in wanted.items():
        pieces = [one.runs for one in found if one.partition == partition]
        assert [offset for piece in pieces for offset in offsets(piece)] == offsets(runs)
        sizes = [count(piece) for piece in pieces]
        assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    total = sum(count(runs) for runs in wanted.values())
    full = sum(1 for runs in wanted.values() if runs)
    assert len(found) == max(full, min(least, total))


def test_the_heaviest_partition_is_cut_first() -> None:
    assert [(one.partition, one.runs) for one in split({0: [0, 10], 1: [5, 105]}, 4)] == [
        (0, [0, 10]),
        (1, [5, 38]),
        (1, [38, 71]),
        (1, [71, 105]),
    ]


@given(RUNS, st.integers(1, 20))
def test_a_cut_keeps_the_order(runs: list[int], pieces: int) -> None:
    assert [offset for piece in cut(runs, pieces) for offset in offsets(piece)] == offsets(runs)
