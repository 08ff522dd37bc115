"""Writing a new segment beside the old ones, and replacing them by it.

Owns: `NewSegment`, a file of frames under a temporary name; `check_removable`, which checks which segments may be
removed; `write_rewritten`, which writes the kept items into a new segment; `install_rewritten`, which renames it.
A new segment is whole and synced before it is renamed. A rewritten segment begins and ends with a SKIP, so that it is
recognised even if one of them is damaged, and has a SKIP wherever frames are missing.
"""

import contextlib

from penstock.logs.columns import trim_frame
from penstock.logs.files.filesystem import TEMPORARY, Files, write_all
from penstock.logs.files.recovery import ExpectedEnd, Replay, segment_start
from penstock.logs.files.segment import LOG, SegmentName
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.frame import FrameEncoder, gap_draft, skip_draft
from penstock.logs.log import Buffer, Draft, FrameType, Gap
from penstock.rules.runs import RunSet
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest

WRITE_BYTES = 1 << 20
"""Frames are collected up to this size before they are written."""


class NewSegment:
    """A segment file that is being written. Call `finish`, then `SegmentFiles.replace`.

    As a context manager it removes the file if an exception is raised.
    """

    def __init__(self, files: Files, segments: SegmentFiles, name: SegmentName, encoder: FrameEncoder) -> None:
        self.path = segments.path(name) + LOG + TEMPORARY
        self.size = 0
        self._files = files
        self._encoder = encoder
        self._vector: list[Buffer] = []
        self._unwritten = 0
        if files.exists(self.path):
            files.remove(self.path)
        self._handle: int | None = files.open(self.path, "append")

    def __enter__(self) -> "NewSegment":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            with contextlib.suppress(OSError):  # the next opening removes the file
                self.discard()

    def add(self, draft: Draft, sequence: int, flags: int = 0) -> None:
        """Encode and add a frame."""
        self._collect(self._encoder.encode(draft, sequence, flags, self._vector))

    def copy(self, frame: Buffer) -> None:
        """Add an encoded frame."""
        self._vector.append(frame)
        self._collect(len(frame))

    def finish(self) -> None:
        """Write the remaining frames, and sync and close the file."""
        self._write()
        if self._handle is not None:
            self._files.sync(self._handle)
        self._close()

    def discard(self) -> None:
        """Remove the file, if it exists. May be called at any time."""
        self._close()
        if self._files.exists(self.path):
            self._files.remove(self.path)

    def _collect(self, size: int) -> None:
        self.size += size
        self._unwritten += size
        if self._unwritten >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        if self._unwritten and self._handle is not None:
            write_all(self._files, self._handle, self._vector, self._unwritten)
        self._vector, self._unwritten = [], 0

    def _close(self) -> None:
        if self._handle is not None:
            self._files.close(self._handle)
            self._handle = None


def check_removable(segments: SegmentFiles, first: int, last: int, spared: int) -> None:
    """InvalidRequest if recovery needs the segments from `first` to `last`: no later segment has a readable Base.

    spared: how many of the newest segments may not be removed in any case.
    """
    names = segments.names
    if not 0 <= first <= last < len(names) - spared:
        raise InvalidRequest(
            f"segments {first} to {last} of {len(names)} cannot be removed, the newest {spared} must stay; give lower numbers"
        )
    if not any(segments.begins_with_base(name) for name in reversed(names[last + 1 :])):
        raise InvalidRequest(f"no Base after segment {last} of {segments.directory} can be read; call rotate() with a Base first")


def write_rewritten(files: Files, segments: SegmentFiles, first: int, last: int, keep: RunSet, encoder: FrameEncoder) -> NewSegment:
    """Write the items in `keep` of the segments from `first` to `last` into a new segment. Changes nothing else."""
    with NewSegment(files, segments, segments.names[first], encoder) as new:
        _write_kept(Replay(segments, segment_start(segments, first), ExpectedEnd(), stop=last + 1), segments.names[last + 1], keep, new)
    return new


def install_rewritten(segments: SegmentFiles, first: int, last: int, new: NewSegment) -> int:
    """Replace the segments from `first` to `last` by a new one; returns how many bytes that freed.

    The new segment is renamed before the others are removed, oldest first. After a crash in between, replay ignores its
    frames from the first sequence of the next remaining segment on.
    """
    names = segments.names[first : last + 1]
    before = sum(segments.segment(name).size for name in names)
    segments.replace(names[0], new.path)
    for name in names[1:]:
        segments.remove(name)
    segments.store_index(segments.segment(names[0]))
    return before - new.size


def _write_kept(replay: Replay, following: SegmentName, keep: RunSet, new: NewSegment) -> None:
    """Write the kept items of some segments. following: the segment after them."""
    then, last = Moment(0, 0), -1  # the times of the last frame read, for the next SKIP; the last sequence written

    def add(draft: Draft, first: int, until: int, base: int) -> None:
        """Write a frame for the sequences from `first` to `until`, with a SKIP before it where frames are left out."""
        nonlocal then, last
        if first != last + 1:
            if last < 0 and not then.wall:
                then = Moment(draft.elapsed, draft.wall)
            new.add(skip_draft(base, then), first - 1)
        new.add(draft, until)
        last = until

    for item in replay:
        if isinstance(item, Gap):
            if keep.overlaps(item.start, item.stop):  # the loss of an item that should be kept is recorded
                add(gap_draft(item, then), item.first_sequence, item.last_sequence, item.start)
        elif item.frame is not None:
            frame = item.frame
            draft = trim_frame(frame, keep) if frame.type is FrameType.DATA else None
            if draft is not None:
                add(draft, frame.sequence, frame.sequence, draft.base_offset)
            then = Moment(frame.elapsed, frame.wall)
    new.add(skip_draft(following.base_offset, then), following.first_sequence - 1)
    new.finish()
