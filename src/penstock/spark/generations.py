"""The generations of a queue's items, by which the items of a key are in order through resizes.

Owns: `Generations`. Every resize begins a generation, and a generation's number is the version of its slot map; the
first is 1. Within a generation all items of a key are in one partition, so generation and offset give the order of a
key. The catalog has, for the last 32 resizes or more, the next offset of each partition at that moment (its mark);
items from before the first known mark count as one generation. A partition without a mark took no items before that
resize, or kept its slots through it: its generation begins where its last one did. A retired partition without any mark
was retired before the first known one, in a catalog of an earlier version: all its items are of the first generation.
An item that a resize forwards is read where it was produced, so its generation is that of its production.
"""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from penstock.reports import QueueDescription

END = (1 << 63) - 1
"""An offset after all items."""


class Generations:
    """Where each known generation of a queue begins in each partition."""

    def __init__(self, queue: QueueDescription) -> None:
        """queue: with its marks."""
        self._first = min(queue.marks, default=2) - 1
        """The generation of everything before the first known mark."""
        self._starts: list[dict[int, int]] = []
        before = {number: END for number in queue.retired if not any(number in marks for marks in queue.marks.values())}
        for version in sorted(queue.marks):
            before = before | queue.marks[version]
            self._starts.append(before)

    def next_stop(self, at: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """Where reading from `at` to `ends` must pause: at the end of the first generation that is not read."""
        for starts in self._starts:
            stops = {partition: min(end, starts.get(partition, 0)) for partition, end in ends.items()}
            if any(at.get(partition, 0) < stop for partition, stop in stops.items()):
                return stops
        return dict(ends)

    def column(self, partition: int, offsets: pa.Array) -> pa.Array:
        """The generation of each of a partition's items, whose offsets ascend."""
        starts = [one.get(partition, 0) for one in self._starts]
        found = pa.repeat(pa.scalar(self._first, pa.int32()), len(offsets))
        for start in starts if len(offsets) else ():
            found = pc.add(found, pc.greater_equal(offsets, pa.scalar(start, pa.int64())).cast(pa.int32()))
        return found

    def __repr__(self) -> str:
        return f"Generations({self._first} to {self._first + len(self._starts)})"
