"""Fences that are inherited by one partition after the other, resize after resize."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loop.resize import merge_fence_specs
from penstock.rules.fences import pack_slots, unpack_slots
from penstock.rules.records import FenceSpec, pack_keys, unpack_keys
from tests.broker.broker_under_test import BrokerUnderTest

WIDTHS = (2, 5, 3, 7, 1)


@pytest.mark.parametrize("broker", ["memory", pytest.param("files", marks=pytest.mark.long)], indirect=True)
def test_resizes_over_an_unserved_backlog_stay_cheap(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    for number in range(25):
        queue.produce(*(f"{n}" for n in range(10)), keys=[f"k{n}" for n in range(10)])
        queue.resize(WIDTHS[number % len(WIDTHS)])
    assert sum(1 for handle in queue.loop.engine.handles.values() for _ in handle.state.keys.fences) < 2_000
    assert sorted(queue.drain()) == sorted(f"{n}" for n in range(10) for _ in range(25))


NUMBERS = st.integers(0, 3)
BARRIERS = st.lists(
    st.builds(
        lambda source, mark, since, slots, keys: FenceSpec(0, source, mark, since, slots and pack_slots(slots), pack_keys(keys)),
        NUMBERS, st.integers(1, 5), st.sampled_from([-1, 0, 4]), st.sets(st.integers(0, 5), min_size=1), st.just(()),
    )
    | st.builds(
        lambda source, mark, since, keys: FenceSpec(0, source, mark, since, None, pack_keys(sorted(keys))),
        NUMBERS, st.integers(1, 5), st.sampled_from([-1, 0, 4]), st.sets(st.integers(1, 5 + (1 << 14)), min_size=1),
    ),
    max_size=8,
)  # fmt: skip


def mark(specs: list[FenceSpec], source: int, since: int, key: int) -> int:
    """How far a key of that place waits for a source; 0: not at all."""
    found = [0]
    for one in specs:
        covers = key in unpack_keys(one.keys) if one.slots is None else key & 16383 in unpack_slots(one.slots)
        if (one.source, one.since) == (source, since) and covers:
            found.append(one.mark)
    return max(found)


@given(BARRIERS)
def test_merged_fences_hold_what_all_of_them_held(specs: list[FenceSpec]) -> None:
    fewer = merge_fence_specs(specs)
    for source in range(4):
        for since in (-1, 0, 4):
            for key in (*range(6), *((1 << 14) + n for n in range(6))):
                assert mark(fewer, source, since, key) == mark(specs, source, since, key)
    named = [(one.source, one.since, slot) for one in fewer if one.slots is not None for slot in unpack_slots(one.slots)]
    assert len(named) == len(set(named))
