"""How far a stream has read: its offsets as Spark keeps them in the checkpoint, and how far the next micro-batch may go.

Owns: `StreamPosition` and its JSON, `shares` and `end_of_batch`. Pure.
    {"incarnation": "5f0c…", "table": "items", "0": 1200, "1": 1187, "missing": {"1": 40}}
A number is the next to be read: of table items an item's offset, of table events a log sequence. A partition that is not named has not
been read from: its number is 0. `missing` counts the items at or behind a number that were known to be gone already, so that nothing is
taken for lost which was not there when the stream began, and nothing goes unseen that is taken later: what is gone only grows.
Spark takes two offsets for the same when their JSON is, so what is equal is written alike.
The incarnation makes sure that a queue which was deleted and created anew under its name never meets offsets of its past.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.words.errors import InvalidRequest

INCARNATION, TABLE, MISSING = "incarnation", "table", "missing"


class StreamPosition(msgspec.Struct, frozen=True):
    """Where a stream stands."""

    incarnation: int
    table: str
    at: dict[int, int]
    missing: dict[int, int] = {}

    def to_offset(self) -> dict[str, Any]:
        """As Spark keeps it."""
        offset = {INCARNATION: f"{self.incarnation:016x}", TABLE: self.table, **_named(self.at)}
        missing = _named({partition: items for partition, items in self.missing.items() if items})
        return {**offset, MISSING: missing} if missing else offset


def _named(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): numbers[partition] for partition in sorted(numbers)}


def parse_position(offset: Mapping[str, Any]) -> StreamPosition:
    """What `StreamPosition.offset` wrote, perhaps long ago."""
    try:
        given = dict(offset)
        incarnation, table = int(given.pop(INCARNATION), 16), str(given.pop(TABLE))
        missing = _numbered(given.pop(MISSING, {}))
        return StreamPosition(incarnation, table, _numbered(given), missing)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _foreign(offset) from None


def _numbered(given: Mapping[str, Any]) -> dict[int, int]:
    found = {int(partition): number for partition, number in given.items()}
    if any(type(number) is not int or number < 0 or partition < 0 for partition, number in found.items()):
        raise ValueError
    return found


def _foreign(offset: object) -> InvalidRequest:
    return InvalidRequest(
        f"{offset!r:.200} is no offset of a Penstock stream; the checkpoint belongs to another source: start with a new checkpointLocation"
    )


def shares(backlog: Mapping[int, int], limit: int, turn: int = 0) -> dict[int, int]:
    """How many of each partition's backlog make up at most `limit`: as even as the backlogs allow, and no less than there is.

    What cannot be shared evenly goes to a few of them. With `turn`, the sum of the numbers read so far, those are others each time, so that
    also a limit below the number of partitions leaves none behind.
    """
    taken: dict[int, int] = {}
    left = max(0, limit)
    by_size = sorted((size, partition) for partition, size in backlog.items() if size > 0)
    for place, (size, partition) in enumerate(by_size):
        even = left // (len(by_size) - place)
        if size > even:  # and so are all behind it
            rest = sorted(partition for _, partition in by_size[place:])
            more = left - even * len(rest)
            for seat, one in enumerate(rest):
                taken[one] = even + ((seat - turn) % len(rest) < more)
            break
        taken[partition] = size
        left -= size
    return taken


def end_of_batch(start: Mapping[int, int], ends: Mapping[int, int], limit: int | None) -> dict[int, int]:
    """Where to stop, from `start` on: at the ends there are, or after `limit`. Partitions that were never read from and are empty stay
    unnamed; one that is not among the ends stays where it is."""
    backlog = {partition: end - start.get(partition, 0) for partition, end in ends.items()}
    backlog = {partition: size for partition, size in backlog.items() if size > 0}
    if limit is not None:
        backlog = shares(backlog, limit, sum(start.values()))
    return {**start, **{partition: start.get(partition, 0) + size for partition, size in backlog.items() if size}}


def unread_count(start: Mapping[int, int], ends: Mapping[int, int]) -> int:
    """How many numbers there are to read."""
    return sum(max(0, end - start.get(partition, 0)) for partition, end in ends.items())
