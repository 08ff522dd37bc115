"""Verification of a log, without changing it.

Owns: `verify` and its `VerifyReport`; `LogInspection`, which repair uses, too; `SideFileProblem`, what is wrong with a
file beside the segments.
It reads every byte, writes nothing and takes no lock. It reports what it finds even if the log does not open. It
applies the rules of opening (recovery.py): the gaps it reports are those that a reader of the whole log gets. In a log
that is in use, bytes that the owner has not synced yet may be reported as torn. Side files are not compared with a
damaged segment.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.logs.files.filesystem import Files, read_file, storage_failed
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.recovery import LogOpening, Replay, find_replay_start, load_checkpoint, segment_start
from penstock.logs.files.segment import FIRST, INDEX, LogId, Segment, SegmentName, SparseIndex, header_at, unpack_index
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import CHECKPOINT, SYNCED, SyncedFile, SyncedPosition, as_fsynced_if_missing, whole_log_gap
from penstock.logs.log import FrameType, Gap, ReadableLog
from penstock.words.errors import CorruptLog, PenstockError, StorageFailed

ATTEMPTS = 5
"""How often an inspection is repeated because the owner dropped segments meanwhile."""


class VerifyReport(msgspec.Struct, kw_only=True):
    """The content of a log, and what is wrong with it."""

    directory: str
    incarnation: int
    partition: int
    opens: bool = False
    begins: str = ""
    """Where recovery would begin."""
    errors: list[str] = msgspec.field(default_factory=list)
    """Why the log cannot be read to its end, or replayed."""
    segments: int = 0
    rewritten: int = 0
    """The number of rewritten segments."""
    size_bytes: int = 0
    """The size of all segment files."""
    frames: dict[str, int] = msgspec.field(default_factory=dict)
    """The number of whole frames by type."""
    items: int = 0
    """The number of items in these frames, blanked items included."""
    first_offset: int = 0
    next_offset: int = 0
    gaps: list[Gap] = msgspec.field(default_factory=list)
    """Everything that is lost, repaired or not, oldest first."""
    torn_bytes: int = 0
    """Bytes at the end, of a write that was cut off. Opening cuts them."""
    bases_lost: list[str] = msgspec.field(default_factory=list)
    """The segments whose Base cannot be read."""
    side_files: list[str] = msgspec.field(default_factory=list)
    """What is wrong with side files, as `<name>: <problem>`. They are rebuilt when they are needed."""
    findings: list[str] = msgspec.field(default_factory=list)
    """What opening would report."""

    @property
    def damage(self) -> list[Gap]:
        """The gaps that are not repaired."""
        return [gap for gap in self.gaps if not gap.repaired]

    @property
    def sound(self) -> bool:
        """Whether the log opens and has no damage."""
        return self.opens and not self.damage

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict that JSON can encode."""
        return {**msgspec.structs.asdict(self), "gaps": [gap._asdict() for gap in self.gaps]}


LostPrefix: TypeAlias = Callable[[ReadableLog, int], Sequence[Gap]]
"""Gets a log and the item offset of its oldest segment; returns what is lost before it. The log alone cannot tell lost
segments from dropped ones; its state can (`loop.recovery.find_missing_front`)."""


def verify(files: Files, directory: str, incarnation: int, partition: int, lost_front: LostPrefix = lambda log, first: ()) -> VerifyReport:
    """Verify the log of a partition in a directory. Changes nothing and takes no lock."""
    report = LogInspection.run(files, directory, LogId(incarnation, partition)).report
    if report.opens and report.first_offset:
        try:
            with closing(PublishedLog(files, directory, incarnation, partition)) as log:
                report.gaps[:0] = lost_front(log, report.first_offset)
        except PenstockError as error:
            report.opens = False
            report.errors.append(str(error))
    return report


