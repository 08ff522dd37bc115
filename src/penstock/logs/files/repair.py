"""Repair of a damaged log: whole frames are kept, and what is lost is recorded in the log.

Owns: `repair` and `RepairReport`.
- Each damaged segment is written again with a GAP frame in place of what is lost, so that a later opening finds no
  damage but knows what is missing. The damaged file is kept beside it. Wrong side files are removed or corrected.
- Segments that are missing before the oldest one are replaced by one that holds only a GAP frame. The caller must say
  what is missing (`LostPrefix`), because only the state tells what was dropped on purpose.
- Torn bytes are not damage: the next opening cuts them.
- A log that cannot be read to its end (frames of another partition, a newer format, a failing disk) is not changed.
- A log without a readable Base is repaired, but still does not open.
Steps: the report; side files; the GAP segment before the oldest one; for each damaged segment, oldest first, a copy,
the new file, synced, then its rename; the synced position.
After a crash at any step the log can be opened, or the repair run again, which does the remaining steps. Lock-free
readers may see temporary gaps during a repair.
"""

import contextlib
import json
import os
from itertools import count

import msgspec

from penstock.logs.files.filesystem import Files, copy_file, replace_file, same_bytes, storage_failed
from penstock.logs.files.lock import take_lock
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.recovery import Replay, segment_start
from penstock.logs.files.rewrite import NewSegment
from penstock.logs.files.root import LOGS
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
    """The result of a repair."""

    directory: str
    incarnation: int
    partition: int
    path: str = ""
    """The report's file in the log's directory; "" if there was nothing to do."""
    gaps: list[Gap] = msgspec.field(default_factory=list)
    """What is lost and was recorded as lost."""
    segments: list[str] = msgspec.field(default_factory=list)
    """The damaged segments, which were written again."""
    copies: list[str] = msgspec.field(default_factory=list)
    """The copies of the damaged segments."""
    side_files: list[str] = msgspec.field(default_factory=list)
    """The side files that were wrong."""
    opens: bool = False
    """Whether the log opens now."""
    errors: list[str] = msgspec.field(default_factory=list)
    """Why it does not open."""

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
    """Repair the log of a partition in a directory; BrokerLocked if its broker is open.

    discard: do not keep the damaged files.
    lost_front: called if the log opens; if it raises a PenstockError, only the missing front is not repaired.
    """
    clock = clock or SystemClock()
    try:
        lock = take_lock(files, _root(directory), clock)
        try:
            return _Repair(files, directory, LogId(incarnation, partition), discard, lost_front).run(clock)
        finally:
            lock.note_opened()
            lock.release()
    except OSError as error:
        raise storage_failed(error, "repairing", directory) from error


def _root(directory: str) -> str:
    """The storage root of a log's directory."""
    logs = os.path.dirname(os.path.dirname(directory.rstrip("/")))
    if os.path.basename(logs) != LOGS:
        raise InvalidRequest(f"{directory} is not the directory of a log; give <root>/{LOGS}/<incarnation>/<partition>")
    return os.path.dirname(logs)


