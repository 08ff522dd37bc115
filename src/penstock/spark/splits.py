"""Ranges of partitions, cut into what one task reads.

Owns: `Split`, what a task is told to read, and `split`. Pure.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

import msgspec

from penstock.rules.runs import count, pairs


class Split(msgspec.Struct, frozen=True):
    """Numbers of one partition: offsets of items or log sequences, as flat runs."""

    partition: int
    runs: list[int]


def split(wanted: Mapping[int, Sequence[int]], least: int = 0) -> list[Split]:
    """A split for each partition that has something, and more of them, evenly cut, until there are `least` or nothing is left to cut."""
    sizes = {partition: count(list(runs)) for partition, runs in wanted.items()}
    parts = {partition: 1 for partition, size in sizes.items() if size}
    heaviest = [(-float(size), partition) for partition, size in sizes.items() if size]  # by the size of a part
    heapify(heaviest)
    for _ in range(min(least, sum(sizes.values())) - len(parts)):
        _, partition = heaviest[0]
        parts[partition] += 1
        heapreplace(heaviest, (-sizes[partition] / parts[partition], partition))
    return [Split(partition, piece) for partition in sorted(parts) for piece in cut(wanted[partition], parts[partition])]


def cut(runs: Sequence[int], pieces: int) -> list[list[int]]:
    """Flat runs in so many pieces of sizes that differ by one at most."""
    size = count(list(runs))
    edges = [size * number // pieces for number in range(pieces + 1)]
    found: list[list[int]] = [[] for _ in range(pieces)]
    seen = piece = 0
    for start, stop in pairs(runs):
        while start < stop:
            while edges[piece + 1] <= seen:
                piece += 1
            end = min(stop, start + edges[piece + 1] - seen)
            found[piece] += (start, end)
            seen += end - start
            start = end
    return [one for one in found if one]
