"""The small files beside a log's segments: the synced position, the checkpoint, the summary.

Owns: their layouts (docs/format.md), `SyncedPosition` and `SyncedFile`, `Checkpoint`, `pack_summary` and `read_summary`.
None of them is truth: one that is missing or wrong costs time, never an item.
- The synced position says how far the log is promised. It is rewritten in place after every sync, tells a torn tail from damage and tells
  lock-free readers where to stop. It is not synced itself, so after a power cut it may lag behind the log; it is written after the bytes
  it speaks of, so it never leads them, except where the durability mode it names promises less than that.
- The checkpoint is a copy of the state inside a segment, so that opening need not replay the segment from its start. It counts only when
  it is whole and the frame it names as its last is really there.
- The summary is what the owner of a closed log wants to know of it without opening it. It counts only while the log is exactly as it was
  when the summary was written, which the synced position tells.
"""

import errno
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from google_crc32c import value

from penstock.logs.files.filesystem import Files, read_file
from penstock.logs.files.segment import FIRST, LOG, LogId, SegmentName, parse_name
from penstock.logs.frame import HEADER_BYTES, DamagedFrame, FrameEncoder, parse_header, unpack_body
from penstock.logs.log import Draft, Durability, Frame, FrameType, Gap

# -- the synced position ---------------------------------------------------------------------------


SYNCED = "synced"
SYNCED_MAGIC = b"PSYN"
SYNCED_VERSION = 1
_SYNCED = struct.Struct("<4sBBHQQQQQ")
_CHECKSUM_BYTES = 8  # CRC-32C and padding
SYNCED_BYTES = _SYNCED.size + _CHECKSUM_BYTES
_MODES: tuple[Durability, ...] = ("fsync", "interval", "os")
_MODE_NUMBERS = {mode: number for number, mode in enumerate(_MODES, 1)}


class SyncedPosition(msgspec.Struct, frozen=True, gc=False):
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
        body: bytes = _SYNCED.pack(SYNCED_MAGIC, SYNCED_VERSION, mode, 0, *self.segment, self.position, self.sequence, self.offset)
        checksum: int = value(body)
        return body + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def unpack_synced(data: bytes) -> SyncedPosition | None:
    """The promise in a file's bytes, or None when they are not a whole one of this version."""
    body = data[: _SYNCED.size]
    if len(data) != SYNCED_BYTES or value(body) != int.from_bytes(data[_SYNCED.size :], "little"):
        return None
    magic, version, mode, _, base, first_sequence, position, sequence, offset = _SYNCED.unpack(body)
    if magic != SYNCED_MAGIC or version != SYNCED_VERSION or not 1 <= mode <= len(_MODES):
        return None
    return SyncedPosition(SegmentName(base, first_sequence), position, sequence, offset, _MODES[mode - 1])


def segment_missing(synced: SyncedPosition | None, names: Sequence[SegmentName]) -> bool:
    """Whether the published segment is not among those that are there, nor one that came after it.

    That is damage in every durability mode: a segment's name is on disk before anything is published of it, and the position is taken
    back, durably, before a segment that it names is removed.
    """
    return synced is not None and synced.sequence > 0 and (not names or names[-1] < synced.segment)


def as_fsynced_if_missing(synced: SyncedPosition | None, names: Sequence[SegmentName]) -> SyncedPosition | None:
    """The published position, as one made by fsync if its segment is missing: then what it speaks of was there and is lost."""
    return msgspec.structs.replace(synced, durability="fsync") if synced is not None and segment_missing(synced, names) else synced


def whole_log_gap(synced: SyncedPosition, directory: str) -> Gap:
    """What is lost of a log of which no segment is left."""
    return Gap(1, synced.sequence, 0, synced.offset, f"the end of {directory}/{FIRST}", "frames are missing")


class SyncedFile:
    """The file of that name in a partition's directory."""

    __slots__ = ("_files", "_handle", "path")

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self.path = f"{directory}/{SYNCED}"
        self._handle: int | None = None

    def read(self) -> SyncedPosition | None:
        """What is published, or None when there is no file or it is damaged."""
        data = read_file(self._files, self.path)
        return unpack_synced(data) if data is not None else None

    def publish(self, synced: SyncedPosition) -> None:
        if self._handle is None:
            self._handle = self._files.open(self.path, "update")
        if self._files.pwrite(self._handle, synced.pack(), 0) != SYNCED_BYTES:
            raise OSError(errno.EIO, "the synced position was written in part", self.path)

    def sync(self) -> None:
        """Make what was published last survive a power cut: needed only where it goes back."""
        if self._handle is not None:
            self._files.sync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            self._files.close(self._handle)
            self._handle = None


