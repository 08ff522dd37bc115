"""What a partition finds when it is opened or read: its state from its log, its time carried on, and the damage that it meets.

Owns: `replay`, `carry_on` and `elapsed_shift`; `gaps_at_opening` and `note`, and, for segments that are missing at the front, `mark_missing_front` (at
opening) and `lost_front` (for verify and repair).
A gap takes exactly the items between its neighbours that retention had not taken before. Each gap is a line in `logging`, once.
"""

import logging
from collections.abc import Iterable, Sequence

from penstock.logs import codec
from penstock.logs.frame import DROPPED
from penstock.logs.log import Frame, FrameType, Gap, ReadableLog
from penstock.rules import base, machine
from penstock.rules.reconciliation import reconcile
from penstock.rules.records import Lost
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import Moment
from penstock.words.ids import format_id


def elapsed_shift(state: State | Summary, raw: Moment, boot: str) -> tuple[int, bool]:
    """What to add to the machine's elapsed time so that the partition's goes on and never back; and whether the machine was rebooted."""
    if state.epoch == 0:
        return -raw.elapsed, False
    if state.boot_id == boot:
        return max(state.clock_shift, state.moment.elapsed - raw.elapsed), False
    # elapsed time began anew; the wall says about how long the machine was away
    return state.moment.elapsed + max(0, raw.wall - state.moment.wall) - raw.elapsed, True


def replay(log: ReadableLog) -> tuple[State, list[Gap]]:
    """The state that a log tells, from its latest Base on, and the gaps met on the way."""
    return apply_frames(State(), log.recover())


def apply_frames(state: State, frames: Iterable[Frame | Gap]) -> tuple[State, list[Gap]]:
    """The state after more frames, and the gaps among them. The one given is not to be used any more."""
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
    for gap in gaps:  # once more: records behind a gap may have spoken of what it took
        machine.apply(state, Lost([gap.start, gap.stop]), state.moment)
    if gaps:
        reconcile(state)
    return state, gaps


# -- damage -----------------------------------------------------------------------------------------


_log = logging.getLogger("penstock")
MISSING = "the segment that held it is missing"


def record_gaps(known: list[Gap], state: State, partition: int, met: Iterable[Gap]) -> list[int]:
    """Runs of the items that gaps took and that are not recorded as lost yet. What is new is told, and is in `known` from now on."""
    new = [gap for gap in met if state.unrecorded_losses(gap.start, gap.stop)]
    for gap in map(missing_segment, new):
        if gap not in known:
            known.append(gap)
            log_gaps(partition, [gap])
    return RunSet(edge for gap in new for edge in state.unrecorded_losses(gap.start, gap.stop)).runs


def log_gaps(partition: int, gaps: Iterable[Gap]) -> None:
    """A line in `logging` for each gap; what a repair has mended was told about before."""
    for gap in gaps:
        if not gap.repaired:
            items = f"items {format_id(partition, gap.start)} to {format_id(partition, gap.stop - 1)} are lost"
            lost = items if gap.start < gap.stop else "no item is lost"
            _log.warning("damage in partition %d: %s (%s); %s; run verify, then repair", partition, gap.why, gap.where, lost)


def gaps_at_opening(state: State, log: ReadableLog, gaps: Sequence[Gap]) -> list[Gap]:
    """All damage that an owner meets at opening: the gaps of the replay that gave the state, and what is missing before the log's front."""
    found = [*gaps, *mark_missing_front(state, log.first_offset, log.where)]
    log_gaps(log.partition, found)
    return found


def mark_missing_front(state: State, first_offset: int, where: str) -> Sequence[Gap]:
    """The log begins at `first_offset`, but only the state knows what retention dropped: everything else before it is lost.

    It is so recorded in the state; says what was found lost just now.
    """
    runs = state.unrecorded_losses(0, first_offset)
    if runs:
        machine.apply(state, Lost(runs), state.moment)
    return [Gap(1, 0, start, stop, where, MISSING) for start, stop in pairs(runs)]


def find_missing_front(log: ReadableLog, first_offset: int) -> list[Gap]:
    """What is lost before a log's oldest segment, which begins at that offset. What is recorded as lost counts as mended.

    The state is read after the names of the segments: an owner at work says what it drops before it does.
    """
    state, _ = replay(log)
    gone = state.dropped.missing(0, min(first_offset, state.next_offset))
    known = [(run, True) for start, stop in pairs(gone) for run in pairs(state.lost.within(start, stop))]
    new = [(run, False) for start, stop in pairs(gone) for run in pairs(state.lost.missing(start, stop))]
    return [Gap(1, 0, *run, log.where, MISSING, mended) for run, mended in sorted(known + new)]


def missing_segment(gap: Gap) -> Gap:
    """A gap that took items. The log takes whatever lies before its oldest segment for dropped; if it was not, that segment is missing."""
    return gap._replace(why=MISSING) if gap.why == DROPPED else gap
