"""RunSet and the flat form of runs, compared with plain sets."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.runs import RunSet, count, from_offsets, offsets, pairs

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
