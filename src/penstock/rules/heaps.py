"""Reading a heap in order without changing it.

Owns: `in_order`.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

Entry = TypeVar("Entry", bound=tuple[Any, ...])


def in_order(heap: Sequence[Entry]) -> Iterator[Entry]:
    """The entries of a heap (heapq), lowest first. Reading the first k costs O(k log k), however large the heap is."""
    edge = [(heap[0], 0)] if heap else []
    while edge:
        entry, index = heappop(edge)
        yield entry
        for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
            heappush(edge, (heap[child], child))
