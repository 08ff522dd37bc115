"""The published synced position: how far a partition's log is promised, written after every sync.

Owns: `Synced`, its layout (docs/format.md) and `SyncedFile`, one small file that is rewritten in place.
It tells a torn tail from damage and tells lock-free readers where to stop. It is not truth: missing or wrong, the log itself is asked.
It is not synced itself, so after a power cut it may lag behind the log; it is written after the bytes it speaks of, so it never leads
them, except where the durability mode it names promises less than that.
"""

import errno
import struct
from collections.abc import Sequence

import msgspec
from google_crc32c import value

from penstock.logs.api import Durability, Gap
from penstock.logs.files.segment import FIRST, SegmentName
from penstock.logs.files.system import Files
from penstock.logs.files.writing import read_file

FILE_NAME = "synced"
MAGIC = b"PSYN"
VERSION = 1
_BODY = struct.Struct("<4sBBHQQQQQ")
_CHECKSUM_BYTES = 8  # CRC-32C and padding
SIZE = _BODY.size + _CHECKSUM_BYTES
_MODES: tuple[Durability, ...] = ("fsync", "interval", "os")
_MODE_NUMBERS = {mode: number for number, mode in enumerate(_MODES, 1)}


class Synced(msgspec.Struct, frozen=True, gc=False):
    """A promise: everything up to here is kept."""

    segment: SegmentName
    position: int
    """End of the last promised frame in that segment."""
    sequence: int
    """Of that frame."""
    offset: int
    """The next item offset to be given after it."""
    durability: Durability
    """How the promise was made: only "fsync" holds through a power cut."""

    def pack(self) -> bytes:
        mode = _MODE_NUMBERS[self.durability]
        body: bytes = _BODY.pack(MAGIC, VERSION, mode, 0, *self.segment, self.position, self.sequence, self.offset)
        checksum: int = value(body)
        return body + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def unpack(data: bytes) -> Synced | None:
    """The promise in a file's bytes, or None when they are not a whole one of this version."""
    body = data[: _BODY.size]
    if len(data) != SIZE or value(body) != int.from_bytes(data[_BODY.size :], "little"):
        return None
    magic, version, mode, _, base, first_sequence, position, sequence, offset = _BODY.unpack(body)
    if magic != MAGIC or version != VERSION or not 1 <= mode <= len(_MODES):
        return None
    return Synced(SegmentName(base, first_sequence), position, sequence, offset, _MODES[mode - 1])


def segment_missing(synced: Synced | None, names: Sequence[SegmentName]) -> bool:
    """Whether the published segment is not among those that are there, nor one that came after it.

    That is damage in every durability mode: a segment's name is on disk before anything is published of it, and the position is taken
    back, durably, before a segment that it names is removed.
    """
    return synced is not None and synced.sequence > 0 and (not names or names[-1] < synced.segment)


def promised(synced: Synced | None, names: Sequence[SegmentName]) -> Synced | None:
    """The published position, as one made by fsync if its segment is missing: then what it speaks of was there and is lost."""
    return msgspec.structs.replace(synced, durability="fsync") if synced is not None and segment_missing(synced, names) else synced


def everything(synced: Synced, directory: str) -> Gap:
    """What is lost of a log of which no segment is left."""
    return Gap(1, synced.sequence, 0, synced.offset, f"the end of {directory}/{FIRST}", "frames are missing")


class SyncedFile:
    """The file of that name in a partition's directory."""

    __slots__ = ("_files", "_handle", "path")

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self.path = f"{directory}/{FILE_NAME}"
        self._handle: int | None = None

    def read(self) -> Synced | None:
        """What is published, or None when there is no file or it is damaged."""
        data = read_file(self._files, self.path)
        return unpack(data) if data is not None else None

    def publish(self, synced: Synced) -> None:
        if self._handle is None:
            self._handle = self._files.open(self.path, "update")
        if self._files.pwrite(self._handle, synced.pack(), 0) != SIZE:
            raise OSError(errno.EIO, "the synced position was written in part", self.path)

    def harden(self) -> None:
        """Make what was published last survive a power cut: needed only where it goes back."""
        if self._handle is not None:
            self._files.sync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            self._files.close(self._handle)
            self._handle = None
