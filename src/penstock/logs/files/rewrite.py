"""Writing a segment anew, beside the old one, and putting it in its place.

Owns: `NewSegment`, a file of frames under a temporary name; `spare`, which says what may go; `rewrite`, which fills a new segment with what
is to be kept; `install_rewritten`.
A new segment is whole and synced before it takes its name. What came of a rewrite begins and ends with a SKIP, so that it is known for what
it is also when one of them is damaged, and has one wherever frames are missing.
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
from penstock.words.errors import CorruptLog, InvalidRequest

WRITE_BYTES = 1 << 20
"""Small frames are gathered up to this size before they are written."""


class NewSegment:
    """A segment file in the making. Use `finish` and `SegmentFiles.replace`, or `discard`."""

    def __init__(self, files: Files, chain: SegmentFiles, name: SegmentName, encoder: FrameEncoder) -> None:
        self.path = chain.path(name) + LOG + TEMPORARY
        self.size = 0
        self._files = files
        self._encoder = encoder
        self._vector: list[Buffer] = []
        self._gathered = 0
        if files.exists(self.path):
            files.remove(self.path)
        self._handle: int | None = files.open(self.path, "append")

    def add(self, draft: Draft, sequence: int, flags: int = 0) -> None:
        """Add a frame."""
        self._gather(self._encoder.encode(draft, sequence, flags, self._vector))

    def copy(self, frame: Buffer) -> None:
        """Add a frame as the bytes it is."""
        self._vector.append(frame)
        self._gather(len(frame))

    def finish(self) -> None:
        """Write the rest and sync it."""
        self._write()
        if self._handle is not None:
            self._files.sync(self._handle)
        self._close()

    def discard(self) -> None:
        """Leave no trace. Fine at any time."""
        self._close()
        if self._files.exists(self.path):
            self._files.remove(self.path)

    def _gather(self, size: int) -> None:
        self.size += size
        self._gathered += size
        if self._gathered >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        if self._gathered and self._handle is not None:
            write_all(self._files, self._handle, self._vector, self._gathered)
        self._vector, self._gathered = [], 0

    def _close(self) -> None:
        if self._handle is not None:
            self._files.close(self._handle)
            self._handle = None


def check_removable(chain: SegmentFiles, first: int, last: int, spared: int) -> None:
    """Make sure that recovery does without the segments from `first` to `last`: a synced Base that can be read is left behind them."""
    names = chain.names
    if not 0 <= first <= last < len(names) - spared:
        raise InvalidRequest(f"segments {first} to {last} of {len(names)} cannot go, the newest {spared} must stay; give lower numbers")
    if not any(chain.begins_with_base(name) for name in reversed(names[last + 1 :])):
        raise InvalidRequest(f"no Base behind segment {last} of {chain.directory} can be read; call rotate() with a Base first")


def write_rewritten(files: Files, chain: SegmentFiles, first: int, last: int, keep: RunSet, encoder: FrameEncoder) -> NewSegment:
    """Write what `keep` asks for of the segments from `first` to `last` beside them. When that fails, nothing has changed."""
    new = NewSegment(files, chain, chain.names[first], encoder)
    try:
        _thin_out(Replay(chain, segment_start(chain, first), ExpectedEnd(), stop=last + 1), chain.names[last + 1], keep, new)
    except (OSError, CorruptLog):
        with contextlib.suppress(OSError):  # what remains is removed at the next opening
            new.discard()
        raise
    return new


def install_rewritten(chain: SegmentFiles, first: int, last: int, new: NewSegment) -> int:
    """Let a new segment take the place of those from `first` to `last`; says how many bytes that freed.

    It is in place before any of the others goes, and they go oldest first: until then a segment ends where the next one's name says.
    """
    names = chain.names[first : last + 1]
    before = sum(chain.segment(name).size for name in names)
    chain.replace(names[0], new.path)
    for name in names[1:]:
        chain.remove(name)
    chain.store_index(chain.segment(names[0]))
    return before - new.size


def _thin_out(replay: Replay, following: SegmentName, keep: RunSet, into: NewSegment) -> None:
    """Write what is kept of a pass over some segments. `following` is the segment behind them."""
    thinning = _Thinning(into)
    for item in replay:
        if isinstance(item, Gap):
            if keep.overlaps(item.start, item.stop):  # wanted and lost: never passed over in silence
                thinning.keep(gap_draft(item, thinning.then), item.first_sequence, item.last_sequence, item.start)
        elif item.frame is not None:
            frame = item.frame
            draft = trim_frame(frame, keep) if frame.type is FrameType.DATA else None
            if draft is not None:
                thinning.keep(draft, frame.sequence, frame.sequence, draft.base_offset)
            thinning.then = Moment(frame.elapsed, frame.wall)
    thinning.skip(following.first_sequence - 1, following.base_offset)
    into.finish()


class _Thinning:
    """Puts a SKIP wherever something is left out."""

    def __init__(self, into: NewSegment) -> None:
        self.then = Moment(0, 0)
        """When the frame was written that was met last: a SKIP has the times of the last frame it stands for."""
        self._into = into
        self._last = -1  # sequence of the frame kept last

    def keep(self, draft: Draft, first: int, last: int, base: int) -> None:
        """Write a frame that accounts for these sequences."""
        if first != self._last + 1:
            if self._last < 0 and not self.then.wall:
                self.then = Moment(draft.elapsed, draft.wall)
            self.skip(first - 1, base)
        self._into.add(draft, last)
        self._last = last

    def skip(self, sequence: int, base: int) -> None:
        self._into.add(skip_draft(base, self.then), sequence)
