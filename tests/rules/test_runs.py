"""RunSet and the flat form of runs, compared with plain sets."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.runs import MOST_CHANGES, RunSet, count, from_offsets, offsets, pairs

EDGES = st.tuples(st.integers(0, 40), st.integers(0, 40))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), EDGES), max_size=30)


def both(steps: list[tuple[str, tuple[int, int]]]) -> tuple[RunSet, set[int]]:
    runs, plain = RunSet(), set[int]()
    for what, (start, stop) in steps:
        getattr(runs, what)(start, stop)
        plain = plain | set(range(start, stop)) if what == "add" else plain - set(range(start, stop))
    return runs, plain


@given(STEPS)
def test_a_run_set_holds_what_a_set_would(steps: list[tuple[str, tuple[int, int]]]) -> None:
    runs, plain = both(steps)
    assert offsets(runs.runs) == sorted(plain)
    assert (len(runs), bool(runs)) == (len(plain), bool(plain))
    assert [offset in runs for offset in range(-1, 42)] == [offset in plain for offset in range(-1, 42)]


LATER = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "add_later", "remove_later", "contains", "within"]), st.lists(EDGES, min_size=1, max_size=4)
    ),
    max_size=25,
)


@pytest.mark.parametrize("few", [0, 1_000])
@given(steps=LATER)
def test_changes_that_are_merged_later_seem_done_at_once(few: int, steps: list[tuple[str, list[tuple[int, int]]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.rules.runs.FEW_CHANGES", few)
        runs, plain = RunSet(), set[int]()
        for what, windows in steps:
            chosen = {offset for window in windows for offset in range(*window)}
            if what == "contains":
                assert (windows[0][0] in runs) == (windows[0][0] in plain)
            elif what == "within":
                assert offsets(runs.within(*windows[0])) == sorted(set(range(*windows[0])) & plain)
            elif what.startswith("add"):
                chosen -= plain
                (runs.add_later if what == "add_later" else runs.add_all)(from_offsets(sorted(chosen, reverse=True)))
                plain |= chosen
            else:
                chosen &= plain
                (runs.remove_later if what == "remove_later" else runs.remove_all)(from_offsets(sorted(chosen, reverse=True)))
                plain -= chosen
            assert len(runs) == len(plain)
        assert offsets(runs.runs) == sorted(plain)


def test_a_wrong_later_change_is_corrected_when_it_is_merged() -> None:
    runs = RunSet([0, 200])
    runs.add_later([edge for start in range(100, 300, 2) for edge in (start, start + 1)])
    assert (offsets(runs.runs)[-1], len(runs)) == (298, 250)
    runs.remove_later([edge for start in range(200, 400) for edge in (start, start + 1)])
    assert (runs.runs, len(runs)) == ([0, 200], 200)


def test_scattered_changes_are_not_kept_without_limit() -> None:
    runs = RunSet()
    for start in range(0, 3 * MOST_CHANGES, 4_000):
        runs.add_later([edge for at in range(start, start + 4_000, 4) for edge in (at, at + 1)])
    assert len(runs._changes) < MOST_CHANGES
    assert len(runs) == -(-3 * MOST_CHANGES // 4_000) * 1_000


@given(STEPS)
def test_its_runs_are_ascending_disjoint_and_do_not_touch(steps: list[tuple[str, tuple[int, int]]]) -> None:
    edges = both(steps)[0].runs
    assert all(before < after for before, after in pairwise(edges))


@given(STEPS, EDGES)
def test_within_and_missing_divide_a_range(steps: list[tuple[str, tuple[int, int]]], window: tuple[int, int]) -> None:
    runs, plain = both(steps)
    inside = set(range(*window))
    assert offsets(runs.within(*window)) == sorted(inside & plain)
    assert offsets(runs.missing(*window)) == sorted(inside - plain)


@given(STEPS, st.integers(0, 45))
def test_first_missing_is_the_first_not_in_the_set(steps: list[tuple[str, tuple[int, int]]], start: int) -> None:
    runs, plain = both(steps)
    assert runs.first_missing(start) == next(offset for offset in range(start, 100) if offset not in plain)


@given(STEPS, STEPS)
def test_whole_sets_are_added_and_taken_out(mine: list[tuple[str, tuple[int, int]]], others: list[tuple[str, tuple[int, int]]]) -> None:
    (runs, plain), (other, other_plain) = both(mine), both(others)
    assert offsets(RunSet(runs.runs).subtract(other.runs)) == sorted(plain - other_plain)
    runs.add_all(other.runs)
    assert offsets(runs.runs) == sorted(plain | other_plain)
    runs.clear()
    assert (runs.runs, len(runs)) == ([], 0)


@given(st.lists(st.integers(0, 30)))
def test_flat_runs_keep_the_order_of_their_offsets(values: list[int]) -> None:
    runs = from_offsets(values)
    assert offsets(runs) == values
    assert count(runs) == len(values)
    assert sum(stop - start for start, stop in pairs(runs)) == len(values)


@pytest.mark.parametrize("use", [lambda runs: list(pairs(runs)), RunSet])
def test_half_a_run_is_an_error(use: Callable[[list[int]], object]) -> None:
    with pytest.raises(ValueError, match="shorter"):
        use([1, 2, 3])