class _Repair:
    """One repair of one log, under the lock of its root."""

    def __init__(self, files: Files, directory: str, log_id: LogId, discard: bool, lost_front: LostPrefix) -> None:
        self._find_lost_prefix = lost_front
        self._files = files
        self._directory = directory
        self._log_id = log_id
        self._discard = discard

    def run(self, clock: Clock) -> RepairReport:
        inspection = self._inspect()
        if not inspection.segments.names and inspection.report.gaps:  # no segment is left: create one for the GAP frame
            if inspection.synced is not None:
                self._publish(inspection.synced)  # with durability fsync: only this position tells what is lost
            inspection.segments.create(FIRST)
            inspection.segments.close()
            self._files.sync_directory(self._directory)
            inspection = self._inspect()
        prefix = self._lost_prefix(inspection)
        report = self._plan(inspection, prefix)
        if report.gaps or report.side_files:
            report.path = self._write_report(report, clock)
            self._apply(inspection, report, prefix)
            inspection = self._inspect()
        report.opens, report.errors = inspection.report.opens, inspection.report.errors
        return report

    def _inspect(self) -> LogInspection:
        """Inspect the log; raises if it cannot be read to its end."""
        inspection = LogInspection.run(self._files, self._directory, self._log_id)
        if inspection.stopped is not None:
            raise inspection.stopped
        return inspection

    # -- planning ------------------------------------------------------------------------------------

    def _lost_prefix(self, inspection: LogInspection) -> Gap | None:
        """What is lost before the oldest segment, as one Gap that ends there; None if nothing is."""
        oldest = inspection.segments.names[0] if inspection.segments.names else FIRST
        found = self._missing(oldest.base_offset) if inspection.report.opens and oldest.base_offset else []
        return Gap(1, oldest.first_sequence - 1, found[0].start, oldest.base_offset, found[0].where, found[0].why) if found else None

    def _missing(self, first_offset: int) -> list[Gap]:
        with contextlib.suppress(PenstockError), contextlib.closing(PublishedLog(self._files, self._directory, *self._log_id)) as log:
            return [gap for gap in self._find_lost_prefix(log, first_offset) if not gap.repaired]
        return []

    def _plan(self, inspection: LogInspection, prefix: Gap | None) -> RepairReport:
        paths = [inspection.segments.path(name) + LOG for name in inspection.damaged]
        return RepairReport(
            directory=self._directory,
            incarnation=self._log_id.incarnation,
            partition=self._log_id.partition,
            gaps=[*([prefix] if prefix else []), *inspection.report.damage],
            segments=[str(name) for name in inspection.damaged],
            copies=[] if self._discard else [self._copy_path(path) for path in paths],
            side_files=[str(found) for found in inspection.side_files if found.exists],
        )

    def _copy_path(self, path: str) -> str:
        """The path of a damaged file's copy: a free name beside it, or that of a file with the same bytes."""
        number, target = 1, path + DAMAGED
        while self._files.exists(target) and not same_bytes(self._files, path, target):
            number += 1
            target = f"{path}{DAMAGED}-{number}"
        return target

    def _write_report(self, report: RepairReport, clock: Clock) -> str:
        taken = self._files.list(self._directory)
        name = next(name for name in map(REPORT.format, count(1)) if name not in taken)
        fields = {"at": clock.read().wall, **msgspec.structs.asdict(report), "gaps": [gap._asdict() for gap in report.gaps]}
        for not_known_yet in ("path", "opens", "errors"):
            del fields[not_known_yet]
        replace_file(self._files, self._directory, name, json.dumps(fields, indent=1).encode() + b"\n")
        return f"{self._directory}/{name}"

    # -- writing -------------------------------------------------------------------------------------

    def _apply(self, inspection: LogInspection, report: RepairReport, missing: Gap | None) -> None:
        """Carry out the plan. Side files go first: one that does not match the log might match the repaired log."""
        published = inspection.synced
        wrong = [found.name for found in inspection.side_files if found.exists and (found.name != SYNCED or published is None)]
        try:
            for file in wrong:
                self._files.remove(f"{self._directory}/{file}")
            if wrong:
                self._files.sync_directory(self._directory)
            if missing is not None:
                self._write_prefix_gap(inspection, missing)
            for number, name in enumerate(inspection.damaged):
                ended = self._repair_segment(inspection, name, "" if self._discard else report.copies[number])
                published = ended if name == inspection.segments.names[-1] else published
            if published is not None and published.segment >= inspection.segments.names[-1]:
                self._publish(true_position(inspection.segments, published))
        finally:
            inspection.segments.close()

    def _repair_segment(self, inspection: LogInspection, name: SegmentName, copy: str) -> SyncedPosition:
        """Write a damaged segment again; returns the position of its end."""
        segments, number = inspection.segments, inspection.segments.names.index(name)
        replay = Replay(segments, segment_start(segments, number), inspection.opening.expected_end(), stop=number + 1)
        with NewSegment(self._files, segments, name, FrameEncoder(*self._log_id)) as new:
            if copy:
                copy_file(self._files, segments.path(name) + LOG, copy)
            _fill(new, replay, segments.segment(name))
        segments.replace(name, new.path)
        return SyncedPosition(name, new.size, replay.sequence, replay.offset, "fsync")

    def _write_prefix_gap(self, inspection: LogInspection, missing: Gap) -> None:
        """Write a segment that holds only a GAP frame, in place of those missing before the oldest one."""
        segments, name = inspection.segments, SegmentName(missing.start, missing.first_sequence)
        with NewSegment(self._files, segments, name, FrameEncoder(*self._log_id)) as new:
            new.add(gap_draft(missing, Moment(0, 0)), missing.last_sequence, AFTER_SYNC)
            new.finish()
        segments.replace(name, new.path)

    def _publish(self, published: SyncedPosition) -> None:
        """Publish and sync a synced position."""
        file = SyncedFile(self._files, self._directory)
        try:
            file.publish(published)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(self._directory)


def _fill(new: NewSegment, replay: Replay, old: Segment) -> None:
    """Write the frames and gaps of a damaged segment, each frame as its own group, because groups may lack frames."""
    then = Moment(0, 0)
    for item in replay:
        if isinstance(item, Gap):
            new.add(gap_draft(item, then), item.last_sequence, AFTER_SYNC)
        elif item.frame is not None:
            new.copy(without_group_flags(old.read_ahead.read(item.position, item.end - item.position)))
            then = Moment(item.frame.elapsed, item.frame.wall)
    new.finish()
