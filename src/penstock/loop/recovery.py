"""Opening a partition from its log: its state, its elapsed time, and damage.

Owns: `replay`, `apply_frames`, `elapsed_shift` and `opened`; `gaps_at_opening` and `record_gaps`; and for segments
missing before the oldest one `mark_missing_front` (at opening) and `find_missing_front` (for verify and repair).
A gap loses exactly the items between its neighbours that retention had not deleted. Each gap is logged once.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

from penstock.logs import codec
from penstock.logs.frame import DROPPED
from penstock.logs.log import Frame, FrameType, Gap, ReadableLog
from penstock.rules import base, machine
from penstock.rules.reconciliation import reconcile
from penstock.rules.records import Lost, Opened
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import SECOND, Moment
from penstock.words.ids import format_id
from penstock.words.logs import log_fields

GRACE_AFTER_OPENING = 2 * SECOND
"""No lease ends for so long after an opening: while nobody owned the partition, it could not be settled or extended."""


def elapsed_shift(state: State | Summary, raw: Moment, boot: str) -> tuple[int, bool]:
    """What to add to the machine's elapsed time to get the partition's, and whether the machine rebooted.

    The partition's time continues over restarts and never goes back.
    """
    if state.epoch == 0:
        return -raw.elapsed, False
    if state.boot_id == boot:
        return max(state.clock_shift, state.moment.elapsed - raw.elapsed), False
    # elapsed time restarted at the boot; wall time tells about how long the machine was off
    return state.moment.elapsed + max(0, raw.wall - state.moment.wall) - raw.elapsed, True


def replay(log: ReadableLog) -> tuple[State, list[Gap], int]:
    """The state of a log, replayed from its latest Base or checkpoint; the gaps found; and the number of frames."""
    frames = 0

    def counted() -> Iterator[Frame | Gap]:
        nonlocal frames
        for frames, found in enumerate(log.recover()):  # noqa: B007 (its last value is the number without the Base)
            yield found

    return *apply_frames(State(), counted()), frames


def opened(state: State, gaps: Iterable[Gap], boot: str, shift: int, *, rebooted: bool) -> Opened:
    """The record of an opening. Each frame in a gap may have been one, so its epoch is higher by so many."""
    lost = sum(max(0, gap.last_sequence - gap.first_sequence + 1) for gap in gaps)
    return Opened(state.epoch + 1 + lost, boot, shift, rebooted, GRACE_AFTER_OPENING)


def apply_frames(state: State, frames: Iterable[Frame | Gap]) -> tuple[State, list[Gap]]:
    """The state after more frames, and the gaps among them. The state passed in must not be used afterwards."""
    gaps: list[Gap] = []
    for found in frames:
        if isinstance(found, Gap):
            gaps.append(found)
            machine.apply(state, Lost([found.start, found.stop]), state.moment)
        elif found.type is FrameType.BASE:
            state = base.load(found.body)
        else:
            now = Moment(found.elapsed, found.wall)
            for record in codec.decode_frame(found, outline=True):
                machine.apply(state, record, now)
    for gap in gaps:  # again: records after a gap may name items that it took
        machine.apply(state, Lost([gap.start, gap.stop]), state.moment)
    if gaps:
        state.calls.watermark = max(state.calls.watermark, state.moment.elapsed)  # calls may be forgotten
        reconcile(state)
    return state, gaps


# -- damage -----------------------------------------------------------------------------------------


_log = logging.getLogger("penstock")
MISSING = "the segment that held it is missing"


def record_gaps(known: list[Gap], state: State, queue: str, partition: int, met: Iterable[Gap]) -> list[int]:
    """Runs of items that gaps took and that are not recorded as lost. New gaps are logged and added to `known`."""
    new = [gap for gap in met if state.unrecorded_losses(gap.start, gap.stop)]
    for gap in map(missing_segment, new):
        if gap not in known:
            known.append(gap)
            log_gaps(queue, partition, [gap])
    return RunSet(edge for gap in new for edge in state.unrecorded_losses(gap.start, gap.stop)).runs


def log_gaps(queue: str, partition: int, gaps: Iterable[Gap]) -> None:
    """Log each gap, except repaired ones, which were logged before."""
    for gap in gaps:
        if not gap.repaired:
            items = f"items {format_id(partition, gap.start)} to {format_id(partition, gap.stop - 1)} are lost"
            lost = items if gap.start < gap.stop else "no item is lost"
            text = "damage in partition %d of queue %r: %s (%s); %s; run verify, then repair"
            _log.warning(text, partition, queue, gap.why, gap.where, lost, extra=log_fields(queue=queue, partition=partition))


def gaps_at_opening(state: State, log: ReadableLog, queue: str, gaps: Sequence[Gap]) -> list[Gap]:
    """All damage found at opening, logged: the gaps of the replay, and missing items before the log's first offset."""
    found = [*gaps, *mark_missing_front(state, log.first_offset, log.where)]
    log_gaps(queue, log.partition, found)
    return found


def mark_missing_front(state: State, first_offset: int, where: str) -> Sequence[Gap]:
    """Mark as lost in the state every item before the log's first offset that retention did not delete.

    Gives gaps for the items that were not marked before.
    """
    runs = state.unrecorded_losses(0, first_offset)
    if runs:
        machine.apply(state, Lost(runs), state.moment)
    return [Gap(1, 0, start, stop, where, MISSING) for start, stop in pairs(runs)]


def find_missing_front(log: ReadableLog, first_offset: int) -> list[Gap]:
    """Gaps for items lost before a log's oldest segment, which begins at `first_offset`; recorded ones count as
    repaired.

    The state must be read after the segments are listed: an owner records what it deletes before it deletes it.
    """
    state, *_ = replay(log)
    gone = state.dropped.missing(0, min(first_offset, state.next_offset))
    recorded = [(run, True) for start, stop in pairs(gone) for run in pairs(state.lost.within(start, stop))]
    new = [(run, False) for start, stop in pairs(gone) for run in pairs(state.lost.missing(start, stop))]
    return [Gap(1, 0, *run, log.where, MISSING, repaired) for run, repaired in sorted(recorded + new)]


def missing_segment(gap: Gap) -> Gap:
    """Correct the reason of a gap that took items: if retention did not drop them, a segment is missing."""
    return gap._replace(why=MISSING) if gap.why == DROPPED else gap