# -- the checkpoint --------------------------------------------------------------------------------


CHECKPOINT = "checkpoint"
CHECKPOINT_MAGIC = b"PSCP"
CHECKPOINT_VERSION = 1
_PLACE = struct.Struct("<4sHHQQQQ")
_PLACE_BYTES = _PLACE.size + _CHECKSUM_BYTES


class Checkpoint(NamedTuple):
    """State after a frame of the log."""

    segment: SegmentName
    last: int
    """Where the last frame that the state rests on starts."""
    end: int
    """Where it ends: replay goes on here."""
    frame: Frame
    """The state, as a BASE frame; its sequence is that of the last frame."""


def pack_checkpoint(segment: SegmentName, last: int, end: int, sequence: int, base: Draft, owner: LogId) -> bytes:
    """The bytes of a checkpoint file."""
    place = _PLACE.pack(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, 0, *segment, last, end)
    vector: list[bytes | bytearray | memoryview] = [place, value(place).to_bytes(_CHECKSUM_BYTES, "little")]
    FrameEncoder(*owner).encode(base, sequence, 0, vector)
    return b"".join(vector)


def unpack_checkpoint(data: bytes, owner: LogId) -> Checkpoint | None:
    """The checkpoint in a file's bytes, or None when they are not a whole one of this version and this log."""
    place, checksum = data[: _PLACE.size], data[_PLACE.size : _PLACE_BYTES]
    if len(data) < _PLACE_BYTES or value(place) != int.from_bytes(checksum, "little"):
        return None
    magic, version, _, base, first_sequence, last, end = _PLACE.unpack(place)
    frame = _frame(data[_PLACE_BYTES:], owner)
    if magic != CHECKPOINT_MAGIC or version != CHECKPOINT_VERSION or frame is None or frame.type is not FrameType.BASE:
        return None
    return Checkpoint(SegmentName(base, first_sequence), last, end, frame)


def _frame(data: bytes, owner: LogId) -> Frame | None:
    try:
        header = parse_header(data[:HEADER_BYTES])
        frame = unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])
    except DamagedFrame:
        return None
    return frame if (header.incarnation, header.partition) == owner else None


# -- the summary -----------------------------------------------------------------------------------


SUMMARY = "summary"
SUMMARY_MAGIC = b"PSUM"
SUMMARY_VERSION = 1
_HEAD = struct.Struct("<4sHH")


def pack_summary(synced: bytes, body: bytes) -> bytes:
    """The bytes of a summary file: the synced position that it is true for, then what the owner has to say."""
    data = _HEAD.pack(SUMMARY_MAGIC, SUMMARY_VERSION, 0) + synced + body
    checksum: int = value(data)
    return data + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def read_summary(files: Files, directory: str) -> bytes | None:
    """What the owner said of a log that has not changed since; b"" for one that was never written to; None when it must be opened."""
    segments = sorted(name for name in map(parse_name, files.list(directory)) if name is not None)
    if not segments:
        return None if files.exists(f"{directory}/{SYNCED}") else b""
    data, synced = read_file(files, f"{directory}/{SUMMARY}"), read_file(files, f"{directory}/{SYNCED}")
    if data is None or synced is None or len(data) < _HEAD.size + SYNCED_BYTES + _CHECKSUM_BYTES:
        return None
    content, checksum = data[:-_CHECKSUM_BYTES], int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    magic, version, _ = _HEAD.unpack_from(content)
    said, body = content[_HEAD.size : _HEAD.size + SYNCED_BYTES], content[_HEAD.size + SYNCED_BYTES :]
    place = unpack_synced(synced)
    if magic != SUMMARY_MAGIC or version != SUMMARY_VERSION or value(content) != checksum or said != synced or place is None:
        return None
    return body if place.segment == segments[-1] and _size(files, f"{directory}/{place.segment}{LOG}") == place.position else None


def _size(files: Files, path: str) -> int:
    handle = files.open(path, "read")
    try:
        return files.size(handle)
    finally:
        files.close(handle)
