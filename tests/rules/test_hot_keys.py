"""Few keys with long lines: compared with a naive rule, and by the number of steps.

Steps are executed lines of `penstock.rules`: they do not depend on how busy the machine is.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.rules.keys import BULK, GROUPED, KeyLines
from penstock.rules.lanes import Extent
from penstock.rules.records import LineTake
from penstock.rules.runs import offsets
from tests.partition_under_test import MemoryPartitionBackend, PartitionUnderTest


class NaiveQueue:
    """What a partition must do with keyed items of one priority, in the plainest form."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str]] = []
        self.leased: dict[int, list[tuple[int, str]]] = {}

    def free(self) -> list[tuple[int, str]]:
        """The first item of each key that no lease holds, the oldest first."""
        seen = {key for held in self.leased.values() for _, key in held}
        found = []
        for offset, key in self.waiting:
            if key not in seen:
                seen.add(key)
                found.append((offset, key))
        return found


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30)),
        st.tuples(st.just("lease"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["complete", "retry"]), st.integers(0, 5)),
    ),
    max_size=25,
)


@pytest.mark.parametrize(("bulk", "grouped"), [(0, GROUPED), (BULK, 1)])
@given(steps=STEPS)
def test_a_lease_takes_the_oldest_item_of_each_free_key(bulk: int, grouped: int, steps: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.rules.keys.BULK", bulk)  # with 0, heaps are changed entry by entry
        patch.setattr("penstock.rules.keys.GROUPED", grouped)  # with 1, items are always put into lines key by key
        partition, naive = PartitionUnderTest(MemoryPartitionBackend()), NaiveQueue()
        for what, value in steps:
            if what == "produce":
                naive.waiting += zip(partition.produce(*value, keys=value), value, strict=True)
            elif what == "lease":
                granted = partition.lease(value)
                expected = naive.free()[:value]
                assert sorted(offsets(granted.runs)) == [offset for offset, _ in expected]
                if granted.lease:
                    naive.leased[granted.lease] = expected
                    naive.waiting = [item for item in naive.waiting if item not in expected]
            elif naive.leased:
                lease = sorted(naive.leased)[value % len(naive.leased)]
                held = naive.leased.pop(lease)
                (partition.complete if what == "complete" else partition.retry)(lease)
                if what == "retry":
                    naive.waiting = sorted([*naive.waiting, *held])
            check_heads(partition.wrapped.state.keys)
        partition.check()


def check_heads(keys: KeyLines) -> None:
    """Entries that leases do not check are valid, and none is there twice."""
    if not keys.maybe_stale:
        for lane, heads in enumerate(keys.free_heads):
            assert len(heads) == len(set(heads))
            assert all(keys.head(lane, *entry) is not None for entry in heads)


@given(
    keys=st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    leases=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.booleans()), max_size=20),
)
@example(keys=list("ccbdc"), leases=[(2, 1, False), (6, 4, True)])
def test_units_are_consecutive_items_of_their_keys(keys: list[str], leases: list[tuple[int, int, bool]]) -> None:
    """`per_key` is the most items of a key: a unit that begins with items that earlier leases passed over may end where
    these stopped reading."""
    partition = PartitionUnderTest(MemoryPartitionBackend())
    partition.produce(*keys, keys=keys)
    lines: dict[str, list[int]] = defaultdict(list)
    for offset, key in enumerate(keys):
        lines[key].append(offset)
    held: dict[int, set[str]] = {}
    read = 0  # earlier leases have read at least the items before this offset
    for want, per_key, release in leases:
        if release and held:
            partition.complete(lease := min(held))
            del held[lease]
        granted = partition.lease(want, per_key=per_key)
        taken: dict[str, list[int]] = defaultdict(list)
        for offset in offsets(granted.runs):
            taken[keys[offset]].append(offset)
        for key, unit in taken.items():
            assert not any(key in others for others in held.values()), f"{key} is held by another lease"
            assert unit == lines[key][: len(unit)] and len(unit) <= per_key
            del lines[key][: len(unit)]
        if granted.count < want:  # then every free key has its unit
            for key, line in lines.items():
                if line and not any(key in others for others in held.values()):
                    assert taken[key], f"{key} is free, but no item of it was leased"
                    assert len(taken[key]) == per_key or taken[key][0] < read <= line[0], f"the unit of {key} is too short"
        read = len(keys) if granted.count < want else max([read, *(offset + 1 for offset in offsets(granted.runs))])
        if granted.lease:
            held[granted.lease] = set(taken)


