"""Looking a log through without touching it.

Owns: `verify` and its `VerifyReport`, and `SideFileProblem`: what is wrong with a file beside the segments.
It reads every byte, writes none, takes no lock, and tells what it finds, also when the log does not open. It judges as opening does
(recovery.py): what it lists as gaps is what a reader of the whole log is given. On a log in use it sees what was there when it came by;
what its owner has not synced yet may then show as torn bytes. A segment that is damaged is not held against the files that speak of it.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import Files, SystemFiles, read_file, storage_failed
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.recovery import LogOpening, Replay, find_replay_start, load_checkpoint, segment_start
from penstock.logs.files.root import Root
from penstock.logs.files.segment import FIRST, INDEX, LogId, Segment, SegmentName, SparseIndex, header_at, unpack_index
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import CHECKPOINT, SYNCED, SyncedFile, SyncedPosition, as_fsynced_if_missing, whole_log_gap
from penstock.logs.log import FrameType, Gap, ReadableLog
from penstock.words.errors import CorruptLog, PenstockError, StorageFailed

LOOKS = 5
"""How often a log is looked at when its owner drops segments meanwhile."""


class VerifyReport(msgspec.Struct, kw_only=True):
    """What a log is made of, and what is wrong with it."""

    directory: str
    incarnation: int
    partition: int
    opens: bool = False
    begins: str = ""
    """Where recovery would begin."""
    errors: list[str] = msgspec.field(default_factory=list)
    """What cannot even be looked at, or replayed."""
    segments: int = 0
    rewritten: int = 0
    """Segments that hold only what a rewrite kept."""
    size_bytes: int = 0
    """Of the segment files."""
    frames: dict[str, int] = msgspec.field(default_factory=dict)
    """Whole frames by type."""
    items: int = 0
    """Items in them, blanked ones included."""
    first_offset: int = 0
    next_offset: int = 0
    gaps: list[Gap] = msgspec.field(default_factory=list)
    """Everything lost that is still missed, mended or not, oldest first."""
    torn_bytes: int = 0
    """At the end, of a write that was cut off: opening drops them."""
    bases_lost: list[str] = msgspec.field(default_factory=list)
    """Segments whose Base cannot be read."""
    side_files: list[str] = msgspec.field(default_factory=list)
    """What is wrong with files that are not truth: `<name>: <what>`. They are made anew when they are missed."""
    notes: list[str] = msgspec.field(default_factory=list)
    """What opening would say."""

    @property
    def damage(self) -> list[Gap]:
        """The gaps that no repair has mended."""
        return [gap for gap in self.gaps if not gap.repaired]

    @property
    def sound(self) -> bool:
        """Whether the log opens and nothing is lost that no repair has mended."""
        return self.opens and not self.damage

    def to_dict(self) -> dict[str, Any]:
        """The report in words that JSON has."""
        return {**msgspec.structs.asdict(self), "gaps": [gap._asdict() for gap in self.gaps]}


LostPrefix: TypeAlias = Callable[[ReadableLog, int], Sequence[Gap]]
"""What is lost before the oldest segment of a log, which begins at that item offset. A log takes all that for dropped; who can read its
state knows better (`loop.recovery.lost_front`)."""


def verify(files: Files, directory: str, incarnation: int, partition: int, lost_front: LostPrefix = lambda log, first: ()) -> VerifyReport:
    """Look through the log of a partition, which lies in that directory. Nothing is changed, and no lock is taken."""
    report = LogInspection.run(files, directory, LogId(incarnation, partition)).report
    if report.opens and report.first_offset:
        try:
            with closing(PublishedLog(files, directory, incarnation, partition)) as log:
                report.gaps[:0] = lost_front(log, report.first_offset)
        except PenstockError as error:
            report.opens = False
            report.errors.append(str(error))
    return report


def verify_all(roots: "str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Root]", files: Files | None = None) -> list[VerifyReport]:
    """Look through every log in a broker's storage roots, in order."""
    directory = FileStore.open(roots, files=files or SystemFiles(), read_only=True)
    return [verify(directory.files, directory.path_of(*owner), *owner) for owner in directory.logs()]


