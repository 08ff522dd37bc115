"""Mending a damaged log: every whole frame is kept, nothing is guessed, and what is lost is said for good.

Owns: `repair` and its report. Each damaged segment is written anew with a GAP frame in the place of what is lost, so that a later opening
finds no damage but knows what is missing; the damaged file is kept beside it. Side files that are wrong are removed or set right.
What is torn rather than damaged is left to the next opening, which cuts it. A log that cannot be read through (another partition's frames,
a newer format, a failing disk) is left as it is; one without a Base to replay from is mended, and does not open all the same.
Segments that are missing at the front get one in their place that holds nothing but a GAP frame. Which they are only the caller can say,
who knows what was dropped on purpose.
Steps: the report; side files; what is missing at the front; segment by segment, oldest first, a copy, the new file whole and synced, its
name; the synced position.
Killed anywhere, the log can be opened, or the repair run again: it does what is left to do. Readers at work meanwhile may see passing gaps.
"""

import contextlib
import json
import os
from itertools import count

import msgspec

from penstock.logs.files.filesystem import Files, copy_file, replace_file, same_bytes, storage_failed
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.recovery import Replay, segment_start
from penstock.logs.files.rewrite import NewSegment
from penstock.logs.files.root import LOGS, take_lock
from penstock.logs.files.segment import FIRST, LOG, LogId, Segment, SegmentName
from penstock.logs.files.sidefiles import SYNCED, SyncedFile, SyncedPosition
from penstock.logs.files.verify import LogInspection, LostPrefix, true_position
from penstock.logs.frame import AFTER_SYNC, FrameEncoder, gap_draft, without_group_flags
from penstock.logs.log import Gap
from penstock.words.clock import Clock, Moment, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError

DAMAGED = ".damaged"
REPORT = "repair-{}.json"


class RepairReport(msgspec.Struct, kw_only=True):
    """What a repair did."""

    directory: str
    incarnation: int
    partition: int
    path: str = ""
    """The file that says the same; none when there was nothing to do."""
    gaps: list[Gap] = msgspec.field(default_factory=list)
    """What was lost, and is now marked as lost."""
    segments: list[str] = msgspec.field(default_factory=list)
    """Those written anew."""
    copies: list[str] = msgspec.field(default_factory=list)
    """Where the damaged ones are kept."""
    side_files: list[str] = msgspec.field(default_factory=list)
    """Those that were wrong."""
    opens: bool = False
    """Whether the log opens now."""
    errors: list[str] = msgspec.field(default_factory=list)
    """Why it does not."""

    @property
    def changed(self) -> bool:
        return bool(self.path)


def repair(
    files: Files,
    directory: str,
    incarnation: int,
    partition: int,
    *,
    discard: bool = False,
    clock: Clock | None = None,
    lost_front: LostPrefix = lambda log, first: (),
) -> RepairReport:
    """Mend the log of a partition, which lies in that directory and is not open. With `discard` damaged files are not kept.

    lost_front: asked when the log opens. Where its state cannot be read it tells nothing, and the rest is mended all the same.
    """
    clock = clock or SystemClock()
    try:
        handle = take_lock(files, _root(directory), clock)
        try:
            return _Repair(files, directory, LogId(incarnation, partition), discard, lost_front).run(clock)
        finally:
            files.close(handle)
    except OSError as error:
        raise storage_failed(error, "repairing", directory) from error


def _root(directory: str) -> str:
    """The storage root that a log's directory lies in."""
    logs = os.path.dirname(os.path.dirname(directory.rstrip("/")))
    if os.path.basename(logs) != LOGS:
        raise InvalidRequest(f"{directory} is not the directory of a log; give <root>/{LOGS}/<incarnation>/<partition>")
    return os.path.dirname(logs)


