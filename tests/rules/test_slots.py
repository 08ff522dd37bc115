"""The slot map: even, with as few moves as possible, and the same bytes for the same owners."""

import random
import struct
from array import array
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rules import routing, slots
from penstock.rules.routing import SLOT_MASK, SLOTS
from penstock.rules.slots import MAX_NUMBER, Move, SlotMap
from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.limits import MAX_PARTITIONS

NUMBERS = st.one_of(st.integers(0, 12), st.integers(0, MAX_NUMBER))
PARTITIONS = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=20, unique=True),
    st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, 900), st.integers(1, MAX_PARTITIONS)),
)
CHAINS = st.lists(PARTITIONS, min_size=1, max_size=6)
properties = settings(max_examples=40, deadline=None)


def chained(chain: list[list[int]]) -> list[SlotMap]:
    """The maps of a queue that had these sets of partitions, one after the other."""
    maps = [slots.first_map(chain[0])]
    for partitions in chain[1:]:
        maps.append(slots.next_map(maps[-1], partitions))
    return maps


def grown(*sizes: int) -> list[SlotMap]:
    return chained([list(range(size)) for size in sizes])


def moved(old: SlotMap, new: SlotMap) -> int:
    return sum(len(move.slots) for move in slots.slot_moves(old, new))


def fewest_moves(old: SlotMap, partitions: list[int]) -> int:
    """The fewest slots that must move: a partition keeps at most its slots and its share; some shares are one
    larger."""
    held, (share, rest) = Counter(old.owners), divmod(SLOTS, len(partitions))
    kept = sum(min(held[number], share) for number in partitions)
    return SLOTS - kept - min(rest, sum(held[number] > share for number in partitions))


@properties
@given(CHAINS)
def test_every_version_is_even_over_the_partitions_listed(chain: list[list[int]]) -> None:
    for version, (found, partitions) in enumerate(zip(chained(chain), chain, strict=True), 1):
        counts = Counter(found.owners)
        assert found.version == version
        assert len(found.owners) == SLOTS
        assert set(counts) == set(partitions)
        assert max(counts.values()) - min(counts.values()) <= 1


@properties
@given(CHAINS)
def test_no_other_even_map_moves_fewer_slots(chain: list[list[int]]) -> None:
    for (old, new), partitions in zip(pairwise(chained(chain)), chain[1:], strict=True):
        assert moved(old, new) == fewest_moves(old, partitions)


@properties
@given(st.integers(1, 200), st.integers(1, 200))
def test_growing_moves_slots_only_to_new_partitions(size: int, more: int) -> None:
    old, new = grown(size, size + more)
    assert {move.destination for move in slots.slot_moves(old, new)} == set(range(size, size + more))
    share = more / (size + more)
    assert abs(moved(old, new) - share * SLOTS) <= more


@properties
@given(st.data(), st.integers(2, 200))
def test_shrinking_moves_only_what_the_removed_ones_held(data: st.DataObject, size: int) -> None:
    (old,) = grown(size)
    gone = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    new = slots.next_map(old, [number for number in range(size) if number not in gone])
    assert {move.source for move in slots.slot_moves(old, new)} == gone
    assert moved(old, new) == sum(Counter(old.owners)[number] for number in gone)


def test_the_order_in_which_partitions_are_listed_does_not_matter() -> None:
    (old,) = grown(5)
    assert slots.next_map(old, [9, 2, 0]) == slots.next_map(old, [0, 2, 9])
    assert slots.first_map([2, 1, 0]) == slots.first_map([0, 1, 2])


def test_the_same_partitions_keep_their_slots() -> None:
    _, old = grown(3, 7)
    again = slots.next_map(old, range(7))
    assert (again.version, again.owners) == (3, old.owners)
    assert slots.slot_moves(old, again) == []


def test_an_uneven_map_is_made_even() -> None:
    uneven = SlotMap(4, array("H", [0] * (SLOTS - 1) + [1]))
    even = slots.next_map(uneven, [0, 1])
    assert Counter(even.owners) == {0: SLOTS // 2, 1: SLOTS // 2}
    assert slots.slot_moves(uneven, even) == [Move(0, 1, list(range(SLOTS // 2, SLOTS - 1)))]


def test_slot_moves_give_the_new_map_from_the_old_one() -> None:
    old, new = grown(4, 6)
    owners = array("H", old.owners)
    for move in slots.slot_moves(old, new):
        for slot in move.slots:
            assert owners[slot] == move.source
            owners[slot] = move.destination
    assert owners == new.owners


def test_making_a_map_leaves_the_old_one_as_it_was() -> None:
    (old,) = grown(2)
    before = array("H", old.owners)
    slots.next_map(old, range(9))
    assert old.owners == before


@pytest.mark.parametrize("sizes", [[16], [1, 16], [1, 3, 7, 16], [40, 16]], ids=str)
def test_keyed_traffic_over_sixteen_partitions_is_even(sizes: list[int]) -> None:
    owners, rng = grown(*sizes)[-1].owners, random.Random(4)
    found = Counter(owners[routing.key_id(rng.randbytes(12)) & SLOT_MASK] for _ in range(100_000))
    assert len(found) == 16
    assert max(found.values()) / (100_000 / 16) <= 1.1


# -- bytes ---------------------------------------------------------------------------------------------


def test_the_first_map_never_changes_because_stored_queues_depend_on_it() -> None:
    assert slots.first_map([0]).pack() == struct.pack("<HH", 0, 16384)
    assert slots.first_map([0, 1, 2]).pack() == struct.pack("<6H", 0, 5461, 1, 5461, 2, 5462)
    assert slots.first_map([7, 3]).pack() == struct.pack("<4H", 3, 8192, 7, 8192)


@properties
@given(CHAINS, st.integers(1, 1 << 40))
def test_a_map_is_read_back_from_its_bytes(chain: list[list[int]], version: int) -> None:
    found = chained(chain)[-1]
    again = SlotMap.unpack(version, found.pack())
    assert (again.version, again.owners) == (version, found.owners)
    assert again.pack() == found.pack()


@pytest.mark.parametrize("packed", [b"", b"\x00", struct.pack("<HH", 0, 16383), struct.pack("<4H", 0, 16384, 1, 1), bytes(4)])
def test_bytes_that_are_no_map_are_refused(packed: bytes) -> None:
    with pytest.raises(CorruptLog, match="not 16384; run verify"):
        SlotMap.unpack(1, packed)


def test_a_map_says_its_version_and_partitions() -> None:
    assert repr(slots.first_map([4, 0])) == "SlotMap(version=1, partitions=[0, 4])"


@pytest.mark.parametrize("partitions", [[], [1, 1], list(range(MAX_PARTITIONS + 1)), [-1], [MAX_NUMBER + 1], [True], ["0"]], ids=repr)
def test_wrong_partitions_are_refused(partitions: list[int]) -> None:
    for make in (slots.first_map, lambda numbers: slots.next_map(slots.first_map([0]), numbers)):
        with pytest.raises(InvalidRequest, match="; give"):
            make(partitions)
