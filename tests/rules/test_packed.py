"""Packed runs beside a plain list of tuples."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.keys import PackedExtents
from penstock.rules.lanes import Extent


def _run(start: int, size: int, fresh: bool, lane: int) -> Extent:
    return Extent(start, start + size, lane, start if fresh else start + 1_000, 0)


RUNS = st.builds(_run, st.integers(0, 100), st.integers(1, 4), st.booleans(), st.integers(0, 9))
STEPS = st.lists(st.tuples(st.sampled_from(["back", "front", "step"]), RUNS), max_size=40)


@given(STEPS)
def test_it_holds_what_a_list_would(steps: list[tuple[str, Extent]]) -> None:
    packed, plain = PackedExtents(), list[Extent]()
    for verb, run in steps:
        if verb == "back":
            packed.append(run)
            plain.append(run)
        elif verb == "front":
            packed.appendleft(run)
            plain.insert(0, run)
        elif plain:
            packed.step()
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
