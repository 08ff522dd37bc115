"""How far a stream has read: its offsets, as Spark keeps them in the checkpoint, and where the next micro-batch ends.

Owns: `StreamPosition` and its JSON, `check_not_after_backup`, `end_at_hole`, `shares`, `end_of_batch`,
`end_of_event_batch` and `end_within_bytes`. No I/O.
    {"incarnation": "5f0c…", "table": "items", "0": 1200, "1": 1187, "missing": {"1": 40}, "restored": 1790000000000000}
    {"incarnation": "5f0c…", "table": "events", "0": 17, "1": 4, "rows": {"1": 250}}
Each partition has the next number to read: an item offset for table items, a log sequence for table events. A partition
without a number was not read yet; its number is 0. A frame of a log may hold any number of events, so `rows` says how
many events of the frame with that sequence were read already. `missing` counts, per partition, the items from that
number on that retention or damage had removed when the offset was made. This count never shrinks. If a later count is
larger, items were removed before the stream read them.
Spark compares offsets as JSON, so equal positions must give equal JSON.
The incarnation is there to refuse offsets of a queue that was deleted and created again under the same name.
The latest offset in a query's progress, which Spark only shows, has also `backlog`, the numbers after the last
micro-batch, and `lagSeconds`, how old the first of them is.
`restored` names the last restore of the queue from a backup, if there was one. An offset from before a restore is right
as far as the backup reaches, and is refused if it has read further.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.reports import QueueDescription
from penstock.rules.runs import pairs
from penstock.words.errors import InvalidRequest

INCARNATION, TABLE, MISSING, RESTORED, ROWS = "incarnation", "table", "missing", "restored", "rows"
BACKLOG, LAG = "backlog", "lagSeconds"
QUEUES = "queues"


class StreamPosition(msgspec.Struct, frozen=True):
    """An offset of a stream."""

    incarnation: int
    table: str
    at: dict[int, int]
    missing: dict[int, int] = {}
    restored: int = 0
    """When the queue was last restored from a backup; 0: never."""
    rows: dict[int, int] = {}
    """For table events: how many rows of the next frame were read already, where some were."""

    def to_offset(self) -> dict[str, Any]:
        """The offset as Spark keeps it in its checkpoint."""
        offset = {INCARNATION: f"{self.incarnation:016x}", TABLE: self.table, **_named(self.at)}
        more = {MISSING: _named(self.missing, least=1), RESTORED: self.restored, ROWS: _named(self.rows, least=1)}
        return offset | {name: value for name, value in more.items() if value}


def _named(numbers: Mapping[int, int], least: int = 0) -> dict[str, int]:
    return {str(partition): numbers[partition] for partition in sorted(numbers) if numbers[partition] >= least}


def parse_position(offset: Mapping[str, Any]) -> StreamPosition:
    """Parse what `StreamPosition.to_offset` wrote. InvalidRequest if it is something else."""
    if isinstance(offset.get(QUEUES), dict):
        raise InvalidRequest(
            f"the checkpoint is of a stream of several queues ({', '.join(offset[QUEUES])!r:.200}), and queue names one; give its name as "
            "queuePattern to continue with it alone, or start with a new checkpointLocation"
        )
    try:
        given = {name: value for name, value in offset.items() if name not in (BACKLOG, LAG)}
        incarnation, table = int(given.pop(INCARNATION), 16), str(given.pop(TABLE))
        missing, restored, rows = _numbered(given.pop(MISSING, {})), int(given.pop(RESTORED, 0)), _numbered(given.pop(ROWS, {}))
        return StreamPosition(incarnation, table, _numbered(given), missing, restored, rows)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _foreign(offset) from None


def parse_positions(offset: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The offset of each queue, of a stream of several queues. InvalidRequest if it is something else."""
    found = offset.get(QUEUES)
    if INCARNATION in offset:
        raise InvalidRequest(
            "the checkpoint is of a stream of one queue, and several are read; name this queue alone, or start with a new "
            'checkpointLocation, and with startingOffsets={"<its name>": <its last endOffset>} to continue'
        )
    if not isinstance(found, dict):
        raise _foreign(offset)
    for each in found.values():
        parse_position(each)
    return {**found}


def _numbered(given: Mapping[str, Any]) -> dict[int, int]:
    found = {int(partition): number for partition, number in given.items()}
    if any(type(number) is not int or number < 0 or partition < 0 for partition, number in found.items()):
        raise ValueError
    return found


def _foreign(offset: Mapping[str, Any]) -> InvalidRequest:
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
            if number + (position.rows.get(partition, 0) > 0) > ends.get(partition, 0):
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


