"""A partition's log in files: segments that begin with a Base, their indexes, the synced position and a checkpoint.

Owns: `FileLog`, the only writer of a partition's directory, and `LogState`: which calls a log accepts, and what a
failed call changes.
The work is done by other modules: frame (bytes of a frame), segment and segment_files (files of frames), recovery
(replay and damage), log_reader (items by offset), log_writer (appends), rewrite (removal of items from old segments).
Limits: one thread, one process; the frames of one `append` go to one segment.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import NoReturn

from penstock.logs.files.filesystem import Files, storage_failed
from penstock.logs.files.log_reader import LogReader
from penstock.logs.files.log_writer import LogWriter
from penstock.logs.files.recovery import LogOpening
from penstock.logs.files.rewrite import check_removable, install_rewritten, write_rewritten
from penstock.logs.files.segment import LogId
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import SyncedPosition, segment_missing
from penstock.logs.frame import LEVEL, MIN_BODY_BYTES, Compression, FrameEncoder
from penstock.logs.log import ENDLESS, Draft, Durability, Frame, FrameType, Gap, LogRange, SegmentFacts
from penstock.rules.runs import RunSet
from penstock.words.errors import BrokerClosed, InvalidRequest, StorageFailed


class LogState(Enum):
    """Which calls a log accepts."""

    NOT_RECOVERED = auto()
    """Only `recover`."""
    OPEN = auto()
    WANTS_BASE = auto()
    """Reads and `rotate`: the newest segment must not be appended to."""
    FAILED = auto()
    """Reads and `reset`."""
    CLOSED = auto()


_OPEN = LogState.OPEN  # a module constant, because every append reads it


class FileLog:
    """One partition's frames in a directory."""

    def __init__(
        self,
        files: Files,
        directory: str,
        incarnation: int,
        partition: int,
        *,
        durability: Durability = "fsync",
        compression: bool = True,
    ) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.directory = self.where = directory
        self.durability: Durability = durability
        self.waits_for_disk = durability == "fsync"
        self.findings: list[str] = []
        self._files = files
        self._segments = SegmentFiles(files, directory, LogId(incarnation, partition))
        self._compresses = compression
        self._compression = Compression(compression)
        self._encoder = FrameEncoder(incarnation, partition, self._compression)
        self._writer = LogWriter(files, self._segments, self._encoder)
        self._reader = LogReader(self._segments, self._segments.forget_missing)
        self._state = LogState.NOT_RECOVERED

    @property
    def segment_bytes(self) -> int:
        return 0 if self._state in (LogState.NOT_RECOVERED, LogState.CLOSED) else self._writer.segment.size

    @property
    def log_id(self) -> LogId:
        return self._segments.log_id

    @property
    def first_offset(self) -> int:
        self._check_readable()
        return self._segments.names[0].base_offset

    @property
    def closed(self) -> bool:
        return self._state is LogState.CLOSED

    @property
    def sequence(self) -> int:
        """The sequence of the last frame; 0 if there is none."""
        return self._writer.sequence

    @property
    def synced(self) -> SyncedPosition | None:
        """How far it is durable; None while it is being opened. Any thread may ask."""
        return None if self._state is LogState.NOT_RECOVERED else self._writer.synced

    @property
    def unsynced(self) -> bool:
        return self._state is _OPEN and self._writer.unsynced

    @property
    def wants_base(self) -> bool:
        """Whether `rotate` must be called before the next `append`.

        True when the end of the newest segment is damaged, or when a sync of it failed.
        """
        return self._state is LogState.WANTS_BASE

    def __repr__(self) -> str:
        return f"FileLog({self.directory!r}, {self._state.name}, sequence={self._writer.sequence}, segments={len(self._segments.names)})"

    # -- writing -------------------------------------------------------------------------------------

    def append(self, drafts: Sequence[Draft]) -> int:
        if self._state is not _OPEN:
            self._refuse()
        if not drafts:
            return 0
        try:
            return self._writer.append(drafts)
        except OSError as error:
            self._fail(error, "appending to")

    def sync(self) -> None:
        if self._state is not _OPEN:
            self._refuse()
        writer = self._writer
        if writer.unsynced:
            try:
                writer.sync(self.durability)
            except OSError as error:
                self._fail(error, "syncing")

    def force_sync(self) -> None:
        """Fsync in every durability mode. In mode "interval" a timer calls this."""
        self._attempt(self._writer.flush, "syncing")

    def set_compression(self, enabled: bool | None, level: int | None, min_bytes: int | None) -> None:
        self._compression = Compression(self._compresses if enabled is None else enabled, level or LEVEL, min_bytes or MIN_BODY_BYTES)
        self._encoder.set_compression(self._compression)

    def publish(self) -> None:
        self._attempt(self._writer.publish, "publishing the synced position of")

    def rotate(self, base: Draft) -> None:
        if self._state not in (_OPEN, LogState.WANTS_BASE):
            self._refuse()
        try:
            if self._state is _OPEN:
                self._writer.flush()
            self._writer.begin_segment(base)
        except OSError as error:
            self._fail(error, "rotating")
        self._state = LogState.OPEN

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Store a copy of the state after the last frame, so that the next opening can begin there."""
        self.force_sync()  # in every mode: if these frames were lost, the checkpoint might match frames written later
        if not self._writer.segment.size:
            return
        try:
            self._writer.write_checkpoint(Draft(FrameType.BASE, base, 1, 0, elapsed, wall, [body]))
        except OSError as error:
            self._fail(error, "writing a checkpoint in")

    def write_summary(self, body: bytes) -> None:
        self.force_sync()
        self._attempt(lambda: self._writer.write_summary(body), "writing a summary in")

    # -- reading -------------------------------------------------------------------------------------

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        self._check_readable()
        return self._reader.read(start, stop, self._writer.sequence, self._writer.offset, size_bytes)

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        self._check_readable()
        return self._reader.frames(self._writer.sequence, self._writer.offset, after)

    def offset_at(self, wall: int) -> int:
        self._check_readable()
        return self._reader.offset_at(wall, self._writer.offset)

    # -- segments and retention ----------------------------------------------------------------------

    def segments(self) -> list[SegmentFacts]:
        self._check_readable()
        return self._reader.segments()

    def readable_range(self) -> LogRange:
        self._check_readable()
        return self._reader.readable_range(lambda: (self._writer.offset, self._writer.sequence))

    def size_bytes(self) -> int:
        self._check_readable()
        return self._reader.size_bytes()

    def newest(self) -> SegmentFacts:
        self._check_readable()
        return self._reader.newest()

    def drop(self, count: int) -> int:
        if not count:
            return 0
        self.force_sync()
        try:
            check_removable(self._segments, 0, count - 1, spared=1)
            freed = 0
            for name in self._segments.names[:count]:
                freed += self._segments.segment(name).size
                self._segments.remove(name)
            return freed
        except OSError as error:
            self._fail(error, "dropping segments of")
        finally:
            self._reader.forget_positions()

    def rewrite(self, first: int, last: int, keep: Sequence[int]) -> int:
        self.force_sync()
        encoder = FrameEncoder(self.incarnation, self.partition, self._compression)
        try:
            check_removable(self._segments, first, last, spared=2)
            new = write_rewritten(self._files, self._segments, first, last, RunSet(keep), encoder)
        except OSError as error:
            raise storage_failed(error, "rewriting segments of", self.directory) from error
        try:
            return install_rewritten(self._segments, first, last, new)
        except OSError as error:
            self._fail(error, "rewriting segments of")
        finally:
            self._reader.forget_positions()

    def free_bytes(self) -> int:
        try:
            return self._files.free_bytes(self.directory)
        except OSError as error:
            raise storage_failed(error, "reading the free space of", self.directory) from error

    # -- opening and closing -------------------------------------------------------------------------

    def recover(self) -> Iterator[Frame | Gap]:
        if self._state is LogState.CLOSED:
            self._refuse()
        self._state = LogState.NOT_RECOVERED
        try:
            yield from self._open()
        except OSError as error:
            raise storage_failed(error, "opening", self.directory) from error

    def _open(self) -> Iterator[Frame | Gap]:
        segments, writer = self._segments, self._writer
        self.findings.clear()
        self._reader.forget_positions()
        for leftover in segments.load():
            self._files.remove(f"{self.directory}/{leftover}")
        synced = writer.load_synced()
        if segment_missing(synced, segments.names):
            synced = writer.publish_as_fsynced()
        if not segments.names:
            writer.create_first_segment()
        opening = LogOpening(self._files, segments, synced, self.findings)
        while opening.torn_rotation():
            self.findings.append(f"segment {segments.names[-1]} had no whole frame (a rotation was cut off) and was removed")
            segments.remove_newest()
        segments.open_newest()
        yield from opening.frames()
        writer.resume(opening.replay)
        if opening.unfit_checkpoint():
            writer.remove_checkpoint()
        self._finish_opening(opening)

    def _finish_opening(self, opening: LogOpening) -> None:
        """Cut or keep what follows the last valid frame, confirm the end, and set the state."""
        writer, end = self._writer, opening.replay.end
        name, size = writer.segment.name, writer.segment.size
        if opening.damaged:
            self.findings.append(f"segment {name} is damaged at its end and was not changed; the log continues in a new segment")
            self._state = LogState.WANTS_BASE
            return
        if size > end:
            self.findings.append(f"segment {name} ended in {size - end} bytes that are not a whole group of frames; they were cut")
            writer.cut(end)
        writer.confirm_end(opening.fsynced_bytes, self.durability)
        self._state = LogState.WANTS_BASE if writer.sync_failed else LogState.OPEN

    def reset(self) -> None:
        if self._state is LogState.CLOSED:
            self._refuse()
        try:
            self._reader.forget_positions()
            self._writer.truncate_to_synced()
        except OSError as error:
            self._fail(error, "resetting")
        self._state = LogState.NOT_RECOVERED

    def close(self) -> None:
        state, self._state = self._state, LogState.CLOSED
        try:
            if state is _OPEN:
                self._writer.flush()
                with contextlib.suppress(OSError):  # a missing index is rebuilt
                    self._segments.store_index(self._writer.segment)
        except OSError as error:
            raise storage_failed(error, "closing", self.directory) from error
        finally:
            self._release()

    def close_without_sync(self) -> None:
        """Close the log without writing anything. A forked child does this with its parent's log."""
        self._state = LogState.CLOSED
        self._release()

    def _release(self) -> None:
        self._segments.close()
        self._writer.close()

    # -- states and failures -------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], None], doing: str) -> None:
        if self._state is not _OPEN:
            self._refuse()
        try:
            step()
        except OSError as error:
            self._fail(error, doing)

    def _fail(self, error: OSError, doing: str) -> NoReturn:
        self._state = LogState.FAILED
        raise storage_failed(error, doing, self.directory) from error

    def _refuse(self) -> NoReturn:
        """Raise the error that says why the log does not accept the call now."""
        if self._state is LogState.CLOSED:
            raise BrokerClosed(f"the log {self.directory} is closed; open it again")
        if self._state is LogState.FAILED:
            raise StorageFailed(f"the log {self.directory} failed before; reset and recover it first")
        if self._state is LogState.NOT_RECOVERED:
            raise InvalidRequest(f"the log {self.directory} is not recovered; exhaust recover() first")
        raise InvalidRequest(f"the log {self.directory} must begin a new segment; call rotate() with a Base first")

    def _check_readable(self) -> None:
        if self._state in (LogState.CLOSED, LogState.NOT_RECOVERED):
            self._refuse()
