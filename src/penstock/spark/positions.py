"""How far a stream has read: its offsets, as Spark keeps them in the checkpoint, and where the next micro-batch ends.

Owns: `StreamPosition` and its JSON, `check_not_after_backup`, `end_at_hole`, `shares` and `end_of_batch`. No I/O.
    {"incarnation": "5f0c…", "table": "items", "0": 1200, "1": 1187, "missing": {"1": 40}, "restored": 1790000000000000}
Each partition has the next number to read: an item offset for table items, a log sequence for table events. A partition
without a number was not read yet; its number is 0. `missing` counts, per partition, the items from that number on that
retention or damage had removed when the offset was made. This count never shrinks. If a later count is larger, items
were removed before the stream read them.
Spark compares offsets as JSON, so equal positions must give equal JSON.
The incarnation is there to refuse offsets of a queue that was deleted and created again under the same name.
`restored` names the last restore of the queue from a backup, if there was one. An offset from before a restore is right
as far as the backup reaches, and is refused if it has read further.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.reports import QueueDescription
from penstock.rules.runs import pairs
from penstock.words.errors import InvalidRequest

INCARNATION, TABLE, MISSING, RESTORED = "incarnation", "table", "missing", "restored"


class StreamPosition(msgspec.Struct, frozen=True):
    """An offset of a stream."""

    incarnation: int
    table: str
    at: dict[int, int]
    missing: dict[int, int] = {}
    restored: int = 0
    """When the queue was last restored from a backup; 0: never."""

    def to_offset(self) -> dict[str, Any]:
        """The offset as Spark keeps it in its checkpoint."""
        offset = {INCARNATION: f"{self.incarnation:016x}", TABLE: self.table, **_named(self.at)}
        missing = _named({partition: items for partition, items in self.missing.items() if items})
        restored = {RESTORED: self.restored} if self.restored else {}
        return {**offset, MISSING: missing, **restored} if missing else {**offset, **restored}


def _named(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): numbers[partition] for partition in sorted(numbers)}


def parse_position(offset: Mapping[str, Any]) -> StreamPosition:
    """Parse what `StreamPosition.to_offset` wrote. InvalidRequest if it is something else."""
    try:
        given = dict(offset)
        incarnation, table = int(given.pop(INCARNATION), 16), str(given.pop(TABLE))
        missing, restored = _numbered(given.pop(MISSING, {})), int(given.pop(RESTORED, 0))
        return StreamPosition(incarnation, table, _numbered(given), missing, restored)
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


def last_restore(queue: QueueDescription) -> int:
    """When a queue was last restored from a backup; 0: never."""
    return queue.restores[-1].at if queue.restores else 0


def check_not_after_backup(position: StreamPosition, queue: QueueDescription) -> None:
    """Raise InvalidRequest if a position has read what is not in the backup from which the queue was restored since."""
    if position.restored not in {0, *(point.at for point in queue.restores)}:
        raise InvalidRequest(
            f"the checkpoint is of another copy of queue {queue.name!r}, which was restored from a backup at another time; "
            "start with a new checkpointLocation"
        )
    for point in queue.restores:
        ends = {partition: sequence + 1 if position.table == "events" else offset for partition, offset, sequence in point.ends}
        for partition, number in position.at.items() if point.at > position.restored else ():
            if number > ends.get(partition, 0):
                raise InvalidRequest(
                    f"queue {queue.name!r} was restored from a backup that ends at {ends.get(partition, 0)} in partition {partition}, and "
                    f"this stream has read up to {number}, before the restore or in another copy; start with a new checkpointLocation"
                )


def end_at_hole(at: int, end: int, holes: Sequence[int]) -> tuple[int, int]:
    """Where reading from `at` to `end` begins and ends without the offsets of holes: after one that begins at `at`, and
    at the next one."""
    for start, stop in pairs(holes):
        if start <= at < stop:
            at = stop
        elif at < start < end:
            return at, start
    return at, max(at, end)


def shares(backlog: Mapping[int, int], limit: int, turn: int = 0) -> dict[int, int]:
    """Share `limit` items among the partitions, as evenly as their backlogs allow; less only if there is less.

    The remainder of the division goes to a few partitions. `turn`, the sum of the numbers read so far, makes these
    other partitions each time, so that a limit below the number of partitions still reads all of them.
    """
    taken: dict[int, int] = {}
    left = max(0, limit)
    by_size = sorted((size, partition) for partition, size in backlog.items() if size > 0)
    for index, (size, partition) in enumerate(by_size):
        even = left // (len(by_size) - index)
        if size > even:  # and so are all after it
            rest = sorted(partition for _, partition in by_size[index:])
            remainder = left - even * len(rest)
            for number, one in enumerate(rest):
                taken[one] = even + ((number - turn) % len(rest) < remainder)
            break
        taken[partition] = size
        left -= size
    return taken


def end_of_batch(start: Mapping[int, int], ends: Mapping[int, int], limit: int | None) -> dict[int, int]:
    """Where a micro-batch from `start` on ends: at `ends`, or after `limit` items. An empty partition that was never
    read gets no number; a partition without an end keeps its number."""
    backlog = {partition: end - start.get(partition, 0) for partition, end in ends.items()}
    backlog = {partition: size for partition, size in backlog.items() if size > 0}
    if limit is not None:
        backlog = shares(backlog, limit, sum(start.values()))
    return {**start, **{partition: start.get(partition, 0) + size for partition, size in backlog.items() if size}}


def unread_count(start: Mapping[int, int], ends: Mapping[int, int]) -> int:
    """How many numbers are between `start` and `ends`."""
    return sum(max(0, end - start.get(partition, 0)) for partition, end in ends.items())
