"""The small files beside a log's segments: the synced position, the checkpoint, the summary.

Owns: their layouts (docs/format.md), `SyncedPosition` and `SyncedFile`, `Checkpoint`, `pack_summary` and
`read_summary`.
All of them are rebuildable: if one is missing or wrong, opening takes longer, but no item is lost.
- The synced position says how far the log is durable. It distinguishes a torn tail from damage, and lock-free readers
  stop there. It is written in place after every sync and is not synced itself, so after a power cut it may lag behind
  the log. It is written after the bytes that it covers. With durability "fsync" those bytes survive a power cut; in
  the other modes they may be lost.
- The checkpoint is a copy of the state after a frame inside a segment, so that opening need not replay the segment from
  its start. It is used only if it is whole and that frame is in the log.
- The summary is what the owner of a closed log needs to know without opening it. It is used only while the log is
  unchanged, which is checked by the synced position.
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
from penstock.logs.log import DURABILITIES, Draft, Durability, Frame, FrameType, Gap

# -- the synced position ---------------------------------------------------------------------------


SYNCED = "synced"
SYNCED_MAGIC = b"PSYN"
SYNCED_VERSION = 1
_SYNCED = struct.Struct("<4sBBHQQQQQ")
_CHECKSUM_BYTES = 8  # CRC-32C and padding
SYNCED_BYTES = _SYNCED.size + _CHECKSUM_BYTES
_MODE_NUMBERS = {mode: number for number, mode in enumerate(DURABILITIES, 1)}  # on disk: the order must not change


class SyncedPosition(msgspec.Struct, frozen=True, gc=False):
    """How far a log is durable."""

    segment: SegmentName
    position: int
    """The end of the last durable frame in that segment."""
    sequence: int
    """The sequence of that frame."""
    offset: int
    """The next item offset after it."""
    durability: Durability
    """The mode in which the position was published: only "fsync" survives a power cut."""

    def pack(self) -> bytes:
        mode = _MODE_NUMBERS[self.durability]
        body: bytes = _SYNCED.pack(SYNCED_MAGIC, SYNCED_VERSION, mode, 0, *self.segment, self.position, self.sequence, self.offset)
        checksum: int = value(body)
        return body + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def unpack_synced(data: bytes) -> SyncedPosition | None:
    """The position in a file's bytes; None if they are damaged or of another version."""
    body = data[: _SYNCED.size]
    if len(data) != SYNCED_BYTES or value(body) != int.from_bytes(data[_SYNCED.size :], "little"):
        return None
    magic, version, mode, _, base, first_sequence, position, sequence, offset = _SYNCED.unpack(body)
    if magic != SYNCED_MAGIC or version != SYNCED_VERSION or not 1 <= mode <= len(DURABILITIES):
        return None
    return SyncedPosition(SegmentName(base, first_sequence), position, sequence, offset, DURABILITIES[mode - 1])


def segment_missing(synced: SyncedPosition | None, names: Sequence[SegmentName]) -> bool:
    """Whether neither the published segment nor a later one exists.

    That is damage in every durability mode: a segment's name is synced before a position in it is published, and before
    the newest segment is removed, an earlier position is published and synced.
    """
    return synced is not None and synced.sequence > 0 and (not names or names[-1] < synced.segment)


def as_fsynced_if_missing(synced: SyncedPosition | None, names: Sequence[SegmentName]) -> SyncedPosition | None:
    """The published position; with durability "fsync" if its segment is missing, because then it marks a loss."""
    return msgspec.structs.replace(synced, durability="fsync") if synced is not None and segment_missing(synced, names) else synced


def whole_log_gap(synced: SyncedPosition | None, directory: str) -> list[Gap]:
    """What is lost of a log that has no segment left: one Gap, or none if nothing was published."""
    if synced is None or not synced.sequence:
        return []
    return [Gap(1, synced.sequence, 0, synced.offset, f"the end of {directory}/{FIRST}", "frames are missing")]


