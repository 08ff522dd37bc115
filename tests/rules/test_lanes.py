"""Lanes, compared with lists of offsets."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.lanes import KEYED, Extent, Lanes
from penstock.rules.runs import RunSet, from_offsets
from penstock.words.clock import SECOND

LANES = st.integers(0, 9)
SIZES = st.lists(st.tuples(LANES, st.integers(1, 5), st.sampled_from([0, KEYED]), st.integers(0, 2 * SECOND)), max_size=20)


def covered(lanes: Lanes) -> list[list[int]]:
    return [[offset for extent in lane for offset in range(extent.start, extent.stop)] for lane in lanes.lanes]


def filled(sizes: list[tuple[int, int, int, int]]) -> tuple[Lanes, list[list[int]]]:
    """Lanes after adding these (lane, size, flags, pause), and the offsets that each lane should cover, in order."""
    lanes, plain, offset, now = Lanes(), [list[int]() for _ in range(10)], 0, 0
    for lane, size, flags, pause in sizes:
        now += pause
        lanes.add(lane, offset, offset + size, flags, offset, now)
        plain[lane] += range(offset, offset + size)
        offset += size
    return lanes, plain


@given(SIZES)
def test_offsets_are_in_their_lane_in_order(sizes: list[tuple[int, int, int, int]]) -> None:
    lanes, plain = filled(sizes)
    assert covered(lanes) == plain
    assert all(extent.at_own_offset for lane in lanes.lanes for extent in lane)


def test_consecutive_items_are_one_extent() -> None:
    lanes, _ = filled([(5, 3, 0, 0)] * 1_000)
    assert [extent.astuple() for extent in lanes.lanes[5]] == [(0, 3_000, 0, 0, 0)]


def test_items_of_a_second_later_are_another_extent() -> None:
    lanes, _ = filled([(5, 1, 0, 0), (5, 1, 0, SECOND)])
    assert [extent.ready_at for extent in lanes.lanes[5]] == [0, SECOND]


@given(SIZES, LANES, st.integers(0, 60), st.integers(1, 10))
def test_trimming_takes_a_range_out_of_one_extent(sizes: list[tuple[int, int, int, int]], lane: int, start: int, size: int) -> None:
    lanes, plain = filled(sizes)
    before = [Extent(*extent.astuple()) for extent in lanes.lanes[lane]]
    first = next((extent for extent in before if extent.start < start + size and start < extent.stop), None)
    found = lanes.trim(lane, start, start + size)
    assert (found and found.astuple()) == (first and first.astuple())
    if first is not None:
        plain[lane] = [offset for offset in plain[lane] if not (first.start <= offset < first.stop and start <= offset < start + size)]
    assert covered(lanes) == plain
    assert all(extent.at_own_offset for extent in lanes.lanes[lane])


def test_the_runs_left_by_a_trim_have_no_keys() -> None:
    lanes = Lanes()
    lanes.add(5, 0, 10, KEYED, 0, 0)
    lanes.trim(5, 2, 6, [3, 5])
    assert [(extent.start, extent.stop, extent.tag) for extent in lanes.lanes[5]] == [(0, 2, KEYED), (3, 5, 0), (6, 10, KEYED)]


@given(SIZES, st.sets(st.integers(0, 60)))
def test_dropping_takes_offsets_out_wherever_they_stand(sizes: list[tuple[int, int, int, int]], gone: set[int]) -> None:
    lanes, plain = filled(sizes)
    lanes.drop(from_offsets(sorted(gone)))
    assert covered(lanes) == [[offset for offset in lane if offset not in gone] for lane in plain]


@given(SIZES, st.sets(st.integers(0, 60)))
def test_merging_puts_offsets_back_in_the_logs_order(sizes: list[tuple[int, int, int, int]], gone: set[int]) -> None:
    lanes, plain = filled(sizes)
    runs = RunSet(from_offsets(sorted(gone)))
    lanes.drop(runs.runs)
    back = [(lane, Extent(offset, offset + 1, 0, offset, 0)) for lane, offsets in enumerate(plain) for offset in offsets if offset in runs]
    lanes.merge(back)
    assert covered(lanes) == plain


def test_an_item_that_became_ready_later_comes_before_the_item_at_its_position() -> None:
    lanes = Lanes()
    lanes.merge([(5, Extent(7, 8, 0, 7, 0)), (5, Extent(2, 3, 0, 7, 5)), (5, Extent(1, 2, 0, 7, 6))])
    assert covered(lanes)[5] == [2, 1, 7]


def test_the_first_keyed_extent_is_found_behind_others() -> None:
    lanes = Lanes()
    lanes.add(5, 0, 1, 0, 0, 0)
    assert lanes.first_keyed(5) is None
    lanes.add(5, 1, 2, KEYED, 1, 0)
    found = lanes.first_keyed(5)
    assert found is not None
    assert found.start == 1
