"""The events of a partition's items, read from its log.

Owns: `frame_events` (by frame, in runs of items: for many items), `events` (by item) and `item_history` (of one item).
Works on the owner's log and on a published one. Reading begins at a Base, the first frame of a segment, so any range of
segments can be read alone. Events in segments that retention deleted are missing: an item's history may begin late. In
a segment that retention rewrote, only the Produced events of the remaining items are found, up to the next Base.
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
    """The events of one frame."""

    sequence: int
    runs: list[EventRuns]


def frame_events(log: ReadableLog, start_sequence: int = 0, stop_sequence: int | None = None) -> Iterator[FrameEvents]:
    """The events of the frames from one sequence to before another; frames without events are left out."""
    reading = _Pass()
    for found in log.frames(_before(log, start_sequence)):
        if stop_sequence is not None and (found.first_sequence if isinstance(found, Gap) else found.sequence) >= stop_sequence:
            return
        runs = reading.gap(found) if isinstance(found, Gap) else reading.frame(found)
        if runs and reading.sequence >= start_sequence:
            yield FrameEvents(reading.sequence, runs)


def events(log: ReadableLog, start_sequence: int = 0, stop_sequence: int | None = None) -> Iterator[Event]:
    """The events of the frames from one sequence to before another, item by item."""
    return (event for _, runs in frame_events(log, start_sequence, stop_sequence) for one in runs for event in one.events())


def item_history(log: ReadableLog, offset: int, stop_sequence: int | None = None) -> list[Event]:
    """All known events of an item, oldest first."""
    begins = [facts.first_sequence for facts in log.segments() if facts.base_offset <= offset]
    since = frame_events(log, begins[-1] if begins else 0, stop_sequence)
    found = (one.event_of(offset) for _, runs in since for one in runs)
    return [event for event in found if event is not None]


def _before(log: ReadableLog, start: int) -> int:
    """The sequence after which to read so that the state is known at `start`: just before the last Base up to there."""
    begins = [facts.first_sequence for facts in log.segments()[1:] if facts.first_sequence <= start]
    return begins[-1] - 1 if begins else 0


class _Pass:
    """The state of one pass over the frames."""

    def __init__(self) -> None:
        self.sequence = 0
        self._replay = EventReplay()
        self._now = Moment(0, 0)
        self._known = True
        """Whether every frame since the last Base was replayed, so that the state is complete."""

    def gap(self, gap: Gap) -> list[EventRuns]:
        """The events of a gap: damage loses items. What retention deleted gives no events."""
        self._known = self._known and gap.first_sequence == self.sequence + 1 and gap.why != DROPPED
        self.sequence = max(self.sequence, gap.last_sequence)
        if gap.why == DROPPED:
            return []
        replay = self._replay if self._known else EventReplay()
        runs = replay.apply(Lost([gap.start, gap.stop]), self._now)
        return [one._replace(reason=f"damage: {gap.why} ({gap.where})") for one in runs]

    def frame(self, frame: Frame) -> list[EventRuns]:
        follows, self.sequence, self._now = frame.sequence == self.sequence + 1, frame.sequence, Moment(frame.elapsed, frame.wall)
        if frame.type is FrameType.BASE:
            self._replay, self._known = EventReplay(base.load(frame.body)), True
            return []
        self._known = self._known and follows
        if not self._known and frame.type is not FrameType.DATA:
            return []
        replay = self._replay if self._known else EventReplay()  # a Produced event needs no earlier state
        return [one for record in codec.decode_frame(frame, outline=True) for one in replay.apply(record, self._now)]
