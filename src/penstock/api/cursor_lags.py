"""How far a cursor is behind the end of its queue.

Owns: `PartitionLag` and `cursor_lags`, which the API, the command line and the JSON API share.
"""

from collections.abc import Mapping
from typing import NamedTuple


class PartitionLag(NamedTuple):
    """How far a cursor has read in one partition."""

    partition: int
    position: int
    """The offset of the next item to read."""
    end: int
    """The offset of the next item that is produced."""
    lag: int
    """Items that are kept and not read."""


def cursor_lags(position: Mapping[int, int], oldest: Mapping[int, int], ends: Mapping[int, int]) -> list[PartitionLag]:
    """The lag in each partition of `ends`, by number.

    position: the next offset to read, by partition. oldest, ends: what `FindOffsets` answers for "oldest" and "newest".
    Items that retention has deleted do not count: they cannot be read.
    """
    found = []
    for partition, end in sorted(ends.items()):
        first = oldest.get(partition, 0)
        at = position.get(partition, first)
        found.append(PartitionLag(partition, at, end, max(0, end - max(at, first))))
    return found