def end_of_event_batch(
    start: StreamPosition, ends: Mapping[int, int], limit: int, frames: Callable[[int], Iterator[tuple[int, int]]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Where a micro-batch of events ends: at `ends`, or after `limit` rows. Gives the sequence of each partition, and
    the rows that are read of that frame. `frames` gives the frames of a partition from `start` on, with their rows.

    Only as many frames are counted as are needed. The partitions get even shares; what some do not need, others get.
    """
    behind = sorted(partition for partition, end in ends.items() if end > start.at.get(partition, 0))
    turn = sum(start.at.values()) % len(behind) if behind else 0  # a small limit reads other partitions each time
    counts = {partition: _FrameCount(frames(partition), start, partition) for partition in [*behind[turn:], *behind[:turn]]}
    _take_shares(counts, limit)
    at, rows = dict(start.at), dict(start.rows)
    for partition, reached in counts.items():
        at[partition], rows[partition] = (ends[partition], 0) if reached.at_end else (reached.sequence, reached.rows)
    return {partition: number for partition, number in at.items() if number}, rows


def _take_shares(counts: "Mapping[int, _FrameCount | _ByteCount]", limit: int) -> None:
    """Share `limit` among the partitions, evenly; what some do not need, others get."""
    left, unfinished = limit, [*counts]
    while left > 0 and unfinished:
        even, remainder = divmod(left, len(unfinished))
        wanted = {partition: even + (index < remainder) for index, partition in enumerate(unfinished)}
        taken = {partition: counts[partition].take(share) for partition, share in wanted.items()}
        left -= sum(taken.values())
        unfinished = [partition for partition in unfinished if taken[partition] == wanted[partition]]


class _FrameCount:
    """Counts rows of a partition's frames, from a position on."""

    def __init__(self, frames: Iterator[tuple[int, int]], start: StreamPosition, partition: int) -> None:
        self._frames = frames
        self.sequence, self.rows = start.at.get(partition, 0), start.rows.get(partition, 0)
        """The next frame, and how many of its rows are counted."""
        self._known: tuple[int, int] | None = None
        """A frame of which some rows are not counted yet."""
        self.at_end = False

    def take(self, limit: int) -> int:
        """Count `limit` rows more; gives how many there are."""
        left = limit
        while left > 0:
            frame = self._known or next(self._frames, None)
            if frame is None:
                self.at_end = True
                break
            sequence, total = frame
            done = self.rows if sequence == self.sequence else 0
            more = min(left, max(0, total - done))
            left -= more
            self._known = frame if done + more < total else None
            self.sequence, self.rows = (sequence, done + more) if self._known else (sequence + 1, 0)
        return limit - left


def end_within_bytes(
    start: Mapping[int, int], ends: Mapping[int, int], limit: int, frames: Callable[[int], Iterator[tuple[int, int, int]]]
) -> dict[int, int]:
    """Where a micro-batch from `start` to `ends` must end to have about `limit` bytes, and one item at least. `frames`
    gives the frames of a partition: its first offset, the offset after its last one, and its size. Items of a frame
    count as equally large."""
    behind = sorted(partition for partition, end in ends.items() if end > start.get(partition, 0))
    if not behind:
        return dict(ends)
    turn = sum(start.values()) % len(behind)
    order = [*behind[turn:], *behind[:turn]]
    counts = {partition: _ByteCount(frames(partition), start.get(partition, 0), ends[partition]) for partition in order}
    _take_shares(counts, limit)
    reached = {partition: one.offset for partition, one in counts.items()}
    if all(reached[partition] == start.get(partition, 0) for partition in behind):
        reached[order[0]] += 1
    return {partition: number for partition, number in {**ends, **reached}.items() if number}


class _ByteCount:
    """Counts bytes of a partition's items, from an offset to an end."""

    def __init__(self, frames: Iterator[tuple[int, int, int]], start: int, end: int) -> None:
        self._frames = frames
        self.offset, self._end = start, end
        self._known: tuple[int, int, int] | None = None
        """A frame of which some items are not counted yet."""

    def take(self, limit: int) -> int:
        """Count items of `limit` bytes more; gives how many bytes there are, or `limit` if there are more."""
        left = limit
        while self.offset < self._end:
            frame = self._known or next(self._frames, None)
            if frame is None:  # what is missing in the log takes no space
                self.offset = self._end
                break
            first, stop, size = frame
            self.offset, stop = max(self.offset, min(first, self._end)), min(stop, self._end)
            items, each = max(0, stop - self.offset), max(1, size // max(1, frame[1] - first))
            if items * each > left:
                self._known = frame
                self.offset += left // each
                return limit
            left -= items * each
            self._known, self.offset = None, max(self.offset, stop)
        return limit - left


def unread_count(start: Mapping[int, int], ends: Mapping[int, int]) -> int:
    """How many numbers are between `start` and `ends`."""
    return sum(max(0, end - start.get(partition, 0)) for partition, end in ends.items())