class LogInspection:
    """One look at a log: the report, and besides it what a repair needs to know."""

    def __init__(self, files: Files, directory: str, owner: LogId) -> None:
        self.chain = SegmentFiles(files, directory, owner)
        self.report = VerifyReport(directory=directory, incarnation=owner.incarnation, partition=owner.partition)
        self.synced: SyncedPosition | None = None
        self.opening = LogOpening(files, self.chain, None, self.report.notes)
        self.damaged: list[SegmentName] = []
        """Segments that lost something which no repair has mended."""
        self.side_files: list[SideFileProblem] = []
        self.stopped: PenstockError | None = None
        """What kept this from looking at everything."""
        self._files = files
        self._strays: list[str] = []

    @classmethod
    def run(cls, files: Files, directory: str, owner: LogId) -> "LogInspection":
        """Look at a log, again when its owner drops segments meanwhile."""
        for left in reversed(range(LOOKS)):
            look = cls(files, directory, owner)
            try:
                look.through()
            except FileNotFoundError:
                if not left:
                    look.add_error(StorageFailed(f"segments of {directory} go faster than they can be read; look again"))
            else:
                break
            finally:
                look.chain.close()
        return look

    def through(self) -> None:
        """Look at everything."""
        self.stopped = self._try(self._load)
        if self.stopped is None:
            steps = (self._leave_torn_rotations, self._read, self._judge_bases, self._judge_side_files)
            failures = [self._try(step) for step in steps]
            self.stopped = next((failure for failure in failures if failure is not None), None)
            self.report.opens = self._try(self._replay) is None

    def _try(self, step: Callable[[], None]) -> PenstockError | None:
        """Do a step; what does not let it come to its end is told."""
        try:
            step()
        except FileNotFoundError:
            raise
        except OSError as error:
            return self.add_error(storage_failed(error, "reading", self.chain.directory))
        except CorruptLog as error:
            return self.add_error(error)
        return None

    def add_error(self, error: PenstockError) -> PenstockError:
        """Put it into the report, once."""
        if str(error) not in self.report.errors:
            self.report.errors.append(str(error))
        return error

    # -- frames --------------------------------------------------------------------------------------

    def _load(self) -> None:
        self.synced = SyncedFile(self._files, self.chain.directory).read()  # before the segments, which may be growing
        self._strays = self.chain.load()
        self.synced = as_fsynced_if_missing(self.synced, self.chain.names)
        self.opening = LogOpening(self._files, self.chain, self.synced, self.report.notes)

    def _leave_torn_rotations(self) -> None:
        while self.chain.names and self.opening.torn_rotation():
            self.report.torn_bytes += self.chain.segment(self.chain.names[-1]).size
            self.chain.names = self.chain.names[:-1]

    def _read(self) -> None:
        report, chain = self.report, self.chain
        if not chain.names:
            self._miss_everything()
            return
        names, newest = chain.names, chain.segment(chain.names[-1])
        report.segments, report.first_offset = len(names), names[0].base_offset
        report.size_bytes = sum(chain.segment(name).size for name in names)
        replay = Replay(chain, segment_start(chain, 0), self.opening.promise())
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

    def _miss_everything(self) -> None:
        """There is no segment: what the synced position promises is lost."""
        if self.synced is not None and self.synced.sequence:
            self.report.gaps.append(whole_log_gap(self.synced, self.chain.directory))
            self.report.next_offset = self.synced.offset

    # -- the rest ------------------------------------------------------------------------------------

    def _judge_bases(self) -> None:
        for name in self.chain.names:
            if self.chain.rewritten(name):
                self.report.rewritten += 1
            elif name != FIRST and not self.chain.begins_with_base(name):
                self.report.bases_lost.append(str(name))

    def _judge_side_files(self) -> None:
        if self.chain.names:
            self.side_files = judge_side_files(self._files, self.chain, self.synced, self.damaged, self._strays)
        self.report.side_files = [str(found) for found in self.side_files]

    def _replay(self) -> None:
        """See whether the log can be recovered."""
        if not self.chain.names:
            return
        start, at_checkpoint = find_replay_start(self.chain, load_checkpoint(self._files, self.chain, []), [])
        name = self.chain.names[start.number]
        what = "the checkpoint in" if at_checkpoint else "the Base of" if self.chain.begins_with_base(name) else "the front of"
        self.report.begins = f"{what} {name}"
        deque(self.opening.frames(), maxlen=0)


# -- side files ------------------------------------------------------------------------------------


class SideFileProblem(NamedTuple):
    """A file that is not as it should be."""

    name: str
    what: str
    there: bool = True
    """Whether there is something to remove."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def judge_side_files(
    files: Files, chain: SegmentFiles, published: SyncedPosition | None, damaged: Sequence[SegmentName], strays: Sequence[str]
) -> list[SideFileProblem]:
    """Every side file of a log of at least one segment that is wrong or missing."""
    found = [SideFileProblem(stray, "left behind by work that was cut off") for stray in strays]
    found += _synced(files, chain, published, damaged)
    notes: list[str] = []
    load_checkpoint(files, chain, notes)
    found += [SideFileProblem(CHECKPOINT, note) for note in notes]
    for name in chain.names:
        found += _index(files, chain, name, sound=name not in damaged)
    return found


def _synced(
    files: Files, chain: SegmentFiles, published: SyncedPosition | None, damaged: Sequence[SegmentName]
) -> Iterator[SideFileProblem]:
    if published is None:
        there = files.exists(f"{chain.directory}/{SYNCED}")
        yield SideFileProblem(SYNCED, "damaged" if there else "missing", there)
    elif published.segment >= chain.names[-1] not in damaged and published != true_position(chain, published):
        yield SideFileProblem(SYNCED, "does not fit the log")


def true_position(chain: SegmentFiles, published: SyncedPosition) -> SyncedPosition:
    """The same promise, with the place where its frame ends in the newest segment, or that segment's front when it is not there."""
    pieces = chain.pieces(chain.names[-1], 0)
    end = next((piece.end for piece in pieces if piece.frame is not None and piece.frame.sequence == published.sequence), 0)
    return msgspec.structs.replace(published, segment=chain.names[-1], position=end)


def _index(files: Files, chain: SegmentFiles, name: SegmentName, sound: bool) -> Iterator[SideFileProblem]:
    data = read_file(files, chain.path(name) + INDEX)
    stored = unpack_index(data) if data is not None else None
    if data is None and name != chain.names[-1]:  # the newest one's is written when the log is closed
        yield SideFileProblem(f"{name}{INDEX}", "missing", there=False)
    elif data is not None and stored is None:
        yield SideFileProblem(f"{name}{INDEX}", "damaged")
    elif stored is not None and sound and not _fits(chain, chain.segment(name), stored):
        yield SideFileProblem(f"{name}{INDEX}", "does not fit its segment")


def _fits(chain: SegmentFiles, segment: Segment, stored: SparseIndex) -> bool:
    headers = (header_at(segment, position, chain.log_id) for position in stored.positions)
    entries = zip(headers, stored.offsets, stored.walls, strict=True)
    return stored.covered <= segment.size and all(
        header is not None and (header.type, header.base, header.wall) == (FrameType.DATA, offset, wall) for header, offset, wall in entries
    )
