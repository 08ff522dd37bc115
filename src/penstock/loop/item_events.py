"""What happened in a partition, read from its log.

Owns: `told` (frame by frame, in runs: for volume), `events` (item by item) and `item_history` (one item's).
Works on a log that its owner has open and on a published one. Reading begins at a Base, the first of every segment, so any stretch of
segments can be read by itself. What retention took of the log is not told: an item's history may begin late. In a segment that retention
thinned out only the producing of the items that it kept is told, until the next Base.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.logs import codec
from penstock.logs.frame import DROPPED
from penstock.logs.log import Frame, FrameType, Gap, ReadableLog
from penstock.rules import base
from penstock.rules.events import Event, EventReplay, EventRuns
from penstock.rules.records import Lost
from penstock.words.clock import Moment


class FrameEvents(NamedTuple):
    """What one frame tells."""

    sequence: int
    happenings: list[EventRuns]


def frame_events(log: ReadableLog, start_sequence: int = 0, stop_sequence: int | None = None) -> Iterator[FrameEvents]:
    """What the frames of these sequences (from one, before the other) tell; frames that tell nothing are left out."""
    reading = _Reading()
    for found in log.frames(_before(log, start_sequence)):
        if stop_sequence is not None and (found.first_sequence if isinstance(found, Gap) else found.sequence) >= stop_sequence:
            return
        happenings = reading.gap(found) if isinstance(found, Gap) else reading.frame(found)
        if happenings and reading.sequence >= start_sequence:
            yield FrameEvents(reading.sequence, happenings)


def events(log: ReadableLog, start_sequence: int = 0, stop_sequence: int | None = None) -> Iterator[Event]:
    """What happened to each item."""
    return (event for _, happenings in frame_events(log, start_sequence, stop_sequence) for one in happenings for event in one.events())


def item_history(log: ReadableLog, offset: int, stop_sequence: int | None = None) -> list[Event]:
    """Everything that is known to have happened to an item, oldest first."""
    begins = [facts.first_sequence for facts in log.segments() if facts.base_offset <= offset]
    since = frame_events(log, begins[-1] if begins else 0, stop_sequence)
    found = (one.event_of(offset) for _, happenings in since for one in happenings)
    return [event for event in found if event is not None]


def _before(log: ReadableLog, start: int) -> int:
    """The sequence behind which to read, so that the state is known at `start`: that before the last Base which is not too late."""
    begins = [facts.first_sequence for facts in log.segments()[1:] if facts.first_sequence <= start]
    return begins[-1] - 1 if begins else 0


class _Reading:
    """Where a pass over the frames stands."""

    def __init__(self) -> None:
        self.sequence = 0
        self._teller = EventReplay()
        self._now = Moment(0, 0)
        self._known = True
        """Whether the teller's state is what the log had told by here."""

    def gap(self, gap: Gap) -> list[EventRuns]:
        """Damage takes items; what retention dropped only cannot be told."""
        self._known = self._known and gap.first_sequence == self.sequence + 1 and gap.why != DROPPED
        self.sequence = max(self.sequence, gap.last_sequence)
        if gap.why == DROPPED:
            return []
        teller = self._teller if self._known else EventReplay()
        happenings = teller.apply(Lost([gap.start, gap.stop]), self._now)
        return [one._replace(reason=f"damage: {gap.why} ({gap.where})") for one in happenings]

    def frame(self, frame: Frame) -> list[EventRuns]:
        follows, self.sequence, self._now = frame.sequence == self.sequence + 1, frame.sequence, Moment(frame.elapsed, frame.wall)
        if frame.type is FrameType.BASE:
            self._teller, self._known = EventReplay(base.load(frame.body)), True
            return []
        self._known = self._known and follows
        if not self._known and frame.type is not FrameType.DATA:
            return []
        teller = self._teller if self._known else EventReplay()  # what an item was produced as, it says by itself
        return [one for record in codec.decode_frame(frame, outline=True) for one in teller.apply(record, self._now)]
