"""Lines in the program's log about a queue and its partitions.

Owns: `QueueNotices`: partitions that fail, slow down and heal, what was found when one was opened, a disk without room
for new items, burials, and buried items that retention deleted. Each line names the queue. They are collected inside a
turn and logged after it, because the handlers of the program's log are the user's code, and may be slow.
A state is told when it changes, at most STATE_LINES times in STATE_WINDOW for a partition; then it is told when the
window is over, if it still differs. Burials are limited to BURIAL_LINES in BURIAL_WINDOW; the others are counted, and
the count is told with the next line or turn after it.
"""

import logging
from collections import deque
from typing import Any

from penstock.loop.partition import Partition
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.tally import BuriedItems, Tally
from penstock.words.clock import MINUTE
from penstock.words.ids import format_id
from penstock.words.logs import log_fields

BURIAL_LINES = 20
BURIAL_WINDOW = MINUTE
STATE_LINES = 10
STATE_WINDOW = MINUTE
MAX_LINES = 1_000
"""How many lines may wait to be logged; the oldest are dropped."""
_log = logging.getLogger("penstock")


class SeenPartition:
    """What was told about a partition."""

    __slots__ = ("failing", "findings", "partition", "state_lines", "window_ends")

    def __init__(self) -> None:
        self.failing = False
        self.state_lines = 0
        self.window_ends = 0
        self.partition: Partition | None = None
        self.findings: set[str] = set()
        """Of that opening of the partition."""


class QueueNotices:
    """The lines about one queue."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self.lines: deque[tuple[int, str, tuple[object, ...], dict[str, Any]]] = deque(maxlen=MAX_LINES)
        """Not logged yet."""
        self._seen: dict[int, SeenPartition] = {}
        self._without_space: set[int] = set()
        """Partitions that refuse new items because their disk is almost full."""
        self._burial_lines = 0
        self._burials_left_out = 0
        self._burial_window_ends = 0

    def flush(self) -> None:
        """Log the lines, outside of a turn. Several threads may do it at once."""
        while self.lines:
            try:
                level, text, args, about = self.lines.popleft()
            except IndexError:
                return
            _log.log(level, text, *args, extra=about)

    def note(self, level: int, text: str, *args: object, partition: int | None = None, item_id: str | None = None) -> None:
        """Note a line, to be logged after the turn."""
        self.lines.append((level, text, args, log_fields(queue=self._queue, partition=partition, item_id=item_id)))

    # -- partitions ----------------------------------------------------------------------------------

    def look(self, handle: PartitionHandle, now: int) -> None:
        """Note what has changed in a partition that a turn has used."""
        seen = self._seen.get(handle.number)
        if seen is None:
            seen = self._seen[handle.number] = SeenPartition()
        if (handle.error is not None) is not seen.failing:
            self._note_failing(handle, seen, now)
        partition = handle.partition
        if partition is None or handle.in_io:
            return
        if partition is not seen.partition:
            seen.partition, seen.findings = partition, set()
        if len(partition.log.findings) > len(seen.findings):
            self._note_findings(handle.number, partition, seen, handle.tally)
        if handle.tally.burials or self._burials_left_out:
            self._note_burials(handle, now)
        if partition.free_space.refusal or self._without_space:
            self._note_space(handle.number, partition)
        if partition.dropped_buried or partition.maintenance_error is not None:
            self._note_maintenance(handle.number, partition)

    def _note_failing(self, handle: PartitionHandle, seen: SeenPartition, now: int) -> None:
        if now >= seen.window_ends:
            seen.window_ends, seen.state_lines = now + STATE_WINDOW, 0
        if seen.state_lines == STATE_LINES:
            return
        seen.state_lines += 1
        number, seen.failing = handle.number, handle.error is not None
        if handle.error is None:
            self.note(logging.INFO, "partition %s of queue %r works again", number, self._queue, partition=number)
        else:
            what = "slow" if handle.slow and handle.in_io else "failing"
            self.note(logging.WARNING, "partition %s of queue %r is %s: %s", number, self._queue, what, handle.error, partition=number)

    def _note_findings(self, number: int, partition: Partition, seen: SeenPartition, tally: Tally) -> None:
        for finding in partition.log.findings:
            if finding not in seen.findings:
                seen.findings.add(finding)
                tally.findings += 1
                text = "at the opening of partition %s of queue %r: %s"
                self.note(logging.WARNING, text, number, self._queue, finding, partition=number)

    def _note_space(self, number: int, partition: Partition) -> None:
        """Note when the first partition refuses new items because of its disk, and when none does any more."""
        if number in self._without_space:
            if partition.free_space.has_room():
                self._without_space.discard(number)
                partition.free_space.refusal = ""
                if not self._without_space:
                    self.note(logging.INFO, "queue %r takes new items again: the disk has room", self._queue)
        elif partition.free_space.refusal:
            if not self._without_space:
                text = "queue %r takes no new items, the disk of partition %s is almost full: %s"
                self.note(logging.WARNING, text, self._queue, number, partition.free_space.refusal, partition=number)
            self._without_space.add(number)

    # -- burials -------------------------------------------------------------------------------------

    def _note_burials(self, handle: PartitionHandle, now: int) -> None:
        if now >= self._burial_window_ends:
            if self._burials_left_out:
                text = "%d more items of queue %r were buried in the last minute; list its dead letters to see them"
                self.note(logging.WARNING, text, self._burials_left_out, self._queue)
            self._burial_window_ends, self._burial_lines, self._burials_left_out = now + BURIAL_WINDOW, 0, 0
        for buried in handle.tally.take_burials():
            if self._burial_lines < BURIAL_LINES:
                self._burial_lines += 1
                self._note_burial(handle.number, buried)
            else:
                self._burials_left_out += buried.items

    def _note_burial(self, number: int, buried: BuriedItems) -> None:
        first, last = format_id(number, buried.first), format_id(number, buried.last)
        which = f"item {first}" if buried.items == 1 else f"{buried.items} items ({first} to {last})"
        verb = "was" if buried.items == 1 else "were"
        level = logging.INFO if buried.by_consumer else logging.WARNING
        reason, item_id = buried.reason or "no reason was given", first if buried.items == 1 else None
        self.note(level, "%s of queue %r %s buried: %s", which, self._queue, verb, reason, partition=number, item_id=item_id)

    # -- maintenance ---------------------------------------------------------------------------------

    def _note_maintenance(self, number: int, partition: Partition) -> None:
        """Note the buried items that retention deleted, and a failure of file maintenance."""
        for taken in partition.dropped_buried:
            first, last = format_id(number, taken.first), format_id(number, taken.last)
            text = "retention of queue %r dropped %d buried items of partition %s (%s to %s): they were not redriven or cleared in time"
            self.note(logging.WARNING, text, self._queue, taken.items, number, first, last, partition=number)
        partition.dropped_buried.clear()
        if partition.maintenance_error is not None:
            text = "maintenance of the files of partition %s of queue %r failed and will be tried again: %s"
            self.note(logging.WARNING, text, number, self._queue, partition.maintenance_error, partition=number)
            partition.maintenance_error = None
