"""Looking a partition's log through, and mending it, with the knowledge of its state.

Owns: `verify` and `repair` of a partition: those of its log (logs/files/), and besides what a log cannot tell by itself.
A log takes whatever lies before its oldest segment for dropped. The state knows what retention dropped; anything else that is not there
was in segments that are missing.
"""

from contextlib import closing, suppress

from penstock.logs.api import Gap
from penstock.logs.files.published import PublishedLog
from penstock.logs.files.repair import RepairReport
from penstock.logs.files.repair import repair as repair_log
from penstock.logs.files.system import Files
from penstock.logs.files.verify import Report
from penstock.logs.files.verify import verify as verify_log
from penstock.loop.damage import MISSING
from penstock.loop.opening import replay
from penstock.rules.runs import pairs
from penstock.words.clock import Clock
from penstock.words.errors import PenstockError


def verify(files: Files, directory: str, incarnation: int, partition: int) -> Report:
    """Look through the log of a partition, which lies in that directory. Nothing is changed, and no lock is taken."""
    report = verify_log(files, directory, incarnation, partition)
    if report.opens and report.first_offset:
        try:
            report.gaps[:0] = _front(files, directory, incarnation, partition, report.first_offset)
        except PenstockError as error:
            report.opens = False
            report.errors.append(str(error))
    return report


def repair(
    files: Files, directory: str, incarnation: int, partition: int, *, discard: bool = False, clock: Clock | None = None
) -> RepairReport:
    """Mend the log of a partition, which lies in that directory and is not open. With `discard` damaged files are not kept."""

    def missing(first_offset: int) -> list[Gap]:
        with suppress(PenstockError):  # a state that cannot be replayed tells nothing; the rest can be mended all the same
            return [gap for gap in _front(files, directory, incarnation, partition, first_offset) if not gap.mended]
        return []

    return repair_log(files, directory, incarnation, partition, discard=discard, clock=clock, missing=missing)


def _front(files: Files, directory: str, incarnation: int, partition: int, first_offset: int) -> list[Gap]:
    """What is lost before the oldest segment, which begins at that offset. What is recorded as lost counts as mended.

    The state is read after the names of the segments: an owner at work says what it drops before it does.
    """
    with closing(PublishedLog(files, directory, incarnation, partition)) as log:
        state, _ = replay(log)
    gone = state.dropped.missing(0, min(first_offset, state.next_offset))
    known = [(run, True) for start, stop in pairs(gone) for run in pairs(state.lost.within(start, stop))]
    new = [(run, False) for start, stop in pairs(gone) for run in pairs(state.lost.missing(start, stop))]
    return [Gap(1, 0, *run, directory, MISSING, mended) for run, mended in sorted(known + new)]