class LogInspection:
    """One inspection of a log: the report, and what a repair needs besides."""

    def __init__(self, files: Files, directory: str, log_id: LogId) -> None:
        self.segments = SegmentFiles(files, directory, log_id)
        self.report = VerifyReport(directory=directory, incarnation=log_id.incarnation, partition=log_id.partition)
        self.synced: SyncedPosition | None = None
        self.opening = LogOpening(files, self.segments, None, self.report.findings)
        self.damaged: list[SegmentName] = []
        """The segments that have damage."""
        self.side_files: list[SideFileProblem] = []
        self.stopped: PenstockError | None = None
        """Why the log could not be read to its end; None if it could."""
        self._files = files
        self._leftovers: list[str] = []

    @classmethod
    def run(cls, files: Files, directory: str, log_id: LogId) -> "LogInspection":
        """Inspect a log; again if its owner drops segments meanwhile."""
        for left in reversed(range(ATTEMPTS)):
            inspection = cls(files, directory, log_id)
            try:
                inspection.inspect_all()
            except FileNotFoundError:
                if not left:
                    inspection.add_error(StorageFailed(f"segments of {directory} are removed faster than they can be read; verify again"))
            else:
                break
            finally:
                inspection.segments.close()
        return inspection

    def inspect_all(self) -> None:
        """Read the whole log, then replay it as opening does."""
        self.stopped = self._try(self._load)
        if self.stopped is None:
            steps = (self._skip_torn_rotations, self._read, self._check_bases, self._check_side_files)
            failures = [self._try(step) for step in steps]
            self.stopped = next((failure for failure in failures if failure is not None), None)
            self.report.opens = self._try(self._replay) is None

    def _try(self, step: Callable[[], None]) -> PenstockError | None:
        """Do a step; returns the error that ended it, which is added to the report, or None."""
        try:
            step()
        except FileNotFoundError:
            raise
        except OSError as error:
            return self.add_error(storage_failed(error, "reading", self.segments.directory))
        except CorruptLog as error:
            return self.add_error(error)
        return None

    def add_error(self, error: PenstockError) -> PenstockError:
        """Add an error to the report, unless it is in it."""
        if str(error) not in self.report.errors:
            self.report.errors.append(str(error))
        return error

    # -- frames --------------------------------------------------------------------------------------

    def _load(self) -> None:
        # read before the segments, to which the owner may append
        self.synced = SyncedFile(self._files, self.segments.directory).read()
        self._leftovers = self.segments.load()
        self.synced = as_fsynced_if_missing(self.synced, self.segments.names)
        self.opening = LogOpening(self._files, self.segments, self.synced, self.report.findings)

    def _skip_torn_rotations(self) -> None:
        while self.segments.names and self.opening.torn_rotation():
            self.report.torn_bytes += self.segments.segment(self.segments.names[-1]).size
            self.segments.names = self.segments.names[:-1]

    def _read(self) -> None:
        report, segments = self.report, self.segments
        if not segments.names:
            report.gaps += whole_log_gap(self.synced, segments.directory)
            report.next_offset = self.synced.offset if report.gaps and self.synced is not None else 0
            return
        names, newest = segments.names, segments.segment(segments.names[-1])
        report.segments, report.first_offset = len(names), names[0].base_offset
        report.size_bytes = sum(segments.segment(name).size for name in names)
        replay = Replay(segments, segment_start(segments, 0), self.opening.expected_end())
        for item in replay:
            if isinstance(item, Gap):
                self._count_gap(item, names[replay.number])
            elif item.frame is not None:
                self._count(item.frame.type)
                report.items += item.frame.count if item.frame.type is FrameType.DATA else 0
            report.next_offset = replay.offset
        if not replay.ends_early and self.opening.fsynced_bytes <= replay.end < newest.size:
            report.torn_bytes += newest.size - replay.end

    def _count_gap(self, gap: Gap, name: SegmentName) -> None:
        self.report.gaps.append(gap)
        if gap.repaired:
            self._count(FrameType.GAP)
        elif name not in self.damaged:
            self.damaged.append(name)

    def _count(self, kind: FrameType) -> None:
        frames = self.report.frames
        frames[kind.name] = frames.get(kind.name, 0) + 1

    # -- Bases, side files, replay -------------------------------------------------------------------

    def _check_bases(self) -> None:
        for name in self.segments.names:
            if self.segments.rewritten(name):
                self.report.rewritten += 1
            elif name != FIRST and not self.segments.begins_with_base(name):
                self.report.bases_lost.append(str(name))

    def _check_side_files(self) -> None:
        if self.segments.names:
            self.side_files = find_side_file_problems(self._files, self.segments, self.synced, self.damaged, self._leftovers)
        self.report.side_files = [str(found) for found in self.side_files]

    def _replay(self) -> None:
        """Replay the log as opening does."""
        if not self.segments.names:
            return
        start, at_checkpoint = find_replay_start(self.segments, load_checkpoint(self._files, self.segments, []), [])
        name = self.segments.names[start.number]
        what = "the checkpoint in" if at_checkpoint else "the Base of" if self.segments.begins_with_base(name) else "the start of"
        self.report.begins = f"{what} {name}"
        deque(self.opening.frames(), maxlen=0)


