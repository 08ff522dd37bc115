"""Staged parts: files of whole frames, written by who does not own a log, for its owner to adopt.

Owns: `StagedWriter`, and `StagedReader` and `frames`, which verify. A part is one group of DATA frames as docs/format.md draws them: every
frame but the last says that more follow, so that a part that was cut, even between two frames, is not taken for a whole one.
Of the header, base is 0; the partition is where all items of the frame belong by the slot map of the time of writing, or 0.
Frames are not compressed: a part lives for seconds, and its owner would only have to expand it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.logs.api import Buffer, Draft, Frame, FrameType
from penstock.logs.failures import storage_failed
from penstock.logs.files.system import Files
from penstock.logs.files.writing import write_all
from penstock.logs.frame import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    JOINS,
    MORE,
    Damaged,
    Encoder,
    Header,
    frame_bytes,
    parse_header,
    unpack_body,
)
from penstock.words.errors import CorruptLog, InvalidRequest


class Staged(NamedTuple):
    """What a part holds."""

    frames: int
    items: int


MAKE_AGAIN = 100
"""How often the folder of a part is made again; it is gone as often as another writer fails at that very moment."""


class StagedWriter:
    """One part on its way to the disk. Made with its first frame, unless `begin` is called: what has none is no file."""

    def __init__(self, files: Files, path: str, incarnation: int, make_folder: Callable[[], object] | None = None) -> None:
        """make_folder: makes the folder of the part, where it may be missing."""
        self.path = path
        self._make_folder = make_folder
        self._files = files
        self._incarnation = incarnation
        self._encoders: dict[int, Encoder] = {}
        self._handle: int | None = None
        self._kept: tuple[Draft, int] | None = None
        self._size = 0
        self._frames = 0
        self._items = 0

    def begin(self) -> None:
        """Make the file now."""
        if self._handle is None:
            try:
                self._handle = self._make()
            except OSError as error:
                raise storage_failed(error, "writing", self.path) from error

    def add(self, draft: Draft, partition: int = 0) -> int:
        """Append a frame, and say where it begins. The one before it is written now that it is known not to be the last."""
        if draft.type is not FrameType.DATA or draft.base:
            raise InvalidRequest(f"a part takes DATA frames of base 0, not {draft._replace(parts=())}; give a draft of drafting.py")
        self._write(MORE)
        self._kept = draft, partition
        return self._size

    def finish(self) -> Staged:
        """Write what is left, and sync the file and its name."""
        self._write(0)
        if self._handle is not None:
            try:
                self._files.sync(self._handle)
                self._files.sync_directory(self.path.rpartition("/")[0] or ".")
            except OSError as error:
                raise storage_failed(error, "writing", self.path) from error
            finally:
                self.close()
        return Staged(self._frames, self._items)

    def close(self) -> None:
        if self._handle is not None:
            self._files.close(self._handle)
            self._handle = None

    def discard(self) -> None:
        """Remove the file, if it was begun, whatever is in it."""
        self._kept = None
        self.close()
        if self._files.exists(self.path):
            self._files.remove(self.path)

    def _make(self) -> int:
        for _ in range(MAKE_AGAIN if self._make_folder is not None else 0):
            try:
                return self._files.open(self.path, "append")
            except FileNotFoundError:
                assert self._make_folder is not None
                self._make_folder()
        return self._files.open(self.path, "append")

    def _write(self, more: int) -> None:
        if self._kept is None:
            return
        draft, partition = self._kept
        encoder = self._encoders.setdefault(partition, Encoder(self._incarnation, partition, compression=False))
        vector: list[Buffer] = []
        size = encoder.encode(draft, self._frames + 1, more | (JOINS if self._frames else 0), vector)
        self.begin()
        assert self._handle is not None
        try:
            write_all(self._files, self._handle, vector, size)
        except OSError as error:
            raise storage_failed(error, "writing", self.path) from error
        self._size += size
        self._frames += 1
        self._items += draft.count
        self._kept = None

    def __repr__(self) -> str:
        return f"StagedWriter({self.path!r}, {self._frames} frames, {self._items} items)"


# -- read --------------------------------------------------------------------------------------------


class StagedReader:
    """A part that is read, frame by frame; CorruptLog for what is not as it was written. Close it."""

    def __init__(self, files: Files, path: str, incarnation: int) -> None:
        self._files = files
        self._path = path
        self._incarnation = incarnation
        try:
            self._handle = files.open(path, "read")
            self._size = files.size(self._handle)
        except OSError as error:
            raise storage_failed(error, "reading", path) from error

    def at(self, position: int, sequence: int) -> tuple[Header, Frame]:
        """The frame that begins there, which is that one in the row."""
        try:
            return self._at(position, sequence)
        except OSError as error:
            raise storage_failed(error, "reading", self._path) from error
        except Damaged as error:
            raise self._corrupt(str(error)) from error

    def all(self) -> Iterator[tuple[Header, Frame]]:
        """Every frame, in order."""
        position, sequence, more = 0, 1, True
        while more:
            header, frame = self.at(position, sequence)
            yield header, frame
            position, sequence = position + frame_bytes(header.stored_bytes), sequence + 1
            more = bool(header.flags & MORE)
        if position != self._size:
            raise self._corrupt(f"{self._size - position} bytes follow its last frame")

    def close(self) -> None:
        self._files.close(self._handle)

    def _at(self, position: int, sequence: int) -> tuple[Header, Frame]:
        header = parse_header(self._files.pread(self._handle, HEADER_BYTES, position))
        _check(header, self._incarnation, sequence)
        size = frame_bytes(header.stored_bytes)
        if position + size > self._size:  # also where a length is wrong: it is not asked for
            raise Damaged("the file ends inside a frame")
        stored = self._files.pread(self._handle, size - HEADER_BYTES, position + HEADER_BYTES)
        body_bytes = header.stored_bytes + CHECKSUM_BYTES
        if any(stored[body_bytes:]):
            raise Damaged("there is something between two frames")
        return header, unpack_body(header, stored[:body_bytes])

    def _corrupt(self, why: str) -> CorruptLog:
        return CorruptLog(f"the staged part {self._path} is not whole ({why}); nothing of it can be taken: write it again")

    def __repr__(self) -> str:
        return f"StagedReader({self._path!r}, {self._size} bytes)"


def frames(files: Files, path: str, incarnation: int) -> Iterator[Frame]:
    """The frames of a whole part, in order; CorruptLog as soon as it shows not to be one."""
    reader = StagedReader(files, path, incarnation)
    try:
        for _, frame in reader.all():
            yield frame
    finally:
        reader.close()


def _check(header: Header, incarnation: int, sequence: int) -> None:
    expected = (FrameType.DATA, incarnation, sequence, 0, JOINS if sequence > 1 else 0)
    found = (header.type, header.incarnation, header.sequence, header.base, header.flags & ~MORE)
    if found != expected or not header.count:
        raise Damaged(f"frame {sequence} is not the one that should be there")
