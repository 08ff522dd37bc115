"""Opening a partition: its state from its log, and its time carried on.

Owns: `replay`, `carry_on` and `continued`.
"""

from collections.abc import Iterable

from penstock.logs import codec
from penstock.logs.api import Frame, FrameType, Gap, Readable
from penstock.rules import base, machine
from penstock.rules.mend import mend
from penstock.rules.records import Lost
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words.clock import Moment


def continued(state: State | Summary, raw: Moment, boot: str) -> tuple[int, bool]:
    """What to add to the machine's elapsed time so that the partition's goes on and never back; and whether the machine was rebooted."""
    if state.epoch == 0:
        return -raw.elapsed, False
    if state.boot == boot:
        return max(state.shift, state.moment.elapsed - raw.elapsed), False
    # elapsed time began anew; the wall says about how long the machine was away
    return state.moment.elapsed + max(0, raw.wall - state.moment.wall) - raw.elapsed, True


def replay(log: Readable) -> tuple[State, list[Gap]]:
    """The state that a log tells, from its latest Base on, and the gaps met on the way."""
    return carry_on(State(), log.recover())


def carry_on(state: State, frames: Iterable[Frame | Gap]) -> tuple[State, list[Gap]]:
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
            for record in codec.records(found, outline=True):
                machine.apply(state, record, now)
    for gap in gaps:  # once more: records behind a gap may have spoken of what it took
        machine.apply(state, Lost([gap.start, gap.stop]), state.moment)
    if gaps:
        mend(state)
    return state, gaps