# -- side files ------------------------------------------------------------------------------------


class SideFileProblem(NamedTuple):
    """A side file that is missing or wrong."""

    name: str
    problem: str
    exists: bool = True
    """Whether there is a file to remove."""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


def find_side_file_problems(
    files: Files, segments: SegmentFiles, published: SyncedPosition | None, damaged: Sequence[SegmentName], leftovers: Sequence[str]
) -> list[SideFileProblem]:
    """The missing and wrong side files of a log that has at least one segment."""
    found = [SideFileProblem(file, "left over from an operation that was cut off") for file in leftovers]
    found += _synced(files, segments, published, damaged)
    findings: list[str] = []
    load_checkpoint(files, segments, findings)
    found += [SideFileProblem(CHECKPOINT, finding) for finding in findings]
    for name in segments.names:
        found += _index(files, segments, name, sound=name not in damaged)
    return found


def _synced(
    files: Files, segments: SegmentFiles, published: SyncedPosition | None, damaged: Sequence[SegmentName]
) -> Iterator[SideFileProblem]:
    if published is None:
        exists = files.exists(f"{segments.directory}/{SYNCED}")
        yield SideFileProblem(SYNCED, "damaged" if exists else "missing", exists)
    elif published.segment >= segments.names[-1] not in damaged and published != true_position(segments, published):
        yield SideFileProblem(SYNCED, "does not fit the log")


def true_position(segments: SegmentFiles, published: SyncedPosition) -> SyncedPosition:
    """The published position, corrected to where its frame ends in the newest segment; 0 if the frame is not in it."""
    pieces = segments.pieces(segments.names[-1], 0)
    end = next((piece.end for piece in pieces if piece.frame is not None and piece.frame.sequence == published.sequence), 0)
    return msgspec.structs.replace(published, segment=segments.names[-1], position=end)


def _index(files: Files, segments: SegmentFiles, name: SegmentName, sound: bool) -> Iterator[SideFileProblem]:
    data = read_file(files, segments.path(name) + INDEX)
    stored = unpack_index(data) if data is not None else None
    if data is None and name != segments.names[-1]:  # the newest segment's index is written at close
        yield SideFileProblem(f"{name}{INDEX}", "missing", exists=False)
    elif data is not None and stored is None:
        yield SideFileProblem(f"{name}{INDEX}", "damaged")
    elif stored is not None and sound and not _fits(segments, segments.segment(name), stored):
        yield SideFileProblem(f"{name}{INDEX}", "does not fit its segment")


def _fits(segments: SegmentFiles, segment: Segment, stored: SparseIndex) -> bool:
    headers = (header_at(segment, position, segments.log_id) for position in stored.positions)
    entries = zip(headers, stored.offsets, stored.walls, strict=True)
    return stored.covered <= segment.size and all(
        header is not None and (header.type, header.base, header.wall) == (FrameType.DATA, offset, wall) for header, offset, wall in entries
    )
