"""Key lines, compared with plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.keys import KeyLine, KeyLines, PackedExtents
from penstock.rules.lanes import Extent
from penstock.rules.records import LineTake
from penstock.rules.runs import RunSet

KEY, OTHER = 11, 22


def offsets(line: KeyLine) -> list[int]:
    return [offset for run in line.waiting for offset in range(run.start, run.stop)]


def waiting(start: int, stop: int | None = None, *, lane: int = 5, position: int | None = None, ready_at: int = 0) -> Extent:
    return Extent(start, stop or start + 1, lane, start if position is None else position, ready_at)


@given(st.permutations(range(12)))
def test_items_are_in_log_order_in_whatever_order_they_were_pushed(order: list[int]) -> None:
    line = KeyLine()
    for offset in order:
        line.push(waiting(offset))
    assert offsets(line) == list(range(12))


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_dropped_items_are_gone_and_the_others_stay(there: set[int], gone: set[int]) -> None:
    line = KeyLine()
    for offset in sorted(there):
        line.push(waiting(offset))
    assert [offset for offset in sorted(gone) if line.drop(offset)] == sorted(there & gone)
    assert offsets(line) == sorted(there - gone)


def test_items_in_a_row_are_one_run() -> None:
    line = KeyLine()
    for offset in range(1_000):
        line.push(waiting(offset))
    assert [run.astuple() for run in line.waiting] == [(0, 1_000, 5, 0, 0)]


def test_an_item_that_came_due_in_the_middle_of_a_run_stands_in_the_middle() -> None:
    line = KeyLine()
    line.push(waiting(4, 9))
    line.push(waiting(2, position=7, ready_at=3))
    line.push(waiting(1, position=7, ready_at=5))
    assert offsets(line) == [4, 5, 6, 2, 1, 7, 8]


@given(st.lists(st.integers(0, 30), unique=True, min_size=1), st.integers(1, 40))
def test_taking_from_the_front_leaves_the_rest(there: list[int], size: int) -> None:
    keys = KeyLines()
    for offset in there:
        keys.pass_over(KEY, waiting(offset))
    taken = sorted(there)[:size]
    for offset in taken:
        keys.take([LineTake(KEY, 5, offset, offset + 1)], lease=9)
    assert offsets(keys.line(KEY)) == sorted(there)[size:]
    assert all(run.at_own_offset for run in keys.line(KEY).waiting)


def heads(keys: KeyLines, lane: int = 5) -> list[int]:
    """The offsets of the valid entries of a lane's `free_heads`."""
    return sorted({offset for position, offset, key in keys.free_heads[lane] if keys.head(lane, position, offset, key) is not None})


def test_a_free_line_offers_its_head_and_a_held_one_does_not() -> None:
    keys = KeyLines()
    keys.pass_over(KEY, waiting(3))
    keys.pass_over(OTHER, waiting(4))
    assert heads(keys) == [3, 4]
    keys.hold([KEY], lease=9)
    assert heads(keys) == [4]
    keys.release([KEY], lease=9)
    assert heads(keys) == [3, 4]


def test_another_lease_cannot_release_a_key() -> None:
    keys = KeyLines()
    keys.hold([KEY], lease=9)
    keys.release([KEY], lease=8)
    assert KEY in keys.by_key
    keys.release([KEY], lease=9)
    assert not keys.by_key


def test_an_earlier_item_takes_over_the_head() -> None:
    keys = KeyLines()
    keys.pass_over(KEY, waiting(5))
    keys.pass_over(KEY, waiting(3, lane=0))
    assert (heads(keys, 5), heads(keys, 0)) == ([], [3])


def test_an_empty_line_is_removed() -> None:
    keys = KeyLines()
    keys.pass_over(KEY, waiting(5))
    keys.take([LineTake(KEY, 5, 5, 6)], lease=9)
    keys.release([KEY], lease=9)
    assert not keys.by_key


def test_a_lost_item_no_longer_holds_its_key() -> None:
    keys = KeyLines()
    line = keys.line(KEY)
    line.parked, line.backing_off = [1], (2, 5)
    line.push(waiting(3, 5))
    for offset in (1, 2, 3):
        keys.remove_lost(RunSet((offset, offset + 1)))
    assert heads(keys) == [4]


def _run(start: int, size: int, fresh: bool, lane: int) -> Extent:
    return Extent(start, start + size, lane, start if fresh else start + 1_000, 0)


RUNS = st.builds(_run, st.integers(0, 100), st.integers(1, 4), st.booleans(), st.integers(0, 9))
STEPS = st.lists(st.tuples(st.sampled_from(["back", "front", "step"]), RUNS), max_size=40)


@given(STEPS)
def test_packed_extents_behave_like_a_list(steps: list[tuple[str, Extent]]) -> None:
    packed, plain = PackedExtents(), list[Extent]()
    for verb, run in steps:
        if verb == "back":
            packed.append(run)
            plain.append(run)
        elif verb == "front":
            packed.appendleft(run)
            plain.insert(0, run)
        elif plain:
            packed.take(packed.first.start, packed.first.start + 1)
            first = plain.pop(0)
            plain[:0] = first.without(first.start)
        assert [run.astuple() for run in packed] == [run.astuple() for run in plain]
        assert len(packed) == len(plain)
        if plain:
            assert (packed.first.astuple(), packed.last.astuple()) == (plain[0].astuple(), plain[-1].astuple())
    if plain:
        packed.extend_last(200)
        assert packed.last.stop == 200
    packed.clear()
    assert not packed