def test_a_released_key_is_found_again_in_a_small_and_a_large_heap() -> None:
    for others in (0, 1_000):
        keys = KeyLines()
        for key in range(1, others + 3):
            keys.pass_over_each([key, key], 10 * key, 5, 0)
            keys.pass_over(key, Extent(10 * key + 5, 10 * key + 6, 5, 10 * key + 5, 0))
        keys.take([LineTake(2, 5, 20, 22)], lease=7)
        assert 2 not in [key for (_, _, key), _ in keys.free_lines(5, want=1)]
        keys.release([2, 2], lease=7)
        assert [entry for entry, _ in keys.free_lines(5, want=1)][:2] == [(10, 10, 1), (25, 25, 2)]


# -- steps -------------------------------------------------------------------------------------------


@contextmanager
def counted_steps() -> Iterator[Callable[[], int]]:
    """Count the executed lines of `penstock.rules` in the block."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if event == "call":
            return trace if "/penstock/rules/" in frame.f_code.co_filename else None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


def drain_steps(items: int, keys: int, per_key: int, *, singly: bool = False) -> int:
    """How many steps it takes to lease and complete so many items."""
    partition = PartitionUnderTest(MemoryPartitionBackend())
    for start in range(0, items, 250):
        names = [f"key {at * 7919 % keys}" for at in range(start, start + 250)]
        partition.produce(*names, keys=names)
    done = 0
    with counted_steps() as steps:
        while (granted := partition.lease(250, per_key=per_key)).lease:
            for offset in offsets(granted.runs) if singly else ():
                partition.complete(granted.lease, [offset])
            if not singly:
                partition.complete(granted.lease)
            done += granted.count
        assert done == items
        return steps()


@pytest.mark.parametrize(("keys", "per_key"), [(1, 100), (10, 25), (250, 1)])
def test_the_steps_of_a_drain_grow_with_its_items(keys: int, per_key: int) -> None:
    small, large = drain_steps(1_000, keys, per_key), drain_steps(4_000, keys, per_key)
    assert large < 5 * small
    assert large < 150 * 4_000


def test_units_settled_one_by_one_take_steps_in_proportion() -> None:
    """The same items, in units of 25 and of 250."""
    small, large = drain_steps(500, 1, 25, singly=True), drain_steps(500, 1, 250, singly=True)
    assert large < 2 * small


def test_a_lease_does_not_walk_the_lines_of_busy_keys() -> None:
    partition = PartitionUnderTest(MemoryPartitionBackend())
    names = ["busy"] * 2_000 + ["other"] * 3
    partition.produce(*names, keys=names)
    assert partition.lease(2).runs == [0, 1, 2_000, 2_001]
    with counted_steps() as steps:
        for _ in range(10):
            assert not partition.lease(100).lease
        assert steps() < 10 * 200


def test_a_hot_key_is_kept_as_few_extents() -> None:
    partition = PartitionUnderTest(MemoryPartitionBackend())
    names = ["hot"] * 5_000
    partition.produce(*names, keys=names)
    partition.lease(2)
    ((_, line),) = partition.wrapped.state.keys.lines()
    assert (len(line.waiting), line.waiting.items) == (1, 4_999)
    assert len(partition.wrapped.state.passed_over.runs) == 2