class SyncedFile:
    """The file `synced` in a partition's directory."""

    __slots__ = ("_files", "_handle", "path")

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self.path = f"{directory}/{SYNCED}"
        self._handle: int | None = None

    def read(self) -> SyncedPosition | None:
        """The published position; None if the file is missing or damaged."""
        data = read_file(self._files, self.path)
        return unpack_synced(data) if data is not None else None

    def publish(self, synced: SyncedPosition) -> None:
        if self._handle is None:
            self._handle = self._files.open(self.path, "update")
        if self._files.pwrite(self._handle, synced.pack(), 0) != SYNCED_BYTES:
            raise OSError(errno.EIO, "the synced position was written in part", self.path)

    def sync(self) -> None:
        """Make the last published position durable. Needed only when it is before the one published previously."""
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
_POSITION = struct.Struct("<4sHHQQQQ")
_POSITION_BYTES = _POSITION.size + _CHECKSUM_BYTES


class Checkpoint(NamedTuple):
    """The state after a frame of the log."""

    segment: SegmentName
    last: int
    """The position of the last frame that the state includes."""
    end: int
    """The end of that frame: replay continues here."""
    frame: Frame
    """The state, as a BASE frame with the sequence of that frame."""


def pack_checkpoint(segment: SegmentName, last: int, end: int, sequence: int, base: Draft, log_id: LogId) -> bytes:
    """The bytes of a checkpoint file."""
    position = _POSITION.pack(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, 0, *segment, last, end)
    vector: list[bytes | bytearray | memoryview] = [position, value(position).to_bytes(_CHECKSUM_BYTES, "little")]
    FrameEncoder(*log_id).encode(base, sequence, 0, vector)
    return b"".join(vector)


def unpack_checkpoint(data: bytes, log_id: LogId) -> Checkpoint | None:
    """The checkpoint in a file's bytes; None if they are damaged, of another version or of another log."""
    position, checksum = data[: _POSITION.size], data[_POSITION.size : _POSITION_BYTES]
    if len(data) < _POSITION_BYTES or value(position) != int.from_bytes(checksum, "little"):
        return None
    magic, version, _, base, first_sequence, last, end = _POSITION.unpack(position)
    frame = _frame(data[_POSITION_BYTES:], log_id)
    if magic != CHECKPOINT_MAGIC or version != CHECKPOINT_VERSION or frame is None or frame.type is not FrameType.BASE:
        return None
    return Checkpoint(SegmentName(base, first_sequence), last, end, frame)


def _frame(data: bytes, log_id: LogId) -> Frame | None:
    try:
        header = parse_header(data[:HEADER_BYTES])
        frame = unpack_body(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes + 4])
    except DamagedFrame:
        return None
    return frame if (header.incarnation, header.partition) == log_id else None


# -- the summary -----------------------------------------------------------------------------------


SUMMARY = "summary"
SUMMARY_MAGIC = b"PSUM"
SUMMARY_VERSION = 1
_HEAD = struct.Struct("<4sHH")


def pack_summary(synced: bytes, body: bytes) -> bytes:
    """The bytes of a summary file. synced: the packed synced position of the log that the summary describes."""
    data = _HEAD.pack(SUMMARY_MAGIC, SUMMARY_VERSION, 0) + synced + body
    checksum: int = value(data)
    return data + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def read_summary(files: Files, directory: str) -> bytes | None:
    """The summary of a log that is unchanged since; b"" if the log was never opened; None if it must be opened."""
    segments = sorted(name for name in map(parse_name, files.list(directory)) if name is not None)
    if not segments:
        return None if files.exists(f"{directory}/{SYNCED}") else b""
    data, synced = read_file(files, f"{directory}/{SUMMARY}"), read_file(files, f"{directory}/{SYNCED}")
    if data is None or synced is None or len(data) < _HEAD.size + SYNCED_BYTES + _CHECKSUM_BYTES:
        return None
    content, checksum = data[:-_CHECKSUM_BYTES], int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    magic, version, _ = _HEAD.unpack_from(content)
    described, body = content[_HEAD.size : _HEAD.size + SYNCED_BYTES], content[_HEAD.size + SYNCED_BYTES :]
    end = unpack_synced(synced)
    if magic != SUMMARY_MAGIC or version != SUMMARY_VERSION or value(content) != checksum or described != synced or end is None:
        return None
    return body if end.segment == segments[-1] and file_size(files, f"{directory}/{end.segment}{LOG}") == end.position else None


def file_size(files: Files, path: str) -> int:
    """The size of a file in bytes."""
    handle = files.open(path, "read")
    try:
        return files.size(handle)
    finally:
        files.close(handle)