class _Repair:
    """One repair of one log, whose lock is held."""

    def __init__(self, files: Files, directory: str, owner: LogId, discard: bool, lost_front: LostPrefix) -> None:
        self._lost_front = lost_front
        self._files = files
        self._directory = directory
        self._owner = owner
        self._discard = discard

    def run(self, clock: Clock) -> RepairReport:
        look = self._look()
        if not look.chain.names and look.report.gaps:  # no segment is left: make one to say so in
            if look.synced is not None:
                self._publish(look.synced)  # as a promise that holds, whatever mode it was made in: it is all that tells what is lost
            look.chain.create(FIRST)
            look.chain.close()
            self._files.sync_directory(self._directory)
            look = self._look()
        front = self._front(look)
        report = self._plan(look, front)
        if report.gaps or report.side_files:
            report.path = self._write_report(report, clock)
            self._work(look, report, front)
            look = self._look()
        report.opens, report.errors = look.report.opens, look.report.errors
        return report

    def _look(self) -> LogInspection:
        """See what there is. A log that cannot be read through is not touched."""
        look = LogInspection.run(self._files, self._directory, self._owner)
        if look.stopped is not None:
            raise look.stopped
        return look

    # -- what is to be done --------------------------------------------------------------------------

    def _front(self, look: LogInspection) -> Gap | None:
        """What is missing before the oldest segment, as one gap up to it."""
        oldest = look.chain.names[0] if look.chain.names else FIRST
        found = self._missing(oldest.base_offset) if look.report.opens and oldest.base_offset else []
        return Gap(1, oldest.first_sequence - 1, found[0].start, oldest.base_offset, found[0].where, found[0].why) if found else None

    def _missing(self, first_offset: int) -> list[Gap]:
        with contextlib.suppress(PenstockError), contextlib.closing(PublishedLog(self._files, self._directory, *self._owner)) as log:
            return [gap for gap in self._lost_front(log, first_offset) if not gap.repaired]
        return []

    def _plan(self, look: LogInspection, front: Gap | None) -> RepairReport:
        paths = [look.chain.path(name) + LOG for name in look.damaged]
        return RepairReport(
            directory=self._directory,
            incarnation=self._owner.incarnation,
            partition=self._owner.partition,
            gaps=[*([front] if front else []), *look.report.damage],
            segments=[str(name) for name in look.damaged],
            copies=[] if self._discard else [self._copy_path(path) for path in paths],
            side_files=[str(found) for found in look.side_files if found.there],
        )

    def _copy_path(self, path: str) -> str:
        """Where to keep a damaged file: beside it, under a name that is free or holds the same bytes already."""
        number, target = 1, path + DAMAGED
        while self._files.exists(target) and not same_bytes(self._files, path, target):
            number += 1
            target = f"{path}{DAMAGED}-{number}"
        return target

    def _write_report(self, report: RepairReport, clock: Clock) -> str:
        taken = self._files.list(self._directory)
        name = next(name for name in map(REPORT.format, count(1)) if name not in taken)
        plain = {"at": clock.read().wall, **msgspec.structs.asdict(report), "gaps": [gap._asdict() for gap in report.gaps]}
        for not_known_yet in ("path", "opens", "errors"):
            del plain[not_known_yet]
        replace_file(self._files, self._directory, name, json.dumps(plain, indent=1).encode() + b"\n")
        return f"{self._directory}/{name}"

    # -- doing it ------------------------------------------------------------------------------------

    def _work(self, look: LogInspection, report: RepairReport, missing: Gap | None) -> None:
        """Side files first: none that did not fit the damaged log may come to fit the mended one."""
        published = look.synced
        try:
            self._remove([found.name for found in look.side_files if found.there and (found.name != SYNCED or published is None)])
            if missing is not None:
                self._stand_in(look, missing)
            for number, name in enumerate(look.damaged):
                ended = self._mend(look, name, "" if self._discard else report.copies[number])
                published = ended if name == look.chain.names[-1] else published
            if published is not None and published.segment >= look.chain.names[-1]:
                self._publish(true_position(look.chain, published))
        finally:
            look.chain.close()

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._files.remove(f"{self._directory}/{name}")
        if names:
            self._files.sync_directory(self._directory)

    def _mend(self, look: LogInspection, name: SegmentName, copy: str) -> SyncedPosition:
        """Write a damaged segment anew, and say how it ends."""
        chain, number = look.chain, look.chain.names.index(name)
        replay = Replay(chain, segment_start(chain, number), look.opening.promise(), stop=number + 1)
        new = NewSegment(self._files, chain, name, FrameEncoder(*self._owner))
        try:
            if copy:
                copy_file(self._files, chain.path(name) + LOG, copy)
            _fill(new, replay, chain.segment(name))
        except OSError:
            with contextlib.suppress(OSError):
                new.discard()
            raise
        chain.replace(name, new.path)
        return SyncedPosition(name, new.size, replay.sequence, replay.offset, "fsync")

    def _stand_in(self, look: LogInspection, missing: Gap) -> None:
        """Put a segment in the place of those that are missing at the front: it holds a GAP frame, and nothing else."""
        chain, name = look.chain, SegmentName(missing.start, missing.first_sequence)
        new = NewSegment(self._files, chain, name, FrameEncoder(*self._owner))
        try:
            new.add(gap_draft(missing, Moment(0, 0)), missing.last_sequence, AFTER_SYNC)
            new.finish()
        except OSError:
            with contextlib.suppress(OSError):
                new.discard()
            raise
        chain.replace(name, new.path)

    def _publish(self, published: SyncedPosition) -> None:
        """Set the synced position right: frames may have moved."""
        file = SyncedFile(self._files, self._directory)
        try:
            file.publish(published)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(self._directory)


def _fill(new: NewSegment, replay: Replay, old: Segment) -> None:
    """Write what a pass over a damaged segment finds. Groups were finished, or are lost in part: each frame stands alone from now on."""
    then = Moment(0, 0)
    for item in replay:
        if isinstance(item, Gap):
            new.add(gap_draft(item, then), item.last_sequence, AFTER_SYNC)
        elif item.frame is not None:
            new.copy(without_group_flags(old.read_ahead.read(item.position, item.end - item.position)))
            then = Moment(item.frame.elapsed, item.frame.wall)
    new.finish()
