"""`in_order`, compared with sorting."""

from heapq import heapify
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.heaps import in_order


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))), st.integers(0, 20))
def test_a_heap_is_read_in_order_and_stays_as_it_is(entries: list[tuple[int, int]], first: int) -> None:
    heap = [*entries]
    heapify(heap)
    before = [*heap]
    assert [*in_order(heap)] == sorted(entries)
    assert [*islice(in_order(heap), first)] == sorted(entries)[:first]
    assert heap == before
